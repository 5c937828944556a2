// Chooses the variant of the kernels for this CPU.
#include "kernels.h"

#include <cstdlib>
#include <cstring>

#ifdef PASS_X86
#include <cpuid.h>
#endif

namespace pass {

extern const Kernels PLAIN;
#ifdef PASS_X86
extern const Kernels AVX512, AVXVNNI, AVX2;
#endif

namespace {

struct Variant {
    const Kernels* kernels;
    bool runs;
};

const Kernels& choose() {
    Variant variants[] = {
#ifdef PASS_X86
        {&AVX512, false}, {&AVXVNNI, false}, {&AVX2, false},
#endif
        {&PLAIN, true},
    };
#ifdef PASS_X86
    __builtin_cpu_init();
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool has_vnni = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 4);
    const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
    variants[0].runs = avx2 && __builtin_cpu_supports("avx512f") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    variants[1].runs = avx2 && has_vnni;
    variants[2].runs = avx2;
#endif
    // The environment may name a variant, to be used if it runs, or else the next one that does.
    const char* named = std::getenv("PASS_KERNELS_CPU");
    bool allowed = named == nullptr;
    for (const Variant& variant : variants) {
        allowed = allowed || std::strcmp(variant.kernels->name, named) == 0;
        if (allowed && variant.runs) return *variant.kernels;
    }
    return PLAIN;
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

}  // namespace pass
