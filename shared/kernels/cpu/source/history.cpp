// Penalties on tokens that a sequence has had, and the count of those that are chosen.
#include <bit>

#include "ops.h"
#include "thread_pool.h"

// logits [num_rows, vocab_size]; seen [num_slots, num_words], bit i % 32 of word i / 32: the sequence has had token i;
// counts [num_slots, vocab_size], how often its output has it; the others [num_rows], slots -1 where a row has none. Of
// tokens that were not seen only the bits are read.
extern "C" void tandem_penalize(
    float* logits, const uint32_t* seen, const int32_t* counts, const int64_t* slots, const float* repetitions,
    const float* presences, const float* frequencies, int64_t num_rows, int64_t vocab_size, int64_t num_words) {
  parallel_for(num_rows, [&](int64_t row) {
    const int64_t slot = slots[row];
    if (slot < 0) return;
    float* values = logits + row * vocab_size;
    const uint32_t* words = seen + slot * num_words;
    const int32_t* times = counts + slot * vocab_size;
    const float repetition = repetitions[row], presence = presences[row], frequency = frequencies[row];
    for (int64_t w = 0; w < num_words; w++) {
      for (uint32_t left = words[w]; left; left &= left - 1) {
        const int64_t token = 32 * w + std::countr_zero(left);
        const float value = values[token];
        float changed = value > 0.0f ? value / repetition : value * repetition;
        if (times[token] > 0) {
          // Rounded by itself, as torch does: one fused operation would give another last bit.
          const volatile float of_counts = frequency * float(times[token]);
          changed -= presence + of_counts;
        }
        values[token] = changed;
      }
    }
  });
}

// slots and tokens [num_rows]; nothing is counted where either is -1, and no two slots are equal.
extern "C" void tandem_count_tokens(
    uint32_t* seen, int32_t* counts, const int64_t* slots, const int64_t* tokens, int64_t num_rows, int64_t vocab_size,
    int64_t num_words) {
  for (int64_t row = 0; row < num_rows; row++) {
    const int64_t slot = slots[row], token = tokens[row];
    if (slot < 0 || token < 0) continue;
    uint32_t& word = seen[slot * num_words + token / 32];
    int32_t& count = counts[slot * vocab_size + token];
    const uint32_t bit = 1u << token % 32;
    count = (word & bit) ? count + 1 : 1;  // of a token that was not seen, the count is that of another sequence
    word |= bit;
  }
}
