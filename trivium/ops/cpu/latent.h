// Latent attention in its absorbed form, in pieces: for a kernel of its own, and for others that decode.
//
// A row is one head of one new token. In the latent all rows meet the same keys [latent | shared key] and the same
// values, the latents: so they go through one pass, at most ROW_TILE rows side by side in the lanes. Keys are cut at
// multiples of KEY_SPLIT of their sequence, each cut gives a Part, and Parts are merged in rising order: whoever works on
// which part, and however many keys come later, a row's bits are the same.
#pragma once

#include <cmath>

#include "gemm.h"
#include "tile.h"

namespace trivium {

constexpr int64_t KEY_SPLIT = 256, ROW_TILE = 64;
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LOWEST = -3.0e38f;  // below any score, and -inf minus it is no nan

// The keys of one sequence; rows at a distance of ld floats.
struct LatentKeys {
    const float* latent;  // [U, R]
    int64_t latent_ld;
    const float* shared;  // [U, J]
    int64_t shared_ld;
    int64_t R, J;
};

// What rows [ROW_TILE] have seen of some keys: the largest score (to base 2), the sum of 2^(score - peak), and the
// context, the sum of the latents with these weights.
struct LatentPart {
    float* p;
    static int64_t size(int64_t R) { return 2 * ROW_TILE + ROW_TILE * R; }
    float* peak() const { return p; }
    float* total() const { return p + ROW_TILE; }
    float* context(int64_t row, int64_t R) const { return p + 2 * ROW_TILE + row * R; }
};

// Rows' queries with channels in rows and queries in the lanes, [R + J][ROW_TILE], scaled by scale log2 e. q_latent [rows,
// R] is q_nope W_k; q_rest [rows, J]. Lanes up to a multiple of W are zeros.
static inline void absorbed_query(
    int64_t rows, const float* q_latent, const float* q_rest, int64_t R, int64_t J, float scale, float* q
) {
    for (int64_t d = 0; d < R + J; d++) store(q + d * ROW_TILE + (round_up(rows, W) - W), vf{});
    turn(rows, R, q_latent, R, q, ROW_TILE, scale * LOG2_E);
    turn(rows, J, q_rest, J, q + R * ROW_TILE, ROW_TILE, scale * LOG2_E);
}

// Keys first to first + count (count <= KEY_SPLIT) for all rows. Row r sees the keys up to position last_seen(r).
template <typename F>
static inline void absorbed_block(
    int64_t rows, const float* q, const LatentKeys& keys, int64_t first, int64_t count, F&& last_seen, LatentPart part
) {
    static thread_local Buffer buffer;
    const int64_t R = keys.R, width = round_up(rows, W), ldp = width <= 16 ? width : odd_lines(ROW_TILE);
    float* weight = buffer.at_least(KEY_SPLIT * (odd_lines(ROW_TILE) + W));
    const float* latent = keys.latent + first * keys.latent_ld;
    const float* shared = keys.shared + first * keys.shared_ld;
    // Few rows: the memory is the bound. It is asked for the next KEY_SPLIT keys at an even rate while these are worked
    // on: three fifths of the latents during the scores, the rest during the sums.
    const bool few = width <= 2 * W;
    const int64_t next = few ? KEY_SPLIT : 0, steps = few ? THIN_ROWS : 0;
    Ahead for_scores{latent + next * keys.latent_ld, steps * 3 / 5}, for_shared{shared + next * keys.shared_ld, steps};
    for (int64_t k = 0; few && k < count; k += THIN_ROWS) {  // both products of a key while it is in the first cache
        int64_t n = std::min<int64_t>(THIN_ROWS, count - k);
        float* out = weight + k * ldp;
        const float *a = latent + k * keys.latent_ld, *b = shared + k * keys.shared_ld;
        tile_product_ahead<false, Old::DROP>(n, width, R, a, keys.latent_ld, q, ROW_TILE, out, ldp, nullptr, for_scores);
        tile_product_ahead<false, Old::ADD>(
            n, width, keys.J, b, keys.shared_ld, q + R * ROW_TILE, ROW_TILE, out, ldp, nullptr, for_shared
        );
    }
    if (!few) {
        tile_product<false, Old::DROP>(count, width, R, latent, keys.latent_ld, q, ROW_TILE, weight, ldp);
        tile_product<false, Old::ADD>(
            count, width, keys.J, shared, keys.shared_ld, q + R * ROW_TILE, ROW_TILE, weight, ldp
        );
    }
    for (int64_t lane = 0; lane < width; lane += W) {
        vi sees;  // the number of keys of this block
        bool all = true;
        for (int i = 0; i < W; i++) {
            int64_t seen = std::clamp<int64_t>(lane + i < rows ? last_seen(lane + i) + 1 - first : count, 0, count);
            sees[i] = (int32_t)seen, all &= seen == count;
        }
        vf peak = splat(LOWEST), total = {};
        for (int64_t k = 0; k < count; k++) {
            float* p = weight + k * ldp + lane;
            if (!all) store(p, select(sees > splat_i((int32_t)k), load(p), splat(-__builtin_inff())));
            peak = max(peak, load(p));
        }
        for (int64_t k = 0; k < count; k++) {
            float* p = weight + k * ldp + lane;
            vf w = exp2_below(load(p) - peak);
            total = total + w;
            store(p, w);
        }
        store(part.peak() + lane, peak);
        store(part.total() + lane, total);
    }
    int64_t whole = R / W * W;
    int64_t passes = (whole + 2 * W - 1) / (2 * W) * ((rows + TILE_ROWS - 1) / TILE_ROWS);  // of `count` steps each
    Ahead for_sums{for_scores.p, few ? std::max<int64_t>(1, 2 * R / (5 * std::max<int64_t>(1, passes))) : 0};
    tile_product_ahead<true, Old::DROP>(
        rows, whole, count, weight, ldp, latent, keys.latent_ld, part.context(0, R), R, nullptr, for_sums
    );
    if (whole < R) {  // the last columns, in a copy W wide
        float* tail = weight + KEY_SPLIT * odd_lines(ROW_TILE);
        float sums[ROW_TILE * W];
        for (int64_t k = 0; k < count; k++) store(tail + k * W, load_part(latent + k * keys.latent_ld + whole, R - whole));
        tile_product<true, Old::DROP>(rows, W, count, weight, ldp, tail, W, sums, W);
        for (int64_t r = 0; r < rows; r++) store_part(part.context(r, R) + whole, load(sums + r * W), R - whole);
    }
}

// into becomes into and next together. A part that saw no key of a row leaves its bits as they are.
static inline void absorbed_merge(int64_t rows, int64_t R, LatentPart into, LatentPart next) {
    for (int64_t r = 0; r < rows; r++) {
        float old_peak = into.peak()[r], new_peak = next.peak()[r];
        vf peak = max(splat(old_peak), splat(new_peak));
        float keep = exp2_below(splat(old_peak) - peak)[0], weight = exp2_below(splat(new_peak) - peak)[0];
        into.peak()[r] = peak[0];
        into.total()[r] = fma(weight, splat(next.total()[r]), splat(into.total()[r]) * keep)[0];
        float* x = into.context(r, R);
        const float* y = next.context(r, R);
        for (int64_t d = 0; d < R; d += W)
            store_n(x + d, fma(weight, load_n(y + d, R - d), load_n(x + d, R - d) * keep), R - d);
    }
}

// context [rows, R] of what was merged, and, where asked for, the log-sum-exp to base 2 of every row.
static inline void absorbed_finish(int64_t rows, int64_t R, LatentPart part, float* context, float* lse) {
    for (int64_t r = 0; r < rows; r++) {
        float inverse = 1.0f / part.total()[r];
        for (int64_t d = 0; d < R; d += W)
            store_n(context + r * R + d, load_n(part.context(r, R) + d, R - d) * inverse, R - d);
        if (lse) lse[r] = part.peak()[r] + std::log2(part.total()[r]);
    }
}

}  // namespace trivium
