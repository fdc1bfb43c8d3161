// A StepRunner as Python runs it: steps come as StepBatch and StepOutput.
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

    // updates: by site None, or (A, B, scales, gain or None, bias or None), whose arrays are kept.
    void put_adapter(int slot, const nb::list& updates) {
        std::vector<SiteUpdate> sites;
        for (const auto& item : updates) sites.push_back(update_of(nb::borrow(item)));
        runner.adapters().put(slot, std::move(sites), runner.adapter_rows());
        if (slot >= static_cast<int>(adapter_arrays_.size())) adapter_arrays_.resize(slot + 1);
        adapter_arrays_[slot] = updates;
    }
    void drop_adapter(int slot) {
        runner.adapters().drop(slot);
        if (slot >= 0 && slot < static_cast<int>(adapter_arrays_.size())) adapter_arrays_[slot] = nb::none();
    }
    // batch: StepBatch; output: StepOutput, whose arrays are filled in; check: None, or a function that is
    // given the step's index once it is drawn, and returns None or a Redraw; it is asked again behind one that
    // is not the last.
    void run(const nb::object& batch, const nb::object& output, const std::shared_ptr<KvMemory>& kv,
             const nb::object& check) {
        run_and_check(read_batch(batch, output), *kv, check, 0);
    }

    void run_and_check(const Batch& step, const KvMemory& kv, const nb::object& check, int index) {
        {
            nb::gil_scoped_release release;
            runner.run(step, kv);
        }
        check_draws(step, kv, check, index);
    }

    void check_draws(const Batch& step, const KvMemory& kv, const nb::object& check, int index) {
        if (check.is_none()) return;
        const Checking checking(*this, step, kv);
        std::vector<SamplingRecord> records(step.sampling.records, step.sampling.records + step.num_samples);
        for (nb::object found = check(index); !found.is_none();) {
            draw_again(step, kv, found, records);
            if (nb::cast<bool>(found.attr("is_last"))) return;
            found = check(index);
        }
    }

    // Changes the records of a Redraw's rows, and draws from them again.
    void draw_again(const Batch& step, const KvMemory& kv, const nb::object& found,
                    std::vector<SamplingRecord>& records) {
        const auto samples = array_of<Array<int32_t, nb::ndim<1>>>(found, "samples");
        const auto masks = array_of<Array<uint32_t, nb::ndim<2>>>(found, "masks");
        if (masks.shape(0) != samples.size() || static_cast<int>(masks.shape(1)) != (vocab() + 31) / 32)
            throw std::invalid_argument("masks: not one for each row that is drawn again");
        const std::vector<int32_t> rows(samples.data(), samples.data() + samples.size());
        if (!found.attr("mirostat_mus").is_none()) {
            const auto mus = array_of<Array<float, nb::ndim<1>>>(found, "mirostat_mus");
            if (mus.size() != samples.size())
                throw std::invalid_argument("mirostat_mus: not one for each row that is drawn again");
            for (size_t i = 0; i < rows.size(); i++)
                if (rows[i] >= 0 && rows[i] < step.num_samples && !std::isnan(mus.data()[i]))
                    records[rows[i]].mirostat_mu = mus.data()[i];
        }
        const auto replaced = replaced_logits(found, rows.size());
        nb::gil_scoped_release release;
        runner.redraw(step, kv, rows, records, masks.data(), replaced);
    }

    // Returns the logits that each of a Redraw's rows is drawn from, null where these are its own.
    std::vector<const float*> replaced_logits(const nb::object& redraw, size_t num_rows) const {
        std::vector<const float*> found(num_rows);
        if (redraw.attr("logits").is_none()) return found;
        const auto logits = array_of<Array<float, nb::ndim<2>>>(redraw, "logits");
        const auto places = array_of<Array<int32_t, nb::ndim<1>>>(redraw, "places");
        if (places.size() != num_rows || static_cast<int>(logits.shape(1)) != vocab())
            throw std::invalid_argument("logits: not a row of the vocabulary for each that is drawn again");
        for (size_t i = 0; i < num_rows; i++) {
            if (places.data()[i] >= static_cast<int>(logits.shape(0)))
                throw std::invalid_argument("places: behind the logits");
            if (places.data()[i] >= 0) found[i] = logits.data() + places.data()[i] * logits.shape(1);
        }
        return found;
    }

    // Copies the logits of a sampled row of the last step, which kept them, to `out` [V].
    void copy_logits(int sample, const Out<float>& out) const {
        if (static_cast<int>(out.size()) != vocab())
            throw std::invalid_argument("logits: not the vocabulary");
        std::memcpy(out.data(), runner.kept_logits(sample), sizeof(float) * vocab());
    }

    // Writes the candidates of sampled rows of the step whose draws are being checked to `out` [N][8].
    void candidates(const Array<int32_t, nb::ndim<1>>& samples, const Out<int32_t, nb::ndim<2>>& out) {
        if (!checked_step_) throw std::invalid_argument("candidates: no draws are being checked");
        if (out.shape(0) != samples.size() || out.shape(1) != kMostCandidates)
            throw std::invalid_argument("candidates: not 8 of each row");
        const std::vector<int32_t> rows(samples.data(), samples.data() + samples.size());
        nb::gil_scoped_release release;
        runner.write_candidates(*checked_step_, *checked_kv_, rows, out.data());
    }

    nb::list profiled() const {
        nb::list rows;
        for (const auto& [name, time] : runner.profiled())
            rows.append(nb::make_tuple(name, time.code, time.calls, time.seconds, time.cost.bytes,
                                       time.cost.operations));
        return rows;
    }

  private:
    // Says for as long as it lives which step's draws are being checked.
    struct Checking {
        BoundRunner& runner;
        Checking(BoundRunner& r, const Batch& step, const KvMemory& kv) : runner(r) {
            runner.checked_step_ = &step;
            runner.checked_kv_ = &kv;
        }
        Checking(const Checking&) = delete;
        ~Checking() { runner.checked_step_ = nullptr; }
    };

    const Batch* checked_step_ = nullptr;
    const KvMemory* checked_kv_ = nullptr;

    static SiteUpdate update_of(const nb::object& item) {
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

    std::vector<nb::object> adapter_arrays_;  // by slot: what its adapter's matrices lie in
};

}  // namespace octavo
