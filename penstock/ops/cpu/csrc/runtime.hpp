// Shared by the C interface: the kernels in use, serialization and errors, loops over rows, and the
// structures that cross the interface.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <new>

#include "kernels.hpp"
#include "scratch.hpp"
#include "thread_pool.hpp"

#define PENSTOCK_API extern "C" __attribute__((visibility("default")))

namespace penstock {

const Kernels& kernels();  // of the instruction set in use

// Pieces per thread of a loop: several, so that a slow thread takes fewer.
constexpr int kPiecesPerThread = 4;
constexpr int64_t kSmallRows = 8;  // element-wise work on fewer rows is not worth a fork

// An index from a caller that is out of range.
struct BadIndex {};

// Return codes of the C interface.
enum Status : int32_t { kDone = 0, kNoMemory = 1, kBadIndex = 2 };

// Runs the body of every function of the C interface that computes: one at a time, so that it owns the
// threads and the scratch memory, and without letting exceptions out of the library.
template <class Body>
int32_t in_turn(const Body& body) noexcept {
    const std::lock_guard<std::mutex> turn(turn_mutex());
    try {
        body();
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    } catch (const BadIndex&) {
        return kBadIndex;
    }
    return kDone;
}

inline void check_index(bool is_good) {
    if (!is_good) throw BadIndex();
}

// Whether all of `count` numbers are in [0, end).
template <class Integer>
bool all_below(const Integer* numbers, int64_t count, int64_t end) {
    Integer least = 0, most = -1;
    for (int64_t i = 0; i < count; ++i) {
        least = std::min(least, numbers[i]);
        most = std::max(most, numbers[i]);
    }
    return least >= 0 && most < end;
}

template <class Body>
void for_rows(int64_t rows, const Body& body) {
    if (rows < kSmallRows) {
        for (int64_t row = 0; row < rows; ++row) body(row);
        return;
    }
    const int64_t pieces = std::min<int64_t>(rows, num_threads() * kPiecesPerThread);
    for_each(pieces, 0, [&](int64_t piece, uint8_t*) {
        const int64_t end = rows * (piece + 1) / pieces;
        for (int64_t row = rows * piece / pieces; row < end; ++row) body(row);
    });
}

// One of the packed matrices that a matmul concatenates.
struct WeightPart {
    const uint8_t* packed;
    int64_t type;
    int64_t columns;
    int64_t first_column;  // of the output
};

struct Weights {
    const WeightPart* parts;
    int64_t num_parts;
    const float* bias;  // [columns of all parts], or null

    bool has_blocks() const {
        return std::any_of(parts, parts + num_parts, [](const WeightPart& part) {
            return part.type != F32 && part.type != F16 && part.type != BF16;
        });
    }
    int64_t columns() const {
        return parts[num_parts - 1].first_column + parts[num_parts - 1].columns;
    }
};

// Rows of activations as floats and, for block types, in 8 bits.
struct Activations {
    const float* x;  // [rows, k], rows ldx apart
    int64_t ldx;
    int64_t rows;
    int64_t k;
    QuantizedRows quantized;
};

// 8-bit rows in scratch memory, valid until the next call.
QuantizedRows quantized_rows(int64_t rows, int64_t k);

// y [rows, ldy] = activations times each part, plus the bias.
void linear(const Weights& weights, const Activations& activations, float* y, int64_t ldy);

struct Cache {
    void* data;  // [blocks, 2, block_size, kv_heads, entry]: see entry_elements
    int64_t num_blocks, block_stride, block_size, num_kv_heads, head_dim;
    int64_t type;  // F32, F16, BF16 or Int8
};

// The layout of a step: request i has rows query_starts[i] to query_starts[i + 1], the last
// tokens of its seq_lens[i].
struct Step {
    const int32_t* query_starts;
    const int32_t* seq_lens;
    const int32_t* block_table;  // [num_requests, table_width], rows table_stride apart
    int64_t table_stride, table_width;
    int64_t num_requests;
    const int64_t* slots;  // of each row: block * block_size + offset
    int64_t rows;
    const float* cos;  // [rows, half], rows angle_stride apart
    const float* sin;
    int64_t angle_stride;
    int64_t half;
};

// Writes keys and values [rows, kv_heads * head_dim] to their slots. Throws BadIndex.
void write_kv(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
              const Cache& cache, const int64_t* slots, int64_t rows);

// How scores are computed before the softmax.
struct Scoring {
    float scale;
    int64_t window;      // 0: none
    float softcap;       // 0: none
    const float* sinks;  // [heads], or null
};

// query [rows, heads, head_dim], rows query_stride apart -> output, contiguous. Throws BadIndex.
void attend(const float* query, int64_t query_stride, int64_t num_heads, const Cache& cache,
            const Step& step, const Scoring& scoring, float* output);

// Keys and values [rows, kv_heads, head_dim], rows `stride` floats apart, one row per query.
struct KeyValueRows {
    const float* key;
    const float* value;
    int64_t stride;
    int64_t num_kv_heads;
    int64_t head_dim;
};

// Bidirectional attention inside each request: of queries [rows, heads, head_dim], rows query_stride
// apart, to the keys at most `reach` tokens away. Throws BadIndex.
void attend_rows(const float* query, int64_t query_stride, int64_t num_heads, const KeyValueRows& kv,
                 const Step& step, float scale, int64_t reach, float* output);

// [rows, heads, head_dim], rows row_stride apart, in place.
void rotate(float* x, int64_t heads, int64_t row_stride, int64_t head_dim, const Step& step);

}  // namespace penstock
