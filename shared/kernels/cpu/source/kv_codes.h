// Keys and values in codes of 8 bits, each token's of a head with a scale of its own: shared/kernels/pool_view.py.
#pragma once

#include <cmath>

#include "ops.h"
#include "simd.h"

struct int8 {  // -127 … 127
  int8_t bits;
};
struct e4m3 {  // of 8 bits a sign, four of the exponent, three more; the largest is 448, and there is no infinity
  uint8_t bits;
};

template <typename KV>
constexpr bool kIsCode = sizeof(KV) == 1;

// The code in the top 8 bits of each word; what follows it is ignored.
inline Floats opened_top(const int8*, Words x) { return signed_floats(shift_right_signed<24>(x)); }
inline Floats opened_top(const e4m3*, Words x) {
  // Its exponent and the rest moved to their places in fp32 are the number over 2^120, subnormal ones too.
  return as_floats(both(shift_right_signed<4>(x), all_words(0x87f00000))) * all(0x1p120f);
}

inline Floats load16(const int8* p) { return signed_floats(signed_bytes(p)); }
inline Floats load16(const e4m3* p) { return opened_top(p, shift_left<24>(unsigned_bytes(p))); }

constexpr float kMagic = 12582912.0f;  // 1.5 2^23: of a small number added to it the last bits hold the nearest whole one

// Rounded first: the compiler must not take the product that x is, and the sum, as one.
inline void store16(int8* p, Floats x) { store_bytes(p, as_words(nearest(x) + all(kMagic))); }
inline void store16(e4m3* p, Floats x) {
  const Words bits = as_words(x), size = both(bits, all_words(0x7fffffff));
  const Words odd = both(shift_right<20>(bits), all_words(1));
  const Words normal = minus(shift_right<20>(plus(size, plus(odd, all_words(0x7ffff)))), all_words(120 << 3));
  const Words small = as_words(as_floats(size) * all(512.0f) + all(kMagic));  // below 2^-6 steps are of 2^-9
  const Floats code = choose(not_less(as_floats(size), all(0x1p-6f)), as_floats(normal), as_floats(small));
  store_bytes(p, either(both(as_words(code), all_words(127)), both(shift_right<24>(bits), all_words(128))));
}

inline float most_of(const int8*) { return 127.0f; }
inline float most_of(const e4m3*) { return 448.0f; }

// A row's codes, and its scale: as `encode` in pool_view.py.
template <typename T, typename KV>
void put_codes(const T* x, KV* codes, float* scale, int64_t dim) {
  Floats peaks = zeros(), poison = zeros();
  for (int64_t i = 0; i < dim; i += 16) {
    const Floats v = load16(x + i);
    peaks = larger(peaks, larger(v, zeros() - v));
    poison = plus_product(poison, v, zeros());  // NaN where one is, or is infinite
  }
  const float peak = highest_of(peaks), none = sum_of(poison);
  const bool is_usual = none == 0.0f && peak >= 0x1p-100f;
  *scale = none + (is_usual ? peak / most_of(codes) : 0.0f);
  const Floats factor = all(is_usual ? most_of(codes) / peak : 0.0f);
  for (int64_t i = 0; i < dim; i += 16) store16(codes + i, is_usual ? load16(x + i) * factor : zeros());
}

// f(KV*) for what the pool's dtype stores; beside a computation in T.
template <typename T, typename F>
void with_dtype(const PoolView& pool, const F& f) {
  switch (pool.dtype) {
    case kInt8: return f((int8*)nullptr);
    case kFp8: return f((e4m3*)nullptr);
    case kBf16: return f((bf16*)nullptr);
  }
  if constexpr (sizeof(T) == 4) f((float*)nullptr);
}
