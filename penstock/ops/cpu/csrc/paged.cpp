// Rotary embedding, the paged KV cache, and paged attention, split into pieces of rows and heads.

#include "runtime.hpp"

namespace penstock {
namespace {

constexpr int64_t kRows = 16;    // of a piece
constexpr int64_t kStates = 64;  // rows times heads of a piece

Scratch task_memory;

// Whether request i's rows are within the step and its tokens within the cache.
bool is_sound(const Step& step, const Cache& cache, int64_t i) {
    const int64_t first = step.query_starts[i], end = step.query_starts[i + 1];
    const int64_t length = step.seq_lens[i], blocks = divide_up(length, cache.block_size);
    if (first < 0 || first > end || end > step.rows) return false;
    if (length < end - first || blocks > step.table_width) return false;
    return all_below(step.block_table + i * step.table_stride, blocks, cache.num_blocks);
}

}  // namespace

void write_kv(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
              const Cache& cache, const int64_t* slots, int64_t rows) {
    const Kernels& isa = kernels();
    const Type type = static_cast<Type>(cache.type);
    const int64_t heads = cache.num_kv_heads, dim = cache.head_dim, width = element_bytes(type);
    const int64_t size = heads * entry_elements(type, dim);
    check_index(all_below(slots, rows, cache.num_blocks * cache.block_size));
    for_rows(rows, [&](int64_t i) {
        const int64_t block = slots[i] / cache.block_size, offset = slots[i] % cache.block_size;
        uint8_t* at =
            static_cast<uint8_t*>(cache.data) + (block * cache.block_stride + offset * size) * width;
        isa.store_kv_row(key + i * key_stride, heads, dim, type, at);
        isa.store_kv_row(value + i * value_stride, heads, dim, type,
                         at + cache.block_size * size * width);
    });
}

void rotate(float* x, int64_t heads, int64_t row_stride, int64_t head_dim, const Step& step) {
    const Kernels& isa = kernels();
    for_rows(step.rows, [&](int64_t i) {
        const float *cos = step.cos + i * step.angle_stride, *sin = step.sin + i * step.angle_stride;
        for (int64_t h = 0; h < heads; ++h) {
            float* head = x + i * row_stride + h * head_dim;
            isa.rotate_row(head, cos, sin, step.half, head);
        }
    });
}

void attend(const float* query, int64_t query_stride, int64_t num_heads, const Cache& cache,
            const Step& step, const Scoring& scoring, float* output) {
    const Kernels& isa = kernels();
    const int64_t group = num_heads / cache.num_kv_heads;
    AttentionTask whole{};
    whole.query = query;
    whole.query_stride = query_stride;
    whole.cache = cache.data;
    whole.block_stride = cache.block_stride;
    whole.kv_type = static_cast<Type>(cache.type);
    whole.block_size = cache.block_size;
    whole.num_heads = num_heads;
    whole.num_kv_heads = cache.num_kv_heads;
    whole.head_dim = cache.head_dim;
    whole.scale = scoring.scale;
    whole.before = scoring.window > 0 ? scoring.window - 1 : kAllPositions;
    whole.after = 0;
    whole.softcap = scoring.softcap;
    whole.sinks = scoring.sinks;
    whole.output = output;

    // Heads that share keys are computed together, unless threads would be idle.
    int64_t heads = std::min(group, kStates);
    if (step.num_requests * cache.num_kv_heads < num_threads()) heads = 1;
    const int64_t num_rows = std::max<int64_t>(std::min(kRows, kStates / heads), 1);
    int64_t num_tasks = 0;
    for (int64_t i = 0; i < step.num_requests; ++i) {
        check_index(is_sound(step, cache, i));
        num_tasks += divide_up(step.query_starts[i + 1] - step.query_starts[i], num_rows);
    }
    num_tasks *= cache.num_kv_heads * divide_up(group, heads);
    auto* const tasks =
        reinterpret_cast<AttentionTask*>(task_memory.get(num_tasks * sizeof(AttentionTask)));
    AttentionTask* next = tasks;
    for (int64_t i = 0; i < step.num_requests; ++i) {
        whole.blocks = step.block_table + i * step.table_stride;
        whole.length = step.seq_lens[i];
        const int64_t end = step.query_starts[i + 1];
        for (int64_t row = step.query_starts[i]; row < end; row += num_rows) {
            whole.first_row = row;
            whole.end_row = std::min(end, row + num_rows);
            whole.first_position = step.seq_lens[i] - (end - row);
            for (int64_t first = 0; first < num_heads; first += group) {
                for (int64_t head = first; head < first + group; head += heads) {
                    whole.first_head = head;
                    whole.end_head = std::min(first + group, head + heads);
                    *next++ = whole;
                }
            }
        }
    }
    const int64_t floats = isa.attention_scratch(num_rows * heads, cache.head_dim);
    for_each(num_tasks, floats * sizeof(float), [=, &isa](int64_t index, uint8_t* scratch) {
        tasks[index].scratch = reinterpret_cast<float*>(scratch);
        isa.attend(tasks[index]);
    });
}

}  // namespace penstock

using namespace penstock;

PENSTOCK_API int32_t penstock_write_kv(const float* key, int64_t key_stride, const float* value,
                                       int64_t value_stride, const Cache* cache,
                                       const int64_t* slots, int64_t rows) {
    return in_turn([&] { write_kv(key, key_stride, value, value_stride, *cache, slots, rows); });
}

PENSTOCK_API int32_t penstock_rotate(float* x, int64_t heads, int64_t row_stride, int64_t head_dim,
                                     const Step* step) {
    return in_turn([&] { rotate(x, heads, row_stride, head_dim, *step); });
}

PENSTOCK_API int32_t penstock_attend(const float* query, int64_t query_stride, int64_t num_heads,
                                     const Cache* cache, const Step* step, float scale,
                                     int64_t window, float softcap, const float* sinks,
                                     float* output) {
    const Scoring scoring{scale, window, softcap, sinks};
    return in_turn(
        [&] { attend(query, query_stride, num_heads, *cache, *step, scoring, output); });
}
