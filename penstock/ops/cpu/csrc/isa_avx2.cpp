#include "simd_avx2.hpp"
#include "kernel_table.hpp"

namespace penstock {
extern const Kernels kAvx2 = kernel_table("avx2");
}
