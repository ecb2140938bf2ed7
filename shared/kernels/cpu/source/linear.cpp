// y = x w^T + bias with packed weights.
//
// Packing lays 32 outputs side by side: [out / 32][k] vectors of 32 fp32, or [out / 32][k / 2] times two vectors of 16
// pairs (k, k + 1) of bf16, which widen by one shift and one mask, or are multiplied as they are by AVX512-BF16.
// Few rows read each weight once from memory, in its own dtype. Many rows widen a panel once and reuse it from the
// cache, blocked over k (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication").
// Panels of bf16 may be tight (panels.h); few rows open them as they go.
#include <algorithm>

#include "crew.h"
#include "ops.h"
#include "panels.h"

namespace {

constexpr int64_t kDirectTile = 12;          // rows that share a weight as it is widened: it takes registers too
constexpr int64_t kDirectRows = 36;         // up to so many rows, weights are widened as they are used
constexpr int64_t kBlock = 512;             // k of a widened panel
constexpr int64_t kChunk = 16 * kRows;      // rows that use a widened panel
constexpr int64_t kTaskPanels = 4;          // of a task of many rows
constexpr int64_t kTaskWork = 1 << 20;      // products of a task of few rows, so that tasks are neither tiny nor few

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

template <int R>
void direct_tile(const float* a, const float* w, int64_t k, float* c) {
  multiply_tile<R>(a, R, w, k, c, false);
}

#ifdef __AVX512BF16__
template <int R>
void direct_tile(const float* a, const PlainPanel& panel, int64_t k, float* c) {
  __m512 sums[R][2];
#pragma GCC unroll 14
  for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int64_t j = 0; j < k; j += kGroupK) {
    const auto group = panel.group(j);
    group.prefetch();
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, a += R) {
      const Pairs pairs = group.half(half);
#pragma GCC unroll 14
      for (int r = 0; r < R; r++) {
        __m512bh x = (__m512bh)_mm512_castps_si512(_mm512_set1_ps(a[r]));
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], x, (__m512bh)pairs.low);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], x, (__m512bh)pairs.high);
      }
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; r++) {
    _mm512_storeu_ps(c + r * kColumns, sums[r][0]);
    _mm512_storeu_ps(c + r * kColumns + 16, sums[r][1]);
  }
}
#else
// A group's halves are opened one after the other: 12 rows' sums leave registers for one.
template <int R, typename Panel>
void direct_tile(const float* a, const Panel& panel, int64_t k, float* c) {
  constexpr int P = R < 4 ? 2 : 1;  // few rows: sums of even and odd k apart, so that enough products are under way
  __m512 sums[P][R][2];
#pragma GCC unroll 2
  for (int p = 0; p < P; p++)
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) sums[p][r][0] = sums[p][r][1] = _mm512_setzero_ps();
  const float* row = a;
  for (int64_t j = 0; j < k; j += kGroupK) {
    const auto group = panel.group(j);
    group.prefetch();
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const Pairs pairs = group.half(half);
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++, row += R) {
        const __m512 low = i ? odd_of(pairs.low) : even_of(pairs.low), high = i ? odd_of(pairs.high) : even_of(pairs.high);
        __m512(&own)[R][2] = sums[i % P];
#pragma GCC unroll 14
        for (int r = 0; r < R; r++) {
          const __m512 x = _mm512_set1_ps(row[r]);
          own[r][0] = _mm512_fmadd_ps(x, low, own[r][0]);
          own[r][1] = _mm512_fmadd_ps(x, high, own[r][1]);
        }
      }
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      __m512 sum = P == 2 ? _mm512_add_ps(sums[0][r][v], sums[P - 1][r][v]) : sums[0][r][v];
      _mm512_storeu_ps(c + r * kColumns + 16 * v, sum);
    }
  panel.each_rare(0, k, [&](int64_t j, int64_t output, float weight) {
    for (int r = 0; r < R; r++) c[r * kColumns + output] += a[j * R + r] * weight;
  });
}
#endif

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
  int64_t k_size, n_size, tight_bytes;  // from a tight panel to the next; 0: the panels are not tight
  Tiles tiles;

  int64_t words() const { return k_size / Words<T>::per_word; }
  void put(const float* c, int64_t row, int count, int64_t p) const {
    finish(c, count, bias ? bias + p * kColumns : nullptr, y + row * n_size + p * kColumns, n_size);
  }
};

// Calls f with panel p, as what it is.
template <typename F>
auto with_panel(const Product<float>& job, int64_t p, F&& f) {
  return f(job.weight + p * kColumns * job.k_size);
}
template <typename F>
auto with_panel(const Product<bf16>& job, int64_t p, F&& f) {
#ifndef __AVX512BF16__
  if (job.tight_bytes) return f(TightPanel((const std::byte*)job.weight + p * job.tight_bytes, job.k_size));
#endif
  return f(PlainPanel{job.weight + p * kColumns * job.k_size});
}

template <typename T>
void direct_panel(const Product<T>& job, int64_t p) {
  const Tiles& tiles = job.tiles;
  alignas(64) float c[kRows * kColumns];
  with_panel(job, p, [&](const auto& panel) {
    for (int64_t t = 0; t < tiles.count; t++)
      with_rows(tiles.size(t), [&](auto r) {
        direct_tile<r.value>(job.rows + tiles.first(t) * job.words(), panel, job.k_size, c);
        job.put(c, tiles.first(t), r.value, p);
      });
  });
}

// Weights of `count` k from `first` on, wide: [k][32]; fp32 ones lie so already.
inline const float* widen(const float* panel, int64_t first, int64_t, float*) { return panel + first * kColumns; }
template <typename Panel>
const float* widen(const Panel& panel, int64_t first, int64_t count, float* out) {
  for (int64_t j = 0; j < count; j += 2) {
    const Pairs pairs = panel.group(first + j / kGroupK * kGroupK).half(j % kGroupK / 2);
    float *even = out + kColumns * j, *odd = even + kColumns;
    _mm512_store_ps(even, even_of(pairs.low));
    _mm512_store_ps(even + 16, even_of(pairs.high));
    _mm512_store_ps(odd, odd_of(pairs.low));
    _mm512_store_ps(odd + 16, odd_of(pairs.high));
  }
  panel.each_rare(first, first + count, [&](int64_t k, int64_t output, float weight) {
    out[(k - first) * kColumns + output] = weight;
  });
  return out;
}

// Tiles [low, high) times panels [first, last).
template <typename T>
void blocked(const Product<T>& job, int64_t low, int64_t high, int64_t first, int64_t last) {
  thread_local Workspace workspace;
  const Tiles& tiles = job.tiles;
  const int64_t top = tiles.first(low), rows = tiles.first(high) - top;
  float* wide = workspace.floats(kColumns * (kBlock + kTaskPanels * rows));
  float* sums = wide + kColumns * kBlock;  // [panel][row][32]
  for (int64_t k = 0; k < job.k_size; k += kBlock) {
    const int64_t depth = std::min(kBlock, job.k_size - k);
    for (int64_t p = first; p < last; p++) {
      const float* b = with_panel(job, p, [&](const auto& panel) { return widen(panel, k, depth, wide); });
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
void linear(
    const T* x, const T* weight, int64_t tight_bytes, const T* bias, T* y, float* scratch, int64_t m, int64_t k,
    int64_t n) {
  const bool direct = m <= kDirectRows || Words<T>::per_word == 2;
  const Tiles tiles(m, direct && Words<T>::per_word == 1 ? kDirectTile : kRows);
  const Product<T> job{scratch, weight, bias, y, k, n, tight_bytes, tiles};
  const int64_t panels = n / kColumns;
  const int64_t chunks = direct ? 1 : (m + kChunk - 1) / kChunk, groups = (panels + kTaskPanels - 1) / kTaskPanels;
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
      const int64_t chunk = i % chunks, p = i / chunks * kTaskPanels;
      const int64_t low = chunk * tiles.count / chunks, high = (chunk + 1) * tiles.count / chunks;
      blocked(job, low, high, p, std::min(p + kTaskPanels, panels));
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

// x [m, k], packed w, in tight panels every `tight_bytes` unless that is 0, bias [n] or null, y [m, n]; all contiguous;
// scratch of m k floats; n a multiple of 32, k of 16.
extern "C" void tandem_linear(
    const void* x, const void* w, int64_t tight_bytes, const void* bias, void* y, float* scratch, int64_t m, int64_t k,
    int64_t n, int is_bf16) {
  if (is_bf16)
    linear((const bf16*)x, (const bf16*)w, tight_bytes, (const bf16*)bias, (bf16*)y, scratch, m, k, n);
  else
    linear((const float*)x, (const float*)w, 0, (const float*)bias, (float*)y, scratch, m, k, n);
}
