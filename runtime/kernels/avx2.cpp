// AVX2 without VNNI. Its product of bytes adds pairs in 16 bits, where a sum that does not fit
// saturates. Codes of 4 bits fit: 2 * 15 * 127 each, and all eight of a block too. Codes of 8 bits are
// multiplied as two halves of 4 bits.
#include <immintrin.h>

#include "kernels.h"

namespace pass {
namespace {

#include "avx2.h"

constexpr int TILE_ROWS = 6;

template <int BITS>
struct Codes {
    __m256i low, high, upper_low, upper_high;

    Codes(const uint8_t* stream, int v, int part) {
        if (BITS != 8) {
            read_codes(stream, v, part, BITS == 5, low, high);
            return;
        }
        const __m256i mask = _mm256_set1_epi8(15);
        const uint8_t* at = stream + 128 * v + 32 * part;
        const __m256i first = bytes(at), second = bytes(at + 64);
        low = _mm256_and_si256(first, mask);
        upper_low = _mm256_and_si256(_mm256_srli_epi16(first, 4), mask);
        high = _mm256_and_si256(second, mask);
        upper_high = _mm256_and_si256(_mm256_srli_epi16(second, 4), mask);
    }
};

inline __m256i pairs(__m256i low, __m256i high, const int8_t* q) {
    return _mm256_add_epi16(_mm256_maddubs_epi16(low, four(q)),
                            _mm256_maddubs_epi16(high, four(q + 4)));
}

// Keeps GCC from adding the products of all rows in one tree, for which there are too few registers.
inline void keep_order(__m256i& sum) { asm("" : "+x"(sum)); }

template <int BITS>
struct Sums {
    __m256i sum, upper;  // 5 bits: 8 numbers of 32 bits; else 16 of 16, `upper` for 8 bits alone

    void clear() { sum = upper = _mm256_setzero_si256(); }
    void add(const Codes<BITS>& w, const int8_t* q) {
        const __m256i lower = pairs(w.low, w.high, q);
        sum = BITS == 5 ? _mm256_add_epi32(sum, _mm256_madd_epi16(lower, _mm256_set1_epi16(1)))
                        : _mm256_add_epi16(sum, lower);
        keep_order(sum);
        if (BITS == 8) {
            upper = _mm256_add_epi16(upper, pairs(w.upper_low, w.upper_high, q));
            keep_order(upper);
        }
    }
    F total(int shift) const {
        __m256i whole = BITS == 5 ? sum : _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
        if (BITS == 8) {
            whole = _mm256_add_epi32(whole, _mm256_madd_epi16(upper, _mm256_set1_epi16(16)));
        }
        return _mm256_cvtepi32_ps(_mm256_add_epi32(whole, _mm256_set1_epi32(shift)));
    }
};

#include "variant.h"

}  // namespace

extern const Kernels AVX2 = variant("avx2");

}  // namespace pass
