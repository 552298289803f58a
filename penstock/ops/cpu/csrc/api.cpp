// The C interface: raw pointers in, raw pointers out. Decides which instruction set computes, how
// work is cut into pieces for the threads, and owns scratch memory.

#include <cstdint>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "kernels.hpp"
#include "thread_pool.hpp"

#if defined(PENSTOCK_X86)
#include <cpuid.h>
#endif

#define PENSTOCK_API extern "C" __attribute__((visibility("default")))

using namespace penstock;

namespace {

// Pieces a thread gets of a loop: several, so that one that is late takes fewer.
constexpr int kPiecesPerThread = 4;
constexpr int64_t kSmallRows = 8;            // element-wise work on fewer rows is not worth a fork
constexpr int64_t kSmallWeights = 16 * 1024;  // nor is a matmul with fewer bytes of weights
constexpr int64_t kRowBlockBytes = 256 * 1024;  // of quantized activations, to stay in the L2 cache
constexpr int64_t kAttentionRows = 16;
constexpr int64_t kAttentionStates = 64;  // rows times heads of a piece

#if defined(PENSTOCK_X86)
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}

bool has_avx_vnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4));
}

bool supports(const Kernels& kernels) {
    __builtin_cpu_init();
    if (&kernels == &kPortable) return true;
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (&kernels == &kAvx2) return avx2;
    if (&kernels == &kAvxVnni) return avx2 && has_avx_vnni();
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

const Kernels* const kAll[] = {&kAvx512, &kAvxVnni, &kAvx2, &kPortable};  // best first
#else
bool supports(const Kernels&) { return true; }

const Kernels* const kAll[] = {&kPortable};
#endif

const Kernels* best() {
    for (const Kernels* kernels : kAll) {
        if (supports(*kernels)) return kernels;
    }
    return &kPortable;
}

const Kernels* active = best();

// Memory that a calling thread keeps between calls.
class Scratch {
  public:
    ~Scratch() { std::free(memory_); }

    uint8_t* get(size_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = (bytes + bytes / 4 + 63) / 64 * 64;
            memory_ = static_cast<uint8_t*>(std::aligned_alloc(64, size_));
            if (memory_ == nullptr) throw std::bad_alloc();
        }
        return memory_;
    }

  private:
    uint8_t* memory_ = nullptr;
    size_t size_ = 0;
};

thread_local Scratch quantized_scratch;
thread_local Scratch attention_scratch;
thread_local std::vector<AttentionTask> attention_tasks;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

template <class Body>
void for_rows(int64_t rows, const Body& body) {
    if (rows < kSmallRows) {
        for (int64_t row = 0; row < rows; ++row) body(row);
        return;
    }
    const int64_t pieces = std::min<int64_t>(rows, num_threads() * kPiecesPerThread);
    for_each(pieces, [&](int64_t piece, int) {
        const int64_t end = rows * (piece + 1) / pieces;
        for (int64_t row = rows * piece / pieces; row < end; ++row) body(row);
    });
}

bool is_block_type(Type type) { return type != F32 && type != F16 && type != BF16; }

}  // namespace

// -- the machine

PENSTOCK_API const char* penstock_isa() { return active->name; }

// 0 if there is no such instruction set here. Weights packed before are then unreadable.
PENSTOCK_API int penstock_select_isa(const char* name) {
    for (const Kernels* kernels : kAll) {
        if (std::strcmp(kernels->name, name) == 0 && supports(*kernels)) {
            active = kernels;
            return 1;
        }
    }
    return 0;
}

PENSTOCK_API void penstock_set_threads(int count) { set_num_threads(count); }
PENSTOCK_API int penstock_threads() { return num_threads(); }

// -- weights

PENSTOCK_API int64_t penstock_packed_bytes(int32_t type, int64_t rows, int64_t k) {
    return divide_up(rows, active->lanes) * active->group_bytes(static_cast<Type>(type), k);
}

// Rows of a checkpoint's matrix, row_bytes apart, into packed.
PENSTOCK_API void penstock_pack(int32_t type, const uint8_t* rows, int64_t row_bytes,
                                int64_t num_rows, int64_t k, uint8_t* packed) {
    const Kernels& isa = *active;
    const int64_t bytes = isa.group_bytes(static_cast<Type>(type), k);
    for_each(divide_up(num_rows, isa.lanes), [&](int64_t group, int) {
        const int64_t first = group * isa.lanes;
        isa.pack_group(static_cast<Type>(type), rows + first * row_bytes, row_bytes,
                       std::min<int64_t>(isa.lanes, num_rows - first), k, packed + group * bytes);
    });
}

// Rows of a packed weight as floats: out [count, k].
PENSTOCK_API void penstock_embed(int32_t type, const uint8_t* packed, int64_t k,
                                 const int64_t* ids, int64_t count, float* out) {
    const Kernels& isa = *active;
    const int64_t bytes = isa.group_bytes(static_cast<Type>(type), k);
    for_rows(count, [&](int64_t i) {
        isa.unpack_row(static_cast<Type>(type), packed + ids[i] / isa.lanes * bytes,
                       ids[i] % isa.lanes, k, out + i * k);
    });
}

// -- matmul

struct WeightPart {
    const uint8_t* packed;
    int64_t type;
    int64_t columns;
    int64_t first_column;  // of the output
};

namespace {

QuantizedRows quantized_rows(int64_t rows, int64_t k) {
    const int64_t blocks = rows * (k / kBlock);
    const size_t q = aligned(rows * k), scale = aligned(blocks * sizeof(float));
    uint8_t* memory = quantized_scratch.get(q + 2 * scale + 2 * blocks * sizeof(int32_t));
    return QuantizedRows{reinterpret_cast<int8_t*>(memory), reinterpret_cast<float*>(memory + q),
                         reinterpret_cast<float*>(memory + q + scale),
                         reinterpret_cast<int32_t*>(memory + q + 2 * scale), k};
}

}  // namespace

// y [rows, ldy] = x [rows, k] times each part, plus the bias [columns of all parts] if there is one.
PENSTOCK_API void penstock_linear(const WeightPart* parts, int64_t num_parts, const float* x,
                                  int64_t ldx, int64_t rows, int64_t k, const float* bias, float* y,
                                  int64_t ldy) {
    const Kernels& isa = *active;
    int64_t num_groups = 0, bytes = 0;
    bool quantize = false;
    for (int64_t p = 0; p < num_parts; ++p) {
        const int64_t groups = divide_up(parts[p].columns, isa.lanes);
        num_groups += groups;
        bytes += groups * isa.group_bytes(static_cast<Type>(parts[p].type), k);
        quantize |= is_block_type(static_cast<Type>(parts[p].type));
    }
    QuantizedRows quantized{};
    if (quantize) {
        quantized = quantized_rows(rows, k);
        for_rows(rows, [&](int64_t row) { isa.quantize_row(x + row * ldx, quantized, row); });
    }
    const int64_t row_blocks = divide_up(rows * k, kRowBlockBytes);
    const int64_t block_rows = std::max<int64_t>(divide_up(divide_up(rows, row_blocks), 8) * 8, 8);
    const int64_t num_blocks = divide_up(rows, block_rows);
    int64_t pieces = num_threads() == 1 ? 1 : num_threads() * kPiecesPerThread;
    if (bytes * rows < kSmallWeights) pieces = 1;
    pieces = std::min(pieces, num_groups);
    for_each(pieces * num_blocks, [&](int64_t index, int) {
        const int64_t piece = index % pieces, block = index / pieces;
        const int64_t first = num_groups * piece / pieces, end = num_groups * (piece + 1) / pieces;
        int64_t before = 0;  // groups of the parts before
        for (int64_t p = 0; p < num_parts; ++p) {
            const int64_t groups = divide_up(parts[p].columns, isa.lanes);
            MatmulTask task;
            task.packed = parts[p].packed;
            task.first_group = std::max<int64_t>(first - before, 0);
            task.end_group = std::min(end - before, groups);
            task.columns = parts[p].columns;
            task.k = k;
            task.quantized = &quantized;
            task.x = x;
            task.ldx = ldx;
            task.first_row = block * block_rows;
            task.end_row = std::min(rows, task.first_row + block_rows);
            task.bias = bias ? bias + parts[p].first_column : nullptr;
            task.y = y + parts[p].first_column;
            task.ldy = ldy;
            if (task.first_group < task.end_group) isa.matmul(static_cast<Type>(parts[p].type), task);
            before += groups;
        }
    });
}

// -- rows

// x [outer, inner, size] with strides; out is contiguous.
PENSTOCK_API void penstock_rms_norm(const float* x, int64_t outer, int64_t inner,
                                    int64_t outer_stride, int64_t inner_stride, int64_t size,
                                    const float* weight, float eps, float* out) {
    const Kernels& isa = *active;
    for_rows(outer, [&](int64_t i) {
        for (int64_t j = 0; j < inner; ++j) {
            isa.rms_norm_row(x + i * outer_stride + j * inner_stride, weight, eps, size,
                             out + (i * inner + j) * size);
        }
    });
}

// sum = x + residual, out = its norm; all contiguous. sum may be x or residual.
PENSTOCK_API void penstock_add_rms_norm(const float* x, const float* residual, int64_t rows,
                                        int64_t size, const float* weight, float eps, float* sum,
                                        float* out) {
    const Kernels& isa = *active;
    for_rows(rows, [&](int64_t i) {
        isa.add_row(x + i * size, residual + i * size, size, sum + i * size);
        isa.rms_norm_row(sum + i * size, weight, eps, size, out + i * size);
    });
}

// x [rows, 2 * size], contiguous -> out [rows, size].
PENSTOCK_API void penstock_silu_mul(const float* x, int64_t rows, int64_t size, float* out) {
    const Kernels& isa = *active;
    for_rows(rows, [&](int64_t i) { isa.silu_mul_row(x + 2 * i * size, size, out + i * size); });
}

// x [rows, heads, head_dim] with stride row_stride, in place; cos and sin [rows, half].
PENSTOCK_API void penstock_rotate(float* x, int64_t rows, int64_t heads, int64_t row_stride,
                                  int64_t head_dim, const float* cos, const float* sin,
                                  int64_t angle_stride, int64_t half) {
    const Kernels& isa = *active;
    for_rows(rows, [&](int64_t i) {
        for (int64_t h = 0; h < heads; ++h) {
            float* head = x + i * row_stride + h * head_dim;
            isa.rotate_row(head, cos + i * angle_stride, sin + i * angle_stride, half, head);
        }
    });
}

// -- attention

struct Cache {
    void* data;  // [blocks, 2, block_size, kv_heads, head_dim]
    int64_t block_stride, block_size, num_kv_heads, head_dim;
    int64_t is_bf16;  // else float32
};

// Keys and values [rows, kv_heads * head_dim], rows `stride` apart, to slots of the cache.
PENSTOCK_API void penstock_write_kv(const float* key, int64_t key_stride, const float* value,
                                    int64_t value_stride, const Cache* cache, const int64_t* slots,
                                    int64_t rows) {
    const Kernels& isa = *active;
    const int64_t size = cache->num_kv_heads * cache->head_dim;
    const int64_t bytes = cache->is_bf16 ? 2 : 4;
    for_rows(rows, [&](int64_t i) {
        const int64_t block = slots[i] / cache->block_size, offset = slots[i] % cache->block_size;
        uint8_t* at = static_cast<uint8_t*>(cache->data) +
                      (block * cache->block_stride + offset * size) * bytes;
        isa.store_kv_row(key + i * key_stride, size, cache->is_bf16, at);
        isa.store_kv_row(value + i * value_stride, size, cache->is_bf16,
                         at + cache->block_size * size * bytes);
    });
}

// query [tokens, heads, head_dim] with stride query_stride -> output, contiguous. Request i has rows
// query_starts[i] to query_starts[i + 1], the last tokens of its seq_lens[i].
PENSTOCK_API void penstock_attend(const float* query, int64_t query_stride, int64_t num_heads,
                                  const Cache* cache, const int32_t* query_starts,
                                  const int32_t* seq_lens, const int32_t* block_table,
                                  int64_t table_stride, int64_t num_requests, float scale,
                                  int64_t window, float* output) {
    const Kernels& isa = *active;
    const int64_t group = num_heads / cache->num_kv_heads;
    AttentionTask whole;
    whole.query = query;
    whole.query_stride = query_stride;
    whole.cache = cache->data;
    whole.block_stride = cache->block_stride;
    whole.kv_is_bf16 = static_cast<int32_t>(cache->is_bf16);
    whole.block_size = cache->block_size;
    whole.num_heads = num_heads;
    whole.num_kv_heads = cache->num_kv_heads;
    whole.head_dim = cache->head_dim;
    whole.scale = scale;
    whole.window = window;
    whole.output = output;

    // Heads that share keys go together, unless that leaves threads without work.
    int64_t heads = group;
    if (num_requests * cache->num_kv_heads < 2 * num_threads()) heads = 1;
    heads = std::min(heads, kAttentionStates);
    const int64_t step = std::max<int64_t>(std::min(kAttentionRows, kAttentionStates / heads), 1);
    attention_tasks.clear();
    for (int64_t i = 0; i < num_requests; ++i) {
        whole.blocks = block_table + i * table_stride;
        const int64_t start = query_starts[i], end = query_starts[i + 1];
        for (int64_t row = start; row < end; row += step) {
            whole.first_row = row;
            whole.end_row = std::min(end, row + step);
            whole.first_position = seq_lens[i] - (end - row);
            for (int64_t first = 0; first < num_heads; first += group) {
                for (int64_t head = first; head < first + group; head += heads) {
                    whole.first_head = head;
                    whole.end_head = std::min(first + group, head + heads);
                    attention_tasks.push_back(whole);
                }
            }
        }
    }
    const size_t floats = aligned(isa.attention_scratch(step * heads, cache->head_dim));
    float* scratch = reinterpret_cast<float*>(
        attention_scratch.get(floats * sizeof(float) * num_threads()));
    AttentionTask* tasks = attention_tasks.data();  // the caller's: workers have lists of their own
    for_each(static_cast<int64_t>(attention_tasks.size()), [&](int64_t index, int thread) {
        tasks[index].scratch = scratch + thread * floats;
        isa.attend(tasks[index]);
    });
}
