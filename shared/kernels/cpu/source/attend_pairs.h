// A prompt's attention in bf16, laid out as in attend_many.h, its products of pairs: `Products` says how they are computed,
// by AMX (attend_tiles.h) or by AVX512-BF16 (attend_dots.h). Queries and keys are as they are stored, weights rounded to
// bf16; sums, and the softmax between the two products, are fp32. It runs down vectors. Codes are bf16 numbers too:
// scores are multiplied by the keys' scales, weights by the values' before they are rounded.
//
// Products has
//   kKeys              keys of a tile: sums are loaded and stored once for all of them; whole 32s
//   fits(shape)        whether it can read what lies in such a pool
//   begin()            what is to be held while products are computed
//   words<KV>(dim)     of 32 bits, that it lays a tile of keys out in
//   lay(pool, first, count, end, laid): `count` keys from `first` on; those of the next tile, below `end`, are fetched
//   score(pool, first, from, to, count, laid, query, scores, lanes): keys [from, to) of the tile, whole 32s, times the
//                      query of the rows in the first `lanes` columns; what comes out for keys past `count` may be
//                      anything: they are not seen
//   add(laid, weights, from, to, dim, sums, lanes): sums [dim][32] += values times weights
#pragma once

#include "attend_many.h"

struct PairScratch {
  float *sums, *best, *total, *scores;     // [block][dim][32]; [rows]; [rows]; [key][32]
  uint32_t *query, *weights, *laid;        // pairs: [block][dim / 2][32], [key / 2][32]; the tile of keys
  float *key_scales, *value_scales;        // [key], of codes
  int32_t* positions;                      // [rows]
  int64_t blocks;

  PairScratch(Workspace& workspace, int64_t rows, int64_t dim, int64_t keys, int64_t laid_words)
      : blocks((rows + kColumns - 1) / kColumns) {
    const int64_t lanes = blocks * kColumns;
    sums = workspace.floats(lanes * dim * 3 / 2 + 3 * lanes + keys * (kColumns * 3 / 2 + 2) + laid_words);
    scores = sums + lanes * dim;
    weights = (uint32_t*)(scores + keys * kColumns);
    query = weights + keys / 2 * kColumns;
    laid = query + lanes * dim / 2;
    best = (float*)(laid + laid_words);
    total = best + lanes;
    positions = (int32_t*)(total + lanes);
    key_scales = total + 2 * lanes;
    value_scales = key_scales + keys;
  }
};

// `count` rows of codes, one behind the other, as bf16, which has them exactly.
template <typename KV>
void open_rows(const KV* codes, int64_t count, int64_t dim, bf16* rows) {
  for (int64_t i = 0; i < count * dim; i += 16) store16(rows + i, load16(codes + i));
}

// 2^x for -126 <= x <= 0 to 1 part in 13000, which bf16 does not show: a polynomial of degree 3, least in relative
// error, for |r| <= 1/2. NaN stays NaN.
inline Floats rough_exp2_16(Floats x) {
  const Floats n = nearest(x), r = x - n;
  Floats y = plus_product(all(0.24261113f), all(0.05517167f), r);
  y = plus_product(all(0.69326099f), y, r);
  y = plus_product(all(0.99992807f), y, r);
  return times_small_power(y, n);
}

// 16 lanes of scores of keys [from, to) become pairs of weights, as softmax_lanes. `scale`: to powers of 2;
// `value_scales`: where Scaled, factors of the weights; their sum is of those without.
template <bool Masked, bool Scaled>
void softmax_pairs(
    const float* scores, const float* value_scales, uint32_t* weights, int64_t from, int64_t to, Floats scale, Words low,
    Words high, float* best, float* total, float* sums, int64_t dim) {
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
    if constexpr (Scaled)
      store_words(weights + t / 2 * kColumns, paired(even * all(value_scales[t]), odd * all(value_scales[t + 1])));
    else
      store_words(weights + t / 2 * kColumns, paired(even, odd));
    sum = sum + (even + odd);
  }
  const Floats gap = before - shift, fade = keep(not_less(gap, least), exp2_16(larger(least, gap)));
  store(total, plus_product(sum, load(total), fade));
  store(best, top);
  if (any_differs(top, before))
    for (int64_t d = 0; d < dim; d++) store(sums + d * kColumns, load(sums + d * kColumns) * fade);
}

// One tile of `count` keys against one block of query rows, which `lanes` columns hold.
template <typename Products, typename KV>
void attend_pair_block(
    const Pool<KV>& pool, int64_t first, int64_t count, int64_t block, int64_t lanes, const PairScratch& scratch) {
  const Shape& s = pool.s;
  const int64_t lane = block * kColumns, dim = s.dim;
  const int32_t* positions = scratch.positions + lane;
  // Keys that some of the rows see, to whole 32s.
  const int64_t from = std::max<int64_t>(0, s.first_seen(positions[0]) - first) / 32 * 32;
  const int64_t end = std::min(count, positions[kColumns - 1] - first + 1), to = (end + 31) / 32 * 32;
  if (from >= end) return;
  const bool masked = positions[0] < first + to - 1 || s.first_seen(positions[kColumns - 1]) > first + from;
  float* sums = scratch.sums + lane * dim;
  Products::score(pool, first, from, to, count, scratch.laid, scratch.query + lane * dim / 2, scratch.scores, lanes);
  if (kIsCode<KV>) scale_rows(scratch.scores + from * kColumns, scratch.key_scales + from, to - from, lanes);
  Floats scale = all(s.scale * 1.44269504f);  // to powers of 2
  if (s.softcap > 0) {
    for (int64_t t = from; t < to; t++)
      for (float* score = scratch.scores + t * kColumns; score < scratch.scores + t * kColumns + lanes; score += 16)
        store(score, capped(load(score) * scale, s.cap()));
    scale = all(1.0f);
  }
  for (int64_t half = 0; half < lanes; half += 16) {
    const Words high = minus(load_words(positions + half), all_words(uint32_t(first)));
    const Words low = s.first_seen(positions + half, first);
    auto softmax = masked ? softmax_pairs<true, kIsCode<KV>> : softmax_pairs<false, kIsCode<KV>>;
    softmax(
        scratch.scores + half, scratch.value_scales, scratch.weights + half, from, to, scale, low, high,
        scratch.best + lane + half, scratch.total + lane + half, sums + half, dim);
  }
  Products::add(scratch.laid, scratch.weights, from, to, dim, sums, lanes);
}

// As attend_many, where `Products::fits`.
template <typename Products, typename KV>
void attend_pairs(
    const Pool<KV>& pool, const bf16* query, bf16* out, int64_t start, int64_t count, Workspace& workspace) {
  const Shape& s = pool.s;
  const int64_t group = s.group(), rows = count * group, dim = s.dim;
  const PairScratch scratch(workspace, rows, dim, Products::kKeys, Products::template words<KV>(dim));
  for (int64_t lane = 0; lane < scratch.blocks * kColumns; lane += 16) {
    for (int i = 0; i < 16; i++) {
      scratch.positions[lane + i] = int32_t(start + std::min(lane + i, rows - 1) / group);
      const int64_t head = pool.head * group + std::min(lane + i, rows - 1) % group;
      scratch.best[lane + i] = s.first_best(head, -std::numeric_limits<float>::infinity());
      scratch.total[lane + i] = s.first_total();
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
  [[maybe_unused]] const auto held = Products::begin();
  const int64_t end = start + count;  // keys below it are seen by some row
  for (int64_t first = s.first_seen(start) / Products::kKeys * Products::kKeys; first < end; first += Products::kKeys) {
    const int64_t keys = std::min(Products::kKeys, end - first);
    Products::lay(pool, first, keys, end, scratch.laid);
    if constexpr (kIsCode<KV>) load_scales(pool, first, keys, Products::kKeys, scratch.key_scales, scratch.value_scales);
    for (int64_t block = 0; block < scratch.blocks; block++)
      attend_pair_block<Products>(pool, first, keys, block, lanes_of(rows, block), scratch);
  }
  put_rows(pool, out, rows, scratch.sums, scratch.total);
}
