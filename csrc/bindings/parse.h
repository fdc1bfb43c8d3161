// Parses names of codes and types. All functions throw invalid_argument for an unknown name.
#pragma once

#include <cstddef>
#include <string>
#include <tuple>
#include <vector>

#include "../plan/packing.h"
#include "../runtime/step.h"

namespace octavo {

Code parse_code(const std::string& name);
ScaleType parse_scale_type(const std::string& name);
ZeroPointKind parse_zero_point_kind(const std::string& name);
TileFormat make_tile_format(const std::string& code, const std::string& scale_type,
                            const std::string& zero_point_kind, bool half_groups, bool half_factors,
                            int span);
// Type "states" makes a group of states.
KvGroup make_kv_group(int layers, int heads, int k_width, int v_width, const std::string& type, int blocks);

// Layout of packed tiles and the bytes from one tile to the next: `PackedTiles.layout` returns it, and
// `WeightStream.tiles` takes it.
using TileTuple = std::tuple<std::string, std::string, std::string, bool, bool, int, int, int, int, size_t,
                             std::vector<int>, std::vector<float>>;

}  // namespace octavo
