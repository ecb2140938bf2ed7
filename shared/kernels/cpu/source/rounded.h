// Weights in codes times rows that are rounded to codes too: int8, a scale a row of x, from that row alone. Products and
// sums over a span of k are of whole numbers and exact, so that every processor has the same ones, whatever the number
// of rows; a span's sum is rounded to fp32, scaled, and added in the order of the spans.
//
// A panel: as in codes.h, but with zeros 32 bytes and 32 unused ones, and then unsigned codes: of 4 k, 16 outputs with 4 k
// each in 64 bytes, then outputs 16 to 31, or of 4 bits both in 64 bytes, the first 16 outputs in lower nibbles.
#pragma once

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

// c[R][32] = R rows' codes times a span's, for outputs [16 First, 16 (First + V)).
template <int R, int First, int V, int Bits>
__attribute__((always_inline)) inline void rounded_pass(
    const float* row, const SpanCodes<Bits>& codes, int64_t depth, bool prefetches, int32_t* c) {
  Words sums[R][V];
#pragma GCC unroll 14
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) sums[r][v] = no_words();
  for (int64_t k = 0; k < depth; k += kQuad, row += R * kQuadWords) {
    if (First == 0 && prefetches) codes.prefetch(k);
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
    for (int v = 0; v < V; v++) store_words(c + r * kColumns + 16 * (First + v), sums[r][v]);
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
    for (int v = 0; v < 2; v++) {
      const Floats scale = load((const float*)span.head + 16 * v);
      const Words middle =
          form_.has_zeros ? unsigned_bytes(span.head + 4 * kColumns + 16 * v) : all_words(form_.bits == 8 ? 128 : 8);
      for (int r = 0; r < count; r++) {
        float* out = c + r * kColumns + 16 * v;
        const Words moved = times(all_words(uint32_t(sums_[(first + r) * spans_ + span.number])), middle);
        const Words whole = minus(load_words(part + r * kColumns + 16 * v), moved);
        store(out, plus_product(load(out), signed_floats(whole), scale));
      }
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
        sums_[span++] = sum;
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

// What products by vectors are made of: see CodedProduct.
template <typename T>
class RoundedVectors {
 public:
  static constexpr int64_t kOpenBytes = 0;  // of a k and panel: codes are multiplied where they lie

  RoundedVectors(const Operands<T>& o, const Form& form, int64_t k, float* scratch)
      : form_(form), k_(k), tiles_(o.m, kDirectTile), rows_(o, form, k, scratch, words(k)) {}

  static int64_t words(int64_t k) { return k / kQuad * kQuadWords; }
  int64_t row_bytes() const { return words(k_) * 4; }
  int64_t most_k() const { return kMostK; }
  int64_t units() const { return tiles_.count; }
  int64_t first(int64_t unit) const { return tiles_.first(unit); }
  int size(int64_t unit) const { return tiles_.size(unit); }

  void lay(int64_t unit) const {
    thread_local Workspace workspace;
    const int rows = size(unit);
    int8_t* codes = (int8_t*)workspace.floats(rows * k_ / 4);
    for (int r = 0; r < rows; r++) rows_.round(first(unit) + r, codes + r * k_);
    float* out = rows_.codes() + first(unit) * words(k_);
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

  struct State {};
  const std::byte* open(const std::byte* codes, int64_t, std::byte*) const { return codes; }

  void add_product(State&, int64_t unit, const Span& span, const std::byte* codes, bool, bool is_first, float* c) const {
    alignas(64) int32_t part[kRows * kColumns];
    with_rows(size(unit), [&](auto r) {
      const float* a = rows_.codes() + first(unit) * words(k_) + words(span.k) * r.value;
      if (form_.bits == 8)
        multiply<r.value>(a, SpanCodes<8>{codes}, span.depth, is_first, part);
      else
        multiply<r.value>(a, SpanCodes<4>{codes}, span.depth, is_first, part);
    });
    rows_.add_scaled(part, first(unit), size(unit), span, c);
  }

  void finish_unit(int64_t unit, float* c) const { rows_.scale(first(unit), size(unit), c); }

 private:
  template <int R, int Bits>
  static void multiply(const float* a, const SpanCodes<Bits>& codes, int64_t depth, bool prefetches, int32_t* part) {
    if constexpr (kVectors == 32 || R <= 2) {
      rounded_pass<R, 0, 2>(a, codes, depth, prefetches, part);
    } else {
      rounded_pass<R, 0, 1>(a, codes, depth, prefetches, part);
      rounded_pass<R, 1, 1>(a, codes, depth, prefetches, part);
    }
  }

  Form form_;
  int64_t k_;
  Tiles tiles_;
  RoundedRows<T> rows_;
};
