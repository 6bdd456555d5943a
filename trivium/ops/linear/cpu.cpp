// Products with a weight [N, K]: y = x w^T, and its two gradients. One order of sums, see gemm.h.
#include "kernel.h"

using namespace trivium;

// y [M, N] = x [M, K] w^T
TRIVIUM_KERNEL void trivium_linear(
    int64_t num_threads, const float* x, const float* w, float* y, int64_t M, int64_t N, int64_t K
) {
    gemm_parallel(num_threads, M, N, K, {x, K, 1}, {w, 1, K}, y, N);
}

// dx [M, K] = dy [M, N] w
TRIVIUM_KERNEL void trivium_linear_input_grad(
    int64_t num_threads, const float* dy, const float* w, float* dx, int64_t M, int64_t N, int64_t K
) {
    gemm_parallel(num_threads, M, K, N, {dy, N, 1}, {w, K, 1}, dx, K);
}

// dw [N, K] = dy^T x
TRIVIUM_KERNEL void trivium_linear_weight_grad(
    int64_t num_threads, const float* dy, const float* x, float* dw, int64_t M, int64_t N, int64_t K
) {
    gemm_parallel(num_threads, N, K, M, {dy, 1, N}, {x, K, 1}, dw, K);
}
