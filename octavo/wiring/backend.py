from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from octavo.checkpoint.ports import Checkpoint
from octavo.config.backend_options import BackendChoice
from octavo.config.engine_config import EngineConfig
from octavo.config.paths import expand_path
from octavo.executor.base import (
    Backend,
    BackendOptions,
    WeightsOffDevice,
)
from octavo.executor.devices import choose_device
from octavo.executor.ranks import Ranks
from octavo.wiring.model_hooks import model_hooks
from octavo.worker.machine import Machine
from octavo.worker.numa import nodes_of_groups, thread_groups

if TYPE_CHECKING:
    from octavo.executor.native.ranks import EngineRanks, SharedMemoryRanks
    from octavo.executor.torch.ranks import TorchRanks


def build_backend(
    config: EngineConfig,
    ranks: Ranks[Any] | None = None,
    engines: EngineRanks | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    weights_key: str = "",
) -> Backend:
    """Builds the configured backend; raises BackendUnavailable if it cannot run here.

    `weights_key` ties files of streamed weights to the model; `checkpoint` is None when only
    planning.
    """
    options = replace(_backend_options(config), offload=_off_device(config, weights_key))
    for hooks in model_hooks():
        options = hooks.backend_options(config, checkpoint, options)
    return backend_with(options, config, ranks, engines)


def backend_with(
    options: BackendOptions,
    config: EngineConfig,
    ranks: Ranks[Any] | None,
    engines: EngineRanks | None = None,
) -> Backend:
    """Builds the configured backend with the given options."""
    if config.backend.backend == "reference":
        from octavo.executor.reference.backend import ReferenceBackend

        return ReferenceBackend(options)
    if config.backend.backend == "torch":
        return _torch_backend(options, config.backend, cast("TorchRanks | None", ranks))
    from octavo.executor.native.backend import NativeBackend

    level = config.backend.cpu_level
    return NativeBackend(
        options,
        level=None if level == "auto" else level,
        ranks=cast("SharedMemoryRanks | None", ranks),
        engines=engines,
    )


def _backend_options(config: EngineConfig) -> BackendOptions:
    assert config.model.max_model_len is not None, "derive() has set it"
    machine, backend = Machine(), config.backend
    groups = thread_groups(machine, backend.numa_bind_nodes, backend.threads or 1)
    return BackendOptions(
        dtype=config.model.dtype,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        shared_prefix_attention=config.cache.shared_prefix_attention,
        num_threads=backend.threads,
        thread_groups=groups,
        numa_nodes=nodes_of_groups(machine, groups),
        max_tokens=config.scheduler.max_num_batched_tokens,
        max_requests=config.scheduler.max_num_seqs,
        max_context=config.model.max_model_len,
        max_drafted=config.scheduler.spec_tokens if config.scheduler.uses_speculation else 0,
        num_adapters=config.lora.num_slots,
        max_adapter_rank=config.lora.max_lora_rank,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        attention_backend=backend.attention_backend,
        torch_kernels=backend.torch_kernels,
        enforce_eager=backend.enforce_eager,
        batch_invariant=backend.batch_invariant,
    )


def _off_device(config: EngineConfig, weights_key: str) -> WeightsOffDevice | None:
    options = config.offload
    if options.weights_memory_bytes is None:
        return None
    assert options.weights_dir is not None, "derive() has checked it"
    return WeightsOffDevice(
        options.weights_memory_bytes,
        expand_path(options.weights_dir),
        options.weights_schedule,
        weights_key,
    )


def _torch_backend(
    options: BackendOptions, choice: BackendChoice, ranks: TorchRanks | None
) -> Backend:
    """Builds the torch backend. `choose_device` has checked that PyTorch is installed; it is not
    imported before this call.
    """
    device = choose_device(choice.device)
    from octavo.executor.torch.backend import TorchBackend

    return TorchBackend(options, device if ranks is None else str(ranks.device), ranks)
