// The vectorized parts of sampling. exp, log and the noise are bitwise equal to penstock/ops/exact.py
// and random.py: additions and multiplications, never fused.
#pragma once

#include "elementwise.hpp"
#include "kernels.hpp"

namespace {

using namespace penstock;

typedef uint32_t U8 __attribute__((vector_size(32)));
typedef int32_t S8 __attribute__((vector_size(32)));

inline U8 u8_set(uint32_t x) { return U8{x, x, x, x, x, x, x, x}; }

#if defined(__AVX2__)
inline int sign_bits(S8 v) { return _mm256_movemask_ps((__m256)v); }
inline F8 whole(F8 x) { return f8_round(x); }
inline void multiply_wide(U8 a, uint32_t by, U8& high, U8& low) {
    const __m256i factor = _mm256_set1_epi32(static_cast<int32_t>(by));
    const __m256i even = _mm256_mul_epu32((__m256i)a, factor);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
    low = (U8)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    high = (U8)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
#else
inline int sign_bits(S8 v) {
    int bits = 0;
    for (int i = 0; i < 8; ++i) bits |= (v[i] < 0) << i;
    return bits;
}
inline F8 whole(F8 x) {  // rounds to an integer; x >= 0, and all floats from 2^23 on are integers
    const F8 magic = f8_set(8388608.0f);
    return x < magic ? (x + magic) - magic : x;
}
inline void multiply_wide(U8 a, uint32_t by, U8& high, U8& low) {
    for (int i = 0; i < 8; ++i) {
        const uint64_t product = static_cast<uint64_t>(a[i]) * by;
        high[i] = static_cast<uint32_t>(product >> 32);
        low[i] = static_cast<uint32_t>(product);
    }
}
#endif

template <int count>
inline F8 horner(const float (&coefficients)[count], F8 x) {
    F8 result = x * f8_set(coefficients[0]);
    for (int i = 1; i < count - 1; ++i) result = (result + f8_set(coefficients[i])) * x;
    return result + f8_set(coefficients[count - 1]);
}

inline F8 exact_log(F8 x) {
    static const float kCoefficients[] = {
        7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
        -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f,
    };
    const S8 bits = (S8)x;
    const S8 exponent = (bits - 0x3f3504f3) >> 23;
    const F8 fraction = (F8)((U8)bits - ((U8)exponent << 23)) - f8_set(1.0f);
    const F8 power = (F8)__builtin_convertvector(exponent, F8);
    const F8 square = fraction * fraction;
    const F8 rest = horner(kCoefficients, fraction) * fraction * square +
                    power * f8_set(-2.12194440e-4f) - square * f8_set(0.5f);
    return (fraction + rest) + power * f8_set(0.693359375f);
}

inline F8 exact_exp(F8 x) {
    static const float kCoefficients[] = {
        1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
        4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f,
    };
    x = f8_max(x, f8_set(-80.0f));
    const F8 power = f8_round(x * f8_set(1.44269504088896341f));
    const F8 rest = (x - power * f8_set(0.693359375f)) - power * f8_set(-2.12194440e-4f);
    const F8 value = horner(kCoefficients, rest) * (rest * rest) + (rest + f8_set(1.0f));
    return (F8)((U8)value + ((U8)f8_to_int(power) << 23));
}

inline F8 load_logits(const float* p, int64_t count) {
    if (count >= 8) return f8_load(p);
    float padded[8];
    for (int i = 0; i < 8; ++i) padded[i] = i < count ? p[i] : -INFINITY;
    return f8_load(padded);
}

// The bits of eight tokens from `token` on, which is a multiple of 8.
inline uint32_t allowed_bits(const uint32_t* allowed, int64_t token) {
    return allowed == nullptr ? 255u : (allowed[token / 32] >> (token % 32)) & 255u;
}

float best_of_row(const float* logits, const uint32_t* allowed, int64_t size, float* block_best) {
    const F8 infinity = f8_set(INFINITY), nothing = f8_set(-INFINITY);
    const U8 lanes = {1, 2, 4, 8, 16, 32, 64, 128};
    S8 usable = (S8)u8_set(~0u);
    float best = -INFINITY;
    for (int64_t first = 0; first < size; first += kTokenBlock) {
        const int64_t end = first + kTokenBlock < size ? first + kTokenBlock : size;
        F8 most = nothing;
        for (int64_t token = first; token < end; token += 8) {
            F8 x = load_logits(logits + token, end - token);
            usable &= (S8)(x < infinity);
            if (allowed != nullptr) {
                x = (u8_set(allowed_bits(allowed, token)) & lanes) != 0 ? x : nothing;
            }
            most = f8_max(most, x);
        }
        const float highest = f8_hmax(most);
        block_best[first / kTokenBlock] = highest;
        best = highest > best ? highest : best;
    }
    return sign_bits(usable) == 255 ? best : NAN;
}

void gather_block(const ScaledRow& row, int64_t first, float floor, Candidates& out) {
    const F8 best = f8_set(row.best), temperature = f8_set(row.temperature);
    const int64_t end = first + kTokenBlock < row.size ? first + kTokenBlock : row.size;
    for (int64_t token = first; token < end; token += 8) {
        const F8 scaled = (load_logits(row.logits + token, end - token) - best) / temperature;
        uint32_t bits = sign_bits((S8)(scaled >= f8_set(floor)));
        bits &= allowed_bits(row.allowed, token);
        if (bits == 0) continue;
        float values[8];
        f8_store(values, scaled);
        for (; bits != 0; bits &= bits - 1) {
            const int lane = __builtin_ctz(bits);
            out.scaled[out.count] = values[lane];
            out.tokens[out.count++] = static_cast<int32_t>(token + lane);
        }
    }
}

// exp(scaled) as an integer; 2^34 for the best token.
inline F8 masses(F8 scaled) { return whole(exact_exp(scaled) * f8_set(17179869184.0f)); }

double mass_of_block(const ScaledRow& row, int64_t first, float floor) {
    const F8 best = f8_set(row.best), temperature = f8_set(row.temperature);
    const int64_t end = first + kTokenBlock < row.size ? first + kTokenBlock : row.size;
    typedef double D8 __attribute__((vector_size(64)));
    D8 total = {};
    for (int64_t token = first; token < end; token += 8) {
        F8 scaled = (load_logits(row.logits + token, end - token) - best) / temperature;
        if (row.allowed != nullptr) {  // masked logits may be far above the best
            const U8 lanes = {1, 2, 4, 8, 16, 32, 64, 128};
            const U8 bits = u8_set(allowed_bits(row.allowed, token)) & lanes;
            scaled = bits != 0 ? scaled : f8_set(-INFINITY);
        }
        const F8 mass = scaled >= f8_set(floor) ? masses(scaled) : f8_set(0.0f);
        total += __builtin_convertvector(mass, D8);
    }
    double sum = 0.0;
    for (int i = 0; i < 8; ++i) sum += total[i];
    return sum;
}

void mass_of_tokens(const float* scaled, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += 8) {
        store_up_to(out + i, masses(load_up_to(scaled + i, count - i)), count - i);
    }
}

void noise_of_tokens(const int32_t* tokens, int64_t count, uint64_t seed, uint64_t position,
                     float* out) {
    for (int64_t i = 0; i < count; i += 8) {
        const int64_t left = count - i < 8 ? count - i : 8;
        U8 token = u8_set(0);
        std::memcpy(&token, tokens + i, left * sizeof(int32_t));
        U8 c0 = u8_set(static_cast<uint32_t>(position));
        U8 c1 = u8_set(static_cast<uint32_t>(position >> 32));
        U8 c2 = token >> 2, c3 = u8_set(0);
        uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
        for (int round = 0; round < 10; ++round) {
            U8 high0, low0, high2, low2;
            multiply_wide(c0, 0xD2511F53u, high0, low0);
            multiply_wide(c2, 0xCD9E8D57u, high2, low2);
            c0 = high2 ^ c1 ^ u8_set(k0);
            c1 = low2;
            c2 = high0 ^ c3 ^ u8_set(k1);
            c3 = low0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        const U8 lane = token & 3;
        const U8 word = lane < 2 ? (lane == 0 ? c0 : c1) : (lane == 2 ? c2 : c3);
        const F8 x = (F8)__builtin_convertvector((S8)(word >> 9), F8);
        const F8 u = (x + f8_set(0.5f)) * f8_set(1.1920928955078125e-07f);  // 2^-23
        const F8 zero = f8_set(0.0f);
        store_up_to(out + i, zero - exact_log(zero - exact_log(u)), left);
    }
}

}  // namespace
