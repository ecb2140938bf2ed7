// A prompt's attention: tiles of queries times tiles of keys, the softmax online (Milakov and Gimelshein 2018,
// arXiv:1805.02867; tiled as in FlashAttention-2, Dao 2023, arXiv:2307.08691).
//
// Query rows lie along the vectors, 32 to a column block: scores are [key][32], sums [dim][32]. So both products take
// keys and values as their broadcast side, the softmax runs down vectors without a horizontal step, and each row's
// state is one lane.
#pragma once

#include <algorithm>
#include <limits>

#include "gemm.h"
#include "pool.h"

constexpr int64_t kTile = 64;  // keys

// Where the parts of one thread's memory lie, for `rows` query rows.
struct Scratch {
  float *query, *sums, *best, *total, *keys, *values, *scores;  // query, sums: [block][dim][32]; best, total: [rows]
  float *key_scales, *value_scales;                              // [kTile], of codes
  int32_t *positions, *offsets;                                  // [rows]
  int64_t blocks;

  Scratch(Workspace& workspace, int64_t rows, int64_t dim) : blocks((rows + kColumns - 1) / kColumns) {
    const int64_t lanes = blocks * kColumns;
    query = workspace.floats(2 * lanes * dim + 4 * lanes + 2 * kTile * dim + kTile * (kColumns + 2));
    sums = query + lanes * dim;
    best = sums + lanes * dim;
    total = best + lanes;
    positions = (int32_t*)(total + lanes);
    offsets = positions + lanes;
    keys = total + 3 * lanes;            // [dim][kTile]
    values = keys + kTile * dim;         // [kTile][dim]
    scores = values + kTile * dim;       // [kTile][32]
    key_scales = scores + kTile * kColumns;
    value_scales = key_scales + kTile;
  }
};

// c[m][32] (+)= a b: a(r, j) at a[j * a_step + r] for all m rows; of the columns the first `lanes`, 16 or 32.
template <typename Of = Numbers>
void multiply_rows(
    int64_t m, const float* a, int64_t a_step, const float* b, int64_t k, float* c, bool add, int64_t lanes) {
  const Tiles tiles(m);
  for (int64_t t = 0; t < tiles.count; t++)
    with_rows(tiles.size(t), [&](auto rows) {
      const auto multiply = lanes == 16 ? multiply_half<rows.value, Of> : multiply_tile<rows.value, Of>;
      multiply(a + tiles.first(t), a_step, b, k, c + tiles.first(t) * kColumns, add);
    });
}

// Of a block's columns those that some row is in, in whole vectors: the few rows of a step that checks guesses fill one.
inline int64_t lanes_of(int64_t rows, int64_t block) { return rows - block * kColumns <= 16 ? 16 : kColumns; }

// The scales of keys [from, to) of a tile of `size` that begins at position `first`, and of their values; 0 for the rest.
template <typename T>
void load_scales(
    const Pool<T>& pool, int64_t first, int64_t from, int64_t to, int64_t size, float* keys, float* values) {
  std::memset(keys, 0, size * sizeof(float));
  std::memset(values, 0, size * sizeof(float));
  pool.runs(first + from, first + to, 16, [&](Run<T> run, int64_t position, int64_t n) {
    std::memcpy(keys + (position - first), run.scales, n * sizeof(float));
    std::memcpy(values + (position - first), run.moved(pool.to_values()).scales, n * sizeof(float));
  });
}

// Prefetches 16 keys and their values from `position` on, for a later tile, a part at a time: all at once they would hold
// up other reads. Nothing where `position` is not below `end`.
template <typename KV>
struct Ahead {
  const char *keys = nullptr, *values;

  Ahead(const Pool<KV>& pool, int64_t position, int64_t end) {
    if (position >= end) return;
    const Run<KV> run = pool.keys(position);
    keys = (const char*)run.rows;
    values = (const char*)run.moved(pool.to_values()).rows;
  }
  // The part of dimensions [d, d + 16).
  void fetch(int64_t d) const {
    constexpr int64_t kPart = 16 * 16 * sizeof(KV);
    if (keys == nullptr) return;
    for (int64_t at = d / 16 * kPart; at < (d / 16 + 1) * kPart; at += 64) {
      __builtin_prefetch(keys + at, 0, 2);
      __builtin_prefetch(values + at, 0, 2);
    }
  }
};

// The tile from position `first` on, of keys that some row sees, [begin, end): keys transposed, values as they are, both
// wide. The rest of the tile is zero: it has weight 0, and what lies there in memory may be no number. Codes are not
// scaled: scores and weights will be, as those of one query token are.
template <typename T>
void load_tile(const Pool<T>& pool, int64_t first, int64_t begin, int64_t end, const Scratch& scratch) {
  const int64_t dim = pool.s.dim, from = std::max<int64_t>(0, begin - first), to = std::min(kTile, end - first);
  if (to - from < kTile) std::memset(scratch.keys, 0, 2 * kTile * dim * sizeof(float));
  if constexpr (kIsCode<T>) load_scales(pool, first, from, to, kTile, scratch.key_scales, scratch.value_scales);
  pool.runs(first + from, first + to, 16, [&](Run<T> run, int64_t position, int64_t n) {
    const int64_t t = position - first;
    const T *key = run.rows, *value = run.moved(pool.to_values()).rows;
    const Ahead<T> next(pool, position + kTile, end);
    for (int64_t d = 0; d < dim; d += 16) {
      next.fetch(d);
      Words v[16];
      for (int i = 0; i < 16; i++) v[i] = i < n ? as_words(load16(key + i * dim + d)) : no_words();
      transpose16(v);
      for (int i = 0; i < 16; i++) store_words(scratch.keys + (d + i) * kTile + t, v[i], n);
      for (int i = 0; i < n; i++) store(scratch.values + (t + i) * dim + d, load16(value + i * dim + d));
    }
  });
}

// 16 lanes of weights [kTile][32] added up, in the order in which attend_row.h adds those of one row.
inline Floats sum_down(const float* weights) {
  Floats parts[16];
  for (int64_t i = 0; i < 16; i++) {
    parts[i] = load(weights + i * kColumns);
    for (int64_t t = i + 16; t < kTile; t += 16) parts[i] = parts[i] + load(weights + t * kColumns);
  }
  for (int distance = 8; distance > 0; distance /= 2)
    for (int i = 0; i < distance; i++) parts[i] = parts[i] + parts[i + distance];
  return parts[0];
}

// 16 lanes of scores [kTile][32] become weights; the lanes' sums fade to the new maximum. With Masked, a lane sees the
// keys from `low` to `high` of the tile alone.
template <bool Masked>
void softmax_lanes(float* scores, Words low, Words high, float* best, float* total, float* sums, int64_t dim) {
  const Floats none = all(-std::numeric_limits<float>::infinity()), least = all(-126.0f);
  auto seen = [&](int64_t t) {
    const Words key = all_words(uint32_t(t));
    return both(at_most(low, key), at_most(key, high));
  };
  const Floats before = load(best);
  Floats tops[4] = {before, none, none, none};
  for (int64_t t = 0; t < kTile; t += 4)
    for (int i = 0; i < 4; i++) {
      const Floats s = load(scores + (t + i) * kColumns);
      tops[i] = Masked ? larger_where(seen(t + i), tops[i], s) : larger(tops[i], s);
    }
  const Floats top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
  const Floats shift = larger(all(-1e30f), top);  // where nothing was seen yet; NaN stays
  Floats sum = zeros();
  for (int64_t t = 0; t < kTile; t++) {
    Floats e = exp2_16(larger(least, load(scores + t * kColumns) - shift));
    if (Masked) e = keep(seen(t), e);
    store(scores + t * kColumns, e);
    if (!kDeterministic) sum = sum + e;
  }
  if (kDeterministic) sum = sum_down(scores);
  const Floats gap = before - shift, fade = keep(not_less(gap, least), exp2_16(larger(least, gap)));
  store(total, plus_product(sum, load(total), fade));
  store(best, top);
  if (any_differs(top, before))
    for (int64_t d = 0; d < dim; d++) store(sums + d * kColumns, load(sums + d * kColumns) * fade);
}

// Each row of [count][32], of which `lanes` count, times its own scale.
inline void scale_rows(float* rows, const float* scales, int64_t count, int64_t lanes) {
  for (int64_t t = 0; t < count; t++, rows += kColumns) {
    const Floats scale = all(scales[t]);
    store(rows, load(rows) * scale);
    if (lanes > 16) store(rows + 16, load(rows + 16) * scale);
  }
}

// One tile of keys against one block of query rows, which `lanes` columns hold.
template <bool Scaled>
void attend_tile(const Shape& s, int64_t first, int64_t block, int64_t lanes, const Scratch& scratch) {
  const int64_t dim = s.dim, lane = block * kColumns;
  const int32_t* positions = scratch.positions + lane;
  if (positions[kColumns - 1] < first) return;                                    // all keys lie ahead of all rows
  if (s.first_seen(positions[0]) >= first + kTile) return;                        // and all have slid out of the window
  const bool masked = positions[0] < first + kTile - 1 || s.first_seen(positions[kColumns - 1]) > first;
  float* sums = scratch.sums + lane * dim;
  multiply_rows(kTile, scratch.keys, kTile, scratch.query + lane * dim, dim, scratch.scores, false, lanes);
  if (Scaled) scale_rows(scratch.scores, scratch.key_scales, kTile, lanes);
  for (int64_t half = 0; half < lanes; half += 16) {
    for (int64_t i = half; s.softcap > 0 && i < kTile * kColumns; i += kColumns)
      store(scratch.scores + i, capped(load(scratch.scores + i), s.cap()));
    const Words high = minus(load_words(positions + half), all_words(uint32_t(first)));
    const Words low = s.first_seen(positions + half, first);
    auto softmax = masked ? softmax_lanes<true> : softmax_lanes<false>;
    float *best = scratch.best + lane + half, *total = scratch.total + lane + half;
    softmax(scratch.scores + half, low, high, best, total, sums + half, dim);
  }
  if (Scaled) scale_rows(scratch.scores, scratch.value_scales, kTile, lanes);
  multiply_rows(dim, scratch.values, dim, scratch.scores, kTile, sums, true, lanes);
}

// For each of `lanes` rows, a query token's one head: its position, where it lies in the step's query and output, and the
// state before any key. Lanes past the last row repeat it.
template <typename KV>
void place_rows(
    const Pool<KV>& pool, int64_t start, int64_t rows, int64_t lanes, int32_t* positions, int32_t* offsets, float* best,
    float* total) {
  const Shape& s = pool.s;
  for (int64_t lane = 0, token = 0, head = pool.head * s.group(); lane < lanes; lane++) {
    positions[lane] = int32_t(start + token);
    offsets[lane] = int32_t(token * s.width() + head * s.dim);
    best[lane] = s.first_best(head, -std::numeric_limits<float>::infinity());
    total[lane] = s.first_total();
    if (lane + 1 >= rows) continue;
    if (++head == (pool.head + 1) * s.group()) head -= s.group(), token++;
  }
}

// sums [block][dim][32] over totals [rows], to rows at `offsets` of `out`.
template <typename T>
void put_rows(T* out, const int32_t* offsets, int64_t rows, int64_t dim, const float* sums, const float* total) {
  for (int64_t lane = 0; lane < rows; lane += 16) {
    const Floats inverse = all(1.0f) / load(total + lane);
    for (int64_t d = 0; d < dim; d += 16) {
      const float* source = sums + lane / kColumns * kColumns * dim + d * kColumns + lane % kColumns;
      Words v[16];
      for (int i = 0; i < 16; i++) v[i] = as_words(load(source + i * kColumns) * inverse);
      transpose16(v);
      for (int i = 0; i < 16 && lane + i < rows; i++) store16(out + offsets[lane + i] + d, as_floats(v[i]));
    }
  }
}

// `count` query tokens of dtype T of one sequence, the first at position `start`, all query heads of one KV head.
template <typename T, typename KV>
void attend_many(const Pool<KV>& pool, const T* query, T* out, int64_t start, int64_t count, Workspace& workspace) {
  const Shape& s = pool.s;
  const int64_t rows = count * s.group(), dim = s.dim;
  const Scratch scratch(workspace, rows, dim);
  const Floats scale = all(s.scale * 1.44269504f);  // to powers of 2
  const int64_t lanes = scratch.blocks * kColumns;
  place_rows(pool, start, rows, lanes, scratch.positions, scratch.offsets, scratch.best, scratch.total);
  for (int64_t lane = 0; lane < lanes; lane += 16)
    for (int64_t d = 0; d < dim; d += 16) {
      Words v[16];
      for (int i = 0; i < 16; i++) v[i] = as_words(load16(query + scratch.offsets[lane + i] + d) * scale);
      transpose16(v);
      float* target = scratch.query + lane / kColumns * kColumns * dim + d * kColumns + lane % kColumns;
      for (int i = 0; i < 16; i++) store_words(target + i * kColumns, v[i]);
    }
  std::memset(scratch.sums, 0, lanes * dim * sizeof(float));
  const int64_t begin = s.first_seen(start), end = start + count;  // of the keys that some row sees
  for (int64_t first = begin / kTile * kTile; first < end; first += kTile) {
    load_tile(pool, first, begin, end, scratch);
    for (int64_t block = 0; block < scratch.blocks; block++)
      attend_tile<kIsCode<KV>>(s, first, block, lanes_of(rows, block), scratch);
  }
  put_rows(out, scratch.offsets, rows, dim, scratch.sums, scratch.total);
}
