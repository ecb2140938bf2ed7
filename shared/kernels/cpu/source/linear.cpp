// y = x w^T + bias with packed weights.
//
// Packing lays 32 outputs side by side: [out / 32][k] vectors of 32 fp32, or [out / 32][k / 2] times two vectors of 16
// pairs (k, k + 1) of bf16, which widen by one shift and one mask, or are multiplied as they are by AVX512-BF16 or AMX.
// Panels of bf16 may be compressed (panels.h).
#include "multiplication.h"
#include "ops.h"

namespace {

template <typename T>
void linear(
    const T* x, const T* weight, Packed packed, const T* bias, T* y, float* scratch, int64_t m, int64_t k, int64_t n) {
  const AnyProduct<T> all({x, k, y, n, m}, weight, packed, bias, scratch, k, n);
  parallel_for(all.lay_tasks(), [&](int64_t task) { all.lay(task); });
  parallel_for(all.tasks(), [&](int64_t task) { all.run(task); });
}

}  // namespace

// x [m, k], packed w, bias [n] or null, y [m, n]; all contiguous. panel_stride: bytes from one compressed panel to the
// next, 0 for plain panels; form: of codes (codes.h), 0 for panels of numbers; scratch of m k floats, and m k / 16 more for
// codes; n a multiple of 32, k of 16.
extern "C" void tandem_linear(
    const void* x, const void* w, int64_t panel_stride, int64_t form, const void* bias, void* y, float* scratch, int64_t m,
    int64_t k, int64_t n, int is_bf16) {
  if (is_bf16)
    linear((const bf16*)x, (const bf16*)w, {panel_stride, form}, (const bf16*)bias, (bf16*)y, scratch, m, k, n);
  else
    linear((const float*)x, (const float*)w, {panel_stride, form}, (const float*)bias, (float*)y, scratch, m, k, n);
}
