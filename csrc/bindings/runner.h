// A StepRunner for Python: steps are StepBatch and StepOutput.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../runtime/step_runner.h"
#include "arrays.h"
#include "device.h"
#include "read_batch.h"

namespace octavo {

namespace nb = nanobind;

struct BoundRunner {
    std::shared_ptr<Device> device;
    StepRunner runner;

    BoundRunner(std::shared_ptr<Device> d, std::shared_ptr<const Plan> plan,
                std::shared_ptr<WeightStream> stream, bool share_prefixes)
        : device(std::move(d)), runner(device->pool, std::move(plan), std::move(stream), share_prefixes) {}

    int vocab() const { return runner.plan().options.vocab; }

    // updates: by site None, or (A, B, scales, gain or None, bias or None). The arrays are kept alive.
    void put_adapter(int slot, const nb::list& updates) {
        std::vector<SiteUpdate> sites;
        for (const auto& item : updates) sites.push_back(read_update(nb::borrow(item)));
        runner.adapters().put(slot, std::move(sites), runner.num_adapter_rows());
        if (slot >= static_cast<int>(adapter_arrays_.size())) adapter_arrays_.resize(slot + 1);
        adapter_arrays_[slot] = updates;
    }
    void drop_adapter(int slot) {
        runner.adapters().drop(slot);
        if (slot >= 0 && slot < static_cast<int>(adapter_arrays_.size())) adapter_arrays_[slot] = nb::none();
    }
    // batch: StepBatch; output: StepOutput, whose arrays are filled; check: None, or a function that is
    // called with the step's index after sampling and returns None or a Resample. It is called again after a
    // Resample that is not the last.
    void run(const nb::object& batch, const nb::object& output, const std::shared_ptr<KvMemory>& kv,
             const nb::object& check) {
        run_and_check(read_batch(batch, output), *kv, check, 0);
    }

    void run_and_check(const Batch& step, const KvMemory& kv, const nb::object& check, int index) {
        {
            nb::gil_scoped_release release;
            runner.run(step, kv);
        }
        verify_samples(step, kv, check, index);
    }

    void verify_samples(const Batch& step, const KvMemory& kv, const nb::object& check, int index) {
        if (check.is_none()) return;
        const VerificationScope checking(*this, step, kv);
        std::vector<SamplingRecord> records(step.sampling.records, step.sampling.records + step.num_samples);
        for (nb::object found = check(index); !found.is_none();) {
            resample(step, kv, found, records);
            if (nb::cast<bool>(found.attr("is_last"))) return;
            found = check(index);
        }
    }

    // Updates the records of the rows of a Resample and samples these rows again.
    void resample(const Batch& step, const KvMemory& kv, const nb::object& found,
                  std::vector<SamplingRecord>& records) {
        const auto samples = get_array<Array<int32_t, nb::ndim<1>>>(found, "samples");
        const auto masks = get_array<Array<uint32_t, nb::ndim<2>>>(found, "masks");
        if (masks.shape(0) != samples.size() || static_cast<int>(masks.shape(1)) != (vocab() + 31) / 32)
            throw std::invalid_argument("masks: not one for each resampled row");
        const std::vector<int32_t> rows(samples.data(), samples.data() + samples.size());
        if (!found.attr("mirostat_mus").is_none()) {
            const auto mus = get_array<Array<float, nb::ndim<1>>>(found, "mirostat_mus");
            if (mus.size() != samples.size())
                throw std::invalid_argument("mirostat_mus: not one for each resampled row");
            for (size_t i = 0; i < rows.size(); i++)
                if (rows[i] >= 0 && rows[i] < step.num_samples && !std::isnan(mus.data()[i]))
                    records[rows[i]].mirostat_mu = mus.data()[i];
        }
        const auto replacement_logits = read_replacement_logits(found, rows.size());
        nb::gil_scoped_release release;
        runner.resample(step, kv, rows, records, masks.data(), replacement_logits);
    }

    // Returns the logits that each resampled row is sampled from; null: its own.
    std::vector<const float*> read_replacement_logits(const nb::object& resample, size_t num_rows) const {
        std::vector<const float*> found(num_rows);
        if (resample.attr("logits").is_none()) return found;
        const auto logits = get_array<Array<float, nb::ndim<2>>>(resample, "logits");
        const auto row_indices = get_array<Array<int32_t, nb::ndim<1>>>(resample, "logits_indices");
        if (row_indices.size() != num_rows || static_cast<int>(logits.shape(1)) != vocab())
            throw std::invalid_argument("logits: not a row of the vocabulary for each resampled row");
        for (size_t i = 0; i < num_rows; i++) {
            if (row_indices.data()[i] >= static_cast<int>(logits.shape(0)))
                throw std::invalid_argument("logits_indices: an index beyond the last row of logits");
            if (row_indices.data()[i] >= 0)
                found[i] = logits.data() + row_indices.data()[i] * logits.shape(1);
        }
        return found;
    }

    // Copies the logits of a sampled row of the last step, which kept them, to `out` [V].
    void copy_logits(int sample, const Out<float>& out) const {
        if (static_cast<int>(out.size()) != vocab())
            throw std::invalid_argument("logits: not the vocabulary");
        std::memcpy(out.data(), runner.kept_logits(sample), sizeof(float) * vocab());
    }

    // Writes the candidates of sampled rows of the step that is being verified to `out` [N][8].
    void candidates(const Array<int32_t, nb::ndim<1>>& samples, const Out<int32_t, nb::ndim<2>>& out) {
        if (!verified_step_) throw std::invalid_argument("candidates: no samples are being verified");
        if (out.shape(0) != samples.size() || out.shape(1) != kMaxCandidates)
            throw std::invalid_argument("candidates: not 8 of each row");
        const std::vector<int32_t> rows(samples.data(), samples.data() + samples.size());
        nb::gil_scoped_release release;
        runner.write_candidates(*verified_step_, *verified_kv_, rows, out.data());
    }

    nb::list profiled() const {
        nb::list rows;
        for (const auto& [name, time] : runner.profiled())
            rows.append(nb::make_tuple(name, time.code, time.calls, time.seconds, time.cost.bytes,
                                       time.cost.operations));
        return rows;
    }

  private:
    // Marks a step as the one that is being verified during its lifetime.
    struct VerificationScope {
        BoundRunner& runner;
        VerificationScope(BoundRunner& r, const Batch& step, const KvMemory& kv) : runner(r) {
            runner.verified_step_ = &step;
            runner.verified_kv_ = &kv;
        }
        VerificationScope(const VerificationScope&) = delete;
        ~VerificationScope() { runner.verified_step_ = nullptr; }
    };

    const Batch* verified_step_ = nullptr;
    const KvMemory* verified_kv_ = nullptr;

    static SiteUpdate read_update(const nb::object& item) {
        if (item.is_none()) return {};
        const auto t = nb::cast<nb::tuple>(item);
        const auto b = nb::cast<nb::ndarray<nb::ro, nb::ndim<3>, nb::c_contig, nb::device::cpu>>(t[1]);
        const auto a = nb::cast<nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>>(t[0]);
        const auto scales = nb::cast<Array<float>>(t[2]);
        const int rank = static_cast<int>(scales.size());
        SiteUpdate update{
            .a = {a.data(), static_cast<AdapterNumber>(a.itemsize()), rank, static_cast<int32_t>(a.shape(1))},
            .b = {b.data(), static_cast<AdapterNumber>(b.itemsize()), rank, 0},
            .scales = scales.data(),
            .is_set = true};
        if (!t[3].is_none()) update.gain = nb::cast<Array<float>>(t[3]).data();
        if (!t[4].is_none()) update.bias = nb::cast<Array<float>>(t[4]).data();
        return update;
    }

    std::vector<nb::object> adapter_arrays_;  // by slot: arrays of the adapter's matrices
};

}  // namespace octavo
