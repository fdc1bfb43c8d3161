// Cosine and sine table that grows with the positions used.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../plan/specs.h"

namespace octavo {

class RopeAngles {
  public:
    explicit RopeAngles(AnglesSpec spec) : spec_(std::move(spec)) {}
    void ensure(int positions) {
        const int n = static_cast<int>(size());
        const int have = n ? static_cast<int>(table_.size() / (2 * n)) : positions;
        if (positions <= have) return;
        const int want = std::max(positions, 2 * have);
        table_.resize(static_cast<size_t>(want) * 2 * n);
        for (int p = have; p < want; p++) {
            const bool is_long = !spec_.long_inv_freq.empty() && p >= spec_.long_start;
            const std::vector<double>& inv_freq = is_long ? spec_.long_inv_freq : spec_.inv_freq;
            const double mscale = is_long ? spec_.long_mscale : spec_.mscale;
            const int at = is_long ? p - spec_.long_start : p;
            float* row = table_.data() + static_cast<size_t>(p) * 2 * n;
            for (int i = 0; i < n; i++) {
                row[i] = static_cast<float>(std::cos(at * inv_freq[i]) * mscale);
                row[n + i] = static_cast<float>(std::sin(at * inv_freq[i]) * mscale);
            }
        }
    }
    const float* cos(int position) const {
        return table_.data() + static_cast<size_t>(position) * 2 * size();
    }
    const float* sin(int position) const { return cos(position) + size(); }

  private:
    size_t size() const { return spec_.inv_freq.size(); }

    AnglesSpec spec_;
    std::vector<float> table_;  // [positions][2][n]
};

}  // namespace octavo
