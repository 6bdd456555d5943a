// A weight [N, K] times one vector, where the weight's bytes are all the cost: float32, bfloat16 or MXFP4.
//
// A range of rows is read as STREAMS long runs at once, far from each other in memory: one run alone leaves the core
// waiting at every page's end. A row's sum has one order whichever rows are beside it: lanes of even and of odd
// vectors apart, then both added, then the lanes.
#pragma once

#include "simd.h"

namespace trivium {

enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, MXFP4 = 2 };

// Rows are contiguous. Of MXFP4 `data` are the codes and `scale` the powers of two, one a group of 32 columns.
struct Weight {
    const void* data;
    const uint8_t* scale;
    int64_t kind;
};

static inline int64_t row_bytes(Weight w, int64_t K) { return w.kind == FLOAT32 ? 4 * K : w.kind == BFLOAT16 ? 2 * K : K / 2; }

// The weight without its first `rows` rows.
static inline Weight behind(Weight w, int64_t rows, int64_t K) {
    return {(const char*)w.data + rows * row_bytes(w, K), w.scale ? w.scale + rows * (K / 32) : nullptr, w.kind};
}

// --- One group of 32 columns of MXFP4 ------------------------------------------------------------------------------

// 2^(byte - 127), nan for 255.
static inline float mxfp4_factor(uint8_t byte) {
    uint32_t bits = byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : (uint32_t)byte << 23;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// The order in which `mxfp4_group` meets the columns of a group.
static inline int mxfp4_column(int i) {
#if defined(__AVX512F__)
    return i < 16 ? 2 * i : 2 * (i - 16) + 1;
#elif defined(__AVX2__)
    return i / 8 * 8 + (i % 8 < 4 ? 2 * (i % 4) : 2 * (i % 4) + 1);
#else
    return i;
#endif
}

static inline void mxfp4_order(const float* x, int64_t K, float* out) {
    for (int64_t k = 0; k < K; k += 32)
        for (int i = 0; i < 32; i++) out[k + i] = x[k + mxfp4_column(i)];
}

// Lane sums of codes times x, whose columns are in `mxfp4_order`; without the scale.
static inline vf mxfp4_group(const uint8_t* codes, const float* x) {
#if defined(__AVX512F__)
    const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    vf even = (vf)_mm512_permutexvar_ps(bytes, table);  // takes the low four bits
    vf odd = (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
    return fma(odd, load(x + 16), even * load(x));
#elif defined(__AVX2__)
    // A value has its bits in the upper two bytes of its float32: one shuffle for each, then zeros below.
    const __m256i high = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xbf, (char)0xbf, (char)0xbf, (char)0xc0, (char)0xc0,
        (char)0xc0, (char)0xc0
    ));
    const __m256i low = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 0, (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0, 0, 0, (char)0x80, (char)0xc0, 0, 0x40, (char)0x80,
        (char)0xc0
    ));
    __m128i bytes = _mm_loadu_si128((const __m128i*)codes);
    __m256i nibbles = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1);
    nibbles = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
    __m256i l = _mm256_shuffle_epi8(low, nibbles), h = _mm256_shuffle_epi8(high, nibbles), zero = _mm256_setzero_si256();
    __m256i first = _mm256_unpacklo_epi8(l, h), last = _mm256_unpackhi_epi8(l, h);
    vf sum = (vf)_mm256_unpacklo_epi16(zero, first) * load(x);
    sum = fma((vf)_mm256_unpackhi_epi16(zero, first), load(x + 8), sum);
    sum = fma((vf)_mm256_unpacklo_epi16(zero, last), load(x + 16), sum);
    return fma((vf)_mm256_unpackhi_epi16(zero, last), load(x + 24), sum);
#else
    static const float table[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    vf sum = {};
    for (int i = 0; i < 32; i += W) {
        vf value;
        for (int j = 0; j < W; j++) value[j] = table[(codes[(i + j) / 2] >> 4 * (j & 1)) & 15];
        sum = fma(value, load(x + i), sum);
    }
    return sum;
#endif
}

// --- Rows ----------------------------------------------------------------------------------------------------------

static inline vf load_row(const float* p) { return load(p); }
static inline vf load_row(const uint16_t* p) { return load_bf16(p); }
static inline vf load_row_part(const float* p, int64_t n) { return load_part(p, n); }
static inline vf load_row_part(const uint16_t* p, int64_t n) {
    uint16_t part[W] = {};
    std::memcpy(part, p, 2 * n);
    return load_bf16(part);
}

// y[r * step] = row r . x for ROWS rows of K numbers, row r at w + r * stride.
template <int ROWS, typename T>
static inline void dot_rows(const T* w, int64_t stride, int64_t K, const float* x, float* y, int64_t step) {
    vf even[ROWS] = {}, odd[ROWS] = {};
    int64_t k = 0;
    for (; k + 2 * W <= K; k += 2 * W) {
        vf x0 = load(x + k), x1 = load(x + k + W);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            even[r] = fma(load_row(w + r * stride + k), x0, even[r]);
            odd[r] = fma(load_row(w + r * stride + k + W), x1, odd[r]);
        }
    }
    for (int half = 0; k < K; k += W, half++) {
        int64_t n = K - k < W ? K - k : W;
        vf xn = load_n(x + k, n);
        for (int r = 0; r < ROWS; r++) {
            vf& sums = half ? odd[r] : even[r];
            sums = fma(n == W ? load_row(w + r * stride + k) : load_row_part(w + r * stride + k, n), xn, sums);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) y[r * step] = sum(even[r] + odd[r]);
}

template <int ROWS>
static inline void dot_rows_mxfp4(Weight w, int64_t stride, int64_t K, const float* x, float* y, int64_t step) {
    vf sums[ROWS] = {};
    const uint8_t* codes = (const uint8_t*)w.data;
    for (int64_t k = 0; k < K; k += 32)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            float factor = mxfp4_factor(w.scale[(r * stride * K + k) / 32]);
            sums[r] = fma(factor, mxfp4_group(codes + (r * stride * K + k) / 2, x + k), sums[r]);
        }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) y[r * step] = sum(sums[r]);
}

// The same at stride and step of whole rows, whatever the weight is kept in.
template <int ROWS>
static inline void dot_rows(Weight w, int64_t stride, int64_t K, const float* x, float* y) {
    if (w.kind == FLOAT32)
        dot_rows<ROWS>((const float*)w.data, stride * K, K, x, y, stride);
    else if (w.kind == BFLOAT16)
        dot_rows<ROWS>((const uint16_t*)w.data, stride * K, K, x, y, stride);
    else
        dot_rows_mxfp4<ROWS>(w, stride, K, x, y, stride);
}

constexpr int STREAMS = 4;

// y[i] = row i . x for i in [first, last). For MXFP4 the columns of x are in `mxfp4_order`.
static inline void gemv(Weight w, int64_t K, int64_t first, int64_t last, const float* x, float* y) {
    int64_t run = (last - first) / STREAMS, i = first;
    for (; i < first + run; i++) dot_rows<STREAMS>(behind(w, i, K), run, K, x, y + i);
    for (i += (STREAMS - 1) * run; i < last; i++) dot_rows<1>(behind(w, i, K), 0, K, x, y + i);
}

// out[0 .. n) += sum over i of a[i] * row i, for rows [first, last) of n numbers; not for MXFP4. In STREAMS runs as well.
template <int ROWS, typename T>
static inline void add_rows(const T* w, int64_t stride, int64_t n, const float* a, int64_t step, float* out) {
    for (int64_t k = 0; k < n; k += W) {
        int64_t part = n - k < W ? n - k : W;
        vf sums = load_n(out + k, part);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const T* p = w + r * stride + k;
            sums = fma(a[r * step], part == W ? load_row(p) : load_row_part(p, part), sums);
        }
        store_n(out + k, sums, part);
    }
}

template <typename T>
static inline void add_rows(const T* w, int64_t n, int64_t count, const float* a, float* out) {
    int64_t run = count / STREAMS, i = 0;
    for (; i < run; i++) add_rows<STREAMS>(w + i * n, run * n, n, a + i, run, out);
    for (i = STREAMS * run; i < count; i++) add_rows<1>(w + i * n, 0, n, a + i, 0, out);
}

static inline void add_rows(Weight w, int64_t n, int64_t first, int64_t last, const float* a, float* out) {
    if (w.kind == FLOAT32)
        add_rows((const float*)w.data + first * n, n, last - first, a, out);
    else
        add_rows((const uint16_t*)w.data + first * n, n, last - first, a, out);
}

}  // namespace trivium
