"""CUDA memory accounting: measures the memory of a Program's weights and of its largest step, by
running that step once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch

from octavo.executor.base import BackendOptions, DeviceMemory
from octavo.executor.batch import SamplingBatch, StepBatch, sampling_records
from octavo.executor.kv import BLOCK_SIZE


def largest_step(options: BackendOptions, num_groups: int, vocab_size: int) -> StepBatch:
    """Returns the largest step that the options allow: requests of maximum length, each with a
    sampled row.
    """
    num_rows = options.max_tokens
    lengths = [options.max_context] * (num_rows // options.max_context)
    lengths += [num_rows % options.max_context] if num_rows % options.max_context else []
    key_indices = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    firsts = np.cumsum([0, *blocks])[:-1]
    tables = np.full((len(lengths), max(blocks)), -1, np.int32)
    for request, (first, count) in enumerate(zip(firsts, blocks, strict=True)):
        tables[request, :count] = np.arange(first, first + count)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    slots = tables[owners, key_indices // BLOCK_SIZE] * BLOCK_SIZE + key_indices % BLOCK_SIZE
    return StepBatch(
        token_ids=np.zeros(num_rows, np.int32),
        key_indices=key_indices,
        positions=key_indices[None],
        query_starts=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=np.broadcast_to(
            np.array(lengths, np.int32), (num_groups, len(lengths))
        ).copy(),
        slots=np.broadcast_to(slots, (num_groups, num_rows)).astype(np.int32),
        block_tables=np.broadcast_to(tables, (num_groups, *tables.shape)).copy(),
        sample_rows=np.arange(options.max_requests, dtype=np.int32) % num_rows,
        sampling=_make_max_sampling(options.max_requests, vocab_size),
        adapter_rows=np.zeros(num_rows, np.int32) if options.num_adapters else None,
    )


def count_written_blocks(batch: StepBatch) -> int:
    """Returns the number of blocks that a step writes, per group."""
    return int(batch.block_tables.max(initial=-1)) + 1


def _make_max_sampling(count: int, vocab_size: int) -> SamplingBatch:
    """Returns sampling settings that use the most memory: top_k, top_p and logprobs."""
    records = sampling_records(
        count,
        seed=np.arange(count),
        temperature=1.0,
        top_k=50,
        top_p=0.9,
        num_logprobs=min(5, vocab_size),
    )
    return SamplingBatch.of(records, vocab_size)


class CudaMemory:
    """Memory of one device, and what is used or reserved."""

    def __init__(self, device: torch.device, utilization: float) -> None:
        """`utilization` is the fraction of the device that may be in use, including by other
        processes.
        """
        self._device = device
        self._utilization = utilization
        self._parts: dict[str, int] = {}

    def measure(self, weight_bytes: int, run: Callable[[], object]) -> None:
        """Records the weights' bytes, and the peak that `run`, the largest step, adds."""
        self._free_caches()
        resting = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - resting
        self._free_caches()
        self._parts["weights"] = self._parts.get("weights", 0) + weight_bytes
        self._parts["largest step"] = max(self._parts.get("largest step", 0), peak)

    def reserve(self, name: str, num_bytes: int) -> None:
        """Reserves memory for a later allocation."""
        self._parts[name] = num_bytes

    def now(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self._device)
        later = sum(size for name, size in self._parts.items() if name != "weights")
        others = total - free - self._parts.get("weights", 0)
        kv = int(total * self._utilization) - (total - free) - later
        return DeviceMemory(total, {**self._parts, "others, and PyTorch": others}, max(0, kv))

    def _free_caches(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
