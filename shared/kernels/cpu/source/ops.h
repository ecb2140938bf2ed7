// The library's exported functions. Shapes and units are documented at each definition.
#pragma once

#include <cstdint>

// A pool, or some adjacent layers and heads of it: see shared/kernels/pool_view.py.
enum KVDtype : int64_t { kFloat32 = 0, kBf16 = 1, kInt8 = 2, kFp8 = 3 };
struct PoolView {
  void* memory;
  int64_t dtype;
  int64_t block_bytes, layer_bytes, plane_bytes, head_bytes;  // from one to the next; a plane: from keys to values, or 0
  int64_t kv_heads, block_size, dim;
};

#pragma GCC visibility push(default)
extern "C" {
const char* tandem_refusal();
int tandem_pays();
void tandem_ask_threads(int (*ask)());
void tandem_pack_linear(void* w, int64_t k, int64_t n, int is_bf16);
void tandem_plan_compression(const void* w, int64_t k, int64_t n, uint8_t* upper, int64_t* num_rare);
void tandem_compress(const void* w, int64_t k, int64_t n, const uint8_t* upper, int64_t stride, void* out);
void tandem_linear(
    const void* x, const void* w, int64_t panel_stride, int64_t form, const void* bias, void* y, float* scratch, int64_t m,
    int64_t k, int64_t n, int is_bf16);
struct ExpertLoras;
void tandem_experts(
    const void* x, const int64_t* ids, const float* weights, const void* gate_up, const int64_t* gate_up_packed,
    const void* down, const int64_t* down_packed, void* out, void* const* memory, const int64_t* sizes, float alpha,
    float limit, const ExpertLoras* loras, int is_bf16);
void tandem_choose_experts(
    const void* logits, const float* bias, int64_t* ids, float* weights, const int64_t* sizes, float scale, int is_bf16);
void tandem_batched_linear(
    const void* x, const void* w, int64_t panel_stride, void* y, float* scratch, const int64_t* strides, int64_t parts,
    int64_t m, int64_t k, int64_t n, int is_bf16);
void tandem_rms_norm(
    const void* x, const void* residual, const void* weight, void* y, void* sum, int64_t rows, int64_t size, float eps,
    int is_centered, int is_bf16);
void tandem_act_and_mul(
    const void* gate_up, void* y, int64_t rows, int64_t size, int gate, float alpha, float limit, int is_bf16);
void tandem_rotate_and_write(
    const void* query, const void* key, const void* value, const int64_t* strides, const void* cos, const void* sin,
    const PoolView* pool, const int64_t* slots, const void* q_norm, const void* k_norm, float eps, void* out,
    const int64_t* sizes, int is_bf16);
void tandem_temper(void* query, const void* factors, int64_t tokens, int64_t heads, int64_t dim, int is_bf16);
void tandem_rotate_and_write_latent(
    const void* query, const void* latent, const int64_t* strides, const void* cos, const void* sin,
    const PoolView* pool, const int64_t* slots, const void* norm, float eps, void* out, const int64_t* sizes,
    int is_interleaved, int is_bf16);
void tandem_paged_attention(
    const void* query, const PoolView* pool, const int32_t* tables, const int32_t* query_start, const int32_t* seq_lens,
    void* out, float scale, float softcap, const float* sinks, const int64_t* sizes, int is_bf16);
struct DeltaLayer;
struct DeltaStep;
void tandem_delta_attention(const DeltaLayer* layer, const DeltaStep* step, float eps, int is_bf16);
void tandem_mask_tokens(
    float* logits, const uint32_t* masks, const int64_t* rows, int64_t num_masks, int64_t vocab_size,
    int64_t num_words);
void tandem_penalize(
    float* logits, const uint32_t* seen, const int32_t* counts, const int64_t* slots, const float* repetitions,
    const float* presences, const float* frequencies, int64_t num_rows, int64_t vocab_size, int64_t num_words);
void tandem_count_tokens(
    uint32_t* seen, int32_t* counts, const int64_t* slots, const int64_t* tokens, int64_t num_rows, int64_t vocab_size,
    int64_t num_words);
void tandem_greedy_tokens(
    const float* logits, const uint32_t* masks, const int64_t* rows, int64_t* out, int64_t num_rows, int64_t num_masks,
    int64_t vocab_size, int64_t num_words);
void tandem_sample_tokens(
    const float* logits, const float* temperatures, const int32_t* top_ks, const double* top_ps, const float* min_ps,
    const uint64_t* seeds, const uint64_t* positions, int64_t* out, int64_t num_rows, int64_t vocab_size);
void tandem_multilinear(const uint64_t* words, const uint64_t* keys, int64_t n, uint64_t* out);
int64_t tandem_pack(const uint16_t* x, int64_t n, uint8_t* out, int64_t capacity);
int tandem_unpack(const uint8_t* packed, int64_t size, uint16_t* x, int64_t n);
struct Lora;
struct LoraRows;
void tandem_add_lora(
    const void* x, void* y, const int64_t* sizes, const Lora* const* loras, const LoraRows* rows, float* sums, int is_bf16);
struct StepLoras;
struct Layer;
struct Sizes;
struct Memory;
struct Group;
int tandem_layers(
    const Layer* layers, const void* last_norm, const Sizes* sizes, const Memory* memory, const StepLoras* loras, float eps,
    float scale, float softcap, Group* group);
int64_t tandem_group_bytes(int64_t size, int64_t slot_bytes);
Group* tandem_group_join(
    int descriptor, int64_t rank, int64_t size, const int64_t* names, int64_t slot_bytes, int64_t single_bytes,
    int64_t stuck_ns);
int tandem_group_meet(Group* group, int64_t limit_ns);
void tandem_group_leave(Group* group);
void tandem_group_fail(Group* group, int64_t name);
int tandem_group_fault(Group* group);
int tandem_all_reduce(Group* group, void* x, int64_t count, int is_bf16);
int tandem_gather(Group* group, const void* x, int64_t bytes, void* out);
int tandem_scatter(Group* group, const void* x, int64_t bytes, void* out);
int tandem_broadcast(Group* group, void* x, int64_t bytes);
}
#pragma GCC visibility pop
