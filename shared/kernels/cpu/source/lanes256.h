// 16 lanes in two registers: AVX2 and FMA. The remarks in lanes512.h hold here too.
#pragma once

#include <immintrin.h>

constexpr int kVectors = 8;

struct Floats {
  __m256 low, high;
};
struct Words {
  __m256i low, high;
};
struct Mask {  // all bits of a lane, or none
  __m256 low, high;
};

inline Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
inline Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
inline Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
inline Floats operator/(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }

inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Words all_words(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
inline Words no_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Floats as_floats(Words x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline Words as_words(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }

inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline Words load_words(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline void store_words(void* p, Words x) {
  _mm256_storeu_si256((__m256i*)p, x.low);
  _mm256_storeu_si256((__m256i*)p + 1, x.high);
}
inline __m256i first_words(int64_t count) {  // of 8, the others 0
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Words load_words(const void* p, int64_t count) {
  if (count == 16) return load_words(p);
  const int* word = (const int*)p;
  if (count < 8) return {_mm256_maskload_epi32(word, first_words(count)), _mm256_setzero_si256()};
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_maskload_epi32(word + 8, first_words(count - 8))};
}
inline void store_words(void* p, Words x, int64_t count) {
  if (count == 16) return store_words(p, x);
  int* word = (int*)p;
  if (count < 8) return _mm256_maskstore_epi32(word, first_words(count), x.low);
  _mm256_storeu_si256((__m256i*)p, x.low);
  _mm256_maskstore_epi32(word + 8, first_words(count - 8), x.high);
}

inline Floats plus_product(Floats c, Floats a, Floats b) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats minus_product(Floats c, Floats a, Floats b) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats smaller(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats nearest(Floats x) { return {_mm256_round_ps(x.low, 0), _mm256_round_ps(x.high, 0)}; }
inline __m256 power(__m256 n) {  // 2^n for -126 <= n <= 127
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Floats times_small_power(Floats x, Floats n) { return {x.low * power(n.low), x.high * power(n.high)}; }
inline Floats times_power(Floats x, Floats n) {
  const Floats half = nearest(n * all(0.5f));
  return times_small_power(times_small_power(x, half), n - half);
}
inline float sum_of(Floats x) {
  const __m256 y = x.low + x.high;
  __m128 z = _mm256_castps256_ps128(y) + _mm256_extractf128_ps(y, 1);
  z = z + _mm_movehl_ps(z, z);
  return z[0] + z[1];
}
inline float highest_of(Floats x) {
  const __m256 y = _mm256_max_ps(x.low, x.high);
  __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_max_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}

inline Mask as_mask(__m256i low, __m256i high) { return {_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)}; }
inline Mask first_lanes(int64_t count) { return as_mask(first_words(count), first_words(count - 8)); }
inline Mask not_less(Floats a, Floats b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_NLT_UQ), _mm256_cmp_ps(a.high, b.high, _CMP_NLT_UQ)};
}
inline bool any_differs(Floats a, Floats b) {
  const __m256 low = _mm256_cmp_ps(a.low, b.low, _CMP_NEQ_UQ), high = _mm256_cmp_ps(a.high, b.high, _CMP_NEQ_UQ);
  return _mm256_movemask_ps(_mm256_or_ps(low, high));
}
inline __m256i at_most(__m256i a, __m256i b) {
  return _mm256_xor_si256(_mm256_cmpgt_epi32(a, b), _mm256_set1_epi32(-1));
}
inline Mask at_most(Words a, Words b) { return as_mask(at_most(a.low, b.low), at_most(a.high, b.high)); }
inline Mask both(Mask a, Mask b) { return {_mm256_and_ps(a.low, b.low), _mm256_and_ps(a.high, b.high)}; }
inline Floats keep(Mask mask, Floats x) { return {_mm256_and_ps(mask.low, x.low), _mm256_and_ps(mask.high, x.high)}; }
inline Floats choose(Mask mask, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.low, yes.low, mask.low), _mm256_blendv_ps(no.high, yes.high, mask.high)};
}
inline Floats larger_where(Mask mask, Floats a, Floats b) { return choose(mask, larger(a, b), a); }

inline Words both(Words a, Words b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline Words either(Words a, Words b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
inline Words either_alone(Words a, Words b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
// Bits of a where `mask` has ones, else those of b.
inline Words selected(Words mask, Words a, Words b) { return either_alone(b, both(mask, either_alone(a, b))); }
inline void whole_products(__m256i a, __m256i b, __m256i& low, __m256i& high) {
  const __m256i even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
inline void whole_products(Words a, uint32_t b, Words& low, Words& high) {
  const Words factor = all_words(b);
  whole_products(a.low, factor.low, low.low, high.low);
  whole_products(a.high, factor.high, low.high, high.high);
}
inline Words minus(Words a, Words b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
inline Words plus(Words a, Words b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
template <int N>
inline Words shift_left(Words x) { return {_mm256_slli_epi32(x.low, N), _mm256_slli_epi32(x.high, N)}; }
template <int N>
inline Words shift_right(Words x) { return {_mm256_srli_epi32(x.low, N), _mm256_srli_epi32(x.high, N)}; }
template <int N>
inline Words shift_right_signed(Words x) { return {_mm256_srai_epi32(x.low, N), _mm256_srai_epi32(x.high, N)}; }
inline Floats signed_floats(Words x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
template <int N>
inline Words shift_halves_left(Words x) { return {_mm256_slli_epi16(x.low, N), _mm256_slli_epi16(x.high, N)}; }
template <int N>
inline Words shift_halves_right(Words x) { return {_mm256_srli_epi16(x.low, N), _mm256_srli_epi16(x.high, N)}; }
template <int N>
inline Words shift_halves_right_signed(Words x) { return {_mm256_srai_epi16(x.low, N), _mm256_srai_epi16(x.high, N)}; }
// Not of bytes: vpmaddubsw's sums of two products end at 16 bits.
inline Words products_of_halves(Words a, Words b) {
  return {_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high)};
}

inline Words all_bytes(uint8_t x) { return {_mm256_set1_epi8(char(x)), _mm256_set1_epi8(char(x))}; }
inline Words times(Words a, Words b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
inline Words repeated(const void* p) {
  const __m256i run = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return {run, run};
}
inline Words looked_up(Words table, Words places) {
  return {_mm256_shuffle_epi8(table.low, places.low), _mm256_shuffle_epi8(table.high, places.high)};
}
inline Words lower_zipped(Words a, Words b) {
  return {_mm256_unpacklo_epi8(a.low, b.low), _mm256_unpacklo_epi8(a.high, b.high)};
}
inline Words upper_zipped(Words a, Words b) {
  return {_mm256_unpackhi_epi8(a.low, b.low), _mm256_unpackhi_epi8(a.high, b.high)};
}
inline Words lower_bytes(Words a, Words b) {
  return {_mm256_packus_epi16(a.low, b.low), _mm256_packus_epi16(a.high, b.high)};
}
inline Words where_equal(Words a, Words b, Words then) {
  const Words equal{_mm256_cmpeq_epi8(a.low, b.low), _mm256_cmpeq_epi8(a.high, b.high)};
  return both(equal, then);
}

inline Floats widen16(const void* p) {
  const __m128i* half = (const __m128i*)p;
  const Words x{_mm256_cvtepu16_epi32(_mm_loadu_si128(half)), _mm256_cvtepu16_epi32(_mm_loadu_si128(half + 1))};
  return as_floats(shift_left<16>(x));
}
inline __m256i upper_halves(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
}
inline Words upper_halves(Floats x) { return {upper_halves(x.low), upper_halves(x.high)}; }
// Of words whose upper halves are 0: packing saturates. It leaves the middle quarters exchanged, being of 128 bits.
inline void store_halves(void* p, Words x) {
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), 0xd8));
}

inline Words signed_bytes(const void* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline Words unsigned_bytes(const void* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline void store_bytes(void* p, Words x) {
  x = both(x, all_words(255));
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}

// Rows and columns of 8 x 8 words exchanged; row i of what comes out has the lanes given by `put(i)`.
template <typename Get, typename Put>
inline void transpose8(const Get& get, const Put& put) {
  __m256i t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(get(i), get(i + 1));
    t[i + 1] = _mm256_unpackhi_epi32(get(i), get(i + 1));
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    put(i, _mm256_permute2x128_si256(u[i], u[i + 4], 0x20));
    put(i + 4, _mm256_permute2x128_si256(u[i], u[i + 4], 0x31));
  }
}

// A quarter at a time: more rows than there are registers.
inline Words zip8(__m256i a, __m256i b) {
  const __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
  return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
}
inline void zip(Words a, Words b, Words& low, Words& high) {
  low = zip8(a.low, b.low);
  high = zip8(a.high, b.high);
}
// The same of 16 bits each.
inline Words zip16(__m256i a, __m256i b) {
  const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
  return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
}
inline void zip_halves(Words a, Words b, Words& low, Words& high) {
  low = zip16(a.low, b.low);
  high = zip16(a.high, b.high);
}

inline void transpose16(Words (&v)[16]) {
  Words t[16];
  transpose8([&](int i) { return v[i].low; }, [&](int i, __m256i x) { t[i].low = x; });
  transpose8([&](int i) { return v[i + 8].low; }, [&](int i, __m256i x) { t[i].high = x; });
  transpose8([&](int i) { return v[i].high; }, [&](int i, __m256i x) { t[i + 8].low = x; });
  transpose8([&](int i) { return v[i + 8].high; }, [&](int i, __m256i x) { t[i + 8].high = x; });
  for (int i = 0; i < 16; i++) v[i] = t[i];
}
