// The adapters of a linear layer, as they cross the interface.
#pragma once

#include "runtime.hpp"

namespace penstock {

// What an adapter changes in some output columns: multiplier * (y + b^T a x) + shift.
struct LoraPart {
    const void* a;  // [rank, k]
    const void* b;  // [rank, columns]
    int64_t type;   // of both: F32, F16 or BF16
    int64_t rank;
    int64_t first_column;  // of the output
    int64_t columns;
    const float* multiplier;  // [columns], or null
    const float* shift;       // [columns], or null
};

struct LoraUpdate {
    const LoraPart* parts;
    int64_t num_parts;
    int64_t rank;  // of all parts together
};

struct LoraSlots {
    const LoraUpdate* updates;
    int64_t num_slots;
    int64_t k;
};

// The rows of a step by adapter slot: slot i has rows[starts[i]] to rows[starts[i + 1] - 1], ascending.
struct AdapterStep {
    const int32_t* rows;
    const int32_t* starts;  // [num_slots + 1]
    int64_t num_rows;       // of the step, with an adapter or without
};

// Throws BadIndex if the step has rows that are not there.
void check_step(const AdapterStep& step, int64_t num_slots);

// Rows [first_row, first_row + num_rows) of a step that was checked; x and y begin with the first.
void add_lora(const LoraSlots& slots, const AdapterStep& step, const float* x, int64_t ldx,
              int64_t first_row, int64_t num_rows, float* y, int64_t ldy);

}  // namespace penstock
