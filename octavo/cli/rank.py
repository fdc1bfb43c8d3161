"""`octavo rank HOST:PORT --rank N`: runs a rank of an engine on another machine."""

from __future__ import annotations

import os
from typing import Annotated

import typer

SECRET_VARIABLE = "OCTAVO_RANK_SECRET"


def rank(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Value of --rank-address of the engine")
    ],
    *,
    number: Annotated[int, typer.Option("--rank", min=1, help="Start rank N, from 1")],
) -> None:
    """Start one rank of a multi-machine engine. Connects to the first rank (`octavo serve
    --rank-address`), loads its part of the model and runs until the first rank exits. The secret is
    read from OCTAVO_RANK_SECRET.
    """
    from octavo.api.errors import EngineDead
    from octavo.config.rank_address import check_rank_secret, parse_rank_address
    from octavo.worker.ranks.joining import join_first
    from octavo.worker.ranks.process import run_joined

    host, port = parse_rank_address(address)
    secret = os.environ.get(SECRET_VARIABLE) or None
    check_rank_secret(host, secret)
    if not run_joined(join_first(host, port, secret, number)):
        raise EngineDead(
            f"rank {number}: the first rank at {address} has exited",
            hint="the output of the first rank shows why",
        )
