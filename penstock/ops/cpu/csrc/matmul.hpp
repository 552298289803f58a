// Rows of activations times a range of packed weights.
//
// Every output is one lane of an accumulator that adds the columns from first to last. Every tile
// shape does the same arithmetic in the same order, so a row's result does not depend on other rows.
//
// For few rows, blocks are read as packed. Many rows share the work of unpacking them to bytes, and
// then compute two groups at once, so that four activations are loaded for two vectors.
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

// Dot products of one block with some rows of activations, `stride` apart. Formats with a scale per
// half of a block return the halves in low and high, others use only low.
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

// The eight vectors of bytes of a block.
template <int bits>
inline void block_bytes(const uint8_t* data, Isa::B* w) {
    if constexpr (bits == 8) {
        for (int g = 0; g < 8; ++g) w[g] = Isa::load_bytes(data + g * 4 * L);
        return;
    }
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
        const Isa::B both = Isa::load_bytes(data + g * 4 * L);
        w[g] = Isa::low_nibbles(both);
        w[g + 4] = Isa::high_nibbles(both);
        if constexpr (bits == 5) {
            const Isa::B plane = Isa::load_bytes(data + 16 * L);
            w[g] = Isa::with_high(w[g], plane, g, 1);
            w[g + 4] = Isa::with_high(w[g + 4], plane, g + 4, 1);
        }
        if constexpr (bits == 6) {
            w[g] = Isa::with_high(w[g], Isa::load_bytes(data + 16 * L), 2 * g, 2);
            w[g + 4] = Isa::with_high(w[g + 4], Isa::load_bytes(data + 20 * L), 2 * g, 2);
        }
    }
}

// The scales and offsets of a block of a group.
struct BlockScales {
    Isa::F scale, minimum;
    Isa::I first, second;  // of the halves
};

template <Type type>
inline BlockScales block_scales(const uint8_t* block, const uint8_t* super) {
    constexpr Format format = format_of(type);
    BlockScales s{Isa::zero(), Isa::zero(), Isa::iset(0), Isa::iset(0)};
    if constexpr (format.scales == Scales::kSuperHalves) {
        s.scale = Isa::load_half(super);
        s.first = Isa::load_i8(block);
        s.second = Isa::load_i8(block + L);
    } else if constexpr (format.scales == Scales::kSuper) {
        s.scale = Isa::mul(Isa::load_half(super), Isa::load_u8(block));
        s.minimum = Isa::mul(Isa::load_half(super + 2 * L), Isa::load_u8(block + L));
    } else {
        s.scale = Isa::load_half(block);
        if constexpr (format.scales == Scales::kScaleAndMin) s.minimum = Isa::load_half(block + 2 * L);
    }
    return s;
}

// Adds a block's dot products to the sums of a row; `at` is the block of the row's activations.
template <Type type>
inline Isa::F add_block(Isa::F acc, Isa::I low, Isa::I high, const BlockScales& s,
                        const QuantizedRows& x, int64_t at) {
    constexpr Format format = format_of(type);
    if constexpr (format.scales == Scales::kSuperHalves) {
        low = Isa::isub(low, Isa::iset(format.offset * x.halves[2 * at]));
        high = Isa::isub(high, Isa::iset(format.offset * x.halves[2 * at + 1]));
        low = Isa::iadd(Isa::imul(low, s.first), Isa::imul(high, s.second));
    } else if constexpr (format.offset != 0) {
        const int32_t sum = x.halves[2 * at] + x.halves[2 * at + 1];
        low = Isa::isub(low, Isa::iset(format.offset * sum));
    }
    const Isa::F both = Isa::mul(s.scale, Isa::set(x.scale[at]));
    acc = Isa::fma(Isa::to_float(low), both, acc);
    if constexpr (format.scales == Scales::kScaleAndMin) {
        acc = Isa::fma(s.minimum, Isa::set(x.sum[at]), acc);
    }
    if constexpr (format.scales == Scales::kSuper) {
        acc = Isa::fnma(s.minimum, Isa::set(x.sum[at]), acc);
    }
    return acc;
}

template <Type type, int rows>
void packed_tile(const MatmulTask& task, const uint8_t* packed, int64_t group, int64_t row) {
    constexpr Format format = format_of(type);
    constexpr bool in_halves = format.scales == Scales::kSuperHalves;
    const QuantizedRows& x = *task.quantized;
    const int64_t num_blocks = task.k / kBlock;
    const int8_t* q = x.q + row * task.k;
    const uint8_t* supers = packed + num_blocks * format.stride();

    Isa::F acc[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) acc[r] = Isa::zero();
    for (int64_t b = 0; b < num_blocks; ++b, packed += format.stride()) {
        const BlockScales s = block_scales<type>(packed, supers + b / 8 * format.super_bytes());
        Isa::I low[rows], high[rows];
        block_dots<format.bits, in_halves, rows>(packed + format.scale_bytes(), q + b * kBlock,
                                                 task.k, low, high);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            acc[r] = add_block<type>(acc[r], low[r], high[r], s, x, (row + r) * num_blocks + b);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) finish_tile(task, group, row + r, acc[r]);
}

// An unpacked block: vectors of scales, then 8 vectors of bytes.
template <Type type>
struct Unpacked {
    static constexpr Format format = format_of(type);
    static constexpr bool in_halves = format.scales == Scales::kSuperHalves;
    static constexpr bool has_minimum =
        format.scales == Scales::kScaleAndMin || format.scales == Scales::kSuper;
    static constexpr int kVector = 4 * L;  // bytes
    static constexpr int kScales = in_halves ? 3 : has_minimum ? 2 : 1;
    static constexpr int kStride = (kScales + 8) * kVector;

    static BlockScales scales(const uint8_t* block) {
        const auto* floats = reinterpret_cast<const float*>(block);
        BlockScales s{Isa::load(floats), Isa::zero(), Isa::iset(0), Isa::iset(0)};
        if constexpr (has_minimum) s.minimum = Isa::load(floats + L);
        if constexpr (in_halves) {
            std::memcpy(&s.first, block + kVector, kVector);
            std::memcpy(&s.second, block + 2 * kVector, kVector);
        }
        return s;
    }

    static void unpack(const uint8_t* packed, int64_t num_blocks, uint8_t* out) {
        const uint8_t* supers = packed + num_blocks * format.stride();
        for (int64_t b = 0; b < num_blocks; ++b, packed += format.stride(), out += kStride) {
            const BlockScales s = block_scales<type>(packed, supers + b / 8 * format.super_bytes());
            auto* floats = reinterpret_cast<float*>(out);
            Isa::store(floats, s.scale);
            if constexpr (has_minimum) Isa::store(floats + L, s.minimum);
            if constexpr (in_halves) {
                std::memcpy(out + kVector, &s.first, kVector);
                std::memcpy(out + 2 * kVector, &s.second, kVector);
            }
            Isa::B bytes[8];
            block_bytes<format.bits>(packed + format.scale_bytes(), bytes);
            for (int g = 0; g < 8; ++g) std::memcpy(out + (kScales + g) * kVector, &bytes[g], kVector);
        }
    }
};

template <Type type, int rows, int groups>
void unpacked_tile(const MatmulTask& task, int64_t group, int64_t row) {
    using Block = Unpacked<type>;
    const QuantizedRows& x = *task.quantized;
    const int64_t num_blocks = task.k / kBlock;
    const int8_t* q = x.q + row * task.k;
    const uint8_t* blocks = task.scratch;
    const int64_t group_stride = num_blocks * Block::kStride;

    Isa::F acc[rows][groups];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
        for (int i = 0; i < groups; ++i) acc[r][i] = Isa::zero();
    }
    for (int64_t b = 0; b < num_blocks; ++b, blocks += Block::kStride, q += kBlock) {
        Isa::I low[rows][groups], high[rows][groups];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
            for (int i = 0; i < groups; ++i) low[r][i] = high[r][i] = Isa::iset(0);
        }
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            Isa::B w[groups];
#pragma GCC unroll 2
            for (int i = 0; i < groups; ++i) {
                w[i] = Isa::load_bytes(blocks + i * group_stride + (Block::kScales + g) * Block::kVector);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                const Isa::B four = Isa::four_columns(q + r * task.k + 4 * g);
#pragma GCC unroll 2
                for (int i = 0; i < groups; ++i) {
                    Isa::I& sum = Block::in_halves && g >= 4 ? high[r][i] : low[r][i];
                    sum = Isa::mac8(sum, w[i], four);
                }
            }
        }
#pragma GCC unroll 2
        for (int i = 0; i < groups; ++i) {
            const BlockScales s = Block::scales(blocks + i * group_stride);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                acc[r][i] = add_block<type>(acc[r][i], low[r][i], high[r][i], s, x,
                                            (row + r) * num_blocks + b);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
        for (int i = 0; i < groups; ++i) finish_tile(task, group + i, row + r, acc[r][i]);
    }
}

// Rows that are computed together: their outputs stay in the L1 cache until the neighbouring columns
// are written.
constexpr int64_t kRowBlock = 32;
constexpr int64_t kUnpackedRows = 48;
constexpr int64_t kManyRows = 12;  // from here on, unpacking pays off

template <Type type>
void packed_rows(const MatmulTask& task, int64_t group, int64_t row, int64_t end) {
    const uint8_t* packed = task.packed + group * group_bytes(type, task.k);
    for (; row + 4 <= end; row += 4) packed_tile<type, 4>(task, packed, group, row);
    for (; row + 2 <= end; row += 2) packed_tile<type, 2>(task, packed, group, row);
    if (row < end) packed_tile<type, 1>(task, packed, group, row);
}

// Two groups.
template <Type type>
void unpacked_rows(const MatmulTask& task, int64_t group, int64_t row, int64_t end) {
    const int64_t bytes = group_bytes(type, task.k), num_blocks = task.k / kBlock;
    for (int i = 0; i < 2; ++i) {
        Unpacked<type>::unpack(task.packed + (group + i) * bytes, num_blocks,
                               task.scratch + i * num_blocks * Unpacked<type>::kStride);
    }
    constexpr int most = Unpacked<type>::in_halves ? 4 : 6;  // as many as fit into registers
    for (; row + most <= end; row += most) unpacked_tile<type, most, 2>(task, group, row);
    for (; row + 2 <= end; row += 2) unpacked_tile<type, 2, 2>(task, group, row);
    if (row < end) unpacked_tile<type, 1, 2>(task, group, row);
}

template <Type type>
void quantized_matmul(const MatmulTask& task) {
    const bool unpack = Isa::kUnpacks && task.end_row - task.first_row >= kManyRows;
    const int64_t step = unpack ? kUnpackedRows : kRowBlock;
    for (int64_t first = task.first_row; first < task.end_row; first += step) {
        const int64_t end = first + step < task.end_row ? first + step : task.end_row;
        int64_t group = task.first_group;
        if constexpr (Isa::kUnpacks) {
            for (; unpack && group + 2 <= task.end_group; group += 2) {
                unpacked_rows<type>(task, group, first, end);
            }
        }
        for (; group < task.end_group; ++group) packed_rows<type>(task, group, first, end);
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

// Scratch bytes of a matmul of a block type.
int64_t matmul_scratch(int64_t k) {
    return Isa::kUnpacks ? 2 * (k / kBlock) * Unpacked<Q6_K>::kStride : 0;  // the widest type
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
        case Int8: return;  // a type of caches only
    }
}

}  // namespace
