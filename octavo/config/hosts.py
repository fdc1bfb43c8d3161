LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


def is_local(host: str) -> bool:
    """Returns whether a host is only reachable from this machine."""
    return host in LOOPBACK
