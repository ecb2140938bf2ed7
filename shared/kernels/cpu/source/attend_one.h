// A decode step's attention: one query token, so keys and values are read once, where they lie, in their own dtype.
#pragma once

#include <cmath>
#include <limits>

#include "gemm.h"
#include "pool.h"

// 16 keys at a time, transposed in registers: a vector holds one dimension (fp32) or two (bf16) of all 16.
template <int G>
void score_keys(const float* key, int64_t dim, int64_t count, const float* query, float* scores, int64_t step) {
  __m512 sums[G];
  for (int g = 0; g < G; g++) sums[g] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += 16) {
    __m512i v[16];
    for (int t = 0; t < 16; t++) v[t] = t < count ? _mm512_loadu_si512(key + t * dim + d) : _mm512_setzero_si512();
    transpose16(v);
    for (int i = 0; i < 16; i++)
      for (int g = 0; g < G; g++)
        sums[g] = _mm512_fmadd_ps(_mm512_set1_ps(query[g * dim + d + i]), _mm512_castsi512_ps(v[i]), sums[g]);
  }
  for (int g = 0; g < G; g++) _mm512_storeu_ps(scores + g * step, sums[g]);
}

template <int G>
void score_keys(const bf16* key, int64_t dim, int64_t count, const float* query, float* scores, int64_t step) {
  __m512 even[G], odd[G];
  for (int g = 0; g < G; g++) even[g] = odd[g] = _mm512_setzero_ps();
  const __m512i upper = _mm512_set1_epi32(0xffff0000);
  for (int64_t d = 0; d < dim; d += 32) {
    const int64_t words = dim - d < 32 ? (dim - d) / 2 : 16;
    const __mmask16 kept = __mmask16((1u << words) - 1);
    __m512i v[16];
    for (int t = 0; t < 16; t++)
      v[t] = t < count ? _mm512_maskz_loadu_epi32(kept, key + t * dim + d) : _mm512_setzero_si512();
    transpose16(v);
    for (int i = 0; i < words; i++) {
      __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(v[i], 16));
      __m512 high = _mm512_castsi512_ps(_mm512_and_si512(v[i], upper));
      for (int g = 0; g < G; g++) {
        const float* q = query + g * dim + d + 2 * i;
        even[g] = _mm512_fmadd_ps(_mm512_set1_ps(q[0]), low, even[g]);
        odd[g] = _mm512_fmadd_ps(_mm512_set1_ps(q[1]), high, odd[g]);
      }
    }
  }
  for (int g = 0; g < G; g++) _mm512_storeu_ps(scores + g * step, _mm512_add_ps(even[g], odd[g]));
}

// out[G][16 V] += weights of `count` keys times 16 V dimensions of their values.
template <int G, int V, typename T>
void add_values(const T* value, int64_t dim, int64_t count, const float* weights, int64_t step, float* out) {
  __m512 sums[G][V];
  for (int g = 0; g < G; g++)
    for (int v = 0; v < V; v++) sums[g][v] = _mm512_loadu_ps(out + g * dim + 16 * v);
  for (int64_t t = 0; t < count; t++) {
    __m512 x[V];
    for (int v = 0; v < V; v++) x[v] = load16(value + t * dim + 16 * v);
    for (int g = 0; g < G; g++) {
      __m512 w = _mm512_set1_ps(weights[g * step + t]);
      for (int v = 0; v < V; v++) sums[g][v] = _mm512_fmadd_ps(w, x[v], sums[g][v]);
    }
  }
  for (int g = 0; g < G; g++)
    for (int v = 0; v < V; v++) _mm512_storeu_ps(out + g * dim + 16 * v, sums[g][v]);
}

template <int G, typename T>
void add_all_values(const T* value, int64_t dim, int64_t count, const float* weights, int64_t step, float* out) {
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64) add_values<G, 4>(value + d, dim, count, weights, step, out + d);
  for (; d < dim; d += 16) add_values<G, 1>(value + d, dim, count, weights, step, out + d);
}

// Scores [size], a multiple of 16, to 2^(score - top), in place; returns their sum.
inline float weigh(float* row, int64_t size) {
  __m512 top = _mm512_set1_ps(-std::numeric_limits<float>::infinity()), total = _mm512_setzero_ps();
  for (int64_t t = 0; t < size; t += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(row + t));
  const __m512 shift = _mm512_set1_ps(_mm512_reduce_max_ps(top)), least = _mm512_set1_ps(-126.0f);
  for (int64_t t = 0; t < size; t += 16) {
    __m512 x = _mm512_sub_ps(_mm512_loadu_ps(row + t), shift);
    __m512 e = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), exp2_16(_mm512_max_ps(least, x)));
    _mm512_storeu_ps(row + t, e);
    total = _mm512_add_ps(total, e);
  }
  return _mm512_reduce_add_ps(total);
}

// G query heads from `first` on, of the KV head that the pool is seen by. query, out: [heads of it][dim].
template <int G, typename T>
void attend_heads(const Pool<T>& pool, const T* query, T* out, int64_t length, Workspace& workspace) {
  const int64_t dim = pool.s.dim, low = pool.s.first_seen(length - 1), step = (length - low + 15) / 16 * 16 + 16;
  float* wide = workspace.floats(G * (2 * dim + step));
  float *sums = wide + G * dim, *scores = sums + G * dim;
  const __m512 scale = _mm512_set1_ps(pool.s.scale * 1.44269504f);  // to powers of 2
  for (int64_t i = 0; i < G * dim; i += 16) {
    _mm512_storeu_ps(wide + i, _mm512_mul_ps(load16(query + i), scale));
    _mm512_storeu_ps(sums + i, _mm512_setzero_ps());
  }
  // A run is too short for the processor to find out where the next one lies.
  auto fetch = [&](int64_t position, int64_t to_part) {
    if (position >= length) return;
    const int64_t block_size = pool.s.block_size;
    const T* part = pool.keys(position / block_size) + position % block_size * dim + to_part;
    for (int64_t i = 0; i < 16 * dim; i += 64 / int64_t(sizeof(T))) _mm_prefetch((const char*)(part + i), _MM_HINT_T0);
  };
  pool.runs(low, length, 16, [&](const T* key, int64_t position, int64_t count) {
    fetch(position + count, 0);
    score_keys<G>(key, dim, count, wide, scores + position - low, step);
  });
  float totals[G];
  for (int g = 0; g < G; g++) {
    float* row = scores + g * step;
    const __mmask16 past = __mmask16(0xffffu << ((length - low) % 16));
    if ((length - low) % 16)
      _mm512_mask_storeu_ps(row + (length - low) / 16 * 16, past, _mm512_set1_ps(-std::numeric_limits<float>::infinity()));
    totals[g] = weigh(row, step - 16);
  }
  pool.runs(low, length, 16, [&](const T* key, int64_t position, int64_t count) {
    fetch(position + count, pool.to_values());
    add_all_values<G>(key + pool.to_values(), dim, count, scores + position - low, step, sums);
  });
  for (int64_t i = 0; i < G * dim; i += 16)
    store16(out + i, _mm512_div_ps(_mm512_loadu_ps(sums + i), _mm512_set1_ps(totals[i / dim])));
}

// One query token at position length - 1, all query heads of the KV head, four at a time.
template <typename T>
void attend_one(const Pool<T>& pool, const T* query, T* out, int64_t length, Workspace& workspace) {
  const int64_t group = pool.s.group(), dim = pool.s.dim;
  query += pool.head * group * dim;
  out += pool.head * group * dim;
  int64_t g = 0;
  for (; g + 4 <= group; g += 4) attend_heads<4>(pool, query + g * dim, out + g * dim, length, workspace);
  switch (group - g) {
    case 3: attend_heads<3>(pool, query + g * dim, out + g * dim, length, workspace); break;
    case 2: attend_heads<2>(pool, query + g * dim, out + g * dim, length, workspace); break;
    case 1: attend_heads<1>(pool, query + g * dim, out + g * dim, length, workspace); break;
  }
}
