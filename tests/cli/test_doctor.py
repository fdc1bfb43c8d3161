"""`octavo doctor` reports on this machine, on one without PyTorch, and on one with a GPU."""

import importlib
import json
import re
from types import SimpleNamespace

import pytest
import torch

from octavo.executor import devices
from octavo.executor.native.extension import supported_levels
from octavo.worker.machine import Machine

DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC"
    " version:  gcc 12.3.0\n"
)
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\n"


def rows_of(text):
    """Returns the findings by name; each line begins with its mark."""
    rows = text.partition("\n\n")[0].splitlines()
    return dict(line[2:].split(maxsplit=1) for line in rows if not line.startswith(" "))


def test_this_machine(octavo):
    ended = octavo("doctor")
    assert ended.code == 0
    rows = rows_of(ended.out)
    assert rows["native"] == (
        f"level {supported_levels()[-1]} (supported: {', '.join(supported_levels())})"
    )
    assert rows["torch"].startswith(torch.__version__)
    assert re.search(r"\d compute thread", rows["CPU"]) and re.match(
        r"[\d.]+ \wi?B free", rows["memory"]
    )
    assert {"Triton", "driver", "NIXL", "Ray", "default"} <= set(rows)
    lines = ended.out.splitlines()
    for name in ("Mooncake", "NIXL", "Ray"):
        if rows[name].startswith("not installed"):
            at = next(index for index, line in enumerate(lines) if line[2:].startswith(name))
            assert f"hint: pip install 'octavo[{name.lower()}]'" in lines[at + 1]


def test_as_json(octavo):
    found = json.loads(octavo("doctor", "--json").out)
    assert found["torch"]["ok"] is True and found["native"]["hint"] is None


def test_without_anything(octavo, monkeypatch):
    import_module = importlib.import_module

    def gone(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(devices, "import_torch", lambda: gone("torch"))
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name, *package: gone(name) if "native" in name else import_module(name, *package),
    )
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: False)
    ended = octavo("doctor")
    assert ended.code == 1
    assert (
        "torch       the torch backend needs PyTorch 2.9 or newer: No module named 'torch'\n       "
        "       hint: pip install" in ended.out
    )
    assert "native      the native backend is not built" in ended.out


def test_a_gpu(octavo, monkeypatch):
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        mem_get_info=lambda index: (70 << 30, 80 << 30),
        get_device_capability=lambda index: (9, 0),
        get_device_name=lambda index: "NVIDIA H100",
    )
    fake = SimpleNamespace(__version__="2.11.0", cuda=cuda, version=SimpleNamespace(cuda="12.8"))
    monkeypatch.setattr(devices, "import_torch", lambda: fake)
    monkeypatch.setattr(devices, "driver_version", lambda: "550.54.15")
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: True)
    out = octavo("doctor").out
    assert "torch       2.11.0, built with CUDA 12.8\n" in out
    assert "CUDA 0      NVIDIA H100, compute capability 9.0, 70.0 GiB free of 80.0 GiB\n" in out
    assert "driver      NVIDIA 550.54.15\n" in out and "default     --backend torch\n" in out


@pytest.mark.parametrize(
    ("cuda_build", "hint"),
    [
        (
            None,
            "pip install --force-reinstall torch (the build with CUDA, which is PyPI's on Linux)",
        ),
        (
            "13.0",
            (
                "the driver may be too old for CUDA 13.0: a newer one, or pip install"
                " --force-reinstall torch --index-url https://"
            ),
        ),
    ],
)
def test_a_gpu_whose_pytorch_cannot_use_it(octavo, monkeypatch, cuda_build, hint):
    fake = SimpleNamespace(
        __version__="2.11.0",
        cuda=SimpleNamespace(is_available=lambda: False),
        version=SimpleNamespace(cuda=cuda_build),
    )
    monkeypatch.setattr(devices, "import_torch", lambda: fake)
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(devices, "driver_version", lambda: None)
    out = octavo("doctor").out
    assert f"CUDA        no device\n              hint: {hint}" in out
    assert "driver      NVIDIA (unknown version)\n" in out


@pytest.mark.parametrize(("text", "version"), [(DRIVER, "550.54.15"), (OPEN_DRIVER, "570.86.10")])
def test_the_drivers_version(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert devices.driver_version(tmp_path / "version") == version
    assert devices.driver_version(tmp_path / "none") is None


def test_the_cpus_name(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: A CPU @ 2GHz\n")
    assert Machine(tmp_path).cpu_name() == "A CPU @ 2GHz"
    assert Machine(tmp_path / "none").cpu_name() == "unnamed CPU"
