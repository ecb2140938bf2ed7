// The products of few rows over int8 codes by AVX-512 with VNNI: of pairs of 16-bit numbers, to which codes are widened.
// Keys and weights are the broadcast side, so one vector has what 16 rows, or 16 dimensions of one, take.
#pragma once

#include "attend_codes.h"

class CodeWords {
 public:
  static constexpr int64_t kKeys = 128, kGrain = 16, kStride = 16;
  static constexpr float kMostWeight = 32767.0f;

  static int64_t keys(int64_t dim) { return dim > 64 ? kKeys / 2 : kKeys; }  // fit in the first cache
  static bool fits(const Shape& s) { return s.dim % 32 == 0 && s.dim <= 512 && s.block_size % 16 == 0 && s.scale > 0.0f; }
  static int64_t query_words(int64_t dim) { return dim / 2 * 16; }  // [dim / 2][row]
  static int64_t laid_words(int64_t dim) { return (kKeys / 2 + 8) * dim; }  // [dim / 16][key / 2][16]; 16 keys

  static void put_query(const int16_t* rows, int64_t dim, uint32_t* query) {
    for (int64_t d = 0; d < dim; d += 32) {
      Words v[16];
      for (int r = 0; r < 16; r++) v[r] = load_words(rows + r * dim + d);
      transpose16(v);
      for (int j = 0; j < 16; j++, query += 16) store_words(query, v[j]);
    }
  }

  void lay(const Pool<int8>& pool, int64_t first, int64_t from, int64_t count, int64_t end, uint32_t* laid) {
    const int64_t dim = pool.s.dim;
    keys_ = (int16_t*)(laid + kKeys / 2 * dim);
    end_ = end;
    for (int64_t t = from / 16 * 16; t < count; t += 16) {  // of a block that has some of these keys, all 16
      const int8* values = pool.keys(first + t).moved(pool.to_values()).rows;
      for (int64_t d = 0; d < dim; d += 32) {
        uint32_t* words = laid + (d / 16 * kKeys / 2 + t / 2) * 16;
        const int8* row = values + d;
#pragma GCC unroll 8
        for (int64_t i = 0; i < 16; i += 2, row += 2 * dim, words += 16) {
          const Words even = signed_halves(row), odd = signed_halves(row + dim);
          store_words(words, lower_halves_zipped(even, odd));
          store_words(words + kKeys / 2 * 16, upper_halves_zipped(even, odd));
        }
      }
    }
  }
  static int64_t dim_of(int64_t place) { return place / 32 * 32 + place % 16 * 2 + place % 32 / 16 * 4; }

  void score(
      const Pool<int8>& pool, int64_t first, int64_t from, int64_t to, int64_t, const uint32_t* query, float* scores) const {
    const int64_t dim = pool.s.dim;
    for (int64_t t = from; t < to; t += 16) {
      const int8* codes = pool.keys(first + t).rows;
      for (int64_t d = 0; d < dim; d += 32) {
        const int8* row = codes + d;
        int16_t* key = keys_ + d * 16;
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++, row += dim) store_words(key + r * 32, signed_halves(row));
      }
      const char *next = (const char*)this, *values = next;
      const int64_t next_key = first + t + keys(dim);
      int64_t step = 0;
      if (next_key < end_) {
        const Run<int8> ahead = pool.keys(next_key);
        next = (const char*)ahead.rows, values = (const char*)ahead.moved(pool.to_values()).rows, step = 64;
      }
      score_keys(keys_, query, dim, scores + t * kStride, next, values, step);
    }
  }
  static Floats scores_of(const float* place) { return signed_floats(load_words(place)); }

  static void put_weights(float* scores, int64_t t, const Words (&weights)[4]) {  // [key / 2][row]
    const Words lower_halves = all_words(0xffff);
    for (int i = 0; i < 2; i++)
      store_words(
          scores + (t / 2 + i) * 16, selected(lower_halves, weights[2 * i], shift_left<16>(weights[2 * i + 1])));
  }

  static void add(
      const uint32_t* laid, const float* scores, int64_t from, int64_t to, int64_t dim, float* sums, const float* fade,
      const float* gain) {
    for (int64_t d = 0; d < dim; d += 16)
      add_values(
          laid + (d * kKeys / 2 + from / 2 * 16), (const uint32_t*)scores + from / 2 * 16, (to - from) / 2, sums + d * 16,
          fade, gain);
  }

 private:
  // c[16 keys][16 rows] = keys [dim / 32][16][32] times query [dim / 2][row].
  __attribute__((noinline)) static void score_keys(
      const int16_t* keys, const uint32_t* query, int64_t dim, float* c, const char* next, const char* values, int64_t step) {
    Words sums[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) sums[r] = no_words();
    for (int64_t d = 0; d < dim; d += 32, keys += 16 * 32)
      for (int64_t j = 0; j < 32; j += 4, next += step, values += step) {
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(values, 0, 2);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++, query += 16) {
          const Words x = load_words(query);
#pragma GCC unroll 16
          for (int r = 0; r < 16; r++) add_products_of_halves(sums[r], x, keys + r * 32 + j + 2 * half);
        }
      }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) store_words(c + r * kStride, sums[r]);
  }

  // 16 rows' sums of 16 dimensions, sums fade + gain times weights [pairs][row] times values [pairs][16].
  __attribute__((noinline)) static void add_values(
      const uint32_t* values, const uint32_t* weights, int64_t pairs, float* c, const float* fade, const float* gain) {
    Words sums[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) sums[r] = no_words();
    for (int64_t i = 0; i < pairs; i++, values += 16, weights += 16) {
      const Words x = load_words(values);
#pragma GCC unroll 16
      for (int r = 0; r < 16; r++) add_products_of_halves(sums[r], x, weights + r);
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++, c += 16)
      store(c, plus_product(load(c) * all(fade[r]), signed_floats(sums[r]), all(gain[r])));
  }

  int16_t* keys_ = nullptr;
  int64_t end_ = 0;
};
