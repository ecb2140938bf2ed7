// The gated delta rule with its convolution and its norm (shared/kernels/delta/reference.py), over states in a pool. A
// task is a sequence's key head with the value heads that it serves: no other reads or writes its channels and matrices.
// One token updates its matrices where they lie; of a prompt kChunk tokens are solved for together.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "ops.h"
#include "simd.h"
#include "thread_pool.h"

// Of a product: nothing is 0, the result is not wanted above its diagonal, or the rows are 0 there.
enum Triangle { kOfNone, kOfResult, kOfRows };

#ifdef TANDEM_AMX
#include "delta_tiles.h"
#endif

// As in shared/kernels/cpu/delta.py.
struct DeltaLayer {
  const float *conv, *decay, *decay_bias;  // [taps][channels], [value heads], [value heads][decays of one]
  const void* norm;                        // [value dim]
  int64_t key_heads, value_heads, key_dim, value_dim, taps, number, parts;
  int64_t by_channel;  // a head has key dim decays, and gates pass a sigmoid; else one decay and SiLU
};
struct DeltaStep {
  const void* projected;  // [tokens][stride]
  int64_t stride;
  float* words;  // the pool, in numbers: [blocks][runs][parts][run_words]
  int64_t block_stride, num_runs, run_words, run_stride, part_stride;
  const int32_t* states;   // [sequences][3][num_states]: blocks to read, to write on the way, and to write behind
  int64_t num_states, num_seqs, block_size;
  int64_t is_by_token;     // `states` are [tokens][3][num_states], and each token reads what the one before it wrote
  const int32_t *query_start, *seq_lens;
  void* out;  // [tokens][value heads * value dim]
};

namespace {

constexpr int64_t kChunk = 64;
constexpr float kNormEps = 1e-6f;
constexpr int kTileRows = kVectors == 32 ? 8 : 4, kTileVectors = kVectors == 32 ? 2 : 1;  // of a product's sums
constexpr int kRowVectors = kVectors == 32 ? 8 : 2;  // of a matrix's row, at once in a step of one token
constexpr int64_t kAheadRows = 8;
constexpr int kSolved = kVectors == 32 ? 4 : 2;      // of a chunk's updates, at once

float rounded_to(const float*, float x) { return x; }
float rounded_to(const bf16*, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return x;
  bits += 0x7fff + (bits >> 16 & 1);
  bits &= 0xffff0000;
  std::memcpy(&x, &bits, 4);
  return x;
}

Floats sigmoid16(Floats x) {
  const Floats e = exp16(smaller(all(88.0f), larger(all(-87.0f), zeros() - x)));  // NaN stays NaN
  return all(1.0f) / (all(1.0f) + e);
}

// log(1 + exp(x)), as exact where it is small: with e = exp(-|x|) and s = e / (2 + e), log(1 + e) = 2 artanh(s), s <= 1/3.
Floats softplus16(Floats x) {
  const Floats up = larger(x, zeros()), e = exp16(x - up - up), s = e / (all(2.0f) + e), s2 = s * s;
  Floats y = all(2.0f / 15);
  y = plus_product(all(2.0f / 13), y, s2);
  y = plus_product(all(2.0f / 11), y, s2);
  y = plus_product(all(2.0f / 9), y, s2);
  y = plus_product(all(2.0f / 7), y, s2);
  y = plus_product(all(2.0f / 5), y, s2);
  y = plus_product(all(2.0f / 3), y, s2);
  return plus_product(up, s, plus_product(all(2.0f), y, s2));
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// c[rows][16 V] of a product over `depth`; calls f(row, column, sums). Each loop over sums is unrolled whole: else they would
// lie in memory.
template <int R, int V, typename F>
void product_tile(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, int64_t row, int64_t column, F& f) {
  static_assert(R <= 8 && V <= 2);
  Floats c[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) c[r][v] = zeros();
  for (int64_t d = 0; d < depth; d++) {
    Floats w[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) w[v] = load(b + d * ldb + column + 16 * v);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Floats x = all(a[(row + r) * lda + d]);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) c[r][v] = plus_product(c[r][v], x, w[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) f(row + r, column + 16 * v, c[r][v]);
}

template <Triangle kTriangle, int R, int V, typename F>
void product_rows(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, int64_t row, int64_t column, F& f) {
  if (kTriangle == kOfResult && column >= row + R) return;
  product_tile<R, V>(a, lda, b, ldb, kTriangle == kOfRows ? std::min(depth, row + R) : depth, row, column, f);
}

template <Triangle kTriangle, int V, typename F>
void product_columns(
    const float* a, int64_t lda, const float* b, int64_t ldb, int64_t rows, int64_t depth, int64_t column, F& f) {
  int64_t row = 0;
  for (; row + kTileRows <= rows; row += kTileRows)
    product_rows<kTriangle, kTileRows, V>(a, lda, b, ldb, depth, row, column, f);
  for (; row < rows; row++) product_rows<kTriangle, 1, V>(a, lda, b, ldb, depth, row, column, f);
}

// a [rows][depth] times b [depth][columns], columns a multiple of 16; calls f(row, column, 16 sums).
template <Triangle kTriangle, typename F>
void product(
    const float* a, int64_t lda, const float* b, int64_t ldb, int64_t rows, int64_t depth, int64_t columns, F&& f) {
  int64_t column = 0;
  for (; column + 16 * kTileVectors <= columns; column += 16 * kTileVectors)
    product_columns<kTriangle, kTileVectors>(a, lda, b, ldb, rows, depth, column, f);
  for (; column < columns; column += 16) product_columns<kTriangle, 1>(a, lda, b, ldb, rows, depth, column, f);
}

// Products of a chunk's tokens with each other and with a state. Queries and keys are rows of k numbers; calls of f as
// of `product`.
template <typename T>
class Products {
 public:
  static int64_t room(int64_t, int64_t) { return 0; }  // in numbers
  Products(int64_t k, int64_t v, float*) : k_(k), v_(v) {}

  // active [n][channels]: queries, then keys; keys [k][kChunk], the same in columns.
  void take_tokens(const float* active, int64_t channels, const float* keys, int64_t n) {
    active_ = active, channels_ = channels, keys_ = keys, n_ = n;
  }
  void take_state(const float* state) { state_ = state; }  // [k][v]

  // Queries, or keys, times keys, up to the diagonal.
  template <bool kKeys, typename F>
  void with_keys(F&& f) const {
    product<kOfResult>(active_ + (kKeys ? k_ : 0), channels_, keys_, kChunk, n_, k_, (n_ + 15) / 16 * 16, f);
  }
  template <bool kKeys, typename F>
  void with_state(F&& f) const {
    product<kOfNone>(active_ + (kKeys ? k_ : 0), channels_, state_, v_, n_, k_, v_, f);
  }
  // Rows of the triangle [n][kChunk] times updates [n][v].
  template <typename F>
  void within(const float* rows, const float* updates, F&& f) const {
    product<kOfRows>(rows, kChunk, updates, v_, n_, n_, v_, f);
  }
  // Keys, of which the tokens are columns, times updates.
  template <typename F>
  void of_tokens(const float* updates, F&& f) const {
    product<kOfNone>(keys_, kChunk, updates, v_, k_, n_, v_, f);
  }

 private:
  int64_t k_, v_;
  const float *active_ = nullptr, *keys_ = nullptr, *state_ = nullptr;
  int64_t channels_ = 0, n_ = 0;
};

#ifdef TANDEM_AMX
template <>
class Products<bf16> {
 public:
  static int64_t room(int64_t k, int64_t v) {
    const int64_t wide = whole_tiles(k), deep = whole_tiles(v);
    return kChunk * (4 * wide + kChunk + deep) + wide * deep + 16 * 14;
  }
  Products(int64_t k, int64_t v, float* memory) : k_(k), v_(v) {
    const int64_t wide = whole_tiles(k), deep = whole_tiles(v);
    memory += -(uintptr_t(memory) / 4) % 16;  // tiles lie in whole lines of the cache
    auto rows = [&](int64_t count, int64_t depth) {
      const RowHalves found{(bf16*)memory, (bf16*)memory + count * depth, depth};
      memory += (count * depth + 15) / 16 * 16;
      return found;
    };
    auto pairs = [&](int64_t depth, int64_t columns) {
      const PairHalves found{(uint32_t*)memory, (uint32_t*)memory + depth / 2 * columns, columns};
      memory += depth * columns;
      return found;
    };
    queries_ = rows(kChunk, wide), keys_ = rows(kChunk, wide), tokens_ = rows(wide, kChunk), within_ = rows(kChunk, kChunk);
    key_pairs_ = pairs(wide, kChunk), state_ = pairs(wide, deep), updates_ = pairs(kChunk, deep);
    tiles_.shape(16, 16);
  }

  void take_tokens(const float* active, int64_t channels, const float* keys, int64_t n) {
    n_ = n;
    queries_.split(active, channels, n, k_);
    keys_.split(active + k_, channels, n, k_);
    tokens_.split(keys, kChunk, k_, kChunk);
    key_pairs_.split(keys, kChunk, k_, kChunk);
  }
  void take_state(const float* state) { state_.split(state, v_, k_, v_); }

  template <bool kKeys, typename F>
  void with_keys(F&& f) const {
    tile_product<kOfResult>(kKeys ? keys_ : queries_, key_pairs_, n_, whole_tiles(n_), f);
  }
  template <bool kKeys, typename F>
  void with_state(F&& f) const {
    tile_product<kOfNone>(kKeys ? keys_ : queries_, state_, n_, v_, f);
  }
  template <typename F>
  void within(const float* rows, const float* updates, F&& f) {
    within_.split(rows, kChunk, n_, kChunk);
    updates_.split(updates, v_, n_, v_);
    tile_product<kOfRows>(within_, updates_, n_, v_, f, whole_tiles(n_));
  }
  template <typename F>
  void of_tokens(const float* updates, F&& f) {
    updates_.split(updates, v_, n_, v_);
    tile_product<kOfNone>(tokens_, updates_, k_, v_, f, whole_tiles(n_));
  }

 private:
  int64_t k_, v_, n_ = 0;
  RowHalves queries_, keys_, tokens_, within_;
  PairHalves key_pairs_, state_, updates_;
  TwoByTwo tiles_;
};
#endif

template <typename T>
struct Task {
  const DeltaLayer& layer;
  const DeltaStep& step;
  int64_t seq, key_head;  // by token, the token
  std::vector<float>& memory;

  const int64_t k = layer.key_dim, v = layer.value_dim, times = layer.value_heads / layer.key_heads;
  const int64_t wide = times * v, channels = 2 * k + wide;  // of this task
  const int64_t mixed = 2 * layer.key_heads * k + layer.value_heads * v, before = layer.taps - 1;
  // Of the part of the states that its head belongs to: its channels, its numbers of all layers before this one.
  const int64_t in_part = layer.key_heads / layer.parts, part = key_head / in_part, part_head = key_head % in_part;
  const int64_t part_mixed = mixed / layer.parts, matrices = in_part * times * k * v;
  const int64_t first_number = layer.number * (matrices + before * part_mixed);
  const int32_t* ids = step.states + seq * 3 * step.num_states;

  enum Place { kRead = 0, kFilled = 1, kLast = 2 };

  bool has_state() const { return ids[kRead * step.num_states] >= 0; }

  // A number of the part, and how many lie behind each other from there on.
  std::pair<float*, int64_t> find(Place place, int64_t number) const {
    const int64_t words = step.num_runs * step.run_words, block = number / words, run = number % words / step.run_words;
    const int64_t offset = number % step.run_words;
    float* found = step.words + int64_t(ids[place * step.num_states + block]) * step.block_stride;
    return {found + run * step.run_stride + part * step.part_stride + offset, step.run_words - offset};
  }
  // Calls f(numbers, offset, count) for each of some numbers that lie behind each other.
  template <typename F>
  void runs(Place place, int64_t first, int64_t count, F&& f) const {
    for (int64_t at = 0; at < count;) {
      const auto [numbers, most] = find(place, first + at);
      const int64_t length = std::min(count - at, most);
      f(numbers, at, length);
      at += length;
    }
  }
  void read(int64_t first, int64_t count, float* to) const {
    if (!has_state()) return void(std::fill(to, to + count, 0.0f));
    runs(kRead, first, count, [&](float* from, int64_t at, int64_t n) { std::memcpy(to + at, from, 4 * n); });
  }
  void write(Place place, int64_t first, int64_t count, const float* from) const {
    runs(place, first, count, [&](float* to, int64_t at, int64_t n) { std::memcpy(to, from + at, 4 * n); });
  }

  // Calls f(first of the channels, first of this task's, count) for queries, keys and values: of `heads` key heads, of
  // which the task has the one with that number.
  template <typename F>
  void parts(int64_t heads, int64_t number, F&& f) const {
    f(number * k, 0, k);
    f(heads * k + number * k, k, k);
    f(2 * heads * k + number * wide, 2 * k, wide);
  }
  template <typename F>
  void parts(F&& f) const {
    parts(layer.key_heads, key_head, f);
  }
  void read_tail(float* inputs) const {  // [before][channels]
    for (int64_t tap = 0; tap < before; tap++)
      parts(in_part, part_head, [&](int64_t from, int64_t to, int64_t n) {
        read(first_number + matrices + tap * part_mixed + from, n, inputs + tap * channels + to);
      });
  }
  void write_tail(Place place, const float* inputs) const {
    for (int64_t tap = 0; tap < before; tap++)
      parts(in_part, part_head, [&](int64_t to, int64_t from, int64_t n) {
        write(place, first_number + matrices + tap * part_mixed + to, n, inputs + tap * channels + from);
      });
  }
  int64_t matrix(int64_t h) const { return first_number + (part_head * times + h) * k * v; }  // of its value heads

  // The inputs of `count` tokens behind those before them, and what the convolution makes of them [count][channels].
  void convolve(int64_t token, int64_t count, float* inputs, float* active) const {
    const T* rows = (const T*)step.projected + token * step.stride;
    for (int64_t t = 0; t < count; t++) {
      parts([&](int64_t from, int64_t to, int64_t n) {
        for (int64_t i = 0; i < n; i += 16)
          store(inputs + (before + t) * channels + to + i, load16(rows + t * step.stride + from + i));
      });
      parts([&](int64_t from, int64_t to, int64_t n) {
        for (int64_t i = 0; i < n; i += 16) {
          Floats sum = zeros();
          for (int64_t tap = 0; tap <= before; tap++)
            sum = plus_product(
                sum, load(inputs + (t + tap) * channels + to + i), load(layer.conv + tap * mixed + from + i));
          sum = rounded_as((const T*)nullptr, sum);
          store(active + t * channels + to + i, rounded_as((const T*)nullptr, sum * sigmoid16(sum)));
        }
      });
      normalise(active + t * channels, 1.0f / std::sqrt(float(k)));
      normalise(active + t * channels + k, 1.0f);
    }
  }
  void normalise(float* x, float scale) const {
    Floats squares = zeros();
    for (int64_t i = 0; i < k; i += 16) {
      const Floats y = load(x + i);
      squares = plus_product(squares, y, y);
    }
    const Floats factor = all(scale / std::sqrt(sum_of(squares) + kNormEps));
    for (int64_t i = 0; i < k; i += 16) store(x + i, load(x + i) * factor);
  }

  const T* rates_of(int64_t token) const {  // of all value heads; their decays lie behind
    return (const T*)step.projected + token * step.stride + mixed + layer.value_heads * v;
  }
  float rate(int64_t token, int64_t head) const {
    return rounded_to((const T*)nullptr, 1.0f / (1.0f + std::exp(-to_float(rates_of(token)[head]))));
  }
  float log_decay(int64_t token, int64_t head) const {
    const float raw = to_float(rates_of(token)[layer.value_heads + head]);
    return layer.decay[head] * softplus(raw + layer.decay_bias[head]);
  }
  void fill_decays(int64_t token, int64_t head, float* decays) const {  // [k]
    if (!layer.by_channel) return void(std::fill(decays, decays + k, std::exp(log_decay(token, head))));
    const T* raw = rates_of(token) + layer.value_heads + head * k;
    const Floats factor = all(layer.decay[head]);
    for (int64_t i = 0; i < k; i += 16)
      store(decays + i, exp16(factor * softplus16(load16(raw + i) + load(layer.decay_bias + head * k + i))));
  }

  // A head's result x [v], normed and gated.
  void finish(const float* x, int64_t token, int64_t head) const {
    const T* none = nullptr;
    const T* gate = (const T*)step.projected + token * step.stride + mixed + head * v;
    const T* weight = (const T*)layer.norm;
    T* out = (T*)step.out + (token * layer.value_heads + head) * v;
    Floats squares = zeros();
    for (int64_t i = 0; i < v; i += 16) {
      const Floats y = rounded_as(none, load(x + i));
      squares = plus_product(squares, y, y);
    }
    const Floats scale = all(1.0f / std::sqrt(sum_of(squares) / float(v) + eps));
    for (int64_t i = 0; i < v; i += 16) {
      const Floats normed = rounded_as(none, load(x + i)) * scale, g = load16(gate + i), w = load16(weight + i);
      const Floats silu = rounded_as(none, rounded_as(none, normed) * w) * (g * sigmoid16(g));
      store16(out + i, layer.by_channel ? normed * w * sigmoid16(g) : silu);
    }
  }
  float eps;

  float* room(int64_t& used, int64_t count) const {
    float* found = memory.data() + used;
    used += (count + 15) / 16 * 16;
    return found;
  }

  void run() {
    const int64_t first = step.query_start[seq], count = step.query_start[seq + 1] - first;
    count == 1 ? one(first) : several(first, count);
  }

  void one(int64_t token) {
    int64_t used = 0;
    memory.resize(std::max<int64_t>(memory.size(), (before + 2) * channels + k * v + v + 3 * k + 4 * times * k + 144));
    float *inputs = room(used, (before + 1) * channels), *active = room(used, channels), *decays = room(used, 3 * k);
    float *local = room(used, k * v), *found = room(used, v);
    auto* from = (const float**)room(used, 2 * times * k);  // the rows of the matrices
    auto* to = (float**)room(used, 2 * times * k);
    read_tail(inputs);
    convolve(token, 1, inputs, active);
    write_tail(kLast, inputs + channels);
    // Rows that lie in one run each are updated there; others are put together first.
    const bool has_whole_rows = first_number % v == 0 && step.run_words % v == 0;
    const bool is_read_there = has_whole_rows && has_state();
    for (int64_t row = 0; row < times * k; row++) {
      from[row] = is_read_there ? find(kRead, matrix(0) + row * v).first : local + row % k * v;
      to[row] = has_whole_rows ? find(kLast, matrix(0) + row * v).first : local + row % k * v;
    }
    for (int64_t h = 0; h < times; h++) {
      const int64_t head = key_head * times + h, at = matrix(h);
      fill_decays(token, head, decays);
      if (!is_read_there) read(at, k * v, local);
      const float* values = active + 2 * k + h * v;
      const int64_t last = is_read_there ? (times - h) * k - 1 : 0;
      update(active, active + k, values, decays, rate(token, head), from + h * k, to + h * k, last, found);
      if (!has_whole_rows) write(kLast, at, k * v, local);
      finish(found, token, head);
    }
  }

  // to = decays from + key (x) update, and what the query reads of it. Rows lie in short runs, which a processor does not
  // read ahead over: up to row `last`, of the matrices behind this one too, they are fetched kAheadRows before.
  // `decays`: of the rows, with room for 2 k numbers behind them.
  void update(
      const float* query, const float* key, const float* value, float* decays, float rate, const float* const* from,
      float* const* to, int64_t last, float* found) const {
    Floats dots = zeros();
    for (int64_t i = 0; i < k; i += 16) {
      const Floats q = load(query + i), x = load(key + i), d = load(decays + i);
      dots = plus_product(dots, q, x);
      store(decays + k + i, q * d), store(decays + 2 * k + i, x * d);
    }
    const Floats own = all(sum_of(dots)), r = all(rate);
    int64_t column = 0;
    for (; column + 16 * kRowVectors <= v; column += 16 * kRowVectors)
      update_columns<kRowVectors>(key, value, decays, r, own, from, to, last, found, column);
    for (; column < v; column += 16) update_columns<1>(key, value, decays, r, own, from, to, last, found, column);
  }
  template <int V>
  void update_columns(
      const float* key, const float* value, const float* decays, Floats rate, Floats own, const float* const* from,
      float* const* to, int64_t last, float* found, int64_t column) const {
    const float *faded_query = decays + k, *faded_key = decays + 2 * k;
    Floats known[V], asked[V];
    for (int i = 0; i < V; i++) known[i] = asked[i] = zeros();
    for (int64_t row = 0; row < k; row++) {
      const Floats a = all(faded_key[row]), b = all(faded_query[row]);
      const float* ahead = from[std::min(row + kAheadRows, last)] + column;
#pragma GCC unroll 8
      for (int i = 0; i < V; i++) __builtin_prefetch(ahead + 16 * i, 1);
#pragma GCC unroll 8
      for (int i = 0; i < V; i++) {
        const Floats s = load(from[row] + column + 16 * i);
        known[i] = plus_product(known[i], a, s), asked[i] = plus_product(asked[i], b, s);
      }
    }
    for (int i = 0; i < V; i++) {
      known[i] = (load(value + column + 16 * i) - known[i]) * rate;  // the update
      store(found + column + 16 * i, plus_product(asked[i], own, known[i]));
    }
    for (int64_t row = 0; row < k; row++) {
      const Floats a = all(key[row]), decay = all(decays[row]);
#pragma GCC unroll 8
      for (int i = 0; i < V; i++) {
        const int64_t at = column + 16 * i;
        store(to[row] + at, plus_product(load(from[row] + at) * decay, a, known[i]));
      }
    }
  }

  void several(int64_t first, int64_t count) {
    const int64_t end = step.seq_lens[seq], start = end - count;
    const int64_t filled = ids[kFilled * step.num_states] >= 0 ? end / step.block_size * step.block_size - start : count;
    int64_t used = 0;
    memory.resize(std::max<int64_t>(
        memory.size(), (before + 2 * kChunk) * channels + times * k * v + kChunk * (k + 4 * kChunk + 3 * v) + k +
                           Products<T>::room(k, v) + v + (layer.by_channel ? (3 * kChunk + 49) * k : 0) + 1024));
    float *inputs = room(used, (before + kChunk) * channels), *active = room(used, kChunk * channels);
    float *states = room(used, times * k * v), *keys = room(used, k * kChunk);
    Chunk chunk{keys};
    chunk.keys_with_keys = room(used, kChunk * kChunk), chunk.queries_with_keys = room(used, kChunk * kChunk);
    chunk.system = room(used, kChunk * kChunk), chunk.within = room(used, kChunk * kChunk);
    chunk.updates = room(used, kChunk * v), chunk.found = room(used, kChunk * v);
    chunk.since = room(used, kChunk), chunk.grown = room(used, kChunk), chunk.rates = room(used, kChunk);
    chunk.whole = room(used, k);
    if (layer.by_channel) {
      chunk.decays = room(used, kChunk * k), chunk.reads = room(used, kChunk * 2 * k), chunk.fresh = room(used, 16 * k);
      chunk.rows = room(used, 16 * 2 * k), chunk.span = room(used, k);
    }
    Products<T> products(k, v, memory.data() + used);
    read_tail(inputs);
    for (int64_t h = 0; h < times; h++) read(matrix(h), k * v, states + h * k * v);
    for (int64_t done = 0; done < count;) {
      const int64_t n = std::min(kChunk, (done < filled ? filled : count) - done);
      convolve(first + done, n, inputs, active);
      if (!layer.by_channel) relate(n, active, chunk, products);
      for (int64_t h = 0; h < times; h++) pass(first + done, n, h, active, states + h * k * v, chunk, products);
      std::memmove(inputs, inputs + n * channels, 4 * before * channels);
      done += n;
      if (done == filled && filled < count) keep(kFilled, inputs, states);
    }
    keep(kLast, inputs, states);
  }
  void keep(Place place, const float* inputs, const float* states) const {
    write_tail(place, inputs);
    for (int64_t h = 0; h < times; h++) write(place, matrix(h), k * v, states + h * k * v);
  }

  struct Chunk {
    float* keys;                                  // [k][kChunk]: columns are tokens
    float *keys_with_keys, *queries_with_keys;    // [kChunk][kChunk], up to the diagonal
    float *system, *within;                       // these of one value head
    float *updates, *found, *since, *grown, *rates;
    float* whole = nullptr;                       // [k]: decays of the chunk
    // By channel: decays of each token [kChunk][k]; queries and keys as the state before the chunk sees them
    // [kChunk][2 k]; and of 16 tokens at a time keys in columns [k][16], rows as the token before them sees them
    // [16][2 k], their decays [k].
    float *decays = nullptr, *reads = nullptr, *fresh = nullptr, *rows = nullptr, *span = nullptr;
  };

  // What all value heads of some tokens share: products of keys, and of queries with keys.
  void relate(int64_t n, const float* active, const Chunk& c, Products<T>& products) const {
    for (int64_t i = 0; i < k; i += 16)
      for (int64_t t = 0; t < kChunk; t += 16) {
        Words w[16];
        for (int64_t j = 0; j < 16; j++)
          w[j] = t + j < n ? as_words(load(active + (t + j) * channels + k + i)) : no_words();
        transpose16(w);
        for (int64_t j = 0; j < 16; j++) store_words(c.keys + (i + j) * kChunk + t, w[j]);
      }
    products.take_tokens(active, channels, c.keys, n);
    products.template with_keys<false>([&](int64_t row, int64_t column, Floats x) {
      store(c.queries_with_keys + row * kChunk + column, x);
    });
    products.template with_keys<true>([&](int64_t row, int64_t column, Floats x) {
      store(c.keys_with_keys + row * kChunk + column, x);
    });
  }

  // Some tokens of one value head: their updates, what they read, and the state behind them.
  void pass(
      int64_t token, int64_t n, int64_t h, const float* active, float* state, const Chunk& c, Products<T>& products) const {
    const int64_t head = key_head * times + h;
    for (int64_t t = 0; t < n; t++) c.rates[t] = rate(token + t, head);
    if (layer.by_channel) {
      weigh_channels(token, n, head, active, c);
      products.take_tokens(c.reads, 2 * k, c.keys, n);
    } else {
      weigh(token, n, head, c);
    }
    // What is not known yet, then the updates, one token after another.
    const float* values = active + 2 * k + h * v;
    products.take_state(state);
    products.template with_state<true>([&](int64_t row, int64_t column, Floats x) {
      const Floats value = load(values + row * channels + column);
      store(c.updates + row * v + column, (value - x * all(c.grown[row])) * all(c.rates[row]));
    });
    int64_t solved = 0;
    for (; solved + 16 * kSolved <= v; solved += 16 * kSolved) solve<kSolved>(c, n, solved);
    for (; solved < v; solved += 16) solve<1>(c, n, solved);
    products.template with_state<false>([&](int64_t row, int64_t column, Floats x) {
      store(c.found + row * v + column, x * all(c.grown[row]));
    });
    products.within(c.within, c.updates, [&](int64_t row, int64_t column, Floats x) {
      store(c.found + row * v + column, load(c.found + row * v + column) + x);
    });
    for (int64_t t = 0; t < n; t++) finish(c.found + t * v, token + t, head);
    for (int64_t t = 0; t < n && !layer.by_channel; t++) {
      const Floats rest = all(std::exp(c.since[n - 1] - c.since[t]));
      for (int64_t i = 0; i < v; i += 16) store(c.updates + t * v + i, load(c.updates + t * v + i) * rest);
    }
    products.of_tokens(c.updates, [&](int64_t row, int64_t column, Floats x) {
      store(state + row * v + column, plus_product(x, all(c.whole[row]), load(state + row * v + column)));
    });
  }

  // The triangles of some tokens of one value head, and how the state before them fades.
  void weigh(int64_t token, int64_t n, int64_t head, const Chunk& c) const {
    float sum = 0;
    for (int64_t t = 0; t < n; t++) c.since[t] = sum += log_decay(token + t, head), c.grown[t] = std::exp(sum);
    for (int64_t t = n; t < kChunk; t++) c.since[t] = sum;
    std::fill(c.whole, c.whole + k, std::exp(sum));
    // Times the decay between the two tokens; nothing from later ones.
    for (int64_t row = 0; row < n; row++)
      for (int64_t column = 0, at = row * kChunk; column < kChunk; column += 16) {
        if (column > row) {
          store(c.within + at + column, zeros());
          continue;
        }
        const Floats decay = exp16(smaller(all(c.since[row]) - load(c.since + column), zeros()));
        store(c.system + at + column, up_to(row - column, load(c.keys_with_keys + at + column) * all(c.rates[row]) * decay));
        store(c.within + at + column, up_to(row + 1 - column, load(c.queries_with_keys + at + column) * decay));
      }
  }

  // Likewise by channel, 16 tokens at a time. A decay between two tokens is a product of decays, none above 1: up to
  // the 16 tokens' begin it is in the keys before them, `c.keys`, from there on in their rows.
  void weigh_channels(int64_t token, int64_t n, int64_t head, const float* active, const Chunk& c) const {
    std::fill(c.whole, c.whole + k, 1.0f);
    std::fill(c.grown, c.grown + kChunk, 1.0f);
    std::fill(c.keys, c.keys + k * kChunk, 0.0f);
    for (int64_t first = 0; first < n; first += 16) {
      const int64_t count = std::min<int64_t>(16, n - first);
      std::fill(c.span, c.span + k, 1.0f);
      for (int64_t t = 0; t < count; t++) {
        float *decays = c.decays + (first + t) * k, *reads = c.reads + (first + t) * 2 * k, *row = c.rows + t * 2 * k;
        const float* own = active + (first + t) * channels;
        fill_decays(token + first + t, head, decays);
        for (int64_t i = 0; i < k; i += 16) {
          const Floats span = load(c.span + i) * load(decays + i), q = load(own + i) * span, x = load(own + k + i) * span;
          store(c.span + i, span), store(row + i, q), store(row + k + i, x);
          store(reads + i, q * load(c.whole + i)), store(reads + k + i, x * load(c.whole + i));
        }
      }
      with_earlier(first, count, c);
      with_each_other(first, count, active, c);
      for (int64_t row = first; row < first + count; row++)
        for (int64_t column = first + 16; column < kChunk; column += 16) store(c.within + row * kChunk + column, zeros());
      fade(first, count, c);
    }
  }
  void with_earlier(int64_t first, int64_t count, const Chunk& c) const {
    product<kOfNone>(c.rows, 2 * k, c.keys, kChunk, count, k, first, [&](int64_t row, int64_t column, Floats x) {
      store(c.within + (first + row) * kChunk + column, x);
    });
    product<kOfNone>(c.rows + k, 2 * k, c.keys, kChunk, count, k, first, [&](int64_t row, int64_t column, Floats x) {
      store(c.system + (first + row) * kChunk + column, x * all(c.rates[first + row]));
    });
  }
  // Keys fade from token to token in `c.fresh`, and are there as the last of them sees them behind it.
  void with_each_other(int64_t first, int64_t count, const float* active, const Chunk& c) const {
    for (int64_t i = 0; i < k; i++)
      for (int64_t t = 0; t < 16; t++) c.fresh[i * 16 + t] = t < count ? active[(first + t) * channels + k + i] : 0.0f;
    for (int64_t t = 0; t < count; t++) {
      const float *query = active + (first + t) * channels, *decays = c.decays + (first + t) * k;
      const Mask earlier = first_lanes(std::max<int64_t>(t, 1));
      Floats asked = zeros(), known = zeros();
      for (int64_t i = 0; i < k; i++) {
        Floats x = load(c.fresh + 16 * i);
        if (t) x = choose(earlier, x * all(decays[i]), x), store(c.fresh + 16 * i, x);
        asked = plus_product(asked, all(query[i]), x), known = plus_product(known, all(query[k + i]), x);
      }
      const int64_t at = (first + t) * kChunk + first;
      store(c.within + at, up_to(t + 1, asked));
      store(c.system + at, up_to(t, known * all(c.rates[first + t])));
    }
  }
  void fade(int64_t first, int64_t count, const Chunk& c) const {
    for (int64_t i = 0; i < k; i++) {
      const Floats span = all(c.span[i]);
      c.whole[i] *= c.span[i];
      for (int64_t j = 0; j < first; j += 16) store(c.keys + i * kChunk + j, load(c.keys + i * kChunk + j) * span);
      store(c.keys + i * kChunk + first, up_to(count, load(c.fresh + 16 * i)));
    }
  }

  // Updates of 16 V columns, in which each token's have those of the tokens before it taken out.
  template <int V>
  void solve(const Chunk& c, int64_t n, int64_t column) const {
    for (int64_t row = 1; row < n; row++) {
      Floats left[V], odd[V];  // what even and odd tokens before take out apart, so that enough products are under way
#pragma GCC unroll 4
      for (int i = 0; i < V; i++) left[i] = load(c.updates + row * v + column + 16 * i), odd[i] = zeros();
      auto take_out = [&](Floats (&from)[V], int64_t j) {
        const Floats factor = all(c.system[row * kChunk + j]);
#pragma GCC unroll 4
        for (int i = 0; i < V; i++)
          from[i] = minus_product(from[i], factor, load(c.updates + j * v + column + 16 * i));
      };
      int64_t j = 0;
      for (; j + 2 <= row; j += 2) take_out(left, j), take_out(odd, j + 1);
      if (j < row) take_out(left, j);
#pragma GCC unroll 4
      for (int i = 0; i < V; i++) store(c.updates + row * v + column + 16 * i, left[i] + odd[i]);
    }
  }
  static Floats up_to(int64_t count, Floats x) {
    return count <= 0 ? zeros() : count >= 16 ? x : ::keep(first_lanes(count), x);
  }
};

template <typename T>
void delta_attention(const DeltaLayer& layer, const DeltaStep& step, float eps) {
  parallel_for(step.num_seqs * layer.key_heads, [&](int64_t task) {
    static thread_local std::vector<float> memory;
    const int64_t seq = task / layer.key_heads, key_head = task % layer.key_heads;
    if (!step.is_by_token) {
      Task<T> found{layer, step, seq, key_head, memory};
      found.eps = eps;
      return found.run();
    }
    for (int64_t token = step.query_start[seq]; token < step.query_start[seq + 1]; token++) {
      Task<T> found{layer, step, token, key_head, memory};
      found.eps = eps;
      found.one(token);
    }
  });
}

}  // namespace

// One layer for a step's sequences; key dim and value dim are multiples of 16. Tokens are in the model's dtype.
extern "C" void tandem_delta_attention(const DeltaLayer* layer, const DeltaStep* step, float eps, int is_bf16) {
  is_bf16 ? delta_attention<bf16>(*layer, *step, eps) : delta_attention<float>(*layer, *step, eps);
}
