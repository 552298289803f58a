// What one instruction set implements. Each isa_*.cpp fills one of these tables.
//
// Those files are compiled with different flags, so they must not share inline functions with the
// rest: everything in them has internal linkage, and they use no standard library containers. Callers
// provide memory and threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// Tensor types, numbered as in GGUF files.
enum Type : int32_t {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,
    Q4_K = 12, Q5_K = 13, Q6_K = 14, Int8 = 24, BF16 = 30,
};

// An entry of the KV cache is one head of one token: its numbers, followed by a float scale for type
// Int8. Strides count elements.
static constexpr int64_t element_bytes(Type type) { return type == F32 ? 4 : type == Int8 ? 1 : 2; }
static constexpr int64_t entry_elements(Type type, int64_t head_dim) {
    return head_dim + (type == Int8 ? sizeof(float) : 0);
}

constexpr int kBlock = 32;  // size of a quantization block of activations

// 8-bit activations: x[i] = scale * q[i] in each quantization block.
struct QuantizedRows {
    int8_t* q;        // [rows, k]
    float* scale;     // [rows, k / 32]
    float* sum;       // [rows, k / 32] scale times the sum of q
    int32_t* halves;  // [rows, k / 32, 2] sums of q over the halves of a block
    int64_t k;
};

// Some rows of activations times a range of a weight's output columns.
struct MatmulTask {
    const uint8_t* packed;  // the weight's first group
    int64_t first_group, end_group;
    int64_t columns;  // of the weight; the last group may be partly filled
    int64_t k;
    const QuantizedRows* quantized;  // for block types
    uint8_t* scratch;                // also for block types: matmul_scratch(k) bytes
    const float* x;                  // for float types: [rows, k] with stride ldx
    int64_t ldx;
    int64_t first_row, end_row;
    const float* bias;  // [columns] or null
    float* y;           // [rows, columns] with stride ldy
    int64_t ldy;
};

// Rows of x times some rows of an adapter's first matrix: out[i, r] = x[rows[i]] . a[r].
struct ShrinkTask {
    const void* a;  // [ranks, k]
    Type type;      // F32, F16 or BF16
    int64_t k;
    const float* x;
    int64_t ldx;
    const int32_t* rows;
    int64_t num_rows;
    int64_t first_rank, end_rank;
    float* out;  // [num_rows, ranks], rows ldo apart
    int64_t ldo;
};

// The result times some columns of the second matrix, onto rows of y, and what follows.
struct ExpandTask {
    const void* b;  // [rank, columns]
    Type type;
    int64_t rank, columns;
    const float* h;  // [num_rows, rank], rows ldh apart
    int64_t ldh;
    const int32_t* rows;
    int64_t num_rows;
    int64_t first_column, end_column;
    const float* multiplier;  // [columns], or null
    const float* shift;       // [columns], or null
    float* y;
    int64_t ldy;
};

constexpr int64_t kAllPositions = int64_t{1} << 40;  // for `before` and `after`

struct AttentionTask {
    const float* query;  // [tokens, heads, head_dim], rows query_stride apart
    int64_t query_stride;
    const void* cache;  // [blocks, 2, block_size, kv_heads, entry]
    int64_t block_stride;  // elements from block to block
    Type kv_type;  // F32, F16, BF16 or Int8
    int64_t block_size, num_heads, num_kv_heads, head_dim;
    float scale;
    int64_t before, after;  // visible positions on each side of a token
    float softcap;       // 0: none
    const float* sinks;  // [heads], or null
    float* output;       // [tokens, heads, head_dim], contiguous
    // which part:
    const int32_t* blocks;  // the request's block table; null: `cache` is its first key, no blocks
    int64_t key_stride;     // without blocks: floats from key to key, and from value to value
    int64_t value_offset;   // without blocks: bytes from a key to its value
    int64_t length;         // of the request so far
    int64_t first_row, end_row;  // rows of query
    int64_t first_position;      // the position of first_row's token
    int64_t first_head, end_head;  // all of one kv head
    float* scratch;
};

enum class Activation : int64_t { kGelu = 0, kGeluTanh = 1, kRelu = 2, kSilu = 3 };

constexpr int64_t kTokenBlock = 64;  // tokens per block of a row of logits

// A row of logits to sample from, as (logit - best) / temperature: the best is 0.
struct ScaledRow {
    const float* logits;
    const uint32_t* allowed;  // one bit per token; null: all are allowed
    int64_t size;
    float best, temperature;
};

struct Candidates {
    float* scaled;
    int32_t* tokens;
    int64_t count = 0;
};

struct Kernels {
    const char* name;
    int lanes;  // output columns in a group

    // Weights. A group is `lanes` rows of the checkpoint's matrix [out, in], interleaved.
    int64_t (*group_bytes)(Type type, int64_t k);
    void (*pack_group)(Type type, const uint8_t* rows, int64_t row_bytes, int64_t num_rows,
                       int64_t k, uint8_t* packed);
    void (*unpack_row)(Type type, const uint8_t* group, int64_t lane, int64_t k, float* out);
    int64_t (*matmul_scratch)(int64_t k);
    void (*matmul)(Type type, const MatmulTask& task);

    void (*lora_shrink)(const ShrinkTask& task);
    void (*lora_expand)(const ExpandTask& task);

    void (*quantize_row)(const float* x, const QuantizedRows& out, int64_t row);
    void (*rms_norm_row)(const float* x, const float* weight, float eps, int64_t size, float* out);
    // bias may be null.
    void (*layer_norm_row)(const float* x, const float* weight, const float* bias, float eps,
                           int64_t size, float* out);
    void (*add_row)(const float* a, const float* b, int64_t size, float* out);
    void (*silu_mul_row)(const float* x, int64_t size, float* out);
    // out[i] = activation(x[i]), if gated times x[size + i]; out may be x.
    void (*activate_row)(Activation activation, bool is_gated, const float* x, int64_t size,
                         float* out);
    void (*rotate_row)(const float* x, const float* cos, const float* sin, int64_t half, float* out);
    void (*store_kv_row)(const float* x, int64_t heads, int64_t head_dim, Type type, void* out);
    // Scratch is attention_scratch(...) floats.
    int64_t (*attention_scratch)(int64_t rows_and_heads, int64_t head_dim);
    void (*attend)(const AttentionTask& task);

    // The best logit of a row and of each of its blocks; NaN if one is NaN or plus infinity.
    float (*best_of_row)(const float* logits, const uint32_t* allowed, int64_t size,
                         float* block_best);
    // Of the block that begins at `first`: its tokens at or above the floor, or their mass.
    void (*gather_block)(const ScaledRow& row, int64_t first, float floor, Candidates& out);
    double (*mass_of_block)(const ScaledRow& row, int64_t first, float floor);
    void (*mass_of_tokens)(const float* scaled, int64_t count, float* out);
    void (*noise_of_tokens)(const int32_t* tokens, int64_t count, uint64_t seed, uint64_t position,
                            float* out);
};

extern const Kernels kPortable;
#if defined(PENSTOCK_ARM64)
extern const Kernels kNeon;
#endif
#if defined(PENSTOCK_X86)
extern const Kernels kAvx2;
extern const Kernels kAvxVnni;
extern const Kernels kAvx512;
#endif

}  // namespace penstock
