// Products with a weight [N, K]: y = x w^T, and its two gradients. One order of sums, see gemm.h.
// y lies in rows of ldy floats: weights that share x fill such rows side by side.
#include "kernel.h"

using namespace trivium;

// y [M, N] = x [M, K] w^T
TRIVIUM_KERNEL void trivium_linear(
    int64_t num_threads, const float* x, const float* w, float* y, int64_t offset, int64_t ldy, int64_t M, int64_t N,
    int64_t K
) {
    gemm_parallel(num_threads, M, N, K, {x, K, 1}, {w, 1, K}, y + offset, ldy);
}

// dx [M, K] = dy [M, N] w, or += with `add`
TRIVIUM_KERNEL void trivium_linear_input_grad(
    int64_t num_threads, const float* dy, const float* w, float* dx, int64_t offset, int64_t ldy, int64_t M, int64_t N,
    int64_t K, int64_t add
) {
    gemm_parallel(num_threads, M, K, N, {dy + offset, ldy, 1}, {w, K, 1}, dx, K, add);
}

// dw [N, K] = dy^T x
TRIVIUM_KERNEL void trivium_linear_weight_grad(
    int64_t num_threads, const float* dy, const float* x, float* dw, int64_t offset, int64_t ldy, int64_t M, int64_t N,
    int64_t K
) {
    gemm_parallel(num_threads, N, K, M, {dy + offset, 1, ldy}, {x, K, 1}, dw, K);
}
