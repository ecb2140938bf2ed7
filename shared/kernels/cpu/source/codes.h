// Weights in codes of 8 or 4 bits with a scale an output and group of k: read from memory as they are, and opened in
// registers. A code is opened to a bf16 number or to fp32, both without loss: products are those of the codes, and their
// sums are scaled. All kernels take the sums of a row in one order, whatever rows are computed beside it.
//
// A panel: for each group of k 32 scales in fp32, with zeros 32 bf16 numbers that each code is moved by, then the codes:
// of 4 k, 128 bytes in the order of a plain panel's lower bytes, or 64 bytes with the first half's codes in lower nibbles.
#pragma once

#include <bit>
#include <type_traits>

#include "direct.h"

// What a packed weight is made of, as one number: bits + 16 has_zeros + 32 rounds_rows + 256 group; 0: of panels.h.
// rounds_rows: rows are rounded to codes too, and multiplied as rounded.h says.
struct Form {
  int64_t bits, has_zeros, rounds_rows, group;

  explicit Form(int64_t form) : bits(form & 15), has_zeros(form >> 4 & 1), rounds_rows(form >> 5 & 1), group(form >> 8) {}
  int64_t head_bytes() const { return 4 * kColumns + (has_zeros ? 2 * kColumns : 0); }
  int64_t codes_bytes(int64_t k) const { return k * kColumns * bits / 8; }
  int64_t spans(int64_t most = kSpan) const { return (group + most - 1) / most; }  // of a group

  static constexpr int64_t kSpan = 512;  // k whose products are added up before they are scaled
  static constexpr int64_t kLongSpan = 2048;  // likewise, of sums that cost more to be taken over
};

struct Span {  // k [k, k + depth), of one group
  int64_t number, k, depth;
  const std::byte* head;  // of a panel's group
};

struct Opened {  // two k of 16 outputs
  Floats even, odd;
};
inline Floats even_of(const Opened& x) { return x.even; }
inline Floats odd_of(const Opened& x) { return x.odd; }

// Codes from -128 to 127, opened to 2^24 times themselves: the upper byte of an integer.
struct Codes8 {
  static constexpr float kUnit = 0x1p-24f;  // what an opened code of 1 stands for
  struct Two {
    Opened low, high;
  };
  struct Group {
    const std::byte* codes;
    [[gnu::always_inline]] void prefetch(int64_t ahead = kAhead) const {
      for (int line = 0; line < 2; line++) __builtin_prefetch((const char*)codes + ahead + 64 * line);
    }
    Two half(int i) const {
      const Words bytes = load_words(codes + 64 * i);
      return {opened(lower_zipped(no_words(), bytes)), opened(upper_zipped(no_words(), bytes))};
    }
    static Opened opened(Words pairs) {  // 256 times the codes, in 16 bits each
      return {signed_floats(shift_left<16>(pairs)), signed_floats(both(pairs, all_words(0xffff0000)))};
    }
  };
  explicit Codes8(const std::byte* codes) : codes(codes) {}
  const std::byte* codes;
  Group group(int64_t k) const { return {codes + k * kColumns}; }
};

#ifdef TANDEM_BYTE_TABLES
// The same codes, opened to pairs of bf16 by tables of their upper and lower bytes.
struct Codes8Pairs {
  static constexpr float kUnit = 1;
  struct Group {
    const std::byte* codes;
    const ByteTable &upper, &lower;
    [[gnu::always_inline]] void prefetch(int64_t ahead = kAhead) const { Codes8::Group{codes}.prefetch(ahead); }
    Pairs half(int i) const {
      const Words bytes = load_words(codes + 64 * i);
      const Words uppers = looked_up(upper, bytes), lowers = looked_up(lower, bytes);
      return {lower_zipped(lowers, uppers), upper_zipped(lowers, uppers)};
    }
  };
  explicit Codes8Pairs(const std::byte* codes) : codes(codes), upper(table<1>()), lower(table<0>()) {}
  const std::byte* codes;
  ByteTable upper, lower;
  Group group(int64_t k) const { return {codes + k * kColumns, upper, lower}; }

 private:
  template <int Byte>
  static ByteTable table() {  // of each code's bf16 number
    struct Bytes {
      alignas(64) uint8_t of[256];
      constexpr Bytes() : of() {
        for (int i = 0; i < 256; i++) of[i] = uint8_t(std::bit_cast<uint32_t>(float(int8_t(i))) >> (16 + 8 * Byte));
      }
    };
    static constexpr Bytes bytes;
    return ByteTable(bytes.of);
  }
};
#endif

// How rows that are laid out for T meet codes of 8 bits.
template <typename T>
#ifdef TANDEM_BYTE_TABLES
using Codes8Of = std::conditional_t<Laid<T>::per_word == 2, Codes8Pairs, Codes8>;
#else
using Codes8Of = Codes8;
#endif

// Codes from 0 to 15, less 8.
struct Codes4 {
  static constexpr float kUnit = 1;
  struct Group {
    const std::byte* codes;
    Words upper, lower;
    [[gnu::always_inline]] void prefetch(int64_t ahead = kAhead) const { __builtin_prefetch((const char*)codes + ahead); }
    Pairs half(int i) const {
      Words places = load_words(codes);
      if (i) places = shift_halves_right<4>(places);
      places = both(places, all_bytes(15));
      const Words uppers = looked_up(upper, places), lowers = looked_up(lower, places);
      return {lower_zipped(lowers, uppers), upper_zipped(lowers, uppers)};
    }
  };
  explicit Codes4(const std::byte* codes) : codes(codes) {
    // bf16 of -8 … 7.
    alignas(16) static constexpr uint8_t uppers[16] = {0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf,
                                                       0,    0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40};
    alignas(16) static constexpr uint8_t lowers[16] = {0x00, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0x00, 0x80,
                                                       0,    0x80, 0x00, 0x40, 0x80, 0xa0, 0xc0, 0xe0};
    upper = repeated(uppers), lower = repeated(lowers);
  }
  const std::byte* codes;
  Words upper, lower;
  Group group(int64_t k) const { return {codes + k * kColumns / 2, upper, lower}; }
};

inline Words pair_of(const Opened& x) {  // exact: codes have fewer bits than bf16
  return either(shift_right<16>(as_words(x.even)), both(as_words(x.odd), all_words(0xffff0000)));
}

// Products of R rows, laid out for T, and a span's codes.
template <typename T, int R, typename Codes>
void coded_tile(const float* a, const Codes& codes, int64_t k, const Ahead& ahead, float* c) {
#ifdef TANDEM_PAIRS
  if constexpr (Laid<T>::per_word == 2) return pair_tile<R>(a, codes, k, ahead, c);
#endif
  float_tile<R, false>(a, codes, k, ahead, c);
}

// A span's codes, opened once for many tiles of rows: what coded_tile would open, to be multiplied in the same order.
template <typename T>
struct OpenedSpan {
  float* memory;  // kSpan * 32

  template <typename Codes>
  void fill(const Codes& codes, int64_t k) {
    for (int64_t j = 0; j < k; j += kGroupK) {
      const auto group = codes.group(j);
      group.prefetch();
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        const auto pairs = group.half(i);
#ifdef TANDEM_PAIRS
        if constexpr (Laid<T>::per_word == 2) {
          bf16* out = (bf16*)memory + j * kColumns + 64 * i;
          store_words(out, pair_of(pairs.low));
          store_words(out + 32, pair_of(pairs.high));
          continue;
        }
#endif
        float* out = memory + kColumns * (j + 2 * i);
        store(out, even_of(pairs.low));
        store(out + 16, even_of(pairs.high));
        store(out + 32, odd_of(pairs.low));
        store(out + 48, odd_of(pairs.high));
      }
    }
  }
  template <int R>
  void multiply(const float* a, int64_t k, float* c) const {
#ifdef TANDEM_PAIRS
    if constexpr (Laid<T>::per_word == 2) return pair_tile<R>(a, PlainPanel{(const bf16*)memory}, k, Ahead{0, 0, 0}, c);
#endif
    multiply_tile<R>(a, R, memory, k, c, false);
  }
};

// sums[span] of a row of x, in one order.
template <typename T>
void sum_spans(const T* x, int64_t k_size, const Form& form, float* sums, int64_t step, int64_t most = Form::kSpan) {
  for (int64_t g = 0; g < k_size; g += form.group)
    for (int64_t s = 0; s < form.group; s += most, sums += step) {
      Floats sum = zeros();
      for (int64_t i = s; i < std::min(s + most, form.group); i += 16) sum = sum + load16(x + g + i);
      *sums = sum_of(sum);
    }
}

// c[rows][32] += scales times part, which counts in `unit`, and offsets, scaled, times sums(row) where there are offsets.
template <typename Sums>
void add_scaled(
    const float* part, float unit, const std::byte* head, const Form& form, int rows, const Sums& sums, float* c) {
#pragma GCC unroll 2
  for (int v = 0; v < 2; v++) {
    const Floats scale = load((const float*)head + 16 * v), of_part = scale * all(unit);
    Floats offset = zeros();
    if (form.has_zeros) offset = scale * load16((const bf16*)(head + 4 * kColumns) + 16 * v);
    for (int r = 0; r < rows; r++) {
      float* out = c + r * kColumns + 16 * v;
      Floats sum = plus_product(load(out), load(part + r * kColumns + 16 * v), of_part);
      if (form.has_zeros) sum = plus_product(sum, all(sums(r)), offset);
      store(out, sum);
    }
  }
}

constexpr int64_t kOpenedTiles = 3;  // from so many tiles of rows on, codes are opened once for all

// Tiles [low, high) times panels [first, last), which lie one behind the other.
template <typename T, typename Codes>
void coded_panels(const Product<T>& job, int64_t low, int64_t high, int64_t first, int64_t last) {
  thread_local Workspace workspace;
  const Tiles& tiles = job.tiles;
  const Form form(job.form);
  const int64_t top = tiles.first(low), rows = tiles.first(high) - top, spans = job.num_spans();
  const bool is_opened = high - low >= kOpenedTiles;
  float* c = workspace.floats(kColumns * (rows + (is_opened ? Form::kSpan : 0)));
  OpenedSpan<T> opened{c + kColumns * rows};
  alignas(64) float part[kRows * kColumns];
  for (int64_t p = first; p < last; p++) {
    const std::byte* at = (const std::byte*)job.weight + p * job.panel_stride;
    std::fill(c, c + kColumns * rows, 0.0f);
    int64_t span = 0;
    for (int64_t g = 0; g < job.k_size; g += form.group) {
      const std::byte* head = at;
      at += form.head_bytes();
      for (int64_t s = 0; s < form.group; s += Form::kSpan, span++) {
        const int64_t depth = std::min(Form::kSpan, form.group - s);
        const Codes codes{at};
        if (is_opened) opened.fill(codes, depth);
        for (int64_t t = low; t < high; t++)
          with_rows(tiles.size(t), [&](auto r) {
            const float* a = job.rows + tiles.first(t) * job.words() + (g + s) / Laid<T>::per_word * r.value;
            if (is_opened)
              opened.template multiply<r.value>(a, depth, part);
            else
              coded_tile<T, r.value>(a, codes, depth, t == low ? Ahead{kAhead, 1, 1} : Ahead{0, 0, 0}, part);
            const float* sums = job.sums + tiles.first(t) * spans + span * r.value;
            add_scaled(
                part, Codes::kUnit, head, form, r.value, [&](int row) { return sums[row]; },
                c + (tiles.first(t) - top) * kColumns);
          });
        at += form.codes_bytes(depth);
      }
    }
    for (int64_t t = low; t < high; t++)
      job.put(c + (tiles.first(t) - top) * kColumns, tiles.first(t), tiles.size(t), p);
  }
}
