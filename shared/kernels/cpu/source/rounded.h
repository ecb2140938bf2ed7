// Weights in codes times rows that are rounded to codes too: int8, a scale a row of x, from that row alone. Products and
// sums over a span of k are of whole numbers and exact, so that every processor has the same ones, whatever the number
// of rows; a span's sum is rounded to fp32, scaled, and added in the order of the spans.
//
// A panel: as in codes.h, but with zeros 32 bytes and 32 unused ones, and then unsigned codes: of 4 k, 16 outputs with 4 k
// each in 64 bytes, then outputs 16 to 31, or of 4 bits both in 64 bytes, the first 16 outputs in lower nibbles.
#pragma once

#include <bit>

#include "codes.h"
#include "kv_codes.h"

constexpr int64_t kQuad = 4;  // k of a word
constexpr int64_t kMostK = Form::kLongSpan;  // of a span: part of what all processors compute alike

// Four codes of 16 outputs each, ready to be multiplied; what is taken from every code; words of a row's four codes.
#ifdef TANDEM_BYTE_PRODUCTS
struct Quads {
  Words codes;
};
constexpr int kQuadWords = 1;
inline Quads quads_of(Words codes) { return {codes}; }
inline Words laid_quad(Words x, int) { return x; }
inline Words plus_quads(Words c, const float* x, int, const Quads& w) {
  return plus_products_of_bytes(c, w.codes, as_words(all(*x)));
}
#else
struct Quads {
  Words even, odd;
};
constexpr int kQuadWords = 2;
inline Quads quads_of(Words codes) { return {both(codes, all_words(0x00ff00ff)), shift_halves_right<8>(codes)}; }
inline Words laid_quad(Words x, int word) {
  return shift_halves_right_signed<8>(word ? x : shift_halves_left<8>(x));
}
inline Words plus_quads(Words c, const float* x, int step, const Quads& w) {
  c = plus(c, products_of_halves(as_words(all(x[0])), w.even));
  return plus(c, products_of_halves(as_words(all(x[step])), w.odd));
}
#endif

// Codes of a span, 16 outputs at a time.
template <int Bits>
struct SpanCodes {
  const std::byte* codes;
  static constexpr int64_t kBytes = kColumns * Bits / 8;  // of one k

  Words half(int64_t k, int i) const {
    if constexpr (Bits == 8) return load_words(codes + k * kBytes + 64 * i);
    Words both_halves = load_words(codes + k * kBytes);
    return both(i ? shift_halves_right<4>(both_halves) : both_halves, all_bytes(15));
  }
  [[gnu::always_inline]] void prefetch(int64_t k) const {
    for (int line = 0; line < Bits / 4; line++)
      __builtin_prefetch((const char*)codes + k * kBytes + kAhead + 64 * line);
  }
};

// Lines of rows and codes that are read later, asked for a little each step.
struct Later {
  const std::byte *rows, *codes;
  int64_t rows_step, codes_step;  // bytes a step

  [[gnu::always_inline]] void fetch() {
    __builtin_prefetch(rows, 0, 2);
    __builtin_prefetch(codes, 0, 2);
    move(1);
  }
  void move(int64_t steps) { rows += rows_step * steps, codes += codes_step * steps; }
};

// Sums of products less the sum of a row's codes, all_words of it as RoundedRows keeps it, times their middle, as fp32. With
// codes of 4 bits all is below 2^24, and exact in fp32.
template <int Bits>
inline Floats whole_of(Words sum, Words of_row, Words middle) {
  if constexpr (Bits == 8) return signed_floats(minus(sum, times(of_row, middle)));
  return minus_product(signed_floats(sum), as_floats(of_row), signed_floats(middle));
}

constexpr int32_t kMiddle = 128;  // of codes of 8 bits without zeros

// Scales of a span's 16 outputs, and the middles of their codes.
template <int Bits>
struct Scaling {
  Floats scale;
  Words middle;

  Scaling(const Span& span, bool has_zeros, int v)
      : scale(load((const float*)span.head + 16 * v)),
        middle(has_zeros ? unsigned_bytes(span.head + 4 * kColumns + 16 * v) : all_words(Bits == 8 ? kMiddle : 8)) {}
  void add(Words sum, int32_t of_row, float* c) const {
    store(c, plus_product(load(c), whole_of<Bits>(sum, all_words(uint32_t(of_row)), middle), scale));
  }
};

// part[R][32] = R rows' codes times a span's, for outputs [16 First, 16 (First + V)). Streams: codes come from memory. What is
// scaled beside sums would take their registers.
template <int R, int First, int V, int Bits, bool Streams>
__attribute__((always_inline)) inline void rounded_pass(
    const float* row, SpanCodes<Bits> codes, int64_t depth, Later later, int32_t* part) {
  Words sums[R][V];
#pragma GCC unroll 14
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) sums[r][v] = no_words();
  for (int64_t k = 0; k < depth; k += kQuad, row += R * kQuadWords) {
    if constexpr (First == 0) Streams ? codes.prefetch(k) : later.fetch();
    Quads w[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) w[v] = quads_of(codes.half(k, First + v));
#pragma GCC unroll 14
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[r][v] = plus_quads(sums[r][v], row + r, R, w[v]);
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) store_words(part + r * kColumns + 16 * (First + v), sums[r][v]);
}

// Rows of x in codes: laid out by `Lay`, with a scale each and the sum of each span.
template <typename T>
class RoundedRows {
 public:
  // Scratch as for Multiplication.
  RoundedRows(const Operands<T>& o, const Form& form, int64_t k, float* scratch, int64_t code_words)
      : o_(o), form_(form), k_(k), spans_(k / form.group * form.spans(kMostK)),
        codes_(scratch), sums_((int32_t*)scratch + o.m * code_words), scales_(scratch + o.m * (code_words + spans_)) {}

  float* codes() const { return codes_; }
  // c[count][32] += the scales times part [count][32], of rows `first` and so on, codes taken from their middle.
  void add_scaled(const int32_t* part, int64_t first, int count, const Span& span, float* c) const {
    form_.bits == 8 ? add_scaled<8>(part, first, count, span, c) : add_scaled<4>(part, first, count, span, c);
  }
  template <int Bits>
  [[gnu::always_inline]] void add_scaled(const int32_t* part, int64_t first, int count, const Span& span, float* c) const {
    const Scaling<Bits> low(span, form_.has_zeros, 0), high(span, form_.has_zeros, 1);
    const int32_t* of_row = sums_ + first * spans_ + span.number;
#pragma GCC unroll 2
    for (int r = 0; r < count; r++, of_row += spans_, part += kColumns, c += kColumns) {
      low.add(load_words(part), *of_row, c);
      high.add(load_words(part + 16), *of_row, c + 16);
    }
  }
  // The same to the sums of spans, which are scaled at the end.
  void add_scaled(const int32_t* part, int64_t first, int count, const Span& span, const SpanSums<T>& to) const {
    to.with_part([&](auto of) {
      if (form_.bits == 4) add_span<4, true>(of, part, first, count, span);
      else form_.has_zeros ? add_span<8, true>(of, part, first, count, span) : add_span<8, false>(of, part, first, count, span);
    });
  }
  template <int Bits, bool HasMiddles, typename Of>
  [[gnu::always_inline]] void add_span(Of of, const int32_t* part, int64_t first, int count, const Span& span) const {
    const Scaling<Bits> halves[2] = {{span, bool(form_.has_zeros), 0}, {span, bool(form_.has_zeros), 1}};
    const int32_t* of_row = sums_ + first * spans_ + span.number;
    for (int r = 0; r < count; r++, of_row += spans_, part += kColumns) {
      const Words sum_of_row = all_words(uint32_t(HasMiddles ? *of_row : *of_row * kMiddle));
      const Floats scale = all(scales_[first + r]);
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++)
        of.update(
            r, v,
            [&](Floats sum) {
              const Words whole = load_words(part + 16 * v);
              if constexpr (HasMiddles)
                return plus_product(sum, whole_of<Bits>(whole, sum_of_row, halves[v].middle), halves[v].scale);
              else
                return plus_product(sum, signed_floats(minus(whole, sum_of_row)), halves[v].scale);
            },
            [&](Floats sum) { return sum * scale; });
    }
  }
  void scale(int64_t first, int count, float* c) const {  // c [count][32]
    for (int r = 0; r < count; r++)
      for (int v = 0; v < 2; v++) {
        float* out = c + r * kColumns + 16 * v;
        store(out, load(out) * all(scales_[first + r]));
      }
  }

  // Rounds a row to `out` [k].
  void round(int64_t row, int8_t* out) const {
    put_codes(o_.x + row * o_.x_step, (int8*)out, scales_ + row, k_);
    int64_t span = row * spans_;
    for (int64_t g = 0; g < k_; g += form_.group)
      for (int64_t s = 0; s < form_.group; s += kMostK) {
        int32_t sum = 0;
        for (int64_t i = s; i < std::min(s + kMostK, form_.group); i++) sum += out[g + i];
        sums_[span++] = form_.bits == 4 ? std::bit_cast<int32_t>(float(sum)) : sum;
      }
  }

 private:
  Operands<T> o_;
  Form form_;
  int64_t k_, spans_;
  float* codes_;
  int32_t* sums_;
  float* scales_;
};

// Asks for the lines of y [rows][32] before they are written: in a matrix as wide as a projection each row is a page of its own.
template <typename T>
void fetch_output(const T* y, int64_t y_step, int rows) {
  for (int r = 0; r < rows; r++)
    for (int64_t at = 0; at < kColumns; at += 64 / sizeof(T)) __builtin_prefetch(y + r * y_step + at, 1);
}

// Products of rows in codes by vectors, a few panels at a time: rows meet up to kMostK of each while both are in the cache.
template <typename T>
class RoundedProduct {
 public:
  RoundedProduct(
      const Operands<T>& o, const std::byte* weight, int64_t panel_stride, const Form& form, const T* bias, float* scratch,
      int64_t k, int64_t n, int64_t task_work)
      : o_(o), weight_(weight), panel_stride_(panel_stride), form_(form), bias_(bias), k_(k), tiles_(o.m, kTile),
        rows_(o, form, k, scratch, words(k)), panels_(n / kColumns), chunks_(tasks_of(o.m, kChunkRows)),
        grain_(tiles_.count == 1 ? std::max<int64_t>(1, task_work / (kColumns * k * (o.m + 8))) : kTaskPanels),
        block_(form.group >= kMostK ? kMostK : kMostK / form.group * form.group) {}

  int64_t lay_tasks() const { return tiles_.count; }
  void lay(int64_t tile) const {
    thread_local Workspace workspace;
    const int rows = tiles_.size(tile);
    int8_t* codes = (int8_t*)workspace.floats(rows * k_ / 4);
    for (int r = 0; r < rows; r++) rows_.round(tiles_.first(tile) + r, codes + r * k_);
    float* out = rows_.codes() + tiles_.first(tile) * words(k_);
    for (int64_t w = 0; w < k_ / kQuad; w += 16) {
      const int64_t count = std::min<int64_t>(16, k_ / kQuad - w);
      Words v[16];
      for (int r = 0; r < 16; r++) v[r] = no_words();
      for (int r = 0; r < rows; r++) v[r] = load_words(codes + r * k_ + w * kQuad, count);
      transpose16(v);
      for (int64_t i = 0; i < count; i++)
        for (int word = 0; word < kQuadWords; word++)
          store_words(out + ((w + i) * kQuadWords + word) * rows, laid_quad(v[i], word), rows);
    }
  }

  int64_t tasks() const { return chunks_ * tasks_of(panels_, grain_); }
  void run(int64_t task) const {
    const int64_t of_chunk = tasks_of(panels_, grain_), chunk = task / of_chunk;
    const int64_t low = chunk * tiles_.count / chunks_, high = (chunk + 1) * tiles_.count / chunks_;
    if (low == high) return;
    run_range(task % of_chunk, panels_, grain_, [&](int64_t first, int64_t last) {
      const int64_t together = high - low == 1 ? 1 : last - first;
      for (; first < last; first += together) multiply(low, high, first, together);
    });
  }

 private:
  static constexpr int64_t kChunkRows = 512;  // whose sums are kept while blocks are multiplied
  // Rows of a tile: sums of all leave registers for two of codes that are multiplied where they lie.
  static constexpr int64_t kTile = kQuadWords == 1 ? kRows : kDirectTile;

  static int64_t words(int64_t k) { return k / kQuad * kQuadWords; }
  const float* rows_at(int64_t tile, int64_t k) const {
    return rows_.codes() + tiles_.first(tile) * words(k_) + words(k) * tiles_.size(tile);
  }
  int64_t depth(int64_t k) const {  // of the block that begins there
    return form_.group > block_ ? std::min(block_, form_.group - k % form_.group) : std::min(block_, k_ - k);
  }
  int64_t place(int64_t k) const {  // of a block's first byte in its panel
    return k / form_.group * form_.group_bytes() + (k % form_.group ? form_.head_bytes() + form_.codes_bytes(k % form_.group) : 0);
  }

  // Tiles [low, high) times panels [panel, panel + count), block by block of k.
  void multiply(int64_t low, int64_t high, int64_t panel, int64_t count) const {
    thread_local Workspace workspace;
    const int64_t top = tiles_.first(low), rows = tiles_.first(high) - top;
    float* c = workspace.floats(count * rows * kColumns);
    int64_t number = 0;
    for (int64_t k = 0; k < k_;) {
      const int64_t end = k + depth(k);
      for (int64_t tile = low; tile < high; tile++)
        for (int64_t p = 0; p < count; p++) {
          float* sums = c + (p * rows + tiles_.first(tile) - top) * kColumns;
          if (k == 0) std::fill(sums, sums + tiles_.size(tile) * kColumns, 0.0f);
          if (end == k_) fetch_output(output(tiles_.first(tile), panel + p), o_.y_step, tiles_.size(tile));
          const Later later = later_of(low, high, tile, panel, p, count, k, end);
          with_rows(tiles_.size(tile), [&](auto r) {
            form_.bits == 8 ? add<r.value, 8>(tile, panel + p, k, end, number, tile == low, later, sums)
                            : add<r.value, 4>(tile, panel + p, k, end, number, tile == low, later, sums);
          });
          if (end == k_) put(tile, panel + p, sums);
        }
      number += (end - k + form_.group - 1) / form_.group;
      k = end;
    }
  }
  // c += the products of a block, k [k, end); its first span's number among all.
  template <int R, int Bits>
  void add(
      int64_t tile, int64_t panel, int64_t k, int64_t end, int64_t number, bool is_first, Later later, float* c) const {
    alignas(64) int32_t part[R * kColumns];
    const std::byte* base = weight_ + panel * panel_stride_;
    const float* row = rows_at(tile, k);
    for (; k < end; number++) {
      const int64_t group = k / form_.group, depth = std::min(end, (group + 1) * form_.group) - k;
      const std::byte* head = base + group * form_.group_bytes();
      const Span span{number, k, depth, head};
      const SpanCodes<Bits> codes{head + form_.head_bytes() + form_.codes_bytes(k % form_.group)};
      is_first ? multiply_span<R, Bits, true>(row, codes, depth, later, part)
               : multiply_span<R, Bits, false>(row, codes, depth, later, part);
      rows_.template add_scaled<Bits>(part, tiles_.first(tile), R, span, c);
      row += words(depth) * R;
      later.move(depth / kQuad);
      k += depth;
    }
  }
  template <int R, int Bits, bool Streams>
  __attribute__((noinline)) static void multiply_span(
      const float* row, SpanCodes<Bits> codes, int64_t depth, Later later, int32_t* part) {
    if constexpr (kVectors == 32 || R <= 2) {
      rounded_pass<R, 0, 2, Bits, Streams>(row, codes, depth, later, part);
    } else {
      rounded_pass<R, 0, 1, Bits, Streams>(row, codes, depth, later, part);
      rounded_pass<R, 1, 1, Bits, Streams>(row, codes, depth, later, part);
    }
  }

  // Of the next tile's rows the part for this panel of `count`; and of the codes that are multiplied next, those of the
  // next block or of the panels that come after the other threads' ones, the part for this tile.
  Later later_of(
      int64_t low, int64_t high, int64_t tile, int64_t panel, int64_t p, int64_t count, int64_t k, int64_t end) const {
    const int64_t steps = (end - k) / kQuad, after = end < k_ ? end : 0, next_panel = panel + p + (after ? 0 : count * num_threads());
    const bool is_last = tile + 1 == high;
    const int64_t next = is_last ? low : tile + 1;
    const int64_t row_bytes = 4 * kQuadWords * tiles_.size(next), step = (row_bytes + count - 1) / count;
    const std::byte* rows = (const std::byte*)rows_at(next, is_last ? after : k) + p * step * steps;
    if (next_panel >= panels_) return {rows, rows, step, step};
    const int64_t bytes = place(after + depth(after)) - place(after), share = bytes / (high - low) + 1;
    const std::byte* codes = weight_ + next_panel * panel_stride_ + place(after) + (tile - low) * share;
    return {rows, codes, step, share / steps + 1};
  }

  T* output(int64_t row, int64_t panel) const { return o_.y + row * o_.y_step + panel * kColumns; }
  void put(int64_t tile, int64_t panel, float* sums) const {
    const int64_t row = tiles_.first(tile);
    rows_.scale(row, tiles_.size(tile), sums);
    finish(sums, tiles_.size(tile), bias_ ? bias_ + panel * kColumns : nullptr, output(row, panel), o_.y_step);
  }

  Operands<T> o_;
  const std::byte* weight_;
  int64_t panel_stride_;
  Form form_;
  const T* bias_;
  int64_t k_;
  Tiles tiles_;
  RoundedRows<T> rows_;
  int64_t panels_, chunks_, grain_, block_;
};
