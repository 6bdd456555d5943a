// Products of tiles that lie in the first two caches, for kernels that make and use them block by block.
//
// Element (i, j) of C is the sum of a_ik b_kj in rising k by fused multiply-adds from 0, and what C held before is added
// last: its bits depend on neither the height nor the width of the tile. Nothing is packed: columns of B and C are a
// multiple of W and read as they lie, A is read float by float.
#pragma once

#include <algorithm>

#include "simd.h"

namespace trivium {

// What becomes of the old C: nothing, itself, or itself times keep[j].
enum class Old { DROP, ADD, KEEP };

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 8;
#else
constexpr int TILE_ROWS = 6;
#endif
constexpr int THIN_ROWS = 10;  // where there is one vector of columns: 10 sums hide the latency, 12 spill the pointers

static inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// A distance of rows of at least n floats that is an odd number of cache lines: rows then spread over all cache sets.
static inline int64_t odd_lines(int64_t n) { return round_up(n, 16) + (round_up(n, 16) % 32 ? 0 : 16); }

// What a product asks the memory for while it runs: nothing, or `by` floats more at each of its steps.
struct NoAhead {
    void step() {}
};

struct Ahead {
    const float* p;
    int64_t by;
    void step() { __builtin_prefetch(p, 0, 2), p += by; }
};

// ROWS x COLUMNS vectors of C. A(i, k) is a[k * stride + i] when TURNED, else a[i * stride + k].
template <int ROWS, int COLUMNS, bool TURNED, Old OLD, typename A>
static inline void tile_part(
    int64_t depth, const float* a, int64_t stride, const float* b, int64_t ldb, float* c, int64_t ldc, const float* keep,
    A& ahead
) {
    A next = ahead;
    vf sums[ROWS][COLUMNS] = {};
    for (int64_t k = 0; k < depth; k++) {
        vf row[COLUMNS];
#pragma GCC unroll 2
        for (int j = 0; j < COLUMNS; j++) row[j] = load(b + j * W);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            vf x = splat(TURNED ? a[i] : a[i * stride]);
#pragma GCC unroll 2
            for (int j = 0; j < COLUMNS; j++) sums[i][j] = fma(x, row[j], sums[i][j]);
        }
        a += TURNED ? stride : 1;
        b += ldb;
        next.step();
    }
    ahead = next;
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
        for (int j = 0; j < COLUMNS; j++) {
            float* p = c + i * ldc + j * W;
            if constexpr (OLD == Old::ADD) sums[i][j] = load(p) + sums[i][j];
            if constexpr (OLD == Old::KEEP) sums[i][j] = fma(load(p), load(keep + j * W), sums[i][j]);
            store(p, sums[i][j]);
        }
}

template <int ROWS, int COLUMNS, bool TURNED, Old OLD, typename A>
static inline void tile_rows(
    int64_t rows, int64_t depth, const float* a, int64_t stride, const float* b, int64_t ldb, float* c, int64_t ldc,
    const float* keep, A& ahead
) {
    if (rows == ROWS) return tile_part<ROWS, COLUMNS, TURNED, OLD>(depth, a, stride, b, ldb, c, ldc, keep, ahead);
    if constexpr (ROWS > 1)
        tile_rows<ROWS - 1, COLUMNS, TURNED, OLD>(rows, depth, a, stride, b, ldb, c, ldc, keep, ahead);
}

template <int COLUMNS, bool TURNED, Old OLD, typename A>
static inline void tile_columns(
    int64_t M, int64_t depth, const float* a, int64_t stride, const float* b, int64_t ldb, float* c, int64_t ldc,
    const float* keep, A& ahead
) {
    constexpr int MOST = COLUMNS == 1 ? THIN_ROWS : TILE_ROWS;
    int64_t parts = (M + MOST - 1) / MOST;  // of one height, give or take one: 8 are 4 + 4 and not 6 + 2
    for (int64_t part = 0; part < parts; part++) {
        int64_t i = M * part / parts, rows = M * (part + 1) / parts - i;
        tile_rows<MOST, COLUMNS, TURNED, OLD>(
            rows, depth, a + (TURNED ? i : i * stride), stride, b, ldb, c + i * ldc, ldc, keep, ahead
        );
    }
}

// C [M, N] = A [M, depth] B [depth, N] and the old C; N is a multiple of W.
template <bool TURNED, Old OLD, typename A>
static inline void tile_product_ahead(
    int64_t M, int64_t N, int64_t depth, const float* a, int64_t stride, const float* b, int64_t ldb, float* c, int64_t ldc,
    const float* keep, A& ahead
) {
    int64_t n = 0;
    for (; n + 2 * W <= N; n += 2 * W)
        tile_columns<2, TURNED, OLD>(M, depth, a, stride, b + n, ldb, c + n, ldc, keep + n, ahead);
    if (n < N) tile_columns<1, TURNED, OLD>(M, depth, a, stride, b + n, ldb, c + n, ldc, keep + n, ahead);
}

template <bool TURNED, Old OLD>
static inline void tile_product(
    int64_t M, int64_t N, int64_t depth, const float* a, int64_t stride, const float* b, int64_t ldb, float* c, int64_t ldc,
    const float* keep = nullptr
) {
    NoAhead none;
    tile_product_ahead<TURNED, OLD>(M, N, depth, a, stride, b, ldb, c, ldc, keep, none);
}

// out[j * ldo + i] = scale * x[i * ldx + j] for i < rows, j < columns.
static inline void turn(
    int64_t rows, int64_t columns, const float* x, int64_t ldx, float* out, int64_t ldo, float scale = 1.0f
) {
    vf part[W];
    for (int64_t i = 0; i < rows; i += W)
        for (int64_t j = 0; j < columns; j += W) {
            for (int64_t k = 0; k < W; k++)
                part[k] = i + k < rows ? load_n(x + (i + k) * ldx + j, columns - j) * scale : vf{};
            transpose(part);
            for (int64_t k = 0; k < W && j + k < columns; k++) store_n(out + (j + k) * ldo + i, part[k], rows - i);
        }
}

// 2^x within 2 units in the last place for x <= 127; 0 below -126, nan for nan.
static inline vf exp2_below(vf x) {
    const vf bottom = splat(-126.0f), magic = splat(12582912.0f);
    vf y = max(bottom, x);  // nan stays
    vf n = (y + magic) - magic, r = y - n;
    vf p = splat(1.535336196e-4f);
    p = fma(p, r, splat(1.339887502e-3f));
    p = fma(p, r, splat(9.618436918e-3f));
    p = fma(p, r, splat(5.550332367e-2f));
    p = fma(p, r, splat(2.402264774e-1f));
    p = fma(p, r, splat(6.931471825e-1f));
    p = fma(p, r, splat(1.0f));
    p = (vf)((vi)p + (__builtin_convertvector(n, vi) << 23));
    return select(x < bottom, vf{}, p);
}

static inline vi lanes() {
    vi v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

}  // namespace trivium
