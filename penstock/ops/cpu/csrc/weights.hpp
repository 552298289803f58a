// The memory layout of packed weights, and packing from GGUF blocks.
//
// A group holds the kLanes rows of one vector of outputs, in consecutive blocks of 32 columns. A block
// has its scales, then its numbers, four columns of all lanes at a time:
//   4 bits: column groups 0-3 in the low and 4-7 in the high halves of 4 vectors;
//   5 bits: the same, then a vector whose bit g is the fifth bit of column group g;
//   6 bits: the same, then 2 vectors with two bits for each of column groups 0-3 and 4-7;
//   8 bits: 8 vectors.
// The scales of K types that apply to eight blocks follow the last block.
// Floats are stored by column: [k, kLanes].
#pragma once

#include "kernels.hpp"

namespace {

using namespace penstock;

constexpr int L = Isa::kLanes;

enum class Scales { kScale, kScaleAndMin, kSuper, kSuperHalves };

struct Format {
    int bits;
    int offset;  // was added to the stored numbers
    Scales scales;
    int block_bytes;  // in a GGUF file, for 32 elements or for 256 of K types
    constexpr bool is_super() const { return scales == Scales::kSuper || scales == Scales::kSuperHalves; }
    constexpr int data_bytes() const { return bits * 4 * L; }
    constexpr int scale_bytes() const { return scales == Scales::kScaleAndMin ? 4 * L : 2 * L; }
    constexpr int stride() const { return scale_bytes() + data_bytes(); }
    constexpr int super_bytes() const {
        return scales == Scales::kSuper ? 4 * L : scales == Scales::kSuperHalves ? 2 * L : 0;
    }
};

constexpr Format format_of(Type type) {
    switch (type) {
        case Q4_0: return {4, 8, Scales::kScale, 18};
        case Q4_1: return {4, 0, Scales::kScaleAndMin, 20};
        case Q5_0: return {5, 16, Scales::kScale, 22};
        case Q5_1: return {5, 0, Scales::kScaleAndMin, 24};
        case Q8_0: return {8, Isa::kUnsignedBytes ? 128 : 0, Scales::kScale, 34};
        case Q4_K: return {4, 0, Scales::kSuper, 144};
        case Q5_K: return {5, 0, Scales::kSuper, 176};
        case Q6_K: return {6, 32, Scales::kSuperHalves, 210};
        default: return {0, 0, Scales::kScale, 0};
    }
}

inline int float_bytes(Type type) { return type == F32 ? 4 : type == F16 || type == BF16 ? 2 : 0; }

int64_t group_bytes(Type type, int64_t k) {
    if (const int bytes = float_bytes(type)) return k * L * bytes;
    const Format format = format_of(type);
    return k / kBlock * format.stride() + (format.is_super() ? k / 256 * format.super_bytes() : 0);
}

// One block of 32 numbers of a GGUF row, before packing.
struct RawBlock {
    uint8_t q[kBlock];
    uint8_t scale[4];  // as many bytes as the format has per lane and block
};

void put_nibbles(const uint8_t* packed, RawBlock& out) {
    for (int i = 0; i < 16; ++i) {
        out.q[i] = packed[i] & 15;
        out.q[i + 16] = packed[i] >> 4;
    }
}

void put_fifth_bits(const uint8_t* bits, RawBlock& out) {
    for (int i = 0; i < kBlock; ++i) out.q[i] |= ((bits[i / 8] >> (i % 8)) & 1) << 4;
}

// Six-bit scale and minimum of group j of a Q4_K or Q5_K block.
void put_k_scale(const uint8_t* block, int j, RawBlock& out) {
    const uint8_t *scales = block + 4, *minima = block + 8, *rest = block + 12;
    if (j < 4) {
        out.scale[0] = scales[j] & 63;
        out.scale[1] = minima[j] & 63;
    } else {
        out.scale[0] = (rest[j - 4] & 15) | ((scales[j - 4] >> 2) & 0x30);
        out.scale[1] = (rest[j - 4] >> 4) | ((minima[j - 4] >> 2) & 0x30);
    }
}

void read_block(Type type, const uint8_t* row, int64_t index, RawBlock& out) {
    const Format format = format_of(type);
    const int j = static_cast<int>(index % 8);  // of the 8 in a K type's block
    const uint8_t* block = row + (format.is_super() ? index / 8 : index) * format.block_bytes;
    if (!format.is_super()) std::memcpy(out.scale, block, format.scale_bytes() / L);
    switch (type) {
        case Q4_0: put_nibbles(block + 2, out); break;
        case Q4_1: put_nibbles(block + 4, out); break;
        case Q5_0: put_nibbles(block + 6, out); put_fifth_bits(block + 2, out); break;
        case Q5_1: put_nibbles(block + 8, out); put_fifth_bits(block + 4, out); break;
        case Q8_0:
            for (int i = 0; i < kBlock; ++i) out.q[i] = block[2 + i] + format.offset;
            break;
        case Q4_K:
        case Q5_K: {
            const uint8_t* low = block + (type == Q4_K ? 16 : 48) + j / 2 * 32;
            for (int i = 0; i < kBlock; ++i) {
                out.q[i] = j % 2 ? low[i] >> 4 : low[i] & 15;
                if (type == Q5_K) out.q[i] |= ((block[16 + i] >> j) & 1) << 4;
            }
            put_k_scale(block, j, out);
            break;
        }
        case Q6_K: {
            const int half = j / 4, quarter = j % 4;
            const uint8_t* low = block + half * 64 + quarter % 2 * 32;
            const uint8_t* high = block + 128 + half * 32;
            for (int i = 0; i < kBlock; ++i) {
                const uint8_t nibble = quarter / 2 ? low[i] >> 4 : low[i] & 15;
                out.q[i] = nibble | (((high[i] >> (2 * quarter)) & 3) << 4);
            }
            std::memcpy(out.scale, block + 192 + 2 * j, 2);
            break;
        }
        default: break;
    }
}

void pack_block(const Format& format, const RawBlock& raw, int lane, uint8_t* block) {
    // Scales: [scale, lane] of two bytes each, or of one for K types.
    const int width = format.is_super() ? 1 : 2;
    const int count = format.scale_bytes() / L / width;
    for (int s = 0; s < count; ++s) {
        std::memcpy(block + (s * L + lane) * width, raw.scale + s * width, width);
    }
    uint8_t* data = block + format.scale_bytes();
    uint8_t* planes = data + 16 * L;
    for (int e = 0; e < kBlock; ++e) {
        const int g = e / 4, at = 4 * lane + e % 4;
        const uint8_t q = raw.q[e];
        if (format.bits == 8) {
            data[g * 4 * L + at] = q;
            continue;
        }
        data[g % 4 * 4 * L + at] |= (q & 15) << (g < 4 ? 0 : 4);
        if (format.bits == 5) planes[at] |= (q >> 4) << g;
        if (format.bits == 6) planes[g / 4 * 4 * L + at] |= (q >> 4) << (2 * (g % 4));
    }
}

RawBlock unpack_block(const Format& format, int lane, const uint8_t* block) {
    RawBlock raw;
    const int width = format.is_super() ? 1 : 2;
    const int count = format.scale_bytes() / L / width;
    for (int s = 0; s < count; ++s) {
        std::memcpy(raw.scale + s * width, block + (s * L + lane) * width, width);
    }
    const uint8_t* data = block + format.scale_bytes();
    const uint8_t* planes = data + 16 * L;
    for (int e = 0; e < kBlock; ++e) {
        const int g = e / 4, at = 4 * lane + e % 4;
        if (format.bits == 8) {
            raw.q[e] = data[g * 4 * L + at];
            continue;
        }
        uint8_t q = (data[g % 4 * 4 * L + at] >> (g < 4 ? 0 : 4)) & 15;
        if (format.bits == 5) q |= ((planes[at] >> g) & 1) << 4;
        if (format.bits == 6) q |= ((planes[g / 4 * 4 * L + at] >> (2 * (g % 4))) & 3) << 4;
        raw.q[e] = q;
    }
    return raw;
}

void pack_group(Type type, const uint8_t* rows, int64_t row_bytes, int64_t num_rows, int64_t k,
                uint8_t* packed) {
    std::memset(packed, 0, group_bytes(type, k));
    if (const int bytes = float_bytes(type)) {
        for (int64_t lane = 0; lane < num_rows; ++lane) {
            const uint8_t* row = rows + lane * row_bytes;
            for (int64_t i = 0; i < k; ++i) {
                std::memcpy(packed + (i * L + lane) * bytes, row + i * bytes, bytes);
            }
        }
        return;
    }
    const Format format = format_of(type);
    const int64_t num_blocks = k / kBlock;
    uint8_t* supers = packed + num_blocks * format.stride();
    for (int lane = 0; lane < num_rows; ++lane) {
        const uint8_t* row = rows + lane * row_bytes;
        RawBlock raw;
        for (int64_t b = 0; b < num_blocks; ++b) {
            read_block(type, row, b, raw);
            pack_block(format, raw, lane, packed + b * format.stride());
        }
        for (int64_t s = 0; format.is_super() && s < k / 256; ++s) {
            const uint8_t* from = row + s * format.block_bytes + (type == Q6_K ? 208 : 0);
            for (int i = 0; i < format.super_bytes() / L / 2; ++i) {
                std::memcpy(supers + s * format.super_bytes() + (i * L + lane) * 2, from + 2 * i, 2);
            }
        }
    }
}

inline float half_at(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return half_to_float(bits);
}

// First the scale, then the offset, with two roundings, as in GGUF's reference.
void unpack_row(Type type, const uint8_t* group, int64_t lane, int64_t k, float* out) {
    if (const int bytes = float_bytes(type)) {
        for (int64_t i = 0; i < k; ++i) {
            const uint8_t* p = group + (i * L + lane) * bytes;
            if (type == F16) {
                out[i] = half_at(p);
            } else {
                uint32_t word = 0;
                std::memcpy(reinterpret_cast<uint8_t*>(&word) + (4 - bytes), p, bytes);
                std::memcpy(out + i, &word, 4);
            }
        }
        return;
    }
    const Format format = format_of(type);
    const int64_t num_blocks = k / kBlock;
    for (int64_t b = 0; b < num_blocks; ++b, out += kBlock) {
        const RawBlock raw = unpack_block(format, static_cast<int>(lane), group + b * format.stride());
        const uint8_t* super =
            group + num_blocks * format.stride() + b / 8 * format.super_bytes() + 2 * lane;
        float scale[2] = {0.0f, 0.0f}, minimum = 0.0f;
        switch (format.scales) {
            case Scales::kScale: scale[0] = scale[1] = half_at(raw.scale); break;
            case Scales::kScaleAndMin:
                scale[0] = scale[1] = half_at(raw.scale);
                minimum = half_at(raw.scale + 2);
                break;
            case Scales::kSuper:
                scale[0] = scale[1] = half_at(super) * raw.scale[0];
                minimum = -(half_at(super + 2 * L) * raw.scale[1]);
                break;
            case Scales::kSuperHalves:
                for (int i = 0; i < 2; ++i) {
                    scale[i] = half_at(super) * static_cast<int8_t>(raw.scale[i]);
                }
                break;
        }
        for (int e = 0; e < kBlock; ++e) {
            const int q = type == Q8_0 && !Isa::kUnsignedBytes ? static_cast<int8_t>(raw.q[e])
                                                               : raw.q[e] - format.offset;
            out[e] = q * scale[e / 16] + minimum;
        }
    }
}

}  // namespace
