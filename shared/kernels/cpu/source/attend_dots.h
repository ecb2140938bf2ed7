// The products of a prompt's attention by AVX512-BF16: keys and values are the broadcast side, as in attend_many.h.
#pragma once

#include "attend_pairs.h"

struct DotProducts {
  static constexpr int64_t kKeys = 128;  // as keys and as values they fill half of the first cache

  static bool fits(const Shape& s) { return s.dim % 32 == 0 && s.block_size % 2 == 0 && s.scale > 0.0f; }
  template <typename KV>
  static int64_t words(int64_t dim) { return kKeys * dim + (kIsCode<KV> ? 16 * dim : 0); }  // a run of codes, opened
  static int begin() { return 0; }

  // Keys as [dim / 2][key] pairs over dim, then values as [key / 2][dim] pairs over keys; zeros after the last one.
  template <typename KV>
  static void lay(const Pool<KV>& pool, int64_t first, int64_t count, int64_t end, uint32_t* laid) {
    const int64_t dim = pool.s.dim;
    bf16* opened = (bf16*)(laid + kKeys * dim);
    uint32_t* values = laid + kKeys * dim / 2;
    if (count < kKeys) std::memset(laid, 0, kKeys * dim * sizeof(uint32_t));
    pool.runs(first, first + count, 16, [&](Run<KV> run, int64_t position, int64_t n) {
      const int64_t t = position - first;
      const bf16 *key, *value;
      if constexpr (kIsCode<KV>) {
        open_rows(run.rows, n, dim, opened);
        open_rows(run.moved(pool.to_values()).rows, n, dim, opened + 16 * dim);
        key = opened, value = opened + 16 * dim;
      } else {
        key = run.rows, value = run.moved(pool.to_values()).rows;
      }
      const Ahead<KV> next(pool, position + kKeys, end);
      for (int64_t d = 0; d < dim; d += 32) {
        next.fetch(d);
        next.fetch(d + 16);
        Words v[16];
        for (int i = 0; i < 16; i++) v[i] = i < n ? load_words(key + i * dim + d) : no_words();
        transpose16(v);
        for (int i = 0; i < 16; i++) store_words(laid + (d / 2 + i) * kKeys + t, v[i], n);
      }
      // A run begins at an even key: blocks have an even number of them, as tiles.
      for (int64_t i = 0; i < n; i += 2) {
        const bf16* even = value + i * dim;
        for (int64_t d = 0; d < dim; d += 16) {
          const Words lower = shift_right<16>(as_words(load16(even + d)));
          const Words upper = i + 1 < n ? as_words(load16(even + dim + d)) : no_words();
          store_words(values + (t + i) / 2 * dim + d, either(lower, upper));
        }
      }
    });
  }

  template <typename KV>
  static void score(
      const Pool<KV>& pool, int64_t, int64_t from, int64_t to, int64_t, const uint32_t* laid, const uint32_t* query,
      float* scores, int64_t lanes) {
    const float* keys = (const float*)laid + from;
    multiply_rows<PairsOfBf16>(
        to - from, keys, kKeys, (const float*)query, pool.s.dim / 2, scores + from * kColumns, false, lanes);
  }

  static void add(
      const uint32_t* laid, const uint32_t* weights, int64_t from, int64_t to, int64_t dim, float* sums,
      int64_t lanes) {
    const float *values = (const float*)laid + (kKeys + from) * dim / 2, *b = (const float*)weights + from / 2 * kColumns;
    multiply_rows<PairsOfBf16>(dim, values, dim, b, (to - from) / 2, sums, true, lanes);
  }
};
