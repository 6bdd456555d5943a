// What every cpu.cpp starts with: exported functions of the C ABI, and how work is shared out.
//
// A kernel takes the number of threads first, then raw pointers to contiguous float32 unless said otherwise, then int64
// sizes and float scalars. Nothing is kept between calls but scratch memory of the threads.
#pragma once

#include <algorithm>

#include "gemm.h"
#include "simd.h"

#define TRIVIUM_KERNEL extern "C" __attribute__((visibility("default")))

namespace trivium {

// Memory of one call, too large to be kept by a thread.
using Floats = std::unique_ptr<float[]>;

// Says to the caller in Python that the last kernel of this thread found no memory.
void report_no_memory();

// The body of a kernel whose memory grows with its tensors: finding none ends the call and not the process.
template <typename F>
static inline void guarded(F&& body) {
    try {
        body();
    } catch (const std::bad_alloc&) {
        report_no_memory();
    }
}

// work(i) for i in [0, count), in any order and on any thread: what one item computes must depend on i alone.
template <typename F>
static inline void parallel(int64_t num_threads, int64_t count, F&& work) {
    if (num_threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) work(i);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
    for (int64_t i = 0; i < count; i++) work(i);
}

// C = A B as `gemm`, by several threads: each has a range of rows or, where there are more columns, of columns.
static inline void gemm_parallel(
    int64_t num_threads, int64_t M, int64_t N, int64_t K, Matrix A, Matrix B, float* C, int64_t ldc, bool add = false
) {
    bool by_rows = M >= N;
    int64_t unit = by_rows ? MR : NR, units = ((by_rows ? M : N) + unit - 1) / unit;
    int64_t parts = std::min(num_threads, units);
    if (2 * M * N * K < (1 << 18)) parts = 1;  // some microseconds: less than it takes to wake a thread
    parallel(parts, parts, [&](int64_t part) {
        int64_t first = units * part / parts * unit, last = std::min(units * (part + 1) / parts * unit, by_rows ? M : N);
        if (by_rows)
            gemm(last - first, N, K, {A.p + first * A.rs, A.rs, A.cs}, B, C + first * ldc, ldc, add);
        else
            gemm(M, last - first, K, A, {B.p + first * B.cs, B.rs, B.cs}, C + first, ldc, add);
    });
}

}  // namespace trivium
