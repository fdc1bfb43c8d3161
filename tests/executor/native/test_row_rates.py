"""The rates that `octavo plan` estimates decoding from are measured for every format and level."""

from pathlib import Path

import pytest

from octavo.executor.native.extension import native_module, supported_levels
from octavo.executor.native.formats import FORMATS, has_tile_unit
from octavo.executor.native.row_rates import row_rates, stream_rounds


@pytest.mark.parametrize("level", supported_levels())
def test_rates_of_every_format(level):
    native = native_module()
    device = native.Device(2, str(Path(native.__file__).parent), level)
    formats = [
        each.for_tile_unit if has_tile_unit(device.row_type) else each for each in FORMATS.values()
    ]
    rates = row_rates(device, [*formats, "another backend's"], 1 << 20)
    assert set(rates) == set(formats)
    assert all(1e6 < rate < 1e12 for rate in rates.values())
    rounds = stream_rounds(device, formats[-1], 96, 1, 3)
    assert len(rounds) == 3
    assert all(read > 0 and product > 0 for read, product in rounds)
