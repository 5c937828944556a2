// AVX2 with VNNI in 256 bits, as Intel's CPUs without AVX-512 have it.
#include <immintrin.h>

#include "kernels.h"

namespace pass {
namespace {

#include "avx2.h"

constexpr int TILE_ROWS = 4;

template <int BITS>
struct Codes {
    __m256i low, high;

    Codes(const uint8_t* stream, int v, int part) {
        if (BITS == 8) {
            low = bytes(stream + 128 * v + 32 * part);
            high = bytes(stream + 128 * v + 64 + 32 * part);
        } else {
            read_codes(stream, v, part, BITS == 5, low, high);
        }
    }
};

template <int BITS>
struct Sums {
    __m256i sum;

    void clear() { sum = _mm256_setzero_si256(); }
    void add(const Codes<BITS>& w, const int8_t* q) {
        sum = _mm256_dpbusd_avx_epi32(sum, w.low, four(q));
        sum = _mm256_dpbusd_avx_epi32(sum, w.high, four(q + 4));
    }
    F total(int shift) const {
        return _mm256_cvtepi32_ps(_mm256_add_epi32(sum, _mm256_set1_epi32(shift)));
    }
};

#include "variant.h"

}  // namespace

extern const Kernels AVXVNNI = variant("avx-vnni");

}  // namespace pass
