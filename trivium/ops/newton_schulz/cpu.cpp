// Newton-Schulz on a stack of matrices: a matrix an item, its steps in one core's cache.
#include "kernel.h"

using namespace trivium;

// x [S, L] of a matrix [S, L] with S <= L; `steps` holds (a, b, c) of each; `scratch` holds 2 S S + S L.
static void orthogonalise(
    const float* matrix, float* x, int64_t S, int64_t L, const float* steps, int64_t num_steps, float eps, float* scratch
) {
    float *gram = scratch, *poly = gram + S * S, *product = poly + S * S;
    double square = 0;  // of up to 10^8 terms
    for (int64_t i = 0; i < S; i++) {
        vf part = {};
        for (int64_t j = 0; j < L; j += W) {
            vf v = load_n(matrix + i * L + j, L - j);
            part = fma(v, v, part);
        }
        square += sum(part);
    }
    float scale = 1.0f / std::max((float)__builtin_sqrt(square), eps);
    for (int64_t i = 0; i < S * L; i++) x[i] = matrix[i] * scale;
    for (int64_t step = 0; step < num_steps; step++) {
        float a = steps[3 * step], b = steps[3 * step + 1], c = steps[3 * step + 2];
        gemm_symmetric(S, L, {x, L, 1}, {x, 1, L}, gram);
        gemm_symmetric(S, S, {gram, S, 1}, {gram, S, 1}, poly);
        for (int64_t i = 0; i < S * S; i++) poly[i] = b * gram[i] + c * poly[i];
        gemm(S, L, S, {poly, S, 1}, {x, L, 1}, product, L);
        for (int64_t i = 0; i < S * L; i++) x[i] = a * x[i] + product[i];
    }
}

TRIVIUM_KERNEL void trivium_newton_schulz(
    int64_t num_threads, const float* stack, float* x, int64_t N, int64_t S, int64_t L, const float* steps, int64_t num_steps,
    float eps
) {
    parallel(num_threads, N, [&](int64_t n) {
        static thread_local Buffer buffer;
        float* scratch = buffer.at_least(2 * S * S + S * L);
        orthogonalise(stack + n * S * L, x + n * S * L, S, L, steps, num_steps, eps, scratch);
    });
}
