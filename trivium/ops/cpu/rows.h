// For kernels that go row by row: sums along a row, and sums over rows in one order.
#pragma once

#include "kernel.h"

namespace trivium {

// Rows of one work item, some 128 KB of each array. It depends on the width alone: sums over rows run within such a
// block and then over the blocks, both in rising order, on any number of threads.
static inline int64_t block_rows(int64_t width) { return std::max<int64_t>(32768 / std::max<int64_t>(width, 1), 16); }

static inline int64_t num_blocks(int64_t rows, int64_t width) {
    return (rows + block_rows(width) - 1) / block_rows(width);
}

// work(block, first row, end of rows)
template <typename F>
static inline void parallel_rows(int64_t num_threads, int64_t rows, int64_t width, F&& work) {
    int64_t height = block_rows(width);
    parallel(num_threads, num_blocks(rows, width), [&](int64_t block) {
        work(block, block * height, std::min(rows, (block + 1) * height));
    });
}

// Room for a row of sums a block. The thread that calls the kernel asks for it, and all of them write there.
static inline float* partials(int64_t blocks, int64_t width) {
    static thread_local Buffer buffer;
    return buffer.at_least(blocks * width);
}

// Lane i: the sum over the lanes of x[i].
template <int STEP = 1>
static inline vf sums(vf* x) {
    if constexpr (STEP == W) {
        return x[0];
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < W / STEP; i += 2) {
            vf a = x[i], b = x[i + 1];
            exchange<STEP>(a, b, std::make_integer_sequence<int, W>{});
            x[i / 2] = a + b;
        }
        return sums<2 * STEP>(x);
    }
}

// Sums along a row of `width`: add(i, n, s) adds the terms of n <= W columns from i on to the K vectors s.
template <int K, typename F>
static inline void row_sums(int64_t width, float (&sums)[K], F&& add) {
    vf even[K] = {}, odd[K] = {};
    int64_t i = 0;
    for (; i + 2 * W <= width; i += 2 * W) {
        add(i, W, even);
        add(i + W, W, odd);
    }
    for (; i < width; i += W) add(i, width - i, even);
    for (int k = 0; k < K; k++) sums[k] = sum(even[k] + odd[k]);
}

// work(i, n) for n <= W columns from i on: a whole vector's n is a constant.
template <typename F>
static inline void columns(int64_t width, F&& work) {
    int64_t i = 0;
    for (; i + W <= width; i += W) work(i, (int64_t)W);
    if (i < width) work(i, width - i);
}

// out [width] = the rows of partial [count, width], added from the first on.
static inline void add_partials(int64_t num_threads, const float* partial, int64_t count, int64_t width, float* out) {
    constexpr int64_t STRIP = 16 * W;
    parallel(count * width < (1 << 16) ? 1 : num_threads, (width + STRIP - 1) / STRIP, [&](int64_t strip) {
        int64_t first = strip * STRIP, size = std::min(STRIP, width - first);
        columns(size, [&](int64_t i, int64_t n) {
            vf s = {};
            for (int64_t k = 0; k < count; k++) s += load_n(partial + k * width + first + i, n);
            store_n(out + first + i, s, n);
        });
    });
}

}  // namespace trivium
