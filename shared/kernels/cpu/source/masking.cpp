// The masks of structured answers over their rows of logits.
#include <limits>

#include "ops.h"
#include "thread_pool.h"

namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();
constexpr int64_t kTaskWords = 2048;  // 256 kB of logits

// Masks the `count` logits of one word, 32 at most. Most words forbid all of their logits or none.
void mask_word(float* logits, uint32_t word, int64_t count) {
  if (word == 0xFFFFFFFFu) return;
  for (int64_t i = 0; i < count; i++) logits[i] = (word >> i & 1) ? logits[i] : kForbidden;
}

}  // namespace

// logits [num_rows, vocab_size], masks [num_masks, num_words], rows [num_masks]; bit i % 32 of word i / 32 is set where
// token i is allowed.
extern "C" void tandem_mask_tokens(
    float* logits, const uint32_t* masks, const int64_t* rows, int64_t num_masks, int64_t vocab_size,
    int64_t num_words) {
  const int64_t full = vocab_size / 32, used = (vocab_size + 31) / 32, parts = (used + kTaskWords - 1) / kTaskWords;
  parallel_for(num_masks * parts, [&](int64_t task) {
    const int64_t mask = task / parts, first = task % parts * kTaskWords;
    const int64_t last = first + kTaskWords < used ? first + kTaskWords : used;
    const uint32_t* words = masks + mask * num_words;
    float* row = logits + rows[mask] * vocab_size;
    for (int64_t w = first; w < last; w++) mask_word(row + 32 * w, words[w], w < full ? 32 : vocab_size - 32 * full);
  });
}
