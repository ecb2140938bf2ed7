// One product y = x w^T + bias with packed weights, as tasks that any threads may run: first those that lay out rows of
// x, then, all of them done, those that multiply.
#pragma once

#include <variant>

#include "blocked.h"
#include "coded_product.h"
#include "codes.h"
#include "direct.h"
#include "rounded.h"
#ifdef TANDEM_TILES
#include "tiled_codes.h"
#endif

// The most rows for which weights are widened as they are used; fp32 weights need no widening.
constexpr int64_t kDirectRows = 36, kDirectWideRows = kVectors == 32 ? kDirectRows : 2;
constexpr int64_t kTaskWork = 1 << 20;  // products of a task of few rows, so that tasks are neither tiny nor few
template <typename T>
int64_t Product<T>::num_spans() const { return form ? k_size / Form(form).group * Form(form).spans() : 0; }

// A packed weight: bytes from one compressed panel to the next, 0 for plain panels; and the form of codes, or 0.
struct Packed {
  int64_t panel_stride, form;
};

// Lays out a tile of x, and with zeros sums its rows.
template <typename T>
void lay_one(const Product<T>& job, const T* x, int64_t x_step, int64_t tile, float* scratch) {
  const int64_t first = job.tiles.first(tile), spans = job.num_spans();
  const int rows = job.tiles.size(tile);
  lay_rows(x + first * x_step, x_step, job.k_size, rows, scratch + first * job.words());
  if (!job.form || !Form(job.form).has_zeros) return;
  for (int r = 0; r < rows; r++)
    sum_spans(x + (first + r) * x_step, job.k_size, Form(job.form), (float*)job.sums + first * spans + r, rows);
}

template <typename T>
void any_panels(const Product<T>& job, int64_t low, int64_t high, int64_t first, int64_t last) {
  job.form ? coded_panels(job, low, high, first, last) : direct_panels(job, low, high, first, last);
}

// Rows that meet a panel's opened codes, which takes about as long as 6 rows' products.
constexpr int64_t kCodedChunk = 512;

template <typename T>
class Multiplication {
 public:
  // x [m, k], packed w, bias [n] or null, y [m, n]. Scratch of m k floats, and m k / 16 more for codes; n a multiple of
  // 32, k of 16.
  Multiplication(
      const Operands<T>& o, const T* weight, Packed packed, const T* bias, float* scratch, int64_t k, int64_t n)
      : o_(o),
        is_direct_(
            packed.form || o.m <= (sizeof(T) == 2 ? kDirectWideRows : kDirectRows) || Laid<T>::per_word == 2),
        job_{scratch, weight, bias, o.y, k, o.y_step, packed.panel_stride,
             Tiles(o.m, tile_rows(o.m, packed.form)),
             packed.form, scratch + o.m * k},
        scratch_(scratch),
        panels_(n / kColumns),
        chunks_(chunks_of(o.m)),
        staying_(is_direct_ ? 1 : std::max<int64_t>(1, kStayingBytes / (kChunk * job_.words() * 4))),
        grain_(std::max(
            std::clamp<int64_t>(panels_ / (4 * num_threads()), 1, kTaskPanels), kTaskWork / (kColumns * k * (o.m + 8)))),
        lay_grain_(o.m < kChunk ? job_.tiles.count : 2) {}

  int64_t lay_tasks() const { return tasks_of(job_.tiles.count, lay_grain_); }
  void lay(int64_t task) const {
    const Tiles& tiles = job_.tiles;
    run_range(task, tiles.count, lay_grain_, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++) lay_one(job_, o_.x, o_.x_step, t, scratch_);
    });
  }

  int64_t tasks() const { return chunks_ * tasks_of(panels_, is_direct_ ? grain_ : kTaskPanels); }
  void run(int64_t task) const {
    // All panels meet some chunks, one after the other, before they meet the next ones.
    const int64_t grain = is_direct_ ? grain_ : kTaskPanels, of_staying = staying_ * tasks_of(panels_, grain);
    const int64_t first_chunk = task / of_staying * staying_, within = task % of_staying;
    const int64_t chunks = std::min(staying_, chunks_ - first_chunk), chunk = first_chunk + within % chunks;
    const int64_t count = job_.tiles.count, low = chunk * count / chunks_, high = (chunk + 1) * count / chunks_;
    run_range(within / chunks, panels_, grain, [&](int64_t first, int64_t last) {
      is_direct_ ? any_panels(job_, low, high, first, last) : blocked(job_, low, high, first, last);
    });
  }

 private:
  // Rows share weights that are opened for each of their tiles, or once for all of many tiles.
  int64_t tile_rows(int64_t m, int64_t form) const {
    if (form) return m < kOpenedTiles * kDirectTile ? kDirectTile : kRows;
    return is_direct_ && sizeof(T) == 2 && Laid<T>::per_word == 1 ? kDirectTile : kRows;
  }
  int64_t chunks_of(int64_t m) const {
    if (!is_direct_) return tasks_of(m, kChunk);
    return job_.form && Laid<T>::per_word == 2 ? tasks_of(m, kCodedChunk) : tasks_of(m * job_.words() * 4, kStayingBytes);
  }

  Operands<T> o_;
  bool is_direct_;
  Product<T> job_;
  float* scratch_;
  int64_t panels_, chunks_, staying_, grain_, lay_grain_;
};

#ifdef TANDEM_AMX
// In tiles where rows are many.
template <>
class Multiplication<bf16> {
 public:
  Multiplication(
      const Operands<bf16>& o, const bf16* weight, Packed packed, const bf16* bias, float* scratch, int64_t k, int64_t n)
      : is_tiled_(packed.form ? scales_codes(Form(packed.form), o.m, k) : kDeterministic || o.m > kVectorRows),
        tiled_{o.x, weight, bias, o.y, (bf16*)scratch, o.m, k, o.x_step, o.y_step, packed.panel_stride, packed.form},
        job_{scratch, weight, bias, o.y, k, o.y_step, packed.panel_stride, Tiles(o.m, kDirectTile),
             packed.form, scratch + o.m * k},
        scratch_(scratch),
        panels_(n / kColumns),
        grain_(std::max<int64_t>(1, (is_tiled_ ? kTiledTaskWork : kTaskWork) / (kColumns * k * (o.m + 8)))) {}

  int64_t lay_tasks() const { return is_tiled_ ? tasks_of(tiled_.row_tiles(), lay_grain()) : 1; }
  void lay(int64_t task) const {
    if (is_tiled_)
      return run_range(task, tiled_.row_tiles(), lay_grain(), [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) lay_tile(tiled_, t);
      });
    const Tiles& tiles = job_.tiles;
    for (int64_t t = 0; t < tiles.count; t++) lay_one(job_, tiled_.x, tiled_.x_step, t, scratch_);
  }

  int64_t tasks() const { return tasks_of(panels_, grain()); }
  void run(int64_t task) const {
    run_range(task, panels_, grain(), [&](int64_t first, int64_t last) {
      if (is_tiled_) return tiled_.row_tiles() <= 2 ? few_rows(tiled_, first, last) : many_rows(tiled_, first, last);
      any_panels(job_, 0, job_.tiles.count, first, last);
    });
  }

 private:
  int64_t lay_grain() const { return tiled_.m < 64 ? tiled_.row_tiles() : 2; }
  int64_t grain() const { return is_tiled_ && tiled_.row_tiles() > 2 ? kTaskPanels : grain_; }

  bool is_tiled_;
  TiledProduct tiled_;
  Product<bf16> job_;
  float* scratch_;
  int64_t panels_, grain_;
};
#endif

// Any product, by what suits its weight and number of rows; its parts are those of Multiplication.
template <typename T>
class AnyProduct {
 public:
  AnyProduct(
      const Operands<T>& o, const T* weight, Packed packed, const T* bias, float* scratch, int64_t k, int64_t n)
      : of_(made(o, weight, packed, bias, scratch, k, n)) {}

  int64_t lay_tasks() const { return visit([](const auto& of) { return of.lay_tasks(); }); }
  void lay(int64_t task) const { visit([&](const auto& of) { of.lay(task); }); }
  int64_t tasks() const { return visit([](const auto& of) { return of.tasks(); }); }
  void run(int64_t task) const { visit([&](const auto& of) { of.run(task); }); }

 private:
  using Vectors = RoundedProduct<T>;
#ifdef TANDEM_AMX
  template <typename Codes>
  using Opened = CodedProduct<bf16, OpenedTiles<Codes>>;
  using Of = std::variant<
      Multiplication<T>, Vectors, CodedProduct<T, RoundedTiles<T>>, Opened<Codes8Of<bf16>>, Opened<Codes4>>;
#elif defined(TANDEM_TILES)
  using Of = std::variant<Multiplication<T>, Vectors, CodedProduct<T, RoundedTiles<T>>>;
#else
  using Of = std::variant<Multiplication<T>, Vectors>;
#endif

  template <typename F>
  auto visit(F&& f) const { return std::visit(f, of_); }

  static Of made(
      const Operands<T>& o, const T* weight, Packed packed, const T* bias, float* scratch, int64_t k, int64_t n) {
    const Form form(packed.form);
    auto coded = [&]<typename Product>(std::in_place_type_t<Product> type, int64_t work) {
      return Of(type, o, (const std::byte*)weight, packed.panel_stride, form, bias, scratch, k, n, work);
    };
#ifdef TANDEM_TILES
    if (packed.form && RoundedTiles<T>::fits(form) && o.m > kVectorRows)
      return coded(std::in_place_type<CodedProduct<T, RoundedTiles<T>>>, kTiledTaskWork);
#endif
    if (form.rounds_rows) return coded(std::in_place_type<Vectors>, kTaskWork);
#ifdef TANDEM_AMX
    if constexpr (sizeof(T) == 2)
      if (!kDeterministic && packed.form && OpenedTiles<Codes4>::fits(form) && o.m > kVectorRows && !scales_codes(form, o.m, k)) {
        if (form.bits == 8) return coded(std::in_place_type<Opened<Codes8Of<bf16>>>, kTiledTaskWork);
        return coded(std::in_place_type<Opened<Codes4>>, kTiledTaskWork);
      }
#endif
    return Of(std::in_place_type<Multiplication<T>>, o, weight, packed, bias, scratch, k, n);
  }

  Of of_;
};
