// A decode step's attention: one query token, so keys and values are read once, where they lie, in their own dtype.
#pragma once

#include <cmath>
#include <limits>

#include "gemm.h"
#include "pool.h"

// 16 keys at a time, transposed in registers: a vector holds one dimension (fp32) or two (bf16) of all 16.
template <int G>
void score_keys(const float* key, int64_t dim, int64_t count, const float* query, float* scores, int64_t step) {
  Floats sums[G];
  for (int g = 0; g < G; g++) sums[g] = zeros();
  for (int64_t d = 0; d < dim; d += 16) {
    Words v[16];
    for (int t = 0; t < 16; t++) v[t] = t < count ? load_words(key + t * dim + d) : no_words();
    transpose16(v);
    for (int i = 0; i < 16; i++)
      for (int g = 0; g < G; g++) sums[g] = plus_product(sums[g], all(query[g * dim + d + i]), as_floats(v[i]));
  }
  for (int g = 0; g < G; g++) store(scores + g * step, sums[g]);
}

template <int G>
void score_keys(const bf16* key, int64_t dim, int64_t count, const float* query, float* scores, int64_t step) {
  // Sums of even and odd dimensions apart, where there are registers.
  constexpr int P = !kDeterministic && kRegisters == 32 ? 2 : 1;
  Floats sums[P][G];
  for (int p = 0; p < P; p++)
    for (int g = 0; g < G; g++) sums[p][g] = zeros();
  for (int64_t d = 0; d < dim; d += 32) {
    const int64_t words = dim - d < 32 ? (dim - d) / 2 : 16;
    Words v[16];
    for (int t = 0; t < 16; t++) v[t] = t < count ? load_words(key + t * dim + d, words) : no_words();
    transpose16(v);
    for (int i = 0; i < words; i++) {
      const Floats even = even_of(v[i]), odd = odd_of(v[i]);
      for (int g = 0; g < G; g++) {
        const float* q = query + g * dim + d + 2 * i;
        sums[0][g] = plus_product(sums[0][g], all(q[0]), even);
        sums[P - 1][g] = plus_product(sums[P - 1][g], all(q[1]), odd);
      }
    }
  }
  for (int g = 0; g < G; g++) store(scores + g * step, P == 2 ? sums[0][g] + sums[P - 1][g] : sums[0][g]);
}

// out[G][16 V] += weights of `count` keys times 16 V dimensions of their values.
template <int G, int V, typename T>
void add_values(const T* value, int64_t dim, int64_t count, const float* weights, int64_t step, float* out) {
  Floats sums[G][V];
  for (int g = 0; g < G; g++)
    for (int v = 0; v < V; v++) sums[g][v] = load(out + g * dim + 16 * v);
  for (int64_t t = 0; t < count; t++) {
    Floats x[V];
    for (int v = 0; v < V; v++) x[v] = load16(value + t * dim + 16 * v);
    for (int g = 0; g < G; g++) {
      const Floats w = all(weights[g * step + t]);
      for (int v = 0; v < V; v++) sums[g][v] = plus_product(sums[g][v], w, x[v]);
    }
  }
  for (int g = 0; g < G; g++)
    for (int v = 0; v < V; v++) store(out + g * dim + 16 * v, sums[g][v]);
}

template <int G, typename T>
void add_all_values(const T* value, int64_t dim, int64_t count, const float* weights, int64_t step, float* out) {
  constexpr int V = kRegisters == 32 ? 4 : 1;
  int64_t d = 0;
  for (; d + 16 * V <= dim; d += 16 * V) add_values<G, V>(value + d, dim, count, weights, step, out + d);
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
  const Floats none = all(-std::numeric_limits<float>::infinity()), least = all(-126.0f);
  const Mask there = first_lanes(count);
  for (int g = 0; g < G; g++) {
    const Floats scores = choose(there, load(weights + 16 * g), none);
    Floats total = load(so_far.totals + 16 * g);
    const float top = highest_of(scores);
    if (top > so_far.tops[g]) {  // rare after the first keys
      const float before = so_far.tops[g] - top;
      const Floats shrink = all(before < -126.0f ? 0.0f : std::exp2(before));
      for (int64_t d = 0; d < dim; d += 16) {
        float* sum = so_far.values + g * dim + d;
        store(sum, load(sum) * shrink);
      }
      total = total * shrink;
      so_far.tops[g] = top;
    }
    const Floats x = scores - all(so_far.tops[g]), e = keep(not_less(x, least), exp2_16(larger(least, x)));
    store(weights + 16 * g, e);
    store(so_far.totals + 16 * g, total + e);
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
  const Sums so_far{wide + heads * dim, wide + 2 * heads * dim, wide + heads * (2 * dim + 16)};
  const Floats scale = all(pool.s.scale * 1.44269504f);  // to powers of 2
  for (int64_t i = 0; i < heads * dim; i += 16) {
    store(wide + i, load16(query + i) * scale);
    store(so_far.values + i, zeros());
  }
  for (int64_t h = 0; h < heads; h++) {
    store(so_far.totals + 16 * h, zeros());
    so_far.tops[h] = -1e30f;  // finite, so that keys of weight 0 in front are no NaN
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
        return Sums{so_far.values + first * dim, so_far.totals + 16 * first, so_far.tops + first};
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
    const Floats total = all(sum_of(load(so_far.totals + 16 * h)));
    for (int64_t d = 0; d < dim; d += 16)
      store16(out + h * dim + d, load(so_far.values + h * dim + d) / total);
  }
}
