// What KDA's forward and backward share: the problem, how it is cut, and its tokens made ready. See trivium/ops/kda.
#pragma once

#include <vector>

#include "rows.h"

namespace trivium::kda {

constexpr int NV = W == 16 ? 2 : 4;
constexpr int VB = NV * W;
constexpr int TILE = 16;      // tokens prepared at once
constexpr int SEGMENT = 32;   // tokens between two kept states; a multiple of TILE
constexpr int64_t GROUP = 4;  // heads that go together

// Rows of tokens: token t of head h begins at p + t * stride + h * its width.
struct Tokens {
    const float* p;
    int64_t stride;
};

struct Problem {
    Tokens q, k, decay_in, beta_in;
    const float *A_log, *dt_bias;
    const int64_t* starts;
    int64_t S, H, K, V;
    float lower_bound;

    int64_t padded_k() const { return (K + W - 1) / W * W; }
    int64_t blocks() const { return (V + VB - 1) / VB; }
};

struct Segment {
    int64_t sequence, first, count;  // tokens first to first + count - 1
};

static inline std::vector<Segment> segments_of(const Problem& pb) {
    std::vector<Segment> all;
    for (int64_t s = 0; s < pb.S; s++)
        for (int64_t t = pb.starts[s]; t < pb.starts[s + 1]; t += SEGMENT)
            all.push_back({s, t, std::min<int64_t>(SEGMENT, pb.starts[s + 1] - t)});
    return all;
}

// The number of a sequence's first segment.
static inline std::vector<int64_t> first_segments(const Problem& pb) {
    std::vector<int64_t> first(pb.S + 1, 0);
    for (int64_t s = 0; s < pb.S; s++)
        first[s + 1] = first[s] + (pb.starts[s + 1] - pb.starts[s] + SEGMENT - 1) / SEGMENT;
    return first;
}

// What one thread does at a time: some heads of a sequence, or where these do not fill the threads, some of their
// blocks, if they may be split. No bit of an output or a gradient depends on the cut.
struct Item {
    int64_t sequence, first_head, end_head, first_block, end_block;
};

// Neighbouring heads go together, tile by tile: their tokens lie side by side, and alone each would be a far jump
// (8 heads of 64: forward 1.3, backward 1.4 times as fast). Their states stay within 128 KB.
static inline std::vector<Item> items_of(int64_t num_threads, const Problem& pb, bool may_split = true) {
    int64_t heads = pb.S * pb.H, blocks = pb.blocks();
    bool by_block = may_split && num_threads > 1 && blocks > 1 && heads < 4 * num_threads && heads % num_threads != 0;
    int64_t fit = (1 << 15) / (pb.padded_k() * VB * std::max<int64_t>(blocks, 1));
    int64_t share = by_block ? 1 : heads / num_threads;
    int64_t group = std::max<int64_t>(1, std::min({fit, share, GROUP}));
    std::vector<Item> items;
    for (int64_t s = 0; s < pb.S; s++)
        for (int64_t h = 0; h < pb.H; h += group)
            for (int64_t b = 0; b < blocks; b += by_block ? 1 : blocks)
                items.push_back({s, h, std::min(h + group, pb.H), b, by_block ? b + 1 : blocks});
    return items;
}

// A head's rows lie H rows apart and no hardware foresees them; a store that waits for its line holds up all behind it.
// Into the second level: a tile's rows of one head fall into few sets of the first. No harm behind a buffer's end.
static inline void prefetch(const float* p, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(p + i, 0, 2);
}

// Tokens of one head, ready for the passes: rows of Kp floats, zeros behind K.
struct Prepared {
    float *q, *k, *decay, *write;  // write = beta k
    float *beta, *q_norm, *k_norm;

    static int64_t numel(int64_t tokens, int64_t Kp) { return tokens * (4 * Kp + 3); }
    Prepared(float* p, int64_t tokens, int64_t Kp)
        : q(p), k(q + tokens * Kp), decay(k + tokens * Kp), write(decay + tokens * Kp), beta(write + tokens * Kp),
          q_norm(beta + tokens), k_norm(q_norm + tokens) {}
};

static inline float exp_A(const Problem& pb, int64_t h) { return exp(splat(pb.A_log[h]))[0]; }

// sigmoid(beta_in) of `count` tokens; one vector at a time, so that bits depend on the token alone
static inline void prepare_beta(const Problem& pb, int64_t h, int64_t first, int64_t count, float* beta) {
    for (int64_t t = 0; t < count; t += W) {
        float x[W] = {};
        int64_t n = std::min<int64_t>(W, count - t);
        for (int64_t i = 0; i < n; i++) x[i] = pb.beta_in.p[(first + t + i) * pb.beta_in.stride + h];
        store_n(beta + t, sigmoid(load(x)), n);
    }
}

// W tokens at a time: alone, each would wait for its sums, roots and quotients. `ahead`: how many tokens further are
// those wanted next. e^-87 for a decay below it, where a bound so low is given, is as good as 0.
static inline void prepare(
    const Problem& pb, int64_t h, int64_t first, int64_t count, Prepared out, int64_t ahead
) {
    int64_t K = pb.K, Kp = pb.padded_k();
    float q_scale = 1.0f / __builtin_sqrtf((float)K), A = exp_A(pb, h), lower_bound = pb.lower_bound;
    const float* bias = pb.dt_bias + h * K;
    prepare_beta(pb, h, first, count, out.beta);
    for (int64_t start = 0; start < count; start += W) {
        int64_t end = std::min<int64_t>(start + W, count);
        vf q_squares[W] = {}, k_squares[W] = {};
        for (int64_t t = start; t < end; t++) {
            const float* q = pb.q.p + (first + t) * pb.q.stride + h * K;
            const float* k = pb.k.p + (first + t) * pb.k.stride + h * K;
            const float* decay_in = pb.decay_in.p + (first + t) * pb.decay_in.stride + h * K;
            prefetch(q + ahead * pb.q.stride, K);
            prefetch(k + ahead * pb.k.stride, K);
            prefetch(decay_in + ahead * pb.decay_in.stride, K);
            vf q_square = {}, k_square = {};
            columns(K, [&](int64_t i, int64_t n) {
                int64_t at = t * Kp + i;
                vf query = load_n(q + i, n), key = load_n(k + i, n);
                q_square = fma(query, query, q_square), k_square = fma(key, key, k_square);
                store(out.q + at, query), store(out.k + at, key);
                vf gate = sigmoid(A * (load_n(decay_in + i, n) + load_n(bias + i, n)));
                if (n < W) store(out.decay + at, vf{});  // a row behind K is 0 and stays 0, whatever A_log is
                store_n(out.decay + at, exp_normal(lower_bound * gate), n);
            });
            q_squares[t - start] = q_square, k_squares[t - start] = k_square;
        }
        store(out.q_norm + start, 1.0f / sqrt(sums(q_squares) + 1e-6f));
        store(out.k_norm + start, 1.0f / sqrt(sums(k_squares) + 1e-6f));
        for (int64_t t = start; t < end; t++) {
            vf q_norm = splat(out.q_norm[t] * q_scale), k_norm = splat(out.k_norm[t]), beta = splat(out.beta[t]);
            for (int64_t at = t * Kp; at < (t + 1) * Kp; at += W) {
                vf key = load(out.k + at) * k_norm;
                store(out.q + at, load(out.q + at) * q_norm);
                store(out.k + at, key);
                store(out.write + at, key * beta);
            }
        }
    }
}

// Columns of a [rows, V] matrix to a block [padded_rows, VB] and back.
static inline void load_block(
    const float* p, int64_t V, int64_t columns, int64_t rows, int64_t padded_rows, float* block
) {
    for (int64_t i = 0; i < padded_rows; i++)
        for (int n = 0; n < VB; n += W)
            store(block + i * VB + n, i < rows && n < columns ? load_n(p + i * V + n, columns - n) : vf{});
}

static inline void store_block(const float* block, int64_t V, int64_t columns, int64_t rows, float* p) {
    for (int64_t i = 0; i < rows; i++)
        for (int n = 0; n < VB && n < columns; n += W) store_n(p + i * V + n, load(block + i * VB + n), columns - n);
}

// The same address, but what lies there is to be read where it is used: of 16 vector registers none is free for it, and
// a sum that leaves its register for the stack instead takes three times as long a term.
static inline const float* in_memory(const float* p) {
    asm volatile("" : "+r"(p) : : "memory");
    return p;
}

static inline void load_row(const float* p, int64_t columns, vf* out) {
    for (int n = 0; n < NV; n++) out[n] = n * W < columns ? load_n(p + n * W, columns - n * W) : vf{};
}

static inline void store_row(float* p, const vf* x, int64_t columns) {
    for (int n = 0; n < NV && n * W < columns; n++) store_n(p + n * W, x[n], columns - n * W);
}

}  // namespace trivium::kda
