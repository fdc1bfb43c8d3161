// Packs weights into the kernels' tiles, from a PackedWeight's arrays (quant/packed.py) or a file's blocks
// (quant/blocks.py).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "../kernels/table.h"
#include "../runtime/memory.h"
#include "../runtime/thread_pool.h"

namespace octavo {

class NeuronCache;

// Layout of a weight in tiles.
struct TileFormat {
    Code code;
    ScaleType scale_type = ScaleType::fp32;
    ZeroPointKind zero_point_kind = ZeroPointKind::none;
    bool half_groups = false;
    int span = 0;  // of float codes: groups of 32 inputs that share a scale
    bool half_factors = false;  // of small scales: whether their factors are fp16
};

// Returns tiles of a weight of `num_rows` outputs and `num_inputs` inputs, without memory.
Tiles make_tiles(const TileFormat& format, int64_t num_rows, int num_inputs);

// Bytes of all tiles of a weight.
inline size_t total_bytes(const Tiles& tiles) { return tiles.num_tiles() * tiles.tile_bytes; }

struct PackedTiles {
    Tiles tiles;
    std::shared_ptr<uint8_t> memory;
    // Cache with a record of each expert, and its layer; `tiles.data` is then the offset in a record.
    std::shared_ptr<NeuronCache> records{};
    int layer = 0;
    size_t num_bytes() const { return total_bytes(tiles); }
};

// Numbers [rows][columns][per_column] of a kind, with strides in bytes; the numbers of a column are
// adjacent.
//   scales6, mins6   columns of 12 bytes with 8 scales and 8 mins of six bits each, as in ggml's Q4_K and
//                    Q5_K; mins6 are negated
//   scales4, mins4   columns of 16 bytes with a scale in each low nibble and a min in each high one, as in
//                    ggml's Q2_K; mins4 are negated
//   signed6          columns of 12 bytes with 16 numbers of six bits, minus 32, as in ggml's Q3_K
struct Matrix {
    enum class Kind { u8, i8, fp16, bf16, fp32, scales6, mins6, scales4, mins4, signed6 } kind = Kind::u8;
    const uint8_t* data = nullptr;
    int64_t rows = 0, columns = 0;
    int64_t row_stride = 0, column_stride = 0;
    int per_column = 1;
    int64_t numbers() const { return columns * per_column; }
};

// Some bits of each code of a block; each plane has higher bits than the one before. A run of `run` bytes,
// the first at `start`, holds `bits` bits of each of run * 8 / bits neighbouring inputs: those of input i
// in byte i % run, from bit i / run * bits up. The next run holds the next inputs.
struct Plane {
    int start, bits, run;
};

// Rows of blocks: `block_bytes` bytes hold the codes of `block_inputs` neighbouring inputs in planes, and
// possibly other data. The last block of a row may be incomplete.
struct CodeRows {
    const uint8_t* data = nullptr;
    int64_t rows = 0, row_stride = 0, row_bytes = 0;
    int block_inputs = 0, block_bytes = 0;
    std::vector<Plane> planes;
    bool is_signed = false;  // 8-bit codes only
    int bits() const;
    // Makes rows that hold codes only: one per byte, or two, with inputs j and j + half in byte j of 2 *
    // half inputs.
    static CodeRows plain(const uint8_t* data, int64_t rows, int num_inputs, int bits, bool is_signed,
                          int half = 1);
};

// Codes of up to 8 bits, with scales and mins of groups of `group` inputs. With a second level, scale i is
// multiplied by super scale i * (number of super scales) / (number of scales), and mins likewise.
struct QuantizedSource {
    CodeRows codes;
    int group, zero_point, num_inputs;
    Matrix scales, mins, super_scales, super_mins;  // `data` is null if there are none
    Matrix zeros{};  // i8 zero points of groups, in addition to zero_point; never with mins
    const int8_t* table = nullptr;  // [16], values of 4-bit codes if they are not linear
    // Code of a weight of floats: e4m3, or f4, whose codes have `numbers` [16]. A group is a multiple of 32
    // inputs or all inputs, with scales only.
    std::optional<Code> floats{};
    const float* numbers = nullptr;
    bool small_levels = false;  // stores scales of two levels as bytes with factors
    bool whole_rows = false;  // signed 8-bit codes with one scale per output, scales [rows][1]
    bool by_columns =
        false;  // stores whole_rows weights, and 4-bit codes with an even number of tiles, by columns
};

// Collects weights to pack. `add` allocates their memory, `run` writes it; sources must live until then.
class Packer {
  public:
    explicit Packer(WeightMemory& memory) : memory_(memory) {}
    PackedTiles add(const QuantizedSource& source);
    PackedTiles add(const Matrix& values, Code code);
    // Interleaves the tiles of the last two weights added, which one matmul reads together: one memory
    // stream is faster than two. Returns false and does nothing if their layouts differ.
    bool interleave(PackedTiles& first, PackedTiles& second);
    // Packs all weights added since the last call. Each thread writes an equal share of each weight.
    void run(ThreadPool& pool);
    size_t num_waiting_bytes() const { return num_waiting_bytes_; }

  private:
    // Writes one tile of a weight.
    using PackTile = std::function<void(int tile, uint8_t* to)>;
    struct Job {
        PackedTiles packed;
        PackTile pack;
    };
    PackedTiles add(const Tiles& tiles, PackTile pack);
    PackedTiles add_whole_rows(const QuantizedSource& source);
    PackedTiles add_floats(const QuantizedSource& source);

    WeightMemory& memory_;
    std::vector<Job> jobs_;
    size_t num_waiting_bytes_ = 0;
};

// Packs one weight immediately.
template <typename... Source>
PackedTiles pack(ThreadPool& pool, WeightMemory& memory, const Source&... source) {
    Packer packer(memory);
    const PackedTiles packed = packer.add(source...);
    packer.run(pool);
    return packed;
}

}  // namespace octavo
