"""Tests of the rendezvous: occupied ports, entries of earlier attempts, and the connection of the error broadcast."""

import argparse
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.training import startup_handshake
from megatron.training.arguments import parse_args, validate_args
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.config import DistributedConfig, LaunchConfig
from megatron.training.error_broadcast import ErrorBroadcast
from megatron.training.startup_handshake import (
    Rendezvous,
    Settings,
    agree_on_settings,
    common_settings,
    join_process_group,
)


def _say_nothing(connection: socket.socket) -> None:
    connection.recv(1 << 16)


def _hang_up(connection: socket.socket) -> None:
    connection.close()


def _answer_as_a_web_server_does(connection: socket.socket) -> None:
    connection.recv(1)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@contextlib.contextmanager
def _listening(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Yields a port on which another program listens."""
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


def _rank(rank: int, port: int) -> Rendezvous:
    return Rendezvous("127.0.0.1", port, rank, world_size=2, serves=rank == 0, attempt="0")


@pytest.mark.parametrize("answer", [_say_nothing, _hang_up, _answer_as_a_web_server_does])
def test_a_port_that_another_program_has_is_named_on_every_rank(
    answer: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_handshake, "_ANSWER_WITHIN", timedelta(seconds=1))
    with _listening(answer) as port:
        with pytest.raises(OSError, match=f"MASTER_PORT is {port}, but another program on this machine uses that port"):
            _rank(0, port).connect(timedelta(minutes=10))
        with pytest.raises(OSError, match=f"127.0.0.1:{port} .* is used by a program other than"):
            _rank(1, port).connect(timedelta(minutes=10))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port: int = unused.getsockname()[1]
    return port


def test_a_port_where_nobody_listens_is_waited_for() -> None:
    port = _free_port()
    with pytest.raises(OSError, match="no process answers at 127.0.0.1:.* within 0.01 minutes"):
        _rank(1, port).connect(timedelta(seconds=0.6))


def test_ranks_meet_at_a_free_port() -> None:
    port = _free_port()
    found = []
    late = threading.Thread(target=lambda: found.append(_rank(1, port).connect(timedelta(seconds=20))))
    late.start()
    store = _rank(0, port).connect(timedelta(seconds=20))
    late.join()
    store.set("key", "value")
    assert found[0].get("key") == b"value"


def test_a_restarted_run_finds_no_entries_of_its_earlier_attempts() -> None:
    point, timeout = _rank(0, _free_port()), timedelta(seconds=20)
    point.connect(timeout).set("verdict", "of the first attempt")
    assert point.connect(timeout).check(["verdict"])
    assert not replace(point, attempt="1").connect(timeout).check(["verdict"])


class _ConnectedError(Exception):
    """An error broadcast that ends the handshake once it is connected."""


class _AskingBroadcast(ErrorBroadcast):
    """An error broadcast that polls the store, as its thread does, while another thread waits for a key."""

    has_answer = False

    def connect(self, store: dist.Store, *, watched: dist.Store, **_: Any) -> None:
        store.set_timeout(timedelta(seconds=8))
        waiting = threading.Thread(target=_wait_for_entry, args=(store,), daemon=True)
        waiting.start()
        waiting.join(0.5)
        asking = threading.Thread(target=watched.check, args=(["cause"],), daemon=True)
        asking.start()
        asking.join(4)
        self.has_answer = not asking.is_alive()
        if self.has_answer:
            watched.set("entry", "")
        waiting.join()
        raise _ConnectedError


def _wait_for_entry(store: dist.Store) -> None:
    with contextlib.suppress(dist.DistStoreError):
        store.get("entry")


def test_failures_are_asked_for_while_the_main_thread_waits_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**address, "TORCH_FR_BUFFER_SIZE": "100"}.items():
        monkeypatch.setenv(name, value)
    broadcast = _AskingBroadcast(describe=str, leave=lambda: None)
    with pytest.raises(_ConnectedError):
        join_process_group(DistributedConfig(), LaunchConfig(), torch.device("cpu"), settings=dict, broadcast=broadcast)
    assert broadcast.has_answer


def _settings(words: str) -> Settings:
    def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--noise", type=float, default=0.5)
        parser.add_argument("--my-folder")
        return parser

    model = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    run = "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 0.01 --mock-data --vocab-size 64"
    argv = f"{model} {run} --tokenizer-type NullTokenizer {words}".split()
    return common_settings(run_config_of(validate_args(parse_args(add_arguments, argv=argv))))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lr 0.5", "--lr is 0.5, not 0.01"),
        ("--seed 5", "--seed is 5, not 1234"),
        ("--global-batch-size 8", "--global-batch-size is 8, not 4"),
        ("--bf16", "--bf16 is true, not false"),
        ("--load folder", "--load is given, not null"),
        ("--noise 0.25", "noise is 0.25, not 0.5"),
        ("--seq-length 32", None),
        ("--data-cache-path a --my-folder a", None),
    ],
)
def test_a_late_rank_with_other_flags_is_named_on_every_rank(words: str, said: str | None) -> None:
    """Rank 1 arrives last, with other words: all ranks end with the flag and its values, or all of them continue."""
    store, settings = dist.HashStore(), [_settings("--data-cache-path b"), _settings(f"--data-cache-path c {words}")]
    store.set_timeout(timedelta(seconds=20))
    errors: dict[int, str] = {}

    def arrive(rank: int) -> None:
        try:
            agree_on_settings(store, settings[rank // 2], rank=rank, world_size=3)
        except ValueError as error:
            errors[rank] = str(error)

    ranks = [threading.Thread(target=arrive, args=(rank,)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    arrive(2)
    for rank in ranks:
        rank.join()
    assert sorted(errors) == ([] if said is None else [0, 1, 2])
    assert all(f"on rank 2 {said}" in text for text in errors.values()), errors
