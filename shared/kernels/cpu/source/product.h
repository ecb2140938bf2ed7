// Operands of a projection: rows of x laid out for its products, panels of weights, and the output y.
#pragma once

#include <algorithm>

#include "panels.h"
#include "thread_pool.h"

constexpr int64_t kTaskPanels = 4;  // of a task of many rows

// Bytes of laid out rows that are multiplied with all panels before the next rows are: they stay in a cache that other
// processes share. Each panel is then read from memory once for these rows, which costs little beside their products.
constexpr int64_t kStayingBytes = 2 << 20;

inline int64_t tasks_of(int64_t count, int64_t grain) { return (count + grain - 1) / grain; }

// The `task`-th `grain` of `count` iterations: body(first, last).
template <typename F>
void run_range(int64_t task, int64_t count, int64_t grain, F&& body) {
  body(task * grain, std::min(count, (task + 1) * grain));
}

// The words of 32 bits that a row of x consists of, once laid out for the products.
template <typename T>
struct Laid {
  using Products = Numbers;
  static constexpr int per_word = 1;
  static Words load(const T* x, int64_t) { return as_words(load16(x)); }  // k is a multiple of 16
};
#ifdef TANDEM_PAIRS
template <>
struct Laid<bf16> {
  using Products = PairsOfBf16;
  static constexpr int per_word = 2;
  static Words load(const bf16* x, int64_t count) { return load_words(x, count); }
};
#endif

// rows of x, one every `step`, as [word][rows]: what a step over k broadcasts lies side by side.
template <typename T>
void lay_rows(const T* x, int64_t step, int64_t k_size, int rows, float* out) {
  const int64_t words = k_size / Laid<T>::per_word;
  for (int64_t w = 0; w < words; w += 16) {
    const int64_t count = std::min<int64_t>(16, words - w);
    Words v[16];
    for (int r = 0; r < 16; r++) v[r] = no_words();
    for (int r = 0; r < rows; r++) v[r] = Laid<T>::load(x + r * step + w * Laid<T>::per_word, count);
    transpose16(v);
    for (int64_t i = 0; i < count; i++) store_words(out + (w + i) * rows, v[i], rows);
  }
}

// y[rows][32] = c + bias, rounded.
template <typename T>
void finish(const float* c, int rows, const T* bias, T* y, int64_t y_step) {
  Floats b[2] = {zeros(), zeros()};
  if (bias) b[0] = load16(bias), b[1] = load16(bias + 16);
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < 2; v++) store16(y + r * y_step + 16 * v, load(c + r * kColumns + 16 * v) + b[v]);
}

// Number j of row r, out of R rows of a product with bf16 weights, laid out.
template <int R>
float laid(const float* a, int64_t j, int r) {
  if constexpr (Laid<bf16>::per_word == 2) return to_float(((const bf16*)a)[(j / 2 * R + r) * 2 + j % 2]);
  return a[j * R + r];
}

// c[R][32] += the products of R rows, laid out, and a panel's rare weights, which count as 0 elsewhere.
template <int R, typename Panel>
void add_rares(const Panel& panel, const float* a, int64_t k, float* c) {
  panel.each_rare(0, k, [&](int64_t j, int64_t output, float weight) {
    for (int r = 0; r < R; r++) c[r * kColumns + output] += laid<R>(a, j, r) * weight;
  });
}

template <typename T>
struct Operands {  // x and y: m rows, one every `step`
  const T* x;
  int64_t x_step;
  T* y;
  int64_t y_step, m;
};

template <typename T>
struct Product {
  const float* rows;  // laid out, tile after tile
  const T *weight, *bias;
  T* y;
  int64_t k_size, y_step, panel_stride;  // bytes from a compressed panel to the next; 0: the panels are not compressed
  Tiles tiles;
  int64_t form = 0;             // of codes (codes.h)
  const float* sums = nullptr;  // of the rows' spans, tile after tile as [span][rows], where codes have zeros
  int64_t num_spans() const;

  int64_t words() const { return k_size / Laid<T>::per_word; }
  int64_t panel_bytes() const { return panel_stride ? panel_stride : int64_t(sizeof(T)) * kColumns * k_size; }
  void put(const float* c, int64_t row, int count, int64_t p) const {
    finish(c, count, bias ? bias + p * kColumns : nullptr, y + row * y_step + p * kColumns, y_step);
  }
};

// Calls f with panel p as a PlainPanel or a CompressedPanel.
template <typename F>
auto with_panel(const Product<float>& job, int64_t p, F&& f) {
  return f(job.weight + p * kColumns * job.k_size);
}
template <typename F>
auto with_panel(const Product<bf16>& job, int64_t p, F&& f) {
  if (job.panel_stride) return f(CompressedPanel((const std::byte*)job.weight + p * job.panel_stride, job.k_size));
  return f(PlainPanel{job.weight + p * kColumns * job.k_size});
}
