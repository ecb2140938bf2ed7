// Chooses each token's experts and their weights; shared/kernels/experts/routing.py defines the rules.
#include <algorithm>
#include <limits>
#include <vector>

#include "ops.h"
#include "order.h"
#include "simd.h"
#include "thread_pool.h"

namespace {

constexpr int32_t kOut = INT_MIN;  // marks an expert that cannot be chosen; below the order of any number
constexpr int64_t kGrain = 16;     // tokens of a task

struct Rules {
  int64_t num_tokens, num_experts, top_k, num_groups, top_groups, group_score, is_sigmoid, is_normalised;
};

// NaN is above all, as torch sorts it: a broken token chooses experts too, no two of them equal.
int32_t place_among(float x) { return x == x ? place_of(x) : INT_MAX; }

// Takes and returns the best expert, the first of equal ones.
int64_t take_highest(int32_t* places, int64_t count) {
  int32_t most = kOut;
  for (int64_t i = 0; i < count; i++) most = places[i] > most ? places[i] : most;
  int64_t found = 0;
  while (places[found] != most) found++;
  places[found] = kOut;
  return found;
}

// Chooses for one token after the other, with memory for one: rows of whole vectors.
class Router {
 public:
  Router(const Rules& rules, const float* bias, float scale)
      : r_(rules), bias_(bias), scale_(scale), padded_((rules.num_experts + 15) / 16 * 16), logits_(padded_),
        scores_(padded_), merits_(padded_), places_(rules.num_experts), rest_(rules.num_experts),
        group_places_(rules.num_groups) {}

  template <typename T>
  void choose(const T* logits, int64_t* ids, float* weights) {
    for (int64_t i = 0; i < r_.num_experts; i++) logits_[i] = to_float(logits[i]);
    for (int64_t i = r_.num_experts; i < padded_; i++) logits_[i] = -std::numeric_limits<float>::infinity();
    if (r_.is_sigmoid)
      sigmoid();
    else
      softmax();
    rank();
    float total = 0;
    for (int64_t k = 0; k < r_.top_k; k++) {
      ids[k] = take_highest(places_.data(), r_.num_experts);
      weights[k] = scores_[ids[k]];
      total += weights[k];
    }
    // What DeepSeek adds so that no sum of sigmoids is zero.
    const float divisor = !r_.is_normalised ? 1.0f : r_.is_sigmoid ? total + 1e-20f : total;
    for (int64_t k = 0; k < r_.top_k; k++) weights[k] = weights[k] / divisor * scale_;
  }

 private:
  template <typename F>
  void each_vector(const F& body) {
    for (int64_t i = 0; i < padded_; i += 16) body(i);
  }

  void softmax() {
    Floats most = load(logits_.data()), sum = zeros();
    each_vector([&](int64_t i) { most = larger(most, load(&logits_[i])); });
    const Floats peak = all(highest_of(most));
    each_vector([&](int64_t i) {
      const Floats score = exp16(load(&logits_[i]) - peak);
      store(&scores_[i], score);
      sum = sum + score;
    });
    const Floats total = all(sum_of(sum));
    each_vector([&](int64_t i) { store(&scores_[i], load(&scores_[i]) / total); });
  }

  // 1 / (1 + exp(-x)), or exp(x) / (1 + exp(x)): the one without a large number.
  void sigmoid() {
    each_vector([&](int64_t i) {
      const Floats x = load(&logits_[i]);
      const Floats small = exp16(as_floats(either(as_words(x), all_words(0x80000000))));
      store(&scores_[i], ::choose(not_less(x, zeros()), all(1.0f), small) / (all(1.0f) + small));
    });
  }

  // Fills places_. Logits are in the order of their scores, and no two were rounded to one; scores are what is added to.
  void rank() {
    const bool has_groups = r_.top_groups < r_.num_groups;
    const bool adds = bias_ != nullptr || (has_groups && r_.group_score > 1);
    for (int64_t i = 0; i < r_.num_experts; i++)
      merits_[i] = !adds ? logits_[i] : bias_ == nullptr ? scores_[i] : scores_[i] + bias_[i];
    for (int64_t i = 0; i < r_.num_experts; i++) places_[i] = place_among(merits_[i]);
    if (has_groups) ban_groups();
  }

  // Takes out the experts of all groups but the best.
  void ban_groups() {
    const int64_t size = r_.num_experts / r_.num_groups;
    std::copy(places_.begin(), places_.end(), rest_.begin());  // an assignment would need a newer libstdc++
    for (int64_t group = 0; group < r_.num_groups; group++) {
      float merit = 0;
      for (int64_t i = 0; i < r_.group_score; i++)
        merit += merits_[group * size + take_highest(&rest_[group * size], size)];
      group_places_[group] = place_among(merit);
    }
    for (int64_t i = 0; i < r_.top_groups; i++) take_highest(group_places_.data(), r_.num_groups);
    for (int64_t i = 0; i < r_.num_experts; i++)
      if (group_places_[i / size] != kOut) places_[i] = kOut;
  }

  const Rules& r_;
  const float* bias_;
  float scale_;
  int64_t padded_;
  std::vector<float> logits_, scores_, merits_;
  std::vector<int32_t> places_, rest_, group_places_;
};

template <typename T>
void choose_experts(const T* logits, const float* bias, int64_t* ids, float* weights, const Rules& rules, float scale) {
  parallel_ranges(rules.num_tokens, kGrain, [&](int64_t first, int64_t last) {
    Router router(rules, bias, scale);
    for (int64_t t = first; t < last; t++)
      router.choose(logits + t * rules.num_experts, ids + t * rules.top_k, weights + t * rules.top_k);
  });
}

}  // namespace

// logits [num_tokens, num_experts], bias [num_experts] or nullptr, ids and weights [num_tokens, top_k]; sizes: as in Rules.
extern "C" void tandem_choose_experts(
    const void* logits, const float* bias, int64_t* ids, float* weights, const int64_t* sizes, float scale, int is_bf16) {
  const Rules rules{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]};
  if (is_bf16)
    choose_experts((const bf16*)logits, bias, ids, weights, rules, scale);
  else
    choose_experts((const float*)logits, bias, ids, weights, rules, scale);
}
