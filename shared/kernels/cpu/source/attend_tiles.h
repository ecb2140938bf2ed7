// The products of a prompt's attention by AMX: scores are keys times queries, sums are values, transposed, times weights.
//
// Up to 16 rows, such as a step that checks guesses has, use a tile once: to transpose its values would take most of their
// time. So their sums are weights, transposed, times values, which lie in pairs of neighbouring keys: squares of 16
// dimensions by 16 rows, until `finish`.
#pragma once

#include "attend_pairs.h"
#include "tiles.h"

constexpr int64_t kPairKeys = 32;  // keys of a product's depth

struct TileProducts {
  static constexpr int64_t kKeys = 256, kGrain = kPairKeys;

  static bool fits(const Shape& s) { return s.dim % 32 == 0 && s.block_size % 16 == 0 && s.scale > 0.0f; }
  // Values, [key / 32][dim][32], or for few rows pairs, [key / 2][dim]; of codes also the opened keys, [key][dim], and 32
  // opened values.
  template <typename KV>
  static int64_t words(int64_t dim) { return kKeys * dim / 2 + (kIsCode<KV> ? (kKeys + kPairKeys) * dim / 2 : 0); }

  TwoByTwo tiles;
  const bool few;
  explicit TileProducts(int64_t rows) : few(rows <= 16) { tiles.shape(16, 16); }

  // The rest of the first and of the last 32 is zero.
  template <typename KV>
  void lay(const Pool<KV>& pool, int64_t first, int64_t from, int64_t count, int64_t end, uint32_t* laid) const {
    few ? lay_pairs(pool, first, from, count, end, laid) : lay_transposed(pool, first, from, count, end, laid);
  }

  template <typename KV>
  static void lay_transposed(
      const Pool<KV>& pool, int64_t first, int64_t from, int64_t count, int64_t end, uint32_t* laid) {
    const int64_t dim = pool.s.dim;
    bf16 *keys = (bf16*)laid + kKeys * dim, *opened = keys + kKeys * dim;
    for (int64_t t = from / kPairKeys * kPairKeys; t < count; t += kPairKeys) {
      bf16* values = (bf16*)laid + t * dim;
      const bf16* rows[kPairKeys] = {};
      const int64_t last = std::min(count, t + kPairKeys);
      pool.runs(first + std::max(from, t), first + last, 16, [&](Run<KV> key, int64_t position, int64_t n) {
        const bf16* value;
        if constexpr (kIsCode<KV>) {
          bf16* place = opened + (position - first - t) * dim;
          open_keys(key.rows, n, dim, keys + (position - first) * dim);
          open_rows(key.moved(pool.to_values()).rows, n, dim, place);
          value = place;
        } else {
          value = key.moved(pool.to_values()).rows;
        }
        for (int64_t i = 0; i < n; i++) rows[position - first - t + i] = value + i * dim;
      });
      const Ahead<KV> next[2] = {{pool, first + t + kKeys, end}, {pool, first + t + kKeys + 16, end}};
      for (int64_t d = 0; d < dim; d += 16) {
        for (const Ahead<KV>& run : next) run.fetch(d);
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

  template <typename KV>
  static void lay_pairs(const Pool<KV>& pool, int64_t first, int64_t from, int64_t count, int64_t end, uint32_t* laid) {
    const int64_t dim = pool.s.dim, begin = from / 2 * 2;  // a key before `from` in its pair is one of the same block
    bf16* keys = (bf16*)laid + kKeys * dim;
    pool.runs(first + begin, first + count, 16, [&](Run<KV> run, int64_t position, int64_t n) {
      const int64_t t = position - first;
      if constexpr (kIsCode<KV>) open_keys(run.rows, n, dim, keys + t * dim);
      const KV* values = run.moved(pool.to_values()).rows;
      const Ahead<KV> next(pool, position + kKeys, end);
      for (int64_t d = 0; d < dim; d += 32) {
        next.fetch(d);
        next.fetch(d + 16);
        uint32_t* pairs = laid + t / 2 * dim + d;
        for (int64_t i = 0; i < n; i += 2, pairs += dim) {
          const KV* even = values + i * dim + d;
          pair_values(even, i + 1 < n ? even + dim : nullptr, pairs);
        }
      }
    });
    const int64_t pairs = begin / 2, whole = from / kPairKeys * kPairKeys / 2, past = (count + 1) / 2;
    const int64_t last = (count + kPairKeys - 1) / kPairKeys * kPairKeys / 2;
    std::memset(laid + whole * dim, 0, (pairs - whole) * dim * sizeof(uint32_t));
    std::memset(laid + past * dim, 0, (last - past) * dim * sizeof(uint32_t));
  }

  // 32 dimensions of two neighbouring keys' values; `odd` may be null.
  template <typename KV>
  static void pair_values(const KV* even, const KV* odd, uint32_t* pairs) {
    Words low, high;
    if constexpr (kIsCode<KV>) {
      low = joined(load16(even), odd ? load16(odd) : zeros());
      high = joined(load16(even + 16), odd ? load16(odd + 16) : zeros());
    } else {
      zip_halves(load_words(even), odd ? load_words(odd) : no_words(), low, high);
    }
    store_words(pairs, low);
    store_words(pairs + 16, high);
  }

  // Of each 32 dimensions of a key in codes the i-th and the one 16 behind it are a pair.
  template <typename KV>
  static void open_keys(const KV* codes, int64_t count, int64_t dim, bf16* keys) {
    for (int64_t i = 0; i < count * dim; i += 32)
      store_words(keys + i, joined(load16(codes + i), load16(codes + i + 16)));
  }
  template <typename KV>
  static Words query_pairs(const bf16* row) {
    return kIsCode<KV> ? joined(load16(row), load16(row + 16)) : load_words(row);
  }

  // 16 keys of a block are a row tile as they lie.
  template <typename KV>
  static void score(
      const Pool<KV>& pool, int64_t first, int64_t from, int64_t to, int64_t count, const uint32_t* laid,
      const uint32_t* query, float* scores, int64_t lanes) {
    finish_stores();
    const int64_t dim = pool.s.dim;
    auto key_at = [&](int64_t t) {
      if constexpr (kIsCode<KV>)
        return (const bf16*)laid + (kKeys + t) * dim;
      else
        return pool.keys(first + t).rows;
    };
    if (lanes == 16) return score_few(from, to, count, dim, query, scores, key_at);
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

  void fade(float* sums, int64_t dim, Floats by) const {
    few ? fade_squares(sums, dim, by) : fade_columns(sums, dim, by);
  }
  void finish(float* sums, int64_t dim) const {
    if (few) turn_squares(sums, dim);
  }

  // Of 16 columns, two tiles at a time.
  template <typename F>
  static void score_few(
      int64_t from, int64_t to, int64_t count, int64_t dim, const uint32_t* query, float* scores, const F& key_at) {
    for (int64_t t = from; t < to; t += 32) {
      const bf16 *a = key_at(t), *b = t + 16 < count ? key_at(t + 16) : a;
      TILE_ZERO(0);
      TILE_ZERO(1);
      for (int64_t d = 0; d < dim; d += 32) {
        TILE_LOAD(6, query + d / 2 * kColumns, 128);
        TILE_LOAD(4, a + d, dim * 2);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(5, b + d, dim * 2);
        TILE_DOT(1, 5, 6);
      }
      TILE_STORE(0, scores + t * kColumns, 128);
      TILE_STORE(1, scores + (t + 16) * kColumns, 128);
    }
  }

  void add(
      const uint32_t* laid, const uint32_t* weights, int64_t from, int64_t to, int64_t dim, float* sums, int64_t lanes) const {
    if (few) return add_to_few(laid, weights, from, to, dim, sums);
    const bf16* values = (const bf16*)laid;
    finish_stores();
    if (lanes == 16) return add_half(values, weights, from, to, dim, sums);
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

  // Of a last block whose rows fill 16 columns.
  static void add_half(
      const bf16* values, const uint32_t* weights, int64_t from, int64_t to, int64_t dim, float* sums) {
    for (int64_t d = 0; d < dim; d += 32) {
      float* c = sums + d * kColumns;
      TILE_LOAD(0, c, 128);
      TILE_LOAD(1, c + 16 * kColumns, 128);
      for (int64_t t = from; t < to; t += kPairKeys) {
        const bf16* a = values + (t * dim + d * kPairKeys);
        TILE_LOAD(6, weights + t / 2 * kColumns, 128);
        TILE_LOAD(4, a, 64);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(5, a + 16 * kPairKeys, 64);
        TILE_DOT(1, 5, 6);
      }
      TILE_STORE(0, c, 128);
      TILE_STORE(1, c + 16 * kColumns, 128);
    }
  }

  static void add_to_few(
      const uint32_t* pairs, const uint32_t* weights, int64_t from, int64_t to, int64_t dim, float* sums) {
    alignas(64) uint32_t turned[kKeys / 2 * 16];  // [key / 32][row][key % 32]
    for (int64_t t = from; t < to; t += kPairKeys) {
      Words v[16];
      for (int i = 0; i < 16; i++) v[i] = load_words(weights + (t / 2 + i) * kColumns);
      transpose16(v);
      for (int i = 0; i < 16; i++) store_words(turned + t / 2 * 16 + i * 16, v[i]);
    }
    finish_stores();
    for (int64_t d = 0; d < dim; d += 32) {
      float* c = sums + d * kColumns;
      TILE_LOAD(0, c, 128);
      TILE_LOAD(1, c + 16 * kColumns, 128);
      for (int64_t t = from; t < to; t += kPairKeys) {
        const uint32_t* b = pairs + t / 2 * dim + d;
        TILE_LOAD(4, turned + t / 2 * 16, 64);
        TILE_LOAD(6, b, dim * 4);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, b + 16, dim * 4);
        TILE_DOT(1, 4, 7);
      }
      TILE_STORE(0, c, 128);
      TILE_STORE(1, c + 16 * kColumns, 128);
    }
  }
};
