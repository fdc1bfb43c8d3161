#include "bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "../plan/packing.h"
#include "../runtime/neuron_cache.h"
#include "../runtime/weight_stream.h"
#include "arrays.h"
#include "parse.h"

namespace octavo {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Returns tiles with a layout, without memory.
std::shared_ptr<PackedTiles> lay_out(const TileTuple& layout) {
    const auto& [code, scale_type, zero_point_kind, half_groups, half_factors, span, zero_point, num_rows,
                 num_inputs, stride, table, numbers] = layout;
    if (table.size() != kTile || numbers.size() != kTile)
        throw std::invalid_argument("a layout has tables of 16 numbers");
    const TileFormat format{parse_code(code),
                            parse_scale_type(scale_type),
                            parse_zero_point_kind(zero_point_kind),
                            half_groups,
                            span,
                            half_factors};
    auto packed = std::make_shared<PackedTiles>();
    packed->tiles = make_tiles(format, num_rows, num_inputs);
    packed->tiles.zero_point = zero_point;
    std::copy(table.begin(), table.end(), packed->tiles.table);
    std::copy(numbers.begin(), numbers.end(), packed->tiles.numbers);
    packed->tiles.tile_stride = stride;
    return packed;
}

// Throws if tiles at an offset are not within `bytes`.
void check_inside(const Tiles& t, size_t offset, size_t bytes) {
    if (t.tile_stride < t.tile_bytes || offset + (t.num_tiles() - 1) * t.tile_stride + t.tile_bytes > bytes)
        throw std::invalid_argument("tiles outside the memory of weights");
}

std::shared_ptr<PackedTiles> tiles_in(const std::shared_ptr<WeightStream>& stream, size_t offset,
                                      const TileTuple& layout) {
    auto packed = lay_out(layout);
    check_inside(packed->tiles, offset, stream->memory_bytes());
    packed->memory = {stream, stream->memory() + offset};
    packed->tiles.data = packed->memory.get();
    return packed;
}

std::vector<WeightChunk> make_chunks(const std::vector<std::tuple<int64_t, size_t, size_t>>& tuples) {
    std::vector<WeightChunk> chunks;
    for (const auto& [file_offset, bytes, memory_offset] : tuples)
        chunks.push_back({file_offset, bytes, memory_offset});
    return chunks;
}

using NeuronTuple = std::tuple<int64_t, int, size_t, size_t, int, std::vector<int32_t>>;

std::vector<NeuronCache::Layer> make_neuron_layers(const std::vector<NeuronTuple>& tuples) {
    std::vector<NeuronCache::Layer> layers;
    for (const auto& [offset, neurons, up_bytes, record_bytes, slots, pinned] : tuples)
        layers.push_back({offset, neurons, up_bytes, record_bytes, slots, pinned});
    return layers;
}

// Returns the tiles at an offset in each record of a layer.
std::shared_ptr<PackedTiles> tiles_of_records(const std::shared_ptr<NeuronCache>& cache, int layer,
                                              size_t offset, const TileTuple& layout) {
    if (layer < 0 || layer >= cache->num_layers()) throw std::invalid_argument("no layer of the cache");
    auto packed = lay_out(layout);
    check_inside(packed->tiles, offset, cache->layer(layer).record_bytes);
    packed->tiles.data = reinterpret_cast<const uint8_t*>(offset);
    packed->records = cache;
    packed->layer = layer;
    return packed;
}

// Returns the tiles of a layer's down projection, which reads the columns of the cache: scales only.
std::shared_ptr<PackedTiles> columns_in(const std::shared_ptr<NeuronCache>& cache, int layer,
                                        const Array<float, nb::ndim<1>>& scales) {
    if (layer < 0 || layer >= cache->num_layers()) throw std::invalid_argument("no layer of the cache");
    const NeuronCache::Layer& shape = cache->layer(layer);
    auto packed = std::make_shared<PackedTiles>();
    packed->tiles = make_tiles({Code::i8}, static_cast<int64_t>(scales.size()), shape.num_neurons);
    Tiles& t = packed->tiles;
    t.tile_stride = kTile;
    t.column_stride = t.num_tiles() * kTile;
    if (shape.record_bytes - shape.up_bytes < static_cast<size_t>(t.column_stride))
        throw std::invalid_argument("the number of scales does not match the columns");
    struct CacheColumns {
        std::shared_ptr<NeuronCache> cache;
        std::vector<float> scales;
    };
    const auto owner = std::make_shared<CacheColumns>();
    owner->cache = cache;
    owner->scales.assign(scales.data(), scales.data() + scales.size());
    owner->scales.resize(t.column_stride);
    t.columns = cache->columns();
    packed->memory = {owner, reinterpret_cast<uint8_t*>(owner->scales.data())};
    t.data = packed->memory.get();
    return packed;
}

}  // namespace

void bind_weights(nb::module_& m) {
    nb::exception<WeightReadError>(m, "WeightReadError", PyExc_OSError);
    nb::exception<WeightFileTruncated>(m, "WeightFileTruncated", PyExc_OSError);
    using ChunkTuples = std::vector<std::tuple<int64_t, size_t, size_t>>;
    nb::class_<WeightStream>(m, "WeightStream")
        .def(
            "__init__",
            [](WeightStream* self, const std::string& path, const ChunkTuples& resident,
               const ChunkTuples& streamed, size_t memory_bytes, int num_threads, size_t block_bytes) {
                nb::gil_scoped_release release;
                new (self) WeightStream({path, num_threads, block_bytes}, make_chunks(resident),
                                        make_chunks(streamed), memory_bytes);
            },
            "path"_a, "resident"_a, "streamed"_a, "memory_bytes"_a, "num_threads"_a, "block_bytes"_a,
            "Chunks are (offset in the file, bytes, offset in memory), multiples of 4096.")
        .def(
            "tiles",
            [](const std::shared_ptr<WeightStream>& stream, size_t offset, const TileTuple& layout) {
                return tiles_in(stream, offset, layout);
            },
            "offset"_a, "layout"_a, "Returns the PackedTiles at an offset in memory.")
        .def_prop_ro("is_direct", &WeightStream::is_direct)
        .def_prop_ro("bytes_read", &WeightStream::bytes_read, "Bytes read since the start.")
        .def_prop_ro("num_found", &WeightStream::num_found,
                     "Chunks that were in memory when an op requested them.")
        .def_prop_ro("num_waited", &WeightStream::num_waited, "Chunks that an op waited for.")
        .def_prop_ro("wait_seconds", &WeightStream::wait_seconds, "Time that ops have waited for weights.");

    nb::class_<NeuronCache>(m, "NeuronCache")
        .def(
            "__init__",
            [](NeuronCache* self, const std::string& path, const std::vector<NeuronTuple>& layers,
               int num_threads, size_t max_read_bytes, size_t gap_bytes, int window, double half_life,
               bool predicts) {
                nb::gil_scoped_release release;
                new (self)
                    NeuronCache({path, num_threads, max_read_bytes, gap_bytes, window, half_life, predicts},
                                make_neuron_layers(layers));
            },
            "path"_a, "layers"_a, "num_threads"_a, "most_bytes"_a, "gap_bytes"_a, "window"_a,
            "half_life"_a = 0.0, "predicts"_a = false,
            "Layers are (offset in the file, neurons, bytes of its rows, bytes of a record, slots, pinned "
            "neurons).")
        .def_static(
            "in_memory",
            [](const std::vector<std::tuple<int, size_t, size_t>>& layers) {
                std::vector<NeuronCache::Layer> shapes;
                for (const auto& [neurons, up_bytes, record_bytes] : layers)
                    shapes.push_back({0, neurons, up_bytes, record_bytes, 0});
                return std::make_shared<NeuronCache>(std::move(shapes));
            },
            "layers"_a,
            "Returns a cache of all records of layers (neurons, bytes of its rows, bytes of a record).")
        .def(
            "fill",
            [](NeuronCache& self, int layer, const Array<uint8_t, nb::ndim<2>>& records) {
                if (layer < 0 || layer >= self.num_layers())
                    throw std::invalid_argument("no layer of the cache");
                self.fill(layer, records.data(), records.size());
            },
            "layer"_a, "records"_a, "Sets all records of a layer of a cache in memory.")
        .def("tiles", &tiles_of_records, "layer"_a, "offset"_a, "layout"_a,
             "Returns the PackedTiles at an offset in each record of a layer.")
        .def("columns", &columns_in, "layer"_a, "scales"_a,
             "Returns the PackedTiles of a layer's down projection, whose outputs have these scales.")
        .def_prop_ro("is_direct", &NeuronCache::is_direct)
        .def_prop_ro("memory_bytes", &NeuronCache::memory_bytes)
        .def_prop_ro("bytes_read", &NeuronCache::bytes_read, "Bytes read since the start.")
        .def_prop_ro("num_found", &NeuronCache::num_found, "Requested records that were in memory.")
        .def_prop_ro("num_read", &NeuronCache::num_read, "Requested records that were read.")
        .def_prop_ro("num_prefetched", &NeuronCache::num_prefetched, "Prefetched records.")
        .def_prop_ro("num_prefetched_used", &NeuronCache::num_prefetched_used,
                     "Prefetched records that were requested.")
        .def_prop_ro("wait_seconds", &NeuronCache::wait_seconds, "Time that ops have waited for records.");
}

}  // namespace octavo
