// Low-rank additions: first the products with a, a chunk of the inputs a task, then those with b, some outputs a task.
#include "lora.h"

#include <algorithm>
#include <cstring>

#include "ops.h"
#include "simd.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kOutputs = 512;  // of a task

// c[rows][16] = the products of rows x[first, last) and one vector of ranks.
template <int R>
void shrink(const float* const* x, const float* a, int64_t first, int64_t last, Floats* c) {
  for (int64_t j = first; j < last; j++) {
    const Floats w = load(a + j * 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) c[r] = plus_product(c[r], all(x[r][j]), w);
  }
}

template <int R>
void shrink(const bf16* const* x, const bf16* a, int64_t first, int64_t last, Floats* c) {
  for (int64_t j = first; j < last; j += 2) {
    const Words w = load_words(a + j * 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#ifdef TANDEM_PAIRS
      uint32_t pair;
      std::memcpy(&pair, x[r] + j, 4);
      c[r] = plus_pairs(c[r], all_words(pair), w);
#else
      c[r] = plus_product(c[r], all(to_float(x[r][j])), even_of(w));
      c[r] = plus_product(c[r], all(to_float(x[r][j + 1])), odd_of(w));
#endif
    }
  }
}

// y[rows][16 V] += the products of s [rank][R] and b.
template <int R, int V, typename T>
void expand(const float* s, const T* b, int64_t rank, int64_t step, T* const* y, int64_t at) {
  Floats c[R][V];
  for (auto& row : c)
    for (Floats& v : row) v = zeros();
  for (int64_t j = 0; j < rank; j++) {
    Floats w[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) w[v] = load16(b + j * step + 16 * v);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Floats factor = all(s[j * R + r]);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) c[r][v] = plus_product(c[r][v], factor, w[v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      T* place = y[r] + at + 16 * v;
      store16(place, load16(place) + c[r][v]);
    }
}

template <typename T>
struct Addition {
  const T* x;
  T* y;
  int64_t k, n;
  const Lora* const* loras;
  const LoraRows& rows;
  float* sums;  // [chunk][sorted row][most_ranks]
  int64_t most_ranks;

  float* sum(int64_t chunk, int64_t row) const { return sums + (chunk * rows.num_rows + row) * most_ranks; }

  // Calls f with the tile's number of rows as a constant.
  template <typename F>
  static void with_rows(int64_t count, F&& f) {
    switch (count) {
      case 1: return f.template operator()<1>();
      case 2: return f.template operator()<2>();
      case 3: return f.template operator()<3>();
      case 4: return f.template operator()<4>();
      case 5: return f.template operator()<5>();
      case 6: return f.template operator()<6>();
      case 7: return f.template operator()<7>();
      default: return f.template operator()<8>();
    }
  }

  void shrink_tile(const int64_t* tile, int64_t chunk) const {
    const Lora* lora = loras[tile[0]];
    if (!lora) return;
    const int64_t first = chunk * kLoraChunk, last = std::min(k, first + kLoraChunk);
    with_rows(tile[2] - tile[1], [&]<int R>() {
      const T* from[R];
      for (int r = 0; r < R; r++) from[r] = x + rows.order[tile[1] + r] * k;
      for (int64_t v = 0; v < lora->ranks; v += 16) {
        Floats c[R];
        for (Floats& row : c) row = zeros();
        shrink<R>(from, (const T*)lora->a + v * k, first, last, c);
        for (int r = 0; r < R; r++) store(sum(chunk, tile[1] + r) + v, c[r]);
      }
    });
  }

  void expand_tile(const int64_t* tile, int64_t first, int64_t last) const {
    const Lora* lora = loras[tile[0]];
    if (!lora) return;
    with_rows(tile[2] - tile[1], [&]<int R>() {
      T* to[R];
      for (int r = 0; r < R; r++) to[r] = y + rows.order[tile[1] + r] * n;
      for (int64_t p = 0; p < lora->num_parts; p++) {
        const LoraPart& part = lora->parts[p];
        const int64_t begin = std::max(first, part.begin), end = std::min(last, part.begin + part.outputs);
        if (begin >= end) continue;
        float s[256 * R];
        gather<R>(tile[1], part, s);
        const T* b = (const T*)part.b + begin - part.begin;
        int64_t at = begin;
        for (; at + 32 <= end; at += 32) expand<R, 2>(s, b + at - begin, part.rank, part.outputs, to, at);
        if (at < end) expand<R, 1>(s, b + at - begin, part.rank, part.outputs, to, at);
      }
    });
  }

  // s[rank][R]: the sums over all chunks, times the part's scale.
  template <int R>
  void gather(int64_t row, const LoraPart& part, float* s) const {
    const int64_t chunks = lora_chunks(k);
    const float scale = float(part.scale);
    for (int r = 0; r < R; r++)
      for (int64_t j = 0; j < part.rank; j += 16) {
        Floats total = load(sum(0, row + r) + part.first_rank + j);
        for (int64_t chunk = 1; chunk < chunks; chunk++) total = total + load(sum(chunk, row + r) + part.first_rank + j);
        alignas(64) float lanes[16];
        store(lanes, total * all(scale));
        for (int i = 0; i < 16; i++) s[(j + i) * R + r] = lanes[i];
      }
  }

  void run() const {
    const int64_t chunks = lora_chunks(k), pieces = (n + kOutputs - 1) / kOutputs;
    parallel_for(chunks * rows.num_tiles, [&](int64_t task) {
      shrink_tile(rows.tiles + task % rows.num_tiles * 3, task / rows.num_tiles);
    });
    parallel_for(pieces * rows.num_tiles, [&](int64_t task) {
      const int64_t first = task / rows.num_tiles * kOutputs;
      expand_tile(rows.tiles + task % rows.num_tiles * 3, first, std::min(n, first + kOutputs));
    });
  }
};

}  // namespace

void add_lora(
    const void* x, void* y, int64_t k, int64_t n, const Lora* const* loras, const LoraRows& rows, float* sums,
    int64_t most_ranks, int is_bf16) {
  if (is_bf16)
    Addition<bf16>{(const bf16*)x, (bf16*)y, k, n, loras, rows, sums, most_ranks}.run();
  else
    Addition<float>{(const float*)x, (float*)y, k, n, loras, rows, sums, most_ranks}.run();
}

extern "C" void tandem_add_lora(
    const void* x, void* y, const int64_t* sizes, const Lora* const* loras, const LoraRows* rows, float* sums, int is_bf16) {
  add_lora(x, y, sizes[0], sizes[1], loras, *rows, sums, sizes[2], is_bf16);
}
