#include "simd_avx512.hpp"
#include "kernel_table.hpp"

namespace penstock {
extern const Kernels kAvx512 = kernel_table("avx512vnni");
}
