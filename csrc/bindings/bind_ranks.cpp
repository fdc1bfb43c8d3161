#include "bind.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "../runtime/shared_ranks.h"
#include "arrays.h"

namespace octavo {

namespace nb = nanobind;
using namespace nb::literals;

void bind_ranks(nb::module_& m) {
    nb::exception<RanksAborted>(m, "RanksAborted", PyExc_ConnectionError);
    nb::class_<SharedRanks>(m, "SharedRanks")
        .def(nb::init<int, int, int, int>(), "file"_a, "rank"_a, "num_ranks"_a, "num_tensor"_a,
             "file: a descriptor of a file in memory, empty at first, that all ranks have.")
        .def_prop_ro("rank", &SharedRanks::rank)
        .def_prop_ro("num_ranks", &SharedRanks::num_ranks)
        .def(
            "all_reduce",
            [](SharedRanks& ranks, const Array<float>& x, const Out<float>& out) {
                if (x.size() != out.size()) throw std::invalid_argument("out: not as large as x");
                nb::gil_scoped_release release;
                ranks.all_reduce(x.data(), out.data(), x.size());
            },
            "x"_a, "out"_a, "Writes the sum of all ranks' x, added in rank order.")
        .def(
            "all_gather",
            [](SharedRanks& ranks, const Array<float, nb::ndim<2>>& x, const Out<float, nb::ndim<2>>& out,
               const std::vector<int>& widths) {
                size_t width = 0;
                for (const int w : widths) width += static_cast<size_t>(std::max(w, 0));
                if (static_cast<int>(widths.size()) != ranks.num_tensor() ||
                    static_cast<int>(x.shape(1)) != widths.at(ranks.tensor_index()) ||
                    out.shape(1) != width || x.shape(0) != out.shape(0))
                    throw std::invalid_argument("out: not the columns of all ranks");
                nb::gil_scoped_release release;
                ranks.all_gather(x.data(), out.data(), x.shape(0), widths);
            },
            "x"_a, "out"_a, "widths"_a, "Writes the concatenated columns of all ranks' x.")
        .def(
            "collect",
            [](SharedRanks& ranks, const Array<float, nb::ndim<2>>& x, const Array<int32_t>& owners,
               const Out<float, nb::ndim<2>>& out) {
                if (owners.size() != x.shape(0) || out.shape(0) != x.shape(0) || out.shape(1) != x.shape(1))
                    throw std::invalid_argument("out: not as large as x");
                for (size_t i = 0; i < owners.size(); i++)
                    if (owners.data()[i] < 0 || owners.data()[i] >= ranks.num_experts())
                        throw std::invalid_argument("owners: an index outside the expert ranks");
                nb::gil_scoped_release release;
                ranks.collect(x.data(), owners.data(), out.data(), x.shape(0), x.shape(1));
            },
            "x"_a, "owners"_a, "out"_a, "Writes each row as its owner has it.")
        .def(
            "from_first",
            [](SharedRanks& ranks, const Out<uint8_t>& bytes) {
                nb::gil_scoped_release release;
                ranks.from_first(bytes.data(), bytes.size());
            },
            "bytes"_a, "Replaces the other ranks' bytes by the first rank's.")
        .def("abort", &SharedRanks::abort, "Ends all collectives, now and later, with RanksAborted.");
}

}  // namespace octavo
