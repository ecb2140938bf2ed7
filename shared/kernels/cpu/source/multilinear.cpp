// The sum of a block's words, each times a secret key: one pass over both, in exact integers.
#include "ops.h"

namespace {

using Wide = unsigned __int128;

// A sum of up to 2^64 products, 192 bits.
struct Sum {
  Wide low = 0;
  uint64_t high = 0;

  void add(Wide value) {
    low += value;
    high += low < value;
  }
};

}  // namespace

// out[3]: sum of words[i] * keys[i] over i < n, 64 bits an element, the lowest first.
extern "C" void tandem_multilinear(const uint64_t* words, const uint64_t* keys, int64_t n, uint64_t* out) {
  Sum sums[4];  // chains of additions that do not wait for each other
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int lane = 0; lane < 4; lane++) sums[lane].add(Wide(words[i + lane]) * keys[i + lane]);
  for (; i < n; i++) sums[0].add(Wide(words[i]) * keys[i]);
  for (int lane = 1; lane < 4; lane++) {
    sums[0].add(sums[lane].low);
    sums[0].high += sums[lane].high;
  }
  out[0] = uint64_t(sums[0].low);
  out[1] = uint64_t(sums[0].low >> 64);
  out[2] = sums[0].high;
}
