// SiTU of a vector, for its own kernel and for those that have it in their middle.
#pragma once

#include "simd.h"

namespace trivium {

// e^-z of z >= 0 within 2 units in the last place; 0 from 87.33 on, nan for nan. Half the work of exp: a power of two
// that needs one factor, and nothing to put back behind it.
static inline vf exp_down(vf z) {
    const vf most = splat(87.33f), magic = splat(12582912.0f);
    vf y = min(most, z);                                   // nan stays
    vf shifted = fma(y, splat(-1.44269504088896341f), magic);  // n = round(-y / ln 2) in its lowest bits
    vf n = shifted - magic;
    vf p = exp_rest(-y, n) * (vf)(((vi)shifted << 23) + 0x3f800000);
    return z > most ? vf{} : p;
}

// tanh(x), and its slope 1 - tanh^2 without the cancellation: 4 e / (1 + e)^2 of e = exp(-2 |x|).
struct Tanh {
    vf value, slope;

    explicit Tanh(vf x) {
        vf z = abs(x), e = exp_down(z + z), inverse = 1.0f / (1.0f + e);
        vf far = (1.0f - e) * inverse, s = x * x;
        vf p = splat(-5.70498872745e-3f);  // near 0, where 1 - e cancels
        p = fma(p, s, splat(2.06390887954e-2f));
        p = fma(p, s, splat(-5.37397155531e-2f));
        p = fma(p, s, splat(1.33314422036e-1f));
        p = fma(p, s, splat(-3.33332819422e-1f));
        vf near = fma(p * s, x, x);
        vf signed_far = (vf)((vi)far | ((vi)x & splat_i((int32_t)0x80000000)));
        value = z > splat(0.625f) ? signed_far : near;
        slope = 4.0f * e * inverse * inverse;
    }
};

// sigmoid(x), and 1 - sigmoid(x) without the cancellation.
struct Sigmoid {
    vf value, rest;

    explicit Sigmoid(vf x) {
        vf e = exp_down(abs(x)), above = 1.0f / (1.0f + e), below = e * above;
        vi up = x >= vf{};
        value = up ? above : below;
        rest = up ? below : above;
    }
};

struct SituBounds {
    float gate, up;
};

// bound a s up_bound c of a = tanh(gate / bound), s = sigmoid(gate), c = tanh(up / up_bound).
struct Situ {
    Tanh a, c;
    Sigmoid s;
    SituBounds bounds;

    Situ(vf gate, vf up, SituBounds bounds)
        : a(gate * (1.0f / bounds.gate)), c(up * (1.0f / bounds.up)), s(gate), bounds(bounds) {}

    vf value() const { return a.value * s.value * c.value * (bounds.gate * bounds.up); }

    // up_bound c s (1 - a^2 + bound a (1 - s))
    vf gate_slope() const { return fma(a.value * bounds.gate, s.rest, a.slope) * s.value * c.value * bounds.up; }

    // bound a s (1 - c^2)
    vf up_slope() const { return c.slope * a.value * s.value * bounds.gate; }
};

}  // namespace trivium
