// Keys and values of one KV head of a sequence in the paged pool (shared/kernels/backend.py).
#pragma once

#include "simd.h"

struct Shape {
  int64_t num_seqs, heads, kv_heads, dim, block_size, num_layers, layer, max_blocks, window;
  int64_t planes;  // 2: keys, then values; 1: a row is both
  int64_t pool_kv_heads;  // of a block, of which these may be some
  float scale;
  float softcap;       // 0 = none
  const float* sinks;  // [heads], or null

  int64_t group() const { return heads / kv_heads; }   // query heads of a KV head
  int64_t width() const { return heads * dim; }        // of a token's query
  float cap() const { return softcap * 1.44269504f; }  // of a score, both to powers of 2
  float first_best(int64_t head, float none) const { return sinks ? sinks[head] * 1.44269504f : none; }
  float first_total() const { return sinks ? 1.0f : 0.0f; }
  int64_t first_seen(int64_t position) const { return window > 0 && position >= window ? position - window + 1 : 0; }
};

// A score bounded by ± cap.
inline Floats capped(Floats score, float cap) { return tanh16(score / all(cap)) * all(cap); }

template <typename T>
struct Pool {
  const T* blocks;
  const Shape& s;
  const int32_t* table;  // of one sequence
  int64_t head;

  const T* keys(int64_t block) const {
    int64_t plane = s.pool_kv_heads * s.block_size * s.dim;
    return blocks + (int64_t(table[block]) * s.num_layers + s.layer) * s.planes * plane + head * s.block_size * s.dim;
  }
  int64_t to_values() const { return (s.planes - 1) * s.pool_kv_heads * s.block_size * s.dim; }  // from a key to its value

  // Calls f(keys, position, count) for runs of positions [first, last) that lie in one block, at most `most` long.
  template <typename F>
  void runs(int64_t first, int64_t last, int64_t most, F&& f) const {
    while (first < last) {
      const int64_t block = first / s.block_size, offset = first % s.block_size;
      int64_t count = s.block_size - offset;
      count = count < most ? count : most;
      count = count < last - first ? count : last - first;
      f(keys(block) + offset * s.dim, first, count);
      first += count;
    }
  }
};
