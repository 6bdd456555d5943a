// Latent attention: expanded with its gradients, and absorbed.
//
// Expanded, keys and values are written out per head once a call and then met 64 by 64 (Dao et al., FlashAttention,
// 2022), with queries in the lanes: scores [key][query], so that the running softmax is vertical, a key tile is read as it
// lies, and only the queries are turned, once a block. Scores are to base 2, log2 e is in the scaled query.
#include "kernel.h"

#include <memory>
#include <vector>

#include "latent.h"

using namespace trivium;

namespace {

constexpr int64_t BLOCK = 64;  // queries and keys
constexpr int64_t PAIR = 2;    // query blocks that meet a key block while it is in the second-level cache
constexpr int64_t LDQ = BLOCK + 16;
constexpr int64_t ROWS = 256;  // latents that are expanded, or whose gradients are gathered, by one work item
constexpr int64_t ITEMS = 16;  // the backward cuts its work in at least so many, if there are so many query blocks


struct Sequence {
    int64_t start, past, length, key_start;
    int64_t num_keys() const { return past + length; }
};

struct Problem {
    int64_t num_threads, T, U, H, K, J, V, R;
    const float *q_nope, *q_rest, *latent, *shared, *kv_b;
    std::vector<Sequence> sequences;

    int64_t X() const { return K + J; }
    float scale() const { return 1.0f / std::sqrt((float)X()); }
    // Written-out keys and values of a head, [U][ld]: X of the key, V of the value from `value_at` on.
    int64_t value_at() const { return round_up(X(), W); }
    int64_t ld() const { return value_at() + round_up(V, W); }
    Matrix W_k(int64_t h) const { return {kv_b + h * (K + V) * R, R, 1}; }
    Matrix W_v(int64_t h) const { return {kv_b + (h * (K + V) + K) * R, R, 1}; }
};

Problem make_problem(
    int64_t num_threads, const float* q_nope, const float* q_rest, const float* latent, const float* shared,
    const float* kv_b, const int64_t* starts, const int64_t* past, int64_t S, int64_t H, int64_t K, int64_t J, int64_t V,
    int64_t R
) {
    Problem problem{num_threads, starts[S], 0, H, K, J, V, R, q_nope, q_rest, latent, shared, kv_b, {}};
    for (int64_t s = 0; s < S; s++) {
        Sequence sequence{starts[s], past[s], starts[s + 1] - starts[s], problem.U};
        problem.U += sequence.num_keys();
        if (sequence.length) problem.sequences.push_back(sequence);
    }
    return problem;
}

Matrix turned(Matrix m) { return {m.p, m.cs, m.rs}; }

// Keys and values of all heads, [H][U][ld].
Floats expand(const Problem& a) {
    const int64_t ld = a.ld(), blocks = (a.U + ROWS - 1) / ROWS;
    Floats kv(new float[a.H * a.U * ld]);
    parallel(a.num_threads, a.H * blocks, [&](int64_t item) {
        int64_t h = item / blocks, first = item % blocks * ROWS, rows = std::min(ROWS, a.U - first);
        float* out = kv.get() + (h * a.U + first) * ld;
        Matrix latent{a.latent + first * a.R, a.R, 1};
        gemm(rows, a.K, a.R, latent, turned(a.W_k(h)), out, ld);
        gemm(rows, a.V, a.R, latent, turned(a.W_v(h)), out + a.value_at(), ld);
        for (int64_t u = 0; u < rows; u++) std::copy_n(a.shared + (first + u) * a.J, a.J, out + u * ld + a.K);
    });
    return kv;
}

// One block of queries of a head.
struct Queries {
    int64_t first, position, count, width;  // token, its position, how many, rounded up to lanes
    Queries(const Sequence& s, int64_t block)
        : first(s.start + block * BLOCK), position(s.past + block * BLOCK),
          count(std::min(BLOCK, s.length - block * BLOCK)), width(round_up(count, W)) {}
    int64_t last() const { return position + count - 1; }
};

// [X][LDQ], scaled for scores to base 2.
void turn_queries(const Problem& a, const Queries& block, int64_t h, float* q) {
    float scale = a.scale() * LOG2_E;
    int64_t row = block.first * a.H + h;
    for (int64_t d = 0; d < a.X(); d++) store(q + d * LDQ + block.width - W, vf{});
    turn(block.count, a.K, a.q_nope + row * a.K, a.H * a.K, q, LDQ, scale);
    turn(block.count, a.J, a.q_rest + row * a.J, a.H * a.J, q + a.K * LDQ, LDQ, scale);
}

// Where lanes + position is earlier than the key: these weights are 0.
vi future(const Queries& block, int64_t lane, int64_t key) {
    return lanes() < splat_i((int32_t)std::clamp<int64_t>(key - block.position - lane, 0, W));
}

// Scores [keys][LDQ] of one tile to weights, with peak, total and keep of every query brought up to date.
void soften(const Queries& block, int64_t first_key, int64_t keys, float* score, float* peak, float* total, float* keep) {
    bool edge = first_key + keys - 1 > block.position;
    for (int64_t lane = 0; lane < block.width; lane += W) {
        vf old = load(peak + lane), top = old;
        float* column = score + lane;
        if (edge)
            for (int64_t k = 0; k < keys; k++) {
                vf s = select(future(block, lane, first_key + k), splat(-__builtin_inff()), load(column + k * LDQ));
                store(column + k * LDQ, s);
            }
        for (int64_t k = 0; k < keys; k++) top = max(top, load(column + k * LDQ));
        vf sum = {};
        for (int64_t k = 0; k < keys; k++) {
            vf weight = exp2_below(load(column + k * LDQ) - top);
            sum = sum + weight;
            store(column + k * LDQ, weight);
        }
        vf fade = exp2_below(old - top);
        store(keep + lane, fade);
        store(peak + lane, top);
        store(total + lane, fma(load(total + lane), fade, sum));
    }
}

void attend(const Problem& a, const Sequence& s, int64_t h, int64_t pair, const float* kv, float* o, float* lse) {
    static thread_local Buffer buffer;
    const int64_t X = a.X(), V = a.V, ld = a.ld(), blocks = (s.length + BLOCK - 1) / BLOCK;
    const int64_t first = pair * PAIR, num = std::min(PAIR, blocks - first);
    float* q = buffer.at_least(PAIR * (X + V) * LDQ + BLOCK * LDQ + PAIR * 3 * BLOCK + V * BLOCK);
    float* context = q + PAIR * X * LDQ;
    float* score = context + PAIR * V * LDQ;
    float* peak = score + BLOCK * LDQ;
    float* total = peak + PAIR * BLOCK;
    float* keep = total + PAIR * BLOCK;
    for (int64_t i = 0; i < num; i++) turn_queries(a, {s, first + i}, h, q + i * X * LDQ);
    std::fill_n(context, PAIR * V * LDQ, 0.0f);
    std::fill_n(peak, PAIR * BLOCK, LOWEST);
    std::fill_n(total, PAIR * BLOCK, 0.0f);
    const int64_t end = Queries(s, first + num - 1).last() + 1;
    for (int64_t key = 0; key < end; key += BLOCK) {
        int64_t keys = std::min(BLOCK, end - key);
        const float* k = kv + (h * a.U + s.key_start + key) * ld;
        for (int64_t i = 0; i < num; i++) {
            Queries block(s, first + i);
            if (key > block.last()) continue;
            tile_product<false, Old::DROP>(keys, block.width, X, k, ld, q + i * X * LDQ, LDQ, score, LDQ);
            soften(block, key, keys, score, peak + i * BLOCK, total + i * BLOCK, keep);
            tile_product<true, Old::KEEP>(
                V, block.width, keys, k + a.value_at(), ld, score, LDQ, context + i * V * LDQ, LDQ, keep
            );
        }
    }
    for (int64_t i = 0; i < num; i++) {
        Queries block(s, first + i);
        for (int64_t lane = 0; lane < block.width; lane += W) {
            vf inverse = 1.0f / load(total + i * BLOCK + lane);
            for (int64_t v = 0; v < V; v++) {
                float* p = context + (i * V + v) * LDQ + lane;
                store(p, load(p) * inverse);
            }
        }
        turn(V, block.count, context + i * V * LDQ, LDQ, o + (block.first * a.H + h) * V, a.H * V);
        for (int64_t c = 0; c < block.count; c++)
            lse[(block.first + c) * a.H + h] = peak[i * BLOCK + c] + std::log2(total[i * BLOCK + c]);
    }
}

// What the backward holds of one block of queries of one head.
struct Adjoint {
    float *q_turned, *do_turned, *dq_turned;  // [X], [V], [X][LDQ]
    float *q, *d_o;                           // [BLOCK][..], q scaled
    float *along, *lse;                       // [BLOCK], sum of do o, and the forward's log-sum-exp
};

// Gradients of the queries of query blocks group, group + groups, ... pairs, and their share of those of all keys and
// values, added to dkv [U][ld].
void attend_backward(
    const Problem& a, const Sequence& s, int64_t h, int64_t group, int64_t groups, const float* kv, const float* o,
    const float* lse, const float* d_o, float* dq_nope, float* dq_rest, float* dkv
) {
    static thread_local Buffer buffer;
    const int64_t K = a.K, J = a.J, X = a.X(), V = a.V, H = a.H, ld = a.ld(), value_at = a.value_at();
    const int64_t ldx = odd_lines(value_at), ldv = odd_lines(round_up(V, W)), blocks = (s.length + BLOCK - 1) / BLOCK;
    const int64_t each = (2 * X + V) * LDQ + BLOCK * (ldx + ldv + 2);
    float* next = buffer.at_least(PAIR * each + 2 * BLOCK * LDQ);
    auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    Adjoint adjoint[PAIR];
    for (Adjoint& x : adjoint)
        x = {take(X * LDQ), take(V * LDQ), take(X * LDQ), take(BLOCK * ldx), take(BLOCK * ldv), take(BLOCK), take(BLOCK)};
    float *weight = take(BLOCK * LDQ), *d_score = take(BLOCK * LDQ);
    for (int64_t first = group * PAIR; first < blocks; first += groups * PAIR) {
        const int64_t num = std::min(PAIR, blocks - first);
        for (int64_t i = 0; i < num; i++) {
            Queries block(s, first + i);
            const Adjoint& x = adjoint[i];
            turn_queries(a, block, h, x.q_turned);
            std::fill_n(x.q, BLOCK * ldx, 0.0f);
            std::fill_n(x.d_o, BLOCK * ldv, 0.0f);
            std::fill_n(x.dq_turned, X * LDQ, 0.0f);
            std::fill_n(x.lse, BLOCK, 0.0f);
            std::fill_n(x.along, BLOCK, 0.0f);
            for (int64_t c = 0; c < block.count; c++) {
                int64_t row = (block.first + c) * H + h;
                for (int64_t d = 0; d < K; d++) x.q[c * ldx + d] = a.q_nope[row * K + d] * a.scale();
                for (int64_t d = 0; d < J; d++) x.q[c * ldx + K + d] = a.q_rest[row * J + d] * a.scale();
                std::copy_n(d_o + row * V, V, x.d_o + c * ldv);
                vf sum_c = {};
                for (int64_t v = 0; v < V; v += W)
                    sum_c = fma(load_n(d_o + row * V + v, V - v), load_n(o + row * V + v, V - v), sum_c);
                x.along[c] = sum(sum_c);
                x.lse[c] = lse[row];
            }
            turn(block.width, V, x.d_o, ldv, x.do_turned, LDQ);
        }
        const int64_t end = Queries(s, first + num - 1).last() + 1;
        for (int64_t key = 0; key < end; key += BLOCK) {
            const int64_t keys = std::min(BLOCK, end - key);
            const float* k = kv + (h * a.U + s.key_start + key) * ld;
            float* dk = dkv + (h * a.U + s.key_start + key) * ld;
            // The next block is asked for meanwhile, a share before each product: it comes from the third-level cache.
            int64_t asked = key + BLOCK < end ? BLOCK * ld : 0, to_ask = 2 * BLOCK * ld;
            auto ahead = [&] {
                for (int64_t i = 0; i < BLOCK * ld / (5 * PAIR) && asked && asked < to_ask; i += 16, asked += 16) {
                    __builtin_prefetch(k + asked, 0, 2);
                    __builtin_prefetch(dk + asked, 1, 2);
                }
            };
            for (int64_t i = 0; i < num; i++) {
                const Adjoint& x = adjoint[i];
                Queries block(s, first + i);
                if (key > block.last()) continue;
                const int64_t width = block.width;
                tile_product<false, Old::DROP>(keys, width, X, k, ld, x.q_turned, LDQ, weight, LDQ);
                ahead();
                tile_product<false, Old::DROP>(keys, width, V, k + value_at, ld, x.do_turned, LDQ, d_score, LDQ);
                bool edge = key + keys - 1 > block.position;
                ahead();
                for (int64_t j = 0; j < keys; j++)
                    for (int64_t lane = 0; lane < width; lane += W) {
                        float *p = weight + j * LDQ + lane, *dp = d_score + j * LDQ + lane;
                        // At most 1: scores that an absorbed forward summed in another order could be above their sum.
                        vf w = exp2_below(min(vf{}, load(p) - load(x.lse + lane)));
                        if (edge) w = select(future(block, lane, key + j), vf{}, w);
                        store(p, w);
                        store(dp, w * (load(dp) - load(x.along + lane)));
                    }
                ahead();
                tile_product<false, Old::ADD>(keys, ld - value_at, width, weight, LDQ, x.d_o, ldv, dk + value_at, ld);
                ahead();
                tile_product<false, Old::ADD>(keys, value_at, width, d_score, LDQ, x.q, ldx, dk, ld);
                ahead();
                tile_product<true, Old::ADD>(X, width, keys, k, ld, d_score, LDQ, x.dq_turned, LDQ);
            }
        }
        for (int64_t i = 0; i < num; i++) {
            Queries block(s, first + i);
            int64_t row = block.first * H + h;
            const float* dq = adjoint[i].dq_turned;
            turn(K, block.count, dq, LDQ, dq_nope + row * K, H * K, a.scale());
            turn(J, block.count, dq + K * LDQ, LDQ, dq_rest + row * J, H * J, a.scale());
        }
    }
}

// Gradients of what keys and values were expanded from. dkv holds the groups' shares, [groups][H][U][ld].
void gather(
    const Problem& a, int64_t groups, float* dkv, float* d_latent, float* d_shared, float* d_kv_b
) {
    const int64_t ld = a.ld(), blocks = (a.U + ROWS - 1) / ROWS, share = a.H * a.U * ld;
    parallel(a.num_threads, blocks, [&](int64_t item) {
        int64_t first = item * ROWS, rows = std::min(ROWS, a.U - first);
        float* out = d_latent + first * a.R;
        for (int64_t h = 0; h < a.H; h++) {
            float* dk = dkv + (h * a.U + first) * ld;
            for (int64_t g = 1; g < groups; g++)
                for (int64_t i = 0; i < rows * ld; i += W) store(dk + i, load(dk + i) + load(dk + g * share + i));
            gemm(rows, a.R, a.K, {dk, ld, 1}, a.W_k(h), out, a.R, h > 0);
            gemm(rows, a.R, a.V, {dk + a.value_at(), ld, 1}, a.W_v(h), out, a.R, true);
            for (int64_t u = 0; u < rows; u++) {
                float* x = d_shared + (first + u) * a.J;
                for (int64_t j = 0; j < a.J; j++) x[j] = (h ? x[j] : 0.0f) + dk[u * ld + a.K + j];
            }
        }
    });
    parallel(a.num_threads, 2 * a.H, [&](int64_t item) {
        int64_t h = item / 2, of_value = item % 2;
        gemm(
            of_value ? a.V : a.K, a.R, a.U, {dkv + h * a.U * ld + (of_value ? a.value_at() : 0), 1, ld}, {a.latent, a.R, 1},
            d_kv_b + (h * (a.K + a.V) + (of_value ? a.K : 0)) * a.R, a.R
        );
    });
}

// All (sequence, head, part of `parts(sequence)`), one head behind the other, its last part first: that is the longest.
struct Item {
    const Sequence* sequence;
    int64_t h, part;
};

template <typename F>
std::vector<Item> make_items(const Problem& a, F&& parts) {
    std::vector<Item> items;
    for (const Sequence& s : a.sequences)
        for (int64_t h = 0; h < a.H; h++)
            for (int64_t part = parts(s) - 1; part >= 0; part--) items.push_back({&s, h, part});
    return items;
}

int64_t num_pairs(const Sequence& s) { return (s.length + PAIR * BLOCK - 1) / (PAIR * BLOCK); }

}  // namespace

// o [T, H, V] and lse [T, H] of q_nope [T, H, K], q_rest [T, H, J], latent [U, R], shared [U, J], kv_b [H, K + V, R];
// starts [S + 1] and past [S] are int64.
TRIVIUM_KERNEL void trivium_latent_expanded(
    int64_t num_threads, const float* q_nope, const float* q_rest, const float* latent, const float* shared,
    const float* kv_b, const int64_t* starts, const int64_t* past, float* o, float* lse, int64_t S, int64_t H, int64_t K,
    int64_t J, int64_t V, int64_t R
) {
    guarded([&] {
        Problem a = make_problem(num_threads, q_nope, q_rest, latent, shared, kv_b, starts, past, S, H, K, J, V, R);
        Floats kv = expand(a);
        std::vector<Item> items = make_items(a, num_pairs);
        parallel(num_threads, (int64_t)items.size(), [&](int64_t i) {
            attend(a, *items[i].sequence, items[i].h, items[i].part, kv.get(), o, lse);
        });
    });
}

// The same by the absorbed form.
TRIVIUM_KERNEL void trivium_latent_absorbed(
    int64_t num_threads, const float* q_nope, const float* q_rest, const float* latent, const float* shared,
    const float* kv_b, const int64_t* starts, const int64_t* past, float* o, float* lse, int64_t S, int64_t H, int64_t K,
    int64_t J, int64_t V, int64_t R
) {
    guarded([&] {
        Problem a = make_problem(num_threads, q_nope, q_rest, latent, shared, kv_b, starts, past, S, H, K, J, V, R);
        const int64_t D = R + J, part_size = LatentPart::size(R);
        Floats context(new float[a.T * H * R]);  // first the absorbed queries, then what they found
        parallel(num_threads, H, [&](int64_t h) {
            gemm(a.T, R, K, {q_nope + h * K, H * K, 1}, a.W_k(h), context.get() + h * R, H * R);
        });
        struct Tile {
            const Sequence* sequence;
            int64_t first, rows, splits, part_at;
        };
        std::vector<Tile> tiles;
        int64_t num_parts = 0;
        for (const Sequence& s : a.sequences)
            for (int64_t first = 0; first < s.length * H; first += ROW_TILE) {
                int64_t rows = std::min(ROW_TILE, s.length * H - first), seen = s.past + (first + rows - 1) / H + 1;
                tiles.push_back({&s, first, rows, (seen + KEY_SPLIT - 1) / KEY_SPLIT, num_parts});
                num_parts += tiles.back().splits;
            }
        // Few tiles: all splits at once. Many: a thread goes through a tile's splits itself, and merges as it goes.
        const bool split = tiles.size() < 64;
        auto query = [&](const Tile& t, float* q) {
            int64_t row = t.sequence->start * H + t.first;
            absorbed_query(t.rows, context.get() + row * R, q_rest + row * J, R, J, a.scale(), q);
        };
        auto block = [&](const Tile& t, int64_t b, const float* q, LatentPart part) {
            const Sequence& s = *t.sequence;
            LatentKeys keys{latent + s.key_start * R, R, shared + s.key_start * J, J, R, J};
            int64_t first = b * KEY_SPLIT, last = s.past + (t.first + t.rows - 1) / H;
            auto last_seen = [&](int64_t row) { return s.past + (t.first + row) / H; };
            absorbed_block(t.rows, q, keys, first, std::min(KEY_SPLIT, last + 1 - first), last_seen, part);
        };
        auto finish = [&](const Tile& t, LatentPart part) {
            int64_t row = t.sequence->start * H + t.first;
            absorbed_finish(t.rows, R, part, context.get() + row * R, lse + row);
        };
        const int64_t num_tiles = (int64_t)tiles.size();
        if (split) {
            Floats queries(new float[num_tiles * D * ROW_TILE]), parts(new float[num_parts * part_size]);
            std::vector<std::pair<int64_t, int64_t>> items;
            for (int64_t i = 0; i < num_tiles; i++) {
                query(tiles[i], queries.get() + i * D * ROW_TILE);
                for (int64_t b = 0; b < tiles[i].splits; b++) items.push_back({i, b});
            }
            auto part = [&](const Tile& t, int64_t b) { return LatentPart{parts.get() + (t.part_at + b) * part_size}; };
            // Runs of splits, so that the one that is asked for ahead is mostly the thread's own.
            const int64_t runs = std::min(num_parts, 4 * num_threads);
            parallel(num_threads, runs, [&](int64_t run) {
                for (int64_t i = num_parts * run / runs; i < num_parts * (run + 1) / runs; i++) {
                    auto [tile, b] = items[i];
                    block(tiles[tile], b, queries.get() + tile * D * ROW_TILE, part(tiles[tile], b));
                }
            });
            parallel(num_threads, num_tiles, [&](int64_t i) {
                for (int64_t b = 1; b < tiles[i].splits; b++)
                    absorbed_merge(tiles[i].rows, R, part(tiles[i], 0), part(tiles[i], b));
                finish(tiles[i], part(tiles[i], 0));
            });
        } else {
            parallel(num_threads, num_tiles, [&](int64_t i) {
                static thread_local Buffer buffer;
                float* q = buffer.at_least(D * ROW_TILE + 2 * part_size);
                LatentPart all{q + D * ROW_TILE}, next{q + D * ROW_TILE + part_size};
                query(tiles[i], q);
                block(tiles[i], 0, q, all);
                for (int64_t b = 1; b < tiles[i].splits; b++) {
                    block(tiles[i], b, q, next);
                    absorbed_merge(tiles[i].rows, R, all, next);
                }
                finish(tiles[i], all);
            });
        }
        parallel(num_threads, H, [&](int64_t h) {
            gemm(a.T, V, R, {context.get() + h * R, H * R, 1}, turned(a.W_v(h)), o + h * V, H * V);
        });
    });
}

// Gradients of all inputs of either form, from its o and lse.
TRIVIUM_KERNEL void trivium_latent_backward(
    int64_t num_threads, const float* q_nope, const float* q_rest, const float* latent, const float* shared,
    const float* kv_b, const int64_t* starts, const int64_t* past, const float* o, const float* lse, const float* d_o,
    float* dq_nope, float* dq_rest, float* d_latent, float* d_shared, float* d_kv_b, int64_t S, int64_t H, int64_t K,
    int64_t J, int64_t V, int64_t R
) {
    guarded([&] {
        Problem a = make_problem(num_threads, q_nope, q_rest, latent, shared, kv_b, starts, past, S, H, K, J, V, R);
        Floats kv = expand(a);
        int64_t most = 1;
        for (const Sequence& s : a.sequences) most = std::max(most, num_pairs(s));
        const int64_t cells = std::max<int64_t>(1, H * (int64_t)a.sequences.size());
        const int64_t groups = std::min(most, (ITEMS + cells - 1) / cells), share = H * a.U * a.ld();
        Floats dkv(new float[groups * share]);
        parallel(num_threads, groups * H, [&](int64_t i) { std::fill_n(dkv.get() + i * a.U * a.ld(), a.U * a.ld(), 0.0f); });
        std::vector<Item> items = make_items(a, [&](const Sequence&) { return groups; });
        parallel(num_threads, (int64_t)items.size(), [&](int64_t i) {
            auto [s, h, group] = items[i];
            attend_backward(
                a, *s, h, group, groups, kv.get(), o, lse, d_o, dq_nope, dq_rest, dkv.get() + group * share
            );
        });
        gather(a, groups, dkv.get(), d_latent, d_shared, d_kv_b);
    });
}
