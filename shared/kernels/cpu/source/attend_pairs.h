// A prompt's attention in bf16, laid out as in attend_many.h, its products of pairs: `Products` says how they are computed,
// by AMX (attend_tiles.h) or by AVX512-BF16 (attend_dots.h). Queries and keys are as they are stored, weights rounded to
// bf16; sums, and the softmax between the two products, are fp32. It runs down vectors. Codes are bf16 numbers too:
// scores are multiplied by the keys' scales, weights by the values' before they are rounded.
//
// Products, one for a task of so many rows, has
//   kKeys              keys of a tile: sums are loaded and stored once for all of them
//   kGrain             keys that are multiplied at a time, a multiple of 4: parts of a tile are whole such grains
//   fits(shape)        whether it can read what lies in such a pool
//   words<KV>(dim)     of 32 bits, that it lays a tile of keys out in
//   lay(pool, first, from, count, end, laid): keys [from, count) of the tile that begins at position `first`; those of
//                      the next tile, below `end`, are fetched. No row sees other keys: these have weight 0, and what
//                      lies there in memory may be no number
//   query_pairs<KV>(row): 32 dimensions of a query's row, in the pairs that keys are multiplied in
//   score(pool, first, from, to, count, laid, query, scores, lanes): keys [from, to) of the tile times the query of the
//                      rows in the first `lanes` columns; what comes out for keys that were not laid may be anything
//   add(laid, weights, from, to, dim, sums, lanes): sums [dim][32] += values times weights
//   fade(sums, dim, by): 16 lanes of sums times 16 numbers
//   finish(sums, dim): what lay otherwise meanwhile now is [dim][32]
#pragma once

#include "attend_many.h"

struct PairScratch {
  float *sums, *best, *total, *scores;  // [block][dim][32]; [rows]; [rows]; [key][32]
  uint32_t *query, *laid;               // pairs, [block][dim / 2][32]; the tile of keys
  float *key_scales, *value_scales;     // [key], of codes
  int32_t *positions, *offsets;         // [rows]
  int64_t blocks;

  PairScratch(Workspace& workspace, int64_t rows, int64_t dim, int64_t keys, int64_t laid_words)
      : blocks((rows + kColumns - 1) / kColumns) {
    const int64_t lanes = blocks * kColumns;
    sums = workspace.floats(lanes * dim * 3 / 2 + 4 * lanes + keys * (kColumns + 2) + laid_words);
    scores = sums + lanes * dim;
    query = (uint32_t*)(scores + keys * kColumns);
    laid = query + lanes * dim / 2;
    best = (float*)(laid + laid_words);
    total = best + lanes;
    positions = (int32_t*)(total + lanes);
    offsets = positions + lanes;
    key_scales = total + 3 * lanes;
    value_scales = key_scales + keys;
  }
};

// `count` rows of numbers that bf16 has exactly, codes or its own, one behind the other: the upper halves of them.
template <typename KV>
void open_rows(const KV* codes, int64_t count, int64_t dim, bf16* rows) {
  for (int64_t i = 0; i < count * dim; i += 16) store_halves(rows + i, shift_right<16>(as_words(load16(codes + i))));
}

// Numbers that bf16 has exactly, two in each word.
inline Words joined(Floats low, Floats high) { return either(shift_right<16>(as_words(low)), as_words(high)); }

// 2^x for -126 <= x <= 0 to 1 part in 13000, which bf16 does not show: a polynomial of degree 3, least in relative
// error, for |r| <= 1/2. NaN stays NaN.
inline Floats rough_exp2_16(Floats x) {
  const Floats n = nearest(x), r = x - n;
  Floats y = plus_product(all(0.24261113f), all(0.05517167f), r);
  y = plus_product(all(0.69326099f), y, r);
  y = plus_product(all(0.99992807f), y, r);
  return times_small_power(y, n);
}

// Keys of a tile that 16 rows see, counted from its first: each row from its `low` to its `high`, and all of them
// [first, last), which are whole fours.
struct Seen {
  Words low, high;
  int64_t first, last;

  Mask at(int64_t key) const {
    const Words k = all_words(uint32_t(key));
    return both(at_most(low, k), at_most(k, high));
  }
};

// 16 lanes of scores of keys [from, to) become pairs of weights, [key / 2][32], in their place: as softmax_lanes. `scale`:
// to powers of 2; `value_scales`: where Scaled, factors of the weights; their sum is of those without. `fade` is called
// with what sums so far are to be multiplied by, where that is not 1.
template <bool Scaled, typename F>
void softmax_pairs(
    float* scores, const float* value_scales, int64_t from, int64_t to, Floats scale, const Seen& seen, float* best,
    float* total, F&& fade) {
  const Floats none = all(-std::numeric_limits<float>::infinity()), least = all(-126.0f);
  const int64_t first = std::clamp(seen.first, from, to), last = std::clamp(seen.last, first, to);
  // f(begin, end, whether rows may not see some of these keys)
  auto in_parts = [&](auto&& f) {
    f(from, first, std::true_type());
    f(first, last, std::false_type());
    f(last, to, std::true_type());
  };
  const Floats before = load(best);
  Floats tops[4] = {none, none, none, none};
  in_parts([&](int64_t begin, int64_t end, auto masked) {
    for (int64_t t = begin; t < end; t += 4)
      for (int i = 0; i < 4; i++) {
        const Floats s = load(scores + (t + i) * kColumns);
        tops[i] = masked ? larger_where(seen.at(t + i), tops[i], s) : larger(tops[i], s);
      }
  });
  const Floats top = larger(before, larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])) * scale);
  const Floats shift = larger(all(-1e30f), top);
  Floats sum = zeros();
  in_parts([&](int64_t begin, int64_t end, auto masked) {
    auto weight = [&](int64_t t) {
      const Floats e = rough_exp2_16(larger(least, plus_product(zeros() - shift, load(scores + t * kColumns), scale)));
      return masked ? keep(seen.at(t), e) : e;
    };
    for (int64_t t = begin; t < end; t += 2) {
      const Floats even = weight(t), odd = weight(t + 1);
      float* pairs = scores + t / 2 * kColumns;
      if constexpr (Scaled)
        store_words(pairs, paired(even * all(value_scales[t]), odd * all(value_scales[t + 1])));
      else
        store_words(pairs, paired(even, odd));
      sum = sum + (even + odd);
    }
  });
  const Floats gap = before - shift, left = keep(not_less(gap, least), exp2_16(larger(least, gap)));
  store(total, plus_product(sum, load(total), left));
  store(best, top);
  if (any_differs(top, before)) fade(left);
}

// 16 columns of sums [dim][32] times 16 numbers.
inline void fade_columns(float* sums, int64_t dim, Floats by) {
  for (int64_t d = 0; d < dim; d++) store(sums + d * kColumns, load(sums + d * kColumns) * by);
}

// The same where sums lie in squares of 16 dimensions by 16 rows, transposed: products of few rows whose broadcast side are
// weights.
inline void fade_squares(float* sums, int64_t dim, Floats by) {
  alignas(64) float of_rows[16];
  store(of_rows, by);
  for (int64_t d = 0; d < dim; d += 16, sums += 16 * kColumns)
    for (int64_t r = 0; r < 16; r++) store(sums + r * kColumns, load(sums + r * kColumns) * all(of_rows[r]));
}
inline void turn_squares(float* sums, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 16, sums += 16 * kColumns) {
    Words v[16];
    for (int r = 0; r < 16; r++) v[r] = load_words(sums + r * kColumns);
    transpose16(v);
    for (int r = 0; r < 16; r++) store_words(sums + r * kColumns, v[r]);
  }
}

// One tile of `count` keys against one block of query rows, which `lanes` columns hold.
template <typename Products, typename KV>
void attend_pair_block(
    Products& products, const Pool<KV>& pool, int64_t first, int64_t count, int64_t block, int64_t lanes,
    const PairScratch& scratch) {
  constexpr int64_t kGrain = Products::kGrain;
  const Shape& s = pool.s;
  const int64_t lane = block * kColumns, dim = s.dim;
  const int32_t *positions = scratch.positions + lane, first_row = positions[0], last_row = positions[kColumns - 1];
  // Keys that some of the rows see, to whole grains.
  const int64_t from = std::max<int64_t>(0, s.first_seen(first_row) - first) / kGrain * kGrain;
  const int64_t end = std::min(count, last_row - first + 1), to = (end + kGrain - 1) / kGrain * kGrain;
  if (from >= end) return;
  float *sums = scratch.sums + lane * dim, *scores = scratch.scores;
  products.score(pool, first, from, to, count, scratch.laid, scratch.query + lane * dim / 2, scores, lanes);
  if (kIsCode<KV>) scale_rows(scores + from * kColumns, scratch.key_scales + from, to - from, lanes);
  Floats scale = all(s.scale * 1.44269504f);  // to powers of 2
  if (s.softcap > 0) {
    for (int64_t t = from; t < to; t++)
      for (float* score = scores + t * kColumns; score < scores + t * kColumns + lanes; score += 16)
        store(score, capped(load(score) * scale, s.cap()));
    scale = all(1.0f);
  }
  const int64_t seen_from = (s.first_seen(last_row) - first + 3) & ~3, seen_to = (first_row - first + 1) & ~3;
  for (int64_t half = 0; half < lanes; half += 16) {
    const Words high = minus(load_words(positions + half), all_words(uint32_t(first)));
    const Seen seen{s.first_seen(positions + half, first), high, seen_from, seen_to};
    softmax_pairs<kIsCode<KV>>(
        scores + half, scratch.value_scales, from, to, scale, seen, scratch.best + lane + half,
        scratch.total + lane + half, [&](Floats by) { products.fade(sums + half, dim, by); });
  }
  products.add(scratch.laid, (const uint32_t*)scores, from, to, dim, sums, lanes);
}

// As put_rows, two dimensions a word.
inline void put_pair_rows(
    bf16* out, const int32_t* offsets, int64_t rows, int64_t dim, const float* sums, const float* total) {
  for (int64_t lane = 0; lane < rows; lane += 16) {
    const Floats inverse = all(1.0f) / load(total + lane);
    for (int64_t d = 0; d < dim; d += 32) {
      const float* source = sums + lane / kColumns * kColumns * dim + d * kColumns + lane % kColumns;
      auto of = [&](int i) { return load(source + i * kColumns) * inverse; };
      Words v[16];
      for (int i = 0; i < 16; i++) v[i] = paired(of(2 * i), of(2 * i + 1));
      transpose16(v);
      for (int i = 0; i < 16 && lane + i < rows; i++) store_words(out + offsets[lane + i] + d, v[i]);
    }
  }
}

// As attend_many, where `Products::fits`.
template <typename Products, typename KV>
void attend_pairs(
    const Pool<KV>& pool, const bf16* query, bf16* out, int64_t start, int64_t count, Workspace& workspace) {
  const Shape& s = pool.s;
  const int64_t rows = count * s.group(), dim = s.dim;
  const PairScratch scratch(workspace, rows, dim, Products::kKeys, Products::template words<KV>(dim));
  const int64_t lanes = scratch.blocks * kColumns;
  place_rows(pool, start, rows, lanes, scratch.positions, scratch.offsets, scratch.best, scratch.total);
  for (int64_t lane = 0; lane < lanes; lane += 16)
    for (int64_t d = 0; d < dim; d += 32) {
      Words v[16];
      for (int i = 0; i < 16; i++) v[i] = Products::template query_pairs<KV>(query + scratch.offsets[lane + i] + d);
      transpose16(v);
      uint32_t* target = scratch.query + lane / kColumns * kColumns * dim / 2 + d / 2 * kColumns + lane % kColumns;
      for (int i = 0; i < 16; i++) store_words(target + i * kColumns, v[i]);
    }
  std::memset(scratch.sums, 0, lanes * dim * sizeof(float));
  Products products(rows);
  constexpr int64_t kKeys = Products::kKeys;
  const int64_t begin = s.first_seen(start), end = start + count;  // of the keys that some row sees
  for (int64_t first = begin / kKeys * kKeys; first < end; first += kKeys) {
    const int64_t from = std::max<int64_t>(0, begin - first), keys = std::min(kKeys, end - first);
    products.lay(pool, first, from, keys, end, scratch.laid);
    if constexpr (kIsCode<KV>) load_scales(pool, first, from, keys, kKeys, scratch.key_scales, scratch.value_scales);
    for (int64_t block = 0; block < scratch.blocks; block++)
      attend_pair_block(products, pool, first, keys, block, lanes_of(rows, block), scratch);
  }
  products.finish(scratch.sums, dim);
  put_pair_rows(out, scratch.offsets, rows, dim, scratch.sums, scratch.total);
}
