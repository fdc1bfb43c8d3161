"""What the requests of one API key have taken of its limits, and how soon there is more.

Requests and tokens refill evenly: a minute's worth may be taken at once, and is there again a
minute later. Knows no HTTP but the names of the headers that OpenAI's clients read.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.api.errors import InvalidRequest, Overloaded
from octavo.server.http.key_file import KeyLimits

Clock = Callable[[], float]


class Allowance:
    """A number of units a minute, which may go below zero where a cost is known only later."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._since = clock()

    @property
    def level(self) -> float:
        """Units that may be taken now."""
        now = self._clock()
        gained = (now - self._since) * self.per_minute / 60
        self._level = min(self._level + gained, float(self.per_minute))
        self._since = now
        return self._level

    def take(self, units: float) -> None:
        self._level = self.level - units

    def wait_s(self, units: float) -> float:
        """Returns the seconds until that many units are there; 0 where they are."""
        return max(0.0, (units - self.level) * 60 / self.per_minute)

    def change(self, per_minute: int) -> None:
        """Sets another limit; what was taken in the last minute stays taken."""
        taken = self.per_minute - self.level
        self.per_minute = per_minute
        self._level = per_minute - taken


class Account:
    """One key's limits and what is left of them."""

    def __init__(self, name: str, limits: KeyLimits, clock: Clock = time.monotonic) -> None:
        self.name = name
        self.num_running = 0
        self._clock = clock
        self._allowances: dict[str, Allowance] = {}
        self.change(limits)

    def change(self, limits: KeyLimits) -> None:
        """Takes other limits, as a key file that is read again has them."""
        self.limits = limits
        self._set("requests", limits.requests_per_minute)
        self._set("tokens", limits.tokens_per_minute)

    def count_request(self) -> None:
        """Counts one more request; raises Overloaded where the minute has no room for it."""
        self._check("requests", 1)
        if "requests" in self._allowances:
            self._allowances["requests"].take(1)

    def start(self) -> None:
        """Counts work that starts; raises Overloaded where there is no room for any.

        Each call that returns is followed by one of `stop`.
        """
        most = self.limits.max_running
        if most is not None and self.num_running >= most:
            raise Overloaded(
                f"{self.num_running} requests of this key are running, allowed are {most}",
                hint="wait for one to end",
            )
        self.check_tokens()
        self.num_running += 1

    def check_tokens(self) -> None:
        """Raises Overloaded where no token is left."""
        self._check("tokens", 1)

    def charge_prompt(self, num_tokens: int) -> None:
        """Takes a prompt's tokens; raises where not that many are left."""
        most = self.limits.tokens_per_minute
        if most is not None and num_tokens > most:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens, this key may use {most} a minute",
                hint="shorten the prompt",
                param="prompt",
            )
        self._check("tokens", num_tokens)
        self.charge(num_tokens)

    def stop(self) -> None:
        self.num_running -= 1

    def charge(self, num_tokens: int) -> None:
        """Takes tokens that were used; below zero, new requests wait until they are paid off."""
        if "tokens" in self._allowances:
            self._allowances["tokens"].take(num_tokens)

    def headers(self) -> dict[str, str]:
        """Returns the headers that tell a client what is left."""
        headers = {}
        for kind, allowance in self._allowances.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(allowance.per_minute)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(allowance.level)))
            reset_s = allowance.wait_s(allowance.per_minute)
            headers[f"x-ratelimit-reset-{kind}"] = f"{reset_s:.3f}s"
        return headers

    def _check(self, kind: str, units: float) -> None:
        allowance = self._allowances.get(kind)
        if allowance is not None and (wait_s := allowance.wait_s(units)) > 0:
            raise Overloaded(
                f"this key may use {allowance.per_minute} {kind} a minute, and has"
                f" {max(0, int(allowance.level))} left",
                hint=f"try again in {wait_s:.1f} seconds",
                retry_after_s=wait_s,
            )

    def _set(self, kind: str, per_minute: int | None) -> None:
        if per_minute is None:
            self._allowances.pop(kind, None)
        elif kind in self._allowances:
            self._allowances[kind].change(per_minute)
        else:
            self._allowances[kind] = Allowance(per_minute, self._clock)
