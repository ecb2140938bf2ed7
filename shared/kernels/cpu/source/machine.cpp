// Checks beyond the processor's feature bits: whether this process may use a feature, and whether it is faster.
#include <algorithm>
#include <chrono>

#include "ops.h"
#include "simd.h"
#ifdef TANDEM_TILES
#include "tiles.h"
#endif

// The reason why this library cannot run, or null. Requests the permissions that it needs, such as AMX, once a process.
extern "C" const char* tandem_refusal() {
#ifdef TANDEM_TILES
  if (!may_use_tiles()) return "the operating system does not permit AMX's tiles";
#endif
  return nullptr;
}

#if defined(TANDEM_PAIRS) && defined(__AVX512BF16__)
namespace {

constexpr int kSums = 12;
constexpr int64_t kSteps = 4000;
constexpr int kTries = 25;

// Seconds that `kSteps` rounds of `kSums` independent steps take: some microseconds, so that even on a busy machine
// most tries are not interrupted.
template <typename F>
double time_of(const F& step) {
  Floats sums[kSums];
  for (auto& sum : sums) sum = zeros();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t j = 0; j < kSteps; j++)
#pragma GCC unroll 12
    for (int s = 0; s < kSums; s++) {
      sums[s] = step(sums[s]);
      __asm__ volatile("" : "+v"(sums[s]));
    }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace
#endif

// Whether this library is faster than the next lower one. Some processors multiply pairs of bf16 at a quarter of the
// rate at which they multiply fp32: then two products, with the widening that rows share, are faster than a pair.
extern "C" int tandem_pays() {
#if defined(TANDEM_PAIRS) && defined(__AVX512BF16__)
  const Floats one = all(1.0f);
  const __m512bh pair = (__m512bh)all_words(0x3f803f80);
  double fp32 = 1e9, pairs = 1e9;  // the best of all tries, which take turns
  for (int i = 0; i < kTries; i++) {
    fp32 = std::min(fp32, time_of([&](Floats sum) { return plus_product(sum, one, one); }));
    pairs = std::min(pairs, time_of([&](Floats sum) { return _mm512_dpbf16_ps(sum, pair, pair); }));
  }
  return pairs < 1.5 * fp32;
#else
  return 1;
#endif
}
