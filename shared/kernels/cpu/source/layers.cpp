// All layers of a decoder in one call: from Python, the time between two ops would exceed that of a small op, and the
// pool's threads would have gone to sleep.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "group.h"
#include "lora.h"
#include "ops.h"

struct Linear {  // as tandem_linear takes it
  const void* panels;
  int64_t panel_stride, form;
  const void* bias;  // or null
};

struct Layer {
  Linear qkv, o, gate_up, down;
  const void *input_norm, *q_norm, *k_norm, *attention_norm, *post_norm, *output_norm;  // or null, but for the first
  int64_t window, is_chunked;  // of tandem_paged_attention
  int64_t temperature;         // the encoding whose cosines multiply the queries, or -1
  int64_t encoding;  // of positions
  int64_t group, row;  // of KV, and the layer's place in the group's blocks
};

struct KVGroup {
  const int32_t* tables;  // [num_seqs, max_blocks]
  const int64_t* slots;   // [tokens]
};

struct Sizes {
  int64_t num_layers, hidden, heads, kv_heads, dim, inner, tokens, num_seqs, max_blocks, num_rows;
  int64_t element() const { return is_bf16 ? 2 : 4; }
  int64_t q_size() const { return heads * dim; }
  int64_t kv_size() const { return kv_heads * dim; }
  int64_t is_bf16;
  int64_t gate;  // of tandem_act_and_mul
  int64_t is_centered;  // of tandem_rms_norm
  int64_t num_kept;
};

struct Memory {  // of one step
  std::byte *residual, *normed;  // [tokens, hidden]; the caller puts the embeddings into `residual`
  std::byte *qkv, *placed, *attended, *out, *gate_up, *activated;
  float* scratch;                // tokens times 17 / 16 of the widest input of a projection
  const PoolView* pool;
  const std::byte *cos, *sin;  // [encodings, tokens, dim]
  const KVGroup* groups;
  const int32_t *query_start, *seq_lens;
  const int64_t* rows;
  std::byte* kept;             // [tokens, num_kept, hidden], the residual stream …
  const int64_t* kept_behind;  // … behind so many layers, fewer than all
};

// Low-rank additions to the projections, for the rows that have one.
struct StepLoras {
  const Lora* const* loras;  // [layers][qkv, o, gate_up, down][additions]
  int64_t count;             // additions
  const LoraRows *rows, *kept;  // of all tokens, and of those whose output is wanted
  float* sums;
  int64_t most_ranks;
};

namespace {

// The tokens whose output is wanted, as a batch of one token a sequence.
struct Ends {
  std::vector<int32_t> tables, query_start, seq_lens;

  Ends(const Sizes& s, const Memory& m, const int32_t* of_sequences) : query_start{0} {
    for (int64_t i = 0, seq = 0; i < s.num_rows; i++) {
      const int64_t row = m.rows[i];
      if (row < m.query_start[seq]) seq = 0;
      while (row >= m.query_start[seq + 1]) seq++;
      tables.insert(tables.end(), of_sequences + seq * s.max_blocks, of_sequences + (seq + 1) * s.max_blocks);
      query_start.push_back(int32_t(i + 1));
      seq_lens.push_back(m.seq_lens[seq] - (m.query_start[seq + 1] - 1 - int32_t(row)));
    }
  }
};

void keep_rows(std::byte* x, int64_t row_bytes, const int64_t* rows, int64_t count, std::vector<std::byte>& copy) {
  copy.resize(count * row_bytes);
  for (int64_t i = 0; i < count; i++) std::memcpy(copy.data() + i * row_bytes, x + rows[i] * row_bytes, row_bytes);
  std::memcpy(x, copy.data(), copy.size());
}

void keep_behind(int64_t num_layers, const Sizes& s, const Memory& m) {
  const int64_t bytes = s.hidden * s.element();
  for (int64_t place = 0; place < s.num_kept; place++)
    if (m.kept_behind[place] == num_layers)
      for (int64_t t = 0; t < s.tokens; t++)
        std::memcpy(m.kept + (t * s.num_kept + place) * bytes, m.residual + t * bytes, bytes);
}

}  // namespace

// Layers as in shared/model/decoder.py; without `post_norm` the feed-forward block reads what attention reads. `normed` begins with the last norm of the wanted rows' residual stream
// afterwards. Where at most one row a sequence is wanted, the last layer only writes the other tokens' keys and values.
// With a `group`, o and down give each member a part of a sum. `loras`: null where no token has an addition. Returns 0,
// or 1 + the member that is gone.
extern "C" int tandem_layers(
    const Layer* layers, const void* last_norm, const Sizes* sizes, const Memory* memory, const StepLoras* loras, float eps,
    float scale, float softcap, Group* group) {
  const Sizes& s = *sizes;
  const Memory& m = *memory;
  const int is_bf16 = int(s.is_bf16), is_centered = int(s.is_centered);
  const int64_t angles = s.tokens * s.dim * s.element();
  const int64_t qkv_size = s.q_size() + 2 * s.kv_size(), strides[3] = {qkv_size, qkv_size, qkv_size};
  int64_t tokens = s.tokens;
  std::vector<std::byte> copy;
  const LoraRows* lora_rows = loras ? loras->rows : nullptr;
  auto linear = [&](const void* x, const Linear& w, void* y, int64_t in, int64_t out, int64_t place) {
    tandem_linear(x, w.panels, w.panel_stride, w.form, w.bias, y, m.scratch, tokens, in, out, is_bf16);
    if (lora_rows && lora_rows->num_rows)
      add_lora(x, y, in, out, loras->loras + place * loras->count, *lora_rows, loras->sums, loras->most_ranks, is_bf16);
  };
  auto add_up = [&] { return group ? all_reduce(*group, m.out, tokens * s.hidden, is_bf16) : 0; };
  auto add_norm = [&](const void* own, const void* weight) {
    if (own) tandem_rms_norm(m.out, nullptr, own, m.out, nullptr, tokens, s.hidden, eps, is_centered, is_bf16);
    tandem_rms_norm(m.out, m.residual, weight, m.normed, m.residual, tokens, s.hidden, eps, is_centered, is_bf16);
  };
  auto attend = [&](int64_t i, int64_t num_seqs, const int32_t* tables, const int32_t* query_start, const int32_t* seq_lens) {
    const int64_t attending[] = {num_seqs, s.heads, layers[i].row, s.max_blocks, layers[i].window, layers[i].is_chunked};
    tandem_paged_attention(
        m.placed, m.pool, tables, query_start, seq_lens, m.attended, scale, softcap, nullptr, attending, is_bf16);
  };
  tandem_rms_norm(m.residual, nullptr, layers[0].input_norm, m.normed, nullptr, tokens, s.hidden, eps, is_centered, is_bf16);
  for (int64_t i = 0; i < s.num_layers; i++) {
    const Layer& layer = layers[i];
    const bool is_last = i + 1 == s.num_layers;
    linear(m.normed, layer.qkv, m.qkv, s.hidden, qkv_size, 4 * i);
    const std::byte *key = m.qkv + s.q_size() * s.element(), *value = key + s.kv_size() * s.element();
    const int64_t placing[] = {tokens, s.heads, layer.row};
    const KVGroup& kept = m.groups[layer.group];
    tandem_rotate_and_write(
        m.qkv, key, value, strides, m.cos + layer.encoding * angles, m.sin + layer.encoding * angles, m.pool,
        kept.slots,
        layer.q_norm, layer.k_norm, eps, m.placed, placing, is_bf16);
    if (layer.temperature >= 0)
      tandem_temper(m.placed, m.cos + layer.temperature * angles, tokens, s.heads, s.dim, is_bf16);
    if (is_last && s.num_rows < tokens && s.num_rows <= s.num_seqs) {
      if (s.num_rows == 0) return 0;
      const Ends ends(s, m, kept.tables);
      keep_rows(m.placed, s.q_size() * s.element(), m.rows, s.num_rows, copy);
      keep_rows(m.residual, s.hidden * s.element(), m.rows, s.num_rows, copy);
      if (!layer.post_norm) keep_rows(m.normed, s.hidden * s.element(), m.rows, s.num_rows, copy);
      tokens = s.num_rows;
      if (loras) lora_rows = loras->kept;
      attend(i, tokens, ends.tables.data(), ends.query_start.data(), ends.seq_lens.data());
    } else {
      attend(i, s.num_seqs, kept.tables, m.query_start, m.seq_lens);
    }
    linear(m.attended, layer.o, m.out, s.q_size(), s.hidden, 4 * i + 1);
    if (const int failed = add_up()) return failed;
    add_norm(layer.attention_norm, layer.post_norm);
    linear(m.normed, layer.gate_up, m.gate_up, s.hidden, 2 * s.inner, 4 * i + 2);
    tandem_act_and_mul(m.gate_up, m.activated, tokens, s.inner, int(s.gate), 0.0f, 0.0f, is_bf16);
    linear(m.activated, layer.down, m.out, s.inner, s.hidden, 4 * i + 3);
    if (const int failed = add_up()) return failed;
    add_norm(layer.output_norm, is_last ? last_norm : layers[i + 1].input_norm);
    if (s.num_kept) keep_behind(i + 1, s, m);
  }
  if (tokens != s.num_rows) keep_rows(m.normed, s.hidden * s.element(), m.rows, s.num_rows, copy);
  return 0;
}
