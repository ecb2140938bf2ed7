// Ops between the matrix products, each in one pass over its rows. Rounding follows shared/kernels' references.
#include <cmath>
#include <type_traits>

#include "kv_codes.h"
#include "ops.h"
#include "simd.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kMostRotated = 512, kMostRank = 2048;  // of a head, of a latent: launch.py counts on them
constexpr int64_t kTaskElements = 32768;  // below, waking another thread costs more than it saves

// body(row) for all rows of `size` elements.
template <typename F>
void for_rows(int64_t rows, int64_t size, const F& body) {
  const int64_t grain = kTaskElements / size + 1;
  parallel_ranges(rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) body(r);
  });
}

template <typename T>
Floats mean_of(const T* x, int64_t size) {
  Floats sums = zeros();
  for (int64_t i = 0; i < size; i += 16) sums = sums + load16(x + i);
  return all(sum_of(sums) / float(size));
}

template <bool Centered = false, typename T>
void norm_row(const T* x, const T* weight, T* y, int64_t size, float eps) {
  const Floats mean = Centered ? mean_of(x, size) : zeros();
  auto read = [&](int64_t i) { return Centered ? load16(x + i) - mean : load16(x + i); };
  Floats squares = zeros();
  for (int64_t i = 0; i < size; i += 16) {
    const Floats v = read(i);
    squares = plus_product(squares, v, v);
  }
  const Floats scale = all(1.0f / std::sqrt(sum_of(squares) / float(size) + eps));
  for (int64_t i = 0; i < size; i += 16) store16(y + i, rounded_as(y, read(i) * scale) * load16(weight + i));
}

template <typename T>
void rms_norm(
    const T* x, const T* residual, const T* weight, T* y, T* sum, int64_t rows, int64_t size, float eps, bool is_centered) {
  for_rows(rows, size, [&](int64_t r) {
    const T* row = x + r * size;
    if (residual) {
      for (int64_t i = 0; i < size; i += 16)
        store16(sum + r * size + i, load16(row + i) + load16(residual + r * size + i));
      row = sum + r * size;
    }
    if (!weight) return;
    (is_centered ? norm_row<true, T> : norm_row<false, T>)(row, weight, y + r * size, size, eps);
  });
}

enum Gate { kSilu = 0, kGeluTanh = 1, kClamped = 2 };  // shared/kernels/activation/activations.py

// x / (1 + exp(-z))
inline Floats times_sigmoid(Floats x, Floats z) {
  const Floats negated = larger(zeros() - z, all(-87.0f));
  const Floats e = exp16(smaller(negated, all(104.0f)));  // infinite, and the result 0, from 88.7 on
  return x / (all(1.0f) + e);
}

template <Gate G>
inline Floats gated(Floats g, float alpha) {
  if (G == kSilu) return times_sigmoid(g, g);
  if (G == kClamped) return times_sigmoid(g, g * all(alpha));
  // (1 + tanh(u)) / 2 is the sigmoid of 2u.
  const Floats cubed = g * g * g;
  return times_sigmoid(g, all(1.59576912f) * plus_product(g, all(0.044715f), cubed));
}

template <Gate G, typename T>
void act_and_mul(const T* gate_up, T* y, int64_t rows, int64_t size, float alpha, float limit) {
  for_rows(rows, 4 * size, [&](int64_t r) {
    const T *gate = gate_up + 2 * r * size, *up = gate + size;
    for (int64_t i = 0; i < size; i += 16) {
      Floats g = load16(gate + i), u = load16(up + i);
      if (G == kClamped) {  // of two, the second one where one is NaN
        g = smaller(all(limit), g);
        u = rounded_as(y, larger(all(-limit), smaller(all(limit), u)) + all(1.0f));
      }
      store16(y + r * size + i, rounded_as(y, gated<G>(g, alpha)) * u);
    }
  });
}

template <typename T>
void act_and_mul(const T* gate_up, T* y, int64_t rows, int64_t size, int gate, float alpha, float limit) {
  if (gate == kSilu) return act_and_mul<kSilu>(gate_up, y, rows, size, alpha, limit);
  if (gate == kGeluTanh) return act_and_mul<kGeluTanh>(gate_up, y, rows, size, alpha, limit);
  act_and_mul<kClamped>(gate_up, y, rows, size, alpha, limit);
}

// One head, head_dim a multiple of 32: pairs (i, i + head_dim / 2), each product rounded as torch rounds it. The sums
// are rounded once, to y's dtype.
template <typename T, typename Out>
void rotate_head(const T* x, const T* cos, const T* sin, Out* y, int64_t dim) {
  for (int64_t i = 0; i < dim / 2; i += 16) {
    const Floats a = load16(x + i), b = load16(x + dim / 2 + i), c = load16(cos + i), s = load16(sin + i);
    const Floats first = rounded_as(x, a * c) - rounded_as(x, b * s);
    const Floats second = rounded_as(x, b * c) + rounded_as(x, a * s);
    store16(y + i, first);
    store16(y + dim / 2 + i, second);
  }
}

template <typename T>
void copy_head(const T* x, T* y, int64_t dim) {
  std::memcpy(y, x, dim * sizeof(T));
}
inline void copy_head(const float* x, bf16* y, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 16) store16(y + i, load16(x + i));
}

template <typename KV, typename T>
void rotate_and_write(
    const T* query, const T* key, const T* value, const int64_t* strides, const T* cos, const T* sin, const PoolView& pool,
    const int64_t* slots, const T* q_norm, const T* k_norm, float eps, T* out, const int64_t* sizes) {
  const int64_t tokens = sizes[0], heads = sizes[1], layer = sizes[2];
  const int64_t kv_heads = pool.kv_heads, dim = pool.dim, block_size = pool.block_size;
  for_rows(tokens, (heads + 2 * kv_heads) * dim, [&](int64_t t) {
    T normed[512];
    const T *c = cos + t * dim, *s = sin + t * dim;
    for (int64_t h = 0; h < heads; h++) {
      const T* x = query + t * strides[0] + h * dim;
      if (q_norm) norm_row(x, q_norm, normed, dim, eps), x = normed;
      rotate_head(x, c, s, out + (t * heads + h) * dim, dim);
    }
    int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
    char* keys = (char*)pool.memory + block * pool.block_bytes + layer * pool.layer_bytes;
    for (int64_t h = 0; h < kv_heads; h++) {
      const T* x = key + t * strides[1] + h * dim;
      if (k_norm) norm_row(x, k_norm, normed, dim, eps), x = normed;
      char *run = keys + h * pool.head_bytes, *values = run + pool.plane_bytes;
      KV *place = (KV*)run + offset * dim, *of_value = (KV*)values + offset * dim;
      const T* v = value + t * strides[2] + h * dim;
      if constexpr (kIsCode<KV>) {
        T placed[512];
        rotate_head(x, c, s, placed, dim);
        put_codes(placed, place, (float*)(run + block_size * dim) + offset, dim);
        put_codes(v, of_value, (float*)(values + block_size * dim) + offset, dim);
      } else {
        rotate_head(x, c, s, place, dim);
        copy_head(v, of_value, dim);
      }
    }
  });
}

// Pairs (2i, 2i + 1) become pairs (i, i + dim / 2).
template <typename T>
const T* in_halves(const T* x, T* halves, int64_t dim) {
  for (int64_t i = 0; i < dim / 2; i++) halves[i] = x[2 * i], halves[dim / 2 + i] = x[2 * i + 1];
  return halves;
}

template <typename KV, typename T>
void rotate_and_write_latent(
    const T* query, const T* latent, const int64_t* strides, const T* cos, const T* sin, const PoolView& pool,
    const int64_t* slots, const T* norm, float eps, T* out, const int64_t* sizes, bool is_interleaved) {
  const int64_t tokens = sizes[0], heads = sizes[1], nope = sizes[2], rope = sizes[3], rank = sizes[4];
  const int64_t block_size = pool.block_size, layer = sizes[5], dim = nope + rope;
  for_rows(tokens, heads * dim + rank + rope, [&](int64_t t) {
    T halves[kMostRotated], normed[kMostRank];
    const T *c = cos + t * rope, *s = sin + t * rope;
    auto paired = [&](const T* x) { return is_interleaved ? in_halves(x, halves, rope) : x; };
    for (int64_t h = 0; h < heads; h++) {
      const T* x = query + t * strides[0] + h * dim;
      T* y = out + (t * heads + h) * dim;
      copy_head(x, y, nope);
      rotate_head(paired(x + nope), c, s, y + nope, rope);
    }
    const T* x = latent + t * strides[1];
    char* run = (char*)pool.memory + slots[t] / block_size * pool.block_bytes + layer * pool.layer_bytes;
    KV* place = (KV*)run + slots[t] % block_size * (rank + rope);
    norm_row(x, norm, normed, rank, eps);
    copy_head(normed, place, rank);
    rotate_head(paired(x + rank), c, s, place + rank, rope);
  });
}

}  // namespace

// query [tokens, heads, nope + rope] with strides[0] elements between tokens, latent [tokens, rank + rope] with
// strides[1]; cos, sin [tokens, rope]; norm [rank]; out as query, contiguous; sizes: tokens, heads, nope, rope (a multiple
// of 32, at most kMostRotated), rank (of 16, at most kMostRank), layer. The pool is of one plane, without codes, in fp32
// only beside a query in fp32.
extern "C" void tandem_rotate_and_write_latent(
    const void* query, const void* latent, const int64_t* strides, const void* cos, const void* sin,
    const PoolView* pool, const int64_t* slots, const void* norm, float eps, void* out, const int64_t* sizes,
    int is_interleaved, int is_bf16) {
  auto run = [&](auto element) {
    using T = decltype(element);
    with_dtype<T>(*pool, [&](auto* stored) {
      using KV = std::remove_pointer_t<decltype(stored)>;
      if constexpr (!kIsCode<KV>)
        rotate_and_write_latent<KV>(
            (const T*)query, (const T*)latent, strides, (const T*)cos, (const T*)sin, *pool, slots, (const T*)norm, eps,
            (T*)out, sizes, is_interleaved);
    });
  };
  is_bf16 ? run(bf16{}) : run(float{});
}

// x, y, residual, sum [rows, size], weight [size]; residual and sum may be null together, and beside them weight and y;
// size a multiple of 16.
extern "C" void tandem_rms_norm(
    const void* x, const void* residual, const void* weight, void* y, void* sum, int64_t rows, int64_t size, float eps,
    int is_centered, int is_bf16) {
  auto run = [&](auto element) {
    using T = decltype(element);
    rms_norm((const T*)x, (const T*)residual, (const T*)weight, (T*)y, (T*)sum, rows, size, eps, is_centered);
  };
  is_bf16 ? run(bf16{}) : run(float{});
}

// query [tokens, heads, dim], changed in place, times factors [tokens, dim]; dim a multiple of 16.
extern "C" void tandem_temper(
    void* query, const void* factors, int64_t tokens, int64_t heads, int64_t dim, int is_bf16) {
  auto run = [&](auto element) {
    using T = decltype(element);
    for_rows(tokens, heads * dim, [&](int64_t t) {
      T* x = (T*)query + t * heads * dim;
      const T* factor = (const T*)factors + t * dim;
      for (int64_t i = 0; i < heads * dim; i += 16) store16(x + i, load16(x + i) * load16(factor + i % dim));
    });
  };
  is_bf16 ? run(bf16{}) : run(float{});
}

// gate_up [rows, 2 size], y [rows, size]; size a multiple of 16; gate as in Gate.
extern "C" void tandem_act_and_mul(
    const void* gate_up, void* y, int64_t rows, int64_t size, int gate, float alpha, float limit, int is_bf16) {
  if (is_bf16)
    act_and_mul((const bf16*)gate_up, (bf16*)y, rows, size, gate, alpha, limit);
  else
    act_and_mul((const float*)gate_up, (float*)y, rows, size, gate, alpha, limit);
}

// query [tokens, heads, dim] (and key, value with kv_heads) with strides[] elements between tokens; cos, sin
// [tokens, dim]; out [tokens, heads, dim]; sizes: tokens, heads, layer. The pool is of two planes, in fp32 only beside a
// query in fp32; dim is a multiple of 32, at most 512.
extern "C" void tandem_rotate_and_write(
    const void* query, const void* key, const void* value, const int64_t* strides, const void* cos, const void* sin,
    const PoolView* pool, const int64_t* slots, const void* q_norm, const void* k_norm, float eps, void* out,
    const int64_t* sizes, int is_bf16) {
  auto run = [&](auto element) {
    using T = decltype(element);
    with_dtype<T>(*pool, [&](auto* stored) {
      rotate_and_write<std::remove_pointer_t<decltype(stored)>>(
          (const T*)query, (const T*)key, (const T*)value, strides, (const T*)cos, (const T*)sin, *pool, slots,
          (const T*)q_norm, (const T*)k_norm, eps, (T*)out, sizes);
    });
  };
  is_bf16 ? run(bf16{}) : run(float{});
}
