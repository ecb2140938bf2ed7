// Low-rank additions: first the products with a, a chunk of the inputs a task, then those with b, some outputs a task.
#include "lora.h"

#include <algorithm>
#include <cstring>

#include "ops.h"
#include "simd.h"
#include "thread_pool.h"
#ifdef TANDEM_AMX
#include "lora_tiles.h"
#endif

namespace {

constexpr int64_t kOutputs = 512;  // of a task of few rows
constexpr int64_t kTogether = 8;   // rows that are multiplied at once

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

// c[rows][16] = the products of s [rows][kMostRank] and one vector of outputs.
template <int R>
void expand(const float* s, const float* b, int64_t rank, Floats* c) {
  for (int64_t j = 0; j < rank; j++) {
    const Floats w = load(b + j * 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) c[r] = plus_product(c[r], all(s[r * kMostRank + j]), w);
  }
}

template <int R>
void expand(const float* s, const bf16* b, int64_t rank, Floats* c) {
  for (int64_t j = 0; j < rank; j += 2) {
    const Words w = load_words(b + j * 16);
    const Floats even = even_of(w), odd = odd_of(w);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      c[r] = plus_product(c[r], all(s[r * kMostRank + j]), even);
      c[r] = plus_product(c[r], all(s[r * kMostRank + j + 1]), odd);
    }
  }
}

// Calls f with the number of rows as a constant.
template <typename F>
void with_rows(int64_t count, F&& f) {
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

  // Whether rows are multiplied in AMX's tiles: where weights are read for few, vectors are as fast.
  bool is_tiled(int64_t count) const {
#ifdef TANDEM_AMX
    return sizeof(T) == 2 && (kDeterministic || count > kFewRows);
#else
    return false;
#endif
  }

  void shrink_tile(const int64_t* tile, int64_t chunk) const {
    const Lora* lora = loras[tile[0]];
    if (!lora) return;
    const int64_t first = chunk * kLoraChunk, last = std::min(k, first + kLoraChunk), end = tile[2];
#ifdef TANDEM_AMX
    if constexpr (sizeof(T) == 2)
      if (is_tiled(end - tile[1])) {
        TileRows of(x, k, first, last);
        for (int64_t row = tile[1]; row < end; row += kTileRows)
          of.shrink(
              rows.order + row, int(std::min(kTileRows, end - row)), (const T*)lora->a, lora->ranks, sum(chunk, row),
              most_ranks);
        return;
      }
#endif
    for (int64_t row = tile[1]; row < end; row += kTogether) with_rows(end - row, [&]<int R>() {
      const T* from[R];
      for (int r = 0; r < R; r++) from[r] = x + rows.order[row + r] * k;
      for (int64_t v = 0; v < lora->ranks; v += 16) {
        Floats c[R];
        for (Floats& each : c) each = zeros();
        shrink<R>(from, (const T*)lora->a + v * k, first, last, c);
        for (int r = 0; r < R; r++) store(sum(chunk, row + r) + v, c[r]);
      }
    });
  }

  void expand_tile(const int64_t* tile, int64_t first, int64_t last) const {
    const Lora* lora = loras[tile[0]];
    if (!lora) return;
    const int64_t together = is_tiled(tile[2] - tile[1]) ? 2 * kTogether : kTogether;
    for (int64_t p = 0; p < lora->num_parts; p++) {
      const LoraPart& part = lora->parts[p];
      const int64_t begin = std::max(first, part.begin), end = std::min(last, part.begin + part.outputs);
      if (begin >= end) continue;
      const T* b = (const T*)part.b + (begin - part.begin) * part.rank;
      for (int64_t row = tile[1]; row < tile[2]; row += together) {
        const int64_t count = std::min(together, tile[2] - row);
        alignas(64) float s[2 * kTogether * kMostRank];
        gather(row, count, part, s);
        T* to[2 * kTogether];
        for (int64_t r = 0; r < count; r++) to[r] = y + rows.order[row + r] * n;
#ifdef TANDEM_AMX
        if constexpr (sizeof(T) == 2)
          if (together > kTogether) {
            expand_by_tiles(s, int(count), b, part.rank, begin, end, to);
            continue;
          }
#endif
        with_rows(count, [&]<int R>() {
          for (int64_t at = begin; at < end; at += 16) {
            Floats c[R];
            for (Floats& each : c) each = zeros();
            expand<R>(s, b + (at - begin) * part.rank, part.rank, c);
            for (int r = 0; r < R; r++) store16(to[r] + at, load16(to[r] + at) + c[r]);
          }
        });
      }
    }
  }

  // s[count][kMostRank]: the sums over all chunks, times the part's scale.
  void gather(int64_t row, int64_t count, const LoraPart& part, float* s) const {
    const int64_t chunks = lora_chunks(k);
    const Floats scale = all(float(part.scale));
    for (int64_t r = 0; r < count; r++)
      for (int64_t j = 0; j < part.rank; j += 16) {
        Floats total = load(sum(0, row + r) + part.first_rank + j);
        for (int64_t chunk = 1; chunk < chunks; chunk++) total = total + load(sum(chunk, row + r) + part.first_rank + j);
        store(s + r * kMostRank + j, total * scale);
      }
  }

  void run() const {
    const int64_t chunks = lora_chunks(k), outputs = rows.num_tiles < 8 ? kOutputs : 4 * kOutputs;
    const int64_t pieces = (n + outputs - 1) / outputs;
    parallel_for(chunks * rows.num_tiles, [&](int64_t task) {
      shrink_tile(rows.tiles + task % rows.num_tiles * 3, task / rows.num_tiles);
    });
    parallel_for(pieces * rows.num_tiles, [&](int64_t task) {
      const int64_t first = task / rows.num_tiles * outputs;
      expand_tile(rows.tiles + task % rows.num_tiles * 3, first, std::min(n, first + outputs));
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
