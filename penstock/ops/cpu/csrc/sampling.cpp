// Samples tokens: greedy, or with the request's own Gumbel noise, as penstock/ops/sampling.py defines.
//
// One pass over the logits finds the best token, which is all that a greedy row needs, and the best
// logit of each block of tokens. The later passes have a floor below which no token matters. They
// read only blocks whose best logit reaches the floor.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "runtime.hpp"

using namespace penstock;

namespace {

constexpr float kGreedy = std::numeric_limits<float>::min();  // the tables' temperature 0
constexpr float kMaxNoise = 16.64f;    // penstock.ops.random.MAX_GUMBEL
constexpr float kNoMass = -24.3f;      // exp(x) * 2^34 rounds to 0 below this
constexpr float kHead = -10.0f;        // first guess of the floor; affects only speed

struct Item {
    float scaled, mass;
};

// The blocks of a row, and memory for one candidate per token.
struct Workspace {
    static int64_t block_bytes(int64_t vocab) {
        return align(divide_up(vocab, kTokenBlock) * sizeof(float));
    }
    static int64_t word_bytes(int64_t vocab) { return align(vocab * sizeof(float)); }
    static int64_t bytes(int64_t vocab) { return 2 * block_bytes(vocab) + 5 * word_bytes(vocab); }

    Workspace(int64_t vocab, uint8_t* memory) {
        const int64_t blocks = block_bytes(vocab), words = word_bytes(vocab);
        block_best = reinterpret_cast<float*>(memory);
        block_copy = reinterpret_cast<float*>(memory + blocks);
        memory += 2 * blocks;
        candidates.scaled = reinterpret_cast<float*>(memory);
        candidates.tokens = reinterpret_cast<int32_t*>(memory + words);
        numbers = reinterpret_cast<float*>(memory + 2 * words);
        items = reinterpret_cast<Item*>(memory + 3 * words);
    }

    float* block_best;
    float* block_copy;
    Candidates candidates;
    float* numbers;  // [vocab] masses or noise of candidates
    Item* items;     // [vocab]
};

// The lowest value such that the mass above it is below the limit.
float nucleus_cutoff(Item* items, int64_t count, double limit) {
    float cutoff = INFINITY;
    double above = 0.0;
    while (count > 0 && above < limit) {
        const float a = items[0].scaled, b = items[count / 2].scaled, c = items[count - 1].scaled;
        const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
        Item* const end = items + count;
        Item* const equal =
            std::partition(items, end, [=](const Item& item) { return item.scaled > pivot; });
        double greater = 0.0;
        for (Item* item = items; item < equal; ++item) greater += item->mass;
        if (above + greater >= limit) {
            count = equal - items;
            continue;
        }
        cutoff = pivot;
        Item* const less =
            std::partition(equal, end, [=](const Item& item) { return item.scaled == pivot; });
        above += greater;
        for (Item* item = equal; item < less; ++item) above += item->mass;
        items = less;
        count = end - less;
    }
    return cutoff;
}

class Drawing {
  public:
    Drawing(const ScaledRow& row, Workspace& space) : isa_(kernels()), row_(row), space_(space) {}

    int64_t draw(int64_t best_token, uint64_t seed, uint64_t position, float log_min_p,
                 int64_t top_k, float top_p) {
        const int32_t token = static_cast<int32_t>(best_token);
        float score;  // of the best token, whose scaled logit is 0
        isa_.noise_of_tokens(&token, 1, seed, position, &score);
        float cutoff = log_min_p;
        if (top_k < row_.size) cutoff = std::max(cutoff, kth_largest(top_k, cutoff, top_p < 1.0f));
        if (top_p < 1.0f) cutoff = nucleus(cutoff, top_k < row_.size, top_p);
        int64_t winner = best_token;
        score_above(std::max(cutoff, kHead), seed, position, score, winner);
        const float floor = std::max(cutoff, score - kMaxNoise);
        if (floor < kHead) score_above(floor, seed, position, score, winner);
        return winner;
    }

  private:
    float scale(float logit) const { return (logit - row_.best) / row_.temperature; }

    // Gathers the tokens at or above the floor, in order, unless a lower floor was gathered already.
    void gather(float floor) {
        if (floor >= gathered_) return;
        space_.candidates.count = 0;
        for (int64_t block = 0; block * kTokenBlock < row_.size; ++block) {
            if (scale(space_.block_best[block]) >= floor) {
                isa_.gather_block(row_, block * kTokenBlock, floor, space_.candidates);
            }
        }
        gathered_ = floor;
    }

    // The k-th largest scaled logit, or any value as low if that is below all that matters. `floor` is
    // a cutoff that applies anyway.
    float kth_largest(int64_t k, float floor, bool has_top_p) {
        const int64_t blocks = divide_up(row_.size, kTokenBlock);
        float least = has_top_p ? kNoMass : -INFINITY;
        if (k <= blocks) {  // the best tokens of k blocks are k tokens
            float* const copy = space_.block_copy;
            std::copy(space_.block_best, space_.block_best + blocks, copy);
            std::nth_element(copy, copy + k - 1, copy + blocks, std::greater<float>());
            least = std::max(least, scale(copy[k - 1]));
        }
        least = std::max(least, floor);
        gather(std::max(least, kHead));
        if (space_.candidates.count < k && gathered_ > least) {
            gather(std::max(least, std::numeric_limits<float>::lowest()));
        }
        const int64_t count = space_.candidates.count;
        if (count < k) return -INFINITY;
        float* const values = space_.numbers;
        std::copy(space_.candidates.scaled, space_.candidates.scaled + count, values);
        std::nth_element(values, values + k - 1, values + count, std::greater<float>());
        return values[k - 1];
    }

    // The cutoff of top_p among tokens at or above the floor.
    float nucleus(float floor, bool has_top_k, float top_p) {
        floor = std::max(floor, kNoMass);
        double total = 0.0;
        if (has_top_k) {
            gather(floor);
            total = weigh(floor);
        } else {
            for (int64_t block = 0; block * kTokenBlock < row_.size; ++block) {
                if (scale(space_.block_best[block]) >= floor) {
                    total += isa_.mass_of_block(row_, block * kTokenBlock, floor);
                }
            }
            gather(std::max(floor, kHead));
            if (weigh(floor) < total * static_cast<double>(top_p)) {
                gather(floor);
                weigh(floor);
            }
        }
        return nucleus_cutoff(space_.items, num_items_, total * static_cast<double>(top_p));
    }

    // Makes items of the candidates at or above the floor. Returns their mass.
    double weigh(float floor) {
        const Candidates& candidates = space_.candidates;
        isa_.mass_of_tokens(candidates.scaled, candidates.count, space_.numbers);
        num_items_ = 0;
        double total = 0.0;
        for (int64_t i = 0; i < candidates.count; ++i) {
            if (candidates.scaled[i] < floor) continue;
            space_.items[num_items_++] = {candidates.scaled[i], space_.numbers[i]};
            total += space_.numbers[i];
        }
        return total;
    }

    // Updates the best score and its token with all tokens at or above the floor. Ties go to the
    // lowest token.
    void score_above(float floor, uint64_t seed, uint64_t position, float& score, int64_t& winner) {
        gather(floor);
        Candidates& candidates = space_.candidates;
        int64_t count = 0;
        for (int64_t i = 0; i < candidates.count; ++i) {
            candidates.scaled[count] = candidates.scaled[i];
            candidates.tokens[count] = candidates.tokens[i];
            count += candidates.scaled[i] >= floor;
        }
        candidates.count = count;
        gathered_ = floor;
        isa_.noise_of_tokens(candidates.tokens, count, seed, position, space_.numbers);
        for (int64_t i = 0; i < count; ++i) {
            const float mine = candidates.scaled[i] + space_.numbers[i];
            if (mine > score || (mine == score && candidates.tokens[i] < winner)) {
                score = mine;
                winner = candidates.tokens[i];
            }
        }
    }

    const Kernels& isa_;
    const ScaledRow& row_;
    Workspace& space_;
    float gathered_ = INFINITY;  // candidates are all tokens at or above this
    int64_t num_items_ = 0;
};

bool is_allowed(const uint32_t* allowed, int64_t token) {
    return allowed == nullptr || (allowed[token / 32] >> (token % 32) & 1);
}

// The lowest token with the row's best logit.
int64_t best_token(const ScaledRow& row, const float* block_best) {
    int64_t block = 0;
    while (block_best[block] != row.best) ++block;
    int64_t token = block * kTokenBlock;
    while (row.logits[token] != row.best || !is_allowed(row.allowed, token)) ++token;
    return token;
}

}  // namespace

// One token for each row of logits [rows, vocab], rows `stride` apart. Tables by slot, see
// penstock/runner/sampling_tables.py: floats (temperature, log of min_p, top_p), ints (top_k, seed).
// allowed: bits [rows, mask_stride] of the tokens that may be chosen, or null. A row with NaN or
// infinity, or without an allowed token, is marked as faulty and gets token 0.
PENSTOCK_API int32_t penstock_choose_tokens(
    const float* logits, int64_t rows, int64_t stride, int64_t vocab, const int64_t* slots,
    int64_t num_slots, const int64_t* positions, const float* floats, int64_t floats_stride,
    const int64_t* ints, int64_t ints_stride, const uint32_t* allowed, int64_t mask_stride,
    int64_t* tokens, uint8_t* faulted) {
    const auto choose = [&](int64_t i, uint8_t* memory) {
        Workspace space(vocab, memory);
        ScaledRow row;
        row.logits = logits + i * stride;
        row.allowed = allowed == nullptr ? nullptr : allowed + i * mask_stride;
        row.size = vocab;
        row.best = kernels().best_of_row(row.logits, row.allowed, vocab, space.block_best);
        faulted[i] = !std::isfinite(row.best);
        tokens[i] = 0;
        if (faulted[i]) return;
        tokens[i] = best_token(row, space.block_best);
        const float* own = floats + slots[i] * floats_stride;
        const int64_t* numbers = ints + slots[i] * ints_stride;
        row.temperature = own[0];
        if (row.temperature <= kGreedy) return;
        tokens[i] = Drawing(row, space).draw(tokens[i], static_cast<uint64_t>(numbers[1]),
                                             static_cast<uint64_t>(positions[i]), own[1],
                                             std::max<int64_t>(numbers[0], 1), own[2]);
    };
    return in_turn([&] {
        check_index(all_below(slots, rows, num_slots));
        for_each(rows, Workspace::bytes(vocab), choose);
    });
}

// The noise of some tokens at one position, for tests.
PENSTOCK_API void penstock_noise(const int32_t* tokens, int64_t count, int64_t seed,
                                 int64_t position, float* out) {
    kernels().noise_of_tokens(tokens, count, static_cast<uint64_t>(seed),
                              static_cast<uint64_t>(position), out);
}
