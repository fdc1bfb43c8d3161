// The hot loops of the dot product levels of NEON as functions by name, for benchmarks/arm_static.py, which
// compiles this file and estimates the cycles of their loops.
#define OCTAVO_LEVEL "static"
#include "../csrc/simd/simd.h"
// The order of level.cpp.
#include "../csrc/kernels/attention.inl"
#include "../csrc/kernels/linear.inl"
#include "../csrc/kernels/linear_neon.inl"

using namespace octavo;

namespace {
constexpr auto kFp16 = ScaleType::fp16, kSmall = ScaleType::small;
constexpr auto kNone = ZeroPointKind::none, kMin = ZeroPointKind::min;
}  // namespace

extern "C" {
// One row.
void q4_0_row(const TileRef& tile, const QuantizedRows& x, int64_t row, float* acc) {
    multiply_few<1, kFp16, kNone, false, Code::u4>(tile, x, row, acc);
}
void q4_k_row(const TileRef& tile, const QuantizedRows& x, int64_t row, float* acc) {
    multiply_few<1, kSmall, kMin, false, Code::u4>(tile, x, row, acc);
}
void q8_0_row(const TileRef& tile, const QuantizedRows& x, int64_t row, float* acc) {
    multiply_few<1, kFp16, kNone, false, Code::u8>(tile, x, row, acc);
}
void int8_row(const TileRef& tile, const QuantizedRows& x, int64_t row, int32_t* sums) {
    multiply_int8<1>(tile, x, row, sums);
}
// Four rows, and what is unpacked once for all rows. Q8_0 is multiplied as Q4_0.
void q4_0_rows(const UnpackedGroups& from, const QuantizedRows& x, int64_t row, int last, float* acc) {
    add_groups<4, false, false, false>(from, 0, 0, x, row, 0, last, acc);
}
void q4_k_rows(const UnpackedGroups& from, const QuantizedRows& x, int64_t row, int last, float* acc) {
    add_groups<4, false, true, false>(from, 0, 0, x, row, 0, last, acc);
}
void q4_0_unpack(const Tiles& w, const uint8_t* tile, int last, UnpackedGroups& to) {
    unpack_groups<kFp16, kNone, false, Code::u4>(w, tile, 0, last, to);
}
void q4_k_unpack(const Tiles& w, const uint8_t* tile, int last, UnpackedGroups& to) {
    unpack_groups<kSmall, kMin, false, Code::u4>(w, tile, 0, last, to);
}
void q8_0_unpack(const Tiles& w, const uint8_t* tile, int last, UnpackedGroups& to) {
    unpack_groups<kFp16, kNone, false, Code::u8>(w, tile, 0, last, to);
}
#if defined(__ARM_FEATURE_MATMUL_INT8)
void int8_rows(const int8_t* codes, const int8_t* rows, int64_t stride, int num_words, float* acc) {
    add_words<4>(codes, rows, stride, num_words, acc, false);
}
void bf16_rows(const int8_t* codes, const int8_t* rows, int64_t stride, int num_words, float* acc) {
    add_words<4>(codes, rows, stride, num_words, acc, true);
}
#else
void int8_rows(const TileRef& tile, const QuantizedRows& x, int64_t row, int32_t* sums) {
    multiply_int8<4>(tile, x, row, sums);
}
#endif
// Attention: four lanes.
void scores_bf16(const LaneSet& set, int block) { block_scores<4, 1, Way::bf16, 16>(set, 0, block, 0, 0); }
void scores_int8(const LaneSet& set, int block) { block_scores<4, 1, Way::int16, 8>(set, 0, block, 0, 0); }
void values_bf16(const LaneSet& set, int last) { weigh_columns<4, 1, Way::bf16, 16>(set, 0, 0, 0, last, 0); }
void values_int8(const LaneSet& set, int last) { weigh_columns<4, 1, Way::int16, 8>(set, 0, 0, 0, last, 0); }
}
