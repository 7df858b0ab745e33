"""TCP ports for runs on this machine alone, where the ranks meet."""

import secrets
import socket
from pathlib import Path

_LOWEST = 5000
# The system hands these out to connections and to listeners that name no port, such as gloo's; Linux's usual range.
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_LOWEST_EPHEMERAL = 32768


def free_port() -> int:
    """A port that nobody listens at, and that the system does not give away before its server listens.

    A port that the system chose, as for port 0, is free again once it is known: until the ranks have started, it could
    become that of another run's connection, and then ranks of the two runs talk to each other.
    """
    span = _lowest_ephemeral() - _LOWEST
    # Processes that look for ports at the same time begin at different ones; tests may have seeded `random`.
    begin = secrets.randbelow(span)
    for turn in range(span):
        port = _LOWEST + (begin + turn) % span
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"every port from {_LOWEST} to {_LOWEST + span - 1} of this machine is taken")


def _lowest_ephemeral() -> int:
    if not _EPHEMERAL.exists():
        return _USUAL_LOWEST_EPHEMERAL
    lowest = int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    # Where all ports are the system's to give, no choice is better than another.
    return lowest if lowest > _LOWEST + 1000 else _USUAL_LOWEST_EPHEMERAL
