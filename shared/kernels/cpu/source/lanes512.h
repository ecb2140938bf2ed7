// 16 lanes in one register: AVX-512 with F, BW, VL and DQ.
#pragma once

#include <immintrin.h>

constexpr int kVectors = 32;  // of 16 lanes, that the registers hold

using Floats = __m512;
using Words = __m512i;  // of 32 bits, unless noted otherwise
using Mask = __mmask16;

inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats zeros() { return _mm512_setzero_ps(); }
inline Words all_words(uint32_t x) { return _mm512_set1_epi32(int(x)); }
inline Words no_words() { return _mm512_setzero_si512(); }
inline Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }
inline Words as_words(Floats x) { return _mm512_castps_si512(x); }

inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Words load_words(const void* p) { return _mm512_loadu_si512(p); }
inline void store_words(void* p, Words x) { _mm512_storeu_si512(p, x); }
// The first `count` of 16 words; memory behind them is left alone, and they are followed by zeros.
inline Words load_words(const void* p, int64_t count) { return _mm512_maskz_loadu_epi32(Mask((1u << count) - 1), p); }
inline void store_words(void* p, Words x, int64_t count) { _mm512_mask_storeu_epi32(p, Mask((1u << count) - 1), x); }

inline Floats plus_product(Floats c, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, c); }    // c + a b
inline Floats minus_product(Floats c, Floats a, Floats b) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
// The second where one is NaN.
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, 0); }
// x 2^n for whole n; the small one for -126 <= n <= 127.
inline Floats times_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
inline Floats times_small_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float highest_of(Floats x) { return _mm512_reduce_max_ps(x); }

inline Mask first_lanes(int64_t count) { return Mask(0xffffu >> (16 - count)); }  // 1 <= count <= 16
inline Mask not_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
inline bool any_differs(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
inline Mask at_most(Words a, Words b) { return _mm512_cmple_epi32_mask(a, b); }
inline Mask both(Mask a, Mask b) { return Mask(a & b); }
inline Floats keep(Mask mask, Floats x) { return _mm512_maskz_mov_ps(mask, x); }  // 0 elsewhere
inline Floats choose(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }
inline Floats larger_where(Mask mask, Floats a, Floats b) { return _mm512_mask_max_ps(a, mask, a, b); }  // else a

inline Words both(Words a, Words b) { return _mm512_and_si512(a, b); }
inline Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
inline Words either_alone(Words a, Words b) { return _mm512_xor_si512(a, b); }
// The lower and the upper 32 bits of each word times b.
inline void whole_products(Words a, uint32_t b, Words& low, Words& high) {
  const Words factor = all_words(b), even = _mm512_mul_epu32(a, factor);
  const Words odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
  low = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
  high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
}
inline Words minus(Words a, Words b) { return _mm512_sub_epi32(a, b); }
inline Words plus(Words a, Words b) { return _mm512_add_epi32(a, b); }
template <int N>
inline Words shift_left(Words x) { return _mm512_slli_epi32(x, N); }
template <int N>
inline Words shift_right(Words x) { return _mm512_srli_epi32(x, N); }
template <int N>
inline Words shift_right_signed(Words x) { return _mm512_srai_epi32(x, N); }
inline Floats signed_floats(Words x) { return _mm512_cvtepi32_ps(x); }
template <int N>
inline Words shift_halves_left(Words x) { return _mm512_slli_epi16(x, N); }  // of 16 bits
template <int N>
inline Words shift_halves_right(Words x) { return _mm512_srli_epi16(x, N); }
template <int N>
inline Words shift_halves_right_signed(Words x) { return _mm512_srai_epi16(x, N); }
inline Words products_of_halves(Words a, Words b) { return _mm512_madd_epi16(a, b); }  // signed, two a word added

// Bits of a where `mask` has ones, else those of b.
inline Words selected(Words mask, Words a, Words b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }

// Of 64 bytes, in runs of 16.
inline Words all_bytes(uint8_t x) { return _mm512_set1_epi8(char(x)); }
inline Words times(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
inline Words repeated(const void* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
inline Words looked_up(Words table, Words places) { return _mm512_shuffle_epi8(table, places); }
#define TANDEM_NUMBER_TABLES
inline Floats looked_up(Floats table, Words places) { return _mm512_permutexvar_ps(places, table); }  // by each word's lowest 4 bits
inline Floats lower_zipped(Floats a, Floats b) { return _mm512_unpacklo_ps(a, b); }
inline Floats upper_zipped(Floats a, Floats b) { return _mm512_unpackhi_ps(a, b); }
#if defined(__AVX512VBMI__)
#define TANDEM_BYTE_TABLES
struct ByteTable {  // 256 bytes
  Words parts[4];
  explicit ByteTable(const uint8_t* bytes) {
    for (int part = 0; part < 4; part++) parts[part] = load_words(bytes + 64 * part);
  }
};
inline Words looked_up(const ByteTable& table, Words places) {
  const Words low = _mm512_permutex2var_epi8(table.parts[0], places, table.parts[1]);
  const Words high = _mm512_permutex2var_epi8(table.parts[2], places, table.parts[3]);
  return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(places), high);
}
#endif
#if defined(__AVX512VNNI__)
#define TANDEM_BYTE_PRODUCTS
// c + the products of four unsigned bytes a word and four signed ones, exact.
inline Words plus_products_of_bytes(Words c, Words a, Words b) { return _mm512_dpbusd_epi32(c, a, b); }
// c += the products of two signed halves a word, exact, with the one pair that lies at `pair`. Of the intrinsic GCC 12 makes
// two copies and a broadcast beside each product.
inline void add_products_of_halves(Words& c, Words a, const void* pair) {
  __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(c) : "v"(a), "m"(*(const char(*)[4])pair));
}
inline Words signed_halves(const void* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }  // of 32 bytes
inline Words lower_halves_zipped(Words a, Words b) { return _mm512_unpacklo_epi16(a, b); }
inline Words upper_halves_zipped(Words a, Words b) { return _mm512_unpackhi_epi16(a, b); }
#endif
inline Words lower_zipped(Words a, Words b) { return _mm512_unpacklo_epi8(a, b); }
inline Words upper_zipped(Words a, Words b) { return _mm512_unpackhi_epi8(a, b); }
inline Words lower_bytes(Words a, Words b) { return _mm512_packus_epi16(a, b); }  // of 16-bit numbers below 256
inline Words where_equal(Words a, Words b, Words then) { return _mm512_maskz_mov_epi8(_mm512_cmpeq_epi8_mask(a, b), then); }

inline Floats widen16(const void* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
// bf16 in the lower halves: round to nearest, ties to even, as torch does; NaN stays NaN.
inline Words upper_halves(Floats x) {
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000)), 16);
}
#ifdef __AVX512BF16__
// Likewise in one instruction, to which numbers below the smallest normal one are 0.
inline void store_bf16(void* p, Floats x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
inline Floats as_bf16(Floats x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}
#endif
inline void store_halves(void* p, Words x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(x)); }

// 16 bytes, as signed or unsigned numbers; and the lowest bytes of 16 words.
inline Words signed_bytes(const void* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline Words unsigned_bytes(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline void store_bytes(void* p, Words x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }

// a0 b0 a1 b1 …: the first 16 in `low`.
inline void zip(Words a, Words b, Words& low, Words& high) {
  const __m512i places = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  low = _mm512_permutex2var_epi32(a, places, b);
  high = _mm512_permutex2var_epi32(a, _mm512_add_epi32(places, _mm512_set1_epi32(8)), b);
}

// The same of 16 bits each.
inline void zip_halves(Words a, Words b, Words& low, Words& high) {
  static constexpr struct Places {
    uint16_t of[64];
    constexpr Places() : of() {
      for (int i = 0; i < 64; i++) of[i] = uint16_t(i / 2 + i % 2 * 32);
    }
  } places;
  low = _mm512_permutex2var_epi16(a, load_words(places.of), b);
  high = _mm512_permutex2var_epi16(a, load_words(places.of + 32), b);
}

// Rows and columns of 16 x 16 words exchanged, in four rounds of neighbours at distance 1, 2, 4, 8.
inline void transpose16(Words (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      t[i + j] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    v[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    v[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}
