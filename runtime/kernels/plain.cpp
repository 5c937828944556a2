// Plain C++ for CPUs without AVX2, and for other architectures.
#include "kernels.h"

namespace pass {
namespace {

constexpr int LANES = 16, TILE_ROWS = 4, SCORE_ROWS = 4, VALUE_ROWS = 2, DENSE_ROWS = 2;

struct F {
    float x[LANES];
};

template <class Function>
inline F each(Function function) {
    F y;
    for (int i = 0; i < LANES; i++) y.x[i] = function(i);
    return y;
}

inline F set(float x) { return each([=](int) { return x; }); }
inline F load(const float* x) { return each([=](int i) { return x[i]; }); }
inline void store(float* y, const F& x) { __builtin_memcpy(y, x.x, sizeof x.x); }
inline F operator+(const F& a, const F& b) { return each([&](int i) { return a.x[i] + b.x[i]; }); }
inline F operator-(const F& a, const F& b) { return each([&](int i) { return a.x[i] - b.x[i]; }); }
inline F operator*(const F& a, const F& b) { return each([&](int i) { return a.x[i] * b.x[i]; }); }
inline F operator/(const F& a, const F& b) { return each([&](int i) { return a.x[i] / b.x[i]; }); }
inline F fma(const F& a, const F& b, const F& c) {
    return each([&](int i) { return __builtin_fmaf(a.x[i], b.x[i], c.x[i]); });
}
// As in x86's instructions, the second operand is the result if one of them is NaN.
inline F max(const F& a, const F& b) {
    return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
inline F min(const F& a, const F& b) {
    return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
}

inline float half(const uint8_t* x) {
    const uint32_t bits = x[0] | x[1] << 8, sign = (bits & 0x8000u) << 16;
    const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    float y;
    if (exponent == 0) {
        y = float(fraction) * 0x1p-24f;
        return sign ? -y : y;
    }
    const uint32_t wide = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    __builtin_memcpy(&y, &wide, 4);
    return y;
}
inline F halves(const uint8_t* x) { return each([=](int i) { return half(x + 2 * i); }); }
inline F power_of_two(const F& shifted) {
    return each([&](int i) {
        uint32_t bits;
        float y;
        __builtin_memcpy(&bits, &shifted.x[i], 4);
        bits = (bits << 23) + 0x3f800000u;
        __builtin_memcpy(&y, &bits, 4);
        return y;
    });
}
inline F zero_where_unseen(const F& x, const F& score) {
    return each([&](int i) { return score.x[i] == UNSEEN ? 0.f : x.x[i]; });
}

template <int BITS>
struct Codes {
    uint8_t low[64], high[64];

    Codes(const uint8_t* stream, int v, int) {
        for (int i = 0; i < 64; i++) {
            if (BITS == 8) {
                low[i] = stream[128 * v + i];
                high[i] = stream[128 * v + 64 + i];
            } else {
                low[i] = stream[64 * v + i] & 15;
                high[i] = stream[64 * v + i] >> 4;
            }
            if (BITS == 5) {
                const uint8_t* words = stream + 256 + 16 * v + i / 8;
                low[i] |= (words[0] >> (i % 8) & 1) << 4;
                high[i] |= (words[8] >> (i % 8) & 1) << 4;
            }
        }
    }
};

template <int BITS>
struct Sums {
    int32_t sum[LANES];

    void clear() { __builtin_memset(sum, 0, sizeof sum); }
    void add(const Codes<BITS>& w, const int8_t* q) {
        for (int c = 0; c < LANES; c++) {
            for (int j = 0; j < 4; j++) {
                sum[c] += w.low[4 * c + j] * q[j] + w.high[4 * c + j] * q[4 + j];
            }
        }
    }
    F total(int shift) const { return each([&](int i) { return float(sum[i] + shift); }); }
};

void transpose_keys(const float* keys, int count, int size, float* y) {
    for (int d = 0; d < size; d++) {
        for (int i = 0; i < 16; i++) y[16 * d + i] = i < count ? keys[size_t(i) * size + d] : 0.f;
    }
}

#include "variant.h"

}  // namespace

extern const Kernels PLAIN = variant("plain");

}  // namespace pass
