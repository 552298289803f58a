// The C interface: the choice of the instruction set, packing, and element-wise operations. Matmul,
// attention and whole layers are in other files.

#include <cstring>

#include "runtime.hpp"

#if defined(PENSTOCK_X86)
#include <cpuid.h>
#endif
#if defined(PENSTOCK_ARM64) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

using namespace penstock;

namespace {

#if defined(PENSTOCK_X86)
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}

#if defined(PENSTOCK_AVXVNNI)
bool has_avx_vnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4));
}
#endif

bool supports(const Kernels& kernels) {
    __builtin_cpu_init();
    if (&kernels == &kPortable) return true;
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (&kernels == &kAvx2) return avx2;
#if defined(PENSTOCK_AVXVNNI)
    if (&kernels == &kAvxVnni) return avx2 && has_avx_vnni();
#endif
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

const Kernels* const kAll[] = {  // best first
    &kAvx512,
#if defined(PENSTOCK_AVXVNNI)
    &kAvxVnni,
#endif
    &kAvx2, &kPortable,
};
#elif defined(PENSTOCK_ARM64)
bool supports(const Kernels& kernels) {
    if (&kernels == &kPortable) return true;
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return true;  // Apple's processors have dot products
#endif
}

const Kernels* const kAll[] = {&kNeon, &kPortable};
#else
bool supports(const Kernels&) { return true; }

const Kernels* const kAll[] = {&kPortable};
#endif

const Kernels* best() {
    for (const Kernels* kernels : kAll) {
        if (supports(*kernels)) return kernels;
    }
    return &kPortable;
}

const Kernels* active = best();

}  // namespace

namespace penstock {

const Kernels& kernels() { return *active; }

}  // namespace penstock

// -- the machine

// A hash of the sources, see CMakeLists.txt.
PENSTOCK_API const char* penstock_sources() { return PENSTOCK_SOURCES; }

PENSTOCK_API const char* penstock_isa() { return active->name; }

// Returns 0 if the machine lacks the instruction set. Weights packed before become unreadable.
PENSTOCK_API int penstock_select_isa(const char* name) {
    for (const Kernels* kernels : kAll) {
        if (std::strcmp(kernels->name, name) == 0 && supports(*kernels)) {
            active = kernels;
            return 1;
        }
    }
    return 0;
}

// Returns the number of threads, which is lower if the system allows no more.
PENSTOCK_API int penstock_set_threads(int count) {
    const std::lock_guard<std::mutex> turn(turn_mutex());
    return set_num_threads(count);
}
PENSTOCK_API int penstock_threads() { return num_threads(); }

// -- weights

PENSTOCK_API int64_t penstock_packed_bytes(int32_t type, int64_t rows, int64_t k) {
    return divide_up(rows, active->lanes) * active->group_bytes(static_cast<Type>(type), k);
}

// Packs rows of a checkpoint's matrix, which are row_bytes apart.
PENSTOCK_API int32_t penstock_pack(int32_t type, const uint8_t* rows, int64_t row_bytes,
                                   int64_t num_rows, int64_t k, uint8_t* packed) {
    const Kernels& isa = *active;
    const int64_t bytes = isa.group_bytes(static_cast<Type>(type), k);
    return in_turn([&] {
        for_each(divide_up(num_rows, isa.lanes), 0, [&](int64_t group, uint8_t*) {
            const int64_t first = group * isa.lanes;
            isa.pack_group(static_cast<Type>(type), rows + first * row_bytes, row_bytes,
                           std::min<int64_t>(isa.lanes, num_rows - first), k,
                           packed + group * bytes);
        });
    });
}

// Unpacks some rows of a weight to floats: out [count, k].
PENSTOCK_API int32_t penstock_embed(int32_t type, const uint8_t* packed, int64_t num_rows, int64_t k,
                                    const int64_t* ids, int64_t count, float* out) {
    const Kernels& isa = *active;
    const int64_t bytes = isa.group_bytes(static_cast<Type>(type), k);
    return in_turn([&] {
        check_index(all_below(ids, count, num_rows));
        for_rows(count, [&](int64_t i) {
            isa.unpack_row(static_cast<Type>(type), packed + ids[i] / isa.lanes * bytes,
                           ids[i] % isa.lanes, k, out + i * k);
        });
    });
}

// -- rows

// x [outer, inner, size] with strides; out is contiguous.
PENSTOCK_API int32_t penstock_rms_norm(const float* x, int64_t outer, int64_t inner,
                                       int64_t outer_stride, int64_t inner_stride, int64_t size,
                                       const float* weight, float eps, float* out) {
    const Kernels& isa = *active;
    return in_turn([&] {
        for_rows(outer, [&](int64_t i) {
            for (int64_t j = 0; j < inner; ++j) {
                isa.rms_norm_row(x + i * outer_stride + j * inner_stride, weight, eps, size,
                                 out + (i * inner + j) * size);
            }
        });
    });
}

// sum = x + residual, out = its norm; all contiguous. sum may be x or residual.
PENSTOCK_API int32_t penstock_add_rms_norm(const float* x, const float* residual, int64_t rows,
                                           int64_t size, const float* weight, float eps, float* sum,
                                           float* out) {
    const Kernels& isa = *active;
    return in_turn([&] {
        for_rows(rows, [&](int64_t i) {
            isa.add_row(x + i * size, residual + i * size, size, sum + i * size);
            isa.rms_norm_row(sum + i * size, weight, eps, size, out + i * size);
        });
    });
}

// x [rows, size], contiguous; the bias may be null.
PENSTOCK_API int32_t penstock_layer_norm(const float* x, int64_t rows, int64_t size,
                                         const float* weight, const float* bias, float eps,
                                         float* out) {
    const Kernels& isa = *active;
    return in_turn([&] {
        for_rows(rows, [&](int64_t i) {
            isa.layer_norm_row(x + i * size, weight, bias, eps, size, out + i * size);
        });
    });
}

// x [rows, 2 * size], contiguous -> out [rows, size].
PENSTOCK_API int32_t penstock_silu_mul(const float* x, int64_t rows, int64_t size, float* out) {
    const Kernels& isa = *active;
    return in_turn([&] {
        for_rows(rows, [&](int64_t i) { isa.silu_mul_row(x + 2 * i * size, size, out + i * size); });
    });
}
