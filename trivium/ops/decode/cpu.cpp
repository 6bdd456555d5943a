// One new token of one sequence through the whole text model: see docs/model.md, whose equations stand at each part.
//
// The cost is the weights' bytes. So there is one parallel region, weights are read in long runs, products that do not
// need each other share a phase between two barriers, and what is small is computed by every thread for itself.
#include <omp.h>
#include <time.h>

#include <algorithm>

#include "decode_attend.h"
#include "decode_team.h"
#include "kernel.h"
#include "situ.h"

namespace trivium {

// Parts of a step that are timed apart; names in native.py.
enum Phase {
    KDA_IN, KDA_STATE, KDA_OUT, MLA_IN, MLA_QUERY, MLA_KEYS, MLA_VALUE, MLA_OUT, DENSE_IN, DENSE_OUT, MOE_IN,
    MOE_UP, MOE_DOWN, MOE_OUT, HEAD, NUM_PHASES
};

// --- Small vectors -------------------------------------------------------------------------------------------------

static inline float dot(const float* a, const float* b, int64_t n) {
    vf sums = {};
    for (int64_t i = 0; i < n; i += W) sums = fma(load_n(a + i, n - i), load_n(b + i, n - i), sums);
    return sum(sums);
}

template <typename F>
static inline void each(int64_t n, float* out, F&& f) {
    for (int64_t i = 0; i < n; i += W) store_n(out + i, f(i, n - i), n - i);
}

// (1)
static inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    float scale = 1.0f / __builtin_sqrtf(dot(x, x, n) / n + eps);
    each(n, out, [&](int64_t i, int64_t m) { return load_n(x + i, m) * scale * load_n(weight + i, m); });
}

// gate = SiTU(gate, up), (2)
static inline void situ(float* gate, const float* up, int64_t n, float bound, float up_bound) {
    each(n, gate, [&](int64_t i, int64_t m) {
        return Situ(load_n(gate + i, m), load_n(up + i, m), {bound, up_bound}).value();
    });
}

// --- The state of KDA, (29)-(32) -----------------------------------------------------------------------------------

constexpr int COLUMNS = 32;  // of V at a time: with K = 64 or 128 they stay in the first-level cache

// q and k are normalised, q scaled. One pass reads the state and sees what it says of k and q; one writes it.
static void kda_columns(
    int64_t K, int64_t V, int64_t column, const float* decay, const float* q, const float* k, const float* v, float beta,
    float q_dot_k, float* state, float* o
) {
    constexpr int N = COLUMNS / W;
    int64_t width = std::min<int64_t>(COLUMNS, V - column);
    auto pass = [&](auto load_at, auto store_at) {
        vf said[N] = {}, seen[N] = {};
        for (int64_t i = 0; i < K; i++) {
            const float* row = state + i * V + column;
            float k_i = k[i] * decay[i], q_i = q[i] * decay[i];
#pragma GCC unroll 8
            for (int c = 0; c < N; c++) {
                vf s = load_at(row, c);
                said[c] = fma(k_i, s, said[c]);
                seen[c] = fma(q_i, s, seen[c]);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < N; c++) {
            said[c] = beta * (load_at(v, c) - said[c]);
            store_at(o, c, fma(q_dot_k, said[c], seen[c]));
        }
        for (int64_t i = 0; i < K; i++) {
            float* row = state + i * V + column;
#pragma GCC unroll 8
            for (int c = 0; c < N; c++) store_at(row, c, fma(k[i], said[c], decay[i] * load_at(row, c)));
        }
    };
    if (width == COLUMNS)
        pass([](const float* p, int c) { return load(p + c * W); }, [](float* p, int c, vf x) { store(p + c * W, x); });
    else {
        auto left = [&](int c) { return std::clamp<int64_t>(width - c * W, 0, W); };
        pass(
            [&](const float* p, int c) { return load_n(p + c * W, left(c)); },
            [&](float* p, int c, vf x) { store_n(p + c * W, x, left(c)); }
        );
    }
}

// --- The step ------------------------------------------------------------------------------------------------------

// What the threads share. Every field is written in one phase and read in later ones.
struct Shared {
    Barrier barrier;
    const Plan& plan;
    const Memory* memory;
    int64_t token_id, position;
    float* logits;
    double* seconds;  // by phase, or null
    float* sources;   // [blocks + 1, D]: closed blocks, then the running sum
    float *low, *gate, *beta, *mixed, *query, *peak, *total, *mix, *hidden, *shared_hidden, *scores, *latent, *routed;
};

class Worker {
  public:
    Worker(Shared& shared, int64_t id, int64_t count, float* own)
        : s(shared), plan(shared.plan), id_(id), count_(count), own_(own) {
        if (s.seconds) start_ = seconds();
    }

    void run() {
        int64_t D = plan.hidden;
        x_ = take(widest(plan)), tmp_ = take(widest(plan)), y_ = take(widest(plan));
        if (id_ == 0) {
            float one = 1.0f;
            std::fill_n(s.sources, D, 0.0f);
            add_rows(plan.embed, D, s.token_id, s.token_id + 1, &one, s.sources);
        }
        s.barrier.wait(count_);
        for (int64_t l = 0; l < plan.num_layers; l++) {
            const Layer& layer = plan.layers[l];
            read(layer.mixer_query, layer.mixer_norm);
            if (layer.opens_block) closed_++, fresh_ = true;
            layer.is_mla ? mla(layer, s.memory[l]) : kda(layer, s.memory[l]);
            read(layer.ffn_query, layer.ffn_norm);
            layer.is_dense ? dense(layer) : moe(layer);
        }
        read(plan.out_query, plan.out_norm);
        Range rows = share(plan.vocab, STREAMS, id_, count_);
        gemv(plan.lm_head, D, rows.first, rows.last, x_, s.logits);
        done(HEAD);
    }

    // Of `own`, and of each of its vectors.
    static int64_t widest(const Plan& p) {
        int64_t most = std::max({p.hidden, 3 * p.kda_heads * p.kda_dim, p.dense_width, p.shared_width, p.num_experts});
        most = std::max({most, p.latent, p.expert_width * p.num_active, p.q_rank, p.kv_rank + p.rest_dim});
        return padded(std::max({most, p.mla_heads * p.value_dim, p.nope_dim + p.rest_dim})) + 16;
    }
    static int64_t own_size(const Plan& p) {
        return 3 * widest(p) + 256 * padded(p.mla_heads) + 8 * (p.kda_dim + 16) + p.kv_rank + 64 + 2 * p.num_experts;
    }

  private:
    // x = norm(read of the stream), (7)-(11) and (1).
    void read(const float* query, const float* norm) {
        int64_t D = plan.hidden, num = closed_ + 1;
        float peak = -__builtin_inff(), total = 0.0f;
        float weight[MAX_SOURCES];
        for (int64_t n = 0; n < num; n++) {
            const float* v = s.sources + n * D;
            vf squares = {}, products = {};
            for (int64_t i = 0; i < D; i += W) {
                vf x = load_n(v + i, D - i);
                squares = fma(x, x, squares);
                products = fma(x, load_n(query + i, D - i), products);
            }
            weight[n] = sum(products) / __builtin_sqrtf(sum(squares) / D + (float)plan.eps);
            peak = std::max(peak, weight[n]);
        }
        for (int64_t n = 0; n < num; n++) total += weight[n] = exp(splat(weight[n] - peak))[0];
        each(D, x_, [&](int64_t i, int64_t m) {
            vf y = {};
            for (int64_t n = 0; n < num; n++) y = fma(weight[n] / total, load_n(s.sources + n * D + i, m), y);
            return y;
        });
        rms_norm(x_, norm, D, plan.eps, x_);
    }

    // (16): rows of the running sum, which is this thread's to write.
    void add(Range rows, const float* output) {
        float* sums = s.sources + closed_ * plan.hidden;
        for (int64_t i = rows.first; i < rows.last; i++) sums[i] = fresh_ ? output[i] : sums[i] + output[i];
    }

    void add_product(const Weight& w, int64_t K, const float* x, Phase phase) {
        Range rows = share(plan.hidden, STREAMS, id_, count_);
        gemv(w, K, rows.first, rows.last, x, y_);
        add(rows, y_);
        done(phase);
        fresh_ = false;
    }

    void products(const Product* list, int num) {
        for (int i = 0; i < num; i++) {
            const Product& p = list[i];
            Range rows = share(list, num, i, id_, count_);
            gemv(*p.w, p.K, rows.first, rows.last, p.x, p.y);
            if (!p.up) continue;
            gemv(*p.up, p.K, rows.first, rows.last, p.x, tmp_);
            situ(p.y + rows.first, tmp_ + rows.first, rows.last - rows.first, plan.situ_bound, plan.situ_up_bound);
        }
    }

    // (19)-(33), (42)-(44)
    void kda(const Layer& w, const Memory& memory) {
        int64_t D = plan.hidden, H = plan.kda_heads, K = plan.kda_dim, width = H * K;
        float* line = memory.ring + (s.position & 3) * 3 * width;
        const Product list[] = {
            {&w.q, nullptr, width, D, x_, line},          {&w.k, nullptr, width, D, x_, line + width},
            {&w.v, nullptr, width, D, x_, line + 2 * width}, {&w.g, nullptr, width, D, x_, s.gate},
            {&w.f_a, nullptr, K, D, x_, s.low},           {&w.b, nullptr, H, D, x_, s.beta},
        };
        products(list, 6);
        done(KDA_IN);

        float* mark = own_;
        float *q = take(K), *k = take(K), *v = take(COLUMNS), *decay = take(K);
        int64_t blocks = (K + COLUMNS - 1) / COLUMNS, head = -1;
        Range items = share(H * blocks, 1, id_, count_);
        float beta = 0, q_dot_k = 0;
        for (int64_t item = items.first; item < items.last; item++) {
            int64_t column = item % blocks * COLUMNS;
            if (item / blocks != head) {
                head = item / blocks;
                fetch(memory.state + head * K * K, K * K);
                gemv(behind(w.f_b, head * K, K), K, 0, K, s.low, decay);
                each(K, decay, [&](int64_t i, int64_t m) {
                    vf z = w.rate[head] * (load_n(decay + i, m) + load_n(w.dt_bias + head * K + i, m));
                    return exp((float)plan.lower_bound * sigmoid(z));
                });
                convolve(w, memory, head * K, K, q);
                convolve(w, memory, width + head * K, K, k);
                float q_scale = 1.0f / __builtin_sqrtf(dot(q, q, K) + 1e-6f) / __builtin_sqrtf((float)K);
                float k_scale = 1.0f / __builtin_sqrtf(dot(k, k, K) + 1e-6f);
                each(K, q, [&](int64_t i, int64_t m) { return load_n(q + i, m) * q_scale; });
                each(K, k, [&](int64_t i, int64_t m) { return load_n(k + i, m) * k_scale; });
                q_dot_k = dot(q, k, K);
                beta = sigmoid(splat(s.beta[head]))[0];
            }
            convolve(w, memory, 2 * width + head * K + column, std::min<int64_t>(COLUMNS, K - column), v);
            kda_columns(
                K, K, column, decay, q, k, v, beta, q_dot_k, memory.state + head * K * K, s.mixed + head * K + column
            );
        }
        own_ = mark;
        done(KDA_STATE);

        for (int64_t h = 0; h < H; h++) rms_norm(s.mixed + h * K, w.o_norm, K, plan.eps, x_ + h * K);
        each(width, x_, [&](int64_t i, int64_t m) { return load_n(x_ + i, m) * sigmoid(load_n(s.gate + i, m)); });
        add_product(w.o, width, x_, KDA_OUT);
    }

    // On its way while a head's small vectors are made.
    static void fetch(const float* p, int64_t n) {
        for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(p + i, 1, 2);
    }

    // (20)-(22): channels from `first` on of q|k|v.
    void convolve(const Layer& w, const Memory& memory, int64_t first, int64_t n, float* out) {
        int64_t X = 3 * plan.kda_heads * plan.kda_dim;
        each(n, out, [&](int64_t i, int64_t m) {
            vf z = {};
            for (int tap = 0; tap < 4; tap++) {
                const float* input = memory.ring + ((s.position + 1 + tap) & 3) * X;
                z = fma(load_n(w.taps + tap * X + first + i, m), load_n(input + first + i, m), z);
            }
            return z * sigmoid(z);
        });
    }

    // (45)-(54)
    void mla(const Layer& w, const Memory& memory) {
        int64_t D = plan.hidden, H = plan.mla_heads, Q = plan.q_rank, R = plan.kv_rank, J = plan.rest_dim;
        int64_t N = plan.nope_dim, V = plan.value_dim, rank = padded(R), stride = rank + padded(J);
        const Product list[] = {
            {&w.q_a, nullptr, Q, D, x_, s.low},
            {&w.kv_a, nullptr, R + J, D, x_, s.latent},
            {&w.g, nullptr, H * V, D, x_, s.gate},
        };
        products(list, 3);
        done(MLA_IN);

        float* row = memory.state + s.position * stride;
        if (id_ == count_ - 1) {
            std::fill_n(row, stride, 0.0f);
            rms_norm(s.latent, w.kv_a_norm, R, plan.latent_eps, row);
            std::copy_n(s.latent + R, J, row + rank);
        }
        rms_norm(s.low, w.q_a_norm, Q, plan.latent_eps, x_);
        float scale = 1.0f / __builtin_sqrtf((float)(N + J));
        Range heads = share(H, 1, id_, count_);
        for (int64_t h = heads.first; h < heads.last; h++) {
            float* query = s.query + h * stride;
            std::fill_n(query, stride, 0.0f);
            gemv(behind(w.q_b, h * (N + J), Q), Q, 0, N + J, x_, tmp_);
            for (int64_t i = 0; i < N + J; i++) tmp_[i] *= scale;
            add_rows(w.kv_b, R, h * (N + V), h * (N + V) + N, tmp_, query);
            std::copy_n(tmp_ + N, J, query + rank);
        }
        done(MLA_QUERY);

        int64_t num_keys = s.position + 1, size = keys_a_block(num_keys), blocks = (num_keys + size - 1) / size;
        float* scores = own_;
        Range mine = share(blocks, 1, id_, count_);
        std::fill_n(scores, mine.last > mine.first ? size * padded(H) : 0, 0.0f);
        for (int64_t b = mine.first; b < mine.last; b++) {
            int64_t last = std::min(num_keys, (b + 1) * size), ahead = std::min(num_keys, mine.last * size) - last;
            attend_block(
                {memory.state, stride, R}, H, s.query, b * size, last, std::min(ahead, size), scores,
                s.peak + b * padded(H), s.total + b * padded(H), s.mix + b * H * rank
            );
        }
        done(MLA_KEYS);

        Range values = share(H * V, STREAMS, id_, count_);
        float* o = own_;
        for (int64_t i = values.first, end; i < values.last; i = end) {
            int64_t h = i / V;
            end = std::min(values.last, (h + 1) * V);
            merge(h, blocks, o);
            gemv(behind(w.kv_b, h * (N + V) + N, R), R, i - h * V, end - h * V, o, s.mixed + h * V);
        }
        each(values.last - values.first, s.mixed + values.first, [&](int64_t i, int64_t m) {
            return load_n(s.mixed + values.first + i, m) * sigmoid(load_n(s.gate + values.first + i, m));
        });
        done(MLA_VALUE);

        add_product(w.o, H * V, s.mixed, MLA_OUT);
    }

    // A head's mean of the latents from the blocks', in their order.
    void merge(int64_t h, int64_t blocks, float* o) {
        int64_t H = padded(plan.mla_heads), rank = padded(plan.kv_rank);
        float peak = -__builtin_inff(), total = 0.0f;
        for (int64_t b = 0; b < blocks; b++) peak = std::max(peak, s.peak[b * H + h]);
        std::fill_n(o, rank, 0.0f);
        for (int64_t b = 0; b < blocks; b++) {
            float factor = exp(splat(s.peak[b * H + h] - peak))[0];
            total += factor * s.total[b * H + h];
            const float* mix = s.mix + (b * plan.mla_heads + h) * rank;
            for (int64_t r = 0; r < rank; r += W) store(o + r, fma(factor, load(mix + r), load(o + r)));
        }
        for (int64_t r = 0; r < rank; r += W) store(o + r, load(o + r) / total);
    }

    // (3)
    void dense(const Layer& w) {
        const Product list[] = {{&w.gate, &w.up, plan.dense_width, plan.hidden, x_, s.hidden}};
        products(list, 1);
        done(DENSE_IN);
        add_product(w.down, plan.dense_width, s.hidden, DENSE_OUT);
    }

    // (56)-(62)
    void moe(const Layer& w) {
        int64_t D = plan.hidden, E = plan.num_experts, A = plan.num_active, L = plan.latent, F = plan.expert_width;
        const Product list[] = {
            {&w.gate, &w.up, plan.shared_width, D, x_, s.shared_hidden},
            {&w.latent_down, nullptr, L, D, x_, s.latent},
            {&w.router, nullptr, E, D, x_, s.scores},
        };
        products(list, 3);
        done(MOE_IN);

        int64_t experts[MAX_ACTIVE];
        float weights[MAX_ACTIVE];
        select(w, experts, weights);
        bool packed = w.w1.kind == MXFP4;
        if (packed) mxfp4_order(s.latent, L, x_);
        Weight gate[MAX_ACTIVE], up[MAX_ACTIVE];
        Product routed[MAX_ACTIVE];
        for (int64_t a = 0; a < A; a++) {
            gate[a] = behind(w.w1, experts[a] * F, L), up[a] = behind(w.w3, experts[a] * F, L);
            routed[a] = {&gate[a], &up[a], F, L, packed ? x_ : s.latent, s.hidden + a * F};
        }
        products(routed, A);
        done(MOE_UP);

        Range rows = share(L, STREAMS, id_, count_);
        std::fill(s.routed + rows.first, s.routed + rows.last, 0.0f);
        for (int64_t a = 0; a < A; a++) {
            const float* hidden = s.hidden + a * F;
            if (packed) mxfp4_order(hidden, F, x_), hidden = x_;
            gemv(behind(w.w2, experts[a] * L, F), F, rows.first, rows.last, hidden, y_);
            for (int64_t i = rows.first; i < rows.last; i++) s.routed[i] += weights[a] * y_[i];
        }
        done(MOE_DOWN);

        rms_norm(s.routed, w.latent_norm, L, plan.eps, x_);
        rows = share(D, STREAMS, id_, count_);
        gemv(w.latent_up, L, rows.first, rows.last, x_, y_);
        gemv(w.down, plan.shared_width, rows.first, rows.last, s.shared_hidden, tmp_);
        for (int64_t i = rows.first; i < rows.last; i++) y_[i] += tmp_[i];
        add(rows, y_);
        done(MOE_OUT);
        fresh_ = false;
    }

    // (56)-(58): the chosen experts in rising order, and their weights. A nan is larger than no number.
    void select(const Layer& w, int64_t* experts, float* weights) {
        int64_t E = plan.num_experts, A = plan.num_active, found = 0;
        float *score = tmp_, *choice = y_, total = 1e-20f;
        each(E, score, [&](int64_t i, int64_t m) { return sigmoid(load_n(s.scores + i, m)); });
        each(E, choice, [&](int64_t i, int64_t m) { return load_n(score + i, m) + load_n(w.router_bias + i, m); });
        const float taken = -__builtin_inff();
        for (int64_t e = 0; e < E; e++)
            if (!(choice[e] > -1e30f)) choice[e] = -1e30f;
        for (int64_t a = 0; a < A; a++) {
            int64_t best = 0;
            for (int64_t e = 1; e < E; e++)
                if (choice[e] > choice[best]) best = e;
            choice[best] = taken;
        }
        for (int64_t e = 0; e < E; e++)
            if (choice[e] == taken) experts[found++] = e, total += score[e];
        for (int64_t a = 0; a < A; a++) weights[a] = score[experts[a]] / total * (float)plan.routed_scale;
    }

    void done(Phase phase) {
        s.barrier.wait(count_);
        if (!s.seconds || id_) return;
        double now = seconds();
        s.seconds[phase] += now - start_;
        start_ = now;
    }

    // A thread that is alone waits for no other, and its own clock leaves out what other programs took.
    double seconds() const {
        timespec now;
        clock_gettime(count_ == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
        return now.tv_sec + 1e-9 * now.tv_nsec;
    }

    float* take(int64_t n) {
        float* p = own_;
        own_ += padded(n);
        return p;
    }

    static constexpr int MAX_SOURCES = 256, MAX_ACTIVE = 64;

    Shared& s;
    const Plan& plan;
    int64_t id_, count_, closed_ = 0;
    bool fresh_ = false;  // nothing has joined the running sum yet
    float *own_, *x_, *tmp_, *y_;
    double start_ = 0;
};

static void decode_step(
    int64_t num_threads, const Plan& plan, const Memory* memory, int64_t token_id, int64_t position, float* logits,
    double* seconds
) {
    int64_t num_blocks = 0, width = plan.kda_heads * plan.kda_dim, H = plan.mla_heads, rank = padded(plan.kv_rank);
    for (int64_t l = 0; l < plan.num_layers; l++) num_blocks += plan.layers[l].opens_block;
    int64_t key_blocks = position / keys_a_block(position + 1) + 1;
    const int64_t sizes[] = {
        (num_blocks + 1) * plan.hidden, std::max(plan.kda_dim, plan.q_rank), std::max(width, H * plan.value_dim),
        plan.kda_heads, std::max(width, H * plan.value_dim), H * (rank + padded(plan.rest_dim)), key_blocks * padded(H),
        key_blocks * padded(H), key_blocks * H * rank, std::max(plan.dense_width, plan.num_active * plan.expert_width),
        plan.shared_width, plan.num_experts, std::max(plan.latent, plan.kv_rank + plan.rest_dim), plan.latent,
    };
    int64_t total = 0, own = padded(Worker::own_size(plan));
    for (int64_t size : sizes) total += padded(size) + 16;
    static thread_local Buffer buffer, own_buffer;
    float* next = buffer.at_least(total);
    auto take = [&, i = 0]() mutable {
        float* p = next;
        next += padded(sizes[i++]) + 16;
        return p;
    };
    Shared s{{}, plan, memory, token_id, position, logits, seconds, take(), take(), take(), take(), take(), take(), take(),
             take(), take(), take(), take(), take(), take(), take()};
    float* all = own_buffer.at_least(own * num_threads);
#pragma omp parallel num_threads(num_threads)
    {
        int64_t id = omp_get_thread_num();
        Worker(s, id, omp_get_num_threads(), all + id * own).run();
    }
}

}  // namespace trivium

using namespace trivium;

// Advances `memory` by one token and writes its logits [vocab]. `seconds` by phase are added up, or null.
TRIVIUM_KERNEL void trivium_decode_step(
    int64_t num_threads, const Plan* plan, const Memory* memory, int64_t token_id, int64_t position, float* logits,
    double* seconds
) {
    decode_step(num_threads, *plan, memory, token_id, position, logits, seconds);
}

// What the step is measured against: `num` floats read once, in as many runs at once as a product reads. Sums by thread.
TRIVIUM_KERNEL void trivium_decode_read(int64_t num_threads, const float* p, int64_t num, float* sums) {
#pragma omp parallel num_threads(num_threads)
    {
        Range part = share(num, 2 * W * STREAMS, omp_get_thread_num(), omp_get_num_threads());
        int64_t run = (part.last - part.first) / (2 * W * STREAMS) * 2 * W;
        vf even[STREAMS] = {}, odd[STREAMS] = {};
        for (int64_t i = 0; i < run; i += 2 * W)
#pragma GCC unroll 8
            for (int r = 0; r < STREAMS; r++) {
                even[r] += load(p + part.first + r * run + i);
                odd[r] += load(p + part.first + r * run + i + W);
            }
        vf all = {};
        for (int r = 0; r < STREAMS; r++) all += even[r] + odd[r];
        sums[omp_get_thread_num()] = sum(all);
    }
}

// y = w x alone, rows [first, last), for tests; x of MXFP4 in its own order.
TRIVIUM_KERNEL void trivium_decode_product(
    int64_t, const void* data, const uint8_t* scale, int64_t kind, int64_t K, int64_t first, int64_t last, const float* x,
    float* y
) {
    static thread_local Buffer buffer;
    float* ordered = buffer.at_least(K);
    if (kind == MXFP4) mxfp4_order(x, K, ordered);
    gemv({data, scale, kind}, K, first, last, kind == MXFP4 ? ordered : x, y);
}

// For the check that native.py writes the same structures.
TRIVIUM_KERNEL void trivium_decode_sizes(int64_t, int64_t* sizes) {
    sizes[0] = sizeof(Weight), sizes[1] = sizeof(Layer), sizes[2] = sizeof(Plan), sizes[3] = sizeof(Memory);
    sizes[4] = NUM_PHASES;
}
