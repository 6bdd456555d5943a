// The product by one thread; see gemm.h.
//
// The shape is Goto and van de Geijn's (Anatomy of High-Performance Matrix Multiplication, 2008): panels of NR columns
// of B, packed, stay in the first-level cache while rows of A pass by MR at a time, MR x NR sums in registers.
#include "gemm.h"

#include <algorithm>

namespace trivium {

// `count` <= NR rows of a matrix whose rows are contiguous along k, turned to [k][NR]; zeros where there is no row.
static inline void pack_turned(const float* p, int64_t stride, int64_t count, int64_t depth, float* out) {
    for (int64_t part = 0; part < NR; part += W) {
        int64_t rows = std::clamp<int64_t>(count - part, 0, W);
        int64_t k = 0;
        vf x[W];
        for (; k + W <= depth; k += W) {
            for (int i = 0; i < W; i++) x[i] = i < rows ? load(p + (part + i) * stride + k) : vf{};
            transpose(x);
            for (int i = 0; i < W; i++) store(out + (k + i) * NR + part, x[i]);
        }
        for (; k < depth; k++)
            for (int i = 0; i < W; i++) out[k * NR + part + i] = i < rows ? p[(part + i) * stride + k] : 0.0f;
    }
}

// Columns j to j + count of rows k to k + depth of B, as [depth][NR].
static inline void pack_b(Matrix B, int64_t k, int64_t j, int64_t depth, int64_t count, float* out) {
    const float* p = B.p + k * B.rs + j * B.cs;
    if (B.rs == 1) return pack_turned(p, B.cs, count, depth, out);
    if (B.cs == 1 && count == NR) {
        for (int64_t i = 0; i < depth; i++)
            for (int n = 0; n < NR; n += W) store(out + i * NR + n, load(p + i * B.rs + n));
        return;
    }
    for (int64_t i = 0; i < depth; i++)
        for (int64_t n = 0; n < NR; n++) out[i * NR + n] = n < count ? p[i * B.rs + n * B.cs] : 0.0f;
}

// c[ROWS x NR] of a panel: `a` packed as [depth][MR], or rows of A themselves at distance `stride`. The two are apart
// since an address that is a sum of two products costs a third of the speed.
template <int ROWS, bool PACKED>
__attribute__((noinline)) static void micro(
    const float* a, int64_t stride, const float* b, int64_t depth, float* c, int64_t ldc, int64_t columns, bool add
) {
    vf sums[ROWS][2] = {};
    for (int64_t k = 0; k < depth; k++) {
        vf b0 = load(b + k * NR), b1 = load(b + k * NR + W);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            vf x = splat(PACKED ? a[k * MR + i] : a[i * stride + k]);
            sums[i][0] = fma(x, b0, sums[i][0]);
            sums[i][1] = fma(x, b1, sums[i][1]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
        float* row = c + i * ldc;
        if (columns == NR) {
            store(row, add ? load(row) + sums[i][0] : sums[i][0]);
            store(row + W, add ? load(row + W) + sums[i][1] : sums[i][1]);
        } else {
            for (int half = 0; half < 2; half++) {
                int64_t n = std::clamp<int64_t>(columns - half * W, 0, W);
                float* part = row + half * W;
                store_n(part, add ? load_n(part, n) + sums[i][half] : sums[i][half], n);
            }
        }
    }
}

template <int ROWS, bool PACKED>
static void micro_rows(
    int64_t rows, const float* a, int64_t stride, const float* b, int64_t depth, float* c, int64_t ldc, int64_t columns,
    bool add
) {
    if (rows == ROWS) return micro<ROWS, PACKED>(a, stride, b, depth, c, ldc, columns, add);
    if constexpr (ROWS > 1) micro_rows<ROWS - 1, PACKED>(rows, a, stride, b, depth, c, ldc, columns, add);
}

// From one packed panel of A to the next: PAD apart, or writing to all of them by turns would use a few cache sets.
constexpr int64_t PAD = 16;
static inline int64_t panel_size(int64_t depth) { return MR * depth + PAD; }

// `height` rows and `depth` steps of A as panels of [depth][MR].
static void pack_a(Matrix A, int64_t height, int64_t depth, float* out) {
    if (A.rs == 1) {  // step by step, since each is contiguous and the next lies on another page
        for (int64_t k = 0; k < depth; k++) {
            const float* p = A.p + k * A.cs;
            float* to = out + k * MR;
            int64_t m = 0;
            for (int64_t next = 0; next < height; next += 16) __builtin_prefetch(p + 8 * A.cs + next);
            for (; m + MR <= height; m += MR, to += panel_size(depth)) std::memcpy(to, p + m, 4 * MR);
            for (int64_t r = 0; m + r < height; r++) to[r] = p[m + r];
        }
        return;
    }
    for (int64_t m = 0; m < height; m += MR, out += panel_size(depth))
        for (int64_t r = 0; r < std::min<int64_t>(MR, height - m); r++)
            for (int64_t k = 0; k < depth; k++) out[k * MR + r] = A.p[(m + r) * A.rs + k * A.cs];
}

static void product(
    int64_t M, int64_t N, int64_t K, Matrix A, Matrix B, float* C, int64_t ldc, bool add, bool lower_only
) {
    if (K == 0 && !add)
        for (int64_t m = 0; m < M; m++) std::fill_n(C + m * ldc, N, 0.0f);
    static thread_local Buffer b_buffer, a_buffer;
    float* packed_b = b_buffer.at_least(KC * (NC + NR));
    float* packed_a = a_buffer.at_least(MC / MR * panel_size(KC));
    for (int64_t j = 0; j < N; j += NC) {
        int64_t width = std::min(NC, N - j);
        for (int64_t k = 0; k < K; k += KC) {
            int64_t depth = std::min(KC, K - k);
            bool add_now = add || k > 0;
            for (int64_t n = 0; n < width; n += NR)
                pack_b(B, k, j + n, depth, std::min<int64_t>(NR, width - n), packed_b + n * depth);
            for (int64_t i = 0; i < M; i += MC) {
                int64_t height = std::min(MC, M - i);
                Matrix part = {A.p + i * A.rs + k * A.cs, A.rs, A.cs};
                bool packed = A.cs != 1;  // steps of k at a distance: each would be a cache line of its own
                if (packed) pack_a(part, height, depth, packed_a);
                for (int64_t n = 0; n < width; n += NR) {
                    int64_t columns = std::min<int64_t>(NR, width - n);
                    const float* b = packed_b + n * depth;
                    float* c = C + i * ldc + j + n;
                    // The first row of tiles that reaches the diagonal.
                    int64_t first = lower_only ? std::max<int64_t>(0, (j + n - i) / MR * MR) : 0;
                    for (int64_t m = first; m < height; m += MR) {
                        int64_t rows = std::min<int64_t>(MR, height - m);
                        if (packed)
                            micro_rows<MR, true>(rows, packed_a + m / MR * panel_size(depth), 0, b, depth, c + m * ldc, ldc, columns, add_now);
                        else
                            micro_rows<MR, false>(
                                rows, part.p + m * A.rs, A.rs, b, depth, c + m * ldc, ldc, columns, add_now
                            );
                    }
                }
            }
        }
    }
}

void gemm(int64_t M, int64_t N, int64_t K, Matrix A, Matrix B, float* C, int64_t ldc, bool add) {
    product(M, N, K, A, B, C, ldc, add, false);
}

void gemm_symmetric(int64_t N, int64_t K, Matrix A, Matrix B, float* C) {
    product(N, N, K, A, B, C, N, false, true);
    for (int64_t i = 0; i < N; i += W)
        for (int64_t j = i; j < N; j += W) {
            if (j > i && j + W <= N) {  // a block below the diagonal, turned
                vf x[W];
                for (int r = 0; r < W; r++) x[r] = load(C + (j + r) * N + i);
                transpose(x);
                for (int r = 0; r < W; r++) store(C + (i + r) * N + j, x[r]);
            } else {
                for (int64_t r = i; r < std::min<int64_t>(i + W, N); r++)
                    for (int64_t s = std::max(r + 1, j); s < std::min<int64_t>(j + W, N); s++) C[r * N + s] = C[s * N + r];
            }
        }
}

}  // namespace trivium
