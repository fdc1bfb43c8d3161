// Reads one row of a packed weight back as floats, for embedding tables.
#pragma once
#include "group_scales.inl"

namespace octavo {
namespace {

float scale_at(const Tiles& w, const uint8_t* p, int lane) {
    if (w.scale_type == ScaleType::small) return static_cast<float>(static_cast<int8_t>(p[lane]));
    if (w.scale_type == ScaleType::fp16) {
        uint16_t h;
        std::memcpy(&h, p + 2 * lane, 2);
        return fp16_to_float(h);
    }
    float f;
    std::memcpy(&f, p + 4 * lane, 4);
    return f;
}

float quantized_at(const Tiles& w, const uint8_t* tile, int lane, int k) {
    const int parts = w.half_groups ? 2 : 1, g = k / kGroup, in = k % kGroup;
    const size_t scale = get_scale_bytes(w.scale_type), codes = codes_bytes(w.code);
    const bool half = w.half_factors;
    const bool shared = shares_levels(w.code);
    const size_t low = w.zero_point_kind == ZeroPointKind::none || shared ? 0
                       : w.zero_point_kind == ZeroPointKind::zero         ? kTile
                                                                          : scale;
    const size_t bytes = codes + (scale + low) * parts, factors = factor_bytes(w);
    const uint8_t* span = tile + g / kSmallSpan * (kSmallSpan * bytes + factors);
    const uint8_t* group = span + factors + g % kSmallSpan * bytes;
    // Index among the vectors of four bytes per output.
    const int vector = in / 4;
    const auto bits_at = [&](size_t begin, int bits) {
        const int shared = 8 / bits;
        const uint8_t byte = group[begin + 64 * (vector / shared) + 4 * lane + in % 4];
        return byte >> bits * (vector % shared) & ((1 << bits) - 1);
    };
    const int of_low = low_bits(w.code), of_high = high_bits(w.code);
    int code = bits_at(0, of_low);
    if (of_high) code |= bits_at(64 * of_low, of_high) << of_low;
    if (w.code == Code::l4) code = w.table[code];
    const int part = parts == 2 ? in / 16 : 0;
    const uint8_t* scales = group + codes + part * scale;
    const uint8_t* lows = group + codes + scale * parts + part * low;
    const int zero =
        w.zero_point_kind == ZeroPointKind::zero ? (reinterpret_cast<const int8_t*>(lows))[lane] : 0;
    const auto factor = [&](int index) {
        if (!factors) return 1.0f;
        if (half) return fp16_to_float((reinterpret_cast<const uint16_t*>(span))[index]);
        return (reinterpret_cast<const float*>(span))[index];
    };
    const float level = shared ? static_cast<float>(scales[lane] & 15) : scale_at(w, scales, lane);
    const float value = static_cast<float>(code - w.zero_point - zero) * (level * factor(lane));
    if (w.zero_point_kind != ZeroPointKind::min) return value;
    const float min = shared ? -static_cast<float>(scales[lane] >> 4) : scale_at(w, lows, lane);
    return value + min * factor(kTile + lane);
}

// Writes row `row` of w times `factor` to out [K].
void read_row(const Tiles& w, int row, float factor, float* out) {
    const uint8_t* tile = w.tile(row / kTile);
    const int lane = row % kTile;
    const float scale =
        w.code == Code::i8 ? (reinterpret_cast<const float*>(tile + w.tile_bytes) - kTile)[lane] : 1;
    for (int k = 0; k < w.num_inputs; k++) {
        float value;
        switch (w.code) {
            case Code::i8:
                value = static_cast<float>(
                            static_cast<int8_t>(tile[static_cast<size_t>(k / 4) * 64 + 4 * lane + k % 4])) *
                        scale;
                break;
            case Code::bf16:
                value =
                    bf16_to_float((reinterpret_cast<const uint16_t*>(tile))[(k / 2) * 32 + 2 * lane + k % 2]);
                break;
            case Code::fp16:
                value = fp16_to_float((reinterpret_cast<const uint16_t*>(tile))[k * kTile + lane]);
                break;
            case Code::fp32: value = (reinterpret_cast<const float*>(tile))[k * kTile + lane]; break;
            case Code::f4:
            case Code::e4m3: value = float_code_at(w, tile, lane, k); break;
            default: value = quantized_at(w, tile, lane, k);
        }
        out[k] = value * factor;
    }
}

}  // namespace
}  // namespace octavo
