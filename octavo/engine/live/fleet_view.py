"""The newest views of several cores, as the view of one."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from octavo.engine.live.view import EngineView


class FleetView:
    """Joins views: the requests of all cores, and each core's block maps after the one before."""

    def __init__(self, num_engines: int) -> None:
        self._newest: list[EngineView | None] = [None] * num_engines

    def joined(self, newer: Mapping[int, EngineView]) -> EngineView:
        """Takes in at least one newer view and returns all as one. Of the steps, those of the newer
        views alone are in it.
        """
        for index, view in newer.items():
            self._newest[index] = view
        views = [view for view in self._newest if view is not None]
        latest = max(views, key=lambda view: view.now)
        return msgspec.structs.replace(
            latest,
            num_requests=sum(view.num_requests for view in views),
            requests=[request for view in views for request in view.requests],
            waits_for=next((view.waits_for for view in views if view.waits_for), ""),
            blocks=[blocks for view in views for blocks in view.blocks],
            steps=[step for view in newer.values() for step in view.steps],
        )
