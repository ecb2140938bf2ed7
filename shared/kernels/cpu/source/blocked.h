// Many rows: a panel is widened once and reused from the cache, blocked over k (Goto and van de Geijn 2008, "Anatomy of
// high-performance matrix multiplication").
#pragma once

#include "product.h"

constexpr int64_t kBlock = 512;                   // k of a widened panel
constexpr int64_t kChunk = 224 / kRows * kRows;   // rows that use a widened panel

// Weights of `count` k from `first` on, wide: [k][32]; fp32 ones lie so already.
inline const float* widen(const float* panel, int64_t first, int64_t, float*) { return panel + first * kColumns; }
template <typename Panel>
const float* widen(const Panel& panel, int64_t first, int64_t count, float* out) {
  for (int64_t j = 0; j < count; j += kGroupK) {
    const auto group = panel.group(first + j);
    group.prefetch();
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const Pairs pairs = group.half(i);
      float *even = out + kColumns * (j + 2 * i), *odd = even + kColumns;
      store(even, even_of(pairs.low));
      store(even + 16, even_of(pairs.high));
      store(odd, odd_of(pairs.low));
      store(odd + 16, odd_of(pairs.high));
    }
  }
  if (!kDeterministic)  // then they come last, as where rows are few
    panel.each_rare(first, first + count, [&](int64_t k, int64_t output, float weight) {
      out[(k - first) * kColumns + output] = weight;
    });
  return out;
}

// What a panel of fp32 weights has none of.
template <int R>
void add_rares(const float*, const float*, int64_t, float*) {}

// Tiles [low, high) times panels [first, last).
template <typename T>
void blocked(const Product<T>& job, int64_t low, int64_t high, int64_t first, int64_t last) {
  thread_local Workspace workspace;
  const Tiles& tiles = job.tiles;
  const int64_t top = tiles.first(low), rows = tiles.first(high) - top;
  float* wide = workspace.floats(kColumns * (kBlock + kTaskPanels * rows));
  float* sums = wide + kColumns * kBlock;  // [panel][row][32]
  for (int64_t k = 0; k < job.k_size; k += kBlock) {
    const int64_t depth = std::min(kBlock, job.k_size - k);
    for (int64_t p = first; p < last; p++) {
      const float* b = with_panel(job, p, [&](const auto& panel) { return widen(panel, k, depth, wide); });
      for (int64_t t = low; t < high; t++)
        with_rows(tiles.size(t), [&](auto r) {
          float* c = sums + ((p - first) * rows + tiles.first(t) - top) * kColumns;
          const float* a = job.rows + tiles.first(t) * job.k_size + k * r.value;
          multiply_tile<r.value>(a, r.value, b, depth, c, k > 0);
          if (k + depth < job.k_size) return;
          if constexpr (kDeterministic)
            with_panel(job, p, [&](const auto& panel) {
              add_rares<r.value>(panel, job.rows + tiles.first(t) * job.k_size, job.k_size, c);
            });
          job.put(c, tiles.first(t), r.value, p);
        });
    }
  }
}
