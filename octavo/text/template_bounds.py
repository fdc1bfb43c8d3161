"""Limits of chat template rendering: steps, seconds, characters.

Templates come from checkpoints or, if allowed, from requests; a loop of 10^9 iterations or a text
that doubles 40 times must raise an error instead of killing the process. Loops, calls and text
concatenations are rewritten in the parsed template to count. jinja2 is imported when an environment
is made.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from octavo.text import text_growth

if TYPE_CHECKING:
    import jinja2

MAX_STEPS = 5_000_000
"""Maximum number of loop iterations and calls per rendering."""

MAX_SECONDS = 10.0
"""Time limit of a rendering in seconds, checked every few hundred steps."""

MAX_CHARACTERS = 64 << 20
"""Longest text that a template may produce, in characters."""

STEPS_A_LOOK = 256

SCOPES = ("_loop_vars", "_block_vars")
"""Arguments that jinja2 adds to calls in loops and blocks and removes before the actual call."""


class Effort:
    """Steps and time of one rendering."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._ends = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Counts a loop iteration or call; raises ValueError beyond the limits."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise ValueError(f"it takes more than {MAX_STEPS:,} steps")
        if self._num_steps % STEPS_A_LOOK == 0 and time.monotonic() > self._ends:
            raise ValueError(f"it takes more than {MAX_SECONDS:g} seconds")


def check_length(num_characters: int) -> None:
    """Raises ValueError if a text is too long."""
    if num_characters > MAX_CHARACTERS:
        raise ValueError(f"it makes a text of more than {MAX_CHARACTERS:,} characters")


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Renders a template of `bounded_environment` within the limits; raises ValueError
    beyond them.
    """
    running = template.environment.running  # type: ignore[attr-defined]
    running.effort = Effort()
    parts, length = [], 0
    for part in template.generate(variables):
        length += len(part)
        check_length(length)
        parts.append(part)
    return "".join(parts)


def bounded_environment(**options: Any) -> jinja2.Environment:
    """Returns a sandbox whose templates count loops, calls and concatenations."""
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Counting(NodeTransformer):
        """Rewrites loops and concatenations as calls of the environment's methods."""

        def visit_For(self, node: nodes.For) -> nodes.Node:
            self.generic_visit(node)
            node.iter = _call("each", [node.iter])  # type: ignore[list-item]
            return node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
            self.generic_visit(node)
            return _call("joined", node.nodes)

    def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def __init__(self) -> None:
            super().__init__(**options)
            self.running = threading.local()

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree: nodes.Template = Counting().visit(super()._parse(source, name, filename))
            return tree.set_environment(self)  # type: ignore[return-value]

        def each(self, items: Iterable[Any]) -> Iterator[Any]:
            """Yields the items, counting steps."""
            for item in items:
                self.running.effort.step()
                yield item

        def joined(self, *parts: Any) -> str:
            """Concatenates the parts."""
            texts = [str(part) for part in parts]
            check_length(sum(map(len, texts)))
            return "".join(texts)

        def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
            self.running.effort.step()
            given = {name: value for name, value in named.items() if name not in SCOPES}
            check_call(function, arguments, given)
            return super().call(context, function, *arguments, **named)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

    return BoundedEnvironment()


def bound_filters(environment: jinja2.Environment) -> None:
    """Wraps an environment's filters to reject results that are too long."""
    for name, length in text_growth.FILTERS.items():
        environment.filters[name] = _bounded_filter(environment.filters[name], length)


def check_call(function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raises ValueError for a call that would produce a text that is too long.

    Checks methods of texts, and functions and methods of numbers with a large number as argument;
    not macros or methods of lists and objects.
    """
    function = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
    owner = getattr(function, "__self__", None)
    if isinstance(owner, str | bytes):
        length = text_growth.METHODS.get(function.__name__)
        if length is not None:
            check_length(length(owner, *arguments, **named))
    elif isinstance(owner, int | float) or isinstance(function, FunctionType):
        check_length(text_growth.largest_number(arguments, named))


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Raises ValueError if an operation would produce a text, list or number that is too long."""
    sizes = [len(item) if isinstance(item, str | list | tuple) else None for item in (left, right)]
    if operator == "+" and None not in sizes:
        check_length(sum(size or 0 for size in sizes))
    if operator == "*":
        for size, count in ((sizes[0], right), (sizes[1], left)):
            if size is not None and isinstance(count, int):
                check_length(size * count)
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        check_length(left.bit_length() * right)
    if operator == "%" and isinstance(left, str):
        text_growth.percent_formatted(left)


def _bounded_filter(function: Any, length: Callable[..., int]) -> Any:
    """Returns a filter that rejects results that are too long."""
    # This attribute of the function makes jinja2 pass the context before the value.
    num_before_value = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        check_length(length(*arguments[num_before_value:], **named))
        return function(*arguments, **named)

    return bounded
