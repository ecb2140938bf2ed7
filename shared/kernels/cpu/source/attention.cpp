// Attention over paged KV. One task is some heads of one sequence (decode) or one KV head of a tile of its queries
// (prefill).
#include <algorithm>
#include <vector>

#include "attend_many.h"
#include "attend_one.h"
#include "attend_row.h"
#ifdef TANDEM_AMX
#include "attend_tiles.h"
#elif defined(TANDEM_PAIRS)
#include "attend_dots.h"
#endif
#ifdef TANDEM_TILES
#include "code_tiles.h"
#elif defined(TANDEM_BYTE_PRODUCTS)
#include "code_words.h"
#endif
#include "ops.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kTaskRows = 256;  // query rows of a task: what a tile of keys, once laid out, is used for

struct Task {
  int64_t seq, head, heads;  // units of heads [head, head + heads), or one KV head
  int64_t first, count;      // query tokens [first, first + count) of the step
};

// Heads lie side by side, and a decode task takes whole units of them: KV heads with their query heads, or of a single
// KV head, such as latents are, as many query heads as a key is opened for at once.
struct Units {
  int64_t heads, count;  // query heads of a unit; units

  explicit Units(const Shape& s)
      : heads(s.kv_heads > 1 ? s.group() : std::min<int64_t>(kHeads, s.heads)), count((s.heads + heads - 1) / heads) {}
};

template <typename T, typename KV>
void attend_token(
    const Shape& s, const Units& units, const Task& task, const PoolView& view, const int32_t* table, const T* query,
    T* out, int64_t length, Workspace& workspace) {
  constexpr auto attend = kDeterministic ? attend_row<T, KV> : attend_one<T, KV>;
  if (s.kv_heads > 1) return attend(Pool<KV>{view, s, table, task.head}, task.heads, query, out, length, workspace);
  Shape part = s;
  const int64_t first = task.head * units.heads;
  part.heads = std::min(task.heads * units.heads, s.heads - first);
  if (s.sinks) part.sinks = s.sinks + first;
  attend(Pool<KV>{view, part, table, 0}, 1, query + first * s.dim, out + first * s.dim, length, workspace);
}

template <typename T, typename KV>
void paged_attention(
    const T* query, const PoolView& view, const int32_t* tables, const int32_t* query_start, const int32_t* seq_lens, T* out,
    const Shape& s) {
  const int64_t most = std::max<int64_t>(2, kTaskRows / s.group());
  const Units units(s);
  // A decode task takes as many of its sequence's units as are a quarter of a thread's share at most.
  auto seen = [&](int64_t i) { return seq_lens[i] - s.first_seen(seq_lens[i] - 1); };
  int64_t all = 0;
  for (int64_t i = 0; i < s.num_seqs; i++)
    if (query_start[i + 1] - query_start[i] == 1) all += seen(i) * units.count;
  const int64_t share = all / (4 * num_threads());
  std::vector<Task> tasks;
  auto together = [&](int64_t i) { return std::clamp<int64_t>(share / std::max<int64_t>(1, seen(i)), 1, units.count); };
  for (int64_t i = 0; i < s.num_seqs; i++)
    for (int64_t first = query_start[i]; first < query_start[i + 1]; first += most) {
      const int64_t count = std::min(most, query_start[i + 1] - first);
      const int64_t heads = count == 1 ? together(i) : 1, all_heads = count == 1 ? units.count : s.kv_heads;
      for (int64_t head = 0; head < all_heads; head += heads)
        tasks.push_back({i, head, std::min(heads, all_heads - head), first, count});
    }
  auto start = [&](const Task& t) { return seq_lens[t.seq] - (query_start[t.seq + 1] - t.first); };
  // The longest first: what is left at the end is short, and no thread waits long for another.
  auto cost = [&](const Task& t) { return t.heads * t.count * (start(t) + t.count); };
  std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
  parallel_for(tasks.size(), [&](int64_t i) {
    thread_local Workspace workspace;
    const Task& task = tasks[i];
    const int32_t* table = tables + task.seq * s.max_blocks;
    const T* q = query + task.first * s.width();
    T* o = out + task.first * s.width();
    if (task.count == 1) return attend_token<T, KV>(s, units, task, view, table, q, o, start(task) + 1, workspace);
    const Pool<KV> pool{view, s, table, task.head};
#ifdef TANDEM_TILES
    using CodeProducts = CodeTiles;
#elif defined(TANDEM_BYTE_PRODUCTS)
    using CodeProducts = CodeWords;
#endif
#if defined(TANDEM_TILES) || defined(TANDEM_BYTE_PRODUCTS)
    if constexpr (sizeof(T) == 2 && std::is_same_v<KV, int8> && !kDeterministic)
      if (task.count * s.group() <= kFewRows && CodeProducts::fits(s))
        return attend_codes<CodeProducts>(pool, q, o, start(task), task.count, workspace);
#endif
#ifdef TANDEM_AMX
    using Products = TileProducts;
#elif defined(TANDEM_PAIRS)
    using Products = DotProducts;
#endif
#if defined(TANDEM_AMX) || defined(TANDEM_PAIRS)
    if constexpr (sizeof(T) == 2 && sizeof(KV) <= 2 && !kDeterministic)
      if (Products::fits(s)) return attend_pairs<Products>(pool, q, o, start(task), task.count, workspace);
#endif
    attend_many(pool, q, o, start(task), task.count, workspace);
  });
}

}  // namespace

// query, out [tokens, heads, dim]; tables, query_start, seq_lens as in shared/kernels/batch.py; dim a multiple of 16.
// sizes: num_seqs, heads, layer, max_blocks, window (0 = none), is_chunked. softcap: 0 = none; sinks [heads] or null. The pool may be
// in fp32 only beside a query in fp32.
extern "C" void tandem_paged_attention(
    const void* query, const PoolView* pool, const int32_t* tables, const int32_t* query_start, const int32_t* seq_lens,
    void* out, float scale, float softcap, const float* sinks, const int64_t* sizes, int is_bf16) {
  const Shape s{sizes[0], sizes[1], pool->kv_heads, pool->dim, pool->block_size, sizes[2], sizes[3], sizes[4],
                sizes[5], scale, softcap, sinks};
  auto run = [&](auto element) {
    using T = decltype(element);
    with_dtype<T>(*pool, [&](auto* stored) {
      paged_attention<T, std::remove_pointer_t<decltype(stored)>>(
          (const T*)query, *pool, tables, query_start, seq_lens, (T*)out, s);
    });
  };
  is_bf16 ? run(bf16{}) : run(float{});
}
