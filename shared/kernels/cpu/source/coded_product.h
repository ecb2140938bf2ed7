// Products with weights in codes by spans of k, a few panels at a time: rows meet a span of each while both are in the
// cache.
#pragma once

#include "codes.h"

constexpr int64_t kChunkRows = 512;  // whose sums are kept while spans are multiplied

// Kind: lays rows out in units, opens codes of a span of at most `most_k` k and multiplies them with a unit. `kOpenBytes`:
// of a k and panel, that it opens codes to; add_product adds to sums, `is_open`: the codes are what `open` returned, `is_first`:
// of the units that meet them.
template <typename T, typename Kind>
class CodedProduct {
 public:
  CodedProduct(
      const Operands<T>& o, const std::byte* weight, int64_t panel_stride, const Form& form, const T* bias, float* scratch,
      int64_t k, int64_t n, int64_t task_work)
      : o_(o), weight_(weight), panel_stride_(panel_stride), form_(form), bias_(bias), k_(k), kind_(o, form, k, scratch),
        panels_(n / kColumns),
        chunks_(std::max(tasks_of(o.m * kind_.row_bytes(), kStayingBytes), tasks_of(o.m, kChunkRows))),
        grain_(kind_.units() == 1 ? std::max<int64_t>(1, task_work / (kColumns * k * (o.m + 8))) : kTaskPanels) {}

  int64_t lay_tasks() const { return kind_.units(); }
  void lay(int64_t task) const { kind_.lay(task); }

  int64_t tasks() const { return chunks_ * tasks_of(panels_, grain_); }
  void run(int64_t task) const {
    const int64_t of_chunk = tasks_of(panels_, grain_), chunk = task / of_chunk, units = kind_.units();
    const int64_t low = chunk * units / chunks_, high = (chunk + 1) * units / chunks_;
    if (low == high) return;
    run_range(task % of_chunk, panels_, grain_, [&](int64_t first, int64_t last) {
      const int64_t together = high - low == 1 ? 1 : last - first;
      for (; first < last; first += together) multiply(low, high, first, together);
    });
  }

 private:
  void multiply(int64_t low, int64_t high, int64_t panel, int64_t count) const {
    thread_local Workspace workspace;
    typename Kind::State state;
    const int64_t top = kind_.first(low), rows = kind_.first(high - 1) + kind_.size(high - 1) - top;
    const bool opens = high - low > 1;
    const int64_t room = opens ? std::min(kind_.most_k(), form_.group) * Kind::kOpenBytes : 0;
    float* c = workspace.floats(count * (rows * kColumns + room / 4));
    std::byte* rooms = (std::byte*)(c + count * rows * kColumns);
    const std::byte* base = weight_ + panel * panel_stride_;
    Span span{};
    int64_t at = 0;  // bytes from a panel's begin
    for (int64_t g = 0; g < k_; g += form_.group) {
      const int64_t head = at;
      at += form_.head_bytes();
      for (int64_t s = 0; s < form_.group; s += kind_.most_k(), span.number++) {
        span.k = g + s, span.depth = std::min(kind_.most_k(), form_.group - s);
        const std::byte* opened[kTaskPanels];
        for (int64_t p = 0; p < count; p++) {
          const std::byte* codes = base + p * panel_stride_ + at;
          opened[p] = opens ? kind_.open(codes, span.depth, rooms + p * room) : codes;
        }
        for (int64_t unit = low; unit < high; unit++)
          for (int64_t p = 0; p < count; p++) {
            span.head = base + p * panel_stride_ + head;
            const int64_t row = kind_.first(unit), column = (panel + p) * kColumns;
            const bool is_last = g + s + span.depth == k_;
            const SpanSums<T> sums{
                c + (p * rows + row - top) * kColumns, span.number == 0, is_last ? o_.y + row * o_.y_step + column : nullptr,
                o_.y_step, bias_ ? bias_ + column : nullptr};
            kind_.add_product(state, unit, span, opened[p], opens, unit == low, sums);
          }
        at += form_.codes_bytes(span.depth);
      }
    }
  }

  Operands<T> o_;
  const std::byte* weight_;
  int64_t panel_stride_;
  Form form_;
  const T* bias_;
  int64_t k_;
  Kind kind_;
  int64_t panels_, chunks_, grain_;
};
