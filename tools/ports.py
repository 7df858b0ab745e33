"""Selects TCP ports for the rendezvous of runs on this machine."""

import secrets
import socket
from pathlib import Path

_LOWEST = 5000
# The system assigns these to connections, and to listeners without a fixed port such as gloo's. The default is Linux's.
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_LOWEST_EPHEMERAL = 32768


def free_port() -> int:
    """Returns a free port that the system will not assign to other connections before a server listens on it.

    A port that the system assigns for port 0 is free again once it was read. Until the ranks have started, another
    run's connection could be assigned that port, and ranks of both runs would connect to each other.
    """
    span = _lowest_ephemeral() - _LOWEST
    # Concurrent processes should start at different ports. Does not use `random`, which tests may have seeded.
    begin = secrets.randbelow(span)
    for turn in range(span):
        port = _LOWEST + (begin + turn) % span
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"every port from {_LOWEST} to {_LOWEST + span - 1} of this machine is in use")


def _lowest_ephemeral() -> int:
    if not _EPHEMERAL.exists():
        return _USUAL_LOWEST_EPHEMERAL
    lowest = int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    # If the system may assign all ports, no choice is better than another.
    return lowest if lowest > _LOWEST + 1000 else _USUAL_LOWEST_EPHEMERAL
