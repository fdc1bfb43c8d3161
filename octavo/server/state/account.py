"""Rate limits and usage of one API key.

Requests and tokens refill continuously: a minute's worth can be used at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.api.errors import InvalidRequest, Overloaded
from octavo.server.http.key_file import KeyLimits

Clock = Callable[[], float]


class Allowance:
    """A rate limit per minute. Its level may become negative, since some costs are known only
    afterwards.
    """

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._since = clock()

    @property
    def level(self) -> float:
        """Units available now."""
        now = self._clock()
        gained = (now - self._since) * self.per_minute / 60
        self._level = min(self._level + gained, float(self.per_minute))
        self._since = now
        return self._level

    def take(self, units: float) -> None:
        self._level = self.level - units

    def wait_s(self, units: float) -> float:
        """Returns the seconds until `units` are available."""
        return max(0.0, (units - self.level) * 60 / self.per_minute)

    def change(self, per_minute: int) -> None:
        """Changes the limit; recent usage still counts."""
        used = self.per_minute - self.level
        self.per_minute = per_minute
        self._level = per_minute - used


class Account:
    """Limits and usage of one key."""

    def __init__(self, name: str, limits: KeyLimits, clock: Clock = time.monotonic) -> None:
        self.name = name
        self.num_running = 0
        self._clock = clock
        self._allowances: dict[str, Allowance] = {}
        self.change(limits)

    def change(self, limits: KeyLimits) -> None:
        """Changes the limits after the key file was reloaded."""
        self.limits = limits
        self._set("requests", limits.requests_per_minute)
        self._set("tokens", limits.tokens_per_minute)

    def count_request(self) -> None:
        """Counts a request; raises Overloaded if the limit per minute is reached."""
        self._check("requests", 1)
        if "requests" in self._allowances:
            self._allowances["requests"].take(1)

    def start(self) -> None:
        """Counts a running request; raises Overloaded if too many run.

        Each successful call requires a call of `stop`.
        """
        limit = self.limits.max_running
        if limit is not None and self.num_running >= limit:
            raise Overloaded(
                f"{self.num_running} requests of this key are running, expected at most {limit}",
                hint="wait for one to finish",
            )
        self.check_tokens()
        self.num_running += 1

    def check_tokens(self) -> None:
        """Raises Overloaded if no token is left."""
        self._check("tokens", 1)

    def charge_prompt(self, num_tokens: int) -> None:
        """Charges a prompt's tokens; raises Overloaded if not enough are left."""
        max_tokens = self.limits.tokens_per_minute
        if max_tokens is not None and num_tokens > max_tokens:
            raise InvalidRequest(
                f"prompt: got {num_tokens} tokens, expected at most {max_tokens}, the limit per"
                " minute of this key",
                hint="shorten the prompt",
                param="prompt",
            )
        self._check("tokens", num_tokens)
        self.charge(num_tokens)

    def stop(self) -> None:
        self.num_running -= 1

    def charge(self, num_tokens: int) -> None:
        """Charges used tokens; while the level is negative, new requests are rejected."""
        if "tokens" in self._allowances:
            self._allowances["tokens"].take(num_tokens)

    def headers(self) -> dict[str, str]:
        """Returns the rate limit headers."""
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
                f"this key is limited to {allowance.per_minute} {kind} per minute,"
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
