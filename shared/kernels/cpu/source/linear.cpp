// y = x w^T + bias with packed weights.
//
// Packing lays 32 outputs side by side: [out / 32][k] vectors of 32 fp32, or [out / 32][k / 2] times two vectors of 16
// pairs (k, k + 1) of bf16, which widen by one shift and one mask, or are multiplied as they are by AVX512-BF16.
// Few rows read each weight once from memory, in its own dtype. Many rows widen a panel once and reuse it from the
// cache, blocked over k (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication").
#include <algorithm>

#include "crew.h"
#include "gemm.h"
#include "ops.h"

namespace {

constexpr int64_t kDirectTile = 12;          // rows that share a weight as it is widened: it takes registers too
constexpr int64_t kDirectRows = 36;         // up to so many rows, weights are widened as they are used
constexpr int64_t kBlock = 512;             // k of a widened panel
constexpr int64_t kChunk = 16 * kRows;      // rows that use a widened panel
constexpr int64_t kGroup = 4;               // panels of a task
constexpr int64_t kTaskWork = 1 << 20;      // products of a task of few rows, so that tasks are neither tiny nor few
constexpr int64_t kAhead = 2048;            // bytes prefetched ahead of the stream of weights

template <typename T>
struct Words;  // of 32 bits that a row of x consists of, once laid out for the products
template <>
struct Words<float> {
  static constexpr int per_word = 1;
  static __m512i load(const float* x, __mmask16 kept) { return _mm512_maskz_loadu_epi32(kept, x); }
};
template <>
struct Words<bf16> {
#ifdef __AVX512BF16__
  static constexpr int per_word = 2;
  static __m512i load(const bf16* x, __mmask16 kept) { return _mm512_maskz_loadu_epi32(kept, x); }
#else
  static constexpr int per_word = 1;
  static __m512i load(const bf16* x, __mmask16) { return _mm512_castps_si512(load16(x)); }  // k is a multiple of 16
#endif
};

// rows of x as [word][rows]: what a step over k broadcasts lies side by side.
template <typename T>
void lay_rows(const T* x, int64_t k_size, int rows, float* out) {
  const int64_t words = k_size / Words<T>::per_word;
  const __mmask16 kept = __mmask16((1u << rows) - 1);
  for (int64_t w = 0; w < words; w += 16) {
    const int64_t count = std::min<int64_t>(16, words - w);
    __m512i v[16];
    for (int r = 0; r < 16; r++) v[r] = _mm512_setzero_si512();
    for (int r = 0; r < rows; r++)
      v[r] = Words<T>::load(x + r * k_size + w * Words<T>::per_word, __mmask16((1u << count) - 1));
    transpose16(v);
    for (int64_t i = 0; i < count; i++) _mm512_mask_storeu_epi32(out + (w + i) * rows, kept, v[i]);
  }
}

#ifdef __AVX512BF16__
template <int R>
void direct_tile(const float* a, const bf16* w, int64_t k, float* c) {
  __m512 sums[R][2];
#pragma GCC unroll 14
  for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int64_t j = 0; j < k; j += 2, a += R, w += 64) {
    _mm_prefetch((const char*)w + kAhead, _MM_HINT_T0);
    _mm_prefetch((const char*)w + kAhead + 64, _MM_HINT_T0);
    __m512bh low = (__m512bh)_mm512_loadu_si512(w), high = (__m512bh)_mm512_loadu_si512(w + 32);
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) {
      __m512bh x = (__m512bh)_mm512_castps_si512(_mm512_set1_ps(a[r]));
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], x, low);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], x, high);
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; r++) {
    _mm512_storeu_ps(c + r * kColumns, sums[r][0]);
    _mm512_storeu_ps(c + r * kColumns + 16, sums[r][1]);
  }
}
#else
template <int R>
void direct_tile(const float* a, const bf16* w, int64_t k, float* c) {
  constexpr int P = R < 4 ? 2 : 1;  // few rows: sums of even and odd k apart, so that enough products are under way
  __m512 sums[P][R][2];
#pragma GCC unroll 2
  for (int p = 0; p < P; p++)
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) sums[p][r][0] = sums[p][r][1] = _mm512_setzero_ps();
  const __m512i upper = _mm512_set1_epi32(0xffff0000);
  for (int64_t j = 0; j < k; j += 2, a += 2 * R, w += 64) {
    _mm_prefetch((const char*)w + kAhead, _MM_HINT_T0);
    _mm_prefetch((const char*)w + kAhead + 64, _MM_HINT_T0);
    __m512i v0 = _mm512_loadu_si512(w), v1 = _mm512_loadu_si512(w + 32);
    __m512 e0 = _mm512_castsi512_ps(_mm512_slli_epi32(v0, 16)), e1 = _mm512_castsi512_ps(_mm512_slli_epi32(v1, 16));
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) {
      __m512 x = _mm512_set1_ps(a[r]);
      sums[0][r][0] = _mm512_fmadd_ps(x, e0, sums[0][r][0]);
      sums[0][r][1] = _mm512_fmadd_ps(x, e1, sums[0][r][1]);
    }
    __m512 o0 = _mm512_castsi512_ps(_mm512_and_si512(v0, upper)), o1 = _mm512_castsi512_ps(_mm512_and_si512(v1, upper));
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) {
      __m512 x = _mm512_set1_ps(a[R + r]);
      sums[P - 1][r][0] = _mm512_fmadd_ps(x, o0, sums[P - 1][r][0]);
      sums[P - 1][r][1] = _mm512_fmadd_ps(x, o1, sums[P - 1][r][1]);
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      __m512 sum = P == 2 ? _mm512_add_ps(sums[0][r][v], sums[P - 1][r][v]) : sums[0][r][v];
      _mm512_storeu_ps(c + r * kColumns + 16 * v, sum);
    }
}
#endif
template <int R>
void direct_tile(const float* a, const float* w, int64_t k, float* c) {
  multiply_tile<R>(a, R, w, k, c, false);
}

// y[rows][32] = c + bias, rounded.
template <typename T>
void finish(const float* c, int rows, const T* bias, T* y, int64_t y_step) {
  __m512 b[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  if (bias) b[0] = load16(bias), b[1] = load16(bias + 16);
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < 2; v++) store16(y + r * y_step + 16 * v, _mm512_add_ps(_mm512_loadu_ps(c + r * kColumns + 16 * v), b[v]));
}

template <typename T>
struct Product {
  const float* rows;  // laid out, tile after tile
  const T *weight, *bias;
  T* y;
  int64_t k_size, n_size;
  Tiles tiles;

  int64_t words() const { return k_size / Words<T>::per_word; }
  const T* panel(int64_t p) const { return weight + p * kColumns * k_size; }
  void put(const float* c, int64_t row, int count, int64_t p) const {
    finish(c, count, bias ? bias + p * kColumns : nullptr, y + row * n_size + p * kColumns, n_size);
  }
};

template <typename T>
void direct_panel(const Product<T>& job, int64_t p) {
  const Tiles& tiles = job.tiles;
  alignas(64) float c[kRows * kColumns];
  for (int64_t t = 0; t < tiles.count; t++)
    with_rows(tiles.size(t), [&](auto rows) {
      direct_tile<rows.value>(job.rows + tiles.first(t) * job.words(), job.panel(p), job.k_size, c);
      job.put(c, tiles.first(t), rows.value, p);
    });
}

// k x 32 weights, wide; fp32 ones lie so already.
inline const float* widen(const float* w, int64_t, float*) { return w; }
inline const float* widen(const bf16* w, int64_t k, float* out) {
  const __m512i upper = _mm512_set1_epi32(0xffff0000);
  for (int64_t j = 0; j < k; j += 2)
    for (int v = 0; v < 2; v++) {
      __m512i pairs = _mm512_loadu_si512(w + 32 * (j + v));
      _mm512_store_si512(out + 32 * j + 16 * v, _mm512_slli_epi32(pairs, 16));
      _mm512_store_si512(out + 32 * (j + 1) + 16 * v, _mm512_and_si512(pairs, upper));
    }
  return out;
}

// Tiles [low, high) times panels [first, last).
template <typename T>
void blocked(const Product<T>& job, int64_t low, int64_t high, int64_t first, int64_t last) {
  thread_local Workspace workspace;
  const Tiles& tiles = job.tiles;
  const int64_t top = tiles.first(low), rows = tiles.first(high) - top;
  float* wide = workspace.floats(kColumns * (kBlock + kGroup * rows));
  float* sums = wide + kColumns * kBlock;  // [panel][row][32]
  for (int64_t k = 0; k < job.k_size; k += kBlock) {
    const int64_t depth = std::min(kBlock, job.k_size - k);
    for (int64_t p = first; p < last; p++) {
      const float* b = widen(job.panel(p) + k * kColumns, depth, wide);
      for (int64_t t = low; t < high; t++)
        with_rows(tiles.size(t), [&](auto r) {
          float* c = sums + ((p - first) * rows + tiles.first(t) - top) * kColumns;
          const float* a = job.rows + tiles.first(t) * job.k_size + k * r.value;
          multiply_tile<r.value>(a, r.value, b, depth, c, k > 0);
          if (k + depth == job.k_size) job.put(c, tiles.first(t), r.value, p);
        });
    }
  }
}

template <typename T>
void linear(const T* x, const T* weight, const T* bias, T* y, float* scratch, int64_t m, int64_t k, int64_t n) {
  const bool direct = m <= kDirectRows || Words<T>::per_word == 2;
  const Tiles tiles(m, direct && Words<T>::per_word == 1 ? kDirectTile : kRows);
  const Product<T> job{scratch, weight, bias, y, k, n, tiles};
  const int64_t panels = n / kColumns;
  const int64_t chunks = direct ? 1 : (m + kChunk - 1) / kChunk, groups = (panels + kGroup - 1) / kGroup;
  parallel_ranges(tiles.count, m < kChunk ? tiles.count : 2, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
      lay_rows(x + tiles.first(t) * k, k, tiles.size(t), scratch + tiles.first(t) * job.words());
  });
  if (direct) {
    const int64_t grain = std::max<int64_t>(1, kTaskWork / (kColumns * k * (m + 8)));
    parallel_ranges(panels, grain, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; p++) direct_panel(job, p);
    });
  } else {
    parallel_for(chunks * groups, [&](int64_t i) {
      const int64_t chunk = i % chunks, p = i / chunks * kGroup;
      const int64_t low = chunk * tiles.count / chunks, high = (chunk + 1) * tiles.count / chunks;
      blocked(job, low, high, p, std::min(p + kGroup, panels));
    });
  }
}

// Rows of 16-bit pairs or of 32-bit numbers, 32 of them, to [word][32], in place.
void pack_panel(uint32_t* panel, int64_t words, uint32_t* copy) {
  std::memcpy(copy, panel, kColumns * words * 4);
  for (int64_t w = 0; w < words; w += 16)
    for (int half = 0; half < 2; half++) {
      const int64_t count = std::min<int64_t>(16, words - w);
      __m512i v[16];
      for (int r = 0; r < 16; r++)
        v[r] = _mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), copy + (16 * half + r) * words + w);
      transpose16(v);
      for (int64_t i = 0; i < count; i++) _mm512_storeu_si512(panel + (w + i) * kColumns + 16 * half, v[i]);
    }
}

}  // namespace

// w [n, k], contiguous, becomes packed in place; n a multiple of 32, k of 16.
extern "C" void tandem_pack_linear(void* w, int64_t k, int64_t n, int is_bf16) {
  const int64_t words = is_bf16 ? k / 2 : k;
  parallel_for(n / kColumns, [&](int64_t p) {
    thread_local Workspace workspace;
    pack_panel((uint32_t*)w + p * kColumns * words, words, (uint32_t*)workspace.floats(kColumns * words));
  });
}

// x [m, k], packed w, bias [n] or null, y [m, n], contiguous; scratch of m k floats; n a multiple of 32, k of 16.
extern "C" void tandem_linear(
    const void* x, const void* w, const void* bias, void* y, float* scratch, int64_t m, int64_t k, int64_t n, int is_bf16) {
  if (is_bf16)
    linear((const bf16*)x, (const bf16*)w, (const bf16*)bias, (bf16*)y, scratch, m, k, n);
  else
    linear((const float*)x, (const float*)w, (const float*)bias, (float*)y, scratch, m, k, n);
}
