// The products of a prompt's attention by AVX512-BF16: keys and values are the broadcast side, as in attend_many.h. Keys
// are multiplied where they lie, pairs over dim; values are laid out as pairs over keys.
//
// Up to 16 rows, such as a step that checks guesses has, use a tile once: to lay it out would take a good part of their
// time. So their values are paired in registers, and weights are the broadcast side. Until `finish` their sums lie in
// squares of 16 dimensions by 16 rows, transposed.
#pragma once

#include "attend_pairs.h"

// Addresses of the next tile's keys and values, to be prefetched a line of 64 bytes every few products: of many prefetches
// at once the processor drops most, and then each read from memory holds up those behind it.
class Upcoming {
 public:
  static constexpr int64_t kLines = 8, kMostTaken = 16;  // lines of a piece; pieces that a product takes

  Upcoming() { clear(); }
  void clear() { next_ = end_ = pieces_; }
  // Keys and values from `first` to `last`; what is beyond kMost pieces is not fetched.
  template <typename KV>
  void list(const Pool<KV>& pool, int64_t first, int64_t last) {
    clear();
    for (const int64_t plane : {int64_t(0), pool.to_values()})
      pool.runs(first, last, kMost, [&](Run<KV> run, int64_t, int64_t count) {
        const char *at = (const char*)run.moved(plane).rows, *to = at + count * pool.s.dim * int64_t(sizeof(KV));
        for (; at < to && end_ < pieces_ + kMost; at += 64 * kLines) *end_++ = at;
      });
    std::fill(end_, end_ + kMostTaken, (const char*)this);
  }
  // The next `count` pieces; past the last one each is this object, whose prefetch costs nothing.
  const char* const* take(int64_t count) {
    const char* const* taken = next_ < end_ ? next_ : end_;
    next_ = taken + count;
    return taken;
  }

 private:
  static constexpr int64_t kMost = 512;

  const char* pieces_[kMost + kMostTaken];
  const char* const* next_;
  const char** end_;
};

class DotProducts {
 public:
  static constexpr int64_t kKeys = 128;  // as keys and as values they fill most of the first cache
  static constexpr int64_t kGrain = 8;   // keys whose sums are in registers at a time

  static bool fits(const Shape& s) {
    return s.dim % 32 == 0 && s.dim <= 32 * Upcoming::kMostTaken && s.block_size % 2 == 0 && s.scale > 0.0f;
  }
  // Values, [key / 2][dim]; keys that do not lie as they are multiplied, [key][dim]; 16 opened values.
  template <typename KV>
  static int64_t words(int64_t dim) { return (2 * kKeys + 16) * dim / 2; }

  explicit DotProducts(int64_t rows) : few_(rows <= 16) {}

  template <typename KV>
  void lay(const Pool<KV>& pool, int64_t first, int64_t from, int64_t count, int64_t end, uint32_t* laid) {
    const int64_t dim = pool.s.dim;
    upcoming_.list(pool, first + kKeys, std::min(end, first + 2 * kKeys));
    bf16 *keys = copied_keys(laid, dim), *opened = keys + kKeys * dim;
    from_ = from / 2 * 2, count_ = count;  // a key before `from` in its pair is one of the same block
    if (few_) return list_values(pool, first, keys, (bf16*)laid);
    pool.runs(first + from_, first + count, 16, [&](Run<KV> run, int64_t position, int64_t n) {
      const Run<KV> values = run.moved(pool.to_values());
      if (!lie_as_needed(pool)) open_rows(run.rows, n, dim, keys + (position - first) * dim);
      uint32_t* pairs = laid + (position - first) / 2 * dim;  // a run begins at an even key, as blocks do
      if constexpr (kIsCode<KV>) {
        open_rows(values.rows, n, dim, opened);
        pair_values(opened, n, dim, pairs);
      } else {
        pair_values(values.rows, n, dim, pairs);
      }
    });
    // What no row sees has weight 0, and must be a number.
    const int64_t pairs = (count + 1) / 2, grains = (count + kGrain - 1) / kGrain;
    std::memset(laid + pairs * dim, 0, (grains * kGrain / 2 - pairs) * dim * sizeof(uint32_t));
  }

  template <typename KV>
  static Words query_pairs(const bf16* row) { return load_words(row); }

  template <typename KV>
  void score(
      const Pool<KV>& pool, int64_t first, int64_t from, int64_t to, int64_t, const uint32_t* laid, const uint32_t* query,
      float* scores, int64_t lanes) {
    const int64_t dim = pool.s.dim;
    const bf16* copied = copied_keys(laid, dim);
    for (int64_t t = from; t < to; t += kGrain) {
      const bf16* keys = copied + t * dim;
      if constexpr (sizeof(KV) == 2)
        if (lie_as_needed(pool)) keys = pool.keys(first + t).rows;
      const auto multiply = lanes == 16 ? score_keys<1> : score_keys<2>;
      multiply((const float*)keys, (const float*)query, dim / 2, scores + t * kColumns, upcoming_.take(dim / 32));
    }
  }

  void add(
      const uint32_t* laid, const uint32_t* weights, int64_t from, int64_t to, int64_t dim, float* sums, int64_t lanes) {
    from = std::max(from, from_);
    if (few_) return add_to_few((const float*)weights, from, to, dim, sums);
    const float *values = (const float*)laid + from * dim / 2, *b = (const float*)weights + from / 2 * kColumns;
    const int64_t pairs = (to - from) / 2;
    const Tiles tiles(dim);
    for (int64_t t = 0; t < tiles.count; t++)
      with_rows(tiles.size(t), [&](auto rows) {
        const auto multiply = lanes == 16 ? add_values<rows.value, 1> : add_values<rows.value, 2>;
        const int64_t d = tiles.first(t);
        multiply(values + d, dim, b, pairs, sums + d * kColumns, upcoming_.take((pairs + kLines - 1) / kLines));
      });
  }

  void fade(float* sums, int64_t dim, Floats by) const {
    few_ ? fade_squares(sums, dim, by) : fade_columns(sums, dim, by);
  }
  void finish(float* sums, int64_t dim) const {
    if (few_) turn_squares(sums, dim);
  }

 private:
  static constexpr int64_t kLines = Upcoming::kLines;

  // Whether each grain of keys is one piece of memory in bf16.
  template <typename KV>
  static bool lie_as_needed(const Pool<KV>& pool) { return sizeof(KV) == 2 && pool.s.block_size % kGrain == 0; }
  static bf16* copied_keys(const uint32_t* laid, int64_t dim) { return (bf16*)(laid + kKeys * dim / 2); }

  // Pairs of neighbouring rows, a last one with zeros.
  static void pair_values(const bf16* rows, int64_t count, int64_t dim, uint32_t* pairs) {
    for (int64_t i = 0; i < count; i += 2, rows += 2 * dim)
      for (int64_t d = 0; d < dim; d += 32, pairs += 32) {
        Words low, high;
        zip_halves(load_words(rows + d), i + 1 < count ? load_words(rows + dim + d) : no_words(), low, high);
        store_words(pairs, low);
        store_words(pairs + 16, high);
      }
  }

  // c[8][16 V] = keys, rows of k pairs, times b[k][32]. With one vector of columns, even and odd pairs have sums of their
  // own: with eight sums in all each product would wait for an earlier one.
  template <int V>
  __attribute__((noinline)) static void score_keys(
      const float* keys, const float* b, int64_t k, float* c, const char* const* ahead) {
    Floats sums[kGrain][2];
#pragma GCC unroll 8
    for (int r = 0; r < kGrain; r++) sums[r][0] = sums[r][1] = zeros();
    for (int64_t piece = 0; piece < k; piece += 2 * kLines, ahead++)
      for (int64_t line = 0; line < kLines; line++) {
        const int64_t j = piece + 2 * line;
        __builtin_prefetch(*ahead + 64 * line, 0, 2);
        if constexpr (V == 2) {
          add_pair(sums, keys + j, k, b + j * kColumns, b + j * kColumns + 16, 0);
          add_pair(sums, keys + j + 1, k, b + (j + 1) * kColumns, b + (j + 1) * kColumns + 16, 0);
        } else {
          add_pair(sums, keys + j, k, b + j * kColumns, b + (j + 1) * kColumns, 1);
        }
      }
#pragma GCC unroll 8
    for (int r = 0; r < kGrain; r++) {
      if constexpr (V == 1) sums[r][0] = sums[r][0] + sums[r][1];
      store(c + r * kColumns, sums[r][0]);
      if constexpr (V == 2) store(c + r * kColumns + 16, sums[r][1]);
    }
  }
  // sums[r][v] += keys(r) at v * `step` times the v-th of two vectors.
  __attribute__((always_inline)) static inline void add_pair(
      Floats (&sums)[kGrain][2], const float* keys, int64_t k, const float* b, const float* other, int step) {
    const Floats x[2] = {load(b), load(other)};
#pragma GCC unroll 8
    for (int r = 0; r < kGrain; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) sums[r][v] = PairsOfBf16::plus(sums[r][v], all(keys[r * k + v * step]), x[v]);
  }

  // c[R][16 V] += values, pairs `dim` apart, times b[k][32].
  template <int R, int V>
  __attribute__((noinline)) static void add_values(
      const float* values, int64_t dim, const float* b, int64_t k, float* c, const char* const* ahead) {
    Floats sums[R][V];
    load_sums(sums, c);
    for (int64_t j = 0; j < k; j += kLines, ahead++)
      add_products<R, V, PairsOfBf16, true>(
          sums, values + j * dim, dim, b + j * kColumns, std::min(kLines, k - j), (const float*)*ahead, 16);
    store_sums(sums, c);
  }

  // Notes where each pair of values lies: in the pool; in `room` codes, opened, and the last run, whose last value may
  // have no partner.
  template <typename KV>
  void list_values(const Pool<KV>& pool, int64_t first, bf16* keys, bf16* room) {
    const int64_t dim = pool.s.dim;
    pool.runs(first + from_, first + count_, 16, [&](Run<KV> run, int64_t position, int64_t n) {
      const int64_t t = position - first;
      if (!lie_as_needed(pool)) open_rows(run.rows, n, dim, keys + t * dim);
      const KV* values = run.moved(pool.to_values()).rows;
      if (kIsCode<KV> || t + n == count_) open_rows(values, n, dim, room + t * dim);
      for (int64_t i = 0; i < n; i += 2) {
        pairs_[(t + i) / 2] = room + (t + i) * dim;
        if constexpr (sizeof(KV) == 2)
          if (t + n < count_) pairs_[(t + i) / 2] = (const bf16*)values + i * dim;
      }
    });
    if (count_ % 2) std::memset(room + count_ * dim, 0, dim * sizeof(bf16));
  }

  void add_to_few(const float* weights, int64_t from, int64_t to, int64_t dim, float* sums) {
    const int64_t pairs = (std::min(to, count_) - from + 1) / 2;
    for (int64_t d = 0; d < dim; d += 32)
      for (int64_t row = 0; row < 16; row += kGrain)
        add_eight(
            pairs_ + from / 2, d, dim, weights + from / 2 * kColumns + row, pairs, sums + (d + row) * kColumns,
            upcoming_.take((pairs + kLines - 1) / kLines));
  }
  // Eight rows' sums of 32 dimensions from `d` on, two squares.
  __attribute__((noinline)) static void add_eight(
      const bf16* const* values, int64_t d, int64_t dim, const float* weights, int64_t pairs, float* c,
      const char* const* ahead) {
    constexpr int64_t kSquare = 16 * kColumns;
    Floats sums[kGrain][2];
#pragma GCC unroll 8
    for (int r = 0; r < kGrain; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) sums[r][v] = load(c + v * kSquare + r * kColumns);
    for (int64_t piece = 0; piece < pairs; piece += kLines, ahead++)
      for (int64_t i = piece; i < std::min(piece + kLines, pairs); i++, weights += kColumns) {
        __builtin_prefetch(*ahead + 64 * (i - piece), 0, 2);
        Words low, high;
        zip_halves(load_words(values[i] + d), load_words(values[i] + dim + d), low, high);
#pragma GCC unroll 8
        for (int r = 0; r < kGrain; r++) {
          const Floats w = all(weights[r]);
          sums[r][0] = PairsOfBf16::plus(sums[r][0], w, as_floats(low));
          sums[r][1] = PairsOfBf16::plus(sums[r][1], w, as_floats(high));
        }
      }
#pragma GCC unroll 8
    for (int r = 0; r < kGrain; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) store(c + v * kSquare + r * kColumns, sums[r][v]);
  }

  const bool few_;
  int64_t from_ = 0, count_ = 0;  // keys [from_, count_) of the tile are laid
  const bf16* pairs_[kKeys / 2];  // of values
  Upcoming upcoming_;
};
