// Attention of some rows and heads to one kv head of a request's paged cache.
//
// Keys and values are visited in tiles of 32 positions that begin at multiples of 32, with one
// running maximum and sum for each row and head: what a row computes depends on its position alone,
// not on the rows beside it or on how the request was cut into steps.
#pragma once

#include "elementwise.hpp"

namespace {

constexpr int kTile = 32;

inline int64_t padded(int64_t head_dim) { return (head_dim + 7) / 8 * 8; }

int64_t attention_scratch(int64_t rows_and_heads, int64_t head_dim) {
    return rows_and_heads * (2 * padded(head_dim) + 2) + 2 * kTile * padded(head_dim);
}

// Where each position of a tile has its key and its value.
struct Tile {
    const float* key[kTile];
    const float* value[kTile];
};

// Elements from the cache's start to the key of a position; its value is to_values further.
inline int64_t key_offset(const AttentionTask& task, int64_t position) {
    const int64_t kv_head = task.first_head / (task.num_heads / task.num_kv_heads);
    return task.blocks[position / task.block_size] * task.block_stride +
           (position % task.block_size * task.num_kv_heads + kv_head) * task.head_dim;
}

// The pieces that a head has of each token lie apart: the hardware does not foresee them.
void prefetch_tile(const AttentionTask& task, int64_t start, int64_t count) {
    const int64_t width = task.kv_type == F32 ? 4 : 2;
    const int64_t to_values = task.block_size * task.num_kv_heads * task.head_dim;
    for (int64_t j = 0; j < count; ++j) {
        const char* key = static_cast<const char*>(task.cache) + key_offset(task, start + j) * width;
        for (int64_t i = 0; i < task.head_dim * width; i += 64) {
            prefetch(key + i);
            prefetch(key + to_values * width + i);
        }
    }
}

void load_tile(const AttentionTask& task, int64_t start, int64_t count, float* buffer, Tile& tile) {
    const int64_t dim = task.head_dim;
    const int64_t to_values = task.block_size * task.num_kv_heads * dim;
    for (int64_t j = 0; j < count; ++j) {
        const int64_t at = key_offset(task, start + j);
        if (task.kv_type == F32 && dim % 8 == 0) {
            tile.key[j] = static_cast<const float*>(task.cache) + at;
            tile.value[j] = tile.key[j] + to_values;
            continue;
        }
        float* key = buffer + 2 * j * padded(dim);
        float* value = key + padded(dim);
        if (task.kv_type == F32) {
            const float* from = static_cast<const float*>(task.cache) + at;
            for (int64_t i = 0; i < padded(dim); ++i) {
                key[i] = i < dim ? from[i] : 0.0f;
                value[i] = i < dim ? from[to_values + i] : 0.0f;
            }
        } else {
            const uint16_t* from = static_cast<const uint16_t*>(task.cache) + at;
            load_kv_row(from, dim, task.kv_type, key);
            load_kv_row(from + to_values, dim, task.kv_type, value);
        }
        tile.key[j] = key;
        tile.value[j] = value;
    }
    for (int64_t j = count; j < kTile; ++j) {  // read, and then masked
        tile.key[j] = tile.key[0];
        tile.value[j] = tile.value[0];
    }
}

struct RowState {
    float* query;   // [padded], times the scale
    float* output;  // [padded]
    float* most;
    float* total;
};

// Positions [low, high) of the tile are visible.
void visit_tile(const Tile& tile, int64_t dim, int64_t low, int64_t high, const RowState& row) {
    float scores[kTile];
    for (int j = 0; j < kTile; j += 8) {
        if (j >= high) {
            f8_store(scores + j, f8_set(-INFINITY));
            continue;
        }
        F8 sums[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) sums[i] = f8_set(0.0f);
        for (int64_t d = 0; d < dim; d += 8) {
            const F8 q = f8_load(row.query + d);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) sums[i] = f8_fma(q, f8_load(tile.key[j + i] + d), sums[i]);
        }
        f8_store(scores + j, f8_hsum8(sums));
    }
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

    const F8 keep = f8_set(correction[0]);
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) {
        F8 out[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) out[i] = f8_load(row.output + d + 8 * i) * keep;
        for (int64_t j = low; j < high; ++j) {
            const F8 weight = f8_set(weights[j]);
            const float* value = tile.value[j] + d;
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) out[i] = f8_fma(weight, f8_load(value + 8 * i), out[i]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) f8_store(row.output + d + 8 * i, out[i]);
    }
    for (; d < dim; d += 8) {
        F8 out = f8_load(row.output + d) * keep;
        for (int64_t j = low; j < high; ++j) {
            out = f8_fma(f8_set(weights[j]), f8_load(tile.value[j] + d), out);
        }
        f8_store(row.output + d, out);
    }
}

void attend(const AttentionTask& task) {
    const int64_t dim = task.head_dim, width = padded(dim);
    const int64_t num_rows = task.end_row - task.first_row;
    const int64_t num_heads = task.end_head - task.first_head;
    float* buffer = task.scratch;
    float* states = buffer + 2 * kTile * width;
    const auto state = [&](int64_t r, int64_t h) {
        float* base = states + (r * num_heads + h) * (2 * width + 2);
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
            *row.most = -INFINITY;
            *row.total = 0.0f;
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
            for (int64_t h = 0; h < num_heads; ++h) visit_tile(tile, width, low, high, state(r, h));
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
