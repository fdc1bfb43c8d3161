"""The roofline of a model on a machine: upper bounds on tokens per second in prefill and decode.

A step takes at least the longest of three times: reading weights, K and V from memory; matmuls; and
reading streamed weights from disk. Source: Williams et al. 2009. For one decoding request, the rate
is an estimate rather than a bound: weights are read at the measured rates of one-row matmuls of
their sizes, K and V at the rate of attention, and other ops add time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.executor.base import Ceilings, Footprint
from octavo.program.program import Weight
from octavo.program.work import Work
from octavo.worker.capacity import Capacity


@dataclass(frozen=True, slots=True)
class Roofline:
    work: Work
    footprint: Footprint
    capacity: Capacity
    ceilings: Ceilings

    def prefill_tokens_per_s(self, num_tokens: int) -> float:
        """Returns the tokens per second of a single prompt, computed in the engine's chunks."""
        chunk = self.capacity.demand.max_step_tokens
        seconds = 0.0
        for first in range(0, num_tokens, chunk):
            end = min(num_tokens, first + chunk)
            products = (
                (end - first) * self.work.per_token
                + (end == num_tokens) * self.work.per_sample
                + self.work.pairs(first, end)
            )
            num_bytes = self._weights_read(end - first) + self.capacity.request_bytes(end)
            seconds += self._seconds(products, num_bytes / self.ceilings.bandwidth)
        return num_tokens / seconds

    def decode_tokens_per_s(self, num_requests: int, context: int) -> float:
        """Returns the total tokens per second of `num_requests` requests decoding together, each
        with `context` tokens before the new one.
        """
        products = (
            self.work.per_token + self.work.per_sample + self.work.pairs(context, context + 1)
        )
        kv_bytes = num_requests * self.capacity.request_bytes(context)
        reading = kv_bytes / (self.ceilings.kv_rate or self.ceilings.bandwidth)
        if num_requests == 1:
            reading += self._one_row_seconds()
        else:
            reading += self._weights_read(num_requests) / self.ceilings.bandwidth
        return num_requests / self._seconds(num_requests * products, reading)

    def _seconds(self, products: int, reading: float) -> float:
        """Returns the seconds of a step with `products` multiplications that needs `reading`
        seconds to read its weights, K and V.
        """
        return max(
            2 * products / self.ceilings.operations,
            reading,
            self.footprint.streamed_bytes / (self.ceilings.disk or math.inf),
        )

    def _one_row_seconds(self) -> float:
        """Returns the seconds for reading the weights of a one-token step, and for its ops besides
        matmuls.
        """
        footprint, ceilings = self.footprint, self.ceilings

        def seconds(weight: Weight) -> float:
            rate = ceilings.row_rates.get(footprint.row_products.get(weight), ceilings.bandwidth)
            return footprint.weight_bytes[weight] / rate

        dense = sum(seconds(weight) for weight in self.work.read_by_all)
        experts = sum(share * seconds(weight) for weight, share in self.work.read_by_some)
        return dense + experts + footprint.num_stages * ceilings.stage_seconds

    def _weights_read(self, num_tokens: int) -> float:
        """Returns the bytes of weights read for `num_tokens` tokens, assuming uniform routing to
        experts.
        """
        sizes = self.footprint.weight_bytes
        dense = sum(sizes[weight] for weight in self.work.read_by_all)
        return dense + sum(
            sizes[weight] * (1 - (1 - share) ** num_tokens)
            for weight, share in self.work.read_by_some
        )
