// Low-rank additions to projections (shared/kernels/lora): y += scale (x a^T) b^T for the rows of a step that have one.
#pragma once

#include <cstdint>

struct LoraPart {  // to some adjacent outputs
  const void* b;   // as a: fp32 [outputs / 16][rank][16], or bf16 [outputs / 16][rank / 2][16][2]
  int64_t begin, outputs, first_rank, rank;
  double scale;
};

struct Lora {     // all additions to one projection
  const void* a;  // fp32 [ranks / 16][k][16], or bf16 [ranks / 16][k / 2][16][2]
  int64_t ranks;  // of all parts together; a part's rank is a multiple of 16, as is its number of outputs
  int64_t num_parts;
  LoraPart parts[4];
};

// Rows that have an addition, sorted by which; a tile is up to kLoraRows of these, of one addition.
struct LoraRows {
  const int64_t* order;  // of sorted rows, the rows of x and y
  const int64_t* tiles;  // [num_tiles][3]: addition, first sorted row, one behind the last
  int64_t num_tiles, num_rows;
};

// Additions to the experts of a layer.
struct ExpertLoras {
  const Lora* const* gate_up;  // [adapters][experts], null for none
  const Lora* const* down;
  const int64_t* adapters;  // of each token, -1 for none
  int64_t num_adapters, most_ranks;
};

constexpr int64_t kLoraRows = 32;
constexpr int64_t kLoraChunk = 512;  // inputs whose products a task sums
constexpr int64_t kMostRank = 256;   // of a part

inline int64_t lora_chunks(int64_t k) { return (k + kLoraChunk - 1) / kLoraChunk; }

// x [rows, k], y [rows, n]; loras by addition, null for those that leave this projection alone; sums of lora_chunks(k)
// times num_rows times the most ranks floats. Every sum's order follows from k and the rank alone.
void add_lora(
    const void* x, void* y, int64_t k, int64_t n, const Lora* const* loras, const LoraRows& rows, float* sums,
    int64_t most_ranks, int is_bf16);
