// Weights in codes of 8 or 4 bits with a scale an output and group of k: read from memory as they are, and opened in
// registers. A code is opened to a bf16 number or to fp32, both without loss: products are those of the codes, and their
// sums are scaled; but for ScaledPieces (tiled.h). Kernels take the sums of a row in one order, whatever rows are computed
// beside it; under AMX, unless they are deterministic, those for up to 5, up to 32 and more rows have an order each,
// with groups of 16 those for up to 5 and more.
//
// A panel: for each group of k 32 scales in fp32, with zeros 32 bf16 numbers that each code is moved by, or with lows 32
// fp32 numbers that each scaled code is, then the codes:
// of 4 k, 128 bytes in the order of a plain panel's lower bytes, or 64 bytes with the first half's codes in lower nibbles.
#pragma once

#include <bit>
#include <type_traits>

#include "direct.h"

struct Span {  // k [k, k + depth), of one group
  int64_t number, k, depth;
  const std::byte* head;  // of a panel's group
};
struct CodedSpan : Span {
  const std::byte* codes;
};

// What a packed weight is made of, as one number: bits + 16 has_zeros + 32 rounds_rows + 64 has_lows + 256 group, where
// one with lows has zeros; 0: of panels.h.
// rounds_rows: rows are rounded to codes too, and multiplied as rounded.h says.
struct Form {
  int64_t bits, has_zeros, rounds_rows, has_lows, group;

  explicit Form(int64_t form)
      : bits(form & 15), has_zeros(form >> 4 & 1), rounds_rows(form >> 5 & 1), has_lows(form >> 6 & 1), group(form >> 8) {}
  int64_t head_bytes() const { return 4 * kColumns + (has_lows ? 4 : has_zeros ? 2 : 0) * kColumns; }
  // What the scaled codes of 16 outputs of a group are moved by, where there are zeros.
  Floats offset(const std::byte* head, int v, Floats scale) const {
    const std::byte* at = head + 4 * kColumns;
    return has_lows ? load((const float*)at + 16 * v) : scale * load16((const bf16*)at + 16 * v);
  }
  int64_t codes_bytes(int64_t k) const { return k * kColumns * bits / 8; }
  int64_t spans(int64_t most = kSpan) const { return (group + most - 1) / most; }  // of a group

  int64_t group_bytes() const { return head_bytes() + codes_bytes(group); }
  // The `number`-th span of a panel.
  CodedSpan span(int64_t number, const std::byte* panel) const {
    const int64_t g = number / spans(), within = number % spans() * kSpan;
    const std::byte* head = panel + g * group_bytes();
    return {{number, g * group + within, std::min(kSpan, group - within), head}, head + head_bytes() + codes_bytes(within)};
  }

  static constexpr int64_t kSpan = 512;  // k whose products are added up before they are scaled
  static constexpr int64_t kLongSpan = 2048;  // likewise, of sums that cost more to be taken over
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
    Table upper, lower;
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

#ifdef TANDEM_NUMBER_TABLES
// parts[R][32] of a span: products of R rows and codes of 4 bits, each opened by one look-up for 16 of them, without what
// would put their outputs in order: sums are put in order. A word of a group has two outputs side by side, k, k + 2, k + 1
// and k + 3 of each in its nibbles. IsSplit: whether even and odd k are summed apart.
template <int R, bool IsSplit>
__attribute__((always_inline)) inline void look_up(const float* a, const std::byte* codes, int64_t k, Floats (&parts)[R][2]) {
  alignas(64) static constexpr float numbers[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  const Floats table = load(numbers);
  Floats sums[1 + IsSplit][R][2];  // of even and of odd outputs
#pragma GCC unroll 2
  for (int p = 0; p < 1 + IsSplit; p++)
#pragma GCC unroll 5
    for (int r = 0; r < R; r++) sums[p][r][0] = sums[p][r][1] = zeros();
  for (int64_t j = 0; j < k; j += kGroupK, codes += kGroupK * kColumns / 2, a += kGroupK * R) {
    __builtin_prefetch((const char*)codes + kAhead);
    const Words words = load_words(codes);
    auto add = [&]<int K>(std::integral_constant<int, K>) __attribute__((always_inline)) {
      constexpr int kShift = K / 2 * 4 + K % 2 * 8, p = IsSplit ? K % 2 : 0;
      const Floats even = looked_up(table, shift_right<kShift>(words)), odd = looked_up(table, shift_right<kShift + 16>(words));
#pragma GCC unroll 5
      for (int r = 0; r < R; r++) {
        const Floats x = all(a[K * R + r]);
        sums[p][r][0] = plus_product(sums[p][r][0], x, even);
        sums[p][r][1] = plus_product(sums[p][r][1], x, odd);
      }
    };
    add(std::integral_constant<int, 0>());
    add(std::integral_constant<int, 1>());
    add(std::integral_constant<int, 2>());
    add(std::integral_constant<int, 3>());
  }
#pragma GCC unroll 5
  for (int r = 0; r < R; r++) {
    Floats even = sums[0][r][0], odd = sums[0][r][1];
    if constexpr (IsSplit) even = even + sums[1][r][0], odd = odd + sums[1][r][1];
    parts[r][0] = lower_zipped(even, odd);
    parts[r][1] = upper_zipped(even, odd);
  }
}

constexpr int kLookedUpRows = 5;  // the most whose sums over all spans stay in registers

// c[R][32]: what coded_tile and add_scaled compute, of all spans of a panel. Under AMX these rows have an order of their
// own anyway, so that bf16 may be split: one sum after the other would wait for itself.
template <typename T, int R>
__attribute__((noinline)) void looked_up_panel(
    const float* a, const std::byte* panel, int64_t spans, const Form& form, const float* sums, float* c) {
#ifdef TANDEM_AMX
  constexpr bool kIsSplit = sizeof(T) == 2 && !kDeterministic;
#else
  constexpr bool kIsSplit = false;
#endif
  Floats wholes[R][2];
#pragma GCC unroll 5
  for (int r = 0; r < R; r++) wholes[r][0] = wholes[r][1] = zeros();
  for (int64_t n = 0; n < spans; n++, sums += R) {
    const CodedSpan span = form.span(n, panel);
    Floats parts[R][2];
    look_up<R, kIsSplit>(a + span.k * R, span.codes, span.depth, parts);
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const Floats scale = load((const float*)span.head + 16 * v);
#pragma GCC unroll 5
      for (int r = 0; r < R; r++) wholes[r][v] = plus_product(wholes[r][v], parts[r][v], scale);
      if (!form.has_zeros) continue;
      const Floats offset = form.offset(span.head, v, scale);
#pragma GCC unroll 5
      for (int r = 0; r < R; r++) wholes[r][v] = plus_product(wholes[r][v], all(sums[r]), offset);
    }
  }
  store_sums(wholes, c);
}
#endif

// Products of R rows, laid out for T, and a span's codes.
template <typename T, int R, typename Codes>
void coded_tile(const float* a, const Codes& codes, int64_t k, const Ahead& ahead, float* c) {
#ifdef TANDEM_PAIRS
  if constexpr (Laid<T>::per_word == 2) return pair_tile<R>(a, codes, k, ahead, c);
#endif
  float_tile<R, false>(a, codes, k, ahead, c);
}

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

// The sums of some rows [rows][32] over the spans so far, in c; those over all spans go to y.
template <typename T>
struct SpanSums {
  float* c;
  bool begins;  // nothing is in c yet
  T* y;         // null before the last span
  int64_t y_step;
  const T* bias;  // or null

  // f(part) with one of four kinds of parts, to which `update` belongs.
  template <typename F>
  void with_part(F&& f) const {
    if (y) begins ? f(Part<true, true>{*this}) : f(Part<false, true>{*this});
    else begins ? f(Part<true, false>{*this}) : f(Part<false, false>{*this});
  }

  template <bool Begins, bool Ends>
  struct Part {
    const SpanSums& of;

    // Half v of row r: `added(sum)`, and at the end `scaled` of that.
    template <typename Added, typename Scaled>
    [[gnu::always_inline]] void update(int r, int v, Added&& added, Scaled&& scaled) const {
      float* at = of.c + r * kColumns + 16 * v;
      const Floats sum = added(Begins ? zeros() : load(at));
      if constexpr (!Ends) return store(at, sum);
      const Floats whole = scaled(sum);
      store16(of.y + r * of.y_step + 16 * v, of.bias ? whole + load16(of.bias + 16 * v) : whole);
    }
  };
};

// c[rows][32] += scales times part, which counts in `unit`, and offsets, scaled, times sums(row) where there are offsets.
template <typename Sums>
void add_scaled(
    const float* part, float unit, const std::byte* head, const Form& form, int rows, const Sums& sums, float* c) {
#pragma GCC unroll 2
  for (int v = 0; v < 2; v++) {
    const Floats scale = load((const float*)head + 16 * v), of_part = scale * all(unit);
    Floats offset = zeros();
    if (form.has_zeros) offset = form.offset(head, v, scale);
    for (int r = 0; r < rows; r++) {
      float* out = c + r * kColumns + 16 * v;
      Floats sum = plus_product(load(out), load(part + r * kColumns + 16 * v), of_part);
      if (form.has_zeros) sum = plus_product(sum, all(sums(r)), offset);
      store(out, sum);
    }
  }
}

// The same to the sums of spans.
template <typename T, typename Sums>
void add_scaled(
    const float* part, float unit, const std::byte* head, const Form& form, int rows, const Sums& sums,
    const SpanSums<T>& to) {
  to.with_part([&](auto of) {
    for (int v = 0; v < 2; v++) {
      const Floats scale = load((const float*)head + 16 * v), of_part = scale * all(unit);
      Floats offset = zeros();
      if (form.has_zeros) offset = form.offset(head, v, scale);
      for (int r = 0; r < rows; r++)
        of.update(
            r, v,
            [&](Floats sum) {
              sum = plus_product(sum, load(part + r * kColumns + 16 * v), of_part);
              return form.has_zeros ? plus_product(sum, all(sums(r)), offset) : sum;
            },
            [](Floats sum) { return sum; });
    }
  });
}

// Calls f with a span's codes as Codes8 or Codes4.
template <typename T, typename F>
auto with_codes(const Form& form, const std::byte* codes, F&& f) {
  if (form.bits == 8) return f(Codes8Of<T>(codes));
  return f(Codes4(codes));
}

// Panels [first, last), which lie one behind the other, times tiles [low, high), which are few: codes are opened for each.
template <typename T>
void few_coded(const Product<T>& job, int64_t low, int64_t high, int64_t first, int64_t last) {
  thread_local Workspace workspace;
  const Tiles& tiles = job.tiles;
  const Form form(job.form);
  const int64_t top = tiles.first(low), rows = tiles.first(high) - top, spans = job.num_spans();
  float* c = workspace.floats(kColumns * rows);
  alignas(64) float part[kRows * kColumns];
  for (int64_t p = first; p < last; p++) {
    const std::byte* panel = (const std::byte*)job.weight + p * job.panel_stride;
#ifdef TANDEM_NUMBER_TABLES
    if (Laid<T>::per_word == 1 && form.bits == 4 && rows <= kLookedUpRows) {
      with_rows(rows, [&](auto r) {
        if constexpr (r.value <= kLookedUpRows) {
          looked_up_panel<T, r.value>(job.rows + top * job.words(), panel, spans, form, job.sums + top * spans, c);
          job.put(c, top, r.value, p);
        }
      });
      continue;
    }
#endif
    std::fill(c, c + kColumns * rows, 0.0f);
    for (int64_t n = 0; n < spans; n++) {
      const CodedSpan span = form.span(n, panel);
      with_codes<T>(form, span.codes, [&](const auto& codes) {
        for (int64_t t = low; t < high; t++)
          with_rows(tiles.size(t), [&](auto r) {
            const float* a = job.rows + tiles.first(t) * job.words() + span.k / Laid<T>::per_word * r.value;
            coded_tile<T, r.value>(a, codes, span.depth, t == low ? Ahead{kAhead, 1, 1} : Ahead{0, 0, 0}, part);
            const float* sums = job.sums + tiles.first(t) * spans + n * r.value;
            add_scaled(
                part, codes.kUnit, span.head, form, r.value, [&](int row) { return sums[row]; },
                c + (tiles.first(t) - top) * kColumns);
          });
      });
    }
    for (int64_t t = low; t < high; t++)
      job.put(c + (tiles.first(t) - top) * kColumns, tiles.first(t), tiles.size(t), p);
  }
}

// Opens a span's codes to words [k / per_word][32], which lie as rows laid out for T are multiplied.
template <typename T, typename Codes>
void open_codes(const Codes& codes, int64_t k, float* out) {
  for (int64_t j = 0; j < k; j += kGroupK) {
    const auto group = codes.group(j);
    group.prefetch();
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++, out += 2 * kColumns / Laid<T>::per_word) {
      const auto pairs = group.half(i);
      if constexpr (Laid<T>::per_word == 2) {
        store_words(out, pair_of(pairs.low));
        store_words(out + 16, pair_of(pairs.high));
      } else {
        store(out, even_of(pairs.low));
        store(out + 16, even_of(pairs.high));
        store(out + 32, odd_of(pairs.low));
        store(out + 48, odd_of(pairs.high));
      }
    }
  }
}

// c[R][16 V] += a b, the products of a span, scaled while they are in registers: what coded_tile and add_scaled compute, of
// the panel's halves from `half` on. sums [R] of the rows. As much as a takes is fetched from `ahead` on.
template <int R, int V, bool HasZeros, typename Of>
__attribute__((always_inline)) inline void scaled_pass(
    const float* a, const float* b, int64_t k, const Form& form, const std::byte* head, int half, float unit,
    const float* sums, float* c, const float* ahead) {
  Floats parts[R][V];
#pragma GCC unroll 14
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) parts[r][v] = zeros();
  add_products<R, V, Of, true>(parts, a, R, b, k, ahead, R);
#pragma GCC unroll 2
  for (int v = 0; v < V; v++) {
    const Floats scale = load((const float*)head + 16 * (half + v)), of_part = scale * all(unit);
    Floats offset = zeros();
    if constexpr (HasZeros) offset = form.offset(head, half + v, scale);
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) {
      float* out = c + r * kColumns + 16 * v;
      Floats sum = plus_product(load(out), parts[r][v], of_part);
      if constexpr (HasZeros) sum = plus_product(sum, all(sums[r]), offset);
      store(out, sum);
    }
  }
}
template <int R, bool HasZeros, typename Of>
__attribute__((noinline)) void scaled_tile(
    const float* a, const float* b, int64_t k, const Form& form, const std::byte* head, float unit, const float* sums,
    float* c, const float* ahead) {
  if constexpr (kVectors == 32 || R <= 2) {
    scaled_pass<R, 2, HasZeros, Of>(a, b, k, form, head, 0, unit, sums, c, ahead);
  } else {
    scaled_pass<R, 1, HasZeros, Of>(a, b, k, form, head, 0, unit, sums, c, ahead);
    scaled_pass<R, 1, HasZeros, Of>(a, b + 16, k, form, head, 1, unit, sums, c + 16, ahead);
  }
}

// Bytes that are read later, fetched into the second cache a share at a time, as all at once they would hold up other reads.
class Fetched {
 public:
  Fetched(const std::byte* at, int64_t bytes, int64_t shares) : at_(at), end_(at + bytes), share_(bytes / shares / 64 * 64 + 64) {}
  void fetch_share() {
    for (const std::byte* end = std::min(end_, at_ + share_); at_ < end; at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const std::byte *at_, *end_;
  int64_t share_;
};

// k of a panel that are opened at a time: a span, which stays in the first cache, or in front of many tiles of pairs of
// bf16 a whole panel, which mostly fits in the second one; then the sums of a tile stay in the first.
template <typename T>
int64_t opened_k(int64_t tiles) { return Laid<T>::per_word == 2 && tiles >= 12 ? 8192 : Form::kSpan; }

// One panel times tiles [low, high), which are many: each code is opened once, and tiles meet what is opened span by span.
template <typename T, bool HasZeros>
class ManyCoded {
 public:
  ManyCoded(const Product<T>& job, int64_t low, int64_t high)
      : job_(job), form_(job.form), spans_(job.num_spans()), low_(low), high_(high),
        opened_k_(std::min(job.k_size, opened_k<T>(high - low))), unit_(form_.bits == 8 ? Codes8Of<T>::kUnit : Codes4::kUnit) {}

  void multiply(int64_t p, bool is_last) {
    thread_local Workspace workspace;
    const int64_t top = job_.tiles.first(low_), rows = job_.tiles.first(high_) - top;
    float *c = workspace.floats(kColumns * (rows + opened_k_ / Laid<T>::per_word)), *words = c + kColumns * rows;
    std::fill(c, c + kColumns * rows, 0.0f);
    const std::byte* panel = (const std::byte*)job_.weight + p * job_.panel_stride;
    for (int64_t n = 0; n < spans_;) {
      const int64_t end = open(panel, n, words);
      Fetched next = fetched(panel, end, is_last);
      for (int64_t t = low_; t < high_; t++)
        with_rows(job_.tiles.size(t), [&](auto r) {
          next.fetch_share();
          float* sums = c + (job_.tiles.first(t) - top) * kColumns;
          add<r.value>(t, panel, n, end, words, sums);
          if (end == spans_) job_.put(sums, job_.tiles.first(t), r.value, p);
        });
      n = end;
    }
  }

 private:
  // Opens spans from `n` on, and returns the first one that is not open.
  int64_t open(const std::byte* panel, int64_t n, float* words) const {
    const int64_t first = form_.span(n, panel).k;
    for (; n < spans_; n++) {
      const CodedSpan span = form_.span(n, panel);
      if (span.k + span.depth - first > opened_k_) break;
      with_codes<T>(form_, span.codes, [&](const auto& codes) {
        open_codes<T>(codes, span.depth, words + (span.k - first) / Laid<T>::per_word * kColumns);
      });
    }
    return n;
  }
  // What is opened after spans before `end`, of this panel or the next one.
  Fetched fetched(const std::byte* panel, int64_t end, bool is_last) const {
    if (end == spans_ && is_last) return {nullptr, 0, 1};
    const std::byte* at = end == spans_ ? panel + job_.panel_stride : form_.span(end, panel).codes;
    return {at, opened_k_ / form_.group * form_.head_bytes() + form_.codes_bytes(opened_k_), high_ - low_};
  }
  template <int R>
  void add(int64_t t, const std::byte* panel, int64_t n, int64_t end, const float* words, float* c) const {
    const int64_t first = form_.span(n, panel).k;
    auto rows_of = [&](int64_t tile) {
      return job_.rows + job_.tiles.first(tile) * job_.words() + first / Laid<T>::per_word * job_.tiles.size(tile);
    };
    const float *a = rows_of(t), *ahead = rows_of(std::min(t + 1, high_ - 1));
    const float* sums = job_.sums + job_.tiles.first(t) * spans_;
    for (; n < end; n++) {
      const CodedSpan span = form_.span(n, panel);
      const int64_t at = (span.k - first) / Laid<T>::per_word;
      scaled_tile<R, HasZeros, typename Laid<T>::Products>(
          a + at * R, words + at * kColumns, span.depth / Laid<T>::per_word, form_, span.head, unit_, sums + n * R, c,
          ahead + at * R);
    }
  }

  const Product<T>& job_;
  Form form_;
  int64_t spans_, low_, high_, opened_k_;
  float unit_;
};

constexpr int64_t kOpenedTiles = 3;  // from so many tiles of rows on, codes are opened once for all

// Tiles [low, high) times panels [first, last).
template <typename T>
void coded_panels(const Product<T>& job, int64_t low, int64_t high, int64_t first, int64_t last) {
  if (high - low < kOpenedTiles) return few_coded(job, low, high, first, last);
  auto multiply = [&](auto many) {
    for (int64_t p = first; p < last; p++) many.multiply(p, p + 1 == last);
  };
  Form(job.form).has_zeros ? multiply(ManyCoded<T, true>(job, low, high)) : multiply(ManyCoded<T, false>(job, low, high));
}
