"""The adapter that a request names, as LLM's users give it: a leaf that knows no file."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.api.errors import InvalidRequest, shown

MAX_NAME = 256
MAX_PATH = 4096


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name and the folder that PEFT saved it in.

    Two requests share what was computed where the adapters' contents are equal, whatever their
    names and numbers are.
    """

    lora_name: str
    lora_int_id: int
    """Number of at least 1, which tells nothing here; vLLM's programs give it."""
    lora_path: str
    base_model_name: str | None = None
    """Model that the adapter was made for, for show."""
    load_inplace: bool = False
    """Whether the files are read again though a folder of that name is known. They are read again
    in any case where they have changed."""

    def __post_init__(self) -> None:
        for name, text, most in (
            ("lora_name", self.lora_name, MAX_NAME),
            ("lora_path", self.lora_path, MAX_PATH),
        ):
            if not isinstance(text, str) or not 0 < len(text) <= most or "\0" in text:
                raise InvalidRequest(
                    f"{name}: got {shown(text)}, allowed is a text of 1 to {most} characters",
                    param=name,
                )
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise InvalidRequest(
                f"lora_int_id: got {shown(self.lora_int_id)}, allowed is a whole number of at"
                " least 1",
                param="lora_int_id",
            )
