// Matmuls and attention with AVX-512 VNNI. Operations on single rows are those of AVX2.
#pragma once

#define PENSTOCK_AVX512
#include "simd_avx2.hpp"

namespace {

struct Isa {
    static constexpr int kLanes = 16;
    static constexpr int kRowTile = 8;  // rows of a tile of float matmuls
    static constexpr bool kUnpacks = true;  // for many rows, unpack two groups of weights at once
    static constexpr int kStateTile = 4;  // rows and heads that attention computes together
    static constexpr int kScoreChains = 2;  // independent sums of a score, to hide latency
    static constexpr bool kUnsignedBytes = true;  // 8-bit weights are stored with 128 added
    using F = __m512;
    using I = __m512i;
    using B = __m512i;

    static F zero() { return _mm512_setzero_ps(); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
    // Transposes four columns of sixteen rows, beginning at `column`, into four vectors.
    static void four_rows_of(const float* const* rows, int64_t column, float* out, int64_t stride) {
        __m512 v[4];  // row i of each group of four
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm512_castps128_ps512(_mm_loadu_ps(rows[i] + column));
            v[i] = _mm512_insertf32x4(v[i], _mm_loadu_ps(rows[i + 4] + column), 1);
            v[i] = _mm512_insertf32x4(v[i], _mm_loadu_ps(rows[i + 8] + column), 2);
            v[i] = _mm512_insertf32x4(v[i], _mm_loadu_ps(rows[i + 12] + column), 3);
        }
        const __m512 a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpackhi_ps(v[0], v[1]);
        const __m512 c = _mm512_unpacklo_ps(v[2], v[3]), d = _mm512_unpackhi_ps(v[2], v[3]);
        _mm512_storeu_ps(out, _mm512_shuffle_ps(a, c, 0x44));
        _mm512_storeu_ps(out + stride, _mm512_shuffle_ps(a, c, 0xee));
        _mm512_storeu_ps(out + 2 * stride, _mm512_shuffle_ps(b, d, 0x44));
        _mm512_storeu_ps(out + 3 * stride, _mm512_shuffle_ps(b, d, 0xee));
    }
    static F load_bf16(const uint16_t* p) {
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    }
    static F load_half(const uint8_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static F load_u8(const uint8_t* p) {
        return _mm512_cvtepi32_ps(
            _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
    static I load_i8(const uint8_t* p) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
    static I iset(int32_t x) { return _mm512_set1_epi32(x); }
    static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
    static I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
    static I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }

    static B load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static B low_nibbles(B b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
    static B high_nibbles(B b) {
        return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15));
    }
    static B with_high(B b, B plane, int from, int width) {
        const B moved = from > 4 ? _mm512_srli_epi16(plane, from - 4)
                                 : _mm512_slli_epi16(plane, 4 - from);
        return _mm512_or_si512(
            b, _mm512_and_si512(moved, _mm512_set1_epi8(((1 << width) - 1) << 4)));
    }

    using Partial = I;
    template <int bits>
    static constexpr int run() { return 8; }
    static Partial none() { return _mm512_setzero_si512(); }
    static B four_columns(const int8_t* x) {
        int32_t four;
        std::memcpy(&four, x, 4);
        return _mm512_set1_epi32(four);
    }
    static Partial mac(Partial sum, B w, B x) { return _mm512_dpbusd_epi32(sum, w, x); }
    static I add_up(I, Partial partial) { return partial; }  // run() never ends early
    static I mac8(I sum, B w, B x) { return _mm512_dpbusd_epi32(sum, w, x); }
};

}  // namespace
