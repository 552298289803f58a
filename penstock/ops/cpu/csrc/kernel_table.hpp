// The table of kernels of one instruction set. Include this after its simd_*.hpp: the kernels are
// written in terms of its vectors.
#pragma once

#include "attention.hpp"
#include "lora.hpp"
#include "sampling.hpp"

namespace penstock {
namespace {

constexpr Kernels kernel_table(const char* name) {
    return {
        name,           L,
        group_bytes,    pack_group,     unpack_row,    matmul_scratch, matmul,
        lora_shrink,    lora_expand,
        quantize_row,   rms_norm_row,   layer_norm_row, add_row,       silu_mul_row,
        activate_row,   rotate_row,     store_kv_row,  attention_scratch, attend,
        best_of_row,    gather_block,   mass_of_block, mass_of_tokens, noise_of_tokens,
    };
}

}  // namespace
}  // namespace penstock
