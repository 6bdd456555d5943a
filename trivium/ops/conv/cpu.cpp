// The short convolution, causal over four tokens and then SiLU, in one pass. See trivium/ops/conv.
#include <vector>

#include "rows.h"

using namespace trivium;

namespace {

constexpr int TAPS = 4, BEFORE = TAPS - 1;
constexpr int QUAD = 4;           // tokens that go together: a row is loaded once for the four it meets
constexpr int64_t BLOCK = 64;     // tokens of one item
constexpr int64_t COLUMNS = 512;  // of one item of backward: its sums and the rows at hand stay in the nearest cache

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

// The sum over the taps in rising order; x holds the rows from the three before the token on.
inline vf convolve(const vf* x, const vf* tap) {
    vf z = x[0] * tap[0];
    for (int i = 1; i < TAPS; i++) z = fma(x[i], tap[i], z);
    return z;
}

int64_t threads_for(int64_t num_threads, const Problem& pb) {
    return pb.starts[pb.S] * pb.X < (1 << 14) ? 1 : num_threads;  // some microseconds: less than to wake a thread
}

// N tokens from the one that rows[3] points at.
template <int N>
inline void forward_tokens(const float* const* rows, const float* taps, int64_t X, float* y) {
    columns(X, [&](int64_t c, int64_t n) {
        vf x[BEFORE + N], tap[TAPS];
        for (int i = 0; i < TAPS; i++) tap[i] = load_n(taps + i * X + c, n);
#pragma GCC unroll 8
        for (int i = 0; i < BEFORE + N; i++) x[i] = load_n(rows[i] + c, n);
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            vf z = convolve(x + i, tap);
            store_n(y + i * X + c, z * sigmoid(z), n);
        }
    });
}

// One block of tokens and of columns: what y's gradient gives to its tokens, its window and its part of the taps'.
struct BackwardBlock {
    const Problem& pb;
    const Block& block;
    int64_t c0, c1;
    const float *taps, *dy, *d_window_out;
    float *dx, *d_window, *d_taps;
    float* behind;  // [3, COLUMNS], z's gradients of the three tokens before

    void run() {
        for (int i = 0; i < BEFORE; i++) std::fill_n(behind + i * COLUMNS, COLUMNS, 0.0f);
        for (int i = 0; i < TAPS; i++) std::fill_n(d_taps + i * pb.X + c0, c1 - c0, 0.0f);
        for (int64_t t = block.first; t < block.end + BEFORE; t += QUAD)
            if (t > block.first && t + QUAD <= block.end)
                tokens<false>(t);
            else
                tokens<true>(t);
    }

    // Four tokens; the three before them, whose last share of a gradient these give, and the first go out. At an EDGE
    // of the block some are another's, or past the end.
    template <bool EDGE>
    void tokens(int64_t t) {
        int64_t X = pb.X, s = block.sequence, end = pb.starts[s + 1];
        const float* rows[BEFORE + QUAD];
        for (int j = 0; j < BEFORE + QUAD; j++) rows[j] = pb.row(s, std::min(t - BEFORE + j, end - 1));
        columns(c1 - c0, [&](int64_t at, int64_t n) {
            int64_t c = c0 + at;
            vf x[BEFORE + QUAD], d[BEFORE + QUAD], tap[TAPS], sums[TAPS];
            for (int i = 0; i < TAPS; i++) tap[i] = load_n(taps + i * X + c, n);
            for (int i = 0; i < TAPS; i++) sums[i] = load_n(d_taps + i * X + c, n);
            for (int i = 0; i < BEFORE; i++) d[i] = load(behind + i * COLUMNS + at);
#pragma GCC unroll 8
            for (int i = 0; i < BEFORE + QUAD; i++) x[i] = load_n(rows[i] + c, n);
#pragma GCC unroll 4
            for (int j = 0; j < QUAD; j++) {
                if (EDGE && t + j >= end) {
                    d[BEFORE + j] = vf{};
                    continue;
                }
                vf z = convolve(x + j, tap), gate = sigmoid(z);
                d[BEFORE + j] = load_n(dy + (t + j) * X + c, n) * (gate * fma(z, 1.0f - gate, splat(1.0f)));
                for (int i = 0; i < TAPS && !(EDGE && t + j >= block.end); i++)
                    sums[i] = fma(x[i + j], d[BEFORE + j], sums[i]);
            }
            for (int i = 0; i < TAPS; i++) store_n(d_taps + i * X + c, sums[i], n);
            for (int i = 0; i < BEFORE; i++) store(behind + i * COLUMNS + at, d[QUAD + i]);
#pragma GCC unroll 4
            for (int j = 0; j < QUAD; j++) {
                vf sum = tap[0] * d[j + 3];  // a token was tap i of the token 3 - i further
                for (int i = 1; i < TAPS; i++) sum = fma(tap[i], d[j + 3 - i], sum);
                if (EDGE)
                    store_edge(t - BEFORE + j, c, n, sum);
                else
                    store_n(dx + (t - BEFORE + j) * X + c, sum, n);
            }
        });
    }

    // A row that is left in the window also gets its gradient there.
    void store_edge(int64_t t, int64_t c, int64_t n, vf sum) {
        int64_t X = pb.X, s = block.sequence, start = pb.starts[s], left = t - pb.starts[s + 1] + BEFORE;
        if (t >= block.end || (t < block.first && block.first > start)) return;
        if (left >= 0) sum += load_n(d_window_out + (s * BEFORE + left) * X + c, n);
        store_n(t < start ? d_window + (s * BEFORE + t - start + BEFORE) * X + c : dx + t * X + c, sum, n);
    }
};

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
        const float* rows[BEFORE + QUAD];
        for (int64_t t = first; t < last; t += t + QUAD <= last ? QUAD : 1) {
            for (int j = 0; j < BEFORE + QUAD; j++) rows[j] = pb.row(s, std::min(t - BEFORE + j, last - 1));
            if (t + QUAD <= last)
                forward_tokens<QUAD>(rows, taps.data(), X, y + t * X);
            else
                forward_tokens<1>(rows, taps.data(), X, y + t * X);
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
    static thread_local Buffer sums_buffer;
    float* d_taps = sums_buffer.at_least(count * TAPS * X);
    parallel(threads_for(num_threads, pb), count * parts, [&](int64_t item) {
        static thread_local Buffer buffer;
        int64_t b = item / parts, c = item % parts * COLUMNS;
        BackwardBlock{
            pb, blocks[b], c, std::min(c + COLUMNS, X), taps.data(), dy, d_window_out, dx, d_window,
            d_taps + b * TAPS * X, buffer.at_least(BEFORE * COLUMNS)
        }.run();
    });
    std::vector<double> total(TAPS * X);  // in double: a long text has thousands of blocks
    for (int64_t b = 0; b < count; b++)
        for (int64_t i = 0; i < TAPS * X; i++) total[i] += d_taps[b * TAPS * X + i];
    for (int64_t c = 0; c < X; c++)
        for (int i = 0; i < TAPS; i++) d_weight[c * TAPS + i] = (float)total[i * X + c];
}
