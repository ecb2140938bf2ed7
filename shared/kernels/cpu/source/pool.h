// Keys and values of one KV head of a sequence in the paged pool (shared/kernels/backend.py).
#pragma once

#include "kv_codes.h"
#include "simd.h"

struct Shape {
  int64_t num_seqs, heads, kv_heads, dim, block_size, layer, max_blocks, window, is_chunked;
  float scale;
  float softcap;       // 0 = none
  const float* sinks;  // [heads], or null

  int64_t group() const { return heads / kv_heads; }   // query heads of a KV head
  int64_t width() const { return heads * dim; }        // of a token's query
  float cap() const { return softcap * 1.44269504f; }  // of a score, both to powers of 2
  float first_best(int64_t head, float none) const { return sinks ? sinks[head] * 1.44269504f : none; }
  float first_total() const { return sinks ? 1.0f : 0.0f; }
  int64_t first_seen(int64_t position) const {
    if (is_chunked) return position / window * window;
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
  // What 16 queries see first, counted from `first`; below zero anything may stand for zero.
  Words first_seen(const int32_t* positions, int64_t first) const {
    if (window == 0) return no_words();
    if (!is_chunked) return minus(load_words(positions), all_words(uint32_t(first + window - 1)));
    int32_t found[16];
    for (int i = 0; i < 16; i++) found[i] = int32_t(first_seen(positions[i]) - first);
    return load_words(found);
  }
};

// A score bounded by ± cap.
inline Floats capped(Floats score, float cap) { return tanh16(score / all(cap)) * all(cap); }

// Some tokens' rows of one head, one behind the other, and where they are codes their scales.
template <typename T>
struct Run {
  const T* rows;
  const float* scales;

  Run moved(int64_t bytes) const {  // the same tokens' of another head, or values of keys
    return {(const T*)((const char*)rows + bytes), (const float*)((const char*)scales + bytes)};
  }
  // Of `count` tokens, up to 16; the other lanes are 0.
  Floats scales_of(int64_t count) const { return as_floats(load_words(scales, count)); }
};

template <typename T>
struct Pool {
  const PoolView& view;
  const Shape& s;
  const int32_t* table;  // of one sequence
  int64_t head;

  Run<T> keys(int64_t position) const {
    const int64_t block = position / s.block_size, offset = position % s.block_size;
    const char* run = (const char*)view.memory + int64_t(table[block]) * view.block_bytes + s.layer * view.layer_bytes +
                      head * view.head_bytes;
    return {(const T*)run + offset * s.dim, (const float*)(run + s.block_size * s.dim * sizeof(T)) + offset};
  }
  int64_t to_values() const { return view.plane_bytes; }  // from a key to its value

  // Calls f(keys, position, count) for runs of positions [first, last) that lie in one block, at most `most` long.
  template <typename F>
  void runs(int64_t first, int64_t last, int64_t most, F&& f) const {
    while (first < last) {
      int64_t count = s.block_size - first % s.block_size;
      count = count < most ? count : most;
      count = count < last - first ? count : last - first;
      f(keys(first), first, count);
      first += count;
    }
  }
};
