// NumPy arrays as arguments: C-contiguous, on the CPU, with a fixed type and number of axes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

namespace octavo {

template <typename T, typename... Axes>
using Array = nanobind::ndarray<const T, Axes..., nanobind::c_contig, nanobind::device::cpu>;
template <typename T, typename... Axes>
using Out = nanobind::ndarray<T, Axes..., nanobind::c_contig, nanobind::device::cpu>;

// Returns the attribute `name` as an array. Never converts, since a copy would not outlive the call.
template <typename A>
A get_array(const nanobind::object& object, const char* name) {
    A array;
    if (!nanobind::try_cast<A>(object.attr(name), array, false))
        throw nanobind::type_error(
            (std::string(name) + ": not a C-contiguous array of the type and axes that its field has")
                .c_str());
    return array;
}

}  // namespace octavo
