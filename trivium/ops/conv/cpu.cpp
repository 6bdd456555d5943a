// The short convolution, causal over four tokens and then SiLU, in one pass. See trivium/ops/conv.
#include <vector>

#include "kernel.h"

using namespace trivium;

namespace {

constexpr int TAPS = 4, BEFORE = TAPS - 1;
constexpr int64_t BLOCK = 64;     // tokens of one item
constexpr int64_t COLUMNS = 128;  // of one item of backward: its rows, 34 KB, stay in the nearest caches

// Sequences of rows of X channels, each behind its window of three.
struct Problem {
    const float *x, *window;
    const int64_t* starts;
    int64_t S, X;

    // Row of token t of sequence s, which may lie up to three before its first.
    const float* row(int64_t s, int64_t t) const {
        return t >= starts[s] ? x + t * X : window + (s * BEFORE + BEFORE + t - starts[s]) * X;
    }
};

struct Block {
    int64_t sequence, first, end;
};

// Blocks of tokens; an empty sequence has one, for its window.
std::vector<Block> blocks_of(const Problem& pb) {
    std::vector<Block> all;
    for (int64_t s = 0; s < pb.S; s++) {
        int64_t t = pb.starts[s], end = pb.starts[s + 1];
        do {
            all.push_back({s, t, std::min(t + BLOCK, end)});
            t += BLOCK;
        } while (t < end);
    }
    return all;
}

// [X, 4] to [4, X]
std::vector<float> turned(const float* weight, int64_t X) {
    std::vector<float> taps(TAPS * X);
    for (int64_t c = 0; c < X; c++)
        for (int i = 0; i < TAPS; i++) taps[i * X + c] = weight[c * TAPS + i];
    return taps;
}

// The sum over the taps in rising order, W channels from c on.
inline vf convolve(const float* const* rows, const float* taps, int64_t X, int64_t c) {
    int64_t n = X - c;
    vf z = load_n(rows[0] + c, n) * load_n(taps + c, n);
    for (int i = 1; i < TAPS; i++) z = fma(load_n(rows[i] + c, n), load_n(taps + i * X + c, n), z);
    return z;
}

int64_t threads_for(int64_t num_threads, const Problem& pb) {
    return pb.starts[pb.S] * pb.X < (1 << 14) ? 1 : num_threads;  // some microseconds: less than to wake a thread
}

// One block of tokens and of columns: what y's gradient gives to its tokens, its window and its part of the taps'.
void backward_block(
    const Problem& pb, const Block& block, int64_t c0, int64_t c1, const float* taps, const float* dy,
    const float* d_window_out, float* dx, float* d_window, float* d_taps
) {
    int64_t X = pb.X, s = block.sequence, start = pb.starts[s], end = pb.starts[s + 1], first = block.first;
    static thread_local Buffer buffer;
    float* dz = buffer.at_least((BLOCK + BEFORE) * COLUMNS);  // the block's tokens and three behind, 0 past the end
    for (int64_t c = c0; c < c1; c += W) {
        vf sums[TAPS] = {};
        int64_t n = c1 - c;
        for (int64_t t = first; t < block.end + BEFORE; t++) {
            float* out = dz + (t - first) * COLUMNS + c - c0;
            if (t >= end) {
                store(out, vf{});
                continue;
            }
            const float* rows[TAPS] = {pb.row(s, t - 3), pb.row(s, t - 2), pb.row(s, t - 1), pb.row(s, t)};
            vf z = convolve(rows, taps, X, c), gate = sigmoid(z);
            vf d = load_n(dy + t * X + c, n) * (gate * fma(z, 1.0f - gate, splat(1.0f)));
            store(out, d);
            for (int i = 0; i < TAPS && t < block.end; i++) sums[i] = fma(load_n(rows[i] + c, n), d, sums[i]);
        }
        for (int i = 0; i < TAPS; i++) store_n(d_taps + i * X + c, sums[i], n);
        vf tap[TAPS];
        for (int i = 0; i < TAPS; i++) tap[i] = load_n(taps + i * X + c, n);
        // Token t was tap i of token t + 3 - i; a row that is left in the window also gets its gradient there.
        auto gradient = [&](int64_t t) {
            vf d = {};
            for (int i = 0; i < TAPS; i++) {
                int64_t at = t + BEFORE - i - first;
                if (at >= 0) d = fma(tap[i], load(dz + at * COLUMNS + c - c0), d);
            }
            int64_t left = t - end + BEFORE;
            return left >= 0 ? d + load_n(d_window_out + (s * BEFORE + left) * X + c, n) : d;
        };
        for (int64_t t = first; t < block.end; t++) store_n(dx + t * X + c, gradient(t), n);
        if (first == start)
            for (int j = 0; j < BEFORE; j++)
                store_n(d_window + (s * BEFORE + j) * X + c, gradient(start - BEFORE + j), n);
    }
}

}  // namespace

// y [T, X] of x [T, X], weight [X, 4], window [S, 3, X], and the window behind each sequence.
TRIVIUM_KERNEL void trivium_short_conv(
    int64_t num_threads, const float* x, const float* weight, const float* window, const int64_t* starts, float* y,
    float* window_out, int64_t S, int64_t X
) {
    Problem pb{x, window, starts, S, X};
    std::vector<Block> blocks = blocks_of(pb);
    std::vector<float> taps = turned(weight, X);
    parallel(threads_for(num_threads, pb), blocks.size(), [&](int64_t b) {
        auto [s, first, last] = blocks[b];
        for (int64_t t = first; t < last; t++) {
            const float* rows[TAPS] = {pb.row(s, t - 3), pb.row(s, t - 2), pb.row(s, t - 1), pb.row(s, t)};
            for (int64_t c = 0; c < X; c += W) {
                vf z = convolve(rows, taps.data(), X, c);
                store_n(y + t * X + c, z * sigmoid(z), X - c);
            }
        }
        int64_t end = starts[s + 1];
        for (int j = 0; j < BEFORE && last == end; j++)
            std::copy_n(pb.row(s, end - BEFORE + j), X, window_out + (s * BEFORE + j) * X);
    });
}

// dx, dweight [X, 4] and dwindow of the gradients dy and d_window_out.
TRIVIUM_KERNEL void trivium_short_conv_backward(
    int64_t num_threads, const float* x, const float* weight, const float* window, const int64_t* starts,
    const float* dy, const float* d_window_out, float* dx, float* d_weight, float* d_window, int64_t S, int64_t X
) {
    Problem pb{x, window, starts, S, X};
    std::vector<Block> blocks = blocks_of(pb);
    std::vector<float> taps = turned(weight, X);
    int64_t count = blocks.size(), parts = (X + COLUMNS - 1) / COLUMNS;
    std::unique_ptr<float[]> d_taps(new float[count * TAPS * X]);
    parallel(threads_for(num_threads, pb), count * parts, [&](int64_t item) {
        int64_t b = item / parts, c = item % parts * COLUMNS;
        backward_block(
            pb, blocks[b], c, std::min(c + COLUMNS, X), taps.data(), dy, d_window_out, dx, d_window,
            d_taps.get() + b * TAPS * X
        );
    });
    std::vector<double> total(TAPS * X);  // in double: a long text has thousands of blocks
    for (int64_t b = 0; b < count; b++)
        for (int64_t i = 0; i < TAPS * X; i++) total[i] += d_taps[b * TAPS * X + i];
    for (int64_t c = 0; c < X; c++)
        for (int i = 0; i < TAPS; i++) d_weight[c * TAPS + i] = (float)total[i * X + c];
}
