"""The LoRA adapter of a request."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.api.errors import InvalidRequest, shown

MAX_NAME = 256
MAX_PATH = 4096


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter: its name and its folder in PEFT's format.

    Requests share cached prefixes if the contents of their adapters are equal, whatever their names
    and numbers.
    """

    lora_name: str
    lora_int_id: int
    """At least 1; not used, for compatibility with vLLM."""
    lora_path: str
    base_model_name: str | None = None
    """Base model of the adapter; informational."""
    load_inplace: bool = False
    """Whether to reload the files if an adapter of that name is loaded. Changed files are always
    reloaded.
    """

    def __post_init__(self) -> None:
        for name, text, max_length in (
            ("lora_name", self.lora_name, MAX_NAME),
            ("lora_path", self.lora_path, MAX_PATH),
        ):
            if not isinstance(text, str) or not 0 < len(text) <= max_length or "\0" in text:
                raise InvalidRequest(
                    f"{name}: got {shown(text)}, expected a string of 1 to {max_length} characters",
                    param=name,
                )
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise InvalidRequest(
                f"lora_int_id: got {shown(self.lora_int_id)}, expected an integer of at least 1",
                param="lora_int_id",
            )
