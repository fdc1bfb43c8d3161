#include "bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "decode_call.h"
#include "runner.h"

namespace octavo {

namespace nb = nanobind;
using namespace nb::literals;

void bind_runner(nb::module_& m) {
    nb::class_<BoundRunner>(m, "StepRunner")
        .def(nb::init<std::shared_ptr<Device>, std::shared_ptr<const Plan>, std::shared_ptr<WeightStream>,
                      bool>(),
             "device"_a, "plan"_a, "stream"_a = nb::none(), "share_prefixes"_a = true,
             nb::call_guard<nb::gil_scoped_release>(),
             "stream: weights that are read while steps run; share_prefixes: whether requests that start "
             "with the same blocks read them together.")
        .def_prop_ro(
            "plan", [](const BoundRunner& b) { return &b.runner.plan(); }, nb::rv_policy::reference_internal)
        .def("put_adapter", &BoundRunner::put_adapter, "slot"_a, "updates"_a,
             "Puts an adapter's matrices in a slot; by site None, or (A, B, scales, gain, bias).")
        .def("drop_adapter", &BoundRunner::drop_adapter, "slot"_a)
        .def_prop_ro(
            "rows_of_blocks", [](const BoundRunner& b) { return b.runner.min_row_block_tokens(); },
            "Number of tokens from which on threads may share a step's rows instead of outputs.")
        .def_prop_ro(
            "kv_written",
            [](const BoundRunner& b) {
                const uint64_t packed = b.runner.kv_written();
                return std::make_pair(static_cast<uint32_t>(packed >> 32), static_cast<uint32_t>(packed));
            },
            "The number of the last step, and how many of its kv_writes are done.")
        .def_prop_ro(
            "progress", [](const BoundRunner& b) { return b.runner.progress(); },
            "Grows while a step computes or weights arrive; may be read from any thread.")
        .def(
            "profile", [](BoundRunner& b, bool on) { b.runner.profile(on); }, "on"_a)
        .def("profiled", &BoundRunner::profiled,
             "For each kind of op: (name, code of its weights or \"\", calls, seconds, bytes, operations).")
        .def("run", &BoundRunner::run, "batch"_a, "output"_a, "kv"_a, "check"_a.none(),
             "Computes a StepBatch into the arrays of a StepOutput. The rows of a Resample from check(0) are "
             "sampled again.")
        .def("copy_logits", &BoundRunner::copy_logits, "sample"_a, "out"_a,
             "Copies the logits of a sampled row of the last step, which must have kept them.")
        .def("candidates", &BoundRunner::candidates, "samples"_a, "out"_a,
             "Writes the tokens that sampled rows would sample one after another, while they are "
             "verified.");
    nb::class_<DecodeCall>(
        m, "DecodeCall",
        "Up to steps.num_steps steps of a decoding batch, each sampled token the next input. "
        "Nothing is computed yet.")
        .def(nb::init<BoundRunner&, const nb::object&, const nb::object&, const std::shared_ptr<KvMemory>&,
                      const nb::object&>(),
             "runner"_a, "batch"_a, "output"_a, "kv"_a, "steps"_a, nb::keep_alive<1, 2>())
        .def("step", &DecodeCall::step, "check"_a.none(),
             "Computes the next step into its part of the output's arrays. Returns whether another may "
             "follow.");
}

}  // namespace octavo
