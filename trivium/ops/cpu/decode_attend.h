// One query a head against a block of latent keys, absorbed: (48)-(52) of docs/model.md.
#pragma once

#include <algorithm>
#include <type_traits>

#include "decode_plan.h"

namespace trivium {

constexpr int HEADS = 4, KEYS = W == 16 ? 6 : 3;  // scores that are formed together: as many sums as registers hold

typedef float v4 __attribute__((vector_size(16)));

// Lanes i, i + 4, i + 8, i + 12.
static inline v4 fold(vf x) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7) +
           (__builtin_shufflevector(x, x, 8, 9, 10, 11) + __builtin_shufflevector(x, x, 12, 13, 14, 15));
#elif defined(__AVX2__)
    return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
    return x;
#endif
}

// The sums of four vectors, one a lane.
static inline v4 sums_of(const vf* x) {
    v4 a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
    v4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);  // a b a b
    v4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

struct Latents {
    const float* rows;
    int64_t stride, kv_rank;  // of a row: padded latent and padded shared key
};

// Of keys [first, last): each head's largest score, the sum of e^(score - largest), and that sum over the latents.
// `query` is [heads, stride], scaled, zeros in the padding. `scores` is [keys, padded heads]. The `num_ahead` keys behind
// the block, which this thread will want next, are fetched line by line between the products.
static void attend_block(
    const Latents& keys, int64_t num_heads, const float* query, int64_t first, int64_t last, int64_t num_ahead,
    float* scores, float* peak, float* total, float* mix
) {
    int64_t count = last - first, stride = keys.stride, heads = padded(num_heads), rank = padded(keys.kv_rank);
    const float *row = keys.rows + first * stride, *ahead = row + count * stride, *end = ahead + num_ahead * stride;
    auto fetch = [&] {
        if (ahead < end) __builtin_prefetch(ahead, 0, 2), ahead += 16;
    };
    for (int64_t j = 0; j < count; j += KEYS)
        for (int64_t h = 0; h < num_heads; h += HEADS) {
            vf sums[KEYS][HEADS] = {};
            const float *key[KEYS], *q[HEADS];
            for (int i = 0; i < KEYS; i++) key[i] = row + std::min(j + i, count - 1) * stride;
            for (int i = 0; i < HEADS; i++) q[i] = query + std::min(h + i, num_heads - 1) * stride;
            for (int64_t r = 0; r < stride; r += W) {
                if (r % 32 == 0) fetch();
                vf c[KEYS];
#pragma GCC unroll 8
                for (int a = 0; a < KEYS; a++) c[a] = load(key[a] + r);
#pragma GCC unroll 8
                for (int i = 0; i < HEADS; i++) {
                    vf x = load(q[i] + r);
#pragma GCC unroll 8
                    for (int a = 0; a < KEYS; a++) sums[a][i] = fma(c[a], x, sums[a][i]);
                }
            }
#pragma GCC unroll 8
            for (int a = 0; a < KEYS; a++) {
                v4 score = sums_of(sums[a]);
                if (j + a < count) std::memcpy(scores + (j + a) * heads + h, &score, sizeof score);
            }
        }
    for (int64_t h = 0; h < num_heads; h += W) {  // lanes are heads, those of the padding hold anything finite
        vf top = load(scores + h), sums = {};
        for (int64_t j = 1; j < count; j++) top = max(load(scores + j * heads + h), top);
        for (int64_t j = 0; j < count; j++) {
            vf p = exp(load(scores + j * heads + h) - top);
            store(scores + j * heads + h, p);
            sums += p;
        }
        store(peak + h, top);
        store(total + h, sums);
    }
    auto mixed = [&](auto columns) {
        constexpr int N = decltype(columns)::value;
        for (int64_t next = 0; next < rank; next += N * W) {
            int64_t r = std::min(next, rank - N * W);  // the last ones twice, where N vectors do not divide them
            for (int64_t h = 0; h < num_heads; h += HEADS) {
                vf sums[HEADS][N] = {};
                for (int64_t j = 0; j < count; j++) {
                    if (j & 1) fetch();
                    vf c[N];
#pragma GCC unroll 8
                    for (int n = 0; n < N; n++) c[n] = load(row + j * stride + r + n * W);
#pragma GCC unroll 8
                    for (int i = 0; i < HEADS; i++) {
                        vf p = splat(scores[j * heads + h + i]);
#pragma GCC unroll 8
                        for (int n = 0; n < N; n++) sums[i][n] = fma(p, c[n], sums[i][n]);
                    }
                }
                for (int i = 0; i < HEADS && h + i < num_heads; i++)
                    for (int n = 0; n < N; n++) store(mix + (h + i) * rank + r + n * W, sums[i][n]);
            }
        }
    };
    if (rank >= 3 * W)
        mixed(std::integral_constant<int, 3>{});
    else
        mixed(std::integral_constant<int, 1>{});
}

// Depends on the number of keys alone.
static inline int64_t keys_a_block(int64_t num_keys) { return num_keys <= 1024 ? 64 : 128; }

}  // namespace trivium
