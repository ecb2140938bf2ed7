// One query token's attention in the very arithmetic of attend_many.h, so that a token's result is the same to the bit
// whether it is computed alone or in a chunk: the same tiles of kTile keys by absolute position, in each the same scores,
// maximum, weights and sums. What attend_many.h has in the lanes of one vector lies here side by side.
#pragma once

#include "attend_many.h"
#include "attend_one.h"

constexpr int64_t kRowStep = kTile + 16;  // a row's scores; the last keys are stored 16 at a time

// What is known of some query heads so far. Each total and best is kept in all lanes of a vector.
struct RowSums {
  float *values, *totals, *bests, *scores;  // [heads][dim], [heads][16], [heads][16], [heads][kRowStep]
};

// The keys from `low` to `high` of a tile, both inclusive, that lanes t to t + 15 stand for.
inline Mask seen_lanes(int64_t t, int64_t low, int64_t high) {
  alignas(64) static constexpr int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Words lanes = load_words(kLanes);
  return both(at_most(all_words(uint32_t(low - t)), lanes), at_most(lanes, all_words(uint32_t(high - t))));
}

// A head's scores of a tile become weights; its sums fade to the new maximum: see softmax_lanes.
inline void softmax_row(
    float* scores, int64_t low, int64_t high, float cap, float* best, float* total, float* values, int64_t dim) {
  for (int64_t t = 0; cap > 0 && t <= high; t += 16) store(scores + t, capped(load(scores + t), cap));
  const Floats least = all(-126.0f), before = load(best);
  Floats tops = before;
  for (int64_t t = 0; t <= high; t += 16) tops = larger_where(seen_lanes(t, low, high), tops, load(scores + t));
  const Floats top = all(highest_of(tops)), shift = larger(all(-1e30f), top);
  Floats parts = zeros();
  for (int64_t t = 0; t <= high; t += 16) {
    const Floats e = keep(seen_lanes(t, low, high), exp2_16(larger(least, load(scores + t) - shift)));
    store(scores + t, e);
    parts = parts + e;
  }
  const Floats gap = before - shift, fade = keep(not_less(gap, least), exp2_16(larger(least, gap)));
  store(total, plus_product(all(sum_of(parts)), load(total), fade));
  store(best, top);
  if (any_differs(top, before))
    for (int64_t d = 0; d < dim; d += 16) store(values + d, load(values + d) * fade);
}

template <typename KV>
[[gnu::always_inline]] inline void prefetch_keys(const Run<KV>& keys, int64_t count, int64_t dim) {
  for (int64_t i = 0; i < count * dim; i += 64 / int64_t(sizeof(KV))) __builtin_prefetch((const char*)(keys.rows + i));
  if (kIsCode<KV>) __builtin_prefetch((const char*)keys.scales);
}

// The weights of some heads times the values' scales.
template <typename KV>
void scale_weights(const Rows<KV>& values, float* weights, int heads) {
  if constexpr (kIsCode<KV>) {
    const Words scales = as_words(values.scales());
    for (int g = 0; g < heads; g++, weights += kRowStep) {
      const Floats scaled = as_floats(load_words(weights, values.count)) * as_floats(scales);
      store_words(weights, as_words(scaled), values.count);
    }
  }
}

// As attend_one.
template <typename T, typename KV>
void attend_row(
    const Pool<KV>& pool, int64_t kv_heads, const T* query, T* out, int64_t length, Workspace& workspace) {
  const Shape& s = pool.s;
  const int64_t group = s.group(), dim = s.dim, heads = kv_heads * group, of_head = pool.view.head_bytes;
  query += pool.head * group * dim;
  out += pool.head * group * dim;
  float* wide = workspace.floats(heads * (2 * dim + 32 + kRowStep));
  float* totals = wide + 2 * heads * dim;
  const RowSums sums{wide + heads * dim, totals, totals + 16 * heads, totals + 32 * heads};
  const Floats scale = all(s.scale * 1.44269504f);  // to powers of 2
  for (int64_t i = 0; i < heads * dim; i += 16) {
    store(wide + i, load16(query + i) * scale);
    store(sums.values + i, zeros());
  }
  for (int64_t h = 0; h < heads; h++) {
    store(sums.totals + 16 * h, all(s.first_total()));
    store(sums.bests + 16 * h, all(s.first_best(pool.head * group + h, -std::numeric_limits<float>::infinity())));
  }
  const int64_t seen_from = s.first_seen(length - 1);
  for (int64_t first = seen_from / kTile * kTile; first < length; first += kTile) {
    const int64_t low = std::max<int64_t>(0, seen_from - first), high = std::min(kTile, length - first) - 1;
    // Blocks are read in one go, all heads' keys, then all heads' values: what lies together is asked for together.
    pool.runs(first + low, first + high + 1, 16, [&](Run<KV> key, int64_t position, int64_t count) {
      const int64_t next = position + count;
      const Run<KV> behind = next < length ? pool.keys(next) : key;
      for (int64_t h = 0; h < kv_heads; h++) {
        const Run<KV> k = key.moved(h * of_head);
        const Rows<KV> keys{k, h + 1 < kv_heads ? k.moved(of_head) : behind, dim, count};
        prefetch_keys(k.moved(pool.to_values()), count, dim);
        for_heads(group, [&](auto g, int64_t offset) {
          const int64_t head = h * group + offset;
          float* scores = sums.scores + head * kRowStep + position - first;
          score_keys<g.value>(keys, wide + head * dim, scores, kRowStep);
        });
      }
    });
    for (int64_t h = 0; h < heads; h++)
      softmax_row(
          sums.scores + h * kRowStep, low, high, s.cap(), sums.bests + 16 * h, sums.totals + 16 * h, sums.values + h * dim,
          dim);
    pool.runs(first + low, first + high + 1, 16, [&](Run<KV> key, int64_t position, int64_t count) {
      for (int64_t h = 0; h < kv_heads; h++)
        for_heads(group, [&](auto g, int64_t offset) {
          const int64_t head = h * group + offset;
          float* weights = sums.scores + head * kRowStep + position - first;
          const Run<KV> run = key.moved(h * of_head + pool.to_values());
          const Rows<KV> values{run, run, dim, count};
          scale_weights(values, weights, g.value);
          add_all_values<g.value>(values, weights, kRowStep, sums.values + head * dim);
        });
    });
  }
  for (int64_t h = 0; h < heads; h++) {
    const Floats inverse = all(1.0f) / load(sums.totals + 16 * h);
    put_head<KV>(out + h * dim, sums.values + h * dim, dim, [&](Floats sum) { return sum * inverse; });
  }
}
