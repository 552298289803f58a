// LoRA: rows of activations times an adapter's two matrices, the first of which is small.
//
// Every output has one running sum, over the columns from first to last, whatever the tile: a row's
// result does not depend on the rows beside it.
#pragma once

#include "matmul.hpp"

namespace {

constexpr int kRankTile = L >= 16 ? 4 : 2;  // what registers hold beside four rows
constexpr int kAloneRanks = 8;              // of a single row, so that latency does not show

// The sum of a vector's lanes.
inline float sum_of(Isa::F v) {
    float lanes[L];
    Isa::store(lanes, v);
    F8 sum = f8_load(lanes);
    for (int i = 8; i < L; i += 8) sum = sum + f8_load(lanes + i);
    return f8_hsum(sum);
}

constexpr int bytes_of(Type type) { return type == F32 ? 4 : 2; }

// The last `count` numbers of a row, less than a vector, filled up with zeros.
template <Type type>
inline Isa::F load_last(const uint8_t* p, int64_t count) {
    uint8_t padded[L * 4] = {};
    for (int64_t i = 0; i < count * bytes_of(type); ++i) padded[i] = p[i];
    return load_weights<type>(padded);
}

template <Type type, int rows, int ranks>
void shrink_tile(const ShrinkTask& task, int64_t row, int64_t rank) {
    const uint8_t* a[ranks];
    const uint8_t* x[rows];
    for (int r = 0; r < rows; ++r) {
        x[r] = reinterpret_cast<const uint8_t*>(task.x + task.rows[row + r] * task.ldx);
    }
    for (int i = 0; i < ranks; ++i) {
        a[i] = static_cast<const uint8_t*>(task.a) + (rank + i) * task.k * bytes_of(type);
    }
    Isa::F acc[rows][ranks];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < ranks; ++i) acc[r][i] = Isa::zero();
    }
    int64_t column = 0;
    for (; column + L <= task.k; column += L) {
        Isa::F w[ranks];
#pragma GCC unroll 8
        for (int i = 0; i < ranks; ++i) w[i] = load_weights<type>(a[i] + column * bytes_of(type));
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const Isa::F value = load_weights<F32>(x[r] + column * 4);
#pragma GCC unroll 8
            for (int i = 0; i < ranks; ++i) acc[r][i] = Isa::fma(value, w[i], acc[r][i]);
        }
    }
    const int64_t left = task.k - column;
    for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < ranks; ++i) {
            Isa::F sum = acc[r][i];
            if (left > 0) {
                sum = Isa::fma(load_last<F32>(x[r] + column * 4, left),
                               load_last<type>(a[i] + column * bytes_of(type), left), sum);
            }
            task.out[(row + r) * task.ldo + rank + i] = sum_of(sum);
        }
    }
}

template <Type type, int rows>
void shrink_rows(const ShrinkTask& task, int64_t row) {
    constexpr int most = rows == 1 ? kAloneRanks : kRankTile;
    int64_t rank = task.first_rank;
    for (; rank + most <= task.end_rank; rank += most) shrink_tile<type, rows, most>(task, row, rank);
    for (; rank + 2 <= task.end_rank; rank += 2) shrink_tile<type, rows, 2>(task, row, rank);
    if (rank < task.end_rank) shrink_tile<type, rows, 1>(task, row, rank);
}

template <Type type>
void shrink_all(const ShrinkTask& task) {
    int64_t row = 0;
    for (; row + 4 <= task.num_rows; row += 4) shrink_rows<type, 4>(task, row);
    for (; row + 2 <= task.num_rows; row += 2) shrink_rows<type, 2>(task, row);
    if (row < task.num_rows) shrink_rows<type, 1>(task, row);
}

void lora_shrink(const ShrinkTask& task) {
    switch (task.type) {
        case F32: return shrink_all<F32>(task);
        case F16: return shrink_all<F16>(task);
        case BF16: return shrink_all<BF16>(task);
        default: return;
    }
}

// A vector of floats, of which only `count` exist where it is the last.
template <bool is_last>
inline Isa::F load_floats(const float* p, int64_t count) {
    if constexpr (is_last) return load_last<F32>(reinterpret_cast<const uint8_t*>(p), count);
    return Isa::load(p);
}

// `groups` vectors of output columns, or the last one, which is less than a vector.
template <Type type, int rows, int groups, bool is_last>
void expand_tile(const ExpandTask& task, int64_t row, int64_t column) {
    const int64_t left = task.columns - column;
    const int64_t stride = task.columns * bytes_of(type);
    const uint8_t* b = static_cast<const uint8_t*>(task.b) + column * bytes_of(type);
    const float* h[rows];
    float* y[rows];
    Isa::F acc[rows][groups];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        h[r] = task.h + (row + r) * task.ldh;
        y[r] = task.y + task.rows[row + r] * task.ldy + column;
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) acc[r][g] = load_floats<is_last>(y[r] + g * L, left);
    }
    for (int64_t i = 0; i < task.rank; ++i, b += stride) {
        Isa::F w[groups];
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) {
            const uint8_t* at = b + g * L * bytes_of(type);
            w[g] = is_last ? load_last<type>(at, left) : load_weights<type>(at);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const Isa::F value = Isa::set(h[r][i]);
#pragma GCC unroll 4
            for (int g = 0; g < groups; ++g) acc[r][g] = Isa::fma(value, w[g], acc[r][g]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) {
            const int64_t at = column + g * L;
            Isa::F value = acc[r][g];
            if (task.multiplier) {
                value = Isa::mul(value, load_floats<is_last>(task.multiplier + at, left));
            }
            if (task.shift) value = Isa::add(value, load_floats<is_last>(task.shift + at, left));
            if constexpr (is_last) {
                float whole[L];
                Isa::store(whole, value);
                for (int64_t i = 0; i < left; ++i) y[r][i] = whole[i];
            } else {
                Isa::store(y[r] + g * L, value);
            }
        }
    }
}

template <Type type, int groups, bool is_last>
void expand_rows(const ExpandTask& task, int64_t column) {
    int64_t row = 0;
    for (; row + 4 <= task.num_rows; row += 4) {
        expand_tile<type, 4, groups, is_last>(task, row, column);
    }
    for (; row < task.num_rows; ++row) expand_tile<type, 1, groups, is_last>(task, row, column);
}

template <Type type>
void expand_all(const ExpandTask& task) {
    constexpr int groups = L >= 16 ? 4 : 2;
    int64_t column = task.first_column;
    for (; column + groups * L <= task.end_column; column += groups * L) {
        expand_rows<type, groups, false>(task, column);
    }
    for (; column + L <= task.end_column; column += L) expand_rows<type, 1, false>(task, column);
    if (column < task.end_column) expand_rows<type, 1, true>(task, column);
}

void lora_expand(const ExpandTask& task) {
    switch (task.type) {
        case F32: return expand_all<F32>(task);
        case F16: return expand_all<F16>(task);
        case BF16: return expand_all<BF16>(task);
        default: return;
    }
}

}  // namespace
