// Rows of activations times a stretch of packed weights.
//
// Every output is one lane of an accumulator that walks the columns from first to last, and every
// tile shape does the same arithmetic in the same order: a row's result does not depend on the
// rows beside it.
#pragma once

#include "weights.hpp"

namespace {

void finish_tile(const MatmulTask& task, int64_t group, int64_t row, Isa::F value) {
    const int64_t column = group * L;
    float* y = task.y + row * task.ldy + column;
    if (column + L <= task.columns) {
        if (task.bias) value = Isa::add(value, Isa::load(task.bias + column));
        Isa::store(y, value);
        return;
    }
    float whole[L];
    Isa::store(whole, value);
    for (int64_t i = 0; column + i < task.columns; ++i) {
        y[i] = task.bias ? whole[i] + task.bias[column + i] : whole[i];
    }
}

// Dot products of one block with some rows of activations, `stride` apart. Formats with a scale for
// each half of a block have them apart in low and high, others all in low.
template <int bits, bool halves, int rows>
inline void block_dots(const uint8_t* data, const int8_t* x, int64_t stride, Isa::I* low, Isa::I* high) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) low[r] = high[r] = Isa::iset(0);
    if constexpr (bits == 8) {
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            const Isa::B w = Isa::load_bytes(data + g * 4 * L);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                low[r] = Isa::mac8(low[r], w, Isa::four_columns(x + r * stride + 4 * g));
            }
        }
        return;
    }
    Isa::Partial first[rows], second[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) first[r] = second[r] = Isa::none();
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
        const Isa::B both = Isa::load_bytes(data + g * 4 * L);
        Isa::B w = Isa::low_nibbles(both), w_high = Isa::high_nibbles(both);
        if constexpr (bits == 5) {
            const Isa::B plane = Isa::load_bytes(data + 16 * L);
            w = Isa::with_high(w, plane, g, 1);
            w_high = Isa::with_high(w_high, plane, g + 4, 1);
        }
        if constexpr (bits == 6) {
            w = Isa::with_high(w, Isa::load_bytes(data + 16 * L), 2 * g, 2);
            w_high = Isa::with_high(w_high, Isa::load_bytes(data + 20 * L), 2 * g, 2);
        }
        Isa::Partial* other = halves ? second : first;
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            first[r] = Isa::mac(first[r], w, Isa::four_columns(x + r * stride + 4 * g));
            other[r] = Isa::mac(other[r], w_high, Isa::four_columns(x + r * stride + 4 * g + 16));
        }
        constexpr int run = Isa::template run<bits>() / (halves ? 1 : 2);
        if (g + 1 == 4 || (g + 1) % run == 0) {
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                low[r] = Isa::add_up(low[r], first[r]);
                if constexpr (halves) high[r] = Isa::add_up(high[r], second[r]);
                if (g + 1 < 4) first[r] = second[r] = Isa::none();
            }
        }
    }
}

template <Type type, int rows>
void quantized_tile(const MatmulTask& task, const uint8_t* packed, int64_t group, int64_t row) {
    constexpr Format format = format_of(type);
    const QuantizedRows& x = *task.quantized;
    const int64_t num_blocks = task.k / kBlock;
    const int8_t* q = x.q + row * task.k;
    const float* scales = x.scale + row * num_blocks;
    const float* sums = x.sum + row * num_blocks;
    const int32_t* halves = x.halves + row * num_blocks * 2;
    const uint8_t* supers = packed + num_blocks * format.stride();

    Isa::F acc[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) acc[r] = Isa::zero();
    Isa::F super_scale = Isa::zero(), super_minimum = Isa::zero();

    for (int64_t b = 0; b < num_blocks; ++b, packed += format.stride()) {
        if constexpr (format.is_super()) {
            if (b % 8 == 0) {
                const uint8_t* super = supers + b / 8 * format.super_bytes();
                super_scale = Isa::load_half(super);
                if constexpr (format.scales == Scales::kSuper) {
                    super_minimum = Isa::load_half(super + 2 * L);
                }
            }
        }
        Isa::F scale, minimum = Isa::zero();
        Isa::I first = Isa::iset(0), second = first;
        if constexpr (format.scales == Scales::kSuperHalves) {
            scale = super_scale;
            first = Isa::load_i8(packed);
            second = Isa::load_i8(packed + L);
        } else if constexpr (format.scales == Scales::kSuper) {
            scale = Isa::mul(super_scale, Isa::load_u8(packed));
            minimum = Isa::mul(super_minimum, Isa::load_u8(packed + L));
        } else {
            scale = Isa::load_half(packed);
            if constexpr (format.scales == Scales::kScaleAndMin) {
                minimum = Isa::load_half(packed + 2 * L);
            }
        }
        constexpr bool in_halves = format.scales == Scales::kSuperHalves;
        Isa::I low[rows], high[rows];
        block_dots<format.bits, in_halves, rows>(packed + format.scale_bytes(), q + b * kBlock,
                                                 task.k, low, high);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const int64_t at = r * num_blocks + b;
            Isa::I dot = low[r];
            if constexpr (in_halves) {
                low[r] = Isa::isub(low[r], Isa::iset(format.offset * halves[2 * at]));
                high[r] = Isa::isub(high[r], Isa::iset(format.offset * halves[2 * at + 1]));
                dot = Isa::iadd(Isa::imul(low[r], first), Isa::imul(high[r], second));
            } else if constexpr (format.offset != 0) {
                const int32_t sum = halves[2 * at] + halves[2 * at + 1];
                dot = Isa::isub(dot, Isa::iset(format.offset * sum));
            }
            const Isa::F both = Isa::mul(scale, Isa::set(scales[at]));
            acc[r] = Isa::fma(Isa::to_float(dot), both, acc[r]);
            if constexpr (format.scales == Scales::kScaleAndMin) {
                acc[r] = Isa::fma(minimum, Isa::set(sums[at]), acc[r]);
            }
            if constexpr (format.scales == Scales::kSuper) {
                acc[r] = Isa::fnma(minimum, Isa::set(sums[at]), acc[r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) finish_tile(task, group, row + r, acc[r]);
}

// Rows that pass over the weights together: what they write stays in the L1 cache until the columns
// beside it are written too.
constexpr int64_t kRowBlock = 32;

template <Type type>
void quantized_matmul(const MatmulTask& task) {
    const int64_t bytes = group_bytes(type, task.k);
    for (int64_t first = task.first_row; first < task.end_row; first += kRowBlock) {
        const int64_t end = first + kRowBlock < task.end_row ? first + kRowBlock : task.end_row;
        for (int64_t group = task.first_group; group < task.end_group; ++group) {
            const uint8_t* packed = task.packed + group * bytes;
            int64_t row = first;
            for (; row + Isa::kRowTile <= end; row += Isa::kRowTile) {
                quantized_tile<type, Isa::kRowTile>(task, packed, group, row);
            }
            if constexpr (Isa::kRowTile > 4) {
                for (; row + 4 <= end; row += 4) quantized_tile<type, 4>(task, packed, group, row);
            }
            for (; row + 2 <= end; row += 2) quantized_tile<type, 2>(task, packed, group, row);
            if (row < end) quantized_tile<type, 1>(task, packed, group, row);
        }
    }
}

template <Type type>
inline Isa::F load_weights(const uint8_t* p) {
    if constexpr (type == F32) return Isa::load(reinterpret_cast<const float*>(p));
    if constexpr (type == BF16) return Isa::load_bf16(reinterpret_cast<const uint16_t*>(p));
    return Isa::load_half(p);
}

template <Type type, int rows, int groups>
void dense_tile(const MatmulTask& task, int64_t group, int64_t row) {
    constexpr int step = L * (type == F32 ? 4 : 2);
    const uint8_t* packed = task.packed + group * task.k * step;
    const float* x = task.x + row * task.ldx;
    Isa::F acc[rows][groups];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) acc[r][g] = Isa::zero();
    }
    for (int64_t i = 0; i < task.k; ++i) {
        Isa::F w[groups];
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) {
            w[g] = load_weights<type>(packed + (g * task.k + i) * step);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const Isa::F value = Isa::set(x[r * task.ldx + i]);
#pragma GCC unroll 4
            for (int g = 0; g < groups; ++g) acc[r][g] = Isa::fma(value, w[g], acc[r][g]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) finish_tile(task, group + g, row + r, acc[r][g]);
    }
}

template <Type type, int groups>
void dense_rows(const MatmulTask& task, int64_t group) {
    int64_t row = task.first_row;
    for (; row + Isa::kRowTile <= task.end_row; row += Isa::kRowTile) {
        dense_tile<type, Isa::kRowTile, groups>(task, group, row);
    }
    for (; row + 2 <= task.end_row; row += 2) dense_tile<type, 2, groups>(task, group, row);
    if (row < task.end_row) dense_tile<type, 1, groups>(task, group, row);
}

template <Type type>
void dense_matmul(const MatmulTask& whole) {
    MatmulTask task = whole;
    for (; task.first_row < whole.end_row; task.first_row += kRowBlock) {
        task.end_row = task.first_row + kRowBlock < whole.end_row ? task.first_row + kRowBlock : whole.end_row;
        int64_t group = task.first_group;
        for (; group + 3 <= task.end_group; group += 3) dense_rows<type, 3>(task, group);
        for (; group < task.end_group; ++group) dense_rows<type, 1>(task, group);
    }
}

void matmul(Type type, const MatmulTask& task) {
    switch (type) {
        case F32: return dense_matmul<F32>(task);
        case F16: return dense_matmul<F16>(task);
        case BF16: return dense_matmul<BF16>(task);
        case Q4_0: return quantized_matmul<Q4_0>(task);
        case Q4_1: return quantized_matmul<Q4_1>(task);
        case Q5_0: return quantized_matmul<Q5_0>(task);
        case Q5_1: return quantized_matmul<Q5_1>(task);
        case Q8_0: return quantized_matmul<Q8_0>(task);
        case Q4_K: return quantized_matmul<Q4_K>(task);
        case Q5_K: return quantized_matmul<Q5_K>(task);
        case Q6_K: return quantized_matmul<Q6_K>(task);
        case Int8: return;  // of caches, not of weights
    }
}

}  // namespace
