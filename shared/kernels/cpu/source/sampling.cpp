// One token for each row of logits, by temperature, min-p, top-k and top-p, without a sort.
//
// A token's weight is exp(logit / temperature - peak / temperature), 1 for the likeliest: its probability without the
// common sum, which no choice depends on. Weights are not negative, so their bits, read as whole numbers, have their
// order: these are the keys. Tallies of the tokens by the upper bits of their keys lead to the bucket that a rank or a
// mass falls into; two more, of that bucket's tokens by their further bits, lead to one key. Equal keys are in order of
// tokens. The sums within a tally are of whole numbers, so nothing depends on their order.
#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "greedy.h"
#include "ops.h"
#include "simd.h"
#include "thread_pool.h"

namespace {

// A tally is the number of tokens, and the sum of those bits of their keys that lie below the bucket's own, 19 at most.
// So rows may have 2^22 tokens.
constexpr int kSumBits = 41;
constexpr uint64_t kOne = uint64_t(1) << kSumBits;

struct Level {
  int shift;          // the bits of a key that lie below
  uint32_t num_buckets;
};
constexpr Level kWhole{19, 2048}, kBucket{9, 1024}, kPart{0, 512};  // keys are below 2^30

struct Range {            // tokens whose keys begin alike
  uint32_t key = 0;       // the lowest that they may have
  int64_t count = 0;      // of the tokens
  double mass = 0;        // the sum of their weights
  int64_t above = 0;      // tokens with higher keys
  double mass_above = 0;
};

double weight_of(uint32_t key) { return double(std::bit_cast<float>(key)); }

void add(uint64_t* tallies, Level level, uint32_t key) {
  const uint32_t below = (1u << level.shift) - 1;
  tallies[key >> level.shift & (level.num_buckets - 1)] += kOne + (key & below);
}

// The highest bucket at which the tokens down to it reach the goal; the lowest that has any where none does. `start`
// holds all tokens of the tallies. Weights too small for a normal number are none.
template <typename Reaches>
Range walk(const uint64_t* tallies, Level level, Range start, const Reaches& reaches) {
  Range found{0, 0, 0, start.above, start.mass_above};
  for (int64_t bucket = level.num_buckets - 1; bucket >= 0; bucket--) {
    const uint64_t tally = tallies[bucket];
    const uint32_t key = start.key | uint32_t(bucket) << level.shift;
    if (tally == 0 || key < 1u << kWhole.shift) continue;
    const int64_t count = int64_t(tally >> kSumBits);
    const double unit = weight_of(key & 0x7f800000) * 0x1p-23, rest = double(tally & (kOne - 1));
    found = {key, count, double(count) * weight_of(key) + rest * unit, found.above + found.count,
             found.mass_above + found.mass};
    if (reaches(found.above + count, found.mass_above + found.mass)) break;
  }
  return found;
}

// The weights of one row's tokens, in order.
class Weights {
 public:
  // Those below `min_p` are left out.
  void read(const float* logits, int64_t size, float temperature, float peak, float min_p) {
    keys_.resize(size_t(size + 15) / 16 * 16);
    std::fill_n(whole_, kWhole.num_buckets, 0);
    listed_ = 0;
    const Floats divisor = all(temperature), top = all(peak / temperature), least = all(min_p);
    for (int64_t first = 0; first < size; first += 16) {
      const int64_t count = std::min<int64_t>(16, size - first);
      const Floats weights = exp16(as_floats(load_words(logits + first, count)) / divisor - top);
      uint32_t* keys = keys_.data() + first;
      store_words(keys, as_words(keep(not_less(weights, least), weights)));
      std::fill(keys + count, keys + 16, 0);
      for (int64_t i = 0; i < 16; i++) add(whole_, kWhole, keys[i]);
    }
  }

  Range total() const {
    const Range last = walk(whole_, kWhole, {}, [](int64_t, double) { return false; });
    return {0, last.above + last.count, last.mass_above + last.mass};
  }

  // The tokens of the highest key at which those down to it reach the goal: reaches(count, mass) of them.
  template <typename Reaches>
  Range find(const Reaches& reaches) {
    Range range = walk(whole_, kWhole, {}, reaches);
    list(range.key);
    std::fill_n(tallies_, kBucket.num_buckets, 0);
    for (const uint32_t key : listed_keys_) add(tallies_, kBucket, key);
    range = walk(tallies_, kBucket, range, reaches);
    std::fill_n(tallies_, kPart.num_buckets, 0);
    for (const uint32_t key : listed_keys_)
      if (key >> kBucket.shift == range.key >> kBucket.shift) add(tallies_, kPart, key);
    return walk(tallies_, kPart, range, reaches);
  }

  // Number `rank` of the tokens with that key.
  int64_t token(uint32_t key, int64_t rank) {
    list(key);
    size_t i = 0;
    while (listed_keys_[i] != key || rank-- > 0) i++;
    return listed_tokens_[i];
  }

 private:
  // The tokens that share a key's bucket.
  void list(uint32_t key) {
    const uint32_t bucket = key >> kWhole.shift;
    if (bucket == listed_) return;
    listed_ = bucket;
    listed_keys_.clear();
    listed_tokens_.clear();
    for (size_t first = 0; first < keys_.size(); first += 16) {
      const uint32_t* keys = keys_.data() + first;
      uint32_t found = 0;
      for (int i = 0; i < 16; i++) found |= uint32_t(keys[i] >> kWhole.shift == bucket);
      for (uint32_t i = 0; found && i < 16; i++) {
        if (keys[i] >> kWhole.shift != bucket) continue;
        listed_keys_.push_back(keys[i]);
        listed_tokens_.push_back(uint32_t(first) + i);
      }
    }
  }

  std::vector<uint32_t> keys_;  // 0 where a token is left out, and up to a multiple of 16
  uint64_t whole_[kWhole.num_buckets];
  uint64_t tallies_[kBucket.num_buckets];
  uint32_t listed_ = 0;  // the bucket, 0: none
  std::vector<uint32_t> listed_keys_, listed_tokens_;
};

// Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011): 53 random bits as a number in [0, 1).
double uniform(uint64_t seed, uint64_t position) {
  uint32_t key_0 = uint32_t(seed), key_1 = uint32_t(seed >> 32);
  uint32_t c_0 = uint32_t(position), c_1 = uint32_t(position >> 32), c_2 = 0, c_3 = 0;
  for (int round = 0; round < 10; round++) {
    const uint64_t first = uint64_t(c_0) * 0xD2511F53, second = uint64_t(c_2) * 0xCD9E8D57;
    c_0 = uint32_t(second >> 32) ^ c_1 ^ key_0;
    c_1 = uint32_t(second);
    c_2 = uint32_t(first >> 32) ^ c_3 ^ key_1;
    c_3 = uint32_t(first);
    key_0 += 0x9E3779B9;
    key_1 += 0xBB67AE85;
  }
  return double(uint64_t(c_0) << 21 | c_1 >> 11) * 0x1p-53;
}

// The token at `point` of the mass that is left. What top-k and top-p leave is all above some key and the first few
// tokens of just that one: the last range.
int64_t drawn(Weights& weights, int64_t top_k, double top_p, double point) {
  const Range all_kept = weights.total();
  double mass = all_kept.mass;
  Range last;
  const auto bounded = [&](Range range) { return range.key > last.key ? range : last; };
  const auto cut = [&](Range range, double ties) {
    last = range;
    last.count = int64_t(std::clamp(ties, 1.0, double(range.count)));
    mass = range.mass_above + double(last.count) * weight_of(range.key);
  };
  if (top_k > 0 && top_k < all_kept.count) {
    const Range range = weights.find([&](int64_t count, double) { return count >= top_k; });
    cut(range, double(top_k - range.above));
  }
  if (top_p < 1.0) {
    const double goal = top_p * mass;
    const Range range = bounded(weights.find([&](int64_t, double reached) { return reached >= goal; }));
    // All that have less than the goal before them: the one that crosses it is still in.
    cut(range, std::ceil((goal - range.mass_above) / weight_of(range.key)));
  }
  const double goal = point * mass;
  const Range range = bounded(weights.find([&](int64_t, double reached) { return reached > goal; }));
  const double rank = std::floor((goal - range.mass_above) / weight_of(range.key));
  return weights.token(range.key, int64_t(std::clamp(rank, 0.0, double(range.count - 1))));
}

}  // namespace

// logits [num_rows, vocab_size], the others [num_rows]; vocab_size is 2^22 at most. -1 for a row with a NaN or +inf,
// without any finite logit, or with a temperature so low that the quotient overflows.
extern "C" void tandem_sample_tokens(
    const float* logits, const float* temperatures, const int32_t* top_ks, const double* top_ps, const float* min_ps,
    const uint64_t* seeds, const uint64_t* positions, int64_t* out, int64_t num_rows, int64_t vocab_size) {
  parallel_for(num_rows, [&](int64_t row) {
    const float* values = logits + row * vocab_size;
    const float temperature = temperatures[row];
    out[row] = greedy_token(values, nullptr, vocab_size);
    if (out[row] < 0 || !(temperature > 0.0f)) return;
    const float peak = values[out[row]];
    if (!std::isfinite(peak / temperature)) {
      out[row] = -1;
      return;
    }
    thread_local Weights weights;
    weights.read(values, vocab_size, temperature, peak, min_ps[row]);
    out[row] = drawn(weights, top_ks[row], top_ps[row], uniform(seeds[row], positions[row]));
  });
}
