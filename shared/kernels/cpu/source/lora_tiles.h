// Products of low-rank additions by AMX, for up to 16 rows at a time.
#pragma once

#include <algorithm>
#include <cstring>

#include "lora.h"
#include "simd.h"
#include "tiles.h"

constexpr int64_t kFewRows = 1;    // the most for which vectors are as fast
constexpr int64_t kTileRows = 16, kTileDepth = 32;
constexpr int64_t kTilePiece = kTileDepth * 16;  // elements of a tile of a: 32 inputs of 16 ranks

// The products of inputs [first, last) of some rows and a's ranks.
class TileRows {
 public:
  // x [rows, k]
  TileRows(const bf16* x, int64_t k, int64_t first, int64_t last) : x_(x), k_(k), first_(first), last_(last) {}

  // to[count][ranks], `step` floats from row to row; a as in Lora.
  void shrink(const int64_t* order, int count, const bf16* a, int64_t ranks, float* to, int64_t step) {
    tiles_.shape(count, count);
    take(order, count);
    a_ = a;
    for (int64_t v = 0; v < ranks; v += 64) {
      first_rank_ = v;
      const int64_t left = (ranks - v) / 16;
      if (left == 1) one(count, to + v, step);
      else if (left == 2) two(count, to + v, step);
      else several(std::min<int64_t>(left, 4), to + v, step);
    }
  }

 private:
  int64_t steps() const { return (last_ - first_ + kTileDepth - 1) / kTileDepth; }

  // The rows as they lie where they are neighbours, else a copy, with zeros behind the last input.
  void take(const int64_t* order, int count) {
    const int64_t inputs = last_ - first_;
    const bool is_whole = inputs % kTileDepth == 0;
    bool is_one = is_whole;
    for (int r = 1; r < count; r++) is_one = is_one && order[r] == order[0] + r;
    rows_ = x_ + order[0] * k_ + first_;
    row_bytes_ = k_ * int64_t(sizeof(bf16));
    if (is_one) return;
    for (int r = 0; r < count; r++) {
      std::memcpy(copy_ + r * kLoraChunk, x_ + order[r] * k_ + first_, inputs * sizeof(bf16));
      if (!is_whole) std::memset(copy_ + r * kLoraChunk + inputs, 0, kTileDepth / 2 * sizeof(bf16));
    }
    rows_ = copy_;
    row_bytes_ = kLoraChunk * int64_t(sizeof(bf16));
    finish_stores();
  }

  const bf16* row(int64_t s) const { return rows_ + s * kTileDepth; }

  // A tile of the vector of ranks number v of those at hand.
  const bf16* piece(int64_t v, int64_t s) {
    const bf16* found = a_ + (first_rank_ + 16 * v) * k_ + (first_ + s * kTileDepth) * 16;
    const int64_t inputs = last_ - first_ - s * kTileDepth;
    if (inputs >= kTileDepth) return found;
    std::memcpy(ends_[v], found, inputs * 16 * sizeof(bf16));
    std::memset(ends_[v] + inputs * 16, 0, (kTileDepth - inputs) * 16 * sizeof(bf16));
    finish_stores();
    return ends_[v];
  }

  // Four sums of one vector, so that enough products are under way.
  void one(int count, float* to, int64_t step) {
    zero();
    int64_t s = 0;
    for (; s + 4 <= steps(); s += 4) {
      TILE_LOAD(4, row(s), row_bytes_);
      TILE_LOAD(6, piece(0, s), 64);
      TILE_DOT(0, 4, 6);
      TILE_LOAD(5, row(s + 1), row_bytes_);
      TILE_LOAD(7, piece(0, s + 1), 64);
      TILE_DOT(1, 5, 7);
      TILE_LOAD(4, row(s + 2), row_bytes_);
      TILE_LOAD(6, piece(0, s + 2), 64);
      TILE_DOT(2, 4, 6);
      TILE_LOAD(5, row(s + 3), row_bytes_);
      TILE_LOAD(7, piece(0, s + 3), 64);
      TILE_DOT(3, 5, 7);
    }
    for (; s < steps(); s++) {
      TILE_LOAD(4, row(s), row_bytes_);
      TILE_LOAD(6, piece(0, s), 64);
      TILE_DOT(0, 4, 6);
    }
    keep();
    for (int r = 0; r < count; r++)
      store(to + r * step, (load(sums_[0][r]) + load(sums_[1][r])) + (load(sums_[2][r]) + load(sums_[3][r])));
  }

  // Two sums of each of two vectors.
  void two(int count, float* to, int64_t step) {
    zero();
    for (int64_t s = 0; s < steps(); s += 2) {
      TILE_LOAD(4, row(s), row_bytes_);
      TILE_LOAD(6, piece(0, s), 64);
      TILE_DOT(0, 4, 6);
      TILE_LOAD(7, piece(1, s), 64);
      TILE_DOT(1, 4, 7);
      if (s + 1 == steps()) break;
      TILE_LOAD(5, row(s + 1), row_bytes_);
      TILE_LOAD(6, piece(0, s + 1), 64);
      TILE_DOT(2, 5, 6);
      TILE_LOAD(7, piece(1, s + 1), 64);
      TILE_DOT(3, 5, 7);
    }
    keep();
    for (int r = 0; r < count; r++) {
      store(to + r * step, load(sums_[0][r]) + load(sums_[2][r]));
      store(to + r * step + 16, load(sums_[1][r]) + load(sums_[3][r]));
    }
  }

  // Three vectors, or four.
  void several(int64_t vectors, float* to, int64_t step) {
    zero();
    for (int64_t s = 0; s < steps(); s++) {
      TILE_LOAD(4, row(s), row_bytes_);
      TILE_LOAD(6, piece(0, s), 64);
      TILE_DOT(0, 4, 6);
      TILE_LOAD(7, piece(1, s), 64);
      TILE_DOT(1, 4, 7);
      TILE_LOAD(6, piece(2, s), 64);
      TILE_DOT(2, 4, 6);
      if (vectors == 3) continue;
      TILE_LOAD(7, piece(3, s), 64);
      TILE_DOT(3, 4, 7);
    }
    const int64_t bytes = step * int64_t(sizeof(float));
    TILE_STORE(0, to, bytes);
    TILE_STORE(1, to + 16, bytes);
    TILE_STORE(2, to + 32, bytes);
    if (vectors == 4) TILE_STORE(3, to + 48, bytes);
    finish_stores();
  }

  void zero() {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  void keep() {
    TILE_STORE(0, sums_[0], 64);
    TILE_STORE(1, sums_[1], 64);
    TILE_STORE(2, sums_[2], 64);
    TILE_STORE(3, sums_[3], 64);
    finish_stores();
  }

  const bf16* x_;
  int64_t k_, first_, last_;
  const bf16* a_ = nullptr;
  int64_t first_rank_ = 0;
  const bf16* rows_ = nullptr;
  int64_t row_bytes_ = 0;
  alignas(64) bf16 copy_[kTileRows * kLoraChunk];
  alignas(64) bf16 ends_[4][kTilePiece];
  alignas(64) float sums_[4][kTileRows][16];
  TwoByTwo tiles_;
};

// y[count] at [begin, end) += s [count][kMostRank] times b, which begins with those outputs. A number of s is two of
// bf16, its upper bits and what they leave.
inline void expand_by_tiles(
    const float* s, int count, const bf16* b, int64_t rank, int64_t begin, int64_t end, bf16* const* y) {
  alignas(64) bf16 upper[kTileRows * kMostRank], lower[kTileRows * kMostRank];
  alignas(64) float c[kTileRows * 64];
  for (int r = 0; r < count; r++)
    for (int64_t j = 0; j < rank; j += 16) {
      const Floats x = load(s + r * kMostRank + j), rounded = rounded_as(upper, x);
      store16(upper + r * kMostRank + j, rounded);
      store16(lower + r * kMostRank + j, x - rounded);
    }
  const int64_t depth = rank % kTileDepth ? kTileDepth / 2 : kTileDepth, row_bytes = kMostRank * int64_t(sizeof(bf16));
  TileShapes shapes;
  for (int tile : {0, 1, 2, 3}) shapes.set(tile, count);
  for (int tile : {4, 5}) shapes.set(tile, count, int(depth * 2));
  for (int tile : {6, 7}) shapes.set(tile, int(depth / 2));
  finish_stores();
  set_tiles(shapes);
  for (int64_t at = begin; at < end; at += 64) {
    const int64_t vectors = std::min<int64_t>(4, (end - at) / 16);
    const bf16* w = b + (at - begin) * rank;
    for (int r = 0; r < count && at + 64 < end; r++)  // rows lie too far apart to be read ahead
      for (int64_t line : {64, 96}) __builtin_prefetch(y[r] + at + line, 1);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t j = 0; j < rank; j += depth) {
      TILE_LOAD(4, upper + j, row_bytes);
      TILE_LOAD(5, lower + j, row_bytes);
      TILE_LOAD(6, w + j * 16, 64);
      TILE_DOT(0, 5, 6);
      TILE_DOT(0, 4, 6);
      if (vectors > 1) {
        TILE_LOAD(7, w + (rank + j) * 16, 64);
        TILE_DOT(1, 5, 7);
        TILE_DOT(1, 4, 7);
      }
      if (vectors > 2) {
        TILE_LOAD(6, w + (2 * rank + j) * 16, 64);
        TILE_DOT(2, 5, 6);
        TILE_DOT(2, 4, 6);
      }
      if (vectors > 3) {
        TILE_LOAD(7, w + (3 * rank + j) * 16, 64);
        TILE_DOT(3, 5, 7);
        TILE_DOT(3, 4, 7);
      }
    }
    TILE_STORE(0, c, 256);
    TILE_STORE(1, c + 16, 256);
    TILE_STORE(2, c + 32, 256);
    TILE_STORE(3, c + 48, 256);
    finish_stores();
    for (int r = 0; r < count; r++)
      for (int64_t v = 0; v < vectors; v++) {
        bf16* place = y[r] + at + 16 * v;
        store16(place, load16(place) + load(c + 64 * r + 16 * v));
      }
  }
  release_tiles();
}
