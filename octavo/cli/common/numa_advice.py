"""What `octavo plan` suggests on a machine with several NUMA nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.cli.common.suggested_flags import TYPICAL_CONTEXT
from octavo.worker.machine import NumaNode
from octavo.worker.numa_model import Layout, NumaMachine, StepWork, estimate, suggest

if TYPE_CHECKING:
    from octavo.wiring.plan import ModelPlan

EXCHANGES_PER_LAYER = 4
"""Tensor-parallel ranks gather the inputs and the outputs of two matmuls: after attention, and the
last one of the MLP.
"""

NUM_REQUESTS = 32
"""Number of typical requests for whose KV cache a node must have room."""

REASONS: dict[Layout, str] = {
    "engines": "one engine per node serves the most requests",
    "ranks": "one rank per node reads the weights of its own node",
    "process": "one process over all nodes is fastest",
}


@dataclass(frozen=True, slots=True)
class NumaAdvice:
    """The suggested layout, and the estimated decode steps per second of each layout."""

    num_nodes: int
    cores_per_node: int
    layout: Layout
    steps_per_s: dict[Layout, float]
    """Steps of one row, of all engines together."""

    @staticmethod
    def of(model_plan: ModelPlan, nodes: list[NumaNode], bandwidth: float) -> NumaAdvice | None:
        """Returns None on one node, or if the layout is given or weights are streamed."""
        config = model_plan.config
        num_processes = config.backend.num_ranks * config.fleet.data_parallel_size
        if (
            len(nodes) == 1
            or num_processes > 1
            or config.backend.backend != "native"
            or model_plan.footprint.streamed_bytes
        ):
            return None
        machine, capacity = NumaMachine.of(nodes, bandwidth), model_plan.capacity
        context = min(TYPICAL_CONTEXT, capacity.demand.max_model_len)
        layouts = model_plan.footprint.kv_layouts
        work = StepWork(
            capacity.weight_bytes,
            num_phases=model_plan.footprint.num_stages + len(model_plan.work.read_by_all),
            num_exchanges=EXCHANGES_PER_LAYER * sum(each.group.num_layers for each in layouts),
        )
        steps = {layout: estimate(machine, work, layout) for layout in REASONS}
        return NumaAdvice(
            machine.num_nodes,
            machine.cores_per_node,
            suggest(machine, work, NUM_REQUESTS * capacity.request_bytes(context)),
            {layout: step.num_steps / step.seconds for layout, step in steps.items()},
        )

    def _hint(self) -> str:
        """Returns the option to plan with, since the layout changes the memory of a process."""
        names = {"engines": "--data-parallel-size", "ranks": "--tensor-parallel-size"}
        name = names.get(self.layout)
        return "" if name is None else f"; plan again with {name} {self.num_nodes}"

    def describe(self) -> str:
        rates = ", ".join(
            f"{layout} {steps_per_s:,.1f}" for layout, steps_per_s in self.steps_per_s.items()
        )
        return (
            f"{self.num_nodes} nodes of {self.cores_per_node} cores:"
            f" {REASONS[self.layout]} (estimated steps/s of one row: {rates}){self._hint()}"
        )
