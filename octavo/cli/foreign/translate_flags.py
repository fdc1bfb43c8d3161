"""Translates flags of llama.cpp, vLLM and Ollama on a command line into Octavo's.

The command's own flags are unchanged, except for values that other engines write differently.
Ignored flags are reported on stderr; flags without counterpart are rejected with the equivalent
option.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.api.errors import ConfigError
from octavo.cli.foreign.foreign_flags import MODEL, PROMPT, ForeignFlag, device_name, positive
from octavo.cli.foreign.llama_flags import LLAMA_ROWS
from octavo.cli.foreign.vllm_flags import OLLAMA_ROWS, VLLM_ROWS

ROWS = (*LLAMA_ROWS, *VLLM_ROWS, *OLLAMA_ROWS)
FOREIGN_FLAGS: Mapping[str, ForeignFlag] = {
    name: row for row in reversed(ROWS) for name in row.names
}
"""Rows by flag name; llama.cpp's row if both engines have the same short flag."""
OVERRIDES = "--override-generation-config"
OVERRIDE_NAMES = {"max_tokens": "max_new_tokens"}
"""Sampling parameters that have a different name in generation_config."""
SWITCHES = ("on", "off", "auto", "true", "false", "0", "1")

CHECKPOINT_METHODS = (
    *("awq", "gptq", "awq_marlin", "gptq_marlin", "compressed-tensors", "bitsandbytes", "gguf"),
    *("mxfp4", "modelopt", "quark", "auto"),
)
"""Quantization methods of vLLM's flag that Octavo detects from the checkpoint."""
FILE_FORMATS = ("safetensors", "pt", "npcache", "gguf", "bitsandbytes", "hf", "mistral")


def _rename_values(**values: str | None) -> Callable[[str], str | None]:
    return lambda text: values.get(text.replace(".", "_").lower(), text)


def _gibibytes(text: str) -> str:
    """Reads a small number without a unit as GiB, as vLLM does."""
    return f"{text}GiB" if re.fullmatch(r"[1-9]\d{0,2}", text) else text


VALUES: Mapping[str, Callable[[str], str | None]] = {
    "--dtype": _rename_values(half="float16", float="float32", fp16="float16", bf16="bfloat16"),
    "--threads": positive,
    "--seed": lambda text: None if text == "-1" else text,
    "--max-model-len": lambda text: None if text in ("auto", "-1", "0") else text,
    "--quantization": _rename_values(**dict.fromkeys(CHECKPOINT_METHODS)),
    "--load-format": _rename_values(**dict.fromkeys(FILE_FORMATS)),
    "--kv-cache-dtype": _rename_values(
        fp8_e4m3="fp8", fp8_e5m2="fp8", bfloat16="bf16", float32="fp32"
    ),
    "--attention-backend": _rename_values(
        flash_attn=None, flashinfer=None, triton_attn="triton", torch_sdpa="sdpa"
    ),
    "--device": device_name,
    "--swap-space": _gibibytes,
    "--kv-offloading-size": _gibibytes,
}
"""Octavo's own flags whose values vLLM or llama.cpp write differently, with converters; None drops
the flag.
"""


@dataclass(slots=True)
class Translation:
    """The translation of one command line; called by `translate`."""

    command: str
    params: Mapping[str, Any]
    """The command's own parameters, by flag."""
    left: list[str]
    takes_words: bool = False
    """Whether the command has an argument for a prompt."""
    seen: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name and value of the foreign flag, by the Octavo flag that replaces it."""
    overrides: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Iterator[str]:
        while self.left:
            word = self.left.pop(0)
            if word == "--":
                yield from [word, *self.left]
                return
            name, equals, value = word.partition("=")
            if word.startswith("--") and "_" in name:
                name = name.replace("_", "-") if self._is_known(name.replace("_", "-")) else name
            if name in self.params:
                yield from self._own(name, value if equals else None)
            elif name in FOREIGN_FLAGS:
                yield from self._foreign(name, value if equals else None)
            else:
                yield word
        if self.overrides:
            yield f"{OVERRIDES}={json.dumps(self.overrides)}"

    def _is_known(self, name: str) -> bool:
        return name in self.params or name in FOREIGN_FLAGS

    def _own(self, name: str, value: str | None) -> Iterator[str]:
        """Yields one of Octavo's own flags and its converted value."""
        param = self.params[name]
        if param.is_flag or param.count:
            is_off = (value or "").lower() in ("false", "0", "off")
            negated = f"--no-{name[2:]}"
            if value is None or (not is_off and value.lower() not in ("true", "1", "on")):
                yield name if value is None else f"{name}={value}"
            elif not is_off:
                yield name
            elif negated in self.params:
                yield negated
            return
        if value is None and name == "--async-scheduling" and self._next_switch() is None:
            value = "on"  # vLLM's flag has no value
        if value is None:
            if not self.left:
                yield name
                return
            value = self.left.pop(0)
        if name in VALUES:
            converted = VALUES[name](value)
            if converted is None:
                _print_note(f"{name} {value} is ignored: Octavo decides this itself")
                return
            value = converted
        yield from (name, value)

    def _foreign(self, name: str, value: str | None) -> Iterator[str]:
        row = FOREIGN_FLAGS[name]
        if row.is_refused:
            raise ConfigError(f"{name}: a flag of {row.engine}, not of Octavo", hint=row.text)
        if value is None and row.takes == "value":
            if not self.left:
                raise ConfigError(f"{name}: got no value")
            value = self.left.pop(0)
        elif value is None and row.takes == "perhaps" and self._next_switch() is not None:
            value = self.left.pop(0)
        shown = name if value is None else f"{name} {value}"
        if row.target is None and not row.extra:
            _print_note(f"{shown} is ignored: {row.text}")
            return
        if row.target is not None:
            assert value is not None, "a renamed flag has a value"
            try:
                converted = value if row.convert is None else row.convert(value)
            except ValueError as error:
                raise ConfigError(f"{name}: got {value!r}: {error}") from None
            if converted is None:
                _print_note(f"{shown} is ignored: {row.text}")
                return
            yield from self._yield_renamed(row, name, converted)
        for flag in row.extra:
            self._check_target(name, flag.partition("=")[0], row)
            yield flag

    def _yield_renamed(self, row: ForeignFlag, name: str, value: str) -> Iterator[str]:
        assert row.target is not None
        target = row.target
        if target == MODEL:
            yield from ("--model", value) if "--model" in self.params else (value,)
            return
        if target == PROMPT and self.takes_words:
            yield value
            return
        if row.is_sampling and target not in self.params and OVERRIDES in self.params:
            field_name = target[2:].replace("-", "_")
            self.overrides[OVERRIDE_NAMES.get(field_name, field_name)] = _number(name, value)
            return
        self._check_target(name, target, row)
        before = self.seen.setdefault(target, (name, value))
        if before[1] != value:
            raise ConfigError(
                f"{name}: got {value}, but {before[0]} is {before[1]}; both flags set {target}"
            )
        yield from (target, value)

    def _check_target(self, name: str, target: str, row: ForeignFlag) -> None:
        if target not in self.params:
            called = "" if target == name else f" ({target} in Octavo)"
            raise ConfigError(
                f"{name}: a flag of {row.engine}{called}, not supported by {self.command}",
                hint="remove it; requests to a server can set it" if row.is_sampling else None,
            )

    def _next_switch(self) -> str | None:
        following = self.left[0].lower() if self.left else ""
        return following if following in SWITCHES else None


def translate(command: str, params: Sequence[Any], arguments: Sequence[str]) -> list[str]:
    """Replaces flags of other engines by Octavo's.

    `params` are the command's parameters. Raises ConfigError for a flag without a counterpart.
    """
    own = {
        name: param
        for param in params
        if param.param_type_name == "option"
        for name in (*param.opts, *param.secondary_opts)
    }
    takes_words = any(param.name == "words" for param in params)
    return list(Translation(command, own, list(arguments), takes_words).run())


def _number(name: str, text: str) -> float:
    try:
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    except ValueError:
        raise ConfigError(f"{name}: got {text!r}, expected a number") from None


def _print_note(message: str) -> None:
    print(f"octavo: {message}", file=sys.stderr)
