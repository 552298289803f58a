#include "simd_neon.hpp"
#include "kernel_table.hpp"

namespace penstock {
extern const Kernels kNeon = kernel_table("neon");
}
