#include "parse.h"

#include <algorithm>
#include <stdexcept>

namespace octavo {

namespace {

KvType parse_kv_type(const std::string& name) {
    for (int i = 0; i < kNumKvTypes; i++)
        if (name == kKvTypeNames[i]) return static_cast<KvType>(i);
    throw std::invalid_argument("KV type " + name + ": allowed are fp32, bf16, int8, k8v4, int4");
}

}  // namespace

Code parse_code(const std::string& name) {
    for (int i = 0; i < kNumCodes; i++)
        if (name == kCodeNames[i]) return static_cast<Code>(i);
    throw std::invalid_argument("code " + name +
                                ": allowed are u4, u8, u2, u3, u5, u6, l4, i8, bf16, fp16, fp32, f4, e4m3");
}

ScaleType parse_scale_type(const std::string& name) {
    for (int i = 0; i < kNumScaleTypes; i++)
        if (name == kScaleTypeNames[i]) return static_cast<ScaleType>(i);
    throw std::invalid_argument("scales of type " + name + ": allowed are fp16, fp32, small");
}

ZeroPointKind parse_zero_point_kind(const std::string& name) {
    for (int i = 0; i < kNumZeroPointKinds; i++)
        if (name == kZeroPointKindNames[i]) return static_cast<ZeroPointKind>(i);
    throw std::invalid_argument("unknown zero-point kind: " + name);
}

TileFormat make_tile_format(const std::string& code, const std::string& scale_type,
                            const std::string& zero_point_kind, bool half_groups, bool half_factors,
                            int span) {
    return {.code = parse_code(code),
            .scale_type = parse_scale_type(scale_type),
            .zero_point_kind = parse_zero_point_kind(zero_point_kind),
            .half_groups = half_groups,
            .span = span,
            .half_factors = half_factors};
}

KvGroup make_kv_group(int layers, int heads, int k_width, int v_width, const std::string& type, int blocks) {
    const bool holds_states = type == "states";
    const KvType kept = holds_states ? KvType::fp32 : parse_kv_type(type);
    if (value_bits(kept) == 4 && std::max(k_width, v_width) > kMaxPackedWidth)
        throw std::invalid_argument(type + " keys and values of more than " +
                                    std::to_string(kMaxPackedWidth) + " numbers");
    return KvGroup{layers, heads, k_width, v_width, kept, blocks, holds_states};
}

}  // namespace octavo
