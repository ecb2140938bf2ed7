// A prompt's attention in bf16 by AMX, laid out as in attend_many.h. Scores are keys times queries: 16 keys of a block
// are a row tile as they lie. Sums are values, transposed, times weights. Between the two the softmax runs down vectors.
#pragma once

#include "attend_many.h"
#include "tiles.h"

constexpr int64_t kTiledKeys = 256;  // of a tile of keys: sums are loaded and stored once for all of them
constexpr int64_t kPairKeys = 32;    // keys of a product's depth

struct TiledScratch {
  float *sums, *best, *total, *scores;  // [block][dim][32]; [rows]; [rows]; [key][32]
  uint32_t *query, *weights;            // pairs: [block][dim / 2][32], [key / 2][32]
  bf16* values;                         // [key / 32][dim][32]
  int32_t* positions;                   // [rows]
  int64_t blocks;

  TiledScratch(Workspace& workspace, int64_t rows, int64_t dim) : blocks((rows + kColumns - 1) / kColumns) {
    const int64_t lanes = blocks * kColumns;
    sums = workspace.floats(lanes * dim * 3 / 2 + 3 * lanes + kTiledKeys * (kColumns * 3 / 2 + dim / 2));
    scores = sums + lanes * dim;
    weights = (uint32_t*)(scores + kTiledKeys * kColumns);
    query = weights + kTiledKeys / 2 * kColumns;
    values = (bf16*)(query + lanes * dim / 2);
    best = (float*)(values + kTiledKeys * dim);
    total = best + lanes;
    positions = (int32_t*)(total + lanes);
  }
};

// Whether what lies in the pool can be read as tiles.
inline bool fits_tiles(const Shape& s) { return s.dim % 32 == 0 && s.block_size % 16 == 0 && s.scale > 0.0f; }

// 2^x for -126 <= x <= 0 to 1 part in 13000, which bf16 does not show: a polynomial of degree 3, least in relative
// error, for |r| <= 1/2. NaN stays NaN.
inline Floats rough_exp2_16(Floats x) {
  const Floats n = nearest(x), r = x - n;
  Floats y = plus_product(all(0.24261113f), all(0.05517167f), r);
  y = plus_product(all(0.69326099f), y, r);
  y = plus_product(all(0.99992807f), y, r);
  return times_small_power(y, n);
}

// `count` keys' values, transposed; the rest of the last 32 is zero.
inline void transpose_values(const Pool<bf16>& pool, int64_t first, int64_t count, bf16* values) {
  const int64_t dim = pool.s.dim;
  for (int64_t t = 0; t < count; t += kPairKeys, values += kPairKeys * dim) {
    const bf16* rows[kPairKeys] = {};
    const int64_t last = std::min(count, t + kPairKeys);
    pool.runs(first + t, first + last, 16, [&](const bf16* key, int64_t position, int64_t n) {
      for (int64_t i = 0; i < n; i++) rows[position - first - t + i] = key + pool.to_values() + i * dim;
    });
    for (int64_t d = 0; d < dim; d += 16) {
      Words v[16];
      for (int i = 0; i < 16; i++) {
        const bf16 *even = rows[2 * i], *odd = rows[2 * i + 1];
        const Words lower = even ? shift_right<16>(as_words(load16(even + d))) : no_words();
        v[i] = odd ? either(lower, as_words(load16(odd + d))) : lower;
      }
      transpose16(v);
      for (int i = 0; i < 16; i++) store_words(values + (d + i) * kPairKeys, v[i]);
    }
  }
}

// Keys [from, to) of the tile, whole 32s, against 32 query rows. Keys past `count` may be anything: they are not seen.
inline void score_tile(
    const Pool<bf16>& pool, int64_t first, int64_t from, int64_t to, int64_t count, const uint32_t* query, float* scores) {
  const int64_t dim = pool.s.dim, block_size = pool.s.block_size;
  auto key_at = [&](int64_t t) { return pool.keys((first + t) / block_size) + (first + t) % block_size * dim; };
  for (int64_t t = from; t < to; t += 32) {
    const bf16 *a = key_at(t), *b = t + 16 < count ? key_at(t + 16) : a;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t d = 0; d < dim; d += 32) {
      const uint32_t* q = query + d / 2 * kColumns;
      TILE_LOAD(4, a + d, dim * 2);
      TILE_LOAD(6, q, 128);
      TILE_DOT(0, 4, 6);
      TILE_LOAD(7, q + 16, 128);
      TILE_DOT(1, 4, 7);
      TILE_LOAD(5, b + d, dim * 2);
      TILE_DOT(2, 5, 6);
      TILE_DOT(3, 5, 7);
    }
    float* c = scores + t * kColumns;
    TILE_STORE(0, c, 128);
    TILE_STORE(1, c + 16, 128);
    TILE_STORE(2, c + 16 * kColumns, 128);
    TILE_STORE(3, c + 16 * kColumns + 16, 128);
  }
}

// 16 lanes of scores of keys [from, to) become pairs of weights, as softmax_lanes. `scale`: to powers of 2.
template <bool Masked>
void softmax_pairs(
    const float* scores, uint32_t* weights, int64_t from, int64_t to, Floats scale, Words low, Words high, float* best,
    float* total, float* sums, int64_t dim) {
  const Floats none = all(-std::numeric_limits<float>::infinity()), least = all(-126.0f);
  auto seen = [&](int64_t t) {
    const Words key = all_words(uint32_t(t));
    return both(at_most(low, key), at_most(key, high));
  };
  const Floats before = load(best);
  Floats tops[4] = {none, none, none, none};
  for (int64_t t = from; t < to; t += 4)
    for (int i = 0; i < 4; i++) {
      const Floats s = load(scores + (t + i) * kColumns);
      tops[i] = Masked ? larger_where(seen(t + i), tops[i], s) : larger(tops[i], s);
    }
  const Floats top = larger(before, larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])) * scale);
  const Floats shift = larger(all(-1e30f), top);
  auto weight = [&](int64_t t) {
    const Floats e = rough_exp2_16(larger(least, plus_product(zeros() - shift, load(scores + t * kColumns), scale)));
    return Masked ? keep(seen(t), e) : e;
  };
  Floats sum = zeros();
  for (int64_t t = from; t < to; t += 2) {
    const Floats even = weight(t), odd = weight(t + 1);
    store_words(weights + t / 2 * kColumns, paired(even, odd));
    sum = sum + (even + odd);
  }
  const Floats gap = before - shift, fade = keep(not_less(gap, least), exp2_16(larger(least, gap)));
  store(total, plus_product(sum, load(total), fade));
  store(best, top);
  if (any_differs(top, before))
    for (int64_t d = 0; d < dim; d++) store(sums + d * kColumns, load(sums + d * kColumns) * fade);
}

// sums [dim][32] += values' rows times weights, over keys [from, to) of the tile.
inline void add_tile(const bf16* values, const uint32_t* weights, int64_t from, int64_t to, int64_t dim, float* sums) {
  for (int64_t d = 0; d < dim; d += 32) {
    float* c = sums + d * kColumns;
    TILE_LOAD(0, c, 128);
    TILE_LOAD(1, c + 16, 128);
    TILE_LOAD(2, c + 16 * kColumns, 128);
    TILE_LOAD(3, c + 16 * kColumns + 16, 128);
    for (int64_t t = from; t < to; t += kPairKeys) {
      const bf16* a = values + (t * dim + d * kPairKeys);
      const uint32_t* b = weights + t / 2 * kColumns;
      TILE_LOAD(4, a, 64);
      TILE_LOAD(6, b, 128);
      TILE_DOT(0, 4, 6);
      TILE_LOAD(7, b + 16, 128);
      TILE_DOT(1, 4, 7);
      TILE_LOAD(5, a + 16 * kPairKeys, 64);
      TILE_DOT(2, 5, 6);
      TILE_DOT(3, 5, 7);
    }
    TILE_STORE(0, c, 128);
    TILE_STORE(1, c + 16, 128);
    TILE_STORE(2, c + 16 * kColumns, 128);
    TILE_STORE(3, c + 16 * kColumns + 16, 128);
  }
}

// One tile of `count` keys against one block of 32 query rows.
inline void attend_tiled_block(
    const Pool<bf16>& pool, int64_t first, int64_t count, int64_t block, const TiledScratch& scratch) {
  const Shape& s = pool.s;
  const int64_t lane = block * kColumns, dim = s.dim;
  const int32_t* positions = scratch.positions + lane;
  // Keys that some of the rows see, to whole 32s.
  const int64_t from = std::max<int64_t>(0, s.first_seen(positions[0]) - first) / 32 * 32;
  const int64_t end = std::min(count, positions[kColumns - 1] - first + 1), to = (end + 31) / 32 * 32;
  if (from >= end) return;
  const bool masked = positions[0] < first + to - 1 || s.first_seen(positions[kColumns - 1]) > first + from;
  float* sums = scratch.sums + lane * dim;
  finish_stores();
  score_tile(pool, first, from, to, count, scratch.query + lane * dim / 2, scratch.scores);
  const Floats scale = all(s.scale * 1.44269504f);  // to powers of 2
  for (int64_t half = 0; half < kColumns; half += 16) {
    const Words high = minus(load_words(positions + half), all_words(uint32_t(first)));
    const Words low = s.window > 0 ? minus(high, all_words(uint32_t(s.window - 1))) : no_words();
    auto softmax = masked ? softmax_pairs<true> : softmax_pairs<false>;
    softmax(
        scratch.scores + half, scratch.weights + half, from, to, scale, low, high, scratch.best + lane + half,
        scratch.total + lane + half, sums + half, dim);
  }
  finish_stores();
  add_tile(scratch.values, scratch.weights, from, to, dim, sums);
}

// As attend_many, where `fits_tiles`.
inline void attend_tiled(
    const Pool<bf16>& pool, const bf16* query, bf16* out, int64_t start, int64_t count, Workspace& workspace) {
  const Shape& s = pool.s;
  const int64_t group = s.group(), rows = count * group, dim = s.dim;
  const TiledScratch scratch(workspace, rows, dim);
  for (int64_t lane = 0; lane < scratch.blocks * kColumns; lane += 16) {
    for (int i = 0; i < 16; i++) {
      scratch.positions[lane + i] = int32_t(start + std::min(lane + i, rows - 1) / group);
      scratch.best[lane + i] = -std::numeric_limits<float>::infinity();
      scratch.total[lane + i] = 0.0f;
    }
    for (int64_t d = 0; d < dim; d += 32) {
      Words v[16];
      for (int i = 0; i < 16; i++)  // lanes past the last row repeat it
        v[i] = load_words(query + offset_of(pool, std::min(lane + i, rows - 1)) + d);
      transpose16(v);
      uint32_t* target = scratch.query + lane / kColumns * kColumns * dim / 2 + d / 2 * kColumns + lane % kColumns;
      for (int i = 0; i < 16; i++) store_words(target + i * kColumns, v[i]);
    }
  }
  std::memset(scratch.sums, 0, scratch.blocks * kColumns * dim * sizeof(float));
  TwoByTwo tiles;
  tiles.shape(16, 16);
  const int64_t end = start + count;  // keys below it are seen by some row
  for (int64_t first = s.first_seen(start) / kTiledKeys * kTiledKeys; first < end; first += kTiledKeys) {
    const int64_t keys = std::min(kTiledKeys, end - first);
    transpose_values(pool, first, keys, scratch.values);
    for (int64_t block = 0; block < scratch.blocks; block++) attend_tiled_block(pool, first, keys, block, scratch);
  }
  put_rows(pool, out, rows, scratch.sums, scratch.total);
}
