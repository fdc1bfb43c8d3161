#include "step.h"

#include <cstring>

namespace octavo {

KvMemory::KvMemory(std::vector<KvGroup> groups) : groups_(std::move(groups)) {
    for (const auto& g : groups_)
        memory_.push_back(
            std::make_unique<Memory>((size_t)g.num_blocks * g.num_layers * g.block_bytes(), true));
}

KvLayer KvMemory::layer(int group, int layer) const {
    const KvGroup& g = groups_[group];
    return KvLayer{at(group, layer * g.num_heads, 0),
                   g.num_blocks * g.head_bytes(),
                   g.head_bytes(),
                   g.v_offset(),
                   g.scales_offset(),
                   g.type,
                   g.num_heads,
                   g.k_width,
                   g.v_width,
                   g.v_padded()};
}

// One head's share of a block in one layer; `part` counts layers and heads.
uint8_t* KvMemory::at(int group, int part, int block) const {
    const KvGroup& g = groups_[group];
    return memory_[group]->data() + ((size_t)part * g.num_blocks + block) * g.head_bytes();
}

template <typename Fn>
void KvMemory::for_each_part(int group, const Fn& fn) const {
    const KvGroup& g = groups_[group];
    for (int part = 0; part < g.num_layers * g.num_heads; part++) fn(part, g.head_bytes());
}

void KvMemory::copy_block(int group, int source, int target) {
    for_each_part(group, [&](int part, size_t bytes) {
        std::memcpy(at(group, part, target), at(group, part, source), bytes);
    });
}

void KvMemory::read_block(int group, int block, uint8_t* to) const {
    for_each_part(group, [&](int part, size_t bytes) {
        std::memcpy(to + part * bytes, at(group, part, block), bytes);
    });
}

void KvMemory::read_layer(int group, int layer, int block, uint8_t* to) const {
    const KvGroup& g = groups_[group];
    for (int head = 0; head < g.num_heads; head++)
        std::memcpy(to + head * g.head_bytes(), at(group, layer * g.num_heads + head, block), g.head_bytes());
}

void KvMemory::write_block(int group, int block, const uint8_t* from) {
    for_each_part(group, [&](int part, size_t bytes) {
        std::memcpy(at(group, part, block), from + part * bytes, bytes);
    });
}

void KvMemory::give_back(int group, int block, int count) {
    for_each_part(group, [&](int part, size_t bytes) {
        memory_[group]->give_back(at(group, part, block) - memory_[group]->data(), count * bytes);
    });
}

}  // namespace octavo
