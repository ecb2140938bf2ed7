// The one register-blocked product that projections and attention are made of, and how its rows are shared out.
#pragma once

#include <cstdlib>
#include <memory>

#include "simd.h"

constexpr int kColumns = 32;  // of a tile
// Of a tile. 32 vectors: 28 sums, 2 of columns, 1 broadcast. 8, of which a pass takes one column: 6 sums, the column, and
// what is broadcast, which is less than a vector there.
constexpr int kRows = kVectors == 32 ? 14 : 6;

// Rows cut into tiles as equal as can be, none above `most`.
struct Tiles {
  int64_t rows, count;

  explicit Tiles(int64_t rows, int64_t most = kRows) : rows(rows), count((rows + most - 1) / most) {}
  int64_t first(int64_t tile) const { return tile * rows / count; }
  int size(int64_t tile) const { return int(first(tile + 1) - first(tile)); }
};

// What a and b of a product hold: numbers, or pairs of bf16 over two neighbours of its depth.
struct Numbers {
  static Floats plus(Floats c, Floats a, Floats b) { return plus_product(c, a, b); }
};
#ifdef TANDEM_PAIRS
struct PairsOfBf16 {
  static Floats plus(Floats c, Floats a, Floats b) { return plus_pairs(c, as_words(a), as_words(b)); }
};
#endif

// sums[R][V] += a b: a(r, j) at a[j * a_step + r], b(j, .) at b[j * 32]. With Fetches, each of the k steps
// prefetches a line into the second cache: the first at `ahead`, the next one `ahead_step` numbers behind it.
template <int R, int V, typename Of, bool Fetches = false>
__attribute__((always_inline)) inline void add_products(
    Floats (&sums)[R][V], const float* a, int64_t a_step, const float* b, int64_t k, const float* ahead = nullptr,
    int64_t ahead_step = 0) {
  for (int64_t j = 0; j < k; j++, a += a_step, b += kColumns) {
    if constexpr (Fetches) {
      __builtin_prefetch(ahead, 0, 2);
      ahead += ahead_step;
    }
    Floats column[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) column[v] = load(b + 16 * v);
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) {
      const Floats x = all(a[r]);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[r][v] = Of::plus(sums[r][v], x, column[v]);
    }
  }
}

template <int R, int V>
__attribute__((always_inline)) inline void load_sums(Floats (&sums)[R][V], const float* c) {
#pragma GCC unroll 14
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) sums[r][v] = load(c + r * kColumns + 16 * v);
}
template <int R, int V>
__attribute__((always_inline)) inline void store_sums(const Floats (&sums)[R][V], float* c) {
#pragma GCC unroll 14
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) store(c + r * kColumns + 16 * v, sums[r][v]);
}

// c[R][16 V] (+)= a b in fp32, c(r, .) at c[r * 32].
template <int R, int V, typename Of>
__attribute__((always_inline)) inline void multiply_pass(
    const float* a, int64_t a_step, const float* b, int64_t k, float* c, bool add) {
  Floats sums[R][V];
  if (add)
    load_sums(sums, c);
  else
#pragma GCC unroll 14
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[r][v] = zeros();
  add_products<R, V, Of>(sums, a, a_step, b, k);
  store_sums(sums, c);
}

// All 32 columns, in two passes where the registers do not hold their sums.
template <int R, typename Of = Numbers>
__attribute__((noinline)) void multiply_tile(const float* a, int64_t a_step, const float* b, int64_t k, float* c, bool add) {
  if constexpr (kVectors == 32 || R <= 2) {
    multiply_pass<R, 2, Of>(a, a_step, b, k, c, add);
  } else {
    multiply_pass<R, 1, Of>(a, a_step, b, k, c, add);
    multiply_pass<R, 1, Of>(a, a_step, b + 16, k, c + 16, add);
  }
}

// The first 16 columns alone.
template <int R, typename Of = Numbers>
__attribute__((noinline)) void multiply_half(const float* a, int64_t a_step, const float* b, int64_t k, float* c, bool add) {
  multiply_pass<R, 1, Of>(a, a_step, b, k, c, add);
}

// Calls f.template operator()<R>() for a number of rows known only now.
template <typename F>
void with_rows(int rows, F&& f) {
  switch (rows) {
#define TANDEM_CASE(R) \
  case R: \
    if constexpr (R <= kRows) f(std::integral_constant<int, R>()); \
    break;
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
