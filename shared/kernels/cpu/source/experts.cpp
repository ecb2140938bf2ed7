// Products of rows with one of several weights of a size, which lie panel after panel as one packed weight: experts,
// each with the rows of the tokens that chose it, and the heads of latent attention. Only the panels of weights that
// have rows are read.
#include <optional>
#include <vector>

#include "lora.h"
#include "multiplication.h"
#include "ops.h"

namespace {

// Where weight `index` of several begins, each of n outputs and k inputs.
template <typename T>
const T* weight_at(const T* weights, const Packed& packed, int64_t index, int64_t k, int64_t n) {
  if (packed.panel_stride) return (const T*)((const std::byte*)weights + index * (n / kColumns) * packed.panel_stride);
  return weights + index * n * k;
}

// Each of several operands times the weight of its number, n outputs and k inputs; scratch of k floats a row, and k / 16 more for codes.
template <typename T>
void multiply_parts(
    const std::vector<Operands<T>>& operands, const T* weights, const Packed& packed, float* scratch, int64_t k,
    int64_t n) {
  std::vector<AnyProduct<T>> parts;
  std::vector<int64_t> lay_ends, ends;  // tasks of the parts up to each
  int64_t lay_tasks = 0, tasks = 0;
  for (size_t i = 0; i < operands.size(); i++) {
    if (operands[i].m == 0) continue;
    parts.emplace_back(
        operands[i], weight_at(weights, packed, int64_t(i), k, n), packed, nullptr, scratch, k, n);
    scratch += operands[i].m * (packed.form ? k + k / 16 : k);
    lay_ends.push_back(lay_tasks += parts.back().lay_tasks());
    ends.push_back(tasks += parts.back().tasks());
  }
  auto run = [&](int64_t count, const std::vector<int64_t>& until, auto&& body) {
    parallel_for(count, [&](int64_t task) {
      const size_t part = size_t(std::upper_bound(until.begin(), until.end(), task) - until.begin());
      body(parts[part], part ? task - until[part - 1] : task);
    });
  };
  run(lay_tasks, lay_ends, [](const AnyProduct<T>& part, int64_t task) { part.lay(task); });
  run(tasks, ends, [](const AnyProduct<T>& part, int64_t task) { part.run(task); });
}

// Part i: rows [starts[i], starts[i + 1]) of x [.., k] and y [.., n].
template <typename T>
std::vector<Operands<T>> side_by_side(const std::vector<int64_t>& starts, const T* x, int64_t k, T* y, int64_t n) {
  std::vector<Operands<T>> parts;
  for (size_t i = 0; i + 1 < starts.size(); i++)
    parts.push_back({x + starts[i] * k, k, y + starts[i] * n, n, starts[i + 1] - starts[i]});
  return parts;
}

struct ExpertSizes {
  int64_t tokens, top_k, hidden, inner, first_expert, num_experts, gate;
  float alpha, limit;  // of tandem_act_and_mul, as gate
};

template <typename T>
struct ExpertMemory {  // rows: a pair of a token and an expert of this range each, the rows of an expert together
  T *gathered, *gate_up, *activated, *found;  // [tokens top_k, hidden], [.., 2 inner], [.., inner], [.., hidden]
  float* scratch;                             // tokens top_k times 17 / 16 of the larger of hidden and inner
};

// out = the sum of found[rows[j]] weights[j] over the places j of a token's choice that have a row.
template <typename T>
void combine(const T* found, const int64_t* rows, const float* weights, int64_t top_k, int64_t hidden, T* out) {
  for (int64_t i = 0; i < hidden; i += 16) {
    Floats sum = zeros();
    for (int64_t j = 0; j < top_k; j++)
      if (rows[j] >= 0) sum = plus_product(sum, all(weights[j]), load16(found + rows[j] * hidden + i));
    store16(out + i, sum);
  }
}

// The rows that have an addition, by expert and adapter: of all rows, those of expert e are [starts[e], starts[e + 1]).
struct AddedRows {
  std::vector<int64_t> order, tiles;
  std::vector<float> sums;

  AddedRows(
      const ExpertLoras& loras, const std::vector<int64_t>& starts, const std::vector<int64_t>& tokens, int64_t most_in) {
    const int64_t num_experts = int64_t(starts.size()) - 1;
    for (int64_t e = 0; e < num_experts; e++)
      for (int64_t a = 0; a < loras.num_adapters; a++) {
        const int64_t addition = a * num_experts + e, first = int64_t(order.size());
        if (!loras.gate_up[addition] && !loras.down[addition]) continue;
        for (int64_t row = starts[e]; row < starts[e + 1]; row++)
          if (loras.adapters[tokens[row]] == a) order.push_back(row);
        const int64_t end = int64_t(order.size());
        for (int64_t i = first; i < end; i += kLoraRows) tiles.insert(tiles.end(), {addition, i, std::min(i + kLoraRows, end)});
      }
    sums.resize(lora_chunks(most_in) * order.size() * loras.most_ranks);
  }

  void add(const void* x, void* y, int64_t k, int64_t n, const Lora* const* of, int64_t most_ranks, int is_bf16) {
    const LoraRows rows{order.data(), tiles.data(), int64_t(tiles.size()) / 3, int64_t(order.size())};
    if (rows.num_rows) add_lora(x, y, k, n, of, rows, sums.data(), most_ranks, is_bf16);
  }
};

template <typename T>
void experts(
    const T* x, const int64_t* ids, const float* weights, const T* gate_up, const Packed& gate_up_packed, const T* down,
    const Packed& down_packed, T* out, const ExpertMemory<T>& m, const ExpertSizes& s, const ExpertLoras* loras) {
  const int64_t pairs = s.tokens * s.top_k, is_bf16 = sizeof(T) == 2;
  std::vector<int64_t> starts(s.num_experts + 1, 0), rows(pairs, -1), tokens(pairs);
  auto local = [&](int64_t pair) {
    const int64_t expert = ids[pair] - s.first_expert;
    return expert >= 0 && expert < s.num_experts ? expert : -1;
  };
  for (int64_t i = 0; i < pairs; i++)
    if (local(i) >= 0) starts[local(i) + 1]++;
  for (int64_t e = 0; e < s.num_experts; e++) starts[e + 1] += starts[e];
  std::vector<int64_t> next(starts.begin(), starts.end() - 1);
  for (int64_t i = 0; i < pairs; i++)
    if (local(i) >= 0) {
      rows[i] = next[local(i)]++;
      tokens[rows[i]] = i / s.top_k;
      std::memcpy(m.gathered + rows[i] * s.hidden, x + i / s.top_k * s.hidden, s.hidden * sizeof(T));
    }
  multiply_parts(
      side_by_side<T>(starts, m.gathered, s.hidden, m.gate_up, 2 * s.inner), gate_up, gate_up_packed, m.scratch,
      s.hidden, 2 * s.inner);
  std::optional<AddedRows> added;
  if (loras) {
    added.emplace(*loras, starts, tokens, std::max(s.hidden, s.inner));
    added->add(m.gathered, m.gate_up, s.hidden, 2 * s.inner, loras->gate_up, loras->most_ranks, is_bf16);
  }
  tandem_act_and_mul(m.gate_up, m.activated, starts.back(), s.inner, int(s.gate), s.alpha, s.limit, is_bf16);
  multiply_parts(
      side_by_side<T>(starts, m.activated, s.inner, m.found, s.hidden), down, down_packed, m.scratch, s.inner,
      s.hidden);
  if (loras) added->add(m.activated, m.found, s.inner, s.hidden, loras->down, loras->most_ranks, is_bf16);
  parallel_ranges(s.tokens, 32768 / (s.hidden * s.top_k) + 1, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
      combine(m.found, rows.data() + t * s.top_k, weights + t * s.top_k, s.top_k, s.hidden, out + t * s.hidden);
  });
}

template <typename T>
void experts_of(
    const void* x, const int64_t* ids, const float* weights, const void* gate_up, const int64_t* gate_up_packed,
    const void* down, const int64_t* down_packed, void* out, void* const* memory, const ExpertSizes& s,
    const ExpertLoras* loras) {
  const ExpertMemory<T> m{(T*)memory[0], (T*)memory[1], (T*)memory[2], (T*)memory[3], (float*)memory[4]};
  experts(
      (const T*)x, ids, weights, (const T*)gate_up, {gate_up_packed[0], gate_up_packed[1]}, (const T*)down,
      {down_packed[0], down_packed[1]}, (T*)out, m, s, loras);
}

template <typename T>
void batched_linear(
    const T* x, const T* w, int64_t panel_stride, T* y, float* scratch, const int64_t* strides, int64_t parts,
    int64_t m, int64_t k, int64_t n) {
  std::vector<Operands<T>> operands;
  for (int64_t i = 0; i < parts; i++)
    operands.push_back({x + i * strides[1], strides[0], y + i * strides[3], strides[2], m});
  multiply_parts(operands, w, {panel_stride, 0}, scratch, k, n);
}

}  // namespace

// x, out [tokens, hidden]; ids, weights [tokens, top_k]; gate_up and down: packed weights [num_experts 2 inner, hidden]
// and [num_experts hidden, inner], with panel_stride and form as for tandem_linear; memory as in ExpertMemory. sizes: tokens, top_k,
// hidden (a multiple of 32), inner (of 16), first_expert, num_experts, gate. Experts out of the range count as zero.
// loras: null where no token has an addition.
extern "C" void tandem_experts(
    const void* x, const int64_t* ids, const float* weights, const void* gate_up, const int64_t* gate_up_packed,
    const void* down, const int64_t* down_packed, void* out, void* const* memory, const int64_t* sizes, float alpha,
    float limit, const ExpertLoras* loras, int is_bf16) {
  const ExpertSizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], alpha, limit};
  if (is_bf16)
    experts_of<bf16>(x, ids, weights, gate_up, gate_up_packed, down, down_packed, out, memory, s, loras);
  else
    experts_of<float>(x, ids, weights, gate_up, gate_up_packed, down, down_packed, out, memory, s, loras);
}

// x [m, parts, k], packed w [parts n, k], its stride as for tandem_linear, y [m, parts, n]; strides: x's from row to
// row and from part to part, then y's; scratch of parts m k floats; n a multiple of 32, k of 16.
extern "C" void tandem_batched_linear(
    const void* x, const void* w, int64_t panel_stride, void* y, float* scratch, const int64_t* strides, int64_t parts,
    int64_t m, int64_t k, int64_t n, int is_bf16) {
  if (is_bf16)
    batched_linear((const bf16*)x, (const bf16*)w, panel_stride, (bf16*)y, scratch, strides, parts, m, k, n);
  else
    batched_linear((const float*)x, (const float*)w, 0, (float*)y, scratch, strides, parts, m, k, n);
}
