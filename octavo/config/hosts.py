"""Hosts as options name them."""

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


def is_local(host: str) -> bool:
    """Tells whether only this machine reaches what listens at a host."""
    return host in LOOPBACK
