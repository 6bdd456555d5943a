// The threads of one parallel region that lasts a whole step: how they wait for each other and share rows out.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>

#include "decode_plan.h"

namespace trivium {

// The last to arrive lets the others go. They look for as long as a core's turn at the memory takes, and then give
// their core away at every look: on a busy machine the thread they wait for may need it.
class Barrier {
  public:
    void wait(int64_t count) {
        if (count == 1) return;
        uint32_t turn = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int looks = 0; turn_.load(std::memory_order_acquire) == turn; looks++) {
            if (looks < 2000)
                pause();
            else
                std::this_thread::yield();
        }
    }

  private:
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
    }
    alignas(64) std::atomic<int64_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
};

struct Range {
    int64_t first, last;
};

// Thread `id` of `count`: its part of [0, size), in whole units but at the end. What is computed for an item never depends
// on who computes it.
static inline Range share(int64_t size, int64_t unit, int64_t id, int64_t count) {
    int64_t units = (size + unit - 1) / unit;
    return {units * id / count * unit, std::min(units * (id + 1) / count * unit, size)};
}

// Rows of a product that several threads share: y = w x or, with `up`, y = SiTU(w x, up x).
struct Product {
    const Weight* w;
    const Weight* up;
    int64_t rows, K;
    const float* x;
    float* y;
};

// Which rows of each product thread `id` computes, so that all threads read the same number of bytes.
static inline Range share(const Product* products, int num, int which, int64_t id, int64_t count) {
    double total = 0, before = 0;
    for (int i = 0; i < num; i++) {
        const Product& p = products[i];
        double bytes = (double)p.rows * row_bytes(*p.w, p.K) * (p.up ? 2 : 1);
        if (i < which) before += bytes;
        total += bytes;
    }
    const Product& p = products[which];
    double each = (double)row_bytes(*p.w, p.K) * (p.up ? 2 : 1);
    auto bound = [&](int64_t at) -> int64_t {
        if (at == count) return p.rows;
        int64_t row = (int64_t)((total * at / count - before) / each) / STREAMS * STREAMS;
        return std::min(std::max<int64_t>(row, 0), p.rows);
    };
    return {bound(id), bound(id + 1)};
}

}  // namespace trivium
