// Matmuls and attention with NEON and its dot products (ARMv8.2). Operations on single rows are the
// portable ones: the compiler splits their vectors into NEON's.
#pragma once

#define PENSTOCK_NEON
#include "simd_portable.hpp"

#include <arm_neon.h>

namespace {

// Two registers make a vector of eight floats or ints, or of 32 bytes.
struct Isa : EightLanes {
    static constexpr bool kUnsignedBytes = false;  // 8-bit weights are stored unchanged
    struct F { float32x4_t low, high; };
    struct I { int32x4_t low, high; };
    struct B { int8x16_t low, high; };

    static F zero() { return set(0.0f); }
    static F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
    static void store(float* p, F v) { vst1q_f32(p, v.low); vst1q_f32(p + 4, v.high); }
    static F set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
    static F add(F a, F b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
    static F mul(F a, F b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
    static F fma(F a, F b, F c) {
        return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
    }
    static F fnma(F a, F b, F c) {
        return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)};
    }
    // Transposes four columns of eight rows, beginning at `column`, into four vectors `stride` apart.
    static void four_rows_of(const float* const* rows, int64_t column, float* out, int64_t stride) {
        for (int i = 0; i < 4; ++i) {
            for (int lane = 0; lane < 8; ++lane) out[i * stride + lane] = rows[lane][column + i];
        }
    }
    static F load_bf16(const uint16_t* p) {
        const uint16x8_t raw = vld1q_u16(p);
        return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(raw), 16)),
                vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(raw), 16))};
    }
    static F load_half(const uint8_t* p) {
        const float16x8_t raw = vreinterpretq_f16_u8(vld1q_u8(p));
        return {vcvt_f32_f16(vget_low_f16(raw)), vcvt_f32_f16(vget_high_f16(raw))};
    }
    static F load_u8(const uint8_t* p) {
        const uint16x8_t wide = vmovl_u8(vld1_u8(p));
        return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))),
                vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)))};
    }
    static I load_i8(const uint8_t* p) {
        const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
        return {vmovl_s16(vget_low_s16(wide)), vmovl_s16(vget_high_s16(wide))};
    }
    static F to_float(I v) { return {vcvtq_f32_s32(v.low), vcvtq_f32_s32(v.high)}; }
    static I iset(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
    static I iadd(I a, I b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
    static I isub(I a, I b) { return {vsubq_s32(a.low, b.low), vsubq_s32(a.high, b.high)}; }
    static I imul(I a, I b) { return {vmulq_s32(a.low, b.low), vmulq_s32(a.high, b.high)}; }

    static B load_bytes(const uint8_t* p) {
        return {vreinterpretq_s8_u8(vld1q_u8(p)), vreinterpretq_s8_u8(vld1q_u8(p + 16))};
    }
    static B low_nibbles(B b) {
        return {vandq_s8(b.low, vdupq_n_s8(15)), vandq_s8(b.high, vdupq_n_s8(15))};
    }
    static B high_nibbles(B b) { return {shifted(b.low, -4), shifted(b.high, -4)}; }
    // Moves bits [from, from + width) of each byte to bit 4 and adds them to b.
    static B with_high(B b, B plane, int from, int width) {
        const int8x16_t mask = vdupq_n_s8(static_cast<int8_t>(((1 << width) - 1) << 4));
        return {vorrq_s8(b.low, vandq_s8(shifted(plane.low, 4 - from), mask)),
                vorrq_s8(b.high, vandq_s8(shifted(plane.high, 4 - from), mask))};
    }

    // Dot products of four columns at a time. Weights below 8 bits can be treated as signed.
    using Partial = I;
    template <int bits>
    static constexpr int run() { return 8; }
    static Partial none() { return iset(0); }
    static B four_columns(const int8_t* x) {
        int32_t four;
        std::memcpy(&four, x, 4);
        const int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(four));
        return {all, all};
    }
    static Partial mac(Partial sum, B w, B x) {
        return {vdotq_s32(sum.low, w.low, x.low), vdotq_s32(sum.high, w.high, x.high)};
    }
    static I add_up(I, Partial partial) { return partial; }  // run() never ends early
    static I mac8(I sum, B w, B x) { return mac(sum, w, x); }

  private:
    // Shifts each byte left, or right if negative, and fills with zeros.
    static int8x16_t shifted(int8x16_t bytes, int by) {
        const int8x16_t count = vdupq_n_s8(static_cast<int8_t>(by));
        return vreinterpretq_s8_u8(vshlq_u8(vreinterpretq_u8_s8(bytes), count));
    }
};

}  // namespace
