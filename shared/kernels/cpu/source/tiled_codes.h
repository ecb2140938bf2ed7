// Weights in codes by AMX: opened to pieces of 16 rows of 128 bytes, or multiplied where they lie in such ones.
#pragma once

#include "rounded.h"
#include "tiled.h"

constexpr int64_t kPieceBytes = 16 * 128;

// Row tiles of `bytes` a row, two a unit, laid out as [row tile][step][row][64 bytes].
class RowTiles {
 public:
  RowTiles(int64_t m, int64_t bytes, std::byte* memory) : m_(m), bytes_(bytes), memory_(memory) {}

  int64_t units() const { return tasks_of(m_, 2 * kTileRows); }
  int64_t first(int64_t unit) const { return unit * 2 * kTileRows; }
  int size(int64_t unit) const { return int(std::min(2 * kTileRows, m_ - first(unit))); }
  int upper(int64_t unit) const { return int(std::min<int64_t>(kTileRows, size(unit))); }  // rows of the first tile
  std::byte* upper_at(int64_t unit) const { return memory_ + first(unit) * bytes_; }
  std::byte* lower_at(int64_t unit) const { return upper_at(unit) + upper(unit) * bytes_; }

  void put(int64_t row, const std::byte* from) const {
    const int64_t tile = row / kTileRows, rows = std::min(kTileRows, m_ - tile * kTileRows);
    std::byte* out = memory_ + tile * kTileRows * bytes_ + (row - tile * kTileRows) * kRowBytes;
    for (int64_t i = 0; i < bytes_; i += kRowBytes, out += rows * kRowBytes) std::memcpy(out, from + i, kRowBytes);
  }

  // A unit times `steps` pieces, from `step` on.
  template <bool IsBytes, typename F>
  void multiply(TwoByTwo& tiles, int64_t unit, int64_t step, int64_t steps, F&& piece, void* c) const {
    const int first = upper(unit), second = size(unit) - first;
    tile_products<IsBytes>(
        tiles, upper_at(unit) + step * first * kRowBytes, first, lower_at(unit) + step * second * kRowBytes, second, steps,
        piece, c);
  }

 private:
  int64_t m_, bytes_;
  std::byte* memory_;
};

inline float* aligned(float* scratch) { return (float*)(((uintptr_t)scratch + 63) / 64 * 64); }

// Rows in codes times codes: see CodedProduct. Groups are of whole steps of 64.
template <typename T>
class RoundedTiles {
 public:
  static constexpr int64_t kOpenBytes = kColumns;
  static constexpr int64_t kStep = 64;
  using State = TwoByTwo;

  RoundedTiles(const Operands<T>& o, const Form& form, int64_t k, float* scratch)
      : form_(form), k_(k), rows_(o, form, k, aligned(scratch), k / kQuad), tiles_(o.m, k, (std::byte*)rows_.codes()) {}

  static bool fits(const Form& form) { return form.rounds_rows && form.group % kStep == 0; }
  int64_t row_bytes() const { return k_; }
  int64_t most_k() const { return kMostK; }
  int64_t units() const { return tiles_.units(); }
  int64_t first(int64_t unit) const { return tiles_.first(unit); }
  int size(int64_t unit) const { return tiles_.size(unit); }

  void lay(int64_t unit) const {
    thread_local Workspace workspace;
    int8_t* codes = (int8_t*)workspace.floats(k_ / 4);
    for (int r = 0; r < size(unit); r++) {
      rows_.round(first(unit) + r, codes);
      tiles_.put(first(unit) + r, (const std::byte*)codes);
    }
    finish_stores();
  }

  const std::byte* open(const std::byte* codes, int64_t depth, std::byte* room) const {
    if (form_.bits == 8) return codes;
    for (int64_t s = 0; s < depth / kStep; s++) open_step(codes, s, room + s * kPieceBytes);
    return room;
  }

  void add_product(
      TwoByTwo& tiles, int64_t unit, const Span& span, const std::byte* codes, bool is_open, bool is_first,
      const SpanSums<T>& sums) const {
    alignas(64) int32_t part[2 * kTileRows * kColumns];
    alignas(64) std::byte pieces[2][kPieceBytes];
    const int64_t step = span.k / kStep, steps = span.depth / kStep;
    if (form_.bits == 8)
      tiles_.multiply<true>(tiles, unit, step, steps, [&](int64_t s) {
        const std::byte* piece = codes + s * kPieceBytes;
        if (is_first)
          for (int64_t line = 0; line < 32; line++) __builtin_prefetch((const char*)piece + kAhead + 64 * line);
        return piece;
      }, part);
    else
      tiles_.multiply<true>(tiles, unit, step, steps, [&](int64_t s) -> const std::byte* {
        if (is_open) return codes + s * kPieceBytes;
        open_step(codes, s, pieces[s % 2]);
        return pieces[s % 2];
      }, part);
    rows_.add_scaled(part, first(unit), size(unit), span, sums);
  }

 private:
  static void open_step(const std::byte* codes, int64_t step, std::byte* piece) {
    const SpanCodes<4> from{codes};
    for (int64_t k = 0; k < kStep; k += kQuad, piece += 128) {
      from.prefetch(step * kStep + k);
      store_words(piece, from.half(step * kStep + k, 0));
      store_words(piece + 64, from.half(step * kStep + k, 1));
    }
    finish_stores();
  }

  Form form_;
  int64_t k_;
  RoundedRows<T> rows_;
  RowTiles tiles_;
};

#ifdef TANDEM_AMX
// Rows of bf16 times codes opened to bf16: see CodedProduct. Groups are of whole steps of 32.
template <typename Codes>
class OpenedTiles {
 public:
  static constexpr int64_t kOpenBytes = 2 * kColumns;
  static constexpr int64_t kStep = 32;
  using State = TwoByTwo;

  OpenedTiles(const Operands<bf16>& o, const Form& form, int64_t k, float* scratch)
      : o_(o), form_(form), k_(k), spans_(k / form.group * form.spans(Form::kLongSpan)), sums_(aligned(scratch) + o.m * k / 2),
        tiles_(o.m, 2 * k, (std::byte*)aligned(scratch)) {}

  static bool fits(const Form& form) { return !form.rounds_rows && form.group % kStep == 0; }
  int64_t row_bytes() const { return 2 * k_; }
  int64_t most_k() const { return Form::kLongSpan; }
  int64_t units() const { return tiles_.units(); }
  int64_t first(int64_t unit) const { return tiles_.first(unit); }
  int size(int64_t unit) const { return tiles_.size(unit); }

  void lay(int64_t unit) const {
    for (int64_t row = first(unit); row < first(unit) + size(unit); row++) {
      const bf16* x = o_.x + row * o_.x_step;
      tiles_.put(row, (const std::byte*)x);
      if (form_.has_zeros) sum_spans(x, k_, form_, sums_ + row * spans_, 1, Form::kLongSpan);
    }
    finish_stores();
  }

  const std::byte* open(const std::byte* codes, int64_t depth, std::byte* room) const {
    const Codes from{codes};
    for (int64_t s = 0; s < depth / kStep; s++) open_step(from, s, room + s * kPieceBytes);
    return room;
  }

  void add_product(
      TwoByTwo& tiles, int64_t unit, const Span& span, const std::byte* codes, bool is_open, bool,
      const SpanSums<bf16>& to) const {
    alignas(64) float part[2 * kTileRows * kColumns];
    alignas(64) std::byte pieces[4][kPieceBytes];
    const Codes from{codes};
    tiles_.multiply<false>(tiles, unit, span.k / kStep, span.depth / kStep, [&](int64_t s) -> const std::byte* {
      if (is_open) return codes + s * kPieceBytes;
      open_step(from, s, pieces[s % 4]);
      return pieces[s % 4];
    }, part);
    const float* sums = sums_ + first(unit) * spans_ + span.number;
    add_scaled(part, Codes::kUnit, span.head, form_, size(unit), [&](int r) { return sums[r * spans_]; }, to);
  }

 private:
  static void open_step(const Codes& from, int64_t step, std::byte* piece) {
    for (int64_t k = 0; k < kStep; k += kGroupK) {
      const auto group = from.group(step * kStep + k);
      group.prefetch();
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++, piece += 128) {
        const auto pairs = group.half(i);
        store_words(piece, pair_of(pairs.low));
        store_words(piece + 64, pair_of(pairs.high));
      }
    }
    finish_stores();
  }

  Operands<bf16> o_;
  Form form_;
  int64_t k_, spans_;
  float* sums_;
  RowTiles tiles_;
};
#endif
