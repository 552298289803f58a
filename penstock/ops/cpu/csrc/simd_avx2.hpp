// Vectors of AVX2, FMA and F16C. Matmuls use maddubs, or vpdpbusd if PENSTOCK_VNNI is defined.
#pragma once

#include "eight_lanes.hpp"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

using F8 = __m256;
using I8 = __m256i;

inline F8 f8_load(const float* p) { return _mm256_loadu_ps(p); }
inline void f8_store(float* p, F8 v) { _mm256_storeu_ps(p, v); }
inline F8 f8_set(float x) { return _mm256_set1_ps(x); }
inline F8 f8_fma(F8 a, F8 b, F8 c) { return _mm256_fmadd_ps(a, b, c); }
inline F8 f8_max(F8 a, F8 b) { return _mm256_max_ps(a, b); }
inline F8 f8_min(F8 a, F8 b) { return _mm256_min_ps(a, b); }
inline F8 f8_abs(F8 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F8 f8_round(F8 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline I8 f8_to_int(F8 a) { return _mm256_cvtps_epi32(a); }
inline F8 f8_exponent(I8 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline F8 f8_load_bf16(const uint16_t* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
inline float f8_hsum(F8 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    s = _mm_add_ss(s, _mm_movehdup_ps(s));
    return _mm_cvtss_f32(s);
}
inline float f8_hmax(F8 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    s = _mm_max_ss(s, _mm_movehdup_ps(s));
    return _mm_cvtss_f32(s);
}
// 32 integers as bytes; low and high become the sums of the first and the last 16.
inline void i8_store_bytes(const I8* v, int8_t* out, int32_t& low, int32_t& high) {
    const I8 packed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    const I8 order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<I8*>(out), _mm256_permutevar8x32_epi32(packed, order));
    const I8 sums = _mm256_hadd_epi32(_mm256_add_epi32(v[0], v[1]), _mm256_add_epi32(v[2], v[3]));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    s = _mm_hadd_epi32(s, s);  // low, high, low, high
    low = _mm_cvtsi128_si32(s);
    high = _mm_extract_epi32(s, 1);
}
inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline F8 f8_load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void f8_store_half(uint16_t* p, F8 v) {
    const __m128i halves = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }

#if !defined(PENSTOCK_AVX512)
// The vectors of matmul and attention: kLanes floats or ints, or 4 * kLanes bytes.
struct Isa : EightLanes {
#if defined(PENSTOCK_VNNI)
    static constexpr bool kUnsignedBytes = true;  // 8-bit weights are stored with 128 added
#else
    static constexpr bool kUnsignedBytes = false;
#endif
    using F = __m256;
    using I = __m256i;
    using B = __m256i;

    static F zero() { return _mm256_setzero_ps(); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
    static F set(float x) { return _mm256_set1_ps(x); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
    // Transposes four columns of eight rows, beginning at `column`, into four vectors `stride` apart.
    static void four_rows_of(const float* const* rows, int64_t column, float* out, int64_t stride) {
        __m256 v[4];  // row i of each group of four
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm256_castps128_ps256(_mm_loadu_ps(rows[i] + column));
            v[i] = _mm256_insertf128_ps(v[i], _mm_loadu_ps(rows[i + 4] + column), 1);
        }
        const __m256 a = _mm256_unpacklo_ps(v[0], v[1]), b = _mm256_unpackhi_ps(v[0], v[1]);
        const __m256 c = _mm256_unpacklo_ps(v[2], v[3]), d = _mm256_unpackhi_ps(v[2], v[3]);
        _mm256_storeu_ps(out, _mm256_shuffle_ps(a, c, 0x44));
        _mm256_storeu_ps(out + stride, _mm256_shuffle_ps(a, c, 0xee));
        _mm256_storeu_ps(out + 2 * stride, _mm256_shuffle_ps(b, d, 0x44));
        _mm256_storeu_ps(out + 3 * stride, _mm256_shuffle_ps(b, d, 0xee));
    }
    static F load_bf16(const uint16_t* p) { return f8_load_bf16(p); }
    static F load_half(const uint8_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static F load_u8(const uint8_t* p) {
        return _mm256_cvtepi32_ps(
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    }
    static I load_i8(const uint8_t* p) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
    static I iset(int32_t x) { return _mm256_set1_epi32(x); }
    static I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
    static I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
    static I imul(I a, I b) { return _mm256_mullo_epi32(a, b); }

    static B load_bytes(const uint8_t* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    static B low_nibbles(B b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
    static B high_nibbles(B b) {
        return _mm256_and_si256(_mm256_srli_epi16(b, 4), _mm256_set1_epi8(15));
    }
    // Moves bits [from, from + width) of each byte to bit 4 and adds them to b.
    static B with_high(B b, B plane, int from, int width) {
        const B moved = from > 4 ? _mm256_srli_epi16(plane, from - 4)
                                 : _mm256_slli_epi16(plane, 4 - from);
        return _mm256_or_si256(
            b, _mm256_and_si256(moved, _mm256_set1_epi8(((1 << width) - 1) << 4)));
    }

    // Dot products of four columns at a time, w unsigned; as many as `run` says may be summed before
    // they are added up.
    using Partial = I;
    static Partial none() { return _mm256_setzero_si256(); }
    static B four_columns(const int8_t* x) {
        int32_t four;
        std::memcpy(&four, x, 4);
        return _mm256_set1_epi32(four);
    }
#if defined(PENSTOCK_VNNI)
    template <int bits>
    static constexpr int run() { return 8; }
    static Partial mac(Partial sum, B w, B x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
    static I add_up(I sum, Partial partial) { return _mm256_add_epi32(sum, partial); }
    static I mac8(I sum, B w, B x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#else
    template <int bits>
    static constexpr int run() {  // 2 * 127 * (2^bits - 1) * run <= 32767
        return bits == 4 ? 8 : bits == 5 ? 4 : 2;
    }
    static Partial mac(Partial sum, B w, B x) {
        return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
    }
    static I add_up(I sum, Partial partial) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(partial, _mm256_set1_epi16(1)));
    }
    // The same for w of 8 bits, as they are stored: |w| <= 128, so a pair fits into 16 bits.
    static I mac8(I sum, B w, B x) {
        return add_up(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)));
    }
#endif
};
#endif

}  // namespace
