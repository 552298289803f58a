// Attention of some rows and heads to one kv head of a request's paged cache.
//
// Keys and values are visited in tiles of 32 positions that begin at multiples of 32, with one
// running maximum and sum for each row and head: what a row computes depends on its position alone,
// not on the rows beside it or on how the request was cut into steps.
#pragma once

#include "elementwise.hpp"

namespace {

constexpr int kTile = 32;
constexpr int kWide = Isa::kLanes;

inline int64_t padded(int64_t head_dim) { return (head_dim + kWide - 1) / kWide * kWide; }

// Floats of one row and head: query, output, and a vector that holds the maximum and the sum.
inline int64_t state_size(int64_t width) { return 2 * width + kWide; }

int64_t attention_scratch(int64_t rows_and_heads, int64_t head_dim) {
    return rows_and_heads * state_size(padded(head_dim)) + 2 * kTile * padded(head_dim);
}

// Where each position of a tile has its key and its value.
struct Tile {
    const float* key[kTile];
    const float* value[kTile];
};

// A position's key in the cache; its value is to_values(task) bytes further.
inline const uint8_t* key_at(const AttentionTask& task, int64_t position) {
    const int64_t kv_head = task.first_head / (task.num_heads / task.num_kv_heads);
    const int64_t in_block = position % task.block_size * task.num_kv_heads + kv_head;
    const int64_t elements = task.blocks[position / task.block_size] * task.block_stride +
                             in_block * entry_elements(task.kv_type, task.head_dim);
    return static_cast<const uint8_t*>(task.cache) + elements * element_bytes(task.kv_type);
}

inline int64_t entry_bytes(const AttentionTask& task) {
    return entry_elements(task.kv_type, task.head_dim) * element_bytes(task.kv_type);
}

inline int64_t to_values(const AttentionTask& task) {
    return task.block_size * task.num_kv_heads * entry_bytes(task);
}

// The pieces that a head has of each token lie apart: the hardware does not foresee them.
void prefetch_tile(const AttentionTask& task, int64_t start, int64_t count) {
    const int64_t size = entry_bytes(task), distance = to_values(task);
    for (int64_t j = 0; j < count; ++j) {
        const uint8_t* key = key_at(task, start + j);
        for (int64_t i = 0; i < size; i += 64) {
            prefetch(key + i);
            prefetch(key + distance + i);
        }
    }
}

template <Type type>
inline Isa::F load_numbers(const uint8_t* p) {
    if constexpr (type == F32) return Isa::load(reinterpret_cast<const float*>(p));
    if constexpr (type == F16) return Isa::load_half(p);
    if constexpr (type == BF16) return Isa::load_bf16(reinterpret_cast<const uint16_t*>(p));
    return Isa::to_float(Isa::load_i8(p));
}

// A key or a value as floats, padded with zeros to whole vectors.
template <Type type>
inline void load_entry(const uint8_t* from, int64_t dim, float* out) {
    constexpr int64_t bytes = element_bytes(type);
    float scale = 1.0f;
    if constexpr (type == Int8) std::memcpy(&scale, from + dim, sizeof scale);
    for (int64_t i = 0; i < dim; i += kWide) {
        uint8_t tail[kWide * bytes];
        const uint8_t* p = from + i * bytes;
        if (dim - i < kWide) {
            std::memset(tail, 0, sizeof tail);
            std::memcpy(tail, p, (dim - i) * bytes);
            p = tail;
        }
        Isa::F numbers = load_numbers<type>(p);
        if constexpr (type == Int8) numbers = Isa::mul(numbers, Isa::set(scale));
        Isa::store(out + i, numbers);
    }
}

template <Type type>
void load_tile(const AttentionTask& task, int64_t start, int64_t count, float* buffer, Tile& tile) {
    const int64_t dim = task.head_dim, width = padded(dim), distance = to_values(task);
    for (int64_t j = 0; j < count; ++j) {
        const uint8_t* from = key_at(task, start + j);
        if (type == F32 && dim == width) {
            tile.key[j] = reinterpret_cast<const float*>(from);
            tile.value[j] = reinterpret_cast<const float*>(from + distance);
            continue;
        }
        float* key = buffer + 2 * j * width;
        float* value = key + width;
        load_entry<type>(from, dim, key);
        load_entry<type>(from + distance, dim, value);
        tile.key[j] = key;
        tile.value[j] = value;
    }
    for (int64_t j = count; j < kTile; ++j) {  // read, and then masked
        tile.key[j] = tile.key[0];
        tile.value[j] = tile.value[0];
    }
}

void load_tile(const AttentionTask& task, int64_t start, int64_t count, float* buffer, Tile& tile) {
    switch (task.kv_type) {
        case F32: return load_tile<F32>(task, start, count, buffer, tile);
        case F16: return load_tile<F16>(task, start, count, buffer, tile);
        case BF16: return load_tile<BF16>(task, start, count, buffer, tile);
        default: return load_tile<Int8>(task, start, count, buffer, tile);
    }
}

struct RowState {
    float* query;   // [padded], times the scale
    float* output;  // [padded]
    float* most;
    float* total;
};

// output = output * keep + values times weights, for `count` vectors from dimension d on.
template <int count>
inline void add_values(const Tile& tile, const float* weights, int64_t low, int64_t high, float keep,
                       int64_t d, float* output) {
    Isa::F out[count];
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
        out[i] = Isa::mul(Isa::load(output + d + kWide * i), Isa::set(keep));
    }
    for (int64_t j = low; j < high; ++j) {
        const Isa::F weight = Isa::set(weights[j]);
        const float* value = tile.value[j] + d;
#pragma GCC unroll 8
        for (int i = 0; i < count; ++i) {
            out[i] = Isa::fma(weight, Isa::load(value + kWide * i), out[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) Isa::store(output + d + kWide * i, out[i]);
}

// softcap * tanh(scores / softcap)
void cap_scores(float* scores, float softcap) {
    const F8 one = f8_set(1.0f), two = f8_set(2.0f), cap = f8_set(softcap);
    for (int j = 0; j < kTile; j += 8) {
        const F8 grown = f8_exp(f8_load(scores + j) * f8_set(2.0f / softcap));
        f8_store(scores + j, cap * (one - two / (one + grown)));
    }
}

// Positions [low, high) of the tile are visible.
void visit_tile(const Tile& tile, int64_t dim, int64_t low, int64_t high, float softcap,
                const RowState& row) {
    float scores[kTile];
    for (int j = 0; j < kTile; j += 8) {
        if (j >= high) {
            f8_store(scores + j, f8_set(-INFINITY));
            continue;
        }
        Isa::F sums[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) sums[i] = Isa::zero();
        for (int64_t d = 0; d < dim; d += kWide) {
            const Isa::F q = Isa::load(row.query + d);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                sums[i] = Isa::fma(q, Isa::load(tile.key[j + i] + d), sums[i]);
            }
        }
        f8_store(scores + j, Isa::sums_of_8(sums));
    }
    if (softcap > 0.0f) cap_scores(scores, softcap);
    for (int64_t j = 0; j < low; ++j) scores[j] = -INFINITY;
    for (int64_t j = high; j < kTile; ++j) scores[j] = -INFINITY;

    F8 s[4];
    for (int i = 0; i < 4; ++i) s[i] = f8_load(scores + 8 * i);
    const float tile_most = f8_hmax(f8_max(f8_max(s[0], s[1]), f8_max(s[2], s[3])));
    const float most = tile_most > *row.most ? tile_most : *row.most;
    float correction[8] = {1.0f};  // what exp gives for 0
    if (most != *row.most) f8_store(correction, f8_exp(f8_set(*row.most - most)));
    float weights[kTile];
    for (int i = 0; i < 4; ++i) f8_store(weights + 8 * i, f8_exp(s[i] - f8_set(most)));
    for (int64_t j = 0; j < low; ++j) weights[j] = 0.0f;
    for (int64_t j = high; j < kTile; ++j) weights[j] = 0.0f;
    F8 p[4];
    for (int i = 0; i < 4; ++i) p[i] = f8_load(weights + 8 * i);
    *row.total = *row.total * correction[0] + f8_hsum((p[0] + p[1]) + (p[2] + p[3]));
    *row.most = most;

    int64_t d = 0;
    for (; d + 8 * kWide <= dim; d += 8 * kWide) {
        add_values<8>(tile, weights, low, high, correction[0], d, row.output);
    }
    for (; d + 4 * kWide <= dim; d += 4 * kWide) {
        add_values<4>(tile, weights, low, high, correction[0], d, row.output);
    }
    for (; d < dim; d += kWide) {
        add_values<1>(tile, weights, low, high, correction[0], d, row.output);
    }
}

void attend(const AttentionTask& task) {
    const int64_t dim = task.head_dim, width = padded(dim);
    const int64_t num_rows = task.end_row - task.first_row;
    const int64_t num_heads = task.end_head - task.first_head;
    float* buffer = task.scratch;
    float* states = buffer + 2 * kTile * width;
    const auto state = [&](int64_t r, int64_t h) {
        float* base = states + (r * num_heads + h) * state_size(width);
        return RowState{base, base + width, base + 2 * width, base + 2 * width + 1};
    };
    for (int64_t r = 0; r < num_rows; ++r) {
        for (int64_t h = 0; h < num_heads; ++h) {
            const RowState row = state(r, h);
            const float* query = task.query + (task.first_row + r) * task.query_stride +
                                 (task.first_head + h) * dim;
            for (int64_t i = 0; i < width; ++i) {
                row.query[i] = i < dim ? query[i] * task.scale : 0.0f;
                row.output[i] = 0.0f;
            }
            // A sink is a score without a value.
            *row.most = task.sinks ? task.sinks[task.first_head + h] : -INFINITY;
            *row.total = task.sinks ? 1.0f : 0.0f;
        }
    }
    const int64_t end = task.first_position + num_rows;
    const int64_t first_seen =
        task.window > 0 && task.first_position + 1 > task.window ? task.first_position + 1 - task.window : 0;
    const auto positions_at = [&](int64_t start) { return end - start < kTile ? end - start : kTile; };
    Tile tile;
    int64_t start = first_seen / kTile * kTile;
    prefetch_tile(task, start, positions_at(start));
    for (; start < end; start += kTile) {
        load_tile(task, start, positions_at(start), buffer, tile);
        prefetch_tile(task, start + kTile, positions_at(start + kTile));
        for (int64_t r = 0; r < num_rows; ++r) {
            const int64_t position = task.first_position + r;
            int64_t high = position + 1 - start, low = 0;
            if (high > kTile) high = kTile;
            if (task.window > 0 && position + 1 - task.window > start) {
                low = position + 1 - task.window - start;
            }
            if (low >= high) continue;
            for (int64_t h = 0; h < num_heads; ++h) {
                visit_tile(tile, width, low, high, task.softcap, state(r, h));
            }
        }
    }
    for (int64_t r = 0; r < num_rows; ++r) {
        for (int64_t h = 0; h < num_heads; ++h) {
            const RowState row = state(r, h);
            const float inverse = 1.0f / *row.total;
            float* out = task.output + ((task.first_row + r) * task.num_heads + task.first_head + h) * dim;
            for (int64_t i = 0; i < dim; ++i) out[i] = row.output[i] * inverse;
        }
    }
}

}  // namespace
