// Products of fp32 numbers by AMX: a number is two of bf16, its upper bits and what they leave. Of the four products of
// two numbers the smallest is left out, so that a result is right to about 16 bits.
#pragma once

#include <algorithm>

#include "simd.h"
#include "tiles.h"

constexpr int64_t kTileSide = 32;  // rows, columns and depth of what four tiles compute at once
inline int64_t whole_tiles(int64_t n) { return (n + kTileSide - 1) / kTileSide * kTileSide; }

// A left side, [rows][depth], both padded by zeros.
struct RowHalves {
  bf16 *upper, *lower;
  int64_t depth;

  // From rows of a multiple of 16 numbers, `step` from one to the next.
  void split(const float* from, int64_t step, int64_t rows, int64_t columns) const {
    for (int64_t row = 0; row < whole_tiles(rows); row++)
      for (int64_t at = 0; at < depth; at += 16) {
        const Floats x = row < rows && at < columns ? load(from + row * step + at) : zeros(), u = rounded_as(upper, x);
        store16(upper + row * depth + at, u);
        store16(lower + row * depth + at, x - u);
      }
  }
};

// A right side, [depth / 2][columns] pairs of two rows, padded by zeros.
struct PairHalves {
  uint32_t *upper, *lower;
  int64_t columns;

  // From rows of a multiple of 16 numbers.
  void split(const float* from, int64_t step, int64_t rows, int64_t count) const {
    for (int64_t row = 0; row < whole_tiles(rows); row += 2)
      for (int64_t at = 0; at < columns; at += 16) {
        const Floats a = row < rows && at < count ? load(from + row * step + at) : zeros();
        const Floats b = row + 1 < rows && at < count ? load(from + (row + 1) * step + at) : zeros();
        const Floats u = rounded_as((const bf16*)nullptr, a), v = rounded_as((const bf16*)nullptr, b);
        store_words(upper + row / 2 * columns + at, paired(u, v));
        store_words(lower + row / 2 * columns + at, paired(a - u, b - v));
      }
  }
};

// Calls f(row, column, 16 sums) for the product of both, whose tiles have the shape of TwoByTwo(16, 16).
// `most`: of the depth, a multiple of kTileSide.
template <Triangle kTriangle, typename F>
void tile_product(
    const RowHalves& a, const PairHalves& b, int64_t rows, int64_t columns, F&& f, int64_t most = int64_t(1) << 40) {
  alignas(64) float sums[kTileSide][kTileSide];
  constexpr int64_t kBytes = kTileSide * 4;
  const int64_t row_bytes = a.depth * 2, pair_bytes = b.columns * 4;
  finish_stores();
  for (int64_t column = 0; column < columns; column += kTileSide)
    for (int64_t row = 0; row < rows; row += kTileSide) {
      if (kTriangle == kOfResult && column > row) continue;
      const int64_t depth = std::min(std::min(most, a.depth), kTriangle == kOfRows ? row + kTileSide : most);
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
      for (int64_t d = 0; d < depth; d += kTileSide) {
        const int64_t left = row * a.depth + d, right = d / 2 * b.columns + column;
        const int64_t second = 16 * a.depth;
        TILE_LOAD(4, a.upper + left, row_bytes);
        TILE_LOAD(5, a.upper + left + second, row_bytes);
        TILE_LOAD(6, b.lower + right, pair_bytes);
        TILE_LOAD(7, b.lower + right + 16, pair_bytes);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
        TILE_LOAD(6, b.upper + right, pair_bytes);
        TILE_LOAD(7, b.upper + right + 16, pair_bytes);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
        TILE_LOAD(4, a.lower + left, row_bytes);
        TILE_LOAD(5, a.lower + left + second, row_bytes);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
      }
      TILE_STORE(0, sums[0], kBytes);
      TILE_STORE(1, sums[0] + 16, kBytes);
      TILE_STORE(2, sums[16], kBytes);
      TILE_STORE(3, sums[16] + 16, kBytes);
      finish_stores();
      for (int64_t r = 0; r < std::min(kTileSide, rows - row); r++)
        for (int64_t c = 0; c < std::min(kTileSide, columns - column); c += 16) f(row + r, column + c, load(sums[r] + c));
    }
}
