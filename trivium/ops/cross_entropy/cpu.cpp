// Cross-entropy of a head's logits, which exist for a block of tokens at a time, and the gradients of both factors.
#include <cmath>

#include "rows.h"

using namespace trivium;

// One token's logits: nll, and with `scale` the logits become e = exp(logit - top), less the sum of all at the target:
// the gradient scale (softmax - onehot) is then c e with the c that comes back.
static float token(float* logit, int64_t num_words, int64_t target, float* nll, bool gradient, float scale) {
    vf tops = splat(-__builtin_inff());
    columns(num_words, [&](int64_t i, int64_t n) {
        vf v = load_n(logit + i, n);
        if (n < W)
            for (int64_t k = n; k < W; k++) v[k] = logit[i];  // no lane without a logit
        tops = max(tops, v);
    });
    float top = largest(tops), at_target = logit[target], total[1];
    row_sums(num_words, total, [&](int64_t i, int64_t n, vf* s) {
        vf e = exp(load_n(logit + i, n) - top);
        if (gradient) store_n(logit + i, e, n);
        if (n < W)
            for (int64_t k = n; k < W; k++) e[k] = 0.0f;
        s[0] += e;
    });
    *nll = std::log(total[0]) - (at_target - top);
    if (!gradient) return 0.0f;
    logit[target] -= total[0];
    return scale / total[0];
}

static inline void times(const float* x, float c, int64_t D, float* y) {
    columns(D, [&](int64_t i, int64_t n) { store_n(y + i, load_n(x + i, n) * c, n); });
}

// nll [T] of hidden [T, D] and head [num_words, D]; with `scale` [T] also total = scale . nll and what it passes back,
// dhidden and dhead where they are given. Logits exist for `height` tokens at a time: `logits` has room for these, and
// `scaled` for as many rows of D + 1. The height decides the order of dhead's sums.
TRIVIUM_KERNEL void trivium_cross_entropy(
    int64_t num_threads, const float* hidden, const float* head, const int64_t* targets, const float* scale, float* nll,
    float* total, float* dhidden, float* dhead, float* logits, float* scaled, int64_t T, int64_t num_words, int64_t D,
    int64_t height
) {
    if (dhead && T == 0) std::fill_n(dhead, num_words * D, 0.0f);
    for (int64_t first = 0; first < T; first += height) {
        int64_t rows = std::min(height, T - first);
        const float* h = hidden + first * D;
        gemm_parallel(num_threads, rows, num_words, D, {h, D, 1}, {head, 1, D}, logits, num_words);
        parallel(num_threads, (rows + 3) / 4, [&](int64_t four) {
            for (int64_t t = 4 * four; t < std::min(rows, 4 * four + 4); t++) {
                float c = token(logits + t * num_words, num_words, targets[first + t], nll + first + t, scale,
                                scale ? scale[first + t] : 0.0f);
                if (scale) {
                    times(h + t * D, c, D, scaled + t * D);
                    scaled[height * D + t] = c;
                }
            }
        });
        if (dhidden) {
            float* dh = dhidden + first * D;
            gemm_parallel(num_threads, rows, D, num_words, {logits, num_words, 1}, {head, D, 1}, dh, D);
            parallel(rows * D < (1 << 16) ? 1 : num_threads, (rows + 15) / 16, [&](int64_t part) {
                for (int64_t t = 16 * part; t < std::min(rows, 16 * part + 16); t++)
                    times(dh + t * D, scaled[height * D + t], D, dh + t * D);
            });
        }
        if (dhead)
            gemm_parallel(num_threads, num_words, D, rows, {logits, 1, num_words}, {scaled, D, 1}, dhead, D, first > 0);
    }
    if (total) {
        double sum = 0.0;
        for (int64_t t = 0; t < T; t++) sum += (double)scale[t] * nll[t];
        *total = (float)sum;
    }
}
