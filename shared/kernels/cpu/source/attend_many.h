// A prompt's attention: tiles of queries times tiles of keys, the softmax online (Milakov and Gimelshein 2018,
// arXiv:1805.02867; tiled as in FlashAttention-2, Dao 2023, arXiv:2307.08691).
//
// Query rows lie along the vectors, 32 to a column block: scores are [key][32], sums [dim][32]. So both products take
// keys and values as their broadcast side, the softmax runs down vectors without a horizontal step, and each row's
// state is one lane.
#pragma once

#include <algorithm>
#include <limits>

#include "gemm.h"
#include "pool.h"

constexpr int64_t kTile = 64;  // keys

// Where the parts of one thread's memory lie, for `rows` query rows.
struct Scratch {
  float *query, *sums, *best, *total, *keys, *values, *scores;  // query, sums: [block][dim][32]; best, total: [rows]
  int32_t* positions;                                            // [rows]
  int64_t blocks;

  Scratch(Workspace& workspace, int64_t rows, int64_t dim) : blocks((rows + kColumns - 1) / kColumns) {
    const int64_t lanes = blocks * kColumns;
    query = workspace.floats(2 * lanes * dim + 3 * lanes + 2 * kTile * dim + kTile * kColumns);
    sums = query + lanes * dim;
    best = sums + lanes * dim;
    total = best + lanes;
    positions = (int32_t*)(total + lanes);
    keys = total + 2 * lanes;            // [dim][kTile]
    values = keys + kTile * dim;         // [kTile][dim]
    scores = values + kTile * dim;       // [kTile][32]
  }
};

// c[m][32] (+)= a b: a(r, j) at a[j * a_step + r] for all m rows.
inline void multiply_rows(int64_t m, const float* a, int64_t a_step, const float* b, int64_t k, float* c, bool add) {
  const Tiles tiles(m);
  for (int64_t t = 0; t < tiles.count; t++)
    with_rows(tiles.size(t), [&](auto rows) {
      multiply_tile<rows.value>(a + tiles.first(t), a_step, b, k, c + tiles.first(t) * kColumns, add);
    });
}

// Keys transposed, values as they are, both wide; the rest of the tile is zero.
template <typename T>
void load_tile(const Pool<T>& pool, int64_t first, int64_t count, const Scratch& scratch) {
  const int64_t dim = pool.s.dim;
  if (count < kTile) std::memset(scratch.keys, 0, 2 * kTile * dim * sizeof(float));
  pool.runs(first, first + count, 16, [&](const T* key, int64_t position, int64_t n) {
    const int64_t t = position - first;
    for (int64_t d = 0; d < dim; d += 16) {
      __m512i v[16];
      for (int i = 0; i < 16; i++) v[i] = i < n ? _mm512_castps_si512(load16(key + i * dim + d)) : _mm512_setzero_si512();
      transpose16(v);
      const __mmask16 kept = __mmask16((1u << n) - 1);
      for (int i = 0; i < 16; i++) _mm512_mask_storeu_epi32(scratch.keys + (d + i) * kTile + t, kept, v[i]);
      for (int i = 0; i < n; i++)
        _mm512_storeu_ps(scratch.values + (t + i) * dim + d, load16(key + pool.to_values() + i * dim + d));
    }
  });
}

// 16 lanes of scores [kTile][32] become weights; the lanes' sums fade to the new maximum. With Masked, a lane sees the
// keys from `low` to `high` of the tile alone.
template <bool Masked>
void softmax_lanes(float* scores, __m512i low, __m512i high, float* best, float* total, float* sums, int64_t dim) {
  const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity()), least = _mm512_set1_ps(-126.0f);
  auto seen = [&](int64_t t) {
    const __m512i key = _mm512_set1_epi32(int(t));
    return __mmask16(_mm512_cmple_epi32_mask(low, key) & _mm512_cmple_epi32_mask(key, high));
  };
  const __m512 before = _mm512_loadu_ps(best);
  __m512 tops[4] = {before, none, none, none};
  for (int64_t t = 0; t < kTile; t += 4)
    for (int i = 0; i < 4; i++) {
      __m512 s = _mm512_loadu_ps(scores + (t + i) * kColumns);
      tops[i] = Masked ? _mm512_mask_max_ps(tops[i], seen(t + i), tops[i], s) : _mm512_max_ps(tops[i], s);
    }
  const __m512 top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
  const __m512 shift = _mm512_max_ps(_mm512_set1_ps(-1e30f), top);  // where nothing was seen yet; NaN stays
  __m512 sum = _mm512_setzero_ps();
  for (int64_t t = 0; t < kTile; t++) {
    __m512 x = _mm512_sub_ps(_mm512_loadu_ps(scores + t * kColumns), shift);
    __m512 e = exp2_16(_mm512_max_ps(least, x));
    if (Masked) e = _mm512_maskz_mov_ps(seen(t), e);
    _mm512_storeu_ps(scores + t * kColumns, e);
    sum = _mm512_add_ps(sum, e);
  }
  const __m512 gap = _mm512_sub_ps(before, shift);
  const __mmask16 some = _mm512_cmp_ps_mask(gap, least, _CMP_NLT_UQ);
  const __m512 fade = _mm512_maskz_mov_ps(some, exp2_16(_mm512_max_ps(least, gap)));
  _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_loadu_ps(total), fade, sum));
  _mm512_storeu_ps(best, top);
  if (_mm512_cmp_ps_mask(top, before, _CMP_NEQ_UQ))
    for (int64_t d = 0; d < dim; d++) {
      float* row = sums + d * kColumns;
      _mm512_storeu_ps(row, _mm512_mul_ps(_mm512_loadu_ps(row), fade));
    }
}

// One tile of keys against one block of 32 query rows.
inline void attend_tile(const Shape& s, int64_t first, int64_t block, const Scratch& scratch) {
  const int64_t dim = s.dim, lane = block * kColumns;
  const int32_t* positions = scratch.positions + lane;
  if (positions[kColumns - 1] < first) return;                                    // all keys lie ahead of all rows
  if (s.first_seen(positions[0]) >= first + kTile) return;                        // and all have slid out of the window
  const bool masked = positions[0] < first + kTile - 1 || s.first_seen(positions[kColumns - 1]) > first;
  float* sums = scratch.sums + lane * dim;
  multiply_rows(kTile, scratch.keys, kTile, scratch.query + lane * dim, dim, scratch.scores, false);
  for (int64_t half = 0; half < kColumns; half += 16) {
    const __m512i high = _mm512_sub_epi32(_mm512_loadu_si512(positions + half), _mm512_set1_epi32(int(first)));
    const __m512i low = s.window > 0 ? _mm512_sub_epi32(high, _mm512_set1_epi32(int(s.window - 1))) : _mm512_setzero_si512();
    auto softmax = masked ? softmax_lanes<true> : softmax_lanes<false>;
    float *best = scratch.best + lane + half, *total = scratch.total + lane + half;
    softmax(scratch.scores + half, low, high, best, total, sums + half, dim);
  }
  multiply_rows(dim, scratch.values, dim, scratch.scores, kTile, sums, true);
}

// `count` query tokens of dtype T of one sequence, the first at position `start`, all query heads of one KV head.
template <typename T, typename KV>
void attend_many(const Pool<KV>& pool, const T* query, T* out, int64_t start, int64_t count, Workspace& workspace) {
  const Shape& s = pool.s;
  const int64_t group = s.group(), rows = count * group, dim = s.dim;
  const Scratch scratch(workspace, rows, dim);
  auto offset = [&](int64_t row) { return row / group * s.width() + (pool.head * group + row % group) * dim; };
  const __m512 scale = _mm512_set1_ps(s.scale * 1.44269504f);  // to powers of 2
  for (int64_t lane = 0; lane < scratch.blocks * kColumns; lane += 16) {
    for (int i = 0; i < 16; i++) {
      scratch.positions[lane + i] = int32_t(start + std::min(lane + i, rows - 1) / group);
      scratch.best[lane + i] = -std::numeric_limits<float>::infinity();
      scratch.total[lane + i] = 0.0f;
    }
    for (int64_t d = 0; d < dim; d += 16) {
      __m512i v[16];
      for (int i = 0; i < 16; i++)  // lanes past the last row repeat it
        v[i] = _mm512_castps_si512(_mm512_mul_ps(load16(query + offset(std::min(lane + i, rows - 1)) + d), scale));
      transpose16(v);
      float* target = scratch.query + lane / kColumns * kColumns * dim + d * kColumns + lane % kColumns;
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(target + i * kColumns, v[i]);
    }
  }
  std::memset(scratch.sums, 0, scratch.blocks * kColumns * dim * sizeof(float));
  const int64_t end = start + count;  // keys below it are seen by some row
  for (int64_t first = s.first_seen(start) / kTile * kTile; first < end; first += kTile) {
    load_tile(pool, first, std::min(kTile, end - first), scratch);
    for (int64_t block = 0; block < scratch.blocks; block++) attend_tile(s, first, block, scratch);
  }
  for (int64_t lane = 0; lane < rows; lane += 16) {
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_loadu_ps(scratch.total + lane));
    for (int64_t d = 0; d < dim; d += 16) {
      const float* source = scratch.sums + lane / kColumns * kColumns * dim + d * kColumns + lane % kColumns;
      __m512i v[16];
      for (int i = 0; i < 16; i++) v[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(source + i * kColumns), inverse));
      transpose16(v);
      for (int i = 0; i < 16 && lane + i < rows; i++) store16(out + offset(lane + i) + d, _mm512_castsi512_ps(v[i]));
    }
  }
}
