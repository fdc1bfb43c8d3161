// Configurations of AMX tile registers. AMX multiplies up to 16 rows by 16 columns at a time, with a depth
// of 64 bytes.
#pragma once
#include "simd.h"

namespace octavo {
namespace {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int num_rows, int bytes) {
        rows[tile] = static_cast<uint8_t>(num_rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};

// Loading a configuration costs tens of cycles, so each thread keeps the last one between calls.
thread_local int configured = 0;
void forget_configuration() { configured = 0; }

template <typename Fill>
OCTAVO_INLINE void configure_as(int wanted, const Fill& fill) {
    if (configured == wanted) return;
    TileConfig config;
    fill(config);
    _tile_loadconfig(&config);
    configured = wanted;
}

// Configures the registers for a matmul: 0..3 sums of `rows` rows, 4..5 rows (A), 6..7 weights (B). One
// multiplication uses `depth` bytes of each row.
OCTAVO_INLINE void configure_matmul(int rows, int depth) {
    configure_as(rows * 1000 + depth, [&](TileConfig& config) {
        for (int t = 0; t < 4; t++) config.set(t, rows, 64);
        for (int t = 4; t < 6; t++) config.set(t, rows, depth);
        for (int t = 6; t < 8; t++) config.set(t, depth / 4, 64);
    });
}

// Configures the registers for attention: 0..3 sums of `lanes` rows, 4 queries, 5 weights of 16 tokens, 6
// keys of 16 tokens, 7 their values.
OCTAVO_INLINE void configure_attention(int lanes) {
    configure_as(lanes * 1000 + 999, [&](TileConfig& config) {
        for (int t = 0; t < 5; t++) config.set(t, lanes, 64);
        config.set(5, lanes, 32);
        config.set(6, 16, 64);
        config.set(7, 8, 64);
    });
}

}  // namespace
}  // namespace octavo
