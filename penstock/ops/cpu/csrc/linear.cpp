// Matmul, split into pieces of columns, and of rows if there are many.

#include "runtime.hpp"

namespace penstock {
namespace {

constexpr int64_t kSmallWork = 16 * 1024;  // bytes of weights times rows: less is not worth a fork
constexpr int64_t kRowBlockBytes = 256 * 1024;  // of 8-bit activations, so that they stay in the L2 cache

Scratch scratch;

}  // namespace

QuantizedRows quantized_rows(int64_t rows, int64_t k) {
    const int64_t blocks = rows * (k / kBlock);
    const int64_t q = align(rows * k), scale = align(blocks * sizeof(float));
    uint8_t* memory = scratch.get(q + 2 * scale + 2 * blocks * sizeof(int32_t));
    return QuantizedRows{reinterpret_cast<int8_t*>(memory), reinterpret_cast<float*>(memory + q),
                         reinterpret_cast<float*>(memory + q + scale),
                         reinterpret_cast<int32_t*>(memory + q + 2 * scale), k};
}

void linear(const Weights& weights, const Activations& activations, float* y, int64_t ldy) {
    const Kernels& isa = kernels();
    const int64_t rows = activations.rows, k = activations.k;
    int64_t num_groups = 0, bytes = 0;
    for (int64_t p = 0; p < weights.num_parts; ++p) {
        const int64_t groups = divide_up(weights.parts[p].columns, isa.lanes);
        num_groups += groups;
        bytes += groups * isa.group_bytes(static_cast<Type>(weights.parts[p].type), k);
    }
    const int64_t row_blocks = std::max<int64_t>(divide_up(rows * k, kRowBlockBytes), 1);
    const int64_t block_rows = std::max<int64_t>(divide_up(divide_up(rows, row_blocks), 8) * 8, 8);
    const int64_t num_blocks = divide_up(rows, block_rows);
    int64_t pieces = num_threads() == 1 ? 1 : num_threads() * kPiecesPerThread;
    if (bytes * rows < kSmallWork) pieces = 1;
    pieces = std::min(pieces, num_groups);
    const int64_t unpacked = weights.has_blocks() ? isa.matmul_scratch(k) : 0;
    for_each(pieces * num_blocks, unpacked, [&](int64_t index, uint8_t* memory) {
        const int64_t piece = index % pieces, block = index / pieces;
        const int64_t first = num_groups * piece / pieces, end = num_groups * (piece + 1) / pieces;
        int64_t before = 0;  // groups of the earlier parts
        for (int64_t p = 0; p < weights.num_parts; ++p) {
            const WeightPart& part = weights.parts[p];
            const int64_t groups = divide_up(part.columns, isa.lanes);
            MatmulTask task;
            task.packed = part.packed;
            task.first_group = std::max<int64_t>(first - before, 0);
            task.end_group = std::min(end - before, groups);
            task.columns = part.columns;
            task.k = k;
            task.quantized = &activations.quantized;
            task.scratch = memory;
            task.x = activations.x;
            task.ldx = activations.ldx;
            task.first_row = block * block_rows;
            task.end_row = std::min(rows, task.first_row + block_rows);
            task.bias = weights.bias ? weights.bias + part.first_column : nullptr;
            task.y = y + part.first_column;
            task.ldy = ldy;
            if (task.first_group < task.end_group) isa.matmul(static_cast<Type>(part.type), task);
            before += groups;
        }
    });
}

}  // namespace penstock

using namespace penstock;

PENSTOCK_API int32_t penstock_linear(const Weights* weights, const float* x, int64_t ldx,
                                     int64_t rows, int64_t k, float* y, int64_t ldy) {
    return in_turn([&] {
        Activations activations{x, ldx, rows, k, {}};
        if (weights->has_blocks()) {
            activations.quantized = quantized_rows(rows, k);
            for_rows(rows, [&](int64_t row) {
                kernels().quantize_row(x + row * ldx, activations.quantized, row);
            });
        }
        linear(*weights, activations, y, ldy);
    });
}
