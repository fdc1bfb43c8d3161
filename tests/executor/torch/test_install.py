"""The torch backend without the compiled extension, without PyTorch, and without a GPU."""

import subprocess
import sys

import pytest
import torch

from octavo.api.errors import BackendUnavailable
from octavo.executor import devices
from octavo.executor.base import BackendOptions
from octavo.executor.torch.backend import TorchBackend
from octavo.executor.torch.triton import device as triton_device
from tests.support.tiny_models import tiny_model

HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
GENERATE = """
from octavo import LLM, SamplingParams
options = dict(backend="torch", device="cpu", skip_tokenizer_init=True, max_model_len=64)
with LLM({path!r}, kv_cache_memory_bytes="8MiB", **options) as llm:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    print(llm.generate([5, 6, 7], params)[0].outputs[0].token_ids)
"""


def run_without(names, code):
    return subprocess.run(
        [sys.executable, "-c", HIDE.format(names=names) + code],
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_runs_from_a_source_tree_without_the_extension():
    path = str(tiny_model("llama").path)
    ended = run_without(["octavo.executor.native._native"], GENERATE.format(path=path))
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.split(",")) == 4


def test_without_pytorch_the_error_names_the_command_that_installs_it():
    path = str(tiny_model("llama").path)
    ended = run_without(["torch"], GENERATE.format(path=path))
    assert "the torch backend needs PyTorch 2.9 or newer: No module named 'torch'" in ended.stderr
    assert "hint: pip install 'octavo[torch]'" in ended.stderr


def test_the_command_names_the_build(monkeypatch):
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: True)
    assert "the build with CUDA" in devices.install_hint()
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: False)
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in devices.install_hint()


def test_an_old_pytorch_is_refused(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.8.1+cpu")
    with pytest.raises(BackendUnavailable, match=r"needs PyTorch 2.9 or newer, got 2.8.1\+cpu"):
        devices.require_torch()


def test_the_device_by_what_there_is(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert devices.choose_device(None) == devices.choose_device("cpu") == "cpu"
    with pytest.raises(BackendUnavailable, match="device: got 'cuda', but"):
        devices.choose_device("cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert devices.choose_device(None) == "cuda"


def test_the_backend_by_what_there_is(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: False)
    assert devices.default_backend() == "native"
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert devices.default_backend() == "torch"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert devices.default_backend() == "native"


def test_a_pytorch_that_cannot_be_used_is_no_default(monkeypatch):
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.__version__", "2.8.1")
    assert devices.default_backend() == "native"

    def broken():
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(devices, "import_torch", broken)
    assert devices.default_backend() == "native"
    with pytest.raises(
        BackendUnavailable, match=r"needs PyTorch 2.9 or newer: libcudnn\.so\.9: cannot open"
    ):
        devices.require_torch()


def test_any_sign_of_a_driver_counts(tmp_path):
    signs = tmp_path / "version", tmp_path / "nvidiactl"
    assert not devices.has_nvidia_driver(signs)
    signs[1].touch()
    assert devices.has_nvidia_driver(signs)


def test_an_old_gpu_gets_no_triton_and_fp16(monkeypatch):
    monkeypatch.setattr(triton_device, "is_interpreted", lambda: False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert (
        triton_device.unsupported_reason(torch.device("cuda"))[0]
        == "Triton requires compute capability 8.0, the device has 7.5"
    )
    backend = TorchBackend(BackendOptions(num_threads=1))
    monkeypatch.setattr(backend, "device", torch.device("cuda"))
    assert backend.packed_dtype == torch.float16
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 6))
    assert (
        triton_device.unsupported_reason(torch.device("cuda")) is None
        and backend.packed_dtype == torch.bfloat16
    )
