// What a decode step is told: weights, sizes and one sequence's memory. native.py fills the same structures by name.
#pragma once

#include "gemv.h"

namespace trivium {

// One decoder layer. Vectors are float32; what a layer of its kind does not have stays empty.
struct Layer {
    int64_t is_mla, is_dense, opens_block;
    const float *mixer_query, *mixer_norm, *ffn_query, *ffn_norm;
    // KDA: taps [4, 3 H K], rate = exp(A_log) [H], dt_bias [H, K], o_norm [K].
    Weight q, k, v, f_a, f_b, b;
    const float *taps, *rate, *dt_bias, *o_norm;
    // MLA.
    Weight q_a, q_b, kv_a, kv_b;
    const float *q_a_norm, *kv_a_norm;
    // Both.
    Weight g, o;
    // The dense MLP, or the shared experts.
    Weight gate, up, down;
    // MoE: w1, w3 [E, F, L] and w2 [E, L, F].
    Weight router, latent_down, latent_up, w1, w3, w2;
    const float *router_bias, *latent_norm;
};

struct Plan {
    int64_t num_layers, hidden, vocab;
    int64_t kda_heads, kda_dim;
    int64_t mla_heads, q_rank, kv_rank, nope_dim, rest_dim, value_dim;
    int64_t dense_width, num_experts, num_active, latent, expert_width, shared_width;
    double eps, latent_eps, lower_bound, situ_bound, situ_up_bound, routed_scale;
    Weight embed, lm_head;
    const float *out_query, *out_norm;
    const Layer* layers;
};

// One layer's memory of one sequence. KDA: the state [H, K, V], and the convolution's last four inputs [4, 3 H K], that
// of position t in row t mod 4. MLA: a row for each token, latent then shared key, each padded with zeros to `padded`.
struct Memory {
    float *state, *ring;
};

// To whole vectors of the widest instruction set.
static inline int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

}  // namespace trivium
