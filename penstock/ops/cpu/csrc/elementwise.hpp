// Operations on single rows. The tail of a row is padded and uses the same vector code.
#pragma once

#include <cmath>

#include "kernels.hpp"

namespace {

using namespace penstock;

inline F8 load_tail(const float* p, int64_t count) {
    float padded[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    std::memcpy(padded, p, count * sizeof(float));
    return f8_load(padded);
}

inline void store_tail(float* p, F8 v, int64_t count) {
    float padded[8];
    f8_store(padded, v);
    std::memcpy(p, padded, count * sizeof(float));
}

inline F8 load_up_to(const float* p, int64_t count) {
    return count >= 8 ? f8_load(p) : load_tail(p, count);
}

inline void store_up_to(float* p, F8 v, int64_t count) {
    if (count >= 8) f8_store(p, v); else store_tail(p, v, count);
}

// exp to about one unit in the last place; NaN stays NaN (x is the second operand for that).
inline F8 f8_exp(F8 x) {
    x = f8_max(f8_set(-87.3f), x);
    x = f8_min(f8_set(88.3f), x);
    const F8 n = f8_round(x * f8_set(1.44269504088896341f));
    F8 r = f8_fma(n, f8_set(-0.693359375f), x);
    r = f8_fma(n, f8_set(2.12194440e-4f), r);
    F8 p = f8_set(1.9875691500e-4f);
    p = f8_fma(p, r, f8_set(1.3981999507e-3f));
    p = f8_fma(p, r, f8_set(8.3334519073e-3f));
    p = f8_fma(p, r, f8_set(4.1665795894e-2f));
    p = f8_fma(p, r, f8_set(1.6666665459e-1f));
    p = f8_fma(p, r, f8_set(5.0000001201e-1f));
    p = f8_fma(p, r * r, r + f8_set(1.0f));
    return p * f8_exponent(f8_to_int(n));
}

void quantize_row(const float* x, const QuantizedRows& out, int64_t row) {
    const int64_t num_blocks = out.k / kBlock;
    for (int64_t b = 0; b < num_blocks; ++b) {
        const float* from = x + b * kBlock;
        F8 v[4];
        F8 most = f8_set(0.0f), not_finite = f8_set(0.0f);
        for (int i = 0; i < 4; ++i) {
            v[i] = f8_load(from + 8 * i);
            most = f8_max(most, f8_abs(v[i]));
            not_finite = f8_fma(v[i], f8_set(0.0f), not_finite);
        }
        const float largest = f8_hmax(most);
        // Integers would hide NaN and infinity. They must show in the result.
        const float scale = largest / 127.0f + f8_hsum(not_finite);
        const bool usable = largest > 1e-30f && largest < INFINITY && scale == scale;
        const F8 inverse = f8_set(usable ? 127.0f / largest : 0.0f);
        if (!usable) v[0] = v[1] = v[2] = v[3] = f8_set(0.0f);
        I8 numbers[4];
        for (int i = 0; i < 4; ++i) numbers[i] = f8_to_int(f8_round(v[i] * inverse));
        int32_t low, high;
        i8_store_bytes(numbers, out.q + row * out.k + b * kBlock, low, high);
        const int64_t at = row * num_blocks + b;
        out.scale[at] = scale;
        out.sum[at] = scale * static_cast<float>(low + high);
        out.halves[2 * at] = low;
        out.halves[2 * at + 1] = high;
    }
}

void rms_norm_row(const float* x, const float* weight, float eps, int64_t size, float* out) {
    F8 squares = f8_set(0.0f);
    for (int64_t i = 0; i < size; i += 8) {
        const F8 v = load_up_to(x + i, size - i);
        squares = f8_fma(v, v, squares);
    }
    const float mean = f8_hsum(squares) / static_cast<float>(size);
    const F8 factor = f8_set(1.0f / __builtin_sqrtf(mean + eps));
    for (int64_t i = 0; i < size; i += 8) {
        const F8 v = load_up_to(x + i, size - i) * factor;
        store_up_to(out + i, v * load_up_to(weight + i, size - i), size - i);
    }
}

void layer_norm_row(const float* x, const float* weight, const float* bias, float eps, int64_t size,
                    float* out) {
    F8 sums = f8_set(0.0f);
    for (int64_t i = 0; i < size; i += 8) sums = sums + load_up_to(x + i, size - i);
    const F8 mean = f8_set(f8_hsum(sums) / static_cast<float>(size));
    F8 squares = f8_set(0.0f);
    for (int64_t i = 0; i < size; i += 8) {
        const int64_t left = size - i;
        const F8 v = (left >= 8 ? f8_load(x + i) : load_tail(x + i, left)) - mean;
        if (left >= 8) {
            squares = f8_fma(v, v, squares);
        } else {  // the padding of the tail is no longer zero
            float own[8];
            f8_store(own, v * v);
            squares = squares + load_tail(own, left);
        }
    }
    const F8 factor = f8_set(1.0f / __builtin_sqrtf(f8_hsum(squares) / static_cast<float>(size) + eps));
    for (int64_t i = 0; i < size; i += 8) {
        const int64_t left = size - i;
        F8 v = (load_up_to(x + i, left) - mean) * factor * load_up_to(weight + i, left);
        if (bias) v = v + load_up_to(bias + i, left);
        store_up_to(out + i, v, left);
    }
}

void add_row(const float* a, const float* b, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += 8) {
        store_up_to(out + i, load_up_to(a + i, size - i) + load_up_to(b + i, size - i), size - i);
    }
}

// x holds `size` gates, then `size` values.
void silu_mul_row(const float* x, int64_t size, float* out) {
    const F8 one = f8_set(1.0f), zero = f8_set(0.0f);
    for (int64_t i = 0; i < size; i += 8) {
        const F8 gate = load_up_to(x + i, size - i);
        const F8 up = load_up_to(x + size + i, size - i);
        store_up_to(out + i, gate / (one + f8_exp(zero - gate)) * up, size - i);
    }
}

// The integral of the normal distribution up to x, to 1e-7 (Abramowitz and Stegun 7.1.26).
inline F8 f8_normal_cdf(F8 x) {
    const F8 one = f8_set(1.0f), half = f8_set(0.5f);
    const F8 z = f8_abs(x) * f8_set(0.70710678118654752f);
    const F8 t = one / f8_fma(f8_set(0.3275911f), z, one);
    F8 p = f8_set(1.061405429f);
    p = f8_fma(p, t, f8_set(-1.453152027f));
    p = f8_fma(p, t, f8_set(1.421413741f));
    p = f8_fma(p, t, f8_set(-0.284496736f));
    p = f8_fma(p, t, f8_set(0.254829592f));
    const F8 beyond = half * p * t * f8_exp(f8_set(0.0f) - z * z);  // of |x|
    // half + sign(x) * (half - beyond), without a branch: |x| / x is not a number for zero.
    const F8 side = f8_min(f8_max(x * f8_set(1e30f), f8_set(-1.0f)), one);
    return f8_fma(side, half - beyond, half);
}

template <Activation activation>
inline F8 f8_activate(F8 x) {
    const F8 one = f8_set(1.0f), zero = f8_set(0.0f);
    if constexpr (activation == Activation::kGelu) return x * f8_normal_cdf(x);
    if constexpr (activation == Activation::kRelu) return f8_max(zero, x);
    F8 slope = one;
    if constexpr (activation == Activation::kGeluTanh) {
        slope = f8_fma(f8_set(0.07135481628f) * x, x, f8_set(1.59576912161f));
    }
    return x / (one + f8_exp(zero - slope * x));
}

template <Activation activation>
void activate(bool is_gated, const float* x, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += 8) {
        const int64_t left = size - i;
        F8 v = f8_activate<activation>(load_up_to(x + i, left));
        if (is_gated) v = v * load_up_to(x + size + i, left);
        store_up_to(out + i, v, left);
    }
}

void activate_row(Activation activation, bool is_gated, const float* x, int64_t size, float* out) {
    switch (activation) {
        case Activation::kGelu: return activate<Activation::kGelu>(is_gated, x, size, out);
        case Activation::kGeluTanh: return activate<Activation::kGeluTanh>(is_gated, x, size, out);
        case Activation::kRelu: return activate<Activation::kRelu>(is_gated, x, size, out);
        case Activation::kSilu: return activate<Activation::kSilu>(is_gated, x, size, out);
    }
}

// The first 2 * half numbers of a head; out may be x.
void rotate_row(const float* x, const float* cos, const float* sin, int64_t half, float* out) {
    for (int64_t i = 0; i < half; i += 8) {
        const int64_t left = half - i;
        const F8 c = load_up_to(cos + i, left), s = load_up_to(sin + i, left);
        const F8 first = load_up_to(x + i, left), second = load_up_to(x + half + i, left);
        store_up_to(out + i, first * c - second * s, left);
        store_up_to(out + half + i, second * c + first * s, left);
    }
}

inline uint16_t to_bf16(float value) {  // to nearest even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 64);  // NaN
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// One head in 8 bits: x[i] = scale * q[i]. The scale follows the numbers.
void store_int8_entry(const float* x, int64_t size, uint8_t* out) {
    F8 most = f8_set(0.0f), not_finite = f8_set(0.0f);
    for (int64_t i = 0; i < size; i += 8) {
        const F8 v = load_up_to(x + i, size - i);
        most = f8_max(most, f8_abs(v));
        not_finite = f8_fma(v, f8_set(0.0f), not_finite);
    }
    const float largest = f8_hmax(most);
    // Integers would hide NaN and infinity. They must show in the result.
    const float scale = largest / 127.0f + f8_hsum(not_finite);
    const bool usable = largest > 1e-30f && largest < INFINITY && scale == scale;
    const F8 inverse = f8_set(usable ? 127.0f / largest : 0.0f);
    for (int64_t i = 0; i < size; i += 8) {
        int32_t numbers[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (usable) {
            const I8 rounded = f8_to_int(f8_round(load_up_to(x + i, size - i) * inverse));
            std::memcpy(numbers, &rounded, sizeof numbers);
        }
        for (int64_t j = 0; j < 8 && i + j < size; ++j) out[i + j] = static_cast<uint8_t>(numbers[j]);
    }
    std::memcpy(out + size, &scale, sizeof scale);
}

void store_kv_row(const float* x, int64_t heads, int64_t head_dim, Type type, void* out) {
    const int64_t size = heads * head_dim;
    if (type == Int8) {
        const int64_t entry = entry_elements(type, head_dim);
        for (int64_t h = 0; h < heads; ++h) {
            store_int8_entry(x + h * head_dim, head_dim, static_cast<uint8_t*>(out) + h * entry);
        }
        return;
    }
    if (type == F32) {
        std::memcpy(out, x, size * sizeof(float));
        return;
    }
    uint16_t* to = static_cast<uint16_t*>(out);
    if (type == BF16) {
        for (int64_t i = 0; i < size; ++i) to[i] = to_bf16(x[i]);
        return;
    }
    for (int64_t i = 0; i < size; i += 8) {
        if (size - i >= 8) {
            f8_store_half(to + i, f8_load(x + i));
        } else {
            uint16_t halves[8];
            f8_store_half(halves, load_tail(x + i, size - i));
            std::memcpy(to + i, halves, (size - i) * sizeof(uint16_t));
        }
    }
}

}  // namespace
