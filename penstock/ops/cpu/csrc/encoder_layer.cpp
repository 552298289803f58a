// A whole encoder layer in one call: bidirectional attention and an MLP, post-norm (BERT) or pre-norm
// (ModernBERT).

#include "runtime.hpp"

namespace penstock {

struct LayerNorm {
    const float* weight;  // [hidden]; null: there is none
    const float* bias;    // [hidden], or null
    float eps;
};

struct EncoderLayer {
    LayerNorm attention_norm, mlp_norm;
    Weights qkv, output, up, down;  // in a gated MLP, `up` has the gates first
    int64_t hidden, num_heads, head_dim, intermediate;
    int64_t reach;  // how many tokens attention sees on each side
    int64_t activation;
    int64_t is_gated;
    int64_t norm_first;  // pre-norm; 0: post-norm
    float scale;
};

namespace {

// Rows of an MLP that are computed together, so that they stay in the cache.
constexpr int64_t kMlpRows = 256;

Scratch attention_scratch, mlp_scratch;

void norm_row(const LayerNorm& norm, const float* x, int64_t size, float* out) {
    kernels().layer_norm_row(x, norm.weight, norm.bias, norm.eps, size, out);
}

// y = some rows times the weights. `make(row)` returns a row, in its own memory, when it is needed.
template <class Make>
void project(const Weights& weights, const float* x, int64_t rows, int64_t k, float* y,
             const Make& make) {
    Activations input{x, k, rows, k, {}};
    const bool quantize = weights.has_blocks();
    if (quantize) input.quantized = quantized_rows(rows, k);
    for_rows(rows, [&](int64_t row) {
        make(row);
        if (quantize) kernels().quantize_row(x + row * k, input.quantized, row);
    });
    linear(weights, input, y, weights.columns());
}

// x += y; post-norm: x = norm(x).
void add_rows(const EncoderLayer& layer, const LayerNorm& norm, const float* y, int64_t rows, float* x) {
    for_rows(rows, [&](int64_t row) {
        float* own = x + row * layer.hidden;
        kernels().add_row(own, y + row * layer.hidden, layer.hidden, own);
        if (!layer.norm_first) norm_row(norm, own, layer.hidden, own);
    });
}

// Whether the input of attention or MLP is norm(x) instead of x.
bool norms_input(const EncoderLayer& layer, const LayerNorm& norm) {
    return layer.norm_first && norm.weight != nullptr;
}

void attention_block(const EncoderLayer& layer, const Step& step, float* x) {
    const int64_t rows = step.rows, hidden = layer.hidden;
    const int64_t size = layer.num_heads * layer.head_dim, widest = std::max(hidden, size);
    float* qkv = attention_scratch.floats(rows * (3 * size + widest));
    float* wide = qkv + rows * 3 * size;  // the output of the norm, then of attention
    const bool is_normed = norms_input(layer, layer.attention_norm);
    project(layer.qkv, is_normed ? wide : x, rows, hidden, qkv, [&](int64_t row) {
        if (is_normed) norm_row(layer.attention_norm, x + row * hidden, hidden, wide + row * hidden);
    });
    if (step.cos) rotate(qkv, 2 * layer.num_heads, 3 * size, layer.head_dim, step);
    const KeyValueRows kv{qkv + size, qkv + 2 * size, 3 * size, layer.num_heads, layer.head_dim};
    attend_rows(qkv, 3 * size, layer.num_heads, kv, step, layer.scale, layer.reach, wide);
    float* projected = qkv;  // no longer read
    project(layer.output, wide, rows, size, projected, [](int64_t) {});
    add_rows(layer, layer.attention_norm, projected, rows, x);
}

void mlp_block(const EncoderLayer& layer, int64_t all_rows, float* x) {
    const int64_t hidden = layer.hidden, size = layer.intermediate;
    const int64_t up_size = layer.is_gated ? 2 * size : size;
    const int64_t most = std::min(all_rows, kMlpRows);
    float* normed = mlp_scratch.floats(most * (hidden + up_size + (layer.is_gated ? size : 0)));
    float* up = normed + most * hidden;
    float* activated = layer.is_gated ? up + most * up_size : up;
    const bool is_normed = norms_input(layer, layer.mlp_norm);
    for (int64_t first = 0; first < all_rows; first += kMlpRows) {
        const int64_t rows = std::min(kMlpRows, all_rows - first);
        float* own = x + first * hidden;
        project(layer.up, is_normed ? normed : own, rows, hidden, up, [&](int64_t row) {
            if (is_normed) norm_row(layer.mlp_norm, own + row * hidden, hidden, normed + row * hidden);
        });
        project(layer.down, activated, rows, size, normed, [&](int64_t row) {
            kernels().activate_row(static_cast<Activation>(layer.activation), layer.is_gated != 0,
                                   up + row * up_size, size, activated + row * size);
        });
        add_rows(layer, layer.mlp_norm, normed, rows, own);
    }
}

}  // namespace
}  // namespace penstock

using namespace penstock;

// x [rows, hidden] becomes the layer's output.
PENSTOCK_API int32_t penstock_encoder_layer(const EncoderLayer* layer, const Step* step, float* x) {
    return in_turn([&] {
        attention_block(*layer, *step, x);
        mlp_block(*layer, step->rows, x);
    });
}
