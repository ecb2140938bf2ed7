// Attention of few rows over int8 codes, such as of a step that checks guesses, in products of whole numbers: codes are
// multiplied as they are stored, while in bf16 opening them would take as long as all else.
//
// A query's row is whole numbers of 16 bits times a scale of its own. So are a row's weights in one tile of keys, whose
// scale is the largest of them: however small all weights of a tile are beside those of others, 15 bits of them count.
// Values' scales are a power of two, which takes part in finding the largest, times 1 to 2. Scores and sums of tiles are
// fp32. Rows lie along vectors, 16 to a block. `Products` says how products are computed, by AMX (code_tiles.h) or by
// AVX-512 with VNNI (code_words.h), and has
//   kKeys, keys(dim)   keys of a tile, at most and of rows of this size
//   kGrain             keys that are multiplied at a time, a multiple of 4
//   kStride            of 32-bit words, a key's scores
//   kMostWeight        the largest whole number of a weight
//   fits(shape)        whether it can read what lies in such a pool
//   query_words(dim), laid_words(dim): of 32 bits, of a block's query and of a laid tile
//   put_query(rows, dim, query): lays out whole numbers [16][dim]
//   lay(pool, first, from, count, end, laid): values [from, count) of the tile that begins at position `first`; what lies
//                      behind it, below `end`, is fetched. Weights of other keys are 0
//   score(pool, first, from, to, count, query, scores): keys [from, to) times a query
//   scores_of(place)   16 rows' product with a key, whose scores lie at `place`
//   put_weights(scores, t, weights): of keys t to t + 3, whole numbers in the lower halves
//   add(laid, scores, from, to, dim, sums, fade, gain): each row's sums = sums fade + values times weights gain
//   dim_of(place)      where the four sums from `place`, a multiple of four, belong
#pragma once

#include "attend_pairs.h"

constexpr int64_t kFewRows = 32;  // up to which products of whole numbers are worth a tile of their own

struct CodeScratch {
  float *sums, *scores;     // [block][dim / 16][16 rows][16]; [key][kStride]
  uint32_t *query, *laid;   // [block][query_words]; the tile's values
  float *scales, *best, *total;                       // [rows], of queries to powers of 2
  float *key_scales, *powers, *inverses, *fractions;  // [key]: values' scales are 2^powers fractions, over the largest
  int32_t *positions, *offsets;                       // [rows]
  int64_t blocks;

  template <typename Products>
  static CodeScratch of(Workspace& workspace, int64_t rows, int64_t dim) {
    CodeScratch s;
    s.blocks = (rows + 15) / 16;
    const int64_t lanes = s.blocks * 16, query_words = s.blocks * Products::query_words(dim);
    const int64_t keys = Products::kKeys, laid_words = Products::laid_words(dim);
    s.sums = workspace.floats(lanes * (dim + 5) + keys * (Products::kStride + 4) + query_words + laid_words);
    s.scores = s.sums + lanes * dim;
    s.query = (uint32_t*)(s.scores + keys * Products::kStride);
    s.laid = s.query + query_words;
    s.key_scales = (float*)(s.laid + laid_words);
    s.powers = s.key_scales + keys;
    s.inverses = s.powers + keys;
    s.fractions = s.inverses + keys;
    s.scales = s.fractions + keys;
    s.best = s.scales + lanes;
    s.total = s.best + lanes;
    s.positions = (int32_t*)(s.total + lanes);
    s.offsets = s.positions + lanes;
    return s;
  }
};

// A row as whole numbers up to 32639, whose two bytes are signed numbers both, and its scale.
inline void put_whole(const bf16* row, int64_t dim, int16_t* whole, float* scale) {
  constexpr float kMost = 32639.0f;
  Floats peaks = zeros(), poison = zeros();
  for (int64_t d = 0; d < dim; d += 16) {
    const Floats x = load16(row + d);
    peaks = larger(peaks, larger(x, zeros() - x));
    poison = plus_product(poison, x, zeros());  // NaN where one is, or is infinite
  }
  const float peak = highest_of(peaks), none = sum_of(poison);
  const bool is_usual = none == 0.0f && peak >= 0x1p-100f;
  *scale = none + (is_usual ? peak / kMost : 0.0f);
  const Floats factor = all(is_usual ? kMost / peak : 0.0f);
  for (int64_t d = 0; d < dim; d += 16) {
    const Floats x = is_usual ? nearest(load16(row + d) * factor) + all(kMagic) : all(kMagic);
    store_halves(whole + d, both(as_words(x), all_words(0xffff)));
  }
}

// The tile's value scales [keys] over the largest become powers, fractions of 1 to 2 times `unit`, and the powers'
// inverses; returns the largest. Keys whose values are below 2^-40 of it have that power. Scales that are NaN give a NaN
// power alone.
inline float split_scales(const float* scales, int64_t keys, float unit, const CodeScratch& scratch) {
  Floats peaks = zeros();
  for (int64_t t = 0; t < keys; t += 16) peaks = larger(load(scales + t), peaks);
  const float found = highest_of(peaks), most = found > 0.0f ? found : 1.0f;
  for (int64_t t = 0; t < keys; t += 16) {
    const Floats ratio = load(scales + t) / all(most);
    const Words exponent = minus(shift_right<23>(as_words(ratio)), all_words(127));
    const Floats power = smaller(larger(signed_floats(exponent), all(-40.0f)), zeros());
    const Floats inverse = exp2_16(zeros() - power);
    store(scratch.powers + t, plus_product(power, ratio, zeros()));
    store(scratch.inverses + t, inverse);
    store(scratch.fractions + t, larger(ratio * inverse, zeros()) * all(unit));
  }
  return most;
}

// One tile of `count` keys against one block of rows. Values' scales are the tile's fractions times `most`.
template <typename Products>
void attend_code_block(
    Products& products, const Pool<int8>& pool, int64_t first, int64_t count, int64_t block, float most,
    const CodeScratch& scratch) {
  constexpr int64_t kGrain = Products::kGrain, kStride = Products::kStride;
  const Shape& s = pool.s;
  const int64_t lane = block * 16, dim = s.dim;
  const int32_t *positions = scratch.positions + lane, first_row = positions[0], last_row = positions[15];
  const int64_t from = std::max<int64_t>(0, s.first_seen(first_row) - first) / kGrain * kGrain;
  const int64_t end = std::min(count, last_row - first + 1), to = (end + kGrain - 1) / kGrain * kGrain;
  if (from >= end) return;
  float* scores = scratch.scores;
  products.score(pool, first, from, to, count, scratch.query + block * Products::query_words(dim), scores);

  const Words high = minus(load_words(positions), all_words(uint32_t(first)));
  const Seen seen{
      s.first_seen(positions, first), high, (s.first_seen(last_row) - first + 3) & ~3, (first_row - first + 1) & ~3};
  const int64_t all_from = std::clamp(seen.first, from, to), all_to = std::clamp(seen.last, all_from, to);
  // f(begin, end, whether rows may not see some of these keys)
  auto in_parts = [&](auto&& f) {
    f(from, all_from, std::true_type());
    f(all_from, all_to, std::false_type());
    f(all_to, to, std::true_type());
  };
  const Floats none = all(-std::numeric_limits<float>::infinity()), least = all(-126.0f);
  const Floats scale = load(scratch.scales + lane);
  const float *key_scales = scratch.key_scales, *powers = scratch.powers;
  Floats tops[4] = {none, none, none, none};
  auto scale_all = [&](auto has_cap) {
    in_parts([&](int64_t begin, int64_t end, auto masked) {
      for (int64_t t = begin; t < end; t += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          float* place = scores + (t + i) * kStride;
          const Floats power = all(powers[t + i]), dot = Products::scores_of(place) * all(key_scales[t + i]);
          const Floats x = has_cap ? capped(dot * scale, s.cap()) + power : plus_product(power, dot, scale);
          store(place, x);
          tops[i] = masked ? larger_where(seen.at(t + i), tops[i], x) : larger(tops[i], x);
        }
    });
  };
  s.softcap > 0 ? scale_all(std::true_type()) : scale_all(std::false_type());
  const Floats top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])), shift = larger(all(-1e30f), top);
  const float *inverses = scratch.inverses, *fractions = scratch.fractions;
  Floats sums[2] = {zeros(), zeros()};
  in_parts([&](int64_t begin, int64_t end, auto masked) {
    for (int64_t t = begin; t < end; t += 4) {
      Words weights[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        Floats e = rough_exp2_16(larger(least, load(scores + (t + i) * kStride) - shift));
        if (masked) e = keep(seen.at(t + i), e);
        sums[i % 2] = plus_product(sums[i % 2], e, all(inverses[t + i]));
        weights[i] = as_words(plus_product(all(kMagic), e, all(fractions[t + i])));
      }
      Products::put_weights(scores, t, weights);
    }
  });
  float *best = scratch.best + lane, *total = scratch.total + lane;
  const Floats before = load(best), now = larger(before, top), base = larger(all(-1e30f), now);
  auto power_of = [&](Floats gap) { return keep(not_less(gap, least), exp2_16(larger(least, gap))); };
  const Floats left = power_of(before - base), gained = power_of(shift - base);
  store(total, plus_product((sums[0] + sums[1]) * gained, load(total), left));
  store(best, now);
  alignas(64) float fade[16], gain[16];
  store(fade, left);
  store(gain, gained * all(most));
  products.add(scratch.laid, scores, from, to, dim, scratch.sums + lane * dim, fade, gain);
}

// `count` query tokens of one sequence, the first at position `start`, all query heads of one KV head.
template <typename Products>
void attend_codes(
    const Pool<int8>& pool, const bf16* query, bf16* out, int64_t start, int64_t count, Workspace& workspace) {
  const Shape& s = pool.s;
  const int64_t rows = count * s.group(), dim = s.dim;
  const CodeScratch scratch = CodeScratch::of<Products>(workspace, rows, dim);
  const int64_t lanes = scratch.blocks * 16;
  place_rows(pool, start, rows, lanes, scratch.positions, scratch.offsets, scratch.best, scratch.total);
  for (int64_t lane = 0; lane < lanes; lane += 16) {
    int16_t* whole = (int16_t*)scratch.sums;
    for (int64_t i = 0; i < 16; i++) put_whole(query + scratch.offsets[lane + i], dim, whole + i * dim, scratch.scales + lane + i);
    store(scratch.scales + lane, load(scratch.scales + lane) * all(s.scale * 1.44269504f));
    Products::put_query(whole, dim, scratch.query + lane / 16 * Products::query_words(dim));
  }
  std::memset(scratch.sums, 0, lanes * dim * sizeof(float));
  Products products;
  const int64_t size = Products::keys(dim);
  constexpr float kUnit = 0.5f * Products::kMostWeight;
  const int64_t begin = s.first_seen(start), end = start + count;  // of the keys that some row sees
  for (int64_t first = begin / size * size; first < end; first += size) {
    const int64_t from = std::max<int64_t>(0, begin - first), keys = std::min(size, end - first);
    products.lay(pool, first, from, keys, end, scratch.laid);
    load_scales(pool, first, from, keys, size, scratch.key_scales, scratch.powers);
    const float most = split_scales(scratch.powers, size, kUnit, scratch) / kUnit;
    for (int64_t block = 0; block < scratch.blocks; block++)
      attend_code_block(products, pool, first, keys, block, most, scratch);
  }
  for (int64_t row = 0; row < rows; row++) {
    const float* sums = scratch.sums + row / 16 * 16 * dim + row % 16 * 16;
    float* ordered = (float*)scratch.laid;
    for (int64_t place = 0; place < dim; place += 4)
      std::memcpy(ordered + Products::dim_of(place), sums + place / 16 * 256 + place % 16, 16);
    const Floats inverse = all(1.0f / scratch.total[row]);
    for (int64_t d = 0; d < dim; d += 16) store16(out + scratch.offsets[row] + d, load(ordered + d) * inverse);
  }
}
