#include "step.h"

#include <cstring>

namespace octavo {

KvMemory::KvMemory(std::vector<KvGroup> groups) : groups_(std::move(groups)) {
    for (const auto& g : groups_) memory_.push_back(std::make_unique<Memory>((size_t)g.num_blocks * g.num_layers * g.block_bytes()));
}

KvLayer KvMemory::layer(int group, int layer) const {
    const KvGroup& g = groups_[group];
    uint8_t* base = memory_[group]->data() + (size_t)layer * g.num_blocks * g.block_bytes();
    return KvLayer{base, g.block_bytes(), g.v_offset(), g.is_bf16, g.num_heads, g.k_width, g.v_width, g.v_padded()};
}

void KvMemory::copy_block(int group, int source, int target) {
    for (int l = 0; l < groups_[group].num_layers; l++) {
        const KvLayer kv = layer(group, l);
        std::memcpy(kv.base + target * kv.block_bytes, kv.base + source * kv.block_bytes, kv.block_bytes);
    }
}

void KvMemory::read_block(int group, int block, uint8_t* bytes) const {
    for (int l = 0; l < groups_[group].num_layers; l++) {
        const KvLayer kv = layer(group, l);
        std::memcpy(bytes + l * kv.block_bytes, kv.base + block * kv.block_bytes, kv.block_bytes);
    }
}

void KvMemory::write_block(int group, int block, const uint8_t* bytes) {
    for (int l = 0; l < groups_[group].num_layers; l++) {
        const KvLayer kv = layer(group, l);
        std::memcpy(kv.base + block * kv.block_bytes, bytes + l * kv.block_bytes, kv.block_bytes);
    }
}

}  // namespace octavo
