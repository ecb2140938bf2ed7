// Few rows: each weight is read once from memory, in its own dtype, and widened as it is used.
#pragma once

#include "product.h"

// Rows that share a weight as it is widened: that takes registers too.
constexpr int64_t kDirectTile = kVectors == 32 ? 12 : 4;

template <int R>
void direct_tile(const float* a, const float* w, int64_t k, float* c) {
  multiply_tile<R>(a, R, w, k, c, false);
}

#ifdef TANDEM_PAIRS
template <int R>
void direct_tile(const float* a, const PlainPanel& panel, int64_t k, float* c) {
  Floats sums[R][2];
#pragma GCC unroll 14
  for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = zeros();
  for (int64_t j = 0; j < k; j += kGroupK) {
    const auto group = panel.group(j);
    group.prefetch();
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, a += R) {
      const Pairs pairs = group.half(half);
#pragma GCC unroll 14
      for (int r = 0; r < R; r++) {
        const Words x = as_words(all(a[r]));
        sums[r][0] = plus_pairs(sums[r][0], x, pairs.low);
        sums[r][1] = plus_pairs(sums[r][1], x, pairs.high);
      }
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; r++)
    for (int v = 0; v < 2; v++) store(c + r * kColumns + 16 * v, sums[r][v]);
}
#else
// Columns [16 First, 16 (First + V)). A group's halves are opened one after the other: 12 rows' sums leave registers
// for one.
template <int R, int First, int V, typename Panel>
__attribute__((always_inline)) inline void direct_pass(const float* row, const Panel& panel, int64_t k, float* c) {
  // Few rows: sums of even and odd k apart, so that enough products are under way.
  constexpr int P = !kDeterministic && R < (kVectors == 32 ? 4 : 2) ? 2 : 1;
  Floats sums[P][R][V];
#pragma GCC unroll 2
  for (int p = 0; p < P; p++)
#pragma GCC unroll 14
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[p][r][v] = zeros();
  for (int64_t j = 0; j < k; j += kGroupK) {
    const auto group = panel.group(j);
    if (First == 0) group.prefetch();
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const Pairs pairs = group.half(half);
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++, row += R) {
        Floats column[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
          const Words own = First + v ? pairs.high : pairs.low;
          column[v] = i ? odd_of(own) : even_of(own);
        }
#pragma GCC unroll 14
        for (int r = 0; r < R; r++) {
          const Floats x = all(row[r]);
#pragma GCC unroll 2
          for (int v = 0; v < V; v++) sums[i % P][r][v] = plus_product(sums[i % P][r][v], x, column[v]);
        }
      }
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const Floats sum = P == 2 ? sums[0][r][v] + sums[P - 1][r][v] : sums[0][r][v];
      store(c + r * kColumns + 16 * (First + v), sum);
    }
}

template <int R, typename Panel>
void direct_tile(const float* a, const Panel& panel, int64_t k, float* c) {
  if constexpr (kVectors == 32 || R <= 2) {
    direct_pass<R, 0, 2>(a, panel, k, c);
  } else {
    direct_pass<R, 0, 1>(a, panel, k, c);
    direct_pass<R, 1, 1>(a, panel, k, c);
  }
  add_rares<R>(panel, a, k, c);
}
#endif

// Tiles [low, high) times panel p.
template <typename T>
void direct_panel(const Product<T>& job, int64_t low, int64_t high, int64_t p) {
  const Tiles& tiles = job.tiles;
  alignas(64) float c[kRows * kColumns];
  with_panel(job, p, [&](const auto& panel) {
    for (int64_t t = low; t < high; t++)
      with_rows(tiles.size(t), [&](auto r) {
        direct_tile<r.value>(job.rows + tiles.first(t) * job.words(), panel, job.k_size, c);
        job.put(c, tiles.first(t), r.value, p);
      });
  });
}
