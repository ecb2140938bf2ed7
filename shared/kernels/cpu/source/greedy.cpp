// The likeliest token of each row of logits, among those that a mask allows where the row has one.
#include "greedy.h"

#include <limits>

#include "ops.h"
#include "order.h"
#include "thread_pool.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kWord = 32;          // tokens of a mask's word
constexpr int64_t kPart = 64 * kWord;  // logits read twice while they are in the first cache

// The highest place among `count` logits, and whether one of them is NaN or +inf.
int32_t highest(const float* logits, int64_t count, bool& is_broken) {
  int32_t most = INT_MIN, broken = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t place = place_of(logits[i]);
    most = place > most ? place : most;
    broken |= !(logits[i] < kInfinity);
  }
  is_broken |= broken != 0;
  return most;
}

// Likewise for the 32 logits of one word of a mask; a forbidden logit can only set `is_broken`.
int32_t highest_allowed(const float* logits, uint32_t word, bool& is_broken) {
  int32_t most = INT_MIN, broken = 0;
  for (int32_t i = 0; i < kWord; i++) {
    const int32_t allowed = -int32_t(word >> i & 1);
    const int32_t place = (place_of(logits[i]) & allowed) | (INT_MIN & ~allowed);
    most = place > most ? place : most;
    broken |= !(logits[i] < kInfinity);
  }
  is_broken |= broken != 0;
  return most;
}

// Likewise for the first `count` logits of a word, at most 32.
int32_t highest_of_word(const float* logits, uint32_t word, int64_t count, bool& is_broken) {
  if (count >= kWord) {  // most words allow all of theirs or none
    if (word != 0 && word != 0xFFFFFFFFu) return highest_allowed(logits, word, is_broken);
    const int32_t most = highest(logits, kWord, is_broken);
    return word == 0 ? INT_MIN : most;
  }
  int32_t most = INT_MIN;
  for (int64_t i = 0; i < count; i++) {
    const int32_t place = highest(logits + i, 1, is_broken);
    if ((word >> i & 1) && place > most) most = place;
  }
  return most;
}

bool is_allowed(const uint32_t* words, int64_t token) {
  return words == nullptr || (words[token / kWord] >> token % kWord & 1);
}

}  // namespace

int64_t greedy_token(const float* logits, const uint32_t* words, int64_t vocab_size) {
  bool is_broken = false;
  int32_t best = INT_MIN;
  int64_t found = -1;
  for (int64_t first = 0; first < vocab_size; first += kPart) {
    const int64_t last = first + kPart < vocab_size ? first + kPart : vocab_size;
    int32_t most = INT_MIN;
    if (words == nullptr) {
      most = highest(logits + first, last - first, is_broken);
    } else {
      for (int64_t token = first; token < last; token += kWord) {
        const int32_t here = highest_of_word(logits + token, words[token / kWord], last - token, is_broken);
        most = here > most ? here : most;
      }
    }
    if (most <= best) continue;
    best = most;
    found = first;
    while (place_of(logits[found]) != best || !is_allowed(words, found)) found++;
  }
  return is_broken || best <= place_of(-kInfinity) ? -1 : found;
}

// logits [num_rows, vocab_size], masks [num_masks, num_words] as tandem_mask_tokens takes them, rows [num_masks]: the row
// that each is for, out [num_rows]: -1 for a row with a NaN or +inf, or where no token with a finite logit is allowed.
extern "C" void tandem_greedy_tokens(
    const float* logits, const uint32_t* masks, const int64_t* rows, int64_t* out, int64_t num_rows, int64_t num_masks,
    int64_t vocab_size, int64_t num_words) {
  parallel_for(num_rows, [&](int64_t row) {
    const uint32_t* words = nullptr;
    for (int64_t mask = 0; mask < num_masks; mask++)
      if (rows[mask] == row) words = masks + mask * num_words;
    out[row] = greedy_token(logits + row * vocab_size, words, vocab_size);
  });
}
