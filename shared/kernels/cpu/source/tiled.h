// Linear layers by AMX: plain panels are its column tiles as they lie, 32 k of 32 outputs in 2 KiB; compressed ones, and
// codes in front of many rows, are opened to such pieces.
#pragma once

#include <algorithm>

#include "codes.h"
#include "product.h"
#include "thread_pool.h"
#include "tiles.h"

constexpr int64_t kVectorRows = 5;   // the most rows for which vectors are as fast, memory being the limit
constexpr int64_t kTileRows = 16;
constexpr int64_t kStep = 32;        // k of a tile
constexpr int64_t kPiece = kStep * kColumns;
constexpr int64_t kRowBytes = 64;    // of a tile
constexpr int64_t kTiledTaskWork = 1 << 22;  // products of a task of few rows
constexpr int64_t kOpenBytes = 768 << 10;  // of panels that rows are multiplied with: two threads may share 2 MiB

struct TiledProduct {
  const bf16 *x, *weight, *bias;
  bf16 *y, *rows;  // rows: x as [row tile][step][row][32], zeros behind k
  int64_t m, k_size, x_step, y_step, panel_stride, form;

  int64_t steps() const { return (k_size + kStep - 1) / kStep; }
  int64_t row_tiles() const { return (m + kTileRows - 1) / kTileRows; }
  int rows_of(int64_t tile) const { return int(std::min(kTileRows, m - tile * kTileRows)); }
  const bf16* tile(int64_t tile) const { return rows + tile * kTileRows * steps() * kStep; }
};

inline void lay_tile(const TiledProduct& job, int64_t tile) {
  const int rows = job.rows_of(tile);
  bf16* out = const_cast<bf16*>(job.tile(tile));
  for (int64_t s = 0; s < job.steps(); s++) {
    const int64_t count = std::min(kStep, job.k_size - s * kStep);
    for (int r = 0; r < rows; r++, out += kStep) {
      std::memcpy(out, job.x + (tile * kTileRows + r) * job.x_step + s * kStep, count * sizeof(bf16));
      if (count < kStep) std::memset(out + count, 0, (kStep - count) * sizeof(bf16));
    }
  }
}

// A panel's pieces, to be asked for one after the other. Where they do not lie in memory as they are needed, they are
// written to `out(step)`.
template <typename Out>
class PlainPieces {
 public:
  PlainPieces(const PlainPanel& panel, int64_t k_size, Out out) : panel_(panel), k_size_(k_size), out_(out) {}

  const bf16* at(int64_t step) {
    const bf16* piece = panel_.weights + step * kPiece;
    const int64_t count = std::min(kStep, k_size_ - step * kStep);
    for (int64_t line = 0; line < 32; line++) __builtin_prefetch((const char*)piece + kAhead + 64 * line);
    if (count == kStep) return piece;
    bf16* copy = out_(step);
    std::memcpy(copy, piece, count * kColumns * sizeof(bf16));
    std::memset(copy + count * kColumns, 0, (kStep - count) * kColumns * sizeof(bf16));
    finish_stores();
    return copy;
  }

 private:
  PlainPanel panel_;
  int64_t k_size_;
  Out out_;
};

template <typename Out>
class CompressedPieces {
 public:
  CompressedPieces(const CompressedPanel& panel, int64_t k_size, Out out)
      : panel_(panel), k_size_(k_size), rare_(panel.rares()), end_(rare_ + panel.num_rares()), out_(out) {}

  const bf16* at(int64_t step) {
    const int64_t first = step * kStep, count = std::min(kStep, k_size_ - first);
    bf16* piece = out_(step);
    for (int64_t j = 0; j < count; j += kGroupK) {
      const auto group = panel_.group(first + j);
      group.prefetch();
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        const Pairs pairs = group.half(i);
        store_words(piece + j * kColumns + 64 * i, pairs.low);
        store_words(piece + j * kColumns + 64 * i + 32, pairs.high);
      }
    }
    if (count < kStep) std::memset(piece + count * kColumns, 0, (kStep - count) * kColumns * sizeof(bf16));
    for (; rare_ != end_ && rare_->place < (first + count) * kColumns; rare_++) {
      const int64_t k = rare_->place / kColumns - first, output = rare_->place % kColumns;
      uint32_t bits;
      std::memcpy(&bits, &rare_->weight, 4);
      piece[k / 2 * 64 + output * 2 + k % 2] = {uint16_t(bits >> 16)};
    }
    finish_stores();
    return piece;
  }

 private:
  CompressedPanel panel_;
  int64_t k_size_;
  const CompressedPanel::Rare *rare_, *end_;
  Out out_;
};

// Of codes, each scaled and rounded to bf16: a row's sums then stay in tiles over all of k.
template <typename Codes, typename Out>
class ScaledPieces {
 public:
  ScaledPieces(const std::byte* panel, const Form& form, Out out)
      : at_(panel), form_(form), k_(form.group), codes_(panel), out_(out) {}

  const bf16* at(int64_t step) {
    bf16* piece = out_(step);
    for (int64_t j = 0; j < kStep; j += kGroupK, k_ += kGroupK) {
      if (k_ == form_.group) begin_group();
      const auto group = codes_.group(k_);
      group.prefetch();
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        const auto pairs = group.half(i);
        store_words(piece + j * kColumns + 64 * i, scaled(pairs.low, 0));
        store_words(piece + j * kColumns + 64 * i + 32, scaled(pairs.high, 1));
      }
    }
    finish_stores();
    return piece;
  }

 private:
  void begin_group() {
    for (int v = 0; v < 2; v++) {
      const Floats scale = load((const float*)at_ + 16 * v);
      scales_[v] = scale * all(Codes::kUnit);
      offsets_[v] = form_.has_zeros ? form_.offset(at_, v, scale) : zeros();
    }
    codes_ = Codes(at_ + form_.head_bytes());
    at_ += form_.group_bytes();
    k_ = 0;
  }
  template <typename Two>
  Words scaled(const Two& pairs, int v) const {
    return paired(
        plus_product(offsets_[v], even_of(pairs), scales_[v]), plus_product(offsets_[v], odd_of(pairs), scales_[v]));
  }

  const std::byte* at_;  // the next group
  Form form_;
  int64_t k_;  // of the present group, that were opened
  Codes codes_;
  Floats scales_[2], offsets_[2];
  Out out_;
};

// Whether m rows of k meet codes as ScaledPieces: where a panel is opened once for several tiles of them, scaling each
// weight takes less than scaling the sums of short groups, of which those of 16 are no step of a tile.
inline bool scales_codes(const Form& form, int64_t m, int64_t k) {
  if (kDeterministic || form.rounds_rows || k % kStep != 0) return false;
  return form.group == 16 ? m > kVectorRows : form.group % kStep == 0 && form.group < Form::kSpan && m > 2 * kTileRows;
}

// Calls f with the pieces of panel p.
template <typename Out, typename F>
void with_pieces(const TiledProduct& job, int64_t p, Out out, F&& f) {
  if (job.form) {
    const std::byte* panel = (const std::byte*)job.weight + p * job.panel_stride;
    with_codes<bf16>(Form(job.form), panel, [&]<typename Codes>(const Codes&) {
      f(ScaledPieces<Codes, Out>(panel, Form(job.form), out));
    });
  } else if (job.panel_stride)
    f(CompressedPieces<Out>(
        CompressedPanel((const std::byte*)job.weight + p * job.panel_stride, job.k_size), job.k_size, out));
  else
    f(PlainPieces<Out>(PlainPanel{job.weight + p * kColumns * job.k_size}, job.k_size, out));
}

// c[first + second][32] = one or two row tiles, of `first` and `second` rows, times `steps` pieces: a and b are laid out
// as [step][row][64 bytes], `piece(step)` are 16 rows of 128 bytes. Steps are added in
// their order, so that a row's sums do not depend on whether there is a second tile. IsBytes: sums of whole numbers.
template <bool IsBytes, typename F>
void tile_products(
    TwoByTwo& tiles, const std::byte* a, int first, const std::byte* b, int second, int64_t steps, F&& piece, void* c) {
#define TANDEM_ADD(sums, rows, columns)                          \
  if constexpr (IsBytes) TILE_DOT_BYTES(sums, rows, columns); \
  else TILE_DOT(sums, rows, columns)
  tiles.shape(first, second ? second : first);
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  if (second) {
    for (int64_t s = 0; s < steps; s++, a += first * kRowBytes, b += second * kRowBytes) {
      const std::byte* w = piece(s);
      TILE_LOAD(6, w, 128);
      TILE_LOAD(4, a, 64);
      TANDEM_ADD(0, 4, 6);
      TILE_LOAD(7, w + 64, 128);
      TANDEM_ADD(1, 4, 7);
      TILE_LOAD(5, b, 64);
      TANDEM_ADD(2, 5, 6);
      TANDEM_ADD(3, 5, 7);
    }
  } else {
    for (int64_t s = 0; s < steps; s++, a += first * kRowBytes) {
      const std::byte* w = piece(s);
      TILE_LOAD(4, a, 64);
      TILE_LOAD(6, w, 128);
      TANDEM_ADD(0, 4, 6);
      TILE_LOAD(7, w + 64, 128);
      TANDEM_ADD(1, 4, 7);
    }
  }
#undef TANDEM_ADD
  std::byte *upper = (std::byte*)c, *lower = upper + first * 128;
  TILE_STORE(0, upper, 128);
  TILE_STORE(1, upper + 64, 128);
  if (!second) return;
  TILE_STORE(2, lower, 128);
  TILE_STORE(3, lower + 64, 128);
}

// Row tiles `t` and `t + 1`, if there is one, times a panel, to y. `piece(step)`: of the panel.
template <typename F>
void multiply_rows(const TiledProduct& job, TwoByTwo& tiles, int64_t t, int64_t p, F&& piece) {
  alignas(64) float c[2 * kTileRows * kColumns];
  const int first = job.rows_of(t), second = t + 1 < job.row_tiles() ? job.rows_of(t + 1) : 0;
  tile_products<false>(
      tiles, (const std::byte*)job.tile(t), first, (const std::byte*)job.tile(t + 1), second, job.steps(),
      [&](int64_t step) { return (const std::byte*)piece(step); }, c);
  finish(
      c, first + second, job.bias ? job.bias + p * kColumns : nullptr,
      job.y + t * kTileRows * job.y_step + p * kColumns, job.y_step);
}

// At most two row tiles: a panel is read once, a piece at a time.
inline void few_rows(const TiledProduct& job, int64_t first, int64_t last) {
  TwoByTwo tiles;
  alignas(64) bf16 pieces[4][kPiece];
  for (int64_t p = first; p < last; p++)
    with_pieces(job, p, [&](int64_t step) { return pieces[step % 4]; }, [&](auto panel) {
      multiply_rows(job, tiles, 0, p, [&](int64_t step) { return panel.at(step); });
    });
}

// The panel, opened: multiplied with the first pair of row tiles on the way, so that its weights are read ahead. What
// does not lie ready is written to `opened`.
inline const bf16* open_panel(const TiledProduct& job, TwoByTwo& tiles, int64_t p, bf16* opened) {
  with_pieces(job, p, [&](int64_t step) { return opened + step * kPiece; }, [&](auto panel) {
    multiply_rows(job, tiles, 0, p, [&](int64_t step) { return panel.at(step); });
  });
  const bf16* plain = job.weight + p * kColumns * job.k_size;
  if (!job.panel_stride && job.k_size % kStep == 0) return plain;
  if (!job.panel_stride) std::memcpy(opened, plain, job.k_size / kStep * kPiece * sizeof(bf16));
  finish_stores();
  return opened;
}

// Panels [first, last), each opened once. A pair of row tiles is multiplied with several while it is in the second
// cache: AMX would wait for rows that come from the third one for each panel.
inline void many_rows(const TiledProduct& job, int64_t first, int64_t last) {
  thread_local Workspace workspace;
  TwoByTwo tiles;
  const int64_t panel_size = job.steps() * kPiece;
  const int64_t together = std::clamp<int64_t>(kOpenBytes / (panel_size * int64_t(sizeof(bf16))), 1, kTaskPanels);
  bf16* opened = (bf16*)workspace.floats(together * panel_size / 2);
  for (; first < last; first += together) {
    const int64_t count = std::min(together, last - first);
    const bf16* panels[kTaskPanels];
    for (int64_t i = 0; i < count; i++) panels[i] = open_panel(job, tiles, first + i, opened + i * panel_size);
    for (int64_t t = 2; t < job.row_tiles(); t += 2)
      for (int64_t i = 0; i < count; i++)
        multiply_rows(job, tiles, t, first + i, [&](int64_t step) { return panels[i] + step * kPiece; });
  }
}
