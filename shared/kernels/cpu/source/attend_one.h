// A decode step's attention: one query token, so keys and values are read once, where they lie, in their own dtype.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "gemm.h"
#include "pool.h"

// Up to 16 keys, or their values: rows of `dim` elements.
template <typename T>
struct Rows {
  Run<T> now;
  Run<T> ahead;  // what will be read next; a row that is read asks for the same one of it
  int64_t dim, count;

  const T* row(int64_t t, int64_t d) const { return now.rows + t * dim + d; }
  void fetch(int64_t t, int64_t d) const { __builtin_prefetch((const char*)(ahead.rows + t * dim + d)); }
  // Of codes. They ask for those that will be read next.
  Floats scales() const {
    __builtin_prefetch((const char*)ahead.scales);
    return now.scales_of(count);
  }
  Rows from(int64_t d) const { return {{now.rows + d, now.scales}, {ahead.rows + d, ahead.scales}, dim, count}; }
  Rows moved(int64_t bytes) const { return {now.moved(bytes), ahead.moved(bytes), dim, count}; }
};

// 16 keys at a time, transposed in registers: a vector holds one dimension (fp32) or two (bf16) of all 16.
template <int G>
void score_keys(const Rows<float>& keys, const float* query, float* scores, int64_t step) {
  const int64_t dim = keys.dim;
  Floats sums[G];
  for (int g = 0; g < G; g++) sums[g] = zeros();
  for (int64_t d = 0; d < dim; d += 16) {
    Words v[16];
    for (int t = 0; t < 16; t++) v[t] = t < keys.count ? load_words(keys.row(t, d)) : no_words();
    for (int t = 0; t < 16; t++) keys.fetch(t, d);
    transpose16(v);
    for (int i = 0; i < 16; i++)
      for (int g = 0; g < G; g++) sums[g] = plus_product(sums[g], all(query[g * dim + d + i]), as_floats(v[i]));
  }
  for (int g = 0; g < G; g++) store(scores + g * step, sums[g]);
}

template <int G>
void score_keys(const Rows<bf16>& keys, const float* query, float* scores, int64_t step) {
  const int64_t dim = keys.dim;
  // Sums of even and odd dimensions apart, where there are registers.
  constexpr int P = !kDeterministic && kVectors == 32 && G <= 4 ? 2 : 1;
  Floats sums[P][G];
  for (int p = 0; p < P; p++)
    for (int g = 0; g < G; g++) sums[p][g] = zeros();
  for (int64_t d = 0; d < dim; d += 32) {
    const int64_t words = dim - d < 32 ? (dim - d) / 2 : 16;
    Words v[16];
    for (int t = 0; t < 16; t++) v[t] = t < keys.count ? load_words(keys.row(t, d), words) : no_words();
    for (int t = 0; t < 16; t++) keys.fetch(t, d);
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

// Of codes a vector holds four dimensions of all 16.
template <int G, typename C, typename = std::enable_if_t<kIsCode<C>>>
void score_keys(const Rows<C>& keys, const float* query, float* scores, int64_t step) {
  const int64_t dim = keys.dim;
  constexpr int P = !kDeterministic && kVectors == 32 && G <= 4 ? 2 : 1;
  Floats sums[P][G];
  for (int p = 0; p < P; p++)
    for (int g = 0; g < G; g++) sums[p][g] = zeros();
  for (int64_t d = 0; d < dim; d += 64) {
    const int64_t words = dim - d < 64 ? (dim - d) / 4 : 16;
    Words v[16];
    for (int t = 0; t < 16; t++) v[t] = t < keys.count ? load_words(keys.row(t, d), words) : no_words();
    for (int t = 0; t < 16; t++) keys.fetch(t, d);
    transpose16(v);
    for (int i = 0; i < words; i++) {
      const C* codes = nullptr;
      const Floats x[4] = {
          opened_top(codes, shift_left<24>(v[i])), opened_top(codes, shift_left<16>(v[i])),
          opened_top(codes, shift_left<8>(v[i])), opened_top(codes, v[i])};
      for (int g = 0; g < G; g++) {
        const float* q = query + g * dim + d + 4 * i;
        for (int j = 0; j < 4; j++) sums[j % P][g] = plus_product(sums[j % P][g], all(q[j]), x[j]);
      }
    }
  }
  const Floats scales = keys.scales();
  for (int g = 0; g < G; g++) store(scores + g * step, (P == 2 ? sums[0][g] + sums[P - 1][g] : sums[0][g]) * scales);
}

// out[G][16 V] += weights of `count` keys times 16 V dimensions of their values.
template <int G, int V, typename T>
void add_values(const Rows<T>& values, const float* weights, int64_t step, float* out) {
  Floats sums[G][V];
  for (int g = 0; g < G; g++)
    for (int v = 0; v < V; v++) sums[g][v] = load(out + g * values.dim + 16 * v);
  for (int64_t t = 0; t < values.count; t++) {
    Floats x[V];
    for (int v = 0; v < V; v += 4 / int(sizeof(T))) values.fetch(t, 16 * v);
    for (int v = 0; v < V; v++) x[v] = load16(values.row(t, 16 * v));
    for (int g = 0; g < G; g++) {
      const Floats w = all(weights[g * step + t]);
      for (int v = 0; v < V; v++) sums[g][v] = plus_product(sums[g][v], w, x[v]);
    }
  }
  for (int g = 0; g < G; g++)
    for (int v = 0; v < V; v++) store(out + g * values.dim + 16 * v, sums[g][v]);
}

// The same for 32 P dimensions in bf16, read as pairs: of 32 sums the 16 of even dimensions come first.
template <int G, int P>
void add_pairs(const Rows<bf16>& values, const float* weights, int64_t step, float* out) {
  Floats sums[G][2 * P];
  for (int g = 0; g < G; g++)
    for (int v = 0; v < 2 * P; v++) sums[g][v] = load(out + g * values.dim + 16 * v);
  for (int64_t t = 0; t < values.count; t++) {
    Floats x[2 * P];
    for (int v = 0; v < P; v++) {
      values.fetch(t, 32 * v);
      const Words pairs = load_words(values.row(t, 32 * v));
      x[2 * v] = even_of(pairs);
      x[2 * v + 1] = odd_of(pairs);
    }
    for (int g = 0; g < G; g++) {
      const Floats w = all(weights[g * step + t]);
      for (int v = 0; v < 2 * P; v++) sums[g][v] = plus_product(sums[g][v], w, x[v]);
    }
  }
  for (int g = 0; g < G; g++)
    for (int v = 0; v < 2 * P; v++) store(out + g * values.dim + 16 * v, sums[g][v]);
}

template <int G>
void add_all_values(const Rows<bf16>& values, const float* weights, int64_t step, float* out) {
  constexpr int P = kVectors == 32 && G <= 4 ? 2 : 1;
  int64_t d = 0;
  for (; d + 32 * P <= values.dim; d += 32 * P) add_pairs<G, P>(values.from(d), weights, step, out + d);
  for (; d + 32 <= values.dim; d += 32) add_pairs<G, 1>(values.from(d), weights, step, out + d);
  if (d < values.dim) add_values<G, 1>(values.from(d), weights, step, out + d);
}

template <int G, typename T>
void add_all_values(const Rows<T>& values, const float* weights, int64_t step, float* out) {
  constexpr int V = kVectors == 32 ? (G <= 4 ? 4 : 2) : 1;
  int64_t d = 0;
  for (; d + 16 * V <= values.dim; d += 16 * V) add_values<G, V>(values.from(d), weights, step, out + d);
  for (; d < values.dim; d += 16) add_values<G, 1>(values.from(d), weights, step, out + d);
}

// What is known of G query heads so far: the weighted values, and the sum of the weights, both over 2^top.
struct Sums {
  float* values;  // [G][dim]
  float* totals;  // [G][16], to be added up
  float* tops;    // [G]
};

constexpr int kHeads = kVectors == 32 ? 8 : 4;  // query heads that a key and a value are used for at once

// f with `count` heads, 1 to kHeads, as a compile-time number.
template <int N = kHeads, typename F>
void with_heads(int64_t count, F&& f) {
  if constexpr (N > 1)
    if (count < N) return with_heads<N - 1>(count, f);
  f(std::integral_constant<int, N>{});
}

// f(heads, first) for all heads of a group.
template <typename F>
void for_heads(int64_t group, F&& f) {
  for (int64_t g = 0; g < group; g += kHeads)
    with_heads(std::min<int64_t>(group - g, kHeads), [&](auto heads) { f(heads, g); });
}

// Takes in up to 16 keys and their values, which lie `to_values` bytes behind. query [G][dim], scaled to powers of 2.
template <int G, typename T>
void take_in(const Rows<T>& keys, int64_t to_values, const float* query, const Sums& so_far, float cap) {
  const int64_t dim = keys.dim;
  alignas(64) float weights[G * 16];
  score_keys<G>(keys, query, weights, 16);
  const Floats none = all(-std::numeric_limits<float>::infinity()), least = all(-126.0f);
  const Mask there = first_lanes(keys.count);
  const Rows<T> values = keys.moved(to_values);
  Floats scales;
  if constexpr (kIsCode<T>) scales = values.scales();
  for (int g = 0; g < G; g++) {
    const Floats found = load(weights + 16 * g);
    const Floats scores = choose(there, cap > 0 ? capped(found, cap) : found, none);
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
    if constexpr (kIsCode<T>)
      store(weights + 16 * g, e * scales);
    else
      store(weights + 16 * g, e);
    store(so_far.totals + 16 * g, total + e);
  }
  add_all_values<G>(keys.moved(to_values), weights, 16, so_far.values);
}

// Puts even and odd elements in their order.
inline void store32(bf16* p, Floats even, Floats odd) { store_words(p, paired(even, odd)); }
inline void store32(float* p, Floats even, Floats odd) {
  Words low, high;
  zip(as_words(even), as_words(odd), low, high);
  store_words(p, low);
  store_words(p + 16, high);
}

// A head's sums as add_all_values leaves them for values of dtype KV, each through `finish`.
template <typename KV, typename T, typename F>
void put_head(T* out, const float* sums, int64_t dim, F&& finish) {
  int64_t d = 0;
  if (sizeof(KV) == 2)
    for (; d + 32 <= dim; d += 32) store32(out + d, finish(load(sums + d)), finish(load(sums + d + 16)));
  for (; d < dim; d += 16) store16(out + d, finish(load(sums + d)));
}

// One query token of dtype T at position length - 1, all query heads of `kv_heads` KV heads from pool.head on. Blocks are
// read in one go, each head's keys and values after the other's.
template <typename T, typename KV>
void attend_one(
    const Pool<KV>& pool, int64_t kv_heads, const T* query, T* out, int64_t length, Workspace& workspace) {
  const int64_t group = pool.s.group(), dim = pool.s.dim, heads = kv_heads * group, of_head = pool.view.head_bytes;
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
    so_far.totals[16 * h] = pool.s.first_total();
    // Finite, so that keys of weight 0 in front are no NaN.
    so_far.tops[h] = pool.s.first_best(pool.head * group + h, -1e30f);
  }
  pool.runs(pool.s.first_seen(length - 1), length, 16, [&](Run<KV> key, int64_t position, int64_t count) {
    // A run is too short for the processor to find out where the next one lies, so each row asks for one of the next
    // head's, or of what follows. Asked for all at once they would hold up what is computed meanwhile.
    const int64_t next = position + count;
    const Run<KV> behind = next < length ? pool.keys(next) : key;
    for (int64_t h = 0; h < kv_heads; h++) {
      const Run<KV> k = key.moved(h * of_head);
      const Run<KV> ahead = h + 1 < kv_heads ? k.moved(of_head) : behind;
      auto heads_from = [&](int64_t g) {
        const int64_t first = h * group + g;
        return Sums{so_far.values + first * dim, so_far.totals + 16 * first, so_far.tops + first};
      };
      const float* q = wide + h * group * dim;
      for_heads(group, [&](auto heads, int64_t g) {
        const Rows<KV> keys{k, g == 0 ? ahead : k, dim, count};
        take_in<heads.value>(keys, pool.to_values(), q + g * dim, heads_from(g), pool.s.cap());
      });
    }
  });
  for (int64_t h = 0; h < heads; h++) {
    const Floats total = all(sum_of(load(so_far.totals + 16 * h)));
    put_head<KV>(out + h * dim, so_far.values + h * dim, dim, [&](Floats sum) { return sum / total; });
  }
}
