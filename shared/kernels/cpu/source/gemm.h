// The one register-blocked product that projections and attention are made of, and how its rows are shared out.
#pragma once

#include <cstdlib>
#include <memory>

#include "simd.h"

constexpr int kRows = 14;     // of a tile: 28 sums, 2 columns vectors, 1 broadcast fill the 32 registers but one
constexpr int kColumns = 32;  // of a tile

// Rows cut into tiles as equal as can be, none above `most`.
struct Tiles {
  int64_t rows, count;

  explicit Tiles(int64_t rows, int64_t most = kRows) : rows(rows), count((rows + most - 1) / most) {}
  int64_t first(int64_t tile) const { return tile * rows / count; }
  int size(int64_t tile) const { return int(first(tile + 1) - first(tile)); }
};

// c[R][32] (+)= a b in fp32: a(r, j) at a[j * a_step + r], b(j, .) at b[j * 32], c(r, .) at c[r * 32].
template <int R>
__attribute__((noinline)) void multiply_tile(const float* a, int64_t a_step, const float* b, int64_t k, float* c, bool add) {
  __m512 sums[R][2];
  if (add)
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) {
      sums[r][0] = _mm512_loadu_ps(c + r * kColumns);
      sums[r][1] = _mm512_loadu_ps(c + r * kColumns + 16);
    }
  else
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int64_t j = 0; j < k; j++, a += a_step, b += kColumns) {
    __m512 low = _mm512_loadu_ps(b), high = _mm512_loadu_ps(b + 16);
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) {
      __m512 x = _mm512_set1_ps(a[r]);
      sums[r][0] = _mm512_fmadd_ps(x, low, sums[r][0]);
      sums[r][1] = _mm512_fmadd_ps(x, high, sums[r][1]);
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; r++) {
    _mm512_storeu_ps(c + r * kColumns, sums[r][0]);
    _mm512_storeu_ps(c + r * kColumns + 16, sums[r][1]);
  }
}

// Calls f.template operator()<R>() for a number of rows known only now.
template <typename F>
void with_rows(int rows, F&& f) {
  switch (rows) {
#define TANDEM_CASE(R) case R: f(std::integral_constant<int, R>()); break;
    TANDEM_CASE(1) TANDEM_CASE(2) TANDEM_CASE(3) TANDEM_CASE(4) TANDEM_CASE(5) TANDEM_CASE(6) TANDEM_CASE(7)
    TANDEM_CASE(8) TANDEM_CASE(9) TANDEM_CASE(10) TANDEM_CASE(11) TANDEM_CASE(12) TANDEM_CASE(13) TANDEM_CASE(14)
#undef TANDEM_CASE
  }
}

// Memory of one thread that grows to the largest size asked for and stays; 64-byte aligned, not cleared.
class Workspace {
 public:
  float* floats(int64_t size) {
    if (size > size_) {
      memory_.reset((float*)std::aligned_alloc(64, (size * 4 + 63) / 64 * 64));
      size_ = size;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<float, decltype(&std::free)> memory_{nullptr, &std::free};
  int64_t size_ = 0;
};
