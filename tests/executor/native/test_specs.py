"""The specs of ops as Python fills them in: by keyword, no field missing and none unknown."""

import pytest

from octavo.executor.native.extension import native_module
from tests.support.native_harness import require_native

X = ("tokens", 0, 16)


def scale(**fields):
    given = {"kind": "scale", "a": X, "b": X, "out": X, "factor": 2.0, "gate": None}
    return native_module().ElementwiseSpec(**(given | fields))


def test_a_missing_field_is_refused_by_name():
    require_native()
    with pytest.raises(TypeError, match="GatherSpec: the field out is missing"):
        native_module().GatherSpec(x=X)


def test_an_unknown_field_is_refused_by_name():
    require_native()
    with pytest.raises(TypeError, match="ElementwiseSpec: the field facter is unknown"):
        scale(facter=1.0)


@pytest.mark.parametrize("field", [{"factor": "two"}, {"a": 3}, {"out": ("tokens", 0, "wide")}])
def test_a_value_of_another_type_is_refused_by_name(field):
    require_native()
    (name,) = field
    with pytest.raises(TypeError, match=f"ElementwiseSpec: the field {name} has another type"):
        scale(**field)


def test_an_unknown_name_is_refused():
    require_native()
    with pytest.raises(ValueError, match="ElementwiseSpec: kind: unknown name halve"):
        scale(kind="halve")
    with pytest.raises(ValueError, match="out: unknown name rows"):
        scale(out=("rows", 0, 16))


def test_none_is_the_default_of_a_field():
    require_native()
    native = native_module()
    fields = dict.fromkeys(("clamp", "alpha", "up_offset", "threshold"))
    native.GateSpec(activation=0, **fields)
    with pytest.raises(TypeError, match="activation is missing"):
        native.GateSpec(**fields)
