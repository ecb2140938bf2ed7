// Blocks of floats in fewer bytes, losslessly: most exponents lie in a short range, and a place in that range takes 3 or 4
// bits instead of 8. The format: shared/kernels/packing/reference.py.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ops.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kChunk = 2048;  // numbers that share a range
constexpr int64_t kGroup = 64;    // numbers whose bits of one plane are one word
constexpr int64_t kHead = 8, kChunkHead = 4;
constexpr uint8_t kVersion = 1, kRaw = 16, kMostBits = 7;
constexpr uint8_t kHalves = 32;  // beside a chunk's bits: its numbers have 32
constexpr int64_t kNotPacked = int64_t(1) << 40;
constexpr int kSampled = 4;               // one of so many exponents is counted
constexpr int64_t kMostChunk = kChunkHead + kChunk + kMostBits * (kChunk / 8) + kChunk;
constexpr int64_t kPatience = 16 * kChunk * 2;  // bytes after which a block that does not shrink is given up

struct Chunk {
  alignas(64) uint8_t low[kChunk];   // fraction, then the sign
  alignas(64) uint8_t high[kChunk];  // exponent
  alignas(64) uint8_t codes[kChunk];
};

int64_t plane_bytes(int64_t n) { return (n + 7) / 8; }

// Of 64 codes the bits of one plane.
uint64_t bits_of(const uint8_t* codes, int plane) {
#if defined(__AVX512BW__)
  return _mm512_test_epi8_mask(_mm512_loadu_si512(codes), _mm512_set1_epi8(char(1 << plane)));
#elif defined(__AVX2__)
  const __m128i up = _mm_cvtsi32_si128(7 - plane);
  const auto half = [&](const uint8_t* p) {
    return uint64_t(uint32_t(_mm256_movemask_epi8(_mm256_sll_epi16(_mm256_loadu_si256((const __m256i*)p), up))));
  };
  return half(codes) | half(codes + 32) << 32;
#else
  uint64_t bits = 0;
  for (int i = 0; i < 8; i++) {
    uint64_t eight;
    std::memcpy(&eight, codes + 8 * i, 8);
    bits |= ((eight >> plane & 0x0101010101010101) * 0x0102040810204080 >> 56) << (8 * i);
  }
  return bits;
#endif
}

// The codes of 64 numbers from their planes' words.
void codes_of(const uint64_t* words, int num_bits, uint8_t* codes) {
#if defined(__AVX512BW__)
  __m512i sum = _mm512_setzero_si512();
  for (int b = 0; b < num_bits; b++)
    sum = _mm512_mask_add_epi8(sum, words[b], sum, _mm512_set1_epi8(char(1 << b)));
  _mm512_storeu_si512(codes, sum);
#elif defined(__AVX2__)
  const __m256i bytes = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bits = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  for (int half = 0; half < 2; half++) {
    __m256i sum = _mm256_setzero_si256();
    for (int b = 0; b < num_bits; b++) {
      const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(int32_t(words[b] >> (32 * half))), bytes);
      const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bits), bits);
      sum = _mm256_or_si256(sum, _mm256_and_si256(is_set, _mm256_set1_epi8(char(1 << b))));
    }
    _mm256_storeu_si256((__m256i*)(codes + 32 * half), sum);
  }
#else
  for (int i = 0; i < 8; i++) {
    uint64_t sum = 0;
    for (int b = 0; b < num_bits; b++) {
      const uint64_t spread = (words[b] >> (8 * i) & 0xff) * 0x0101010101010101 & 0x8040201008040201;
      sum |= ((spread + 0x7f7f7f7f7f7f7f7f) >> 7 & 0x0101010101010101) << b;
    }
    std::memcpy(codes + 8 * i, &sum, 8);
  }
#endif
}

struct Range {
  int num_bits;  // of a code; kRaw: the chunk is kept as it is
  int first;     // exponent of code 0; the highest code stands for all others
};

// The range that is likely to take the fewest bytes, by a sample of exponents.
Range choose_range(const uint8_t* high, int64_t n) {
  uint16_t counts[256] = {};
  const int64_t taken = (n + kSampled - 1) / kSampled;
  for (int64_t i = 0; i < n; i += kSampled) counts[high[i]]++;
  int lowest = 0, highest = 255;
  while (!counts[lowest]) lowest++;
  while (!counts[highest]) highest--;
  Range best{kRaw, 0};
  int64_t fewest = 8 * taken;  // bits of the sample's exponents as they are
  for (int bits = 1; bits <= kMostBits; bits++) {
    const int width = (1 << bits) - 1;
    int64_t inside = 0, most = 0;
    int first = lowest;
    for (int e = lowest; e <= highest; e++) {
      inside += counts[e];
      if (e - width >= lowest) inside -= counts[e - width];
      if (inside > most) most = inside, first = std::max(lowest, e - width + 1);
    }
    const int64_t cost = bits * taken + 8 * (taken - most);
    if (cost < fewest) fewest = cost, best = {bits, first};
    if (most == taken) break;
  }
  return best;
}

// Packs n numbers of 16 bits, or with kStep 2 of 32 bits in two halves, the lower one first, which stays as it is. Returns
// the bytes written to `out`, which has room for kMostChunk; kNotPacked where exponents take as much as they do.
template <int kStep>
int64_t pack_numbers(const uint16_t* x, int64_t n, Chunk& chunk, uint8_t* out) {
  for (int64_t i = 0; i < n; i++) {
    const uint16_t upper = x[i * kStep + kStep - 1], turned = uint16_t(upper << 1 | upper >> 15);
    chunk.low[i] = uint8_t(turned);
    chunk.high[i] = uint8_t(turned >> 8);
  }
  const Range range = choose_range(chunk.high, n);
  if (range.num_bits == kRaw) return kNotPacked;
  const uint8_t last = uint8_t((1 << range.num_bits) - 1), first = uint8_t(range.first);
  for (int64_t i = 0; i < n; i++) chunk.codes[i] = std::min(uint8_t(chunk.high[i] - first), last);
  const int64_t padded = (n + kGroup - 1) / kGroup * kGroup;
  std::memset(chunk.codes + n, 0, size_t(padded - n));
  uint8_t* low = out + kChunkHead + 2 * (kStep - 1) * n;
  uint8_t* planes = low + n;
  uint8_t* rare = planes + range.num_bits * plane_bytes(n);
  uint16_t num_rare = 0;
  for (int64_t i = 0; i < n; i += kGroup) {
    const size_t bytes = size_t(std::min<int64_t>(8, plane_bytes(n) - i / 8));
    uint64_t outside = ~uint64_t(0);
    for (int b = 0; b < range.num_bits; b++) {
      const uint64_t word = bits_of(chunk.codes + i, b);
      std::memcpy(planes + b * plane_bytes(n) + i / 8, &word, bytes);
      outside &= word;
    }
    for (; outside; outside &= outside - 1) rare[num_rare++] = chunk.high[i + std::countr_zero(outside)];
  }
  if (kStep == 2)
    for (int64_t i = 0; i < n; i++) std::memcpy(out + kChunkHead + 2 * i, x + 2 * i, 2);
  std::memcpy(low, chunk.low, size_t(n));
  out[0] = uint8_t(range.num_bits | (kStep == 2 ? kHalves : 0));
  out[1] = first;
  std::memcpy(out + 2, &num_rare, 2);
  return rare + num_rare - out;
}

// Returns the bytes written to `out`, which has room for kMostChunk.
int64_t pack_chunk(const uint16_t* x, int64_t n, Chunk& chunk, uint8_t* out) {
  const int64_t raw = kChunkHead + 2 * n;
  if (const int64_t size = pack_numbers<1>(x, n, chunk, out); size < raw) return size;
  if (n % 2 == 0)
    if (const int64_t size = pack_numbers<2>(x, n / 2, chunk, out); size < raw) return size;
  const uint8_t head[kChunkHead] = {kRaw, 0, 0, 0};
  std::memcpy(out, head, kChunkHead);
  std::memcpy(out + kChunkHead, x, size_t(2 * n));
  return raw;
}

enum Fault { kSound = 0, kBadHead = 1, kTooShort = 2, kBadChunk = 3, kBadRare = 4, kTooLong = 5 };

// Of n numbers, as `pack_numbers` has them, what follows their lower halves. Leaves `p` behind it.
template <int kStep>
Fault unpack_numbers(
    const uint8_t*& p, const uint8_t* end, int num_bits, int first, int num_rare, uint16_t* x, int64_t n, Chunk& chunk) {
  if (end - p < (2 * kStep - 1) * n + num_bits * plane_bytes(n) + num_rare) return kTooShort;
  const uint8_t *halves = p, *low = halves + 2 * (kStep - 1) * n, *planes = low + n;
  const uint8_t* rare = planes + num_bits * plane_bytes(n);
  const uint8_t* rare_end = rare + num_rare;
  for (int64_t i = 0; i < n; i += kGroup) {
    const size_t bytes = size_t(std::min<int64_t>(8, plane_bytes(n) - i / 8));
    uint64_t words[kMostBits] = {}, outside = n - i < kGroup ? (uint64_t(1) << (n - i)) - 1 : ~uint64_t(0);
    for (int b = 0; b < num_bits; b++) {
      std::memcpy(&words[b], planes + b * plane_bytes(n) + i / 8, bytes);
      outside &= words[b];
    }
    codes_of(words, num_bits, chunk.codes + i);
    for (int64_t k = i; k < i + kGroup; k++) chunk.high[k] = uint8_t(chunk.codes[k] + first);
    if (std::popcount(outside) > rare_end - rare) return kBadRare;
    for (; outside; outside &= outside - 1) chunk.high[i + std::countr_zero(outside)] = *rare++;
  }
  if (rare != rare_end) return kBadRare;
  for (int64_t i = 0; i < n; i++) {
    const uint16_t turned = uint16_t(low[i] | chunk.high[i] << 8);
    if (kStep == 2) std::memcpy(x + 2 * i, halves + 2 * i, 2);
    x[i * kStep + kStep - 1] = uint16_t(turned >> 1 | turned << 15);
  }
  p = rare_end;
  return kSound;
}

// Reads from `p` to at most `end`, and leaves `p` behind the chunk.
Fault unpack_chunk(const uint8_t*& p, const uint8_t* end, uint16_t* x, int64_t n, Chunk& chunk) {
  if (end - p < kChunkHead) return kTooShort;
  const uint8_t kind = p[0], first = p[1];
  uint16_t num_rare;
  std::memcpy(&num_rare, p + 2, 2);
  p += kChunkHead;
  if (kind == kRaw) {
    if (end - p < 2 * n) return kTooShort;
    std::memcpy(x, p, size_t(2 * n));
    p += 2 * n;
    return kSound;
  }
  const int num_bits = kind & ~kHalves;
  const bool in_halves = kind & kHalves;
  if (num_bits < 1 || num_bits > kMostBits || (in_halves && n % 2)) return kBadChunk;
  return in_halves ? unpack_numbers<2>(p, end, num_bits, first, num_rare, x, n / 2, chunk)
                   : unpack_numbers<1>(p, end, num_bits, first, num_rare, x, n, chunk);
}

}  // namespace

// Packs x[n] into at most `capacity` bytes of `out`, a multiple of 8; n below 2^32. Returns how many they are, a multiple
// of 8, or 0 where they do not suffice or x does not shrink.
extern "C" int64_t tandem_pack(const uint16_t* x, int64_t n, uint8_t* out, int64_t capacity) {
  Chunk chunk;
  uint8_t aside[kMostChunk];
  if (capacity < kHead) return 0;
  const uint32_t head[2] = {kVersion, uint32_t(n)};
  std::memcpy(out, head, kHead);
  int64_t size = kHead;
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i), room = capacity - size;
    uint8_t* place = room >= kMostChunk ? out + size : aside;
    const int64_t made = pack_chunk(x + i, count, chunk, place);
    if (made > room) return 0;
    if (place == aside) std::memcpy(out + size, aside, size_t(made));
    size += made;
    const int64_t read = 2 * (i + count);
    if (read >= kPatience && size > read / 16 * 15) return 0;
  }
  const int64_t padded = (size + 7) / 8 * 8;
  if (padded > capacity) return 0;
  std::memset(out + size, 0, size_t(padded - size));
  return padded;
}

// Inverse of tandem_pack for x[n]. Returns 0, or what is wrong with the bytes; then x has any content. Reads and writes
// nothing else.
extern "C" int tandem_unpack(const uint8_t* packed, int64_t size, uint16_t* x, int64_t n) {
  Chunk chunk;
  uint32_t head[2];
  if (size < kHead) return kTooShort;
  std::memcpy(head, packed, kHead);
  if (head[0] != kVersion || head[1] != uint64_t(n)) return kBadHead;
  const uint8_t *p = packed + kHead, *end = packed + size;
  for (int64_t i = 0; i < n; i += kChunk)
    if (const Fault fault = unpack_chunk(p, end, x + i, std::min(kChunk, n - i), chunk)) return fault;
  return end - p < 8 ? kSound : kTooLong;
}
