// One token for each row of logits, by temperature, min-p, top-k and top-p, without a sort.
//
// The tokens that remain race: each has an exponentially distributed time, from (seed, position, token) alone, which its
// weight divides, and the first one wins. A time is at least the uniform number that it is made of, so most tokens are
// out by one product, before any logarithm.
//
// A token's weight is exp(logit / temperature - peak / temperature), 1 for the likeliest: its probability without the
// common sum, which no choice depends on. Weights are not negative, so their bits, read as whole numbers, have their
// order: these are the keys. Tallies of the tokens by the upper bits of their keys lead to the bucket that top-k or top-p
// ends in; two more, of that bucket's tokens by their further bits, lead to one key. Equal keys are in order of
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

// Of 16 tokens from `first` on; 0 for those below `least` and past the row's end.
Floats weights_of(const float* logits, int64_t first, int64_t size, Floats divisor, Floats top, Floats least) {
  const int64_t count = std::min<int64_t>(16, size - first);
  const Floats weights = exp16(as_floats(load_words(logits + first, count)) / divisor - top);
  return keep(both(not_less(weights, least), first_lanes(count)), weights);
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
      uint32_t* keys = keys_.data() + first;
      store_words(keys, as_words(weights_of(logits, first, size, divisor, top, least)));
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

  // Those of 16 tokens from `first` on, and how many tokens there are, up to a multiple of 16.
  Floats at(int64_t first) const { return as_floats(load_words(keys_.data() + first)); }
  int64_t size() const { return int64_t(keys_.size()); }

  // Adds the tokens, rising, with keys from `least` to below `end`.
  void collect(uint32_t least, uint32_t end, std::vector<uint32_t>& tokens, std::vector<uint32_t>& their_keys) const {
    for (size_t first = 0; first < keys_.size(); first += 16) {
      const uint32_t* keys = keys_.data() + first;
      uint32_t found = 0;
      for (int i = 0; i < 16; i++) found |= uint32_t(keys[i] - least < end - least);
      for (uint32_t i = 0; found && i < 16; i++) {
        if (keys[i] - least >= end - least) continue;
        their_keys.push_back(keys[i]);
        tokens.push_back(uint32_t(first) + i);
      }
    }
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
    collect(bucket << kWhole.shift, (bucket + 1) << kWhole.shift, listed_tokens_, listed_keys_);
  }

  std::vector<uint32_t> keys_;  // 0 where a token is left out, and up to a multiple of 16
  uint64_t whole_[kWhole.num_buckets];
  uint64_t tallies_[kBucket.num_buckets];
  uint32_t listed_ = 0;  // the bucket, 0: none
  std::vector<uint32_t> listed_keys_, listed_tokens_;
};

constexpr uint32_t kNear = 0x25800000, kRootHalf = 0x3f3504f3;  // as in shared/kernels/sampling/reference.py

// The time of a token's random number below 2^31, -log(1 - (number + 1/2) / 2^31), to the same bits as everywhere:
// products and sums of fp32 are rounded one by one, also where the compiler may fuse them.
float time_of(uint32_t number) {
  const auto product = [](float a, float b) { return float(double(a) * double(b)); };
  const auto sum = [](float a, float b) { return float(double(a) + double(b)); };
  const bool near = number < kNear;
  const float part = sum(float(near ? number : 0x7fffffffu - number), 0.5f) * 0x1p-31f;
  const int32_t bits = std::bit_cast<int32_t>(part) - int32_t(kRootHalf);
  const float exponent = near ? 0.0f : float(bits >> 23);
  const float rest = near ? -part : std::bit_cast<float>((bits & 0x7fffff) + kRootHalf) - 1.0f;
  float y = -0.076285586f;
  for (const float c : {0.12910533f, -0.13243358f, 0.14180933f, -0.1660893f, 0.20002013f, -0.2500159f, 0.33333325f,
                        -0.49999988f})
    y = sum(product(y, rest), c);
  return -sum(product(exponent, 0.6931472f), sum(rest, product(product(rest, rest), y)));
}

// Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) of the counters (position, third, 0), whose key is the seed.
struct Random {
  Words words[4];
};
Random philox(uint64_t seed, uint64_t position, Words thirds) {
  uint32_t key_0 = uint32_t(seed), key_1 = uint32_t(seed >> 32);
  Words c_0 = all_words(uint32_t(position)), c_1 = all_words(uint32_t(position >> 32)), c_2 = thirds, c_3 = no_words();
  for (int round = 0; round < 10; round++) {
    Words low_0, high_0, low_2, high_2;
    whole_products(c_0, 0xD2511F53, low_0, high_0);
    whole_products(c_2, 0xCD9E8D57, low_2, high_2);
    c_0 = either_alone(either_alone(high_2, c_1), all_words(key_0));
    c_1 = low_2;
    c_2 = either_alone(either_alone(high_0, c_3), all_words(key_1));
    c_3 = low_0;
    key_0 += 0x9E3779B9;
    key_1 += 0xBB67AE85;
  }
  return {{c_0, c_1, c_2, c_3}};
}

// Finds the token that is first: the quotient of its weight and its time is the highest. Of equal ones the lowest.
class Race {
 public:
  // `leader` is one of the tokens, of weight 1.
  Race(uint64_t seed, uint64_t position, int64_t leader) : seed_(seed), position_(position) {
    const uint32_t token = uint32_t(leader);
    run(leader, 1.0f, Numbers(philox(seed, position, all_words(third_of(token)))).of(0, token));
  }

  int64_t token() const { return token_; }

  // All tokens from 0 to `size`; weights(first) gives those of 16, is_kept(weight, token) says whether one takes part.
  template <typename WeightsAt, typename IsKept>
  void run_all(int64_t size, const WeightsAt& weights, const IsKept& is_kept) {
    const uint32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Words thirds = load_words(lanes);
    for (int64_t group = 0; group * 64 < size; group++, thirds = plus(thirds, all_words(16))) {
      const Random random = philox(seed_, position_, thirds);
      for (int64_t part = 0; part < 4 && group * 64 + part * 16 < size; part++) {
        const int64_t first = group * 64 + part * 16;
        run_16(weights(first), random.words[part], first, is_kept);
      }
    }
  }

  // 16 tokens at a time of a list.
  template <typename IsKept>
  void run_listed(const std::vector<uint32_t>& tokens, const std::vector<uint32_t>& keys, const IsKept& is_kept) {
    for (size_t first = 0; first < tokens.size(); first += 16) {
      const int count = int(std::min<size_t>(16, tokens.size() - first));
      uint32_t thirds[16] = {};
      for (int i = 0; i < count; i++) thirds[i] = third_of(tokens[first + size_t(i)]);
      const Numbers numbers(philox(seed_, position_, load_words(thirds)));
      for (int i = 0; i < count; i++) {
        const uint32_t token = tokens[first + size_t(i)], number = numbers.of(i, token);
        const float weight = std::bit_cast<float>(keys[first + size_t(i)]);
        if (weight >= float(number) * least_ && is_kept(weight, token)) run(token, weight, number);
      }
    }
  }

 private:
  static uint32_t third_of(uint32_t token) { return (token >> 6) * 16 + token % 16; }

  class Numbers {  // below 2^31
   public:
    explicit Numbers(const Random& random) {
      for (int i = 0; i < 4; i++) store_words(words_[i], random.words[i]);
    }
    uint32_t of(int lane, uint32_t token) const { return words_[token / 16 % 4][lane] >> 1; }

   private:
    alignas(64) uint32_t words_[4][16];
  };

  void run(int64_t token, float weight, uint32_t number) {
    const float speed = weight / time_of(number);
    if (speed < speed_ || (speed == speed_ && token > token_)) return;
    speed_ = speed;
    token_ = token;
    least_ = speed * (1.0f - 0x1p-20f) * 0x1p-31f;  // of the weight to the number: what has less is no faster
  }

  template <typename IsKept>
  void run_16(Floats weights, Words words, int64_t first, const IsKept& is_kept) {
    const Words numbers = shift_right<1>(words);
    const Floats fast = keep(not_less(weights, signed_floats(numbers) * all(least_)), weights);
    if (!any_differs(fast, zeros())) return;
    alignas(64) float found[16];
    alignas(64) uint32_t found_numbers[16];
    store(found, fast);
    store_words(found_numbers, numbers);
    for (int i = 0; i < 16; i++)
      if (found[i] > 0 && is_kept(found[i], first + i)) run(first + i, found[i], found_numbers[i]);
  }

  uint64_t seed_, position_;
  int64_t token_ = 0;
  float speed_ = -1, least_ = 0;
};

constexpr int64_t kFew = 64; // one token in so many, or fewer, are listed before they race

// What top-k and top-p leave of the row is all above some key and the first few tokens of just that one: the last range.
Range cut(Weights& weights, int64_t top_k, double top_p) {
  const Range all_kept = weights.total();
  double mass = all_kept.mass;
  Range last{0, all_kept.count, all_kept.mass, 0, 0};
  const auto end = [&](Range range, double ties) {
    last = range;
    last.count = int64_t(std::clamp(ties, 1.0, double(range.count)));
    mass = range.mass_above + double(last.count) * weight_of(range.key);
  };
  if (top_k > 0 && top_k < all_kept.count) {
    const Range range = weights.find([&](int64_t count, double) { return count >= top_k; });
    end(range, double(top_k - range.above));
  }
  if (top_p < 1.0) {
    const double goal = top_p * mass;
    Range range = weights.find([&](int64_t, double reached) { return reached >= goal; });
    if (range.key <= last.key && last.key > 0) range = last;
    // All that have less than the goal before them: the one that crosses it is still in.
    end(range, std::ceil((goal - range.mass_above) / weight_of(range.key)));
  }
  return last;
}

void run_cut(Race& race, Weights& weights, Range last) {
  thread_local std::vector<uint32_t> tokens, keys;
  const int64_t last_token = last.key == 0 ? 0 : weights.token(last.key, last.count - 1);
  const float least = std::bit_cast<float>(last.key);
  const auto is_kept = [&](float weight, int64_t token) {
    return weight > least || (weight == least && token <= last_token);
  };
  if ((last.above + last.count) * kFew > weights.size()) {
    race.run_all(weights.size(), [&](int64_t first) { return weights.at(first); }, is_kept);
    return;
  }
  tokens.clear();
  keys.clear();
  weights.collect(std::max(last.key, 1u), 1u << 30, tokens, keys);
  race.run_listed(tokens, keys, is_kept);
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
    Race race(seeds[row], positions[row], out[row]);
    if (top_ks[row] == 0 && top_ps[row] >= 1.0) {
      const Floats divisor = all(temperature), top = all(peak / temperature), least = all(min_ps[row]);
      const auto weights = [&](int64_t first) { return weights_of(values, first, vocab_size, divisor, top, least); };
      race.run_all(vocab_size, weights, [](float, int64_t) { return true; });
    } else {
      thread_local Weights weights;
      weights.read(values, vocab_size, temperature, peak, min_ps[row]);
      run_cut(race, weights, cut(weights, top_ks[row], top_ps[row]));
    }
    out[row] = race.token();
  });
}
