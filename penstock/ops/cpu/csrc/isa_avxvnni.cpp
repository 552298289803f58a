#define PENSTOCK_VNNI
#include "simd_avx2.hpp"
#include "kernel_table.hpp"

namespace penstock {
extern const Kernels kAvxVnni = kernel_table("avxvnni");
}
