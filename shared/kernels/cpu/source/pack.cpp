// Packs rows of weights into panels.
#include "gemm.h"
#include "ops.h"
#include "thread_pool.h"

namespace {

// Rows of 16-bit pairs or of 32-bit numbers, 32 of them, to [word][32], in place.
void pack_panel(uint32_t* panel, int64_t words, uint32_t* copy) {
  std::memcpy(copy, panel, kColumns * words * 4);
  for (int64_t w = 0; w < words; w += 16)
    for (int half = 0; half < 2; half++) {
      const int64_t count = std::min<int64_t>(16, words - w);
      Words v[16];
      for (int r = 0; r < 16; r++)
        v[r] = load_words(copy + (16 * half + r) * words + w, count);
      transpose16(v);
      for (int64_t i = 0; i < count; i++) store_words(panel + (w + i) * kColumns + 16 * half, v[i]);
    }
}

}  // namespace

// w [n, k], contiguous, becomes packed in place; n a multiple of 32, k of 16.
extern "C" void tandem_pack_linear(void* w, int64_t k, int64_t n, int is_bf16) {
  const int64_t words = is_bf16 ? k / 2 : k;
  parallel_for(n / kColumns, [&](int64_t p) {
    thread_local Workspace workspace;
    pack_panel((uint32_t*)w + p * kColumns * words, words, (uint32_t*)workspace.floats(kColumns * words));
  });
}
