// Attention within each request of a packed batch, without a cache, split into rows and heads.

#include "runtime.hpp"

namespace penstock {
namespace {

constexpr int64_t kRows = 64;  // per piece: they share the transposed keys

Scratch task_memory;

}  // namespace

void attend_rows(const float* query, int64_t query_stride, int64_t num_heads, const KeyValueRows& kv,
                 const Step& step, float scale, int64_t reach, float* output) {
    const Kernels& isa = kernels();
    AttentionTask whole{};
    whole.query = query;
    whole.query_stride = query_stride;
    whole.key_stride = kv.stride;
    whole.value_offset = (kv.value - kv.key) * static_cast<int64_t>(sizeof(float));
    whole.kv_type = F32;
    whole.num_heads = num_heads;
    whole.num_kv_heads = kv.num_kv_heads;
    whole.head_dim = kv.head_dim;
    whole.scale = scale;
    whole.before = whole.after = reach;
    whole.output = output;

    int64_t num_tasks = 0, before = 0;
    for (int64_t i = 0; i < step.num_requests; ++i) {
        const int64_t first = step.query_starts[i], end = step.query_starts[i + 1];
        check_index(first == before && first <= end && end <= step.rows);
        num_tasks += divide_up(end - first, kRows) * num_heads;
        before = end;
    }
    check_index(before == step.rows);
    auto* const tasks =
        reinterpret_cast<AttentionTask*>(task_memory.get(num_tasks * sizeof(AttentionTask)));
    AttentionTask* next = tasks;
    for (int64_t i = 0; i < step.num_requests; ++i) {
        const int64_t first = step.query_starts[i], end = step.query_starts[i + 1];
        whole.cache = kv.key + first * kv.stride;
        whole.length = end - first;
        for (int64_t head = 0; head < num_heads; ++head) {
            whole.first_head = head;
            whole.end_head = head + 1;
            for (int64_t row = first; row < end; row += kRows) {
                whole.first_row = row;
                whole.end_row = std::min(end, row + kRows);
                whole.first_position = row - first;
                *next++ = whole;
            }
        }
    }
    const int64_t floats = isa.attention_scratch(kRows, kv.head_dim);
    for_each(num_tasks, floats * sizeof(float), [=, &isa](int64_t index, uint8_t* scratch) {
        tasks[index].scratch = reinterpret_cast<float*>(scratch);
        isa.attend(tasks[index]);
    });
}

}  // namespace penstock

using namespace penstock;

PENSTOCK_API int32_t penstock_attend_rows(const float* query, int64_t query_stride,
                                          int64_t num_heads, const KeyValueRows* kv,
                                          const Step* step, float scale, int64_t reach,
                                          float* output) {
    return in_turn(
        [&] { attend_rows(query, query_stride, num_heads, *kv, *step, scale, reach, output); });
}
