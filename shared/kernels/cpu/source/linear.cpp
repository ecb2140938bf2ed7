// y = x w^T + bias with packed weights.
//
// Packing lays 32 outputs side by side: [out / 32][k] vectors of 32 fp32, or [out / 32][k / 2] times two vectors of 16
// pairs (k, k + 1) of bf16, which widen by one shift and one mask, or are multiplied as they are by AVX512-BF16 or AMX.
// Panels of bf16 may be tight (panels.h).
#include "blocked.h"
#include "direct.h"
#include "ops.h"
#ifdef TANDEM_AMX
#include "tiled.h"
#endif

namespace {

// Up to so many rows, weights are widened as they are used; fp32 ones need not be.
constexpr int64_t kDirectRows = 36, kDirectWideRows = kVectors == 32 ? kDirectRows : 2;
constexpr int64_t kTaskWork = 1 << 20;  // products of a task of few rows, so that tasks are neither tiny nor few

template <typename T>
void linear(
    const T* x, const T* weight, int64_t tight_bytes, const T* bias, T* y, float* scratch, int64_t m, int64_t k,
    int64_t n) {
#ifdef TANDEM_AMX
  if constexpr (sizeof(T) == 2)
    if (kDeterministic || m > kVectorRows) return tiled_linear({x, weight, bias, y, (bf16*)scratch, m, k, n, tight_bytes});
#endif
  const bool direct = m <= (sizeof(T) == 2 ? kDirectWideRows : kDirectRows) || Laid<T>::per_word == 2;
  const Tiles tiles(m, direct && sizeof(T) == 2 && Laid<T>::per_word == 1 ? kDirectTile : kRows);
  const Product<T> job{scratch, weight, bias, y, k, n, tight_bytes, tiles};
  const int64_t panels = n / kColumns;
  const int64_t chunks = direct ? 1 : (m + kChunk - 1) / kChunk, groups = (panels + kTaskPanels - 1) / kTaskPanels;
  parallel_ranges(tiles.count, m < kChunk ? tiles.count : 2, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
      lay_rows(x + tiles.first(t) * k, k, tiles.size(t), scratch + tiles.first(t) * job.words());
  });
  if (direct) {
    const int64_t grain = std::max<int64_t>(1, kTaskWork / (kColumns * k * (m + 8)));
    parallel_ranges(panels, grain, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; p++) direct_panel(job, p);
    });
  } else {
    parallel_for(chunks * groups, [&](int64_t i) {
      const int64_t chunk = i % chunks, p = i / chunks * kTaskPanels;
      const int64_t low = chunk * tiles.count / chunks, high = (chunk + 1) * tiles.count / chunks;
      blocked(job, low, high, p, std::min(p + kTaskPanels, panels));
    });
  }
}

}  // namespace

// x [m, k], packed w, in tight panels every `tight_bytes` unless that is 0, bias [n] or null, y [m, n]; all contiguous;
// scratch of m k floats; n a multiple of 32, k of 16.
extern "C" void tandem_linear(
    const void* x, const void* w, int64_t tight_bytes, const void* bias, void* y, float* scratch, int64_t m, int64_t k,
    int64_t n, int is_bf16) {
  if (is_bf16)
    linear((const bf16*)x, (const bf16*)w, tight_bytes, (const bf16*)bias, (bf16*)y, scratch, m, k, n);
  else
    linear((const float*)x, (const float*)w, 0, (const float*)bias, (float*)y, scratch, m, k, n);
}
