// Matrix products with one order of sums: element (m, n) is, over blocks of KC of the inner dimension in rising order,
// the sum of a_mk b_kn in rising k by fused multiply-adds from 0, and the blocks are added up. That holds for every
// path here, so a row's bits depend neither on how many rows there are, nor on its place, nor on the threads.
#pragma once

#include <memory>
#include <new>

#include "simd.h"

namespace trivium {

#if defined(__AVX512F__)
constexpr int MR = 14;
#else
constexpr int MR = 6;
#endif
constexpr int NR = 2 * W;
constexpr int64_t KC = 512, MC = 16 * MR, NC = 256;

// Element (i, j) of a matrix lies at p[i * rs + j * cs].
struct Matrix {
    const float* p;
    int64_t rs, cs;
};

// Grows and stays, one a thread and place of use.
class Buffer {
  public:
    float* at_least(int64_t count) {
        if (count > size_) {
            size_ = count;
            data_.reset((float*)::operator new(4 * count, std::align_val_t(64)));
        }
        return data_.get();
    }

  private:
    struct Free {
        void operator()(float* p) const { ::operator delete(p, std::align_val_t(64)); }
    };
    std::unique_ptr<float, Free> data_;
    int64_t size_ = 0;
};

// C [M, N] = A [M, K] B [K, N], or C += with `add`, by one thread. C's rows are contiguous at distance ldc.
void gemm(int64_t M, int64_t N, int64_t K, Matrix A, Matrix B, float* C, int64_t ldc, bool add = false);

// A product known to be symmetric, [N, N]: what lies wholly above the diagonal is not computed but copied from below.
void gemm_symmetric(int64_t N, int64_t K, Matrix A, Matrix B, float* C);

}  // namespace trivium
