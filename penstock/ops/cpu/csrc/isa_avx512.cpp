#include "simd_avx512.hpp"
// The vectors come first: what follows is written in terms of them.
#include "attention.hpp"
#include "lora.hpp"
#include "sampling.hpp"

namespace penstock {

extern const Kernels kAvx512 = {
    "avx512vnni",    L,           group_bytes, pack_group,   unpack_row,        matmul_scratch, matmul,
    lora_shrink, lora_expand,
    quantize_row, rms_norm_row, layer_norm_row, add_row, silu_mul_row, activate_row, rotate_row,
    store_kv_row,
    attention_scratch, attend,
    best_of_row, gather_block, mass_of_block, mass_of_tokens, noise_of_tokens,
};

}  // namespace penstock
