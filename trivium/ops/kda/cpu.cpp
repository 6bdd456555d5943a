// KDA token by token, a state's columns in blocks of VB that stay in the first-level cache. See trivium/ops/kda.
//
// A state's columns do not mix, so a block of them goes through the tokens alone, lanes along V. One pass over it ends
// a token and begins the next: write, read for the output, decay, read for the next miss. Four operations and one load
// and store an element; a chunk form of the same tokens needs as many, and sums in an order that a cut changes.
#include "kda.h"

using namespace trivium;
using namespace trivium::kda;

namespace {

// S <- diag(decay) S; read = S^T k
inline void begin_token(float* S, int64_t Kp, const float* decay, const float* k, vf* read) {
    vf r[NV] = {};
    for (int64_t i = 0; i < Kp; i++) {
        vf d = splat(decay[i]), key = splat(k[i]);
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) {
            vf s = load(S + i * VB + n * W) * d;
            r[n] = fma(key, s, r[n]);
            store(S + i * VB + n * W, s);
        }
    }
    for (int n = 0; n < NV; n++) read[n] = r[n];
}

// S <- S + write miss^T; out = S^T q; and, with NEXT, the next token's begin.
template <bool NEXT>
inline void end_token(
    float* S, int64_t Kp, const float* write, const float* miss, const float* q, vf* out, const float* next_decay,
    const float* next_k, vf* next_read
) {
    vf o[NV] = {}, r[NV] = {};
    for (int64_t i = 0; i < Kp; i++) {
        vf w = splat(write[i]), query = splat(q[i]), d, key;
        if (NEXT) d = splat(next_decay[i]), key = splat(next_k[i]);
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) {
            vf s = fma(w, load(miss + n * W), load(S + i * VB + n * W));
            o[n] = fma(query, s, o[n]);
            if (NEXT) {
                s = s * d;
                r[n] = fma(key, s, r[n]);
            }
            store(S + i * VB + n * W, s);
        }
    }
    for (int n = 0; n < NV; n++) out[n] = o[n], next_read[n] = r[n];
}

struct Outputs {
    float *o, *miss, *entering;  // miss and entering states are kept for backward, or null
};

// One block of columns through a tile of prepared tokens; v, o and miss point at the block's part of the first one.
void forward_tile(
    float* S, const Prepared& in, int64_t Kp, int64_t count, int64_t columns, const float* v, int64_t v_stride,
    float* o, float* miss, int64_t o_stride
) {
    vf read[NV], value[NV], e[NV], out[NV];
    alignas(64) float row[VB];
    begin_token(S, Kp, in.decay, in.k, read);
    for (int64_t t = 0; t < count; t++) {
        prefetch(v + (t + TILE) * v_stride, std::min<int64_t>(VB, columns));
        prefetch(o + (t + TILE) * o_stride, std::min<int64_t>(VB, columns));
        if (miss) prefetch(miss + (t + TILE) * o_stride, std::min<int64_t>(VB, columns));
        load_row(v + t * v_stride, columns, value);
        for (int n = 0; n < NV; n++) store(row + n * W, e[n] = value[n] - read[n]);
        if (miss) store_row(miss + t * o_stride, e, columns);
        const float *write = in.write + t * Kp, *q = in.q + t * Kp, *miss_now = in_memory(row);
        if (t + 1 < count)
            end_token<true>(S, Kp, write, miss_now, q, out, in.decay + (t + 1) * Kp, in.k + (t + 1) * Kp, read);
        else
            end_token<false>(S, Kp, write, miss_now, q, out, nullptr, nullptr, read);
        store_row(o + t * o_stride, out, columns);
    }
}

void forward_item(
    const Problem& pb, const Item& it, int64_t first_segment, Tokens v, const float* state, float* state_out,
    const Outputs& out
) {
    int64_t H = pb.H, K = pb.K, V = pb.V, Kp = pb.padded_k(), s = it.sequence;
    int64_t blocks = it.end_block - it.first_block, block_numel = Kp * VB;
    static thread_local Buffer state_buffer, token_buffer;
    float* states = state_buffer.at_least((it.end_head - it.first_head) * blocks * block_numel);
    Prepared in(token_buffer.at_least(Prepared::numel(TILE, Kp)), TILE, Kp);
    auto each_block = [&](int64_t h, auto&& work) {
        float* S = states + (h - it.first_head) * blocks * block_numel;
        for (int64_t b = it.first_block; b < it.end_block; b++, S += block_numel) work(b * VB, S);
    };
    for (int64_t h = it.first_head; h < it.end_head; h++)
        each_block(h, [&](int64_t j, float* S) { load_block(state + (s * H + h) * K * V + j, V, V - j, K, Kp, S); });
    int64_t start = pb.starts[s], end = pb.starts[s + 1];
    for (int64_t t = start; t < end; t += TILE) {
        int64_t count = std::min<int64_t>(TILE, end - t);
        for (int64_t h = it.first_head; h < it.end_head; h++) {
            prepare(pb, h, t, count, in, TILE);
            each_block(h, [&](int64_t j, float* S) {
                int64_t row = (t * H + h) * V + j;
                if (out.entering && (t - start) % SEGMENT == 0) {
                    int64_t segment = first_segment + (t - start) / SEGMENT;
                    store_block(S, V, V - j, K, out.entering + (segment * H + h) * K * V + j);
                }
                forward_tile(
                    S, in, Kp, count, V - j, v.p + t * v.stride + h * V + j, v.stride, out.o + row,
                    out.miss ? out.miss + row : nullptr, H * V
                );
            });
        }
    }
    for (int64_t h = it.first_head; h < it.end_head; h++)
        each_block(h, [&](int64_t j, float* S) { store_block(S, V, V - j, K, state_out + (s * H + h) * K * V + j); });
}

}  // namespace

// Token rows of q, k, v, decay_in and beta_in lie at the strides given, all else is contiguous. state_out may be state.
// miss [T, H, V] and entering [segments, H, K, V] are what backward needs, or null.
TRIVIUM_KERNEL void trivium_kda(
    int64_t num_threads, const float* q, const float* k, const float* v, const float* decay_in, const float* beta_in,
    const float* A_log, const float* dt_bias, const float* state, const int64_t* starts, float* o, float* state_out,
    float* miss, float* entering, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t decay_stride,
    int64_t beta_stride, int64_t S, int64_t H, int64_t K, int64_t V, float lower_bound
) {
    Problem pb{{q, q_stride}, {k, k_stride}, {decay_in, decay_stride}, {beta_in, beta_stride}, A_log, dt_bias, starts,
               S,             H,             K,                        V,                      lower_bound};
    std::vector<int64_t> first = first_segments(pb);
    std::vector<Item> items = items_of(num_threads, pb);
    parallel(num_threads, items.size(), [&](int64_t i) {
        forward_item(pb, items[i], first[items[i].sequence], {v, v_stride}, state, state_out, {o, miss, entering});
    });
}
