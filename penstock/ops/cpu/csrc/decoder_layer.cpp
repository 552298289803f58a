// A whole pre-norm decoder layer in one call. It runs the same kernels in the same order as separate
// calls, so the result is bitwise equal. It saves the overhead between the calls.

#include "lora_slots.hpp"

namespace penstock {

struct DecoderLayer {
    const float* input_norm;   // [hidden]
    const float* output_norm;  // [hidden]
    const float* query_norm;   // [head_dim], or null
    const float* key_norm;     // [head_dim], or null
    Weights qkv, output, gate_up, down;
    int64_t hidden, num_heads, intermediate;
    int64_t window;  // 0: none
    float eps, qk_eps, scale;
};

// The adapters of a layer's matmuls.
struct DecoderLora {
    const LoraSlots *qkv, *output, *gate_up, *down;
};

namespace {

// The same in one step; neither is set if no row has an adapter.
struct StepLora {
    const DecoderLora* layer;
    const AdapterStep* step;
};

// Rows of an MLP that are computed together. Bounds the scratch memory of the intermediate size.
constexpr int64_t kMlpRows = 256;

Scratch attention_scratch, mlp_scratch;

// The input of a matmul, computed row by row when needed: `make(row, out)` fills a row of `x`.
template <class Make>
Activations activations(const Weights& weights, float* x, int64_t rows, int64_t k, const Make& make) {
    Activations result{x, k, rows, k, {}};
    const bool quantize = weights.has_blocks();
    if (quantize) result.quantized = quantized_rows(rows, k);
    const Kernels& isa = kernels();
    for_rows(rows, [&](int64_t row) {
        make(row, x + row * k);
        if (quantize) isa.quantize_row(x + row * k, result.quantized, row);
    });
    return result;
}

// A matmul of rows [first_row, ...) of the step, and what their adapters change in it.
void adapted_linear(const Weights& weights, const Activations& activations,
                    const LoraSlots* DecoderLora::*slots, const StepLora& lora, int64_t first_row,
                    float* y, int64_t ldy) {
    linear(weights, activations, y, ldy);
    if (lora.step) {
        add_lora(*(lora.layer->*slots), *lora.step, activations.x, activations.ldx, first_row,
                 activations.rows, y, ldy);
    }
}

// residual += x, or residual = x in the first layer; out = norm(residual).
void add_and_norm(const float* x, float* residual, bool has_residual, const float* weight, float eps,
                  int64_t size, float* out) {
    if (has_residual) {
        kernels().add_row(x, residual, size, residual);
    } else {
        std::copy(x, x + size, residual);
    }
    kernels().rms_norm_row(residual, weight, eps, size, out);
}

void attention_block(const DecoderLayer& layer, const Cache& cache, const Step& step,
                     const StepLora& lora, float* x, float* residual, bool has_residual) {
    const Kernels& isa = kernels();
    const int64_t rows = step.rows, hidden = layer.hidden, dim = cache.head_dim;
    const int64_t query_size = layer.num_heads * dim, key_size = cache.num_kv_heads * dim;
    const int64_t qkv_size = query_size + 2 * key_size;
    const int64_t widest = std::max(hidden, query_size);
    float* qkv = attention_scratch.floats(rows * (qkv_size + widest));
    float* wide = qkv + rows * qkv_size;  // the output of the norm, then of attention

    const Activations normed =
        activations(layer.qkv, wide, rows, hidden, [&](int64_t row, float* out) {
            add_and_norm(x + row * hidden, residual + row * hidden, has_residual, layer.input_norm,
                         layer.eps, hidden, out);
        });
    adapted_linear(layer.qkv, normed, &DecoderLora::qkv, lora, 0, qkv, qkv_size);
    if (layer.query_norm) {
        for_rows(rows, [&](int64_t row) {
            float* head = qkv + row * qkv_size;
            for (int64_t h = 0; h < layer.num_heads + cache.num_kv_heads; ++h, head += dim) {
                const float* weight = h < layer.num_heads ? layer.query_norm : layer.key_norm;
                isa.rms_norm_row(head, weight, layer.qk_eps, dim, head);
            }
        });
    }
    float *key = qkv + query_size, *value = key + key_size;
    rotate(qkv, layer.num_heads + cache.num_kv_heads, qkv_size, dim, step);
    write_kv(key, qkv_size, value, qkv_size, cache, step.slots, rows);
    const Scoring scoring{layer.scale, layer.window, 0.0f, nullptr};
    attend(qkv, qkv_size, layer.num_heads, cache, step, scoring, wide);
    const Activations attended =
        activations(layer.output, wide, rows, query_size, [](int64_t, float*) {});
    adapted_linear(layer.output, attended, &DecoderLora::output, lora, 0, x, hidden);
}

void mlp_block(const DecoderLayer& layer, int64_t rows, const StepLora& lora, float* x,
               float* residual) {
    const Kernels& isa = kernels();
    const int64_t hidden = layer.hidden, size = layer.intermediate;
    const int64_t most = std::min(rows, kMlpRows);
    float* normed = mlp_scratch.floats(most * (hidden + 3 * size));
    float* gate_up = normed + most * hidden;
    float* activated = gate_up + most * 2 * size;
    for (int64_t first = 0; first < rows; first += kMlpRows) {
        const int64_t count = std::min(kMlpRows, rows - first);
        float* own = x + first * hidden;
        const Activations input =
            activations(layer.gate_up, normed, count, hidden, [&](int64_t row, float* out) {
                add_and_norm(own + row * hidden, residual + (first + row) * hidden, true,
                             layer.output_norm, layer.eps, hidden, out);
            });
        adapted_linear(layer.gate_up, input, &DecoderLora::gate_up, lora, first, gate_up, 2 * size);
        const Activations middle =
            activations(layer.down, activated, count, size, [&](int64_t row, float* out) {
                isa.silu_mul_row(gate_up + row * 2 * size, size, out);
            });
        adapted_linear(layer.down, middle, &DecoderLora::down, lora, first, own, hidden);
    }
}

}  // namespace
}  // namespace penstock

using namespace penstock;

// x [rows, hidden] becomes the layer's output, which is still to be added to residual. `lora` and
// `adapters` are null if no row has an adapter.
PENSTOCK_API int32_t penstock_decoder_layer(const DecoderLayer* layer, const Cache* cache,
                                            const Step* step, float* x, float* residual,
                                            int64_t has_residual, const DecoderLora* lora,
                                            const AdapterStep* adapters) {
    return in_turn([&] {
        if (adapters) {
            check_index(adapters->num_rows == step->rows);
            check_step(*adapters, lora->qkv->num_slots);
        }
        const StepLora own{lora, adapters};
        attention_block(*layer, *cache, *step, own, x, residual, has_residual != 0);
        mlp_block(*layer, step->rows, own, x, residual);
    });
}
