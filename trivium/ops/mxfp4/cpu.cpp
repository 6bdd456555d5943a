// MXFP4 packed and unpacked, group by group; see mxfp4.h for the values.
#include "mxfp4.h"

#include <cmath>

#include "kernel.h"

using namespace trivium;

constexpr int64_t TILE = 256;  // groups

template <typename F>
static void for_groups(int64_t num_threads, int64_t count, F&& work) {
    parallel(num_threads, (count + TILE - 1) / TILE, [&](int64_t tile) {
        work(tile * TILE, std::min(count, (tile + 1) * TILE));
    });
}

TRIVIUM_KERNEL void trivium_mxfp4_unpack(
    int64_t num_threads, const uint8_t* packed, const uint8_t* scale, float* weight, int64_t num_groups
) {
    for_groups(num_threads, num_groups, [&](int64_t first, int64_t last) {
        unpack_row(packed + first * 16, scale + first, (last - first) * MXFP4_GROUP, weight + first * MXFP4_GROUP);
    });
}

// The byte of the power of two that puts the largest magnitude of a group in [3.5, 7).
static uint8_t scale_of(const float* weight) {
    vf most = {};
    for (int64_t i = 0; i < MXFP4_GROUP; i += W) most = max(abs(load(weight + i)), most);
    int exponent;
    float mantissa = std::frexp(largest(most), &exponent);  // in [0.5, 1), or 0
    return mantissa == 0 ? 0 : (uint8_t)(std::clamp(exponent - 3 + (mantissa >= 0.875f), -127, 127) + 127);
}

TRIVIUM_KERNEL void trivium_mxfp4_pack(
    int64_t num_threads, const float* weight, uint8_t* packed, uint8_t* scale, int64_t num_groups
) {
    // A magnitude above border i has a code above i. The midpoints; a tie belongs to the even code, so where that is the
    // upper one the border is the last float below the midpoint.
    const float border[7] = {
        .25f, std::nextafter(.75f, 0.0f), 1.25f, std::nextafter(1.75f, 0.0f), 2.5f, std::nextafter(3.5f, 0.0f), 5.0f,
    };
    for_groups(num_threads, num_groups, [&](int64_t first, int64_t last) {
        for (int64_t group = first; group < last; group++) {
            const float* x = weight + group * MXFP4_GROUP;
            scale[group] = scale_of(x);
            int32_t codes[MXFP4_GROUP];
            for (int64_t i = 0; i < MXFP4_GROUP; i += W) {
                vf value = load(x + i), magnitude = abs(value) / mxfp4_scale(scale[group]);
                vi code = ((vi)value >> 28) & 8;
                for (float above : border) code -= magnitude > splat(above);
                std::memcpy(codes + i, &code, sizeof code);
            }
            for (int64_t i = 0; i < 16; i++) packed[group * 16 + i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
        }
    });
}
