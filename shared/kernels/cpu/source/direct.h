// Few rows: each weight is read once from memory, in its own dtype, and widened as it is used.
#pragma once

#include "product.h"

// Rows that share a weight as it is widened: that takes registers too.
constexpr int64_t kDirectTile = kVectors == 32 ? 12 : 4;

// What a tile of rows prefetches while it is multiplied with a panel: from the `turn`-th group on, every `every`-th
// one, `by` bytes behind itself. Turn 0: nothing.
struct Ahead {
  int64_t by, every, turn;
};

// For tile `t` of `count`. A single tile reads its panel as fast as memory gives it. Of several tiles, all but the
// first find the panel in the cache: each of them prefetches a share of the next panel, so that memory is never idle.
inline Ahead ahead_of(int64_t t, int64_t count, int64_t panel_bytes, bool is_first, bool is_last) {
  if (count == 1 || (is_first && t == 0)) return {kAhead, 1, 1};
  if (is_last) return {0, 0, 0};  // the next panel may be read by any thread
  return is_first ? Ahead{panel_bytes, count - 1, t} : Ahead{panel_bytes, count, t + 1};
}

template <int R>
void direct_tile(const float* a, const float* w, int64_t k, const Ahead&, float* c) {
  multiply_tile<R>(a, R, w, k, c, false);
}

#ifdef TANDEM_PAIRS
template <int R, typename Panel>
void pair_tile(const float* a, const Panel& panel, int64_t k, const Ahead& ahead, float* c) {
  Floats sums[R][2];
#pragma GCC unroll 14
  for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = zeros();
  const float* row = a;
  int64_t turn = ahead.turn;
  for (int64_t j = 0; j < k; j += kGroupK) {
    const auto group = panel.group(j);
    if (--turn == 0) {
      group.prefetch(ahead.by);
      turn = ahead.every;
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, row += R) {
      const auto pairs = group.half(half);
      const Words low = pair_of(pairs.low), high = pair_of(pairs.high);
#pragma GCC unroll 14
      for (int r = 0; r < R; r++) {
        const Words x = as_words(all(row[r]));
        sums[r][0] = plus_pairs(sums[r][0], x, low);
        sums[r][1] = plus_pairs(sums[r][1], x, high);
      }
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; r++)
    for (int v = 0; v < 2; v++) store(c + r * kColumns + 16 * v, sums[r][v]);
}

template <int R, typename Panel>
void direct_tile(const float* a, const Panel& panel, int64_t k, const Ahead& ahead, float* c) {
  pair_tile<R>(a, panel, k, ahead, c);
  add_rares<R>(panel, a, k, c);
}
#endif

// Columns [16 First, 16 (First + V)). A group's halves are opened one after the other: 12 rows' sums leave registers
// for one. MaySplit: whether few rows are summed in two parts.
template <int R, int First, int V, bool MaySplit, typename Panel>
__attribute__((always_inline)) inline void direct_pass(
    const float* row, const Panel& panel, int64_t k, const Ahead& ahead, float* c) {
  // Few rows: sums of even and odd k apart, so that enough products are under way.
  constexpr int P = MaySplit && !kDeterministic && R < (kVectors == 32 ? 4 : 2) ? 2 : 1;
  Floats sums[P][R][V];
#pragma GCC unroll 2
  for (int p = 0; p < P; p++)
#pragma GCC unroll 14
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[p][r][v] = zeros();
  int64_t turn = First == 0 ? ahead.turn : 0;
  for (int64_t j = 0; j < k; j += kGroupK) {
    const auto group = panel.group(j);
    if (--turn == 0) {
      group.prefetch(ahead.by);
      turn = ahead.every;
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const auto pairs = group.half(half);
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++, row += R) {
        Floats column[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
          const auto& own = First + v ? pairs.high : pairs.low;
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

// Rows laid out as fp32.
template <int R, bool MaySplit, typename Panel>
void float_tile(const float* a, const Panel& panel, int64_t k, const Ahead& ahead, float* c) {
  if constexpr (kVectors == 32 || R <= 2) {
    direct_pass<R, 0, 2, MaySplit>(a, panel, k, ahead, c);
  } else {
    direct_pass<R, 0, 1, MaySplit>(a, panel, k, ahead, c);
    direct_pass<R, 1, 1, MaySplit>(a, panel, k, ahead, c);
  }
}

#ifndef TANDEM_PAIRS
template <int R, typename Panel>
void direct_tile(const float* a, const Panel& panel, int64_t k, const Ahead& ahead, float* c) {
  float_tile<R, true>(a, panel, k, ahead, c);
  add_rares<R>(panel, a, k, c);
}
#endif

// Tiles [low, high) times panels [first, last), which lie one behind the other.
template <typename T>
void direct_panels(const Product<T>& job, int64_t low, int64_t high, int64_t first, int64_t last) {
  const Tiles& tiles = job.tiles;
  alignas(64) float c[kRows * kColumns];
  for (int64_t p = first; p < last; p++)
    with_panel(job, p, [&](const auto& panel) {
      for (int64_t t = low; t < high; t++) {
        const Ahead ahead = ahead_of(t - low, high - low, job.panel_bytes(), p == first, p + 1 == last);
        with_rows(tiles.size(t), [&](auto r) {
          direct_tile<r.value>(job.rows + tiles.first(t) * job.words(), panel, job.k_size, ahead, c);
          job.put(c, tiles.first(t), r.value, p);
        });
      }
    });
}
