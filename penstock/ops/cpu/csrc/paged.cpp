// Rotary positions, the paged KV cache, and attention to it: cut into pieces of rows and heads.

#include <vector>

#include "runtime.hpp"

namespace penstock {
namespace {

constexpr int64_t kRows = 16;    // of a piece
constexpr int64_t kStates = 64;  // rows times heads of a piece

thread_local Scratch scratch;  // of the thread that takes a piece
thread_local std::vector<AttentionTask> task_list;

}  // namespace

void write_kv(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
              const Cache& cache, const int64_t* slots, int64_t rows) {
    const Kernels& isa = kernels();
    const Type type = static_cast<Type>(cache.type);
    const int64_t heads = cache.num_kv_heads, dim = cache.head_dim, width = element_bytes(type);
    const int64_t size = heads * entry_elements(type, dim);
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
    whole.window = scoring.window;
    whole.softcap = scoring.softcap;
    whole.sinks = scoring.sinks;
    whole.output = output;

    // Heads that share keys go together, unless that leaves threads without work.
    int64_t heads = std::min(group, kStates);
    if (step.num_requests * cache.num_kv_heads < num_threads()) heads = 1;
    const int64_t num_rows = std::max<int64_t>(std::min(kRows, kStates / heads), 1);
    task_list.clear();
    for (int64_t i = 0; i < step.num_requests; ++i) {
        whole.blocks = step.block_table + i * step.table_stride;
        const int64_t end = step.query_starts[i + 1];
        for (int64_t row = step.query_starts[i]; row < end; row += num_rows) {
            whole.first_row = row;
            whole.end_row = std::min(end, row + num_rows);
            whole.first_position = step.seq_lens[i] - (end - row);
            for (int64_t first = 0; first < num_heads; first += group) {
                for (int64_t head = first; head < first + group; head += heads) {
                    whole.first_head = head;
                    whole.end_head = std::min(first + group, head + heads);
                    task_list.push_back(whole);
                }
            }
        }
    }
    const int64_t floats = isa.attention_scratch(num_rows * heads, cache.head_dim);
    AttentionTask* tasks = task_list.data();  // the caller's: other threads have lists of their own
    for_each(static_cast<int64_t>(task_list.size()), [=, &isa](int64_t index, int) {
        tasks[index].scratch = scratch.floats(floats);
        isa.attend(tasks[index]);
    });
}

}  // namespace penstock

using namespace penstock;

PENSTOCK_API void penstock_write_kv(const float* key, int64_t key_stride, const float* value,
                                    int64_t value_stride, const Cache* cache, const int64_t* slots,
                                    int64_t rows) {
    write_kv(key, key_stride, value, value_stride, *cache, slots, rows);
}

PENSTOCK_API void penstock_rotate(float* x, int64_t heads, int64_t row_stride, int64_t head_dim,
                                  const Step* step) {
    rotate(x, heads, row_stride, head_dim, *step);
}

PENSTOCK_API void penstock_attend(const float* query, int64_t query_stride, int64_t num_heads,
                                  const Cache* cache, const Step* step, float scale, int64_t window,
                                  float softcap, const float* sinks, float* output) {
    const Scoring scoring{scale, window, softcap, sinks};
    attend(query, query_stride, num_heads, *cache, *step, scoring, output);
}
