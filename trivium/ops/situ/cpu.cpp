// SiTU, element by element. Tiles have a fixed number of elements, and an element's bits depend on it alone.
#include "kernel.h"
#include "situ.h"

using namespace trivium;

constexpr int64_t TILE = 8192;

template <typename F>
static void for_vectors(int64_t num_threads, int64_t count, F&& work) {
    parallel(num_threads, (count + TILE - 1) / TILE, [&](int64_t tile) {
        int64_t last = std::min(count, (tile + 1) * TILE);
        for (int64_t i = tile * TILE; i < last; i += W) work(i, last - i);
    });
}

TRIVIUM_KERNEL void trivium_situ(
    int64_t num_threads, const float* gate, const float* up, float* y, int64_t count, float bound, float up_bound
) {
    SituBounds bounds{bound, up_bound};
    for_vectors(num_threads, count, [&](int64_t i, int64_t n) {
        store_n(y + i, Situ(load_n(gate + i, n), load_n(up + i, n), bounds).value(), n);
    });
}

TRIVIUM_KERNEL void trivium_situ_backward(
    int64_t num_threads, const float* dy, const float* gate, const float* up, float* d_gate, float* d_up, int64_t count,
    float bound, float up_bound
) {
    SituBounds bounds{bound, up_bound};
    for_vectors(num_threads, count, [&](int64_t i, int64_t n) {
        Situ at(load_n(gate + i, n), load_n(up + i, n), bounds);
        vf grad = load_n(dy + i, n);
        store_n(d_gate + i, grad * at.gate_slope(), n);
        store_n(d_up + i, grad * at.up_slope(), n);
    });
}
