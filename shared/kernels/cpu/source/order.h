// Floats in their order as whole numbers: loops that compare those become vectors, loops over floats do not.
#pragma once

#include <climits>
#include <cstdint>
#include <cstring>

// Both zeros are one. NaN lies above +inf or below -inf, by its sign.
inline int32_t place_of(float x) {
  x += 0.0f;
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
