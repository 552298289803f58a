// Attention of some rows and heads to one KV head of a request, in the paged cache or in rows.
//
// Keys and values are read in tiles of 32 positions that begin at multiples of 32, with a running
// maximum and sum per row and head (online softmax). So a row's result depends only on its position,
// not on other rows or on how the request was split into steps.
#pragma once

#include "elementwise.hpp"

namespace {

constexpr int kTile = 32;
constexpr int kWide = Isa::kLanes;

inline int64_t padded(int64_t head_dim) { return (head_dim + kWide - 1) / kWide * kWide; }

// Floats of one row and head: query, output, and a vector that holds the maximum and the sum.
inline int64_t state_size(int64_t width) { return 2 * width + kWide; }

int64_t attention_scratch(int64_t rows_and_heads, int64_t head_dim) {
    return rows_and_heads * state_size(padded(head_dim)) + 3 * kTile * padded(head_dim);
}

// Keys are stored by dimension, so that a vector accumulates the scores of several positions.
struct Tile {
    float* keys;  // [padded, kTile]
    float* rows;  // [2 * kTile, padded]: keys and values as floats, if the cache has another type
    const float* value[kTile];
    const uint8_t* entry[kTile];  // the keys in the cache; the values are at an offset of to_values(task)
};

inline int64_t entry_bytes(const AttentionTask& task) {
    return entry_elements(task.kv_type, task.head_dim) * element_bytes(task.kv_type);
}

inline int64_t to_values(const AttentionTask& task) {
    if (task.blocks == nullptr) return task.value_offset;
    return task.block_size * task.num_kv_heads * entry_bytes(task);
}

// Finds the entries of `count` positions from `start` on, and prefetches them: a head's entries are
// far apart, so the hardware prefetcher misses them.
void find_tile(const AttentionTask& task, int64_t start, int64_t count, Tile& tile) {
    if (count <= 0) return;
    const int64_t size = entry_bytes(task), distance = to_values(task);
    const int64_t kv_head = task.first_head / (task.num_heads / task.num_kv_heads);
    if (task.blocks == nullptr) {
        const float* key = static_cast<const float*>(task.cache) + kv_head * task.head_dim;
        for (int64_t j = 0; j < count; ++j) {
            tile.entry[j] = reinterpret_cast<const uint8_t*>(key + (start + j) * task.key_stride);
        }
        return;
    }
    const int64_t step = task.num_kv_heads * size;  // from token to token
    const int32_t* block = task.blocks + start / task.block_size;
    int64_t offset = start % task.block_size;
    for (int64_t j = 0; j < count; ++block, offset = 0) {
        const uint8_t* entry = static_cast<const uint8_t*>(task.cache) +
                               *block * task.block_stride * element_bytes(task.kv_type) +
                               offset * step + kv_head * size;
        for (; j < count && offset < task.block_size; ++j, ++offset, entry += step) {
            tile.entry[j] = entry;
            for (int64_t i = 0; i < size; i += 64) {
                prefetch(entry + i);
                prefetch(entry + distance + i);
            }
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
    const auto put = [&](const uint8_t* p, int64_t i) {
        Isa::F numbers = load_numbers<type>(p);
        if constexpr (type == Int8) numbers = Isa::mul(numbers, Isa::set(scale));
        Isa::store(out + i, numbers);
    };
    int64_t i = 0;
    for (; i + kWide <= dim; i += kWide) put(from + i * bytes, i);
    if (i < dim) {
        uint8_t tail[kWide * bytes] = {};
        std::memcpy(tail, from + i * bytes, (dim - i) * bytes);
        put(tail, i);
    }
}

template <Type type>
void load_tile(const AttentionTask& task, int64_t count, Tile& tile) {
    const int64_t dim = task.head_dim, width = padded(dim), distance = to_values(task);
    const float* key[kTile];
    for (int64_t j = 0; j < count; ++j) {
        const uint8_t* from = tile.entry[j];
        if (type == F32 && dim == width) {
            key[j] = reinterpret_cast<const float*>(from);
            tile.value[j] = reinterpret_cast<const float*>(from + distance);
            continue;
        }
        float* row = tile.rows + 2 * j * width;
        load_entry<type>(from, dim, row);
        load_entry<type>(from + distance, dim, row + width);
        key[j] = row;
        tile.value[j] = row + width;
    }
    for (int64_t j = count; j < kTile; ++j) key[j] = key[0];  // read but masked
    for (int64_t d = 0; d < dim; d += 4) {
        for (int64_t j = 0; j < kTile; j += kWide) {
            Isa::four_rows_of(key + j, d, tile.keys + d * kTile + j, kTile);
        }
    }
}

void load_tile(const AttentionTask& task, int64_t count, Tile& tile) {
    switch (task.kv_type) {
        case F32: return load_tile<F32>(task, count, tile);
        case F16: return load_tile<F16>(task, count, tile);
        case BF16: return load_tile<BF16>(task, count, tile);
        default: return load_tile<Int8>(task, count, tile);
    }
}

// The state of a row and head.
struct State {
    float* query;   // [padded], times the scale
    float* output;  // [padded]
    float* most;
    float* total;

    State(float* states, int64_t index, int64_t width)
        : query(states + index * state_size(width)),
          output(query + width),
          most(output + width),
          total(most + 1) {}
};

// softcap * tanh(scores / softcap)
void cap_scores(float* scores, float softcap) {
    const F8 one = f8_set(1.0f), two = f8_set(2.0f), cap = f8_set(softcap);
    for (int j = 0; j < kTile; j += 8) {
        const F8 grown = f8_exp(f8_load(scores + j) * f8_set(2.0f / softcap));
        f8_store(scores + j, cap * (one - two / (one + grown)));
    }
}

// Turns scores into weights, which are zero outside [low, high). Returns the factor that rescales the
// earlier tiles.
float weigh(float* scores, int64_t low, int64_t high, float softcap, const State& state) {
    if (softcap > 0.0f) cap_scores(scores, softcap);
    for (int64_t j = 0; j < low; ++j) scores[j] = -INFINITY;
    for (int64_t j = high; j < kTile; ++j) scores[j] = -INFINITY;
    F8 s[4];
    for (int i = 0; i < 4; ++i) s[i] = f8_load(scores + 8 * i);
    const float tile_most = f8_hmax(f8_max(f8_max(s[0], s[1]), f8_max(s[2], s[3])));
    const float most = tile_most > *state.most ? tile_most : *state.most;
    float keep[8] = {1.0f};  // exp(0)
    if (most != *state.most) f8_store(keep, f8_exp(f8_set(*state.most - most)));
    for (int i = 0; i < 4; ++i) f8_store(scores + 8 * i, f8_exp(s[i] - f8_set(most)));
    for (int64_t j = 0; j < low; ++j) scores[j] = 0.0f;
    for (int64_t j = high; j < kTile; ++j) scores[j] = 0.0f;
    for (int i = 0; i < 4; ++i) s[i] = f8_load(scores + 8 * i);
    *state.total = *state.total * keep[0] + f8_hsum((s[0] + s[1]) + (s[2] + s[3]));
    *state.most = most;
    return keep[0];
}

// output = output * keep + values times weights, for `vectors` of some states from dimension d on.
template <int count, int vectors>
inline void add_values(const Tile& tile, const float (*weights)[kTile], const float* keep, int64_t low,
                       int64_t high, int64_t d, float* const* outputs) {
    Isa::F out[count][vectors];
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            out[i][v] = Isa::mul(Isa::load(outputs[i] + d + kWide * v), Isa::set(keep[i]));
        }
    }
    for (int64_t j = low; j < high; ++j) {
        Isa::F value[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) value[v] = Isa::load(tile.value[j] + d + kWide * v);
#pragma GCC unroll 4
        for (int i = 0; i < count; ++i) {
            const Isa::F weight = Isa::set(weights[i][j]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) out[i][v] = Isa::fma(weight, value[v], out[i][v]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) Isa::store(outputs[i] + d + kWide * v, out[i][v]);
    }
}

// `count` states from index `first` on, which see positions [low, high). A state's result is the same
// for every count.
template <int count>
__attribute__((noinline))
void visit_tile(const Tile& tile, int64_t dim, int64_t low, int64_t high, float softcap, float* states,
                int64_t first) {
    constexpr int vectors = kTile / kWide;
    const int64_t width = padded(dim);
    const float* queries = states + first * state_size(width);
    constexpr int chains = Isa::kScoreChains;  // dimension d is added to sum d % chains
    Isa::F sums[count][chains][vectors];
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) {
#pragma GCC unroll 2
        for (int c = 0; c < chains; ++c) {
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) sums[i][c][v] = Isa::zero();
        }
    }
    for (int64_t first_d = 0; first_d < dim; first_d += chains) {
#pragma GCC unroll 2
        for (int c = 0; c < chains; ++c) {
            const int64_t d = first_d + c;
            Isa::F keys[vectors];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) keys[v] = Isa::load(tile.keys + d * kTile + kWide * v);
#pragma GCC unroll 4
            for (int i = 0; i < count; ++i) {
                const Isa::F query = Isa::set(queries[i * state_size(width) + d]);
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) {
                    sums[i][c][v] = Isa::fma(query, keys[v], sums[i][c][v]);
                }
            }
        }
    }
    float weights[count][kTile], keep[count];
    float* outputs[count];
    for (int i = 0; i < count; ++i) {
        for (int v = 0; v < vectors; ++v) {
            Isa::F sum = sums[i][0][v];
            if constexpr (chains == 2) sum = Isa::add(sum, sums[i][1][v]);
            Isa::store(weights[i] + kWide * v, sum);
        }
        const State state(states, first + i, width);
        keep[i] = weigh(weights[i], low, high, softcap, state);
        outputs[i] = state.output;
    }
    int64_t d = 0;
    for (; d + 4 * kWide <= width; d += 4 * kWide) {
        add_values<count, 4>(tile, weights, keep, low, high, d, outputs);
    }
    for (; d < width; d += kWide) add_values<count, 1>(tile, weights, keep, low, high, d, outputs);
}

void visit_tile(const Tile& tile, int64_t dim, int64_t low, int64_t high, float softcap, float* states,
                int64_t first, int64_t end) {
    for (; first + Isa::kStateTile <= end; first += Isa::kStateTile) {
        visit_tile<Isa::kStateTile>(tile, dim, low, high, softcap, states, first);
    }
    if constexpr (Isa::kStateTile > 2) {
        if (end - first == 3) return visit_tile<3>(tile, dim, low, high, softcap, states, first);
        if (end - first == 2) return visit_tile<2>(tile, dim, low, high, softcap, states, first);
    }
    if (first < end) visit_tile<1>(tile, dim, low, high, softcap, states, first);
}

void attend(const AttentionTask& task) {
    const int64_t dim = task.head_dim, width = padded(dim);
    const int64_t num_rows = task.end_row - task.first_row;
    const int64_t num_heads = task.end_head - task.first_head;
    Tile tile;
    tile.keys = task.scratch;
    tile.rows = tile.keys + kTile * width;
    float* states = tile.rows + 2 * kTile * width;  // of each row's heads
    for (int64_t i = 0; i < num_rows * num_heads; ++i) {
        const State state(states, i, width);
        const int64_t row = task.first_row + i / num_heads, head = task.first_head + i % num_heads;
        const float* query = task.query + row * task.query_stride + head * dim;
        for (int64_t d = 0; d < width; ++d) {
            state.query[d] = d < dim ? query[d] * task.scale : 0.0f;
            state.output[d] = 0.0f;
        }
        // A sink is a score without a value.
        *state.most = task.sinks ? task.sinks[head] : -INFINITY;
        *state.total = task.sinks ? 1.0f : 0.0f;
    }
    const int64_t first = task.first_position, last = first + num_rows - 1;
    const auto first_seen = [&](int64_t position) {
        return position > task.before ? position - task.before : 0;
    };
    const auto end_seen = [&](int64_t position) {
        const int64_t end = position + task.after + 1;
        return end < task.length ? end : task.length;
    };
    const int64_t end = end_seen(last);
    const auto positions_at = [&](int64_t start) { return end - start < kTile ? end - start : kTile; };
    int64_t start = first_seen(first) / kTile * kTile;
    find_tile(task, start, positions_at(start), tile);
    for (; start < end; start += kTile) {
        load_tile(task, positions_at(start), tile);
        find_tile(task, start + kTile, positions_at(start + kTile), tile);
        // The part of this tile that the token sees.
        const auto low_of = [&](int64_t position) {
            const int64_t low = first_seen(position) - start;
            return low > 0 ? low : 0;
        };
        const auto high_of = [&](int64_t position) {
            const int64_t high = end_seen(position) - start;
            return high < kTile ? high : kTile;
        };
        if (low_of(first) == low_of(last) && high_of(first) == high_of(last)) {
            visit_tile(tile, dim, low_of(first), high_of(first), task.softcap, states, 0,
                       num_rows * num_heads);
            continue;
        }
        for (int64_t r = 0; r < num_rows; ++r) {
            const int64_t low = low_of(first + r), high = high_of(first + r);
            if (low >= high) continue;
            visit_tile(tile, dim, low, high, task.softcap, states, r * num_heads, (r + 1) * num_heads);
        }
    }
    for (int64_t i = 0; i < num_rows * num_heads; ++i) {
        const State state(states, i, width);
        const float inverse = 1.0f / *state.total;
        const int64_t row = task.first_row + i / num_heads, head = task.first_head + i % num_heads;
        float* out = task.output + (row * task.num_heads + head) * dim;
        for (int64_t d = 0; d < dim; ++d) out[d] = state.output[d] * inverse;
    }
}

}  // namespace
