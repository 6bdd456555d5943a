// One read of the residual stream, and its gradients: a token's sources pass from memory once each way.
#include "rows.h"

using namespace trivium;

// softmax over `count` scores, in rising order; scores are padded to whole vectors.
static void softmax(const float* score, int64_t count, float* weight) {
    float top = score[0];
    for (int64_t n = 1; n < count; n++) top = score[n] > top ? score[n] : top;
    for (int64_t n = 0; n < count; n += W) store(weight + n, exp(load(score + n) - top));
    float total = weight[0];
    for (int64_t n = 1; n < count; n++) total += weight[n];
    for (int64_t n = 0; n < count; n++) weight[n] /= total;
}

// Of N sources, rounded up to whole vectors, `arrays` of them; zeros.
static float* numbers(int64_t N, int64_t arrays) {
    static thread_local Buffer buffer;
    float* p = buffer.at_least(N * arrays);
    std::fill_n(p, N * arrays, 0.0f);
    return p;
}

static inline float rms_inv(float sum_of_squares, int64_t D, float eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares / (float)D + eps);
}

// x [T, D] = sum over n of softmax_n(query . v_n / rms(v_n)) v_n; `sources` are N pointers to [T, D].
TRIVIUM_KERNEL void trivium_attnres(
    int64_t num_threads, const float* const* sources, const float* query, float* x_all, int64_t N, int64_t T, int64_t D,
    float eps
) {
    int64_t padded = (N + W - 1) / W * W;
    parallel_rows(num_threads, T, D * N, [&](int64_t, int64_t first, int64_t end) {
        float *score = numbers(padded, 2), *weight = score + padded;
        for (int64_t t = first; t < end; t++) {
            for (int64_t n = 0; n < N; n++) {
                const float* v = sources[n] + t * D;
                float sums[2];
                row_sums(D, sums, [&](int64_t i, int64_t m, vf* s) {
                    vf a = load_n(v + i, m);
                    s[0] = fma(a, a, s[0]);
                    s[1] = fma(a, load_n(query + i, m), s[1]);
                });
                score[n] = sums[1] * rms_inv(sums[0], D, eps);
            }
            softmax(score, N, weight);
            float* x = x_all + t * D;
            columns(D, [&](int64_t i, int64_t m) {
                vf a = load_n(sources[0] + t * D + i, m) * weight[0];
                for (int64_t n = 1; n < N; n++) a = fma(weight[n], load_n(sources[n] + t * D + i, m), a);
                store_n(x + i, a, m);
            });
        }
    });
}

// score = q.v r with r = (v.v / D + eps)^(-1/2), so dscore/dv = q r - score r^2 v / D. What the forward knew is made
// again on the way: the sources are read in any case.
TRIVIUM_KERNEL void trivium_attnres_backward(
    int64_t num_threads, const float* dx_all, const float* const* sources, const float* query,
    float* const* gradients, float* dquery, int64_t N, int64_t T, int64_t D, float eps
) {
    float* partial = partials(num_blocks(T, D * N), D);
    int64_t padded = (N + W - 1) / W * W;
    parallel_rows(num_threads, T, D * N, [&](int64_t block, int64_t first, int64_t end) {
        float *score = numbers(padded, 4), *weight = score + padded, *dweight = weight + padded, *r = dweight + padded;
        float* dq = partial + block * D;
        std::fill_n(dq, D, 0.0f);
        for (int64_t t = first; t < end; t++) {
            const float* dx = dx_all + t * D;
            for (int64_t n = 0; n < N; n++) {
                const float* v = sources[n] + t * D;
                float sums[3];
                row_sums(D, sums, [&](int64_t i, int64_t m, vf* s) {
                    vf a = load_n(v + i, m);
                    s[0] = fma(a, a, s[0]);
                    s[1] = fma(a, load_n(query + i, m), s[1]);
                    s[2] = fma(a, load_n(dx + i, m), s[2]);
                });
                r[n] = rms_inv(sums[0], D, eps);
                score[n] = sums[1] * r[n];
                dweight[n] = sums[2];
            }
            softmax(score, N, weight);
            float mean = 0.0f;
            for (int64_t n = 0; n < N; n++) mean += weight[n] * dweight[n];
            for (int64_t n = 0; n < N; n++) {
                const float* v = sources[n] + t * D;
                float* dv = gradients[n] + t * D;
                float along_query = weight[n] * (dweight[n] - mean) * r[n];
                float along_source = -along_query * r[n] * score[n] / (float)D;
                columns(D, [&](int64_t i, int64_t m) {
                    vf a = load_n(v + i, m);
                    vf g = fma(along_query, load_n(query + i, m), load_n(dx + i, m) * weight[n]);
                    store_n(dv + i, fma(along_source, a, g), m);
                    store_n(dq + i, fma(along_query, a, load_n(dq + i, m)), m);
                });
            }
        }
    });
    add_partials(num_threads, partial, num_blocks(T, D * N), D, dquery);
}
