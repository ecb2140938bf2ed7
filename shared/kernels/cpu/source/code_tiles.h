// The products of few rows over int8 codes by AMX: of bytes, four of them a word. 16 keys of a block are a row tile as they
// lie; values are the right side, where a word has those of four neighbouring keys. The whole numbers of queries and of
// weights are two bytes each, and have a product for either.
#pragma once

#include "attend_codes.h"
#include "tiles.h"

class CodeTiles {
 public:
  static constexpr int64_t kKeys = 256, kGrain = 32, kStride = 32;
  static constexpr float kMostWeight = 65535.0f;

  static int64_t keys(int64_t) { return kKeys; }
  static bool fits(const Shape& s) { return s.dim % 64 == 0 && s.dim <= 512 && s.block_size % 16 == 0 && s.scale > 0.0f; }
  static int64_t query_words(int64_t dim) { return dim / 2 * 16; }
  static int64_t laid_words(int64_t dim) { return kKeys / 4 * dim; }  // [key / 4][dim], out of order within each 64

  CodeTiles() { tiles_.shape(16, 16); }

  // [dim / 64][upper bytes, lower ones][16][row]
  static void put_query(const int16_t* rows, int64_t dim, uint32_t* query) {
    for (int64_t d = 0; d < dim; d += 64)
      for (int half = 0; half < 2; half++, query += 256) {
        Words v[16];
        for (int64_t r = 0; r < 16; r++) {
          int8_t bytes[64];
          for (int64_t i = 0; i < 64; i++) {
            const int32_t x = rows[r * dim + d + i];
            bytes[i] = int8_t(half == 0 ? (x + 128) >> 8 : x);
          }
          v[r] = load_words(bytes);
        }
        transpose16(v);
        for (int i = 0; i < 16; i++) store_words(query + 16 * i, v[i]);
      }
  }

  void lay(const Pool<int8>& pool, int64_t first, int64_t from, int64_t count, int64_t end, uint32_t* laid) const {
    const int64_t dim = pool.s.dim, to_values = pool.to_values();
    for (int64_t t = from / 16 * 16; t < count; t += 16) {  // of a block that has some of these keys, all 16
      const char* values = (const char*)pool.keys(first + t).moved(to_values).rows;
      const Ahead<int8> next(pool, first + t + kKeys, end);
      for (int64_t i = 0, part = 0; i < 16; i += 4)
        for (int64_t d = 0; d < dim; d += 64, part += 16) {
          next.fetch(part);
          const char* row = values + i * dim + d;
          const Words a = load_words(row), b = load_words(row + dim), c = load_words(row + 2 * dim);
          const Words e = load_words(row + 3 * dim), evens[2] = {lower_zipped(a, c), upper_zipped(a, c)};
          const Words odds[2] = {lower_zipped(b, e), upper_zipped(b, e)};
          uint32_t* words = laid + (t + i) / 4 * dim + d;
          for (int half = 0; half < 2; half++) {
            store_words(words + 32 * half, lower_zipped(evens[half], odds[half]));
            store_words(words + 32 * half + 16, upper_zipped(evens[half], odds[half]));
          }
        }
    }
  }
  static int64_t dim_of(int64_t place) { return place / 64 * 64 + place % 16 * 4 + place % 64 / 16 * 4; }

  static void score(
      const Pool<int8>& pool, int64_t first, int64_t from, int64_t to, int64_t count, const uint32_t* query, float* scores) {
    finish_stores();
    const int64_t dim = pool.s.dim;
    for (int64_t t = from; t < to; t += 32) {
      const int8 *a = pool.keys(first + t).rows, *b = t + 16 < count ? pool.keys(first + t + 16).rows : a;
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
      for (int64_t d = 0; d < dim; d += 64) {
        const uint32_t* q = query + d / 64 * 512;
        TILE_LOAD(4, a + d, dim);
        TILE_LOAD(6, q, 64);
        TILE_DOT_SIGNED(0, 4, 6);
        TILE_LOAD(7, q + 256, 64);
        TILE_DOT_SIGNED(1, 4, 7);
        TILE_LOAD(5, b + d, dim);
        TILE_DOT_SIGNED(2, 5, 6);
        TILE_DOT_SIGNED(3, 5, 7);
      }
      float* c = scores + t * kStride;
      TILE_STORE(0, c, 128);
      TILE_STORE(1, c + 16, 128);
      TILE_STORE(2, c + 16 * kStride, 128);
      TILE_STORE(3, c + 16 * kStride + 16, 128);
    }
  }
  static Floats scores_of(const float* place) { return joined_bytes(place, place + 16); }

  // [key / 4][upper bytes, lower ones][row]
  static void put_weights(float* scores, int64_t t, const Words (&weights)[4]) {
    const Words lower_halves = all_words(0xffff), even_bytes = all_words(0x00ff00ff);
    const Words even = selected(lower_halves, weights[0], shift_left<16>(weights[2]));
    const Words odd = selected(lower_halves, weights[1], shift_left<16>(weights[3]));
    float* place = scores + t / 4 * kStride;
    store_words(place, selected(even_bytes, shift_right<8>(even), odd));
    store_words(place + 16, selected(even_bytes, even, shift_left<8>(odd)));
  }

  void add(
      const uint32_t* laid, float* scores, int64_t from, int64_t to, int64_t dim, float* sums, const float* fade,
      const float* gain) const {
    const int64_t begin = from / 64 * 64, end = (to + 63) / 64 * 64;
    std::memset(scores + begin / 4 * kStride, 0, (from - begin) / 4 * kStride * sizeof(float));
    std::memset(scores + to / 4 * kStride, 0, (end - to) / 4 * kStride * sizeof(float));
    alignas(64) uint32_t turned[kKeys / 64][2][256];  // [key / 64][upper, lower][row][key % 64]
    for (int64_t t = begin; t < end; t += 64)
      for (int half = 0; half < 2; half++) {
        Words v[16];
        for (int i = 0; i < 16; i++) v[i] = load_words(scores + (t / 4 + i) * kStride + 16 * half);
        transpose16(v);
        for (int i = 0; i < 16; i++) store_words(turned[t / 64][half] + 16 * i, v[i]);
      }
    for (int64_t d = 0; d < dim; d += 32) {
      alignas(64) float found[4][256];
      finish_stores();
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
      for (int64_t t = begin; t < end; t += 64) {
        const uint32_t* b = laid + t / 4 * dim + d;
        TILE_LOAD(4, turned[t / 64][0], 64);
        TILE_LOAD(6, b, dim * 4);
        TILE_DOT_UNSIGNED(0, 4, 6);
        TILE_LOAD(7, b + 16, dim * 4);
        TILE_DOT_UNSIGNED(1, 4, 7);
        TILE_LOAD(5, turned[t / 64][1], 64);
        TILE_DOT_UNSIGNED(2, 5, 6);
        TILE_DOT_UNSIGNED(3, 5, 7);
      }
      TILE_STORE(0, found[0], 64);
      TILE_STORE(1, found[1], 64);
      TILE_STORE(2, found[2], 64);
      TILE_STORE(3, found[3], 64);
      finish_stores();
      float* place = sums + d * 16;
      for (int64_t half = 0; half < 2; half++)
        for (int64_t r = 0; r < 16; r++, place += 16) {
          const Floats sum = joined_bytes(found[half] + 16 * r, found[2 + half] + 16 * r);
          store(place, plus_product(load(place) * all(fade[r]), sum, all(gain[r])));
        }
    }
  }

 private:
  static Floats joined_bytes(const float* upper, const float* lower) {
    return plus_product(signed_floats(load_words(lower)), signed_floats(load_words(upper)), all(256.0f));
  }

  TwoByTwo tiles_;
};
