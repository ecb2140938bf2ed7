// Panels of 32 outputs' bf16 weights: plain, or losslessly compressed to 12 bits a weight. A step of few rows reads
// every weight once and is bound by memory bandwidth, so it gets faster by what the compression saves.
//
// The upper byte of a bf16 number is its sign and all of its exponent but the last bit. In a panel nearly all weights
// share 15 such bytes and zero's, so a weight is stored as an index of 4 bits into the panel's table and its lower
// byte. The few others, "rare" weights, are stored as zero and follow the groups, each with its place in the panel.
// Zhang et al. 2025 ("70% Size, 100% Accuracy", DFloat11) give each exponent as many bits as it needs; 4 bits for all
// take a little more memory, and one shuffle of bytes decodes 64 of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "gemm.h"

// Two k of a panel, as they lie in a plain one: 16 pairs (k, k + 1) of outputs 0-15, and of 16-31.
struct Pairs {
  Words low, high;
};

inline Words pair_of(Words pairs) { return pairs; }

// A table as groups have it: where Words are several registers, GCC copies one in each group by halves of a register, and
// what reads it whole waits for them.
using Table = std::conditional_t<kVectors == 32, Words, const Words&>;

constexpr int64_t kGroupK = 4;  // k of a group: a line of lower bytes for each half, then one of both halves' places
constexpr int64_t kAhead = 4096;  // bytes prefetched ahead of the stream of weights, by functions always inlined:
// GCC takes one that only prefetches for one without effect, and leaves its calls out

struct PlainPanel {
  const bf16* weights;

  struct Group {
    const bf16* weights;
    [[gnu::always_inline]] void prefetch(int64_t ahead = kAhead) const {
      for (int line = 0; line < 4; line++) __builtin_prefetch((const char*)weights + ahead + 64 * line);
    }
    Pairs half(int i) const {
      return {load_words(weights + 64 * i), load_words(weights + 64 * i + 32)};
    }
  };
  Group group(int64_t k) const { return {weights + k * kColumns}; }

  template <typename F>
  void each_rare(int64_t, int64_t, F&&) const {}
};

class CompressedPanel {
 public:
  struct Rare {  // a weight whose upper byte is not in the table
    uint32_t place;  // k * 32 + output
    float weight;
  };
  struct Head {
    uint8_t upper[16];  // the first is 0
    uint32_t num_rare;
    uint8_t unused[44];
  };
  static constexpr int64_t kGroupBytes = 192;

  CompressedPanel(const std::byte* bytes, int64_t k_size)
      : bytes_(bytes), k_size_(k_size), upper_(repeated(bytes)) {}

  struct Group {
    const std::byte* bytes;
    Table upper;
    [[gnu::always_inline]] void prefetch(int64_t ahead = kAhead) const {
      for (int line = 0; line < 3; line++) __builtin_prefetch((const char*)bytes + ahead + 64 * line);
    }
    Pairs half(int i) const {
      Words places = load_words(bytes + 128);
      if (i) places = shift_halves_right<4>(places);
      const Words uppers = looked_up(upper, both(places, all_bytes(15))), lowers = load_words(bytes + 64 * i);
      return {lower_zipped(lowers, uppers), upper_zipped(lowers, uppers)};
    }
  };
  Group group(int64_t k) const { return {bytes_ + sizeof(Head) + k / kGroupK * kGroupBytes, upper_}; }

  const Rare* rares() const { return (const Rare*)group(k_size_).bytes; }
  int64_t num_rares() const { return ((const Head*)bytes_)->num_rare; }

  // Calls f(k, output, weight) for the rare weights of k in [first, last), which are 0 in their groups.
  template <typename F>
  void each_rare(int64_t first, int64_t last, F&& f) const {
    const Rare *rare = rares(), *end = rare + num_rares();
    if (first > 0)
      rare = std::lower_bound(rare, end, first * kColumns, [](const Rare& r, int64_t place) { return r.place < place; });
    for (; rare != end && rare->place < last * kColumns; rare++)
      f(rare->place / kColumns, rare->place % kColumns, rare->weight);
  }

 private:
  const std::byte* bytes_;
  int64_t k_size_;
  Words upper_;
};
// linear.py counts on these.
static_assert(sizeof(CompressedPanel::Head) == 64);
static_assert(sizeof(CompressedPanel::Rare) == 8);
static_assert(2 * CompressedPanel::kGroupBytes == 3 * kGroupK * kColumns);
