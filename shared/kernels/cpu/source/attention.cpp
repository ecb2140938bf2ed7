// Attention over paged KV. One task is one KV head of one sequence (decode) or of one tile of its queries (prefill).
//
// Tiles of 64 keys: K is laid out transposed and wide once a tile, the scores and the weighted sum of V are products
// of small fp32 matrices held in registers, the softmax between them is the online one (Milakov and Gimelshein 2018,
// arXiv:1805.02867; tiled as in FlashAttention-2, Dao 2023, arXiv:2307.08691).
#include "simd.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

namespace {

constexpr int64_t kTile = 64;    // keys
constexpr int64_t kQueries = 32;  // query tokens of one task

struct Shape {
  int64_t num_seqs, heads, kv_heads, dim, block_size, num_layers, layer, max_blocks, window;
  float scale;
};

template <typename T>
struct Pool {
  const T* blocks;
  const Shape& s;
  const int32_t* table;  // of one sequence
  int64_t head;

  const T* keys(int64_t block) const {
    int64_t half = s.kv_heads * s.block_size * s.dim;
    return blocks + (int64_t(table[block]) * s.num_layers + s.layer) * 2 * half + head * s.block_size * s.dim;
  }
  const T* values(int64_t block) const { return keys(block) + s.kv_heads * s.block_size * s.dim; }
};

// c[R][16 V] += a[R][k] b[k][...]; a row i at a + i * a_stride, b row j at b + j * b_stride.
template <int R, int V>
void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t k, float* c, int64_t c_stride) {
  __m512 acc[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = _mm512_loadu_ps(c + r * c_stride + 16 * v);
  for (int64_t j = 0; j < k; j++) {
    __m512 bv[V];
    for (int v = 0; v < V; v++) bv[v] = _mm512_loadu_ps(b + j * b_stride + 16 * v);
    for (int r = 0; r < R; r++) {
      __m512 av = _mm512_set1_ps(a[r * a_stride + j]);
      for (int v = 0; v < V; v++) acc[r][v] = _mm512_fmadd_ps(av, bv[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) _mm512_storeu_ps(c + r * c_stride + 16 * v, acc[r][v]);
}

template <int V>
void multiply_rows(
    int64_t rows, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t k, float* c,
    int64_t c_stride) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) multiply<6, V>(a + r * a_stride, a_stride, b, b_stride, k, c + r * c_stride, c_stride);
  for (; r + 2 <= rows; r += 2) multiply<2, V>(a + r * a_stride, a_stride, b, b_stride, k, c + r * c_stride, c_stride);
  for (; r < rows; r++) multiply<1, V>(a + r * a_stride, a_stride, b, b_stride, k, c + r * c_stride, c_stride);
}

// c[rows][cols] += a b, cols a multiple of 16.
void product(
    int64_t rows, int64_t cols, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t k, float* c,
    int64_t c_stride) {
  int64_t n = 0;
  for (; n + 64 <= cols; n += 64) multiply_rows<4>(rows, a, a_stride, b + n, b_stride, k, c + n, c_stride);
  for (; n < cols; n += 16) multiply_rows<1>(rows, a, a_stride, b + n, b_stride, k, c + n, c_stride);
}

// Scratch of one thread, for `rows` rows of queries.
struct Scratch {
  std::vector<float> query, keys, values, scores, out, best, sum;

  Scratch(int64_t rows, int64_t dim)
      : query(rows * dim), keys(dim * kTile), values(kTile * dim), scores(rows * kTile), out(rows * dim), best(rows),
        sum(rows) {}
};

// keys[d][t] and values[t][d] of positions first … first + count - 1, wide; the rest of the tile is zero.
template <typename T>
void load_tile(const Pool<T>& pool, int64_t first, int64_t count, Scratch& scratch) {
  const int64_t dim = pool.s.dim, block_size = pool.s.block_size;
  for (int64_t t = 0; t < kTile; t++) {
    float* value = scratch.values.data() + t * dim;
    if (t >= count) {
      std::memset(value, 0, dim * sizeof(float));
      for (int64_t d = 0; d < dim; d++) scratch.keys[d * kTile + t] = 0.0f;
      continue;
    }
    int64_t position = first + t, block = position / block_size, offset = position % block_size;
    const T *k = pool.keys(block) + offset * dim, *v = pool.values(block) + offset * dim;
    for (int64_t d = 0; d < dim; d += 16) {
      alignas(64) float wide[16];
      _mm512_store_ps(wide, load16(k + d));
      for (int i = 0; i < 16; i++) scratch.keys[(d + i) * kTile + t] = wide[i];
      _mm512_storeu_ps(value + d, load16(v + d));
    }
  }
}

// One row of scores [kTile] for keys from `first` on, of which [low, high) are seen: weights in place, state moved on.
void softmax_row(float* scores, int64_t low, int64_t high, float scale, float& best, float& sum, float* out, int64_t dim) {
  float top = best;
  for (int64_t t = 0; t < kTile; t++) {
    bool seen = t >= low && t < high;
    scores[t] = seen ? scores[t] * scale : -INFINITY;
    top = std::max(top, scores[t]);
  }
  if (top == -INFINITY) {  // nothing seen yet: a window that begins later
    std::memset(scores, 0, kTile * sizeof(float));
    return;
  }
  __m512 shift = _mm512_set1_ps(top), total = _mm512_setzero_ps();
  for (int64_t t = 0; t < kTile; t += 16) {
    __m512 e = exp16(_mm512_max_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + t), shift), _mm512_set1_ps(-1e30f)));
    _mm512_storeu_ps(scores + t, e);
    total = _mm512_add_ps(total, e);
  }
  float fade = best == -INFINITY ? 0.0f : std::exp(best - top);
  sum = sum * fade + _mm512_reduce_add_ps(total);
  best = top;
  if (fade != 1.0f) {
    __m512 f = _mm512_set1_ps(fade);
    for (int64_t d = 0; d < dim; d += 16) _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), f));
  }
}

// `count` query tokens of one sequence, the first at position `start`, all query heads of one KV head.
template <typename T>
void attend(const Pool<T>& pool, const T* query, T* out, int64_t start, int64_t count, Scratch& scratch) {
  const Shape& s = pool.s;
  const int64_t group = s.heads / s.kv_heads, rows = count * group, dim = s.dim, width = s.heads * dim;
  for (int64_t r = 0; r < rows; r++) {
    const T* source = query + (r / group) * width + (pool.head * group + r % group) * dim;
    for (int64_t d = 0; d < dim; d += 16) _mm512_storeu_ps(scratch.query.data() + r * dim + d, load16(source + d));
  }
  std::fill_n(scratch.out.begin(), rows * dim, 0.0f);
  std::fill_n(scratch.best.begin(), rows, -INFINITY);
  std::fill_n(scratch.sum.begin(), rows, 0.0f);
  const int64_t end = start + count;  // keys below it are seen by some row
  int64_t first = s.window > 0 ? std::max<int64_t>(0, start - s.window + 1) / kTile * kTile : 0;
  for (; first < end; first += kTile) {
    load_tile(pool, first, std::min(kTile, end - first), scratch);
    std::fill_n(scratch.scores.begin(), rows * kTile, 0.0f);
    product(rows, kTile, scratch.query.data(), dim, scratch.keys.data(), kTile, dim, scratch.scores.data(), kTile);
    for (int64_t r = 0; r < rows; r++) {
      int64_t position = start + r / group;
      int64_t low = s.window > 0 ? std::max<int64_t>(0, position - s.window + 1 - first) : 0;
      int64_t high = std::min(kTile, position + 1 - first);
      softmax_row(
          scratch.scores.data() + r * kTile, low, high, s.scale, scratch.best[r], scratch.sum[r],
          scratch.out.data() + r * dim, dim);
    }
    product(rows, dim, scratch.scores.data(), kTile, scratch.values.data(), dim, kTile, scratch.out.data(), dim);
  }
  for (int64_t r = 0; r < rows; r++) {
    T* target = out + (r / group) * width + (pool.head * group + r % group) * dim;
    __m512 scale = _mm512_set1_ps(1.0f / scratch.sum[r]);
    for (int64_t d = 0; d < dim; d += 16)
      store16(target + d, _mm512_mul_ps(_mm512_loadu_ps(scratch.out.data() + r * dim + d), scale));
  }
}

// One query token: keys and values are read where they lie, each once, for all query heads of the KV head.
template <typename T>
void attend_one(const Pool<T>& pool, const T* query, T* out, int64_t length, std::vector<float>& scores, float* wide) {
  const Shape& s = pool.s;
  const int64_t group = s.heads / s.kv_heads, dim = s.dim, block_size = s.block_size;
  const T* source = query + pool.head * group * dim;
  T* target = out + pool.head * group * dim;
  for (int64_t i = 0; i < group * dim; i += 16) _mm512_storeu_ps(wide + i, load16(source + i));
  const int64_t low = s.window > 0 ? std::max<int64_t>(0, length - s.window) : 0;
  const int64_t padded = (length - low + 15) / 16 * 16;
  if (int64_t(scores.size()) < group * padded) scores.resize(group * padded);
  for (int64_t position = low; position < length; position++) {
    const T* k = pool.keys(position / block_size) + position % block_size * dim;
    for (int64_t g = 0; g < group; g++) {
      __m512 acc = _mm512_setzero_ps();
      for (int64_t d = 0; d < dim; d += 16) acc = _mm512_fmadd_ps(load16(k + d), _mm512_loadu_ps(wide + g * dim + d), acc);
      scores[g * padded + position - low] = _mm512_reduce_add_ps(acc) * s.scale;
    }
  }
  float sums[64];
  for (int64_t g = 0; g < group; g++) {
    float* row = scores.data() + g * padded;
    for (int64_t t = length - low; t < padded; t++) row[t] = -INFINITY;
    __m512 top = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int64_t t = 0; t < padded; t += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(row + t));
    __m512 shift = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int64_t t = 0; t < padded; t += 16) {
      __m512 e = exp16(_mm512_max_ps(_mm512_sub_ps(_mm512_loadu_ps(row + t), shift), _mm512_set1_ps(-1e30f)));
      _mm512_storeu_ps(row + t, e);
      total = _mm512_add_ps(total, e);
    }
    sums[g] = _mm512_reduce_add_ps(total);
  }
  std::fill_n(wide, group * dim, 0.0f);
  for (int64_t position = low; position < length; position++) {
    const T* v = pool.values(position / block_size) + position % block_size * dim;
    for (int64_t d = 0; d < dim; d += 16) {
      __m512 value = load16(v + d);
      for (int64_t g = 0; g < group; g++) {
        float* sum = wide + g * dim + d;
        __m512 weight = _mm512_set1_ps(scores[g * padded + position - low]);
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(weight, value, _mm512_loadu_ps(sum)));
      }
    }
  }
  for (int64_t i = 0; i < group * dim; i += 16)
    store16(target + i, _mm512_div_ps(_mm512_loadu_ps(wide + i), _mm512_set1_ps(sums[i / dim])));
}

struct Task {
  int64_t seq, head, first, count;  // query tokens [first, first + count) of the step
};

template <typename T>
void paged_attention(
    const T* query, const T* blocks, const int32_t* tables, const int32_t* query_start, const int32_t* seq_lens, T* out,
    const Shape& s) {
  const int64_t width = s.heads * s.dim, group = s.heads / s.kv_heads;
  std::vector<Task> tasks;
  for (int64_t i = 0; i < s.num_seqs; i++)
    for (int64_t first = query_start[i]; first < query_start[i + 1]; first += kQueries)
      for (int64_t head = 0; head < s.kv_heads; head++)
        tasks.push_back({i, head, first, std::min<int64_t>(kQueries, query_start[i + 1] - first)});
  // The longest first: what is left at the end is short, and no thread waits long for another.
  auto cost = [&](const Task& t) { return t.count * (seq_lens[t.seq] - (query_start[t.seq + 1] - t.first)); };
  std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
  std::atomic<int64_t> next{0};
  const int64_t num_tasks = tasks.size();
#pragma omp parallel if (num_tasks > 1)
  {
    Scratch scratch(kQueries * group, s.dim);
    std::vector<float> scores, wide(group * s.dim);
    for (int64_t i; (i = next.fetch_add(1)) < num_tasks;) {
      const Task& task = tasks[i];
      Pool<T> pool{blocks, s, tables + task.seq * s.max_blocks, task.head};
      int64_t start = seq_lens[task.seq] - (query_start[task.seq + 1] - task.first);
      const T* q = query + task.first * width;
      T* o = out + task.first * width;
      if (task.count == 1)
        attend_one(pool, q, o, start + 1, scores, wide.data());
      else
        attend(pool, q, o, start, task.count, scratch);
    }
  }
}

}  // namespace

// query, out [tokens, heads, dim]; blocks, tables, query_start, seq_lens as in shared/kernels/batch.py; dim a multiple
// of 16; heads / kv_heads at most 64. sizes: num_seqs, heads, kv_heads, dim, block_size, num_layers, layer, max_blocks,
// window (0 = none).
extern "C" void tandem_paged_attention(
    const void* query, const void* blocks, const int32_t* tables, const int32_t* query_start, const int32_t* seq_lens,
    void* out, float scale, const int64_t* sizes, int is_bf16) {
  Shape s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], scale};
  if (is_bf16)
    paged_attention((const bf16*)query, (const bf16*)blocks, tables, query_start, seq_lens, (bf16*)out, s);
  else
    paged_attention((const float*)query, (const float*)blocks, tables, query_start, seq_lens, (float*)out, s);
}
