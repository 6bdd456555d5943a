// MXFP4 rows: two codes a byte, the low nibble first, and one scale byte for 32 columns; values as in ops/mxfp4.
#pragma once

#include "simd.h"

namespace trivium {

constexpr int64_t MXFP4_GROUP = 32;

// 2^(byte - 127): the byte is a float's exponent field, but for 0, whose power is subnormal, and 255, which is nan.
static inline float mxfp4_scale(uint8_t byte) {
    uint32_t bits = byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : (uint32_t)byte << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return scale;
}

// The values of the W codes in the W / 2 bytes at p, without their scale.
static inline vf mxfp4_codes(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m512 value = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    int32_t low, high;
    std::memcpy(&low, p, 4);
    std::memcpy(&high, p + 4, 4);
    __m512i both = _mm512_inserti64x4(_mm512_set1_epi32(low), _mm256_set1_epi32(high), 1);
    return (vf)_mm512_permutexvar_ps(_mm512_srlv_epi32(both, shift), value);  // looks at the lowest 4 bits of an index
#elif defined(__AVX2__)
    const __m256 magnitude = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    int32_t four;
    std::memcpy(&four, p, 4);
    __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(four), shift);
    __m256 sign = _mm256_and_ps((__m256)_mm256_slli_epi32(code, 28), _mm256_set1_ps(-0.0f));
    return (vf)_mm256_or_ps(_mm256_permutevar8x32_ps(magnitude, code), sign);  // the lowest 3 bits of an index
#else
    static const float value[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    vf v;
    for (int i = 0; i < W; i += 2) v[i] = value[p[i / 2] & 15], v[i + 1] = value[p[i / 2] >> 4];
    return v;
#endif
}

// A row of `in` columns, a multiple of 32: every product is exact, or overflows to infinity (scales 253 and 254).
static inline void unpack_row(const uint8_t* packed, const uint8_t* scale, int64_t in, float* out) {
    for (int64_t column = 0; column < in; column += MXFP4_GROUP) {
        vf factor = splat(mxfp4_scale(scale[column / MXFP4_GROUP]));
        for (int64_t i = column; i < column + MXFP4_GROUP; i += W) store(out + i, mxfp4_codes(packed + i / 2) * factor);
    }
}

// y[r] = the product of row r with x, for ROWS rows at distances `in / 2` and `in / 32` bytes. Codes are summed and then
// scaled, a group at a time: as exact as the products with the unpacked row, and each row's bits are those of it alone.
template <int ROWS>
static inline void dot_mxfp4(const uint8_t* packed, const uint8_t* scale, const float* x, int64_t in, float* y) {
    vf sums[ROWS] = {};
    for (int64_t column = 0; column < in; column += MXFP4_GROUP) {
        vf group[ROWS] = {};
        for (int64_t i = column; i < column + MXFP4_GROUP; i += W) {
            vf part = load(x + i);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) group[r] = fma(mxfp4_codes(packed + (r * in + i) / 2), part, group[r]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            float factor = mxfp4_scale(scale[(r * in + column) / MXFP4_GROUP]);
            sums[r] = fma(factor, group[r], sums[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) y[r] = sum(sums[r]);
}

static inline float dot_mxfp4(const uint8_t* packed, const uint8_t* scale, const float* x, int64_t in) {
    float y;
    dot_mxfp4<1>(packed, scale, x, in, &y);
    return y;
}

}  // namespace trivium
