#include "step.h"

#include <cstring>

namespace octavo {

KvMemory::KvMemory(std::vector<KvGroup> groups, const std::vector<int>& nodes)
    : groups_(std::move(groups)), spills_(groups_.size()) {
    for (const auto& g : groups_) memory_.push_back(std::make_unique<Memory>(g.memory_bytes(), true));
    for (int group = 0; group < num_groups(); group++) divide_heads(group, nodes);
}

// Places each head's memory on the node of the threads that attend to it (AttentionPlan::order_items).
void KvMemory::divide_heads(int group, const std::vector<int>& nodes) {
    KvGroup& g = groups_[group];
    const int num_nodes = static_cast<int>(nodes.size());
    if (num_nodes < 2 || g.by_blocks || g.holds_states || g.num_heads % num_nodes) return;
    g.by_heads = true;
    const size_t bytes = static_cast<size_t>(g.num_heads / num_nodes) * g.num_blocks * g.head_bytes();
    for (int part = 0; part < g.num_layers * num_nodes; part++)
        memory_[group]->place(part * bytes, bytes, nodes[part % num_nodes]);
}

void KvMemory::spill_to(int group, const KvSpill::Source& source, std::vector<int> layers) {
    const KvGroup& g = groups_.at(group);
    if (!g.by_blocks || g.holds_states) throw std::logic_error("a cache group that cannot be spilled");
    spills_[group] = std::make_unique<KvSpill>(
        source, KvSpill::Shape{g.num_blocks, g.record_bytes(), g.block_bytes(), std::move(layers)},
        *memory_[group]);
}

KvLayer KvMemory::layer(int group, int layer) const {
    const KvGroup& g = groups_[group];
    return KvLayer{at(group, layer, 0, 0),
                   g.by_blocks ? g.head_bytes() : g.num_blocks * g.head_bytes(),
                   g.by_blocks ? g.record_bytes() : g.head_bytes(),
                   g.v_offset(),
                   g.scales_offset(),
                   g.type,
                   g.num_heads,
                   g.k_width,
                   g.v_width,
                   g.v_padded()};
}

// Returns the address of one head of a block in one layer.
uint8_t* KvMemory::at(int group, int layer, int head, int block) const {
    const KvGroup& g = groups_[group];
    const size_t offset =
        g.by_blocks
            ? (static_cast<size_t>(layer) * g.num_blocks + block) * g.record_bytes() + head * g.head_bytes()
            : ((static_cast<size_t>(layer) * g.num_heads + head) * g.num_blocks + block) * g.head_bytes();
    return memory_[group]->data() + offset;
}

void KvMemory::copy_block(int group, int source, int target) {
    const KvGroup& g = groups_[group];
    std::vector<uint8_t> bytes(g.block_bytes());
    for (int layer = 0; layer < g.num_layers; layer++) {
        read_layer(group, layer, source, bytes.data());
        write_layer(group, layer, target, bytes.data());
    }
}

void KvMemory::read_block(int group, int block, uint8_t* to) const {
    const KvGroup& g = groups_[group];
    for (int layer = 0; layer < g.num_layers; layer++)
        read_layer(group, layer, block, to + layer * g.block_bytes());
}

void KvMemory::read_layer(int group, int layer, int block, uint8_t* to) const {
    const KvGroup& g = groups_[group];
    if (KvSpill* spill = this->spill(group); spill && spill->spills(layer))
        return spill->read_record(layer, block, to);
    for (int head = 0; head < g.num_heads; head++)
        std::memcpy(to + head * g.head_bytes(), at(group, layer, head, block), g.head_bytes());
}

void KvMemory::write_block(int group, int block, const uint8_t* from) {
    const KvGroup& g = groups_[group];
    for (int layer = 0; layer < g.num_layers; layer++)
        write_layer(group, layer, block, from + layer * g.block_bytes());
}

void KvMemory::write_layer(int group, int layer, int block, const uint8_t* from) {
    const KvGroup& g = groups_[group];
    if (KvSpill* spill = this->spill(group); spill && spill->spills(layer))
        return spill->write_record(layer, block, from);
    for (int head = 0; head < g.num_heads; head++)
        std::memcpy(at(group, layer, head, block), from + head * g.head_bytes(), g.head_bytes());
}

void KvMemory::release(int group, int block, int count) {
    const KvGroup& g = groups_[group];
    for (int layer = 0; layer < g.num_layers; layer++)
        for (int head = 0; head < g.num_heads; head++)
            memory_[group]->release(at(group, layer, head, block) - memory_[group]->data(),
                                    count * g.head_bytes());
}

}  // namespace octavo
