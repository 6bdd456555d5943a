// Vectors of W floats: 16 with AVX-512, 8 with AVX2, 4 without either. Every kernel is written once, in these.
//
// A value's bits must not depend on where in a buffer it stands. So a tail goes through the same vector code as the
// rest, loaded by load_part, and a * b + c is written fma(a, b, c): which of several products the compiler contracts
// could otherwise differ from loop to loop.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace trivium {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));

static inline vf splat(float x) {
#if defined(__AVX512F__)
    return (vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (vf)_mm256_set1_ps(x);
#else
    return x - vf{};
#endif
}

static inline vi splat_i(int32_t x) { return x + vi{}; }

static inline vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

// The first n < W floats, zeros behind them.
static inline vf load_part(const float* p, int64_t n) {
    vf v = {};
    std::memcpy(&v, p, 4 * n);
    return v;
}

static inline void store_part(float* p, vf v, int64_t n) { std::memcpy(p, &v, 4 * n); }

// n = W, or a tail: what a loop of step W over any width needs.
static inline vf load_n(const float* p, int64_t n) { return n >= W ? load(p) : load_part(p, n); }

static inline void store_n(float* p, vf v, int64_t n) {
    if (n >= W)
        store(p, v);
    else
        store_part(p, v, n);
}

// bfloat16 is the upper half of a float32.
static inline vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    vi v;
    for (int i = 0; i < W; i++) v[i] = (int32_t)((uint32_t)p[i] << 16);
    return (vf)v;
#endif
}

static inline float bf16_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline vf fma(float a, vf b, vf c) { return fma(splat(a), b, c); }

static inline vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

// The larger of two; where one is nan, b.
static inline vf max(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select(a > b, a, b);
#endif
}

static inline vf min(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select(a < b, a, b);
#endif
}

static inline vf abs(vf x) { return (vf)((vi)x & splat_i(0x7fffffff)); }

static inline vf sqrt(vf x) {
#if defined(__AVX512F__)
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_sqrt_ps((__m256)x);
#else
    vf y;
    for (int i = 0; i < W; i++) y[i] = __builtin_sqrtf(x[i]);
    return y;
#endif
}

// Halves added to halves: one order whatever comes in.
static inline float sum(vf x) {
    float part[W];
    std::memcpy(part, &x, sizeof x);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

static inline float largest(vf x) {
    float part[W];
    std::memcpy(part, &x, sizeof x);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[i + half] > part[i] ? part[i + half] : part[i];
    return part[0];
}

// e^(x - n ln 2) for n = round(x / ln 2): the difference in two steps, a polynomial of it. What each exponential below
// shares; they differ in their range: exp all of float32, exp_normal -87 to 88, exp_down (situ.h) 0 to 87.33 of -x, and
// exp2_below (tile.h) powers of two up to 127.
static inline vf exp_rest(vf x, vf n) {
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    return fma(p * r, r, r) + 1.0f;
}

// e^x within 2 units in the last place; 0 below -103.98, inf above 88.73, nan for nan.
static inline vf exp(vf x) {
    const vf top = splat(88.722839f), bottom = splat(-103.97208f);
    vf y = min(max(x, bottom), top);  // nan leaves both as a bound, and is put back at the end
    // n = round(x / ln 2) by the addition that leaves no room for fractions.
    const vf magic = splat(12582912.0f);
    vf n = fma(y, splat(1.44269504088896341f), magic) - magic;
    vf p = exp_rest(y, n);
    // 2^n as a product of two powers, since n runs from -150 to 128 and an exponent field only from -126 to 127.
    vi k = __builtin_convertvector(n, vi);
    vi half = k >> 1;
    vf low = (vf)((half + 127) << 23), high = (vf)((k - half + 127) << 23);
    p = p * low * high;
    p = select(x > top, splat(__builtin_inff()), p);
    p = select(x < bottom, vf{}, p);
    return select(x == x, p, x);
}

// e^x where it is a normal number, as it is from -87 to 88, and e^-87 or e^88 beyond: two thirds of exp's work.
static inline vf exp_normal(vf x) {
    vf y = min(splat(88.0f), max(splat(-87.0f), x));  // nan stays
    const vf magic = splat(12582912.0f);
    vf shifted = fma(y, splat(1.44269504088896341f), magic), n = shifted - magic;
    vf p = exp_rest(y, n);
    // The low bits of `shifted` are n: moved up to the exponent they leave the rest of it behind.
    return p * (vf)(((vi)shifted << 23) + splat_i(127 << 23));
}

// 1 / (1 + e^-x); 0 from -87 down, where e^-x has no room for long
static inline vf sigmoid(vf x) {
    vf y = 1.0f / (1.0f + exp_normal(-x));
    return (vf)((vi)y & ~(x < splat(-87.0f)));
}

// W vectors of W floats, turned: row i, lane j goes to row j, lane i. log2 W exchanges of blocks.
template <int STEP, int... I>
static inline void exchange(vf& a, vf& b, std::integer_sequence<int, I...>) {
    vf low = __builtin_shufflevector(a, b, ((I & STEP) ? W + I - STEP : I)...);
    vf high = __builtin_shufflevector(a, b, ((I & STEP) ? W + I : I + STEP)...);
    a = low, b = high;
}

template <int STEP>
static inline void transpose_step(vf* x) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
        if (!(i & STEP)) exchange<STEP>(x[i], x[i + STEP], std::make_integer_sequence<int, W>{});
}

static inline void transpose(vf* x) {
    transpose_step<1>(x);
    transpose_step<2>(x);
    if constexpr (W > 4) transpose_step<4>(x);
    if constexpr (W > 8) transpose_step<8>(x);
}

}  // namespace trivium
