#include "simd_portable.hpp"
#include "kernel_table.hpp"

namespace penstock {
extern const Kernels kPortable = kernel_table("portable");
}
