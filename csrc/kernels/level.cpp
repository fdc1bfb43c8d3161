// One instruction set's kernels: compiled once for each level, with that level's flags, into a shared object
// whose symbols are hidden but for octavo_kernel_table. So no wide instruction leaks into code that a smaller
// machine runs.
#include "../simd/simd.h"
#include "adapters.inl"
#include "attention.inl"
#include "block_masses.inl"
#include "epilogue.inl"
#include "linear.inl"
#include "linear_columns.inl"
#include "linear_skip.inl"
#include "mixers.inl"
#include "rope.inl"
#include "rows.inl"
#include "sample.inl"
#include "table.h"
#ifdef __AMX_INT8__
#include "linear_amx.inl"
#endif

namespace octavo {
namespace {

#ifdef __AMX_INT8__
constexpr int kRowsPerBlock = 128, kRowsPerByte = 128;  // enough rows to be worth unpacking codes for
constexpr auto kDenseProducts = amx_products;
constexpr auto kScratch = amx_scratch_bytes;
constexpr auto kBeginStep = forget_configuration;
#else
constexpr int kRowsPerBlock = 64, kRowsPerByte = 16;
size_t no_scratch(const Tiles&) { return 0; }
constexpr auto kDenseProducts = [](const TileRef* tiles, int count, const Rows& x, int64_t row0, int num_rows,
                                   uint8_t*) { vector_products(tiles, count, x, row0, num_rows); };
constexpr auto kScratch = no_scratch;
constexpr auto kBeginStep = [] {};
#endif

void products(const TileRef* tiles, int count, const Rows& x, int64_t row0, int num_rows, uint8_t* scratch) {
    if (skipping_products(tiles, count, x, row0, num_rows)) return SoonReader(tiles->soon, 1).step();
    kDenseProducts(tiles, count, x, row0, num_rows, scratch);
}

void column_products(const Tiles& w, int tile, int count, const Rows& x, int64_t row0, int num_rows,
                     float* acc, uint8_t* scratch) {
    multiply_columns(kDenseProducts, w, tile, count, x, row0, num_rows, acc, scratch);
}

size_t scratch_bytes(const Tiles& w) { return kScratch(w) + (w.column_stride ? column_scratch_bytes(w) : 0); }

const KernelTable kTable = {
    .name = OCTAVO_LEVEL,
    .row_block = kRowsPerBlock,
    .rows_per_byte = kRowsPerByte,
    .begin_step = kBeginStep,
    .prepare_row = prepare_row,
    .tile_products = products,
    .scratch_bytes = scratch_bytes,
    .column_products = column_products,
    .write_tile = write_tile,
    .put_rows = put_rows,
    .row_type = row_type,
    .skips_zeros = [](Code code) { return choose_skipping(code) != nullptr; },
    .read_row = read_row,
    .norm_row = norm_row,
    .activate = activate,
    .rope_head = rope_head,
    .kv_store = kv_store,
    .attention = attention,
    .attention_merge = attention_merge,
    .block_masses = block_masses,
    .short_conv = short_conv,
    .scan_lanes = scan_lanes,
    .shrink = shrink,
    .expand = expand,
    .read_ranks = read_ranks,
    .keep_best = keep_best,
    .sample_row = sample_row,
    .sample_scratch_bytes = sample_scratch_bytes,
};

}  // namespace
}  // namespace octavo

extern "C" __attribute__((visibility("default"))) const octavo::KernelTable* octavo_kernel_table() {
    return &octavo::kTable;
}
