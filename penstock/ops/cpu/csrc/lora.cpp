// LoRA: adds each row's adapter to the output of a matmul. See lora.hpp.

#include "lora_slots.hpp"

namespace penstock {
namespace {

constexpr int64_t kRanks = 8;         // of A that a piece takes
constexpr int64_t kColumns = 256;     // of B that a piece takes, a multiple of all lanes
constexpr int64_t kRows = 64;         // that a piece takes
constexpr int64_t kSmallWork = 8192;  // multiplications that are not worth a fork

Scratch slot_scratch, hidden_scratch;

// The rows [first, end) of a step that one slot has, and where their hidden numbers are.
struct SlotRows {
    const int32_t* rows;
    int64_t count;
    float* hidden;  // [count, ranks of all parts]
};

// Runs body(slot, part, ranks before, row block, piece) for all pieces of work. `pieces_of` says in
// how many a part is cut.
template <class PiecesOf, class Body>
void for_pieces(const LoraSlots& slots, const SlotRows* by_slot, int64_t work,
                const PiecesOf& pieces_of, const Body& body) {
    int64_t total = 0;
    for (int64_t s = 0; s < slots.num_slots; ++s) {
        const LoraUpdate& update = slots.updates[s];
        const int64_t blocks = divide_up(by_slot[s].count, kRows);
        for (int64_t p = 0; p < update.num_parts; ++p) total += blocks * pieces_of(update.parts[p]);
    }
    const auto run = [&](int64_t index) {
        for (int64_t s = 0; s < slots.num_slots; ++s) {
            const LoraUpdate& update = slots.updates[s];
            const int64_t blocks = divide_up(by_slot[s].count, kRows);
            int64_t before = 0;
            for (int64_t p = 0; p < update.num_parts; ++p) {
                const LoraPart& part = update.parts[p];
                const int64_t pieces = pieces_of(part), own = blocks * pieces;
                if (index < own) {
                    const int64_t first = index / pieces * kRows;
                    SlotRows rows = by_slot[s];
                    rows.rows += first;
                    rows.hidden += first * update.rank + before;
                    rows.count = std::min(kRows, rows.count - first);
                    body(update, part, rows, index % pieces);
                    return;
                }
                index -= own;
                before += part.rank;
            }
        }
    };
    if (work < kSmallWork || num_threads() == 1) {
        for (int64_t i = 0; i < total; ++i) run(i);
    } else {
        for_each(total, 0, [&](int64_t index, uint8_t*) { run(index); });
    }
}

}  // namespace

void add_lora(const LoraSlots& slots, const AdapterStep& step, const float* x, int64_t ldx,
              int64_t first_row, int64_t num_rows, float* y, int64_t ldy) {
    const Kernels& isa = kernels();
    const int64_t end_row = first_row + num_rows;
    auto* by_slot = reinterpret_cast<SlotRows*>(slot_scratch.get(slots.num_slots * sizeof(SlotRows)));
    int64_t rows = 0, floats = 0, shrink_work = 0, expand_work = 0;
    for (int64_t s = 0; s < slots.num_slots; ++s) {
        const LoraUpdate& update = slots.updates[s];
        const int32_t* begin = step.rows + step.starts[s];
        const int32_t* end = step.rows + step.starts[s + 1];
        if (first_row > 0 || end_row < step.num_rows) {  // a slot's rows are in order
            begin = std::lower_bound(begin, end, first_row);
            end = std::lower_bound(begin, end, end_row);
        }
        by_slot[s] = {begin, update.num_parts > 0 ? end - begin : 0, nullptr};
        rows += by_slot[s].count;
        floats += by_slot[s].count * update.rank;
        shrink_work += by_slot[s].count * update.rank * slots.k;
        for (int64_t p = 0; p < update.num_parts; ++p) {
            expand_work += by_slot[s].count * update.parts[p].rank * update.parts[p].columns;
        }
    }
    if (rows == 0) return;
    float* hidden = hidden_scratch.floats(floats);
    for (int64_t s = 0; s < slots.num_slots; ++s) {
        by_slot[s].hidden = hidden;
        hidden += by_slot[s].count * slots.updates[s].rank;
    }
    for_pieces(
        slots, by_slot, shrink_work, [](const LoraPart& part) { return divide_up(part.rank, kRanks); },
        [&](const LoraUpdate& update, const LoraPart& part, const SlotRows& rows, int64_t piece) {
            const int64_t first = piece * kRanks;
            isa.lora_shrink(ShrinkTask{part.a, static_cast<Type>(part.type), slots.k,
                                       x - first_row * ldx, ldx, rows.rows, rows.count, first,
                                       std::min(first + kRanks, part.rank), rows.hidden, update.rank});
        });
    for_pieces(
        slots, by_slot, expand_work,
        [](const LoraPart& part) { return divide_up(part.columns, kColumns); },
        [&](const LoraUpdate& update, const LoraPart& part, const SlotRows& rows, int64_t piece) {
            const int64_t first = piece * kColumns;
            isa.lora_expand(ExpandTask{part.b, static_cast<Type>(part.type), part.rank, part.columns,
                                       rows.hidden, update.rank, rows.rows, rows.count, first,
                                       std::min(first + kColumns, part.columns), part.multiplier,
                                       part.shift, y - first_row * ldy + part.first_column, ldy});
        });
}

void check_step(const AdapterStep& step, int64_t num_slots) {
    check_index(step.starts[0] == 0);
    for (int64_t s = 0; s < num_slots; ++s) check_index(step.starts[s] <= step.starts[s + 1]);
    check_index(all_below(step.rows, step.starts[num_slots], step.num_rows));
}

}  // namespace penstock

using namespace penstock;

// Rows of y [rows, ldy] that have an adapter in the step, changed by it. x is [rows, k], ldx apart.
PENSTOCK_API int32_t penstock_add_lora(const LoraSlots* slots, const AdapterStep* step, const float* x,
                                       int64_t ldx, float* y, int64_t ldy) {
    return in_turn([&] {
        check_step(*step, slots->num_slots);
        add_lora(*slots, *step, x, ldx, 0, step->num_rows, y, ldy);
    });
}
