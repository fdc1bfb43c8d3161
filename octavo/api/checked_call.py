"""A metaclass that raises InvalidRequest for unknown, missing and positional arguments of the
structs that users create.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.api.errors import InvalidRequest, did_you_mean, shown


class CheckedCall(msgspec.StructMeta):
    """Raises InvalidRequest instead of TypeError for unknown, missing and positional arguments."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        known: tuple[str, ...] = cls.__struct_fields__
        if args:
            raise InvalidRequest(
                f"{cls.__name__}: got {shown(args[0])} as a positional argument, expected keyword"
                f" arguments",
                hint=f"for example {cls.__name__}({known[0]}=...)",
            )
        for name in fields:
            if name not in known:
                raise InvalidRequest(
                    f"{cls.__name__}: unknown field {name!r}",
                    hint=did_you_mean(name, known),
                    param=name,
                )
        num_required = len(known) - len(cls.__struct_defaults__)
        for name in known[:num_required]:
            if name not in fields:
                raise InvalidRequest(f"{cls.__name__}: {name} is required", param=name)
        return super().__call__(**fields)
