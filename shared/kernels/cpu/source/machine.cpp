// What the processor's features do not say: whether this process may use them, and whether that pays.
#include <algorithm>
#include <chrono>

#include "ops.h"
#include "simd.h"
#ifdef TANDEM_AMX
#include "tiles.h"
#endif

// Why this library cannot run, or null. Asks for what must be asked for, once a process.
extern "C" const char* tandem_refusal() {
#ifdef TANDEM_AMX
  if (!may_use_tiles()) return "the operating system does not permit AMX's tiles";
#endif
  return nullptr;
}

#if defined(TANDEM_PAIRS) && defined(__AVX512BF16__)
namespace {

constexpr int kSums = 12;
constexpr int64_t kSteps = 20000;

// Seconds that `kSteps` rounds of `kSums` independent steps take, the best of three.
template <typename F>
double best_time(const F& step) {
  double best = 1e9;
  for (int i = 0; i < 3; i++) {
    Floats sums[kSums];
    for (auto& sum : sums) sum = zeros();
    const auto start = std::chrono::steady_clock::now();
    for (int64_t j = 0; j < kSteps; j++)
#pragma GCC unroll 12
      for (int s = 0; s < kSums; s++) {
        sums[s] = step(sums[s]);
        __asm__ volatile("" : "+v"(sums[s]));
      }
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace
#endif

// Whether this library is faster than the next lower one. Some processors multiply pairs of bf16 at a quarter of the
// rate at which they multiply fp32: then two products, with the widening that rows share, are faster than a pair.
extern "C" int tandem_pays() {
#if defined(TANDEM_PAIRS) && defined(__AVX512BF16__)
  const Floats one = all(1.0f);
  const __m512bh pair = (__m512bh)all_words(0x3f803f80);
  const double fp32 = best_time([&](Floats sum) { return plus_product(sum, one, one); });
  const double pairs = best_time([&](Floats sum) { return _mm512_dpbf16_ps(sum, pair, pair); });
  return pairs < 1.5 * fp32;
#else
  return 1;
#endif
}
