// Every instruction set of this machine against the portable code, through the library's interface:
// for machines that Python's tests do not reach. Ends with 0 if all agree.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "runtime.hpp"

using namespace penstock;

extern "C" {
const char* penstock_isa();
int penstock_select_isa(const char* name);
int penstock_set_threads(int count);
int64_t penstock_packed_bytes(int32_t type, int64_t rows, int64_t k);
int32_t penstock_pack(int32_t, const uint8_t*, int64_t, int64_t, int64_t, uint8_t*);
int32_t penstock_embed(int32_t, const uint8_t*, int64_t, int64_t, const int64_t*, int64_t, float*);
int32_t penstock_linear(const Weights*, const float*, int64_t, int64_t, int64_t, float*, int64_t);
int32_t penstock_rms_norm(const float*, int64_t, int64_t, int64_t, int64_t, int64_t, const float*,
                          float, float*);
int32_t penstock_silu_mul(const float*, int64_t, int64_t, float*);
int32_t penstock_rotate(float*, int64_t, int64_t, int64_t, const Step*);
int32_t penstock_write_kv(const float*, int64_t, const float*, int64_t, const Cache*, const int64_t*,
                          int64_t);
int32_t penstock_attend(const float*, int64_t, int64_t, const Cache*, const Step*, float, int64_t,
                        float, const float*, float*);
}

namespace {

using Floats = std::vector<float>;

std::mt19937 generator(0);
int failures = 0, checks = 0;

Floats normal(int64_t count, float size = 1.0f) {
    std::normal_distribution<float> distribution(0.0f, size);
    Floats out(count);
    for (float& x : out) x = distribution(generator);
    return out;
}

void expect(bool good, const std::string& what) {
    ++checks;
    if (good) return;
    ++failures;
    std::printf("FAILED: %s\n", what.c_str());
}

// Nothing but the order and the fusing of additions may differ.
void expect_close(const Floats& found, const Floats& expected, const std::string& what) {
    float most = 0.0f, worst = 0.0f;
    for (size_t i = 0; i < found.size(); ++i) {
        most = std::fmax(most, std::fabs(expected[i]));
        const float difference = std::fabs(found[i] - expected[i]);
        worst = difference == difference ? std::fmax(worst, difference) : INFINITY;
    }
    expect(worst <= 1e-5f * most + 1e-6f, what + ": off by " + std::to_string(worst));
}

bool same_bits(const float* a, const float* b, int64_t count) {
    return std::memcmp(a, b, count * sizeof(float)) == 0;
}

struct Kind {
    Type type;
    int64_t elements, bytes;         // of a block
    std::vector<int64_t> halves;     // where it keeps float16 scales
};

const std::vector<Kind> kKinds = {
    {F32, 1, 4, {}},         {F16, 1, 2, {0}},      {BF16, 1, 2, {}},       {Q4_0, 32, 18, {0}},
    {Q4_1, 32, 20, {0, 2}},  {Q5_0, 32, 22, {0}},   {Q5_1, 32, 24, {0, 2}}, {Q8_0, 32, 34, {0}},
    {Q4_K, 256, 144, {0, 2}}, {Q5_K, 256, 176, {0, 2}}, {Q6_K, 256, 210, {208}},
};

// A matrix with every bit at random, but for scales and floats of sane sizes.
std::vector<uint8_t> random_matrix(const Kind& kind, int64_t rows, int64_t k) {
    std::vector<uint8_t> data(rows * k / kind.elements * kind.bytes);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(generator());
    for (size_t at = 0; at < data.size(); at += kind.bytes) {
        for (const int64_t half : kind.halves) {
            data[at + half + 1] = static_cast<uint8_t>((generator() % 2 << 7) | (0x20 + generator() % 8));
        }
        if (kind.type == F32 || kind.type == BF16) {
            const float value = normal(1)[0];
            std::memcpy(&data[at], reinterpret_cast<const uint8_t*>(&value) + 4 - kind.bytes, kind.bytes);
        }
    }
    return data;
}

Floats multiply(const Kind& kind, const std::vector<uint8_t>& matrix, int64_t columns, int64_t k,
                const Floats& x, const Floats& bias, int64_t rows, Floats& embedded) {
    std::vector<uint8_t> packed(penstock_packed_bytes(kind.type, columns, k));
    const int64_t row_bytes = k / kind.elements * kind.bytes;
    penstock_pack(kind.type, matrix.data(), row_bytes, columns, k, packed.data());
    const int64_t last = columns - 1;
    embedded.resize(k);
    penstock_embed(kind.type, packed.data(), columns, k, &last, 1, embedded.data());
    const WeightPart part{packed.data(), kind.type, columns, 0};
    const Weights weights{&part, 1, bias.data()};
    Floats y(rows * columns), alone(columns);
    penstock_linear(&weights, x.data(), k, rows, k, y.data(), columns);
    for (int64_t row = 0; row < rows; ++row) {
        penstock_linear(&weights, x.data() + row * k, k, 1, k, alone.data(), columns);
        expect(same_bits(alone.data(), &y[row * columns], columns),
               std::string(penstock_isa()) + ": a row alone, type " + std::to_string(kind.type));
    }
    return y;
}

void check_matmul(const char* isa) {
    for (const Kind& kind : kKinds) {
        for (const int64_t columns : {1, 40, 83}) {
            const int64_t k = 512, rows = 21;
            const auto matrix = random_matrix(kind, columns, k);
            const Floats x = normal(rows * k), bias = normal(columns);
            Floats row, expected_row;
            penstock_select_isa("portable");
            const Floats expected = multiply(kind, matrix, columns, k, x, bias, rows, expected_row);
            penstock_select_isa(isa);
            const Floats found = multiply(kind, matrix, columns, k, x, bias, rows, row);
            const std::string what = "type " + std::to_string(kind.type);
            expect_close(found, expected, "matmul of " + what);
            expect(same_bits(row.data(), expected_row.data(), k), "a row of " + what);
        }
    }
}

void check_rows(const char* isa) {
    for (const int64_t size : {1, 7, 64, 129, 576}) {
        const int64_t rows = 9;
        const Floats x = normal(rows * 2 * size, 3.0f), weight = normal(size);
        Floats out[2][3];
        for (int i = 0; i < 2; ++i) {
            penstock_select_isa(i == 0 ? "portable" : isa);
            out[i][0].resize(rows * size);
            out[i][1].resize(rows * size);
            penstock_rms_norm(x.data(), rows, 1, 2 * size, 0, size, weight.data(), 1e-5f, out[i][0].data());
            penstock_silu_mul(x.data(), rows, size, out[i][1].data());
            out[i][2] = x;
            Step step{};
            step.rows = rows;
            step.cos = weight.data();
            step.sin = weight.data();
            step.half = size;
            penstock_rotate(out[i][2].data(), 1, 2 * size, 2 * size, &step);
        }
        const char* names[] = {"rms_norm", "silu_mul", "rotate"};
        for (int op = 0; op < 3; ++op) {
            expect_close(out[1][op], out[0][op], names[op] + (" of " + std::to_string(size)));
        }
    }
}

// One request of `length` tokens, written and attended to in chunks.
Floats attend_in_chunks(Type type, int64_t dim, int64_t window, int64_t length, int64_t chunk,
                        const Floats& query, const Floats& keys, const Floats& values,
                        std::vector<uint8_t>& memory) {
    constexpr int64_t kHeads = 6, kKvHeads = 2, kBlockSize = 16;
    const int64_t blocks = (length + kBlockSize - 1) / kBlockSize;
    const int64_t stride = 2 * kBlockSize * kKvHeads * entry_elements(type, dim);
    memory.assign((blocks + 1) * stride * element_bytes(type), 0x55);
    const Cache cache{memory.data(), blocks + 1, stride, kBlockSize, kKvHeads, dim, type};
    std::vector<int32_t> table(blocks);
    std::vector<int64_t> slots(length);
    for (int64_t i = 0; i < blocks; ++i) table[i] = static_cast<int32_t>(blocks - i);
    for (int64_t i = 0; i < length; ++i) {
        slots[i] = table[i / kBlockSize] * kBlockSize + i % kBlockSize;
    }
    Floats output(length * kHeads * dim);
    const int64_t kv_size = kKvHeads * dim;
    for (int64_t start = 0; start < length; start += chunk) {
        const int64_t rows = std::min(chunk, length - start);
        penstock_write_kv(&keys[start * kv_size], kv_size, &values[start * kv_size], kv_size, &cache,
                          &slots[start], rows);
        const int32_t starts[] = {0, static_cast<int32_t>(rows)};
        const int32_t seen = static_cast<int32_t>(start + rows);
        Step step{};
        step.query_starts = starts;
        step.seq_lens = &seen;
        step.block_table = table.data();
        step.table_stride = step.table_width = blocks;
        step.num_requests = 1;
        step.rows = rows;
        penstock_attend(&query[start * kHeads * dim], kHeads * dim, kHeads, &cache, &step,
                        1.0f / std::sqrt(static_cast<float>(dim)), window, 0.0f, nullptr,
                        &output[start * kHeads * dim]);
    }
    return output;
}

void check_attention(const char* isa) {
    const int64_t length = 75;
    for (const Type type : {F32, F16, BF16, Int8}) {
        for (const int64_t dim : {64, 80, 96, 20}) {
            for (const int64_t window : {0, 40}) {
                const Floats query = normal(length * 6 * dim, 2.0f);
                const Floats keys = normal(length * 2 * dim), values = normal(length * 2 * dim);
                std::vector<uint8_t> memory, expected_memory;
                const auto run = [&](int64_t chunk, std::vector<uint8_t>& into) {
                    return attend_in_chunks(type, dim, window, length, chunk, query, keys, values, into);
                };
                penstock_select_isa("portable");
                const Floats expected = run(length, expected_memory);
                penstock_select_isa(isa);
                const Floats found = run(length, memory), single = run(1, memory);
                const std::string what = "type " + std::to_string(type) + ", head_dim " + std::to_string(dim);
                expect_close(found, expected, "attention, " + what);
                expect(same_bits(found.data(), single.data(), found.size()), "token by token, " + what);
                expect(memory == expected_memory, "the cache, " + what);
            }
        }
    }
}

}  // namespace

int main() {
    penstock_set_threads(2);
    std::printf("the best instruction set here: %s\n", penstock_isa());
    for (const char* isa : {"neon", "avx2", "avxvnni", "avx512vnni"}) {
        if (!penstock_select_isa(isa)) continue;
        const int before = failures;
        check_matmul(isa);
        check_rows(isa);
        check_attention(isa);
        std::printf("%s: %s\n", isa, failures == before ? "as portable" : "differs");
    }
    std::printf("%d checks, %d failed\n", checks, failures);
    return failures == 0 ? 0 : 1;
}
