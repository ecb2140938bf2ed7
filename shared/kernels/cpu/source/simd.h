// What the CPU kernels share: element types and a vector exponential, over 16 fp32 lanes of the width that the
// processor has: one register of AVX-512, two of AVX2, or four of NEON.
#pragma once

#include <cstdint>
#include <cstring>

// Whether a row's result may depend on that row alone, to the bit: not on how many rows there are, nor on which kernel
// suits their number. Then all kernels of an op take the same products and sums in the same order. Compiled with
// -ffp-contract=off: a product and a sum are one rounding only where plus_product says so.
#ifdef TANDEM_DETERMINISTIC
constexpr bool kDeterministic = true;
#else
constexpr bool kDeterministic = false;
#endif

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

#ifdef __aarch64__
#include "lanes128.h"
#elif defined(__AVX512F__)
#include "lanes512.h"
#else
#include "lanes256.h"
#endif

inline Floats load16(const float* p) { return load(p); }
inline Floats load16(const bf16* p) { return widen16(p); }
inline void store16(float* p, Floats x) { store(p, x); }
#if defined(__AVX512BF16__) && !defined(TANDEM_DETERMINISTIC)
inline void store16(bf16* p, Floats x) { store_bf16(p, x); }
#else
inline void store16(bf16* p, Floats x) { store_halves(p, upper_halves(x)); }
#endif

// A value after being stored as T and loaded again.
inline Floats rounded_as(const float*, Floats x) { return x; }
#if defined(__AVX512BF16__) && !defined(TANDEM_DETERMINISTIC)
inline Floats rounded_as(const bf16*, Floats x) { return as_bf16(x); }
#else
inline Floats rounded_as(const bf16*, Floats x) { return as_floats(shift_left<16>(upper_halves(x))); }
#endif

// Pairs (a, b) of bf16, a in the lower halves. Numbers below the smallest normal one may become 0.
inline Words paired(Floats a, Floats b) {
#ifdef __AVX512BF16__
  static constexpr struct Places {
    uint16_t of[32];
    constexpr Places() : of() {
      for (int i = 0; i < 32; i++) of[i] = uint16_t(i / 2 + i % 2 * 16);
    }
  } places;
  return _mm512_permutexvar_epi16(load_words(places.of), (__m512i)_mm512_cvtne2ps_pbh(b, a));
#else
  return either(upper_halves(a), shift_left<16>(upper_halves(b)));
#endif
}

// The even and the odd elements of 16 pairs of bf16.
inline Floats even_of(Words pairs) { return as_floats(shift_left<16>(pairs)); }
inline Floats odd_of(Words pairs) { return as_floats(both(pairs, all_words(0xffff0000))); }

#ifdef TANDEM_PAIRS
// c + the products of pairs, both of them.
inline Floats plus_pairs(Floats c, Words a, Words b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
#else  // the same without the instruction, for tests
  return plus_product(plus_product(c, odd_of(a), odd_of(b)), even_of(a), even_of(b));
#endif
}
#endif

// exp(x) for x <= 104, to about 2 units in the last place: x = n ln 2 + r, a polynomial of degree 6 for 2^(r / ln 2).
// Coefficients: Taylor's, the range is |r| <= ln 2 / 2. Below -87 it is 0.
inline Floats exp16(Floats x) {
  const Mask there = not_less(x, all(-87.0f));
  Floats n = nearest(x * all(1.44269504f));
  Floats r = minus_product(x, n, all(0.693359375f));
  r = minus_product(r, n, all(-2.12194440e-4f));
  Floats y = all(1.0f / 720);
  y = plus_product(all(1.0f / 120), y, r);
  y = plus_product(all(1.0f / 24), y, r);
  y = plus_product(all(1.0f / 6), y, r);
  y = plus_product(all(0.5f), y, r);
  y = plus_product(all(1.0f), y, r);
  y = plus_product(all(1.0f), y, r);
  return keep(there, times_power(y, n));
}

// To about 1e-7: 1 - 2 / (1 + exp(2x)) by the exponential that is at most 1. NaN stays NaN.
inline Floats tanh16(Floats x) {
  const Floats one = all(1.0f), down = as_floats(either(as_words(x), all_words(0x80000000)));  // -|x|
  const Floats e = exp16(down + down), t = (e - one) / (e + one);                              // tanh(-|x|)
  return choose(not_less(x, zeros()), zeros() - t, t);
}

// 2^x for -126 <= x <= 0, to about 2 units in the last place: x = n + r, Taylor's polynomial of 2^r for |r| <= 1/2.
// NaN stays NaN.
inline Floats exp2_16(Floats x) {
  Floats n = nearest(x), r = x - n;
  Floats y = all(1.54035304e-4f);
  y = plus_product(all(1.33335581e-3f), y, r);
  y = plus_product(all(9.61812911e-3f), y, r);
  y = plus_product(all(5.55041087e-2f), y, r);
  y = plus_product(all(2.40226507e-1f), y, r);
  y = plus_product(all(6.93147181e-1f), y, r);
  y = plus_product(all(1.0f), y, r);
  return times_small_power(y, n);
}
