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

// What is known of G query heads so far: the weighted values, and the sum of the weights, both over 2^top.
struct Sums {
  float* values;  // [G][dim]
  float* totals;  // [G][16], to be added up
  float* tops;    // [G]
};

// Takes in up to 16 keys and their values. query [G][dim], scaled to powers of 2.
template <int G, typename T>
void take_in(const T* key, const T* value, int64_t dim, int64_t count, const float* query, const Sums& so_far) {
  alignas(64) float weights[G * 16];
  score_keys<G>(key, dim, count, query, weights, 16);
  const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity()), least = _mm512_set1_ps(-126.0f);
  const __mmask16 there = __mmask16(0xffffu >> (16 - count));
  for (int g = 0; g < G; g++) {
    __m512 scores = _mm512_mask_loadu_ps(none, there, weights + 16 * g);
    __m512 total = _mm512_loadu_ps(so_far.totals + 16 * g);
    const float top = _mm512_reduce_max_ps(scores);
    if (top > so_far.tops[g]) {  // rare after the first keys
      const float before = so_far.tops[g] - top;
      const __m512 shrink = _mm512_set1_ps(before < -126.0f ? 0.0f : std::exp2(before));
      for (int64_t d = 0; d < dim; d += 16) {
        float* sum = so_far.values + g * dim + d;
        _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), shrink));
      }
      total = _mm512_mul_ps(total, shrink);
      so_far.tops[g] = top;
    }
    __m512 x = _mm512_sub_ps(scores, _mm512_set1_ps(so_far.tops[g]));
    __m512 e = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), exp2_16(_mm512_max_ps(least, x)));
    _mm512_storeu_ps(weights + 16 * g, e);
    _mm512_storeu_ps(so_far.totals + 16 * g, _mm512_add_ps(total, e));
  }
  add_all_values<G>(value, dim, count, weights, 16, so_far.values);
}

// One query token of dtype T at position length - 1, all query heads of `kv_heads` KV heads from pool.head on. Blocks are read in
// one go, each head's keys and values after the other's: what lies together is asked for together.
template <typename T, typename KV>
void attend_one(
    const Pool<KV>& pool, int64_t kv_heads, const T* query, T* out, int64_t length, Workspace& workspace) {
  const int64_t group = pool.s.group(), dim = pool.s.dim, heads = kv_heads * group, block_size = pool.s.block_size;
  const int64_t of_head = block_size * dim;
  query += pool.head * group * dim;
  out += pool.head * group * dim;
  float* wide = workspace.floats(heads * (2 * dim + 17));
  const Sums all{wide + heads * dim, wide + 2 * heads * dim, wide + heads * (2 * dim + 16)};
  const __m512 scale = _mm512_set1_ps(pool.s.scale * 1.44269504f);  // to powers of 2
  for (int64_t i = 0; i < heads * dim; i += 16) {
    _mm512_storeu_ps(wide + i, _mm512_mul_ps(load16(query + i), scale));
    _mm512_storeu_ps(all.values + i, _mm512_setzero_ps());
  }
  for (int64_t h = 0; h < heads; h++) {
    _mm512_storeu_ps(all.totals + 16 * h, _mm512_setzero_ps());
    all.tops[h] = -1e30f;  // finite, so that keys of weight 0 in front are no NaN
  }
  pool.runs(pool.s.first_seen(length - 1), length, 16, [&](const KV* key, int64_t position, int64_t count) {
    // A run is too short for the processor to find out where the next one lies.
    const int64_t next = position + count;
    const KV* ahead = next < length ? pool.keys(next / block_size) + next % block_size * dim : nullptr;
    for (int64_t h = 0; h < kv_heads; h++) {
      const KV* k = key + h * of_head;
      if (ahead != nullptr)
        for (int64_t i = 0; i < 16 * dim; i += 64 / int64_t(sizeof(KV))) {
          _mm_prefetch((const char*)(ahead + h * of_head + i), _MM_HINT_T0);
          _mm_prefetch((const char*)(ahead + h * of_head + pool.to_values() + i), _MM_HINT_T0);
        }
      auto heads_from = [&](int64_t g) {
        const int64_t first = h * group + g;
        return Sums{all.values + first * dim, all.totals + 16 * first, all.tops + first};
      };
      const KV* v = k + pool.to_values();
      const float* q = wide + h * group * dim;
      int64_t g = 0;
      for (; g + 4 <= group; g += 4) take_in<4>(k, v, dim, count, q + g * dim, heads_from(g));
      switch (group - g) {
        case 3: take_in<3>(k, v, dim, count, q + g * dim, heads_from(g)); break;
        case 2: take_in<2>(k, v, dim, count, q + g * dim, heads_from(g)); break;
        case 1: take_in<1>(k, v, dim, count, q + g * dim, heads_from(g)); break;
      }
    }
  });
  for (int64_t h = 0; h < heads; h++) {
    const __m512 total = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_loadu_ps(all.totals + 16 * h)));
    for (int64_t d = 0; d < dim; d += 16)
      store16(out + h * dim + d, _mm512_div_ps(_mm512_loadu_ps(all.values + h * dim + d), total));
  }
}
