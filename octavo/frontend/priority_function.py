"""Sets request priorities by a user-defined function (option `priority_function`)."""

from __future__ import annotations

from octavo.api.errors import ServerError, shown
from octavo.api.sampling_options import whole_number
from octavo.engine.protocol.requests import MAX_PRIORITY, EngineRequest
from octavo.utils.import_function import import_function


class PriorityFunction:
    """Calls the function for each new request. If the call fails, only that request fails."""

    def __init__(self, name: str) -> None:
        """Imports the function; `name` is MODULE:FUNCTION."""
        module, _, attribute = name.partition(":")
        self._name = name
        self._function = import_function("priority_function", module, attribute)

    def __call__(self, request: EngineRequest) -> int:
        try:
            returned = self._function(request)
        except Exception as error:
            raise ServerError(
                f"priority_function: {self._name} raised {type(error).__name__}: {error}"
            ) from error
        priority = whole_number(returned)
        if priority is None or abs(priority) > MAX_PRIORITY:
            raise ServerError(
                f"priority_function: {self._name} returned {shown(returned)}, expected a"
                " 32-bit integer"
            )
        return priority
