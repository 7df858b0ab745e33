"""A port that another program has, where ranks are to meet."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from megatron.training import joining
from megatron.training.joining import MeetingPoint


def _say_nothing(connection: socket.socket) -> None:
    connection.recv(1 << 16)


def _hang_up(connection: socket.socket) -> None:
    connection.close()


def _answer_as_a_web_server_does(connection: socket.socket) -> None:
    connection.recv(1)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@contextlib.contextmanager
def _listening(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Another program's port."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connections.append(listener.accept()[0])
                threading.Thread(target=_quietly, args=(answer, connections[-1]), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()
    for connection in connections:
        connection.close()


def _quietly(answer: Callable[[socket.socket], None], connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        answer(connection)


def _rank(rank: int, port: int) -> MeetingPoint:
    return MeetingPoint("127.0.0.1", port, rank, world_size=2, serves=rank == 0, attempt="0")


@pytest.mark.parametrize("answer", [_say_nothing, _hang_up, _answer_as_a_web_server_does])
def test_a_port_that_another_program_has_is_named_on_every_rank(
    answer: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_ANSWER_WITHIN", timedelta(seconds=1))
    with _listening(answer) as port:
        with pytest.raises(OSError, match=f"MASTER_PORT is {port}, and another program uses that port"):
            _rank(0, port).connect(timedelta(minutes=10))
        with pytest.raises(OSError, match=f"127.0.0.1:{port} .* is answered by another program"):
            _rank(1, port).connect(timedelta(minutes=10))


def test_a_port_where_nobody_listens_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(OSError, match="nobody answers at 127.0.0.1:.* within 0.01 minutes"):
        _rank(1, port).connect(timedelta(seconds=0.6))


def test_ranks_meet_at_a_free_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    found = []
    late = threading.Thread(target=lambda: found.append(_rank(1, port).connect(timedelta(seconds=20))))
    late.start()
    store = _rank(0, port).connect(timedelta(seconds=20))
    late.join()
    store.set("key", "value")
    assert found[0].get("key") == b"value"
