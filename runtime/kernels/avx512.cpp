// AVX-512 with VNNI: 16 floats a vector, 64 products of codes an instruction.
#include <immintrin.h>

#include "kernels.h"

namespace pass {
namespace {

using F = __m512;
constexpr int LANES = 16, TILE_ROWS = 12, SCORE_ROWS = 12, VALUE_ROWS = 4, DENSE_ROWS = 4;

inline F set(float x) { return _mm512_set1_ps(x); }
inline F load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* y, F x) { _mm512_storeu_ps(y, x); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F halves(const uint8_t* x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
inline F power_of_two(F shifted) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)));
}
inline F zero_where_unseen(F x, F score) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(score, set(UNSEEN), _CMP_NEQ_UQ), x);
}

template <int BITS>
struct Codes {
    __m512i low, high;

    Codes(const uint8_t* stream, int v, int) {
        if (BITS == 8) {
            low = _mm512_loadu_si512(stream + 128 * v);
            high = _mm512_loadu_si512(stream + 128 * v + 64);
            return;
        }
        const __m512i mask = _mm512_set1_epi8(15), pairs = _mm512_loadu_si512(stream + 64 * v);
        low = _mm512_and_si512(pairs, mask);
        high = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), mask);
        if (BITS == 5) {
            const __m512i bit = _mm512_set1_epi8(16);
            const uint8_t* words = stream + 256 + 16 * v;
            low = _mm512_mask_add_epi8(low, word(words), low, bit);
            high = _mm512_mask_add_epi8(high, word(words + 8), high, bit);
        }
    }

    static __mmask64 word(const uint8_t* bits) {
        uint64_t value;
        __builtin_memcpy(&value, bits, 8);
        return value;
    }
};

inline __m512i four(const int8_t* q) {
    int value;
    __builtin_memcpy(&value, q, 4);
    return _mm512_set1_epi32(value);
}

template <int BITS>
struct Sums {
    __m512i sum;

    void clear() { sum = _mm512_setzero_si512(); }
    void add(const Codes<BITS>& w, const int8_t* q) {
        sum = _mm512_dpbusd_epi32(sum, w.low, four(q));
        sum = _mm512_dpbusd_epi32(sum, w.high, four(q + 4));
    }
    F total(int shift) const {
        return _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(shift)));
    }
};

// y [size,16 keys] of keys [count,size]; keys after `count` are 0.
void transpose_keys(const float* keys, int count, int size, float* y) {
    int start = 0;
    for (; start + 16 <= size; start += 16, y += 256) {
        __m512 r[16], t[16];
        for (int i = 0; i < 16; i++) {
            r[i] = i < count ? load(keys + size_t(i) * size + start) : set(0.f);
        }
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            const __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 1]);
            const __m512d c = _mm512_castps_pd(t[i + 2]), d = _mm512_castps_pd(t[i + 3]);
            r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
            r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
            r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
            r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
        }
        for (int i = 0; i < 4; i++) {  // quarters of 4 keys -> halves of 8
            t[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
            t[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
            t[8 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
            t[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
        }
        for (int i = 0; i < 4; i++) {
            store(y + 16 * i, _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88));
            store(y + 16 * (8 + i), _mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd));
            store(y + 16 * (4 + i), _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88));
            store(y + 16 * (12 + i), _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xdd));
        }
    }
    for (; start < size; start++, y += 16) {
        for (int i = 0; i < 16; i++) y[i] = i < count ? keys[size_t(i) * size + start] : 0.f;
    }
}

#include "variant.h"

}  // namespace

extern const Kernels AVX512 = variant("avx512-vnni");

}  // namespace pass
