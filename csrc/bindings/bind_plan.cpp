#include "bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "../plan/builder.h"
#include "arrays.h"
#include "device.h"

namespace octavo {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// -- fields --

template <typename T>
void read(nb::handle value, T& field) {
    field = nb::cast<T>(value);
}

template <typename E, size_t N>
void read_name(nb::handle value, E& field, const char* const (&names)[N]) {
    const auto name = nb::cast<std::string>(value);
    const auto found = std::find(std::begin(names), std::end(names), name);
    if (found == std::end(names)) throw std::invalid_argument("unknown name " + name);
    field = static_cast<E>(found - std::begin(names));
}
void read(nb::handle value, Axis& field) {
    read_name(value, field, {"tokens", "block", "samples", "expert_rows"});
}
void read(nb::handle value, Elementwise& field) {
    read_name(value, field,
              {"add", "mul", "scale", "activate", "softcap", "gate", "clip", "match", "largest"});
}
void read(nb::handle value, Pooling& field) { read_name(value, field, {"last", "cls", "mean"}); }
void read(nb::handle value, RouteSpec::Score& field) {
    read_name(value, field, {"softmax", "sigmoid", "softmax_top_k", "sigmoid_top_k", "sparsemixer"});
}
void read(nb::handle value, RouteSpec::GroupRank& field) { read_name(value, field, {"two_best", "best"}); }

// (axis, offset, width)
void read(nb::handle value, ValueSlice& field) {
    const auto slice = nb::cast<nb::tuple>(value);
    read(nb::object(slice[0]), field.axis);
    read(nb::object(slice[1]), field.offset);
    read(nb::object(slice[2]), field.width);
}
void read(nb::handle value, FloatArray& field) {
    const auto floats = nb::cast<Array<float>>(value);
    field = FloatArray({floats.data(), floats.data() + floats.size()});
}
void read(nb::handle value, FloatBuffer& field) {
    const auto floats = nb::cast<Out<float>>(value, false);
    field = {floats.data(), static_cast<int64_t>(floats.size()), std::make_shared<Out<float>>(floats)};
}
template <typename T>
void read(nb::handle value, std::vector<T>& field) {
    for (nb::handle item : value) read(item, field.emplace_back());
}

// Reads the fields of a spec from keyword arguments; None selects a field's default.
template <Spec S>
S read_spec(const char* type, const nb::kwargs& given) {
    S spec{};
    size_t num_read = 0;
    const auto refuse = [&](const char* field, const char* what) {
        throw nb::type_error((std::string(type) + ": the field " + field + what).c_str());
    };
    S::fields([&](const char* name, auto member) {
        if (!given.contains(name)) refuse(name, " is missing");
        num_read++;
        const nb::object value = given[name];
        if (value.is_none()) return;
        try {
            read(value, spec.*member);
        } catch (const std::bad_cast&) {
            refuse(name, " has another type");
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(std::string(type) + ": " + name + ": " + error.what());
        }
    });
    if (num_read == given.size()) return spec;
    for (nb::handle key : given.keys()) {
        const auto name = nb::cast<std::string>(key);
        bool is_field = false;
        S::fields([&](const char* field, auto) { is_field |= name == field; });
        if (!is_field) refuse(name.c_str(), " is unknown");
    }
    return spec;
}

template <Spec S>
void bind_spec(nb::module_& m, const char* name) {
    nb::class_<S>(m, name).def(
        "__init__", [name](S* self, const nb::kwargs& fields) { new (self) S(read_spec<S>(name, fields)); });
}

// Binds a spec, and the builder's method that adds it.
template <Spec S>
void bind_op(nb::module_& m, nb::class_<PlanBuilder>& builder, const char* name) {
    bind_spec<S>(m, name);
    builder.def("add", [](PlanBuilder& self, const S& spec) { return self.add(spec); });
}

}  // namespace

void bind_plan(nb::module_& m) {
    nb::class_<Plan>(m, "Plan").def_prop_ro(
        "kv_writes",
        [](const Plan& plan) {
            std::vector<std::pair<int, int>> layers;
            for (const KvWrite& write : plan.kv_writes) layers.emplace_back(write.group, write.layer);
            return layers;
        },
        "The (group, layer) of each write of keys and values, in the order of a step.");

    nb::class_<PlanBuilder> builder(m, "PlanBuilder");
    builder
        .def(
            "__init__",
            [](PlanBuilder* self, const Device& device, int max_tokens, int vocab,
               std::shared_ptr<SharedRanks> ranks, std::shared_ptr<SharedRanks> engines, int num_engines) {
                new (self) PlanBuilder(device.kernels, {.max_tokens = max_tokens,
                                                        .vocab = vocab,
                                                        .ranks = std::move(ranks),
                                                        .engines = std::move(engines),
                                                        .num_engines = num_engines});
            },
            "device"_a, "max_tokens"_a, "vocab"_a, "ranks"_a = nb::none(), "engines"_a = nb::none(),
            "num_engines"_a = 1, nb::keep_alive<1, 2>(),
            "ranks: of this engine; engines: ranks of all engines that share the experts.")
        .def("build", &PlanBuilder::build, "Returns the Plan of the added ops.");

    bind_spec<NormSpec>(m, "NormSpec");
    bind_spec<GateSpec>(m, "GateSpec");
    bind_spec<LinearPart>(m, "LinearPart");
    bind_spec<KeySelection>(m, "KeySelection");

    bind_op<AnglesSpec>(m, builder, "AnglesSpec");
    bind_op<EmbeddingSpec>(m, builder, "EmbeddingSpec");
    bind_op<InputRowsSpec>(m, builder, "GivenSpec");
    bind_op<RowNormSpec>(m, builder, "RowNormSpec");
    bind_op<RopeSpec>(m, builder, "RopeSpec");
    bind_op<KvWriteSpec>(m, builder, "KvWriteSpec");
    bind_op<ElementwiseSpec>(m, builder, "ElementwiseSpec");
    bind_op<XieluSpec>(m, builder, "XieluSpec");
    bind_op<MixSpec>(m, builder, "MixSpec");
    bind_op<GatherSpec>(m, builder, "GatherSpec");
    bind_op<PoolSpec>(m, builder, "PoolSpec");
    bind_op<CombineSpec>(m, builder, "CombineSpec");
    bind_op<HiddenInSpec>(m, builder, "HiddenInSpec");
    bind_op<HiddenOutSpec>(m, builder, "HiddenOutSpec");
    bind_op<OutputSpec>(m, builder, "OutputSpec");
    bind_op<ShrinkSpec>(m, builder, "ShrinkSpec");
    bind_op<LinearSpec>(m, builder, "LinearSpec");
    bind_op<HeadsSpec>(m, builder, "HeadsSpec");
    bind_op<AttentionSpec>(m, builder, "AttentionSpec");
    bind_op<ShortConvSpec>(m, builder, "ShortConvSpec");
    bind_op<ScanSpec>(m, builder, "ScanSpec");
    bind_op<RouteSpec>(m, builder, "RouteSpec");
    bind_op<DispatchSpec>(m, builder, "DispatchSpec");
    bind_op<ExpertsSpec>(m, builder, "ExpertsSpec");
    bind_op<CollectSpec>(m, builder, "CollectSpec");
    bind_op<NeuronsSpec>(m, builder, "NeuronsSpec");
    bind_op<PrefetchNeuronsSpec>(m, builder, "PrefetchNeuronsSpec");
    bind_op<CollectiveSpec>(m, builder, "CollectiveSpec");
    bind_op<SampleSpec>(m, builder, "SampleSpec");
}

}  // namespace octavo
