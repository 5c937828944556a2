// AVX2 with FMA: 8 floats a vector. The including file defines TILE_ROWS, Codes and Sums.
using F = __m256;
constexpr int LANES = 8, SCORE_ROWS = 4, VALUE_ROWS = 2, DENSE_ROWS = 2;

inline F set(float x) { return _mm256_set1_ps(x); }
inline F load(const float* x) { return _mm256_loadu_ps(x); }
inline void store(float* y, F x) { _mm256_storeu_ps(y, x); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F halves(const uint8_t* x) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
inline F power_of_two(F shifted) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)));
}
inline F zero_where_unseen(F x, F score) {
    return _mm256_and_ps(_mm256_cmp_ps(score, set(UNSEEN), _CMP_NEQ_UQ), x);
}

inline __m256i bytes(const uint8_t* x) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
}

inline __m256i four(const int8_t* q) {
    int value;
    __builtin_memcpy(&value, q, 4);
    return _mm256_set1_epi32(value);
}

// The 32 bits at `bits` as bytes of 16 or 0.
inline __m256i sixteens(const uint8_t* bits) {
    int value;
    __builtin_memcpy(&value, bits, 4);
    const __m256i by_byte = _mm256_shuffle_epi8(
        _mm256_set1_epi32(value),
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(by_byte, bit), bit);
    return _mm256_and_si256(is_set, _mm256_set1_epi8(16));
}

// The codes of 8 inputs and 8 columns, for 4 and 5 bits.
inline void read_codes(const uint8_t* stream, int v, int part, bool fifth, __m256i& low,
                       __m256i& high) {
    const __m256i mask = _mm256_set1_epi8(15), pairs = bytes(stream + 64 * v + 32 * part);
    low = _mm256_and_si256(pairs, mask);
    high = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), mask);
    if (fifth) {
        const uint8_t* words = stream + 256 + 16 * v + 4 * part;
        low = _mm256_or_si256(low, sixteens(words));
        high = _mm256_or_si256(high, sixteens(words + 8));
    }
}

// y [size,16 keys] of keys [count,size]; keys after `count` are 0.
void transpose_keys(const float* keys, int count, int size, float* y) {
    int start = 0;
    for (; start + 8 <= size; start += 8) {
        for (int half = 0; half < 16; half += 8) {
            __m256 r[8], t[8];
            for (int i = 0; i < 8; i++) {
                r[i] = half + i < count ? load(keys + size_t(half + i) * size + start) : set(0.f);
            }
            for (int i = 0; i < 8; i += 2) {
                t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
                t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
            }
            for (int i = 0; i < 8; i += 4) {
                r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
                r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
                r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
                r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
            }
            for (int i = 0; i < 4; i++) {
                float* row = y + 16 * (start + i) + half;
                store(row, _mm256_permute2f128_ps(r[i], r[4 + i], 0x20));
                store(row + 64, _mm256_permute2f128_ps(r[i], r[4 + i], 0x31));
            }
        }
    }
    for (; start < size; start++) {
        for (int i = 0; i < 16; i++) {
            y[16 * start + i] = i < count ? keys[size_t(i) * size + start] : 0.f;
        }
    }
}
