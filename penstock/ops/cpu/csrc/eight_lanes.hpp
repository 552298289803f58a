// The constants of instruction sets with vectors of eight floats.
#pragma once

namespace {

struct EightLanes {
    static constexpr int kLanes = 8;
    static constexpr int kRowTile = 4;      // rows of a tile of float matmuls
    static constexpr bool kUnpacks = false;  // see simd_avx512.hpp
    static constexpr int kStateTile = 2;    // rows and heads that attention computes together
    static constexpr int kScoreChains = 1;  // independent sums of a score, to hide latency
};

}  // namespace
