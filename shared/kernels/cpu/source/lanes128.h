// 16 lanes in four registers: NEON, as every processor of aarch64 has it. The remarks in lanes512.h hold here too.
#pragma once

#include <arm_neon.h>

constexpr int kVectors = 8;

struct Floats {
  float32x4_t at[4];
};
struct Words {
  uint32x4_t at[4];
};
struct Mask {  // all bits of a lane, or none
  uint32x4_t at[4];
};

// A vector of the four registers that f gives.
template <typename V, typename F>
[[gnu::always_inline]] inline V four(const F& f) { return {f(0), f(1), f(2), f(3)}; }

inline Floats operator+(Floats a, Floats b) { return four<Floats>([&](int i) { return a.at[i] + b.at[i]; }); }
inline Floats operator-(Floats a, Floats b) { return four<Floats>([&](int i) { return a.at[i] - b.at[i]; }); }
inline Floats operator*(Floats a, Floats b) { return four<Floats>([&](int i) { return a.at[i] * b.at[i]; }); }
inline Floats operator/(Floats a, Floats b) { return four<Floats>([&](int i) { return a.at[i] / b.at[i]; }); }

inline Floats all(float x) { return four<Floats>([&](int) { return vdupq_n_f32(x); }); }
inline Floats zeros() { return all(0.0f); }
inline Words all_words(uint32_t x) { return four<Words>([&](int) { return vdupq_n_u32(x); }); }
inline Words no_words() { return all_words(0); }
inline Floats as_floats(Words x) { return four<Floats>([&](int i) { return vreinterpretq_f32_u32(x.at[i]); }); }
inline Words as_words(Floats x) { return four<Words>([&](int i) { return vreinterpretq_u32_f32(x.at[i]); }); }

inline Floats load(const float* p) { return four<Floats>([&](int i) { return vld1q_f32(p + 4 * i); }); }
inline void store(float* p, Floats x) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.at[i]);
}
inline Words load_words(const void* p) {
  return four<Words>([&](int i) { return vreinterpretq_u32_u8(vld1q_u8((const uint8_t*)p + 16 * i)); });
}
inline void store_words(void* p, Words x) {
  for (int i = 0; i < 4; i++) vst1q_u8((uint8_t*)p + 16 * i, vreinterpretq_u8_u32(x.at[i]));
}
inline Words load_words(const void* p, int64_t count) {
  if (count == 16) return load_words(p);
  uint32_t words[16] = {};
  std::memcpy(words, p, size_t(count) * 4);
  return load_words(words);
}
inline void store_words(void* p, Words x, int64_t count) {
  if (count == 16) return store_words(p, x);
  uint32_t words[16];
  store_words(words, x);
  std::memcpy(p, words, size_t(count) * 4);
}

inline Floats plus_product(Floats c, Floats a, Floats b) {
  return four<Floats>([&](int i) { return vfmaq_f32(c.at[i], a.at[i], b.at[i]); });
}
inline Floats minus_product(Floats c, Floats a, Floats b) {
  return four<Floats>([&](int i) { return vfmsq_f32(c.at[i], a.at[i], b.at[i]); });
}
// NEON's own maximum is NaN where one is.
inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t smaller(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Floats larger(Floats a, Floats b) { return four<Floats>([&](int i) { return larger(a.at[i], b.at[i]); }); }
inline Floats smaller(Floats a, Floats b) { return four<Floats>([&](int i) { return smaller(a.at[i], b.at[i]); }); }
inline Floats nearest(Floats x) { return four<Floats>([&](int i) { return vrndnq_f32(x.at[i]); }); }
inline float32x4_t power(float32x4_t n) {  // 2^n for -126 <= n <= 127
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
inline Floats times_small_power(Floats x, Floats n) {
  return four<Floats>([&](int i) { return x.at[i] * power(n.at[i]); });
}
inline Floats times_power(Floats x, Floats n) {
  const Floats half = nearest(n * all(0.5f));
  return times_small_power(times_small_power(x, half), n - half);
}
inline float sum_of(Floats x) {  // in the order of the others
  const float32x4_t y = (x.at[0] + x.at[2]) + (x.at[1] + x.at[3]);
  const float32x2_t z = vget_low_f32(y) + vget_high_f32(y);
  return z[0] + z[1];
}
inline float highest_of(Floats x) {
  return vmaxvq_f32(larger(larger(x.at[0], x.at[2]), larger(x.at[1], x.at[3])));
}

inline Mask first_lanes(int64_t count) {
  const uint32x4_t places = {0, 1, 2, 3};
  return four<Mask>([&](int i) { return vcgtq_u32(vdupq_n_u32(uint32_t(count)), places + uint32_t(4 * i)); });
}
inline Mask not_less(Floats a, Floats b) {
  return four<Mask>([&](int i) { return vmvnq_u32(vcltq_f32(a.at[i], b.at[i])); });
}
inline bool any_differs(Floats a, Floats b) {
  const auto equal = [&](int i) { return vceqq_f32(a.at[i], b.at[i]); };
  return vminvq_u32(equal(0) & equal(1) & equal(2) & equal(3)) == 0;
}
inline Mask at_most(Words a, Words b) {  // as signed numbers
  return four<Mask>([&](int i) {
    return vcleq_s32(vreinterpretq_s32_u32(a.at[i]), vreinterpretq_s32_u32(b.at[i]));
  });
}
inline Mask both(Mask a, Mask b) { return four<Mask>([&](int i) { return a.at[i] & b.at[i]; }); }
inline Floats choose(Mask mask, Floats yes, Floats no) {
  return four<Floats>([&](int i) { return vbslq_f32(mask.at[i], yes.at[i], no.at[i]); });
}
inline Floats keep(Mask mask, Floats x) { return choose(mask, x, zeros()); }
inline Floats larger_where(Mask mask, Floats a, Floats b) { return choose(mask, larger(a, b), a); }

inline Words both(Words a, Words b) { return four<Words>([&](int i) { return a.at[i] & b.at[i]; }); }
inline Words either(Words a, Words b) { return four<Words>([&](int i) { return a.at[i] | b.at[i]; }); }
inline Words either_alone(Words a, Words b) { return four<Words>([&](int i) { return a.at[i] ^ b.at[i]; }); }
// Bits of a where `mask` has ones, else those of b.
inline Words selected(Words mask, Words a, Words b) { return either_alone(b, both(mask, either_alone(a, b))); }
inline void whole_products(Words a, uint32_t b, Words& low, Words& high) {
  for (int i = 0; i < 4; i++) {
    const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a.at[i]), vdup_n_u32(b)));
    const uint32x4_t last = vreinterpretq_u32_u64(vmull_u32(vget_high_u32(a.at[i]), vdup_n_u32(b)));
    low.at[i] = vuzp1q_u32(first, last);
    high.at[i] = vuzp2q_u32(first, last);
  }
}
inline Words minus(Words a, Words b) { return four<Words>([&](int i) { return a.at[i] - b.at[i]; }); }
inline Words plus(Words a, Words b) { return four<Words>([&](int i) { return a.at[i] + b.at[i]; }); }
template <int N>
inline Words shift_left(Words x) { return four<Words>([&](int i) { return vshlq_n_u32(x.at[i], N); }); }
template <int N>
inline Words shift_right(Words x) { return four<Words>([&](int i) { return vshrq_n_u32(x.at[i], N); }); }
template <int N>
inline Words shift_right_signed(Words x) {
  return four<Words>([&](int i) { return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(x.at[i]), N)); });
}
inline Floats signed_floats(Words x) {
  return four<Floats>([&](int i) { return vcvtq_f32_s32(vreinterpretq_s32_u32(x.at[i])); });
}

template <typename F>
[[gnu::always_inline]] inline Words halves(const F& f) {
  return four<Words>([&](int i) { return vreinterpretq_u32_u16(f(i)); });
}
template <int N>
inline Words shift_halves_left(Words x) {
  return halves([&](int i) { return vshlq_n_u16(vreinterpretq_u16_u32(x.at[i]), N); });
}
template <int N>
inline Words shift_halves_right(Words x) {
  return halves([&](int i) { return vshrq_n_u16(vreinterpretq_u16_u32(x.at[i]), N); });
}

template <int N>
inline Words shift_halves_right_signed(Words x) {
  return halves([&](int i) { return vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u32(x.at[i]), N)); });
}
inline Words times(Words a, Words b) { return four<Words>([&](int i) { return a.at[i] * b.at[i]; }); }
inline Words products_of_halves(Words a, Words b) {
  return four<Words>([&](int i) {
    const int16x8_t x = vreinterpretq_s16_u32(a.at[i]), y = vreinterpretq_s16_u32(b.at[i]);
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
    return vreinterpretq_u32_s32(vpaddq_s32(low, vmull_high_s16(x, y)));
  });
}

template <typename F>
[[gnu::always_inline]] inline Words bytes(const F& f) {
  return four<Words>([&](int i) { return vreinterpretq_u32_u8(f(i)); });
}
inline uint8x16_t bytes_of(uint32x4_t x) { return vreinterpretq_u8_u32(x); }
inline Words all_bytes(uint8_t x) { return bytes([&](int) { return vdupq_n_u8(x); }); }
inline Words repeated(const void* p) { return bytes([&](int) { return vld1q_u8((const uint8_t*)p); }); }
inline Words looked_up(Words table, Words places) {
  return bytes([&](int i) { return vqtbl1q_u8(bytes_of(table.at[i]), bytes_of(places.at[i])); });
}
inline Words lower_zipped(Words a, Words b) {
  return bytes([&](int i) { return vzip1q_u8(bytes_of(a.at[i]), bytes_of(b.at[i])); });
}
inline Words upper_zipped(Words a, Words b) {
  return bytes([&](int i) { return vzip2q_u8(bytes_of(a.at[i]), bytes_of(b.at[i])); });
}
inline Words lower_bytes(Words a, Words b) {
  return bytes([&](int i) { return vuzp1q_u8(bytes_of(a.at[i]), bytes_of(b.at[i])); });
}
inline Words where_equal(Words a, Words b, Words then) {
  return bytes([&](int i) { return vceqq_u8(bytes_of(a.at[i]), bytes_of(b.at[i])) & bytes_of(then.at[i]); });
}

inline Floats widen16(const void* p) {
  return four<Floats>([&](int i) {
    const uint16x4_t half = vreinterpret_u16_u8(vld1_u8((const uint8_t*)p + 8 * i));
    return vreinterpretq_f32_u32(vshll_n_u16(half, 16));
  });
}
inline Words upper_halves(Floats x) {
  return four<Words>([&](int i) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x.at[i]);
    const uint32x4_t odd = vshrq_n_u32(bits, 16) & vdupq_n_u32(1);
    const uint32x4_t rounded = bits + odd + vdupq_n_u32(0x7fff);
    const uint32x4_t number = vceqq_f32(x.at[i], x.at[i]);
    return vshrq_n_u32(vbslq_u32(number, rounded, vdupq_n_u32(0x7fc00000)), 16);
  });
}
inline void store_halves(void* p, Words x) {
  for (int i = 0; i < 4; i++) vst1_u8((uint8_t*)p + 8 * i, vreinterpret_u8_u16(vmovn_u32(x.at[i])));
}

inline Words signed_bytes(const void* p) {
  const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8((const uint8_t*)p));
  const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x)};
  return four<Words>([&](int i) {
    const int16x8_t half = halves[i / 2];
    return vreinterpretq_u32_s32(i % 2 ? vmovl_high_s16(half) : vmovl_s16(vget_low_s16(half)));
  });
}
inline Words unsigned_bytes(const void* p) {
  const uint8x16_t x = vld1q_u8((const uint8_t*)p);
  const uint16x8_t halves[2] = {vmovl_u8(vget_low_u8(x)), vmovl_high_u8(x)};
  return four<Words>([&](int i) {
    const uint16x8_t half = halves[i / 2];
    return i % 2 ? vmovl_high_u16(half) : vmovl_u16(vget_low_u16(half));
  });
}
inline void store_bytes(void* p, Words x) {
  const uint16x8_t low = vcombine_u16(vmovn_u32(x.at[0]), vmovn_u32(x.at[1]));
  const uint16x8_t high = vcombine_u16(vmovn_u32(x.at[2]), vmovn_u32(x.at[3]));
  vst1q_u8((uint8_t*)p, vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
}

inline void zip(Words a, Words b, Words& low, Words& high) {
  const auto zipped = [&](int i) { return i % 2 ? vzip2q_u32(a.at[i / 2], b.at[i / 2]) : vzip1q_u32(a.at[i / 2], b.at[i / 2]); };
  const Words first = four<Words>(zipped);
  high = four<Words>([&](int i) { return zipped(i + 4); });
  low = first;
}
// The same of 16 bits each.
inline void zip_halves(Words a, Words b, Words& low, Words& high) {
  const auto zipped = [&](int i) {
    const uint16x8_t x = vreinterpretq_u16_u32(a.at[i / 2]), y = vreinterpretq_u16_u32(b.at[i / 2]);
    return vreinterpretq_u32_u16(i % 2 ? vzip2q_u16(x, y) : vzip1q_u16(x, y));
  };
  const Words first = four<Words>(zipped);
  high = four<Words>([&](int i) { return zipped(i + 4); });
  low = first;
}

// 4 x 4 squares of 4 x 4 words: each is turned, and takes the place of the one across the diagonal.
inline void transpose16(Words (&v)[16]) {
  Words t[16];
  for (int row = 0; row < 4; row++)
    for (int column = 0; column < 4; column++) {
      const auto word = [&](int i) { return v[4 * row + i].at[column]; };
      const uint32x4_t a = vtrn1q_u32(word(0), word(1)), b = vtrn2q_u32(word(0), word(1));
      const uint32x4_t c = vtrn1q_u32(word(2), word(3)), d = vtrn2q_u32(word(2), word(3));
      const auto joined = [](uint32x4_t x, uint32x4_t y, auto zip) {
        return vreinterpretq_u32_u64(zip(vreinterpretq_u64_u32(x), vreinterpretq_u64_u32(y)));
      };
      const auto lower = [](uint64x2_t x, uint64x2_t y) { return vzip1q_u64(x, y); };
      const auto upper = [](uint64x2_t x, uint64x2_t y) { return vzip2q_u64(x, y); };
      t[4 * column].at[row] = joined(a, c, lower);
      t[4 * column + 1].at[row] = joined(b, d, lower);
      t[4 * column + 2].at[row] = joined(a, c, upper);
      t[4 * column + 3].at[row] = joined(b, d, upper);
    }
  for (int i = 0; i < 16; i++) v[i] = t[i];
}
