// AVX2 without VNNI. Its product of bytes adds pairs in 16 bits, where a sum that does not fit
// saturates. Codes of 4 bits fit: 2 * 15 * 127 each, and all eight of a block too. Codes of 8 bits are
// multiplied as two halves of 4 bits.
#include <immintrin.h>

#include "kernels.h"

namespace pass {
namespace {

#include "avx2.h"

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

inline __m256i pairs(__m256i low, __m256i high, __m256i first, __m256i second) {
    return _mm256_add_epi16(_mm256_maddubs_epi16(low, first), _mm256_maddubs_epi16(high, second));
}

template <int BITS>
struct Sums {
    __m256i sum;  // 4 bits: 16 numbers of 16 bits; else 8 of 32

    void clear() { sum = _mm256_setzero_si256(); }
    void add(const Codes<BITS>& w, const int8_t* q) {
        const __m256i first = four(q), second = four(q + 4), lower = pairs(w.low, w.high, first, second);
        if (BITS == 4) {
            sum = _mm256_add_epi16(sum, lower);
            return;
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(lower, _mm256_set1_epi16(1)));
        if (BITS == 8) {
            const __m256i upper = pairs(w.upper_low, w.upper_high, first, second);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(upper, _mm256_set1_epi16(16)));
        }
    }
    F total(int shift) const {
        const __m256i whole = BITS == 4 ? _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) : sum;
        return _mm256_cvtepi32_ps(_mm256_add_epi32(whole, _mm256_set1_epi32(shift)));
    }
};

#include "variant.h"

}  // namespace

extern const Kernels AVX2 = variant("avx2");

}  // namespace pass
