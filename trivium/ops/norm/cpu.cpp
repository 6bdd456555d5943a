// RMSNorm, RMSNorm with a gate behind it, and a gate alone, with their gradients. A row is read from memory once.
#include "rows.h"

using namespace trivium;

// Rows whose sums are made before the first of them is used, up to 4 KB of them: short rows, one by one, wait for their
// roots and quotients (8 of 128 columns: 1.6 times as fast). The gradients gain nothing by it.
constexpr int64_t GROUP = 8;

// sums(row, place in its group) for all rows of a group and then use(row, place), group by group.
template <typename F, typename G>
static inline void by_groups(int64_t first, int64_t end, int64_t width, F&& sums, G&& use) {
    int64_t size = std::clamp<int64_t>(1024 / std::max<int64_t>(width, 1), 1, GROUP);
    for (int64_t start = first; start < end; start += size) {
        int64_t stop = std::min(end, start + size);
        for (int64_t t = start; t < stop; t++) sums(t, t - start);
        for (int64_t t = start; t < stop; t++) use(t, t - start);
    }
}

static inline float rms_inv(float sum_of_squares, int64_t width, float eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares / (float)width + eps);
}

static inline float rms_inv(const float* x, int64_t width, float eps) {
    float square[1];
    row_sums(width, square, [&](int64_t i, int64_t n, vf* s) {
        vf v = load_n(x + i, n);
        s[0] = fma(v, v, s[0]);
    });
    return rms_inv(square[0], width, eps);
}

// sigmoid(g), and its slope e / (1 + e)^2 with e = exp(-|g|) <= 1: y (1 - y) is 0 from g = 17 on.
static inline vf sigmoid_slope(vf g, vf& slope) {
    vf e = exp(-abs(g)), inv = 1.0f / (1.0f + e), small = e * inv;
    slope = small * inv;
    return select(g < vf{}, small, inv);
}

// y [rows, D] = (x / rms(x)) weight
TRIVIUM_KERNEL void trivium_rms_norm(
    int64_t num_threads, const float* x_all, const float* weight, float* y_all, int64_t rows, int64_t D, float eps
) {
    parallel_rows(num_threads, rows, D, [&](int64_t, int64_t first, int64_t end) {
        float r[GROUP];
        auto sums = [&](int64_t t, int64_t k) { r[k] = rms_inv(x_all + t * D, D, eps); };
        by_groups(first, end, D, sums, [&](int64_t t, int64_t k) {
            const float* x = x_all + t * D;
            columns(D, [&](int64_t i, int64_t n) {
                store_n(y_all + t * D + i, load_n(x + i, n) * r[k] * load_n(weight + i, n), n);
            });
        });
    });
}

// With r = 1 / rms(x): dx = r (dy weight) - x r^3 sum(dy weight x) / D; dweight = sum over rows of dy x r.
TRIVIUM_KERNEL void trivium_rms_norm_backward(
    int64_t num_threads, const float* dy_all, const float* x_all, const float* weight, float* dx_all, float* dweight,
    int64_t rows, int64_t D, float eps
) {
    float* partial = partials(num_blocks(rows, D), D);
    parallel_rows(num_threads, rows, D, [&](int64_t block, int64_t first, int64_t end) {
        float* dw = partial + block * D;
        std::fill_n(dw, D, 0.0f);
        for (int64_t t = first; t < end; t++) {
            const float *x = x_all + t * D, *dy = dy_all + t * D;
            float* dx = dx_all + t * D;
            float sums[2];
            row_sums(D, sums, [&](int64_t i, int64_t n, vf* s) {
                vf v = load_n(x + i, n);
                s[0] = fma(v, v, s[0]);
                s[1] = fma(load_n(dy + i, n) * load_n(weight + i, n), v, s[1]);
            });
            float r = rms_inv(sums[0], D, eps), along = -r * r * r * (sums[1] / (float)D);
            columns(D, [&](int64_t i, int64_t n) {
                vf v = load_n(x + i, n), g = load_n(dy + i, n);
                store_n(dx + i, fma(along, v, g * load_n(weight + i, n) * r), n);
                store_n(dw + i, fma(g, v * r, load_n(dw + i, n)), n);
            });
        }
    });
    add_partials(num_threads, partial, num_blocks(rows, D), D, dweight);
}

// y [rows, V] = (o / rms(o)) weight sigmoid(gate)
TRIVIUM_KERNEL void trivium_gated_rms_norm(
    int64_t num_threads, const float* o_all, const float* gate_all, const float* weight, float* y_all, int64_t rows,
    int64_t V, float eps
) {
    parallel_rows(num_threads, rows, V, [&](int64_t, int64_t first, int64_t end) {
        float r[GROUP];
        auto sums = [&](int64_t t, int64_t k) { r[k] = rms_inv(o_all + t * V, V, eps); };
        int64_t ahead = 2048;  // the sums read o in bursts, which no hardware foresees
        by_groups(first, end, V, sums, [&](int64_t t, int64_t k) {
            const float *o = o_all + t * V, *gate = gate_all + t * V;
            columns(V, [&](int64_t i, int64_t n) {
                __builtin_prefetch(o + i + ahead);
                __builtin_prefetch(gate + i + ahead);
                vf normed = load_n(o + i, n) * r[k] * load_n(weight + i, n);
                store_n(y_all + t * V + i, normed * sigmoid(load_n(gate + i, n)), n);
            });
        });
    });
}

// The norm's gradient of dy sigmoid(gate), and dgate = dy (o r weight) slope.
TRIVIUM_KERNEL void trivium_gated_rms_norm_backward(
    int64_t num_threads, const float* dy_all, const float* o_all, const float* gate_all, const float* weight,
    float* do_all, float* dgate_all, float* dweight, int64_t rows, int64_t V, float eps
) {
    float* partial = partials(num_blocks(rows, V), V);
    parallel_rows(num_threads, rows, V, [&](int64_t block, int64_t first, int64_t end) {
        float* dw = partial + block * V;
        std::fill_n(dw, V, 0.0f);
        for (int64_t t = first; t < end; t++) {
            const float *o = o_all + t * V, *gate = gate_all + t * V, *dy = dy_all + t * V;
            float *d_o = do_all + t * V, *dgate = dgate_all + t * V, sums[2];
            row_sums(V, sums, [&](int64_t i, int64_t n, vf* s) {  // both gradients are left without their r
                vf v = load_n(o + i, n), w = load_n(weight + i, n), g = load_n(dy + i, n), slope;
                vf normed = g * sigmoid_slope(load_n(gate + i, n), slope);
                store_n(d_o + i, normed, n);
                store_n(dgate + i, g * v * w * slope, n);
                s[0] = fma(v, v, s[0]);
                s[1] = fma(normed * w, v, s[1]);
            });
            float r = rms_inv(sums[0], V, eps), along = -r * r * r * (sums[1] / (float)V);
            columns(V, [&](int64_t i, int64_t n) {
                vf v = load_n(o + i, n), normed = load_n(d_o + i, n);
                store_n(d_o + i, fma(along, v, normed * load_n(weight + i, n) * r), n);
                store_n(dgate + i, load_n(dgate + i, n) * r, n);
                store_n(dw + i, fma(normed, v * r, load_n(dw + i, n)), n);
            });
        }
    });
    add_partials(num_threads, partial, num_blocks(rows, V), V, dweight);
}

constexpr int64_t GATE_STRIP = 16384;

// y = x sigmoid(gate), element by element
TRIVIUM_KERNEL void trivium_sigmoid_gate(
    int64_t num_threads, const float* x_all, const float* gate_all, float* y_all, int64_t count
) {
    parallel(num_threads, (count + GATE_STRIP - 1) / GATE_STRIP, [&](int64_t strip) {
        const float *x = x_all + strip * GATE_STRIP, *gate = gate_all + strip * GATE_STRIP;
        float* y = y_all + strip * GATE_STRIP;
        columns(std::min(GATE_STRIP, count - strip * GATE_STRIP), [&](int64_t i, int64_t n) {
            store_n(y + i, load_n(x + i, n) * sigmoid(load_n(gate + i, n)), n);
        });
    });
}

TRIVIUM_KERNEL void trivium_sigmoid_gate_backward(
    int64_t num_threads, const float* dy_all, const float* x_all, const float* gate_all, float* dx_all,
    float* dgate_all, int64_t count
) {
    parallel(num_threads, (count + GATE_STRIP - 1) / GATE_STRIP, [&](int64_t strip) {
        int64_t at = strip * GATE_STRIP;
        columns(std::min(GATE_STRIP, count - at), [&](int64_t k, int64_t n) {
            int64_t i = at + k;
            vf slope, dy = load_n(dy_all + i, n), y = sigmoid_slope(load_n(gate_all + i, n), slope);
            store_n(dx_all + i, dy * y, n);
            store_n(dgate_all + i, dy * load_n(x_all + i, n) * slope, n);
        });
    });
}
