// KDA's gradients, token by token from the end, a segment of tokens at a time.
//
// Forward keeps the state that enters each segment and every token's miss. From these the decayed states of a segment
// are made again, one block of columns at a time; the gradient of the state then goes back over them. One pass ends a
// token and begins the one before it: eight operations an element, and two for the states. What q, k and the decay get are
// sums over columns, across lanes, for W rows at once.
#include "kda.h"

using namespace trivium;
using namespace trivium::kda;

namespace {

// What one block of columns gives to the gradients of a segment's tokens, before norms and gates.
struct Gradients {
    float *q, *k, *g;    // rows of Kp
    float *beta, *out;   // sums over columns of miss * d miss / beta, and of miss * d o

    static int64_t numel(int64_t tokens, int64_t Kp) { return tokens * (3 * Kp + 2); }
    Gradients(float* p, int64_t tokens, int64_t Kp)
        : q(p), k(q + tokens * Kp), g(k + tokens * Kp), beta(g + tokens * Kp), out(beta + tokens) {}
};

// A block's rows of a segment's tokens.
struct Columns {
    float miss[SEGMENT * VB], beta_miss[SEGMENT * VB], d_o[SEGMENT * VB];

    void load(
        const float* from_d_o, const float* from_miss, int64_t stride, int64_t columns, const float* beta, int64_t count
    ) {
        for (int64_t t = 0; t < count; t++) {
            vf x[NV], y[NV];
            prefetch(from_d_o + (t - SEGMENT) * stride, std::min<int64_t>(VB, columns));
            prefetch(from_miss + (t - SEGMENT) * stride, std::min<int64_t>(VB, columns));
            load_row(from_d_o + t * stride, columns, x);
            load_row(from_miss + t * stride, columns, y);
            for (int n = 0; n < NV; n++) {
                store(d_o + t * VB + n * W, x[n]);
                store(miss + t * VB + n * W, y[n]);
                store(beta_miss + t * VB + n * W, y[n] * beta[t]);
            }
        }
    }
};

// What blocks of one head may leave to be added up, 256 MB; beyond that a head is not split.
constexpr int64_t MOST_SHARED = 1 << 26;

// Floats between two tokens' decayed states: not a power of two, or all of them fall into one set of the cache.
inline int64_t state_stride(int64_t Kp) { return Kp * VB + 2 * 16; }

// The decayed states of a segment, from the state that enters it and the misses; a row's own way is in registers.
void decayed_states(const float* S, const Prepared& in, int64_t Kp, int64_t count, const Columns& at, float* out) {
    int64_t stride = state_stride(Kp);
    for (int64_t i = 0; i < Kp; i += 2) {  // two rows: one's chain of dependent sums would leave half of the time idle
        vf a[NV], b[NV];
        for (int n = 0; n < NV; n++) a[n] = load(S + i * VB + n * W), b[n] = load(S + (i + 1) * VB + n * W);
        for (int64_t t = 0; t < count; t++) {
            const float *decay = in.decay + t * Kp + i, *write = in.write + t * Kp + i;
            float* row = out + t * stride + i * VB;
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) {
                vf e = load(at.miss + t * VB + n * W);
                a[n] = a[n] * decay[0], b[n] = b[n] * decay[1];
                store(row + n * W, a[n]), store(row + VB + n * W, b[n]);
                a[n] = fma(write[0], e, a[n]), b[n] = fma(write[1], e, b[n]);
            }
        }
    }
}

// dS <- dS + q do^T; read = dS^T k
inline void begin_adjoint(float* dS, int64_t Kp, const float* q, const float* d_o, const float* k, vf* read) {
    vf r[NV] = {};
    for (int64_t i = 0; i < Kp; i++) {
        vf query = splat(q[i]), key = splat(k[i]);
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) {
            vf x = fma(query, load(d_o + n * W), load(dS + i * VB + n * W));
            r[n] = fma(key, x, r[n]);
            store(dS + i * VB + n * W, x);
        }
    }
    for (int n = 0; n < NV; n++) read[n] = r[n];
}

// From the gradient of the state behind a token to that before it, and with PREVIOUS the token before's begin. S is the
// decayed state, minus_d the negative gradient of the miss. Sums over columns go out W rows at a time.
template <bool PREVIOUS>
inline void end_adjoint(
    float* dS, const float* S, int64_t Kp, const float* k, const float* decay, const float* beta_miss,
    const vf* minus_d, const float* d_o, const float* q_before, const float* d_o_before, const float* k_before,
    vf* read, bool add, float* dq, float* dk, float* dg
) {
    vf m[NV], r[NV] = {};
    for (int n = 0; n < NV; n++) m[n] = minus_d[n];
    auto put = [&](float* p, vf* rows) { store(p, add ? load(p) + sums(rows) : sums(rows)); };
    for (int64_t group = 0; group < Kp; group += W) {
        vf rows_q[W], rows_k[W], rows_g[W];
        for (int w = 0; w < W; w++) {
            int64_t i = group + w;
            vf key = splat(k[i]), d = splat(decay[i]), query, key_before;
            if (PREVIOUS) query = splat(q_before[i]), key_before = splat(k_before[i]);
            vf sum_q = {}, sum_k = {}, sum_g = {};
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) {
                vf x = load(dS + i * VB + n * W), s = load(S + i * VB + n * W);
                vf o = load(d_o + n * W), e = load(beta_miss + n * W);
                sum_k = n ? fma(x, e, sum_k) : x * e;
                sum_k = fma(s, m[n], sum_k);
                sum_q = n ? fma(s, o, sum_q) : s * o;
                x = fma(key, m[n], x);
                sum_g = n ? fma(x, s, sum_g) : x * s;
                x = x * d;
                if (PREVIOUS) {
                    x = fma(query, load(d_o_before + n * W), x);
                    r[n] = fma(key_before, x, r[n]);
                }
                store(dS + i * VB + n * W, x);
            }
            rows_q[w] = sum_q, rows_k[w] = sum_k, rows_g[w] = sum_g;
        }
        put(dq + group, rows_q), put(dk + group, rows_k), put(dg + group, rows_g);
    }
    for (int n = 0; n < NV; n++) read[n] = r[n];
}

// One block of columns back through a segment. dS holds the gradient of the state behind it, then of that before it.
void backward_segment(
    float* dS, const float* states, const Prepared& in, int64_t Kp, int64_t count, int64_t columns, const Columns& at,
    float* dv, int64_t dv_stride, bool add, const Gradients& out
) {
    int64_t stride = state_stride(Kp);
    vf read[NV];
    int64_t last = count - 1;
    begin_adjoint(dS, Kp, in.q + last * Kp, at.d_o + last * VB, in.k + last * Kp, read);
    for (int64_t t = last; t >= 0; t--) {
        vf d_miss[NV], minus_d[NV], d_beta = {}, miss_d_o = {};
        for (int n = 0; n < NV; n++) {
            vf e = load(at.miss + t * VB + n * W);
            d_beta = fma(e, read[n], d_beta);
            miss_d_o = fma(e, load(at.d_o + t * VB + n * W), miss_d_o);
            d_miss[n] = read[n] * in.beta[t];
            minus_d[n] = -d_miss[n];
        }
        store_row(dv + t * dv_stride, d_miss, columns);
        out.beta[t] = add ? out.beta[t] + sum(d_beta) : sum(d_beta);
        out.out[t] = add ? out.out[t] + sum(miss_d_o) : sum(miss_d_o);
        int64_t row = t * Kp, before = row - Kp;
        const float *S = states + t * stride, *e = at.beta_miss + t * VB, *d_o = at.d_o + t * VB;
        float *dq = out.q + row, *dk = out.k + row, *dg = out.g + row;
        if (t > 0)
            end_adjoint<true>(
                dS, S, Kp, in.k + row, in.decay + row, e, minus_d, d_o, in.q + before, d_o - VB, in.k + before, read,
                add, dq, dk, dg
            );
        else
            end_adjoint<false>(
                dS, S, Kp, in.k, in.decay, e, minus_d, d_o, nullptr, nullptr, nullptr, read, add, dq, dk, dg
            );
    }
}

struct InputGradients {
    float *q, *k, *v, *decay_in, *beta_in;  // contiguous
    float *A_log, *dt_bias;                 // one row a segment
};

// e / (1 + e)^2 with e = exp(-|x|) <= 1: y (1 - y) is 0 in float32 from x = 17 on.
inline vf sigmoid_slope(vf x) {
    vf e = exp(-abs(x)), one = 1.0f + e;
    return e / (one * one);
}

// Through the norms, the gate and beta's sigmoid, to the raw inputs of a segment's tokens, W at a time. Writes over
// `d.q`. y = scale norm x, norm = (sum x^2 + eps)^-1/2, has dx = scale norm (dy - u (u . dy)) with u = norm x.
void finish_segment(
    const Problem& pb, int64_t h, const Segment& seg, int64_t segment_idx, const Prepared& in, const Gradients& d,
    const InputGradients& out
) {
    int64_t H = pb.H, K = pb.K, Kp = pb.padded_k();
    float q_scale = 1.0f / __builtin_sqrtf((float)K), A = exp_A(pb, h);
    const float* bias = pb.dt_bias + h * K;
    float* d_bias = out.dt_bias + (segment_idx * H + h) * K;
    std::fill_n(d_bias, K, 0.0f);
    vf d_A = {};
    for (int64_t start = 0; start < seg.count; start += W) {
        int64_t end = std::min<int64_t>(start + W, seg.count);
        vf q_products[W] = {}, k_products[W] = {};
        float q_along[W], k_along[W], beta_in[W] = {}, beta_slope[W];  // the first two: u . dy
        for (int64_t t = start; t < end; t++) {
            const float* q = pb.q.p + (seg.first + t) * pb.q.stride + h * K;
            float d_out = d.out[t];
            vf q_product = {}, k_product = {};
            columns(K, [&](int64_t i, int64_t n) {
                int64_t at = t * Kp + i;
                vf dq = fma(d_out, load(in.write + at), load(d.q + at));
                store(d.q + at, dq);
                q_product = fma(load_n(q + i, n), dq, q_product);
                k_product = fma(load(in.k + at), load(d.k + at), k_product);
            });
            q_products[t - start] = q_product, k_products[t - start] = k_product;
            beta_in[t - start] = pb.beta_in.p[(seg.first + t) * pb.beta_in.stride + h];
        }
        store(q_along, sums(q_products) * load(in.q_norm + start));
        store(k_along, sums(k_products));
        store(beta_slope, sigmoid_slope(load(beta_in)));
        for (int64_t t = start; t < end; t++) {
            int64_t token = seg.first + t, row = (token * H + h) * K;
            const float* q = pb.q.p + token * pb.q.stride + h * K;
            const float* decay_in = pb.decay_in.p + token * pb.decay_in.stride + h * K;
            float q_scaled = q_scale * in.q_norm[t], k_norm = in.k_norm[t];
            float along_q = -q_along[t - start] * in.q_norm[t], along_k = -k_along[t - start];
            out.beta_in[token * H + h] = d.beta[t] * beta_slope[t - start];
            columns(K, [&](int64_t i, int64_t n) {
                int64_t at = t * Kp + i;
                store_n(out.q + row + i, q_scaled * fma(along_q, load_n(q + i, n), load(d.q + at)), n);
                store_n(out.k + row + i, k_norm * fma(along_k, load(in.k + at), load(d.k + at)), n);
                vf x = A * (load_n(decay_in + i, n) + load_n(bias + i, n));
                vf dx = load(d.g + at) * pb.lower_bound * sigmoid_slope(x);
                d_A = fma(dx, x, d_A);
                store_n(out.decay_in + row + i, dx * A, n);
                store_n(d_bias + i, fma(A, dx, load_n(d_bias + i, n)), n);
            });
        }
    }
    out.A_log[segment_idx * H + h] = sum(d_A);
}

struct Incoming {
    const float *d_o, *d_state, *miss, *entering;  // d_state may be null
};

// An item back through its sequence. `shared`: each segment's gradients are kept, a block at a time, for finish_shared;
// else they are summed over the blocks, in the same order, and finished here.
void backward_item(
    const Problem& pb, const Item& it, const std::vector<Segment>& segments, int64_t first_segment, int64_t end_segment,
    const Incoming& from, float* d_state_in, const InputGradients& out, float* shared
) {
    int64_t H = pb.H, K = pb.K, V = pb.V, Kp = pb.padded_k(), s = it.sequence;
    int64_t blocks = it.end_block - it.first_block, block_numel = Kp * VB;
    static thread_local Buffer state_buffer, token_buffer, gradient_buffer, adjoint_buffer;
    static thread_local Columns at;
    float* adjoints = adjoint_buffer.at_least((it.end_head - it.first_head) * blocks * block_numel);
    float* S = state_buffer.at_least(block_numel + SEGMENT * state_stride(Kp));
    Prepared in(token_buffer.at_least(Prepared::numel(SEGMENT, Kp)), SEGMENT, Kp);
    int64_t numel = Gradients::numel(SEGMENT, Kp);
    float* own = gradient_buffer.at_least(numel);
    auto each_block = [&](int64_t h, auto&& work) {
        float* dS = adjoints + (h - it.first_head) * blocks * block_numel;
        for (int64_t b = it.first_block; b < it.end_block; b++, dS += block_numel) work(b, b * VB, dS);
    };
    std::fill_n(adjoints, (it.end_head - it.first_head) * blocks * block_numel, 0.0f);
    for (int64_t h = it.first_head; h < it.end_head && from.d_state; h++)
        each_block(h, [&](int64_t, int64_t j, float* dS) {
            load_block(from.d_state + (s * H + h) * K * V + j, V, V - j, K, Kp, dS);
        });
    for (int64_t idx = end_segment - 1; idx >= first_segment; idx--) {
        const Segment& seg = segments[idx];
        for (int64_t h = it.first_head; h < it.end_head; h++) {
            prepare(pb, h, seg.first, seg.count, in, -SEGMENT);
            for (int64_t t = seg.first; t < seg.first + seg.count; t++) {
                for (float* p : {out.q, out.k, out.decay_in}) prefetch(p + (t * H + h) * K, K);
                prefetch(out.v + (t * H + h) * V, V);
            }
            each_block(h, [&](int64_t block, int64_t j, float* dS) {
                int64_t row = (seg.first * H + h) * V + j;
                at.load(from.d_o + row, from.miss + row, H * V, V - j, in.beta, seg.count);
                load_block(from.entering + (idx * H + h) * K * V + j, V, V - j, K, Kp, S);
                decayed_states(S, in, Kp, seg.count, at, S + block_numel);
                float* to = shared ? shared + ((block * (int64_t)segments.size() + idx) * H + h) * numel : own;
                backward_segment(
                    dS, S + block_numel, in, Kp, seg.count, V - j, at, out.v + row, H * V,
                    !shared && block > it.first_block, Gradients(to, SEGMENT, Kp)
                );
            });
            if (!shared) finish_segment(pb, h, seg, idx, in, Gradients(own, SEGMENT, Kp), out);
        }
    }
    for (int64_t h = it.first_head; h < it.end_head; h++)
        each_block(h, [&](int64_t, int64_t j, float* dS) {
            store_block(dS, V, V - j, K, d_state_in + (s * H + h) * K * V + j);
        });
}

// The blocks' gradients summed in rising order, then finished: the other half of `shared`.
void finish_shared(
    const Problem& pb, int64_t h, const std::vector<Segment>& segments, int64_t idx, const float* shared,
    const InputGradients& out
) {
    int64_t Kp = pb.padded_k(), numel = Gradients::numel(SEGMENT, Kp);
    static thread_local Buffer token_buffer, gradient_buffer;
    Prepared in(token_buffer.at_least(Prepared::numel(SEGMENT, Kp)), SEGMENT, Kp);
    prepare(pb, h, segments[idx].first, segments[idx].count, in, 0);
    float* total = gradient_buffer.at_least(numel);
    for (int64_t block = 0; block < pb.blocks(); block++) {
        const float* part = shared + ((block * (int64_t)segments.size() + idx) * pb.H + h) * numel;
        for (int64_t i = 0; i < numel; i++) total[i] = block ? total[i] + part[i] : part[i];
    }
    finish_segment(pb, h, segments[idx], idx, in, Gradients(total, SEGMENT, Kp), out);
}

}  // namespace

// `miss` and `entering` as trivium_kda left them; d_state may be null. All gradients are contiguous.
TRIVIUM_KERNEL void trivium_kda_backward(
    int64_t num_threads, const float* q, const float* k, const float* decay_in, const float* beta_in,
    const float* A_log, const float* dt_bias, const int64_t* starts, const float* miss, const float* entering,
    const float* d_o, const float* d_state, float* dq, float* dk, float* dv, float* d_decay_in, float* d_beta_in,
    float* d_A_log, float* d_dt_bias, float* d_state_in, int64_t q_stride, int64_t k_stride, int64_t decay_stride,
    int64_t beta_stride,
    int64_t S, int64_t H, int64_t K, int64_t V, float lower_bound
) {
    guarded([&] {
        Problem pb{{q, q_stride}, {k, k_stride}, {decay_in, decay_stride}, {beta_in, beta_stride}, A_log, dt_bias, starts,
                   S,             H,             K,                        V,                      lower_bound};
        std::vector<Segment> segments = segments_of(pb);
        std::vector<int64_t> first = first_segments(pb);
        int64_t count = segments.size(), blocks = pb.blocks(), numel = Gradients::numel(SEGMENT, pb.padded_k());
        std::vector<float> segment_A(count * H), segment_bias(count * H * K);
        Incoming from{d_o, d_state, miss, entering};
        InputGradients out{dq, dk, dv, d_decay_in, d_beta_in, segment_A.data(), segment_bias.data()};
        bool room = blocks * count * H * numel <= MOST_SHARED;
        std::vector<Item> items = items_of(num_threads, pb, room);
        bool whole = items.empty() || items[0].end_block - items[0].first_block == blocks;
        Floats shared(whole ? nullptr : new float[blocks * count * H * numel]);
        parallel(num_threads, items.size(), [&](int64_t i) {
            int64_t s = items[i].sequence;
            backward_item(pb, items[i], segments, first[s], first[s + 1], from, d_state_in, out, shared.get());
        });
        if (shared)
            parallel(num_threads, count * H, [&](int64_t item) {
                finish_shared(pb, item % H, segments, item / H, shared.get(), out);
            });
        // In double: thousands of segments may nearly cancel.
        for (int64_t h = 0; h < H; h++) {
            double total = 0.0;
            for (int64_t idx = 0; idx < count; idx++) total += segment_A[idx * H + h];
            d_A_log[h] = (float)total;
        }
        std::vector<double> total(H * K);
        for (int64_t idx = 0; idx < count; idx++)
            for (int64_t i = 0; i < H * K; i++) total[i] += segment_bias[idx * H * K + i];
        for (int64_t i = 0; i < H * K; i++) d_dt_bias[i] = (float)total[i];
    });
}
