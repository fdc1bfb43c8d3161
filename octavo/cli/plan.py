"""`octavo plan MODEL`: estimates a model's memory, concurrency and speed.

Reads only config.json or a GGUF header. Speeds are roofline upper bounds. Exception: unless
--bandwidth is given, the single-stream decoding rate is estimated from matmuls measured on this
machine.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.api.errors import ConfigError
from octavo.cli.common.flags import with_engine_flags
from octavo.cli.common.style import Status, format_mark, paint
from octavo.cli.common.suggested_flags import TYPICAL_CONTEXT, suggested_flags
from octavo.config.sizes import format_bytes, parse_bytes, parse_rate

if TYPE_CHECKING:
    from octavo.cli.common.numa_advice import NumaAdvice
    from octavo.executor.base import Ceilings
    from octavo.executor.native.disk import DiskRates
    from octavo.wiring.plan import ModelPlan
    from octavo.worker.memory_split import MemorySplit

CONTEXTS = (512, 2048, 8192, 32768, 131072)

SIMULATION = "Simulation of several machines"
"""Help group of the options of --trace."""

MEASURED_BYTES = 256 << 20
"""Number of bytes read to measure the bandwidth: more than any cache holds."""


@with_engine_flags(without=("model", "served_model_name", "record"))
def plan(
    *,
    model: Annotated[
        str | None,
        typer.Argument(help="Short name, path (config.json is enough) or Hugging Face repository"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Assume this much memory per rank", show_default="free memory"),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(help="Assume N bytes/s of memory bandwidth", show_default="measured"),
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option(help="Assume N operations/s of compute", show_default="measured"),
    ] = None,
    disk_bandwidth: Annotated[
        str | None,
        typer.Option(help="Assume N bytes/s of disk bandwidth", show_default="measured"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Simulate this recorded traffic and rank layouts",
            rich_help_panel=SIMULATION,
        ),
    ] = None,
    costs: Annotated[
        list[Path] | None,
        typer.Option(
            help="Use the step times of this recording (--record)",
            rich_help_panel=SIMULATION,
        ),
    ] = None,
    slo: Annotated[
        str, typer.Option(help="Set the latency targets", rich_help_panel=SIMULATION)
    ] = "ttft=2s,tpot=80ms",
    machines: Annotated[
        int,
        typer.Option(
            help="Simulate N machines, each with one engine", min=1, rich_help_panel=SIMULATION
        ),
    ] = 1,
    link: Annotated[
        str,
        typer.Option(help="Assume N bits/s between machines", rich_help_panel=SIMULATION),
    ] = "1G",
    scale: Annotated[
        str,
        typer.Option(
            help="Scale the lengths of the trace", metavar="FRACTION", rich_help_panel=SIMULATION
        ),
    ] = "1",
    num_requests: Annotated[
        int, typer.Option(help="Simulate N requests", min=1, rich_help_panel=SIMULATION)
    ] = 200,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object")] = False,
    options: dict[str, Any],
) -> None:
    """Estimate the memory and speed of a model without loading it. The exit code is 1 if it does
    not fit. With --trace, simulate recorded traffic and rank layouts of several machines.
    """
    if trace is not None:
        from octavo.cli.plan_trace import TracePlan

        TracePlan(
            trace=trace,
            recordings=costs or [],
            slo=slo,
            num_machines=machines,
            link=link,
            scale=scale,
            num_requests=num_requests,
        ).run(json=json)
        return
    if model is None:
        raise ConfigError("plan: model required", hint="specify a model or --trace")
    from octavo.cli.common.numa_advice import NumaAdvice
    from octavo.config.engine_config import EngineConfig
    from octavo.wiring.plan import plan_model
    from octavo.worker.machine import Machine

    config = EngineConfig.from_options(**options, model=model)
    num_processes = config.backend.num_ranks * config.fleet.data_parallel_size
    memory_bytes = _memory(memory, num_processes)
    model_plan = plan_model(config, memory_bytes=memory_bytes)
    ceilings = _ceilings(model_plan, bandwidth, flops)
    disk = _disk(model_plan, disk_bandwidth)
    if disk is not None:
        ceilings = replace(ceilings, disk=disk.in_order)
    advice = NumaAdvice.of(model_plan, Machine().nodes(), ceilings.bandwidth)
    report = PlanReport.of(
        model_plan, ceilings, disk, suggested_flags(model_plan, memory_bytes, options), advice
    )
    if json:
        import json as json_format

        print(json_format.dumps(asdict(report)))
    else:
        print("\n".join(report.lines()))
    if report.shortfall_bytes:
        print(
            f"octavo: {model} does not fit: {format_bytes(report.shortfall_bytes)} are missing",
            file=sys.stderr,
        )
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class ContextEstimate:
    """Upper bounds for requests of one context length."""

    context: int
    requests: int
    """Number of requests that fit in the KV cache."""
    request_kv_bytes: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Single-stream rate: an estimate if matmuls were measured."""
    batch: int
    """Number of requests that run concurrently."""
    batch_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The report that `octavo plan` prints."""

    model: str
    model_type: str
    num_parameters: int
    max_model_len: int
    generates: bool
    """Whether the model generates text; an encoder pools it in one step."""
    code: str
    memory_bytes: int
    weight_bytes: int
    step_bytes: int
    process_bytes: int
    step_tokens: int
    kv_dtype: str
    kv_token_bytes: float
    state_bytes: int
    """Bytes of a request's recurrent states, and of a checkpoint of them."""
    checkpoint_tokens: int
    """Tokens between two checkpoints of the states; 0 without checkpoints."""
    kv_bytes: int
    least_kv_bytes: int
    kv_tokens: int
    """Number of tokens that fit in the KV cache."""
    shortfall_bytes: int
    bandwidth: float
    flops: float
    estimates_decode: bool
    """Whether `decode_tokens_per_s` is an estimate from measured matmuls, not an upper bound."""
    streamed_bytes: int
    """Bytes of weights that each step reads from weights_dir."""
    neuron_bytes: int
    """Bytes of weights that are read only for the neurons that a step uses."""
    disk_rate: float | None
    """Sequential read rate of weights_dir's disk in bytes per second; None if nothing is read."""
    random_disk_rates: dict[int, float]
    """Random read rates in bytes per second, by block size in bytes; {} if not measured."""
    split: MemorySplit | None
    """A different division of memory with higher throughput for many requests; None if there is
    none, or if no weights are streamed.
    """
    rows: list[ContextEstimate]
    flags: list[str]
    """Suggested flags for `octavo serve`, including the given ones; [] if the model does not fit
    with any flags.
    """
    numa: NumaAdvice | None
    """Suggested layout on several NUMA nodes; None on one node or if the options set a layout."""

    @staticmethod
    def of(
        model_plan: ModelPlan,
        ceilings: Ceilings,
        disk: DiskRates | None,
        flags: list[str],
        numa: NumaAdvice | None,
    ) -> PlanReport:
        from octavo.worker.capacity import PROCESS_BYTES

        capacity, config = model_plan.capacity, model_plan.config
        return PlanReport(
            model=config.model.model,
            model_type=model_plan.info.model_type,
            num_parameters=model_plan.num_parameters,
            max_model_len=capacity.demand.max_model_len,
            generates=model_plan.generates,
            code=model_plan.footprint.code,
            memory_bytes=capacity.memory_bytes,
            weight_bytes=capacity.weight_bytes,
            step_bytes=capacity.step_bytes,
            process_bytes=PROCESS_BYTES,
            step_tokens=capacity.demand.max_step_tokens,
            kv_dtype=model_plan.footprint.kv_layouts[0].dtype,
            kv_token_bytes=capacity.kv_token_bytes,
            state_bytes=capacity.state_bytes,
            checkpoint_tokens=max(
                (group.spec.checkpoint_tokens for group in capacity.groups), default=0
            ),
            kv_bytes=capacity.kv_bytes,
            least_kv_bytes=capacity.least_kv_bytes,
            kv_tokens=0 if capacity.shortfall_bytes else capacity.kv_tokens,
            shortfall_bytes=capacity.shortfall_bytes,
            bandwidth=ceilings.bandwidth,
            flops=ceilings.operations,
            estimates_decode=bool(ceilings.row_rates),
            streamed_bytes=model_plan.footprint.streamed_bytes,
            neuron_bytes=model_plan.footprint.read_in_part.get("neurons", 0),
            disk_rate=ceilings.disk,
            random_disk_rates={} if disk is None else disk.random,
            split=_split(model_plan, ceilings),
            rows=list(_rows(model_plan, ceilings)),
            flags=flags,
            numa=numa,
        )

    def _weights_text(self) -> str:
        if self.streamed_bytes:
            return f"in memory, with a buffer for streamed weights, mostly {self.code}"
        bits = 8 * self.weight_bytes / self.num_parameters
        return f"{bits:.1f} bits per parameter, mostly {self.code}"

    def _stream_lines(self) -> Iterator[str]:
        if self.neuron_bytes:
            text = "of which a step reads the active neurons that are not in memory"
            yield _line("neurons", self.neuron_bytes, text)
        if not self.streamed_bytes:
            return
        rate = "unknown disk bandwidth; set --disk-bandwidth"
        if self.disk_rate is not None:
            bound = self.disk_rate / self.streamed_bytes
            rate = (
                f"read per step; at {_rate(self.disk_rate)} GB/s from disk at most {bound:.3g}"
                " steps/s"
            )
        yield _line("streamed", self.streamed_bytes, rate)
        if self.random_disk_rates:
            rates = ", ".join(
                f"{size >> 10} KiB {_rate(rate)}" for size, rate in self.random_disk_rates.items()
            )
            yield f"{'':28}random reads in GB/s, by block size: {rates}"
        if self.split is not None:
            yield _line("better split", self.split.weights_bytes, self.split.describe())

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.model}: {self.model_type}, {self.num_parameters / 1e6:,.0f} M parameters,"
            f" context {self.max_model_len:,} tokens"
        )
        yield _line("weights", self.weight_bytes, self._weights_text())
        yield from self._stream_lines()
        yield _line("activations", self.step_bytes, f"for a step of {self.step_tokens:,} tokens")
        yield _line("process", self.process_bytes, "including the tokenizer")
        yield _line("KV per token", self.kv_token_bytes, self.kv_dtype)
        if self.state_bytes:
            yield _line("states", self.state_bytes, "per request")
        if self.checkpoint_tokens:
            yield _line(
                "checkpoint",
                self.state_bytes,
                f"of the states, every {self.checkpoint_tokens} tokens and at the end of a prompt",
            )
        yield _line(
            "KV minimum",
            self.least_kv_bytes,
            f"for one request of {self.max_model_len:,} tokens, or kv_cache_memory_bytes",
        )
        yield _line("memory", self.memory_bytes, "available")
        if not self.shortfall_bytes:
            yield _line("KV cache", self.kv_bytes, f"{self.kv_tokens:,} tokens")
        yield ""
        yield self._verdict_line()
        yield ""
        estimated = "; decode speed estimated" if self.estimates_decode else ""
        title = (
            f"Upper bounds at {self.bandwidth / 1e9:,.1f} GB/s and"
            f" {self.flops / 1e9:,.0f} GFLOP/s{estimated}:"
        )
        yield paint(title, bold=True)
        if not self.generates:
            yield f"{'tokens':>9}{'tokens/s':>15}"
            for row in self.rows:
                yield f"{row.context:>9,}{row.prefill_tokens_per_s:>15,.0f}"
            yield from self._try_lines()
            return
        yield (
            f"{'context':>9}{'requests':>10}{'KV/request':>12}{'prefill tok/s':>15}"
            f"{'decode tok/s':>14}{'batch x decode tok/s':>26}"
        )
        for row in self.rows:
            together = (
                f"{row.batch:,} x {row.batch_tokens_per_s / row.batch:,.1f}" if row.batch else "-"
            )
            kv = format_bytes(row.request_kv_bytes)
            speeds = (
                f"{row.prefill_tokens_per_s:>15,.0f}{row.decode_tokens_per_s:>14,.1f}{together:>26}"
            )
            yield f"{row.context:>9,}{row.requests:>10,}{kv:>12}{speeds}"
        yield from self._try_lines()

    def _verdict_line(self) -> str:
        """Returns a line that says whether the model fits, and how many requests with the maximum
        context fit.
        """
        if self.shortfall_bytes:
            text = f"does not fit: {format_bytes(self.shortfall_bytes)} are missing"
            return f"{format_mark('failure')} {text}"
        requests, context = self.rows[-1].requests, f"{self.max_model_len:,} tokens"
        if not self.generates:
            return f"{format_mark('ok')} fits"
        status: Status = "ok" if requests > 1 else "warning"
        count = f"{requests:,} requests" if requests != 1 else "only 1 request"
        return f"{format_mark(status)} fits, with KV cache for {count} of {context}"

    def _try_lines(self) -> Iterator[str]:
        yield ""
        if self.numa is not None:
            yield f"NUMA: {self.numa.describe()}"
        yield (
            f"try: {shlex.join(['octavo', 'serve', self.model, *self.flags])}"
            if self.flags or not self.shortfall_bytes
            else NOTHING_HELPS
        )


NOTHING_HELPS = "no options make it fit; use a smaller model or more memory"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g}"


def _line(name: str, num_bytes: float, text: str) -> str:
    return f"{name:14}{format_bytes(num_bytes):>12}  {text}".rstrip()


def _memory(text: str | None, num_ranks: int) -> int:
    """Returns the memory of each rank: the given value, or an equal part of the free memory."""
    from octavo.worker.machine import Machine

    if text is not None:
        return parse_bytes(text, name="--memory")
    available_bytes = Machine().available_bytes()
    if available_bytes is None:
        raise ConfigError(
            "--memory: the free memory of this system is unknown",
            hint="set it, e.g. --memory 8GiB",
        )
    return available_bytes // num_ranks


def _ceilings(model_plan: ModelPlan, bandwidth: str | None, flops: str | None) -> Ceilings:
    """Returns the machine's peak rates: the given values, else measured ones. If the bandwidth is
    given, rates of single-row matmuls are omitted, since they would be this machine's.
    """
    from octavo.executor.base import Ceilings
    from octavo.wiring.backend import build_backend

    given_rates: dict[str, Any] = {}
    if bandwidth is not None:
        given_rates["bandwidth"] = parse_rate(bandwidth, name="--bandwidth")
    if flops is not None:
        given_rates["operations"] = parse_rate(flops, name="--flops")
    if len(given_rates) == 2:
        return Ceilings(**given_rates)
    if bandwidth is not None:
        given_rates |= {"row_rates": {}, "kv_rate": None, "stage_seconds": 0}
    backend = build_backend(model_plan.config)
    try:
        num_bytes = min(model_plan.capacity.weight_bytes, MEASURED_BYTES)
        return replace(backend.measure(num_bytes, model_plan.footprint), **given_rates)
    finally:
        backend.close()


def _disk(model_plan: ModelPlan, given_rate: str | None) -> DiskRates | None:
    """Returns the rates of the disk with streamed weights: the given value, else measured ones;
    None if nothing is streamed or the disk cannot be measured.
    """
    from octavo.config.paths import expand_path
    from octavo.executor.native.disk import DiskRates, measure_disk

    if not model_plan.footprint.streamed_bytes:
        return None
    if given_rate is not None:
        return DiskRates(parse_rate(given_rate, name="--disk-bandwidth"), {})
    assert model_plan.config.offload.weights_dir is not None, "weights are streamed"
    return measure_disk(expand_path(model_plan.config.offload.weights_dir))


def _rows(model_plan: ModelPlan, ceilings: Ceilings) -> Iterator[ContextEstimate]:
    from octavo.worker.speed import Roofline

    capacity = model_plan.capacity
    roofline = Roofline(model_plan.work, model_plan.footprint, capacity, ceilings)
    longest = capacity.demand.max_model_len
    for context in [*(tabulated for tabulated in CONTEXTS if tabulated < longest), longest]:
        requests = capacity.max_requests(context)
        batch = min(requests, capacity.demand.max_num_seqs)
        yield ContextEstimate(
            context=context,
            requests=requests,
            request_kv_bytes=capacity.request_bytes(context),
            prefill_tokens_per_s=roofline.prefill_tokens_per_s(context),
            decode_tokens_per_s=roofline.decode_tokens_per_s(1, context),
            batch=batch,
            batch_tokens_per_s=roofline.decode_tokens_per_s(batch, context) if batch else 0.0,
        )


def _split(model_plan: ModelPlan, ceilings: Ceilings) -> MemorySplit | None:
    from octavo.worker.memory_split import better_split
    from octavo.worker.speed import Roofline

    if (
        model_plan.config.offload.weights_schedule == "layers"
        or model_plan.capacity.planner is not None
    ):
        return None  # its matmuls read the same bytes, whatever memory the weights have
    roofline = Roofline(model_plan.work, model_plan.footprint, model_plan.capacity, ceilings)
    return better_split(roofline, min(TYPICAL_CONTEXT, model_plan.capacity.demand.max_model_len))
