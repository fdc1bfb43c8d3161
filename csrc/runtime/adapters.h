// Adapters: the matrices in each slot, and the rows of a step that use them.
//
// A site is a matrix of the program that adapters may update. The sites of one linear op form a group,
// whose h are computed together. Ranks differ between adapters and sites; nothing is padded to the highest
// rank. The matrices are Python's arrays; bindings/runner.h keeps them alive.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../kernels/table.h"
#include "memory.h"

namespace octavo {

// An adapter's update of one site: y = gain * (W x + B (scales * A x)) + bias.
struct SiteUpdate {
    LowRankMatrix a{},
        b{};  // a: [rank][stride], b: [tiles][rank][16]; for an embedding table a is [rows][rank]
    const float* scales = nullptr;  // [rank]
    const float *gain = nullptr, *bias = nullptr;  // [tiles * 16] or null
    int offset = 0;  // of its h within the group's
    bool is_set = false;
};

// The rows of a step, or of a block of it, that have adapters, sorted by adapter.
struct AdapterRows {
    static constexpr int kMaxRunRows = 8;  // rows per run, at most
    struct Run {
        int slot, first, count;
    };
    std::vector<int32_t> rows;
    std::vector<Run> runs;

    // Sorts rows first .. end - 1 by slot. slots: by row, -1: no adapter.
    void sort(const int32_t* slots, int first, int end) {
        rows.clear();
        runs.clear();
        for (int row = first; row < end; row++)
            if (slots[row] >= 0) rows.push_back(row);
        std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) { return slots[a] < slots[b]; });
        for (int i = 0; i < static_cast<int>(rows.size()); i++) {
            const int slot = slots[rows[i]];
            if (runs.empty() || runs.back().slot != slot || runs.back().count == kMaxRunRows)
                runs.push_back({slot, i, 0});
            runs.back().count++;
        }
    }
};

// Padded row length of adapter inputs: a multiple of two vectors.
inline int64_t padded_width(int width) {
    return static_cast<int64_t>(width + 2 * kTile - 1) / (2 * kTile) * (2 * kTile);
}

class Adapters {
  public:
    // groups: by site, -1: a site without a group, such as an embedding table's.
    explicit Adapters(std::vector<int> groups) : groups_(std::move(groups)) {
        for (const int group : groups_) num_groups_ = std::max(num_groups_, group + 1);
    }
    int num_sites() const { return static_cast<int>(groups_.size()); }

    // -- slots; no step may be running --
    // sites: one per site of the program, those without an update unset.
    void put(int slot, std::vector<SiteUpdate> sites, int num_rows) {
        if (slot < 0 || static_cast<int>(sites.size()) != num_sites())
            throw std::invalid_argument("slot " + std::to_string(slot) + ": updates of " +
                                        std::to_string(sites.size()) + " sites, the program has " +
                                        std::to_string(num_sites()));
        if (slot >= static_cast<int>(slots_.size())) slots_.resize(slot + 1);
        std::vector<int> ranks(num_groups_, 0);
        int max_rank = 0;
        for (int site = 0; site < num_sites(); site++) {
            SiteUpdate& update = sites[site];
            const int group = groups_[site];
            if (!update.is_set) continue;
            if (group < 0) {
                max_rank = std::max(max_rank, update.b.rank);
            } else {
                update.offset = ranks[group];
                ranks[group] += update.b.rank;
            }
        }
        for (const int rank : ranks) max_rank = std::max(max_rank, rank);
        slots_[slot] = std::move(sites);
        if (max_rank > stride_ || !h_) {
            stride_ = std::max((max_rank + kTile - 1) / kTile * kTile, kTile);
            h_ = std::make_unique<Memory>(sizeof(float) * stride_ * num_rows);
        }
    }
    void drop(int slot) {
        if (has(slot)) slots_[slot].clear();
    }
    bool has(int slot) const {
        return slot >= 0 && slot < static_cast<int>(slots_.size()) && !slots_[slot].empty();
    }

    // -- a step --
    const SiteUpdate* update(int slot, int site) const {
        if (slot < 0 || site < 0) return nullptr;
        const SiteUpdate& found = slots_[slot][site];
        return found.is_set ? &found : nullptr;
    }
    // Memory for the h of a row's group.
    float* h(int64_t row) const { return reinterpret_cast<float*>(h_->data()) + row * stride_; }
    int stride() const { return stride_; }

  private:
    const std::vector<int> groups_;  // by site
    int num_groups_ = 0;
    std::vector<std::vector<SiteUpdate>> slots_;  // empty: no adapter
    int stride_ = 0;
    std::unique_ptr<Memory> h_;
};

}  // namespace octavo
