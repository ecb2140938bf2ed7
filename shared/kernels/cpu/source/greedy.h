// The likeliest token of one row of logits.
#pragma once

#include <cstdint>

// Among the tokens whose bits are set in `words`; nullptr allows all. Of equal ones the lowest; -1 where a logit is NaN
// or +inf, or none of the allowed ones is finite.
int64_t greedy_token(const float* logits, const uint32_t* words, int64_t vocab_size);
