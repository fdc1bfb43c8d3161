// Scales and mins of the groups of a tile, and scales and sums of the groups of quantized rows.
#pragma once
#include "linear_floats.inl"

namespace octavo {
namespace {

template <ScaleType S>
OCTAVO_INLINE vf load_scale(const uint8_t* p) {
    if constexpr (S == ScaleType::small) return to_float(load_int8(reinterpret_cast<const int8_t*>(p)));
    return S == ScaleType::fp16 ? load_fp16(reinterpret_cast<const uint16_t*>(p))
                                : load(reinterpret_cast<const float*>(p));
}
constexpr size_t get_scale_bytes(ScaleType type) {
    return type == ScaleType::small ? kTile : type == ScaleType::fp16 ? 32 : 64;
}
template <ScaleType S>
constexpr size_t scale_bytes() {
    return get_scale_bytes(S);
}

template <ScaleType S, ZeroPointKind Z>
constexpr size_t zero_point_bytes() {
    return Z == ZeroPointKind::none   ? 0
           : Z == ZeroPointKind::zero ? static_cast<size_t>(kTile)
                                      : scale_bytes<S>();
}
// Returns the mins of a group; zero points are converted to mins.
template <ScaleType S, ZeroPointKind Z>
OCTAVO_INLINE vf load_min(const uint8_t* p, vf scale) {
    if (Z == ZeroPointKind::none) return vf{};
    return Z == ZeroPointKind::zero ? to_float(load_int8(reinterpret_cast<const int8_t*>(p))) * (-scale)
                                    : load_scale<S>(p);
}

// Returns the bytes of the factors before each kSmallSpan groups.
OCTAVO_INLINE size_t factor_bytes(const Tiles& w) {
    if (w.scale_type != ScaleType::small) return 0;
    return kTile * (w.half_factors ? 2 : 4) * (w.zero_point_kind == ZeroPointKind::min ? 2 : 1);
}

// Reads the scales and mins of a tile's groups, one group after another.
template <ScaleType S, ZeroPointKind Z, bool kShared = false>
class GroupLevels {
  public:
    explicit GroupLevels(const Tiles& w) : half_(w.half_factors), num_bytes_(factor_bytes(w)) {}
    // Returns the address of group g's codes, where `tile` is the current position in the tile.
    OCTAVO_INLINE const uint8_t* begin(const uint8_t* tile, int g) {
        if constexpr (S == ScaleType::small)
            if (g % kSmallSpan == 0) {
                scales_ = factors(tile, 0);
                if (Z == ZeroPointKind::min) mins_ = factors(tile, kTile);
                return tile + num_bytes_;
            }
        return tile;
    }
    OCTAVO_INLINE vf scale(const uint8_t* p) const {
        if constexpr (kShared)
            return to_float(load_int8(reinterpret_cast<const int8_t*>(p)) & splat_i(15)) * scales_;
        const vf stored = load_scale<S>(p);
        return S == ScaleType::small ? stored * scales_ : stored;
    }
    OCTAVO_INLINE vf min(const uint8_t* p, vf scale) const {
        if constexpr (kShared) {
            const vi levels = load_int8(reinterpret_cast<const int8_t*>(p));
            return to_float(-(levels >> 4 & splat_i(15))) * mins_;
        }
        const vf stored = load_min<S, Z>(p, scale);
        return S == ScaleType::small && Z == ZeroPointKind::min ? stored * mins_ : stored;
    }

  private:
    OCTAVO_INLINE vf factors(const uint8_t* from, int first) const {
        return half_ ? load_fp16(reinterpret_cast<const uint16_t*>(from) + first)
                     : load(reinterpret_cast<const float*>(from) + first);
    }
    const bool half_;
    const size_t num_bytes_;
    vf scales_{}, mins_{};
};

// Whether quantized rows for codes with one scale per output have two int8 terms. AMX multiplies the second
// term at almost no cost; on the vector unit it would double the work (decision 0017).
constexpr bool kTwoTerms = kHasTileUnit;

// Scales, half-group sums and scaled sums of consecutive rows for one group of inputs.
struct RowGroup {
    RowGroup(const QuantizedRows& x, int64_t row)
        : scale(x.scales + x.at(row, 0)),
          scaled_sum(x.scaled_sums + x.at(row, 0)),
          first(x.sums + x.half_at(row, 0, 0)),
          second(first + kTile) {}
    OCTAVO_INLINE void next() {
        scale += kTile, scaled_sum += kTile, first += 2 * kTile, second += 2 * kTile;
    }
    const float *scale, *scaled_sum;
    const int32_t *first, *second;
};

}  // namespace
}  // namespace octavo
