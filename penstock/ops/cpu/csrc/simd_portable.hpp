// Vectors in plain C++ (with the vector types of GCC and Clang), for any machine.
#pragma once

#include "eight_lanes.hpp"

#include <cstdint>
#include <cstring>

namespace {

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));

inline F8 f8_load(const float* p) { F8 v; std::memcpy(&v, p, sizeof v); return v; }
inline void f8_store(float* p, F8 v) { std::memcpy(p, &v, sizeof v); }
inline F8 f8_set(float x) { return F8{x, x, x, x, x, x, x, x}; }
inline F8 f8_fma(F8 a, F8 b, F8 c) { return a * b + c; }
inline F8 f8_max(F8 a, F8 b) { return a > b ? a : b; }
inline F8 f8_min(F8 a, F8 b) { return a < b ? a : b; }
inline F8 f8_abs(F8 a) { return (F8)((I8)a & 0x7fffffff); }
inline F8 f8_round(F8 a) {  // to nearest even, for |a| < 2^22
    const F8 magic = f8_set(12582912.0f);
    return (a + magic) - magic;
}
inline I8 f8_to_int(F8 a) { return __builtin_convertvector(a, I8); }
inline F8 f8_exponent(I8 n) { return (F8)((n + 127) << 23); }  // 2^n
inline F8 f8_load_bf16(const uint16_t* p) {
    F8 out;
    for (int i = 0; i < 8; ++i) {
        const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        out[i] = value;
    }
    return out;
}
inline float f8_hsum(F8 v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
inline float f8_hmax(F8 v) {
    float best = v[0];
    for (int i = 1; i < 8; ++i) best = v[i] > best ? v[i] : best;
    return best;
}
// 32 integers as bytes; low and high become the sums of the first and the last 16.
inline void i8_store_bytes(const I8* v, int8_t* out, int32_t& low, int32_t& high) {
    low = high = 0;
    for (int i = 0; i < 32; ++i) {
        const int32_t number = v[i / 8][i % 8];
        out[i] = static_cast<int8_t>(number);
        (i < 16 ? low : high) += number;
    }
}
inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
    float magnitude;
    if (exponent == 0) {
        magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    } else {
        const uint32_t bits =
            exponent == 31 ? 0x7f800000u | (mantissa << 13) : ((exponent + 112) << 23) | (mantissa << 13);
        std::memcpy(&magnitude, &bits, 4);
    }
    uint32_t bits;
    std::memcpy(&bits, &magnitude, 4);
    bits |= sign;
    std::memcpy(&magnitude, &bits, 4);
    return magnitude;
}

inline uint16_t float_to_half(float value) {  // to nearest even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;   // NaN
    if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
    if (bits < 0x38800000) {                       // below 2^-14: multiples of 2^-24
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;  // whose last place is 2^-24, so that the addition rounds
        std::memcpy(&bits, &magnitude, 4);
        return sign | static_cast<uint16_t>(bits - 0x3f000000);
    }
    return sign | static_cast<uint16_t>((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13);
}
inline F8 f8_load_half(const uint16_t* p) {
    F8 out;
    for (int i = 0; i < 8; ++i) out[i] = half_to_float(p[i]);
    return out;
}
inline void f8_store_half(uint16_t* p, F8 v) {
    for (int i = 0; i < 8; ++i) p[i] = float_to_half(v[i]);
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }

#if !defined(PENSTOCK_NEON)
// The vectors of matmul and attention: kLanes floats or ints, or 4 * kLanes bytes.
struct Isa : EightLanes {
    static constexpr bool kUnsignedBytes = false;  // 8-bit weights are stored unchanged
    using F = F8;
    using I = I8;
    struct B { uint8_t v[32]; };

    static F zero() { return f8_set(0.0f); }
    static F load(const float* p) { return f8_load(p); }
    static void store(float* p, F v) { f8_store(p, v); }
    static F set(float x) { return f8_set(x); }
    static F add(F a, F b) { return a + b; }
    static F mul(F a, F b) { return a * b; }
    static F fma(F a, F b, F c) { return f8_fma(a, b, c); }
    static F fnma(F a, F b, F c) { return c - a * b; }
    // Transposes four columns of eight rows, beginning at `column`, into four vectors `stride` apart.
    static void four_rows_of(const float* const* rows, int64_t column, float* out, int64_t stride) {
        for (int i = 0; i < 4; ++i) {
            for (int lane = 0; lane < 8; ++lane) out[i * stride + lane] = rows[lane][column + i];
        }
    }
    static F load_bf16(const uint16_t* p) { return f8_load_bf16(p); }
    static F load_half(const uint8_t* p) {
        uint16_t halves[8];
        std::memcpy(halves, p, sizeof halves);
        return f8_load_half(halves);
    }
    static F load_u8(const uint8_t* p) {
        F out;
        for (int i = 0; i < 8; ++i) out[i] = p[i];
        return out;
    }
    static I load_i8(const uint8_t* p) {
        I out;
        for (int i = 0; i < 8; ++i) out[i] = static_cast<int8_t>(p[i]);
        return out;
    }
    static F to_float(I v) { return __builtin_convertvector(v, F); }
    static I iset(int32_t x) { return I{x, x, x, x, x, x, x, x}; }
    static I iadd(I a, I b) { return a + b; }
    static I isub(I a, I b) { return a - b; }
    static I imul(I a, I b) { return a * b; }

    static B load_bytes(const uint8_t* p) { B b; std::memcpy(&b, p, sizeof b); return b; }
    static B low_nibbles(B b) { for (auto& v : b.v) v &= 15; return b; }
    static B high_nibbles(B b) { for (auto& v : b.v) v >>= 4; return b; }
    // Moves bits [from, from + width) of each byte to bit 4 and adds them to b.
    static B with_high(B b, B plane, int from, int width) {
        for (int i = 0; i < 32; ++i) b.v[i] |= ((plane.v[i] >> from) & ((1 << width) - 1)) << 4;
        return b;
    }

    // Dot products of four columns at a time, w unsigned; as many as `run` bits allow may be summed
    // before they are added up.
    using Partial = I;
    template <int bits>
    static constexpr int run() { return 8; }
    static Partial none() { return iset(0); }
    static B four_columns(const int8_t* x) {
        B b;
        for (int i = 0; i < 32; ++i) b.v[i] = static_cast<uint8_t>(x[i % 4]);
        return b;
    }
    static Partial mac(Partial sum, B w, B x) {
        for (int lane = 0; lane < 8; ++lane) {
            int32_t part = 0;
            for (int i = 4 * lane; i < 4 * lane + 4; ++i) part += w.v[i] * static_cast<int8_t>(x.v[i]);
            sum[lane] += part;
        }
        return sum;
    }
    static I add_up(I sum, Partial partial) { return sum + partial; }
    // The same for w of 8 bits, as they are stored.
    static I mac8(I sum, B w, B x) {
        for (int lane = 0; lane < 8; ++lane) {
            int32_t part = 0;
            for (int i = 4 * lane; i < 4 * lane + 4; ++i) {
                part += static_cast<int8_t>(w.v[i]) * static_cast<int8_t>(x.v[i]);
            }
            sum[lane] += part;
        }
        return sum;
    }
};
#endif

}  // namespace
