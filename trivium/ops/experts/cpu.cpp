// The routed experts. A pair is a token and one of its experts; sorted by expert, the pairs of one lie together.
//
// Work is cut into tiles of a fixed number of an expert's rows. A tile gathers its rows, takes them through the whole
// expert while they are in the cache, and leaves one row a pair; the pairs of a token are then added in the order of
// its experts. gemm has one order of sums, so a row's bits do not depend on who else chose the expert.
#include <vector>

#include "kernel.h"
#include "mxfp4.h"
#include "situ.h"

using namespace trivium;

constexpr int64_t FORWARD_ROWS = 256;   // of a tile of the forward: the weights are packed once for all of them
constexpr int64_t BACKWARD_ROWS = 512;  // at most; of a tile of the backward, which has weight gradients of its own
constexpr int64_t BLOCK = 256;          // rows of a tile that stand in the cache at a time
constexpr int64_t TOKENS = 64;

namespace {

// The matrices [out, in] of all experts: float32, or MXFP4 bytes and their scales.
struct Stack {
    const void* data;
    const uint8_t* scale;
    int64_t out, in;

    const float* dense(int64_t expert) const { return (const float*)data + expert * out * in; }

    // [count, in]: rows of an expert's matrix, unpacked where they are not float32 as they stand.
    const float* rows(int64_t expert, int64_t first, int64_t count, Buffer& buffer) const {
        if (!scale) return dense(expert) + first * in;
        float* unpacked = buffer.at_least(count * in);
        for (int64_t i = 0; i < count; i++) {
            int64_t row = expert * out + first + i;
            unpack_row((const uint8_t*)data + row * (in / 2), scale + row * (in / MXFP4_GROUP), in, unpacked + i * in);
        }
        return unpacked;
    }

    // y [M, out] = x [M, in] W^T
    void times_turned(int64_t expert, int64_t M, const float* x, float* y) const {
        static thread_local Buffer buffer;
        int64_t step = scale ? 4 * NR : out;
        for (int64_t n = 0; n < out; n += step) {
            int64_t count = std::min(step, out - n);
            gemm(M, count, in, {x, in, 1}, {rows(expert, n, count, buffer), 1, in}, y + n, out);
        }
    }

    // y [M, in] = x [M, out] W, or y += with `add`; blocks of KC of `out`, as gemm has them
    void times(int64_t expert, int64_t M, const float* x, float* y, bool add = false) const {
        static thread_local Buffer buffer;
        int64_t step = scale ? KC : out;
        for (int64_t k = 0; k < out; k += step) {
            int64_t depth = std::min(step, out - k);
            gemm(M, in, depth, {x + k, out, 1}, {rows(expert, k, depth, buffer), in, 1}, y, in, add || k > 0);
        }
    }
};

struct Tile {
    int64_t expert, first, last;  // rows
    int64_t partial;              // the sum beside the result that it adds to; -1, an expert's first tile: the result
};

// Pairs sorted by expert, an expert's in the order of the tokens; pairs without an expert (id -1) have no row.
struct Pairs {
    int64_t num_active, num_partials = 0;
    std::vector<int64_t> first_E, pair_M, row_P;  // an expert's first row; a row's pair; a pair's row or -1

    Pairs(const int64_t* experts, int64_t num_tokens, int64_t num_active, int64_t num_experts)
        : num_active(num_active), first_E(num_experts + 1), row_P(num_tokens * num_active, -1) {
        int64_t num_pairs = num_tokens * num_active;
        for (int64_t p = 0; p < num_pairs; p++)
            if (experts[p] >= 0) first_E[experts[p] + 1]++;
        for (int64_t e = 0; e < num_experts; e++) first_E[e + 1] += first_E[e];
        pair_M.resize(first_E[num_experts]);
        std::vector<int64_t> next_E(first_E);
        for (int64_t p = 0; p < num_pairs; p++)
            if (experts[p] >= 0) row_P[p] = next_E[experts[p]]++, pair_M[row_P[p]] = p;
    }

    int64_t token(int64_t row) const { return pair_M[row] / num_active; }

    // Every expert's rows in equal tiles of at most `most`.
    std::vector<Tile> tiles(int64_t most) {
        std::vector<Tile> tiles;
        num_partials = 0;
        for (int64_t e = 0; e < (int64_t)first_E.size() - 1; e++) {
            int64_t first = first_E[e], count = first_E[e + 1] - first, parts = (count + most - 1) / most;
            for (int64_t i = 0; i < parts; i++)
                tiles.push_back(
                    {e, first + count * i / parts, first + count * (i + 1) / parts, i ? num_partials++ : -1}
                );
        }
        return tiles;
    }

    // x's rows [., width] of the tokens of rows `first` to `last`.
    void gather(const float* x, int64_t width, int64_t first, int64_t last, float* out) const {
        for (int64_t row = first; row < last; row++)
            std::memcpy(out + (row - first) * width, x + token(row) * width, 4 * width);
    }

    // y [T, width]: the sum of a token's pairs in the order of its experts, each times its weight if there are any.
    void add_up(int64_t num_threads, const float* row, const float* weights, int64_t width, float* y) const {
        int64_t num_tokens = (int64_t)row_P.size() / std::max<int64_t>(num_active, 1);
        parallel(num_threads, (num_tokens + TOKENS - 1) / TOKENS, [&](int64_t tile) {
            for (int64_t t = tile * TOKENS; t < std::min(num_tokens, (tile + 1) * TOKENS); t++) {
                float* sum = y + t * width;
                std::fill_n(sum, width, 0.0f);
                for (int64_t p = t * num_active; p < (t + 1) * num_active; p++) {
                    if (row_P[p] < 0) continue;
                    const float* part = row + row_P[p] * width;
                    vf weight = splat(weights ? weights[p] : 1.0f);
                    for (int64_t i = 0; i < width; i += W) {
                        int64_t n = width - i;
                        store_n(sum + i, fma(weight, load_n(part + i, n), load_n(sum + i, n)), n);
                    }
                }
            }
        });
    }
};

}  // namespace

// y [T, L] of the latents [T, L]. gate and up [M, F], one row a pair in the order of `Pairs`, are kept where they are
// not null. A scale that is null says that the matrix is float32.
TRIVIUM_KERNEL void trivium_experts(
    int64_t num_threads, const float* latent, const int64_t* experts, const float* weights, const void* w1,
    const uint8_t* scale1, const void* w3, const uint8_t* scale3, const void* w2, const uint8_t* scale2, float* y,
    float* gate, float* up, int64_t T, int64_t A, int64_t E, int64_t L, int64_t F, float bound, float up_bound
) {
    guarded([&] {
        Stack gates{w1, scale1, F, L}, ups{w3, scale3, F, L}, downs{w2, scale2, L, F};
        SituBounds bounds{bound, up_bound};
        Pairs pairs(experts, T, A, E);
        std::vector<Tile> tiles = pairs.tiles(FORWARD_ROWS);
        Floats outputs(new float[pairs.pair_M.size() * L]);
        float* out = outputs.get();
        parallel(num_threads, tiles.size(), [&](int64_t i) {
            static thread_local Buffer row_buffer, hidden_buffer;
            auto [e, first, last, partial] = tiles[i];
            int64_t count = last - first, size = count * F;
            float* rows = row_buffer.at_least(count * L);
            float* hidden = hidden_buffer.at_least(3 * size);
            float* tile_gate = gate ? gate + first * F : hidden + size;
            float* tile_up = up ? up + first * F : hidden + 2 * size;
            pairs.gather(latent, L, first, last, rows);
            gates.times_turned(e, count, rows, tile_gate);
            ups.times_turned(e, count, rows, tile_up);
            for (int64_t j = 0; j < size; j += W) {
                Situ situ(load_n(tile_gate + j, size - j), load_n(tile_up + j, size - j), bounds);
                store_n(hidden + j, situ.value(), size - j);
            }
            downs.times_turned(e, count, hidden, out + first * L);
        });
        pairs.add_up(num_threads, out, weights, L, y);
    });
}

// The gradients; those of the latents and of the matrices only where their pointers are not null. gate and up are as
// they were kept or, where they are null, computed again. With d_hidden = w2^T dy, before the pair's weight:
// d_weight = <hidden, d_hidden>, so the experts' outputs are not needed.
TRIVIUM_KERNEL void trivium_experts_backward(
    int64_t num_threads, const float* dy, const float* latent, const int64_t* experts, const float* weights,
    const void* w1, const uint8_t* scale1, const void* w3, const uint8_t* scale3, const void* w2, const uint8_t* scale2,
    const float* gate, const float* up, float* d_latent, float* d_weights, float* d_w1, float* d_w3, float* d_w2,
    int64_t T, int64_t A, int64_t E, int64_t L, int64_t F, float bound, float up_bound
) {
    guarded([&] {
        Stack gates{w1, scale1, F, L}, ups{w3, scale3, F, L}, downs{w2, scale2, L, F};
        SituBounds bounds{bound, up_bound};
        Pairs pairs(experts, T, A, E);
        std::vector<Tile> tiles = pairs.tiles(BACKWARD_ROWS);
        int64_t matrix = F * L;
        Floats d_rows(new float[d_latent ? pairs.pair_M.size() * L : 0]);
        Floats parts(new float[d_w1 ? pairs.num_partials * 3 * matrix : 0]);
        float *d_row = d_rows.get(), *partials = parts.get();
        for (int64_t p = 0; p < T * A; p++)
            if (pairs.row_P[p] < 0) d_weights[p] = 0;
        parallel(num_threads, tiles.size(), [&](int64_t i) {
            static thread_local Buffer row_buffer, hidden_buffer;
            auto [e, first, last, partial] = tiles[i];
            float* rows = row_buffer.at_least(2 * BLOCK * L);
            float* dy_rows = rows + BLOCK * L;
            float* d_hidden = hidden_buffer.at_least(5 * BLOCK * F);  // and then hidden times the pair's weight
            float *d_gate = d_hidden + BLOCK * F, *d_up = d_gate + BLOCK * F;
            float *again_gate = d_up + BLOCK * F, *again_up = again_gate + BLOCK * F;
            for (int64_t start = first; start < last; start += BLOCK) {
                int64_t end = std::min(last, start + BLOCK), count = end - start;
                pairs.gather(dy, L, start, end, dy_rows);
                if (d_w1 || !gate) pairs.gather(latent, L, start, end, rows);
                if (!gate) {
                    gates.times_turned(e, count, rows, again_gate);
                    ups.times_turned(e, count, rows, again_up);
                }
                downs.times(e, count, dy_rows, d_hidden);
                for (int64_t row = start; row < end; row++) {
                    const float* g = gate ? gate + row * F : again_gate + (row - start) * F;
                    const float* u = gate ? up + row * F : again_up + (row - start) * F;
                    int64_t at = (row - start) * F;
                    float weight = weights[pairs.pair_M[row]];
                    vf product = {};
                    for (int64_t j = 0; j < F; j += W) {
                        int64_t n = F - j;
                        Situ situ(load_n(g + j, n), load_n(u + j, n), bounds);
                        vf hidden = situ.value(), grad = load_n(d_hidden + at + j, n);
                        product = fma(hidden, grad, product);
                        grad = grad * weight;
                        store_n(d_gate + at + j, grad * situ.gate_slope(), n);
                        store_n(d_up + at + j, grad * situ.up_slope(), n);
                        store_n(d_hidden + at + j, hidden * weight, n);
                    }
                    d_weights[pairs.pair_M[row]] = sum(product);
                }
                if (d_latent) {
                    gates.times(e, count, d_gate, d_row + start * L);
                    ups.times(e, count, d_up, d_row + start * L, true);
                }
                if (d_w1) {
                    auto target = [&](float* d_w, int64_t m) {
                        return partial < 0 ? d_w + e * matrix : partials + (3 * partial + m) * matrix;
                    };
                    gemm(F, L, count, {d_gate, 1, F}, {rows, L, 1}, target(d_w1, 0), L, start > first);
                    gemm(F, L, count, {d_up, 1, F}, {rows, L, 1}, target(d_w3, 1), L, start > first);
                    gemm(L, F, count, {dy_rows, 1, L}, {d_hidden, F, 1}, target(d_w2, 2), F, start > first);
                }
            }
        });
        if (d_latent) pairs.add_up(num_threads, d_row, nullptr, L, d_latent);
        if (d_w1)
            parallel(num_threads, 3 * E, [&](int64_t i) {
                int64_t e = i / 3, m = i % 3;
                float* sum = (m == 0 ? d_w1 : m == 1 ? d_w3 : d_w2) + e * matrix;
                if (pairs.first_E[e] == pairs.first_E[e + 1]) std::fill_n(sum, matrix, 0.0f);
                for (const Tile& tile : tiles)
                    if (tile.expert == e && tile.partial >= 0) {
                        const float* part = partials + (3 * tile.partial + m) * matrix;
                        for (int64_t j = 0; j < matrix; j++) sum[j] += part[j];
                    }
            });
    });
}
