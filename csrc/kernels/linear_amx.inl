// Products on the AMX tile unit, for levels that have it: 16 rows by 16 outputs at a time.
//
// The integer path unpacks a weight tile's groups once to signed bytes [K/4][16 o][4] (codes minus the zero point) in scratch,
// multiplies 16 rows at a time, and scales each group's exact int32 sums by the same fma's, in the same order, as linear.inl:
// bitwise the same numbers, so few rows may take either path. bf16 sums in another order than dpbf16, so at this level every
// number of rows takes the tile unit.
#pragma once
#include "linear.inl"

namespace octavo {
namespace {

constexpr int kAmxMinRows = 6;     // fewer rows are faster on dpbusd (measured: crossover at 5 to 7)
constexpr int kGroupsAtOnce = 4;   // group sums kept in tile registers before they are scaled

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int num_rows, int bytes) { rows[tile] = (uint8_t)num_rows, row_bytes[tile] = (uint16_t)bytes; }
};

// Registers: 0..3 sums of 16 rows, 4..5 rows (A), 6..7 weights (B). `depth` bytes of each row are one multiplication.
// Loading a configuration costs tens of cycles, so it is kept between calls on a thread while it fits.
OCTAVO_INLINE void configure(int rows, int depth) {
    thread_local int configured = 0;
    const int wanted = rows * 1000 + depth;
    if (configured == wanted) return;
    TileConfig config;
    for (int t = 0; t < 4; t++) config.set(t, rows, 64);
    for (int t = 4; t < 6; t++) config.set(t, rows, depth);
    for (int t = 6; t < 8; t++) config.set(t, depth / 4, 64);
    _tile_loadconfig(&config);
    configured = wanted;
}

// -- integers ------------------------------------------------------------------------------------------------------------

// Signed codes [groups][8][16 o][4] of one tile.
void unpack_tile(const Tiles& w, const uint8_t* tile, size_t step, int8_t* out) {
    const __m512i zero = _mm512_set1_epi8((char)w.zero_point), nibble = _mm512_set1_epi8(15);
    for (int g = 0; g < w.num_groups; g++, tile += step, out += 512) {
        if (w.code == Code::u4) {
            for (int v = 0; v < 4; v++) {
                const __m512i both = _mm512_loadu_si512(tile + 64 * v);
                _mm512_store_si512(out + 128 * v, _mm512_sub_epi8(_mm512_and_si512(both, nibble), zero));
                _mm512_store_si512(out + 128 * v + 64, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), nibble), zero));
            }
        } else {
            for (int v = 0; v < 8; v++) _mm512_store_si512(out + 64 * v, _mm512_sub_epi8(_mm512_loadu_si512(tile + 64 * v), zero));
        }
    }
}

// Unsigned codes of 8 bits with a zero point of 0 and more than 127 do not fit signed bytes; such weights stay on dpbusd.
OCTAVO_INLINE bool fits_signed(const Tiles& w) { return w.code == Code::u4 || w.zero_point != 0; }

template <ScaleType S, bool kMin>
void scale_groups(const uint8_t* scales, size_t step, const Rows& x, int64_t row, int rows, int g0, int count, const int32_t* sums, vf* acc) {
    for (int g = 0; g < count; g++, scales += step) {
        const vf scale = load_scale<S>(scales);
        const vf least = kMin ? load_scale<S>(scales + scale_bytes<S>()) : vf{};
        const float* d = x.scales + row * x.num_groups + g0 + g;
        const int32_t* pair = x.sums + (row * x.num_groups + g0 + g) * 2;
        for (int m = 0; m < rows; m++, d += x.num_groups, pair += 2 * x.num_groups) {
            acc[m] = fma(to_float(load_i(sums + (g * 16 + m) * 16)), scale * *d, acc[m]);
            if (kMin) acc[m] = fma(least, splat(*d * (float)(pair[0] + pair[1])), acc[m]);
        }
    }
}

template <ScaleType S, bool kMin>
void int8_rows(const Tiles& w, const uint8_t* tile, size_t step, const int8_t* codes, const Rows& x, int64_t row, int rows, float* out) {
    alignas(64) int32_t sums[kGroupsAtOnce * 16 * 16];
    const int8_t* q = (const int8_t*)x.values + row * x.stride;
    const uint8_t* scales = tile + (w.code == Code::u4 ? 256 : 512);
    configure(rows, kGroup);
    vf acc[16] = {};
    int g = 0;
    for (; g + kGroupsAtOnce <= w.num_groups; g += kGroupsAtOnce, q += kGroupsAtOnce * kGroup, codes += kGroupsAtOnce * 512, scales += kGroupsAtOnce * step) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(4, q, x.stride);
        _tile_loadd(6, codes, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(5, q + 32, x.stride);
        _tile_loadd(7, codes + 512, 64);
        _tile_dpbssd(1, 5, 7);
        _tile_loadd(4, q + 64, x.stride);
        _tile_loadd(6, codes + 1024, 64);
        _tile_dpbssd(2, 4, 6);
        _tile_loadd(5, q + 96, x.stride);
        _tile_loadd(7, codes + 1536, 64);
        _tile_dpbssd(3, 5, 7);
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + 256, 64);
        _tile_stored(2, sums + 512, 64);
        _tile_stored(3, sums + 768, 64);
        if (rows == 16)
            scale_groups<S, kMin>(scales, step, x, row, 16, g, kGroupsAtOnce, sums, acc);
        else
            scale_groups<S, kMin>(scales, step, x, row, rows, g, kGroupsAtOnce, sums, acc);
    }
    for (; g < w.num_groups; g++, q += kGroup, codes += 512, scales += step) {
        _tile_zero(0);
        _tile_loadd(4, q, x.stride);
        _tile_loadd(6, codes, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, sums, 64);
        scale_groups<S, kMin>(scales, step, x, row, rows, g, 1, sums, acc);
    }
    for (int m = 0; m < rows; m++) store(out + 16 * m, acc[m]);
}

void int8_product(const Tiles& w, int tile, const Rows& x, int64_t row0, int num_rows, float* acc, uint8_t* scratch) {
    const uint8_t* data = w.data + (size_t)tile * w.tile_bytes;
    const size_t step = w.tile_bytes / w.num_groups;
    unpack_tile(w, data, step, (int8_t*)scratch);
    const bool half = w.scale_type == ScaleType::fp16;
    const auto rows_of = half ? (w.has_min ? int8_rows<ScaleType::fp16, true> : int8_rows<ScaleType::fp16, false>)
                              : (w.has_min ? int8_rows<ScaleType::fp32, true> : int8_rows<ScaleType::fp32, false>);
    for (int done = 0; done < num_rows; done += 16)
        rows_of(w, data, step, (const int8_t*)scratch, x, row0 + done, num_rows - done < 16 ? num_rows - done : 16, acc + 16 * done);
}

// -- bf16 ----------------------------------------------------------------------------------------------------------------

void bf16_product(const Tiles& w, int tile, const Rows& x, int64_t row0, int num_rows, float* acc) {
    const uint8_t* data = w.data + (size_t)tile * w.tile_bytes;
    for (int done = 0; done < num_rows;) {
        const int rows = num_rows - done < 16 ? num_rows - done : 16;
        const uint16_t* values = (const uint16_t*)x.values + (row0 + done) * x.stride;
        configure(rows, 64);
        if (rows == 16 && num_rows - done >= 32) {
            const uint16_t* more = values + 16 * x.stride;
            _tile_zero(0);
            _tile_zero(1);
            for (int g = 0; g < w.num_groups; g++) {
                _tile_loadd(6, data + (size_t)g * 1024, 64);
                _tile_loadd(4, values + g * kGroup, x.stride * 2);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(5, more + g * kGroup, x.stride * 2);
                _tile_dpbf16ps(1, 5, 6);
            }
            _tile_stored(0, acc + 16 * done, 64);
            _tile_stored(1, acc + 16 * done + 256, 64);
            done += 32;
            continue;
        }
        _tile_zero(0);
        for (int g = 0; g < w.num_groups; g++) {
            _tile_loadd(6, data + (size_t)g * 1024, 64);
            _tile_loadd(4, values + g * kGroup, x.stride * 2);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, acc + 16 * done, 64);
        done += rows;
    }
}

// -- choosing ------------------------------------------------------------------------------------------------------------

void amx_product(const Tiles& w, int tile, const Rows& x, int64_t row0, int num_rows, float* acc, uint8_t* scratch) {
    if (w.code == Code::bf16) return bf16_product(w, tile, x, row0, num_rows, acc);
    const bool integers = x.type == RowType::int8 && !w.half_groups && fits_signed(w);
    if (integers && num_rows >= kAmxMinRows) return int8_product(w, tile, x, row0, num_rows, acc, scratch);
    vector_product(w, tile, x, row0, num_rows, acc);
}

size_t amx_scratch_bytes(const Tiles& w) { return row_type(w.code) == RowType::int8 ? (size_t)w.num_groups * 512 : 0; }

}  // namespace
}  // namespace octavo
