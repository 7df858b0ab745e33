"""What ranks tell each other when one of them fails: notes in the rendezvous store, beside all collectives.

Which errors end a run in one line for the user: errors.py. That ranks start alike: joining.py.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import numpy
import torch
import torch.distributed as dist

from megatron.core.group_collectives import RemoteRankError
from megatron.training.pending_collectives import PendingCollective, oldest_pending

# How gloo words the end of a connection and of its patience; torch has no class for them.
_LOST_WORDS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")

# Keys in the store.
_CAUSE, _LOST, _NUM_LOST = "cause", "lost {}", "num lost"
_NUM_SEARCHING, _NUM_SILENT, _NUM_PARTED = "num searching", "num silent", "num parted"
_EXIT_CODE = 1
_GRACE_SECONDS = 2.0  # for a rank to fail by itself, which ends it in better order than its thread can
_PATIENCE_SECONDS = 8.0  # for all ranks to say that they lost another one
_ANSWER_SECONDS = 20.0  # for the server of the store to answer all of a search, whose own waits are shorter
_LONG_SECONDS = 1.0  # a collective that takes longer is worth a word
_WAITS_SHOWN = 3
_NO_ANSWER = "rank 0 or its node hangs: the store there does not answer"
_SILENT_SECONDS = 5.0  # for the thread of a rank that hangs: its look at the notes and the grace
_FIRST_PAUSE_SECONDS, _POLL_SECONDS = 0.01, 0.1  # ranks that end well do so within milliseconds of each other
_REQUESTS_PER_SECOND = 4000  # what the server of the store is asked for by all ranks while nothing happens


def place_of(error: BaseException) -> str:
    """Where an error was raised, for a person: "in FUNCTION (FILE:LINE)"."""
    # Innermost first.
    return _place([frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1])


def lost_another_rank(error: BaseException) -> bool:
    """Whether the error says no more than that another rank has ended or does not answer."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_WORDS)
    )


class FailureBoard:
    """Where a failing rank leaves a note for the others, who would learn no more than that a connection was lost.

    1. A rank that fails leaves its error as the cause, then closes its connections.
    2. A rank that loses another one says so and waits for the cause. A rank that was killed leaves none: it is the
       one that says nothing while all others do. Each of these says in which collective it waited, if it did for long.
    3. A thread on each rank looks for notes: a rank that waits for the failed one by way of others, or inside a GPU
       kernel, is not told by its connections. The thread ends the process.

    Used by `with` around all that a run does. An error that leaves the body is told to the other ranks; one that only
    says that another rank was lost becomes a RemoteRankError that names it. Until `connect`, and in a run of one
    process, there is nobody to tell.
    """

    def __init__(self, *, describe: Callable[[BaseException], str], leave: Callable[[], None]) -> None:
        """describe: what to tell of an error, in one line. leave: destroys the process groups; called at the end."""
        self._describe, self._leave = describe, leave
        self._store: dist.Store | None = None
        self._rank, self._world_size, self._hosts_store = 0, 1, False
        self._leaving = threading.Event()
        self._main_thread = threading.get_ident()
        # Since the last look at it: a collective that has failed meanwhile is over, and no longer known as the one.
        self._waited_in: PendingCollective | None = None
        self._thread: threading.Thread | None = None

    def connect(self, store: dist.Store, *, rank: int, world_size: int, watched: dist.Store, hosts_store: bool) -> None:
        """Notes go to `store` from now on.

        watched: the same by a connection of its own, for the thread. hosts_store: the server is in this process, which
        then leaves last.
        """
        self._store, self._rank, self._world_size, self._hosts_store = store, rank, world_size, hosts_store
        self._thread = threading.Thread(target=self._watch, args=(watched,), name="failure board", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._leaving.set()
        try:
            if self._store is not None:
                self._take_leave(self._store, error)
        finally:
            if self._thread is not None:
                # It must not meet the end of the interpreter inside a request, unless nobody will ever answer that.
                self._thread.join(_PATIENCE_SECONDS)
            self._leave()

    def _take_leave(self, store: dist.Store, error: BaseException | None) -> None:
        if error is None:
            self._part(store)
        elif lost_another_rank(error):
            doing = place_of(error)
            cause = _answer(lambda: self._cause(store, then=self._leave))
            if cause is None:
                self._leave()
                raise RemoteRankError(f"{_NO_ANSWER}; this rank was {doing}") from error
            self._part(store)
            raise RemoteRankError(f"{cause}; this rank was {doing}") from error
        else:
            # What a RemoteRankError says, its own rank tells.
            if not isinstance(error, RemoteRankError):
                self._tell(store, f"rank {self._rank} failed: {self._describe(error)}")
            self._leave()
            self._part(store)

    def _tell(self, store: dist.Store, text: str) -> None:
        # The first cause stays. Where the server has ended, there is nobody to tell.
        with suppress(RuntimeError):
            store.compare_set(_CAUSE, "", text)

    def _cause(self, store: dist.Store, *, then: Callable[[], None]) -> str:
        """Why another rank was lost, as far as the notes tell; calls `then` once this rank has left its own."""
        try:
            store.set(_LOST.format(self._rank), json.dumps(self._waited_in and asdict(self._waited_in)))
            store.add(_NUM_LOST, 1)
            then()
            _wait_until(lambda: store.check([_CAUSE]) or store.add(_NUM_LOST, 0) >= self._world_size - 1)
            # One rank looks for all: with thousands, each looking for each would take minutes.
            if not store.check([_CAUSE]) and store.add(_NUM_SEARCHING, 1) == 1:
                if self._waited_in is not None:
                    # Where all wait for each other none is silent: the last one only comes a moment later.
                    _wait_until(lambda: store.add(_NUM_LOST, 0) == self._world_size, _GRACE_SECONDS)
                silent = [rank for rank in range(self._world_size) if not store.check([_LOST.format(rank)])]
                store.add(_NUM_SILENT, len(silent))
                self._tell(store, _verdict(silent, self._waits(store, silent)))
            store.wait([_CAUSE], timedelta(seconds=_PATIENCE_SECONDS))
            return store.get(_CAUSE).decode()
        except dist.DistStoreError:
            return "the connection to another rank was lost, and no rank could tell which"
        except RuntimeError:
            return "rank 0 or its node has ended: connections to another rank and to the store there were lost"

    def _waits(self, store: dist.Store, silent: list[int]) -> dict[int, PendingCollective]:
        """In which collective each rank waits that says so; only those with a silent rank in it, if there is one."""
        others = [rank for rank in range(self._world_size) if rank not in silent]
        notes = [json.loads(note) for note in store.multi_get([_LOST.format(rank) for rank in others])]
        waits = {rank: PendingCollective(**note) for rank, note in zip(others, notes) if note is not None}
        return {rank: wait for rank, wait in waits.items() if not silent or set(silent) & set(wait.ranks)}

    def _part(self, store: dist.Store) -> None:
        """Says that this rank needs the store no more; its host waits until all that live have said so."""
        # Where the host has ended meanwhile, there is nobody to tell.
        with suppress(RuntimeError):
            store.add(_NUM_PARTED, 1)
            if not self._hosts_store:
                return
            _wait_until(lambda: store.add(_NUM_PARTED, 0) + store.add(_NUM_SILENT, 0) >= self._world_size)
            # A rank that says nothing may hang rather than have been killed: its thread ends it once it has read why.
            _wait_until(lambda: store.add(_NUM_PARTED, 0) >= self._world_size, _SILENT_SECONDS)

    # In the thread.

    def _watch(self, store: dist.Store) -> None:
        try:
            while not store.check([_CAUSE]) and not store.check([_NUM_LOST]):
                pending = oldest_pending()
                self._waited_in = pending if pending is not None and pending.seconds > _LONG_SECONDS else None
                if self._waited_in is not None and self._waited_in.is_overdue_on_gpu:
                    # The GPU's library would end the process without a word to the others.
                    break
                if self._leaving.wait(max(1.0, self._world_size / _REQUESTS_PER_SECOND)):
                    return
        except RuntimeError:
            # The main thread finds out by itself, or has nothing more to find out.
            return
        if self._leaving.wait(_GRACE_SECONDS):
            return
        waiting = _place(_frames_of_thread(self._main_thread))
        cause = self._cause(store, then=lambda: None)
        if not self._leaving.is_set():
            print(f"[rank {self._rank}] error: {cause}; this rank was {waiting}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            self._part(store)
            os._exit(_EXIT_CODE)


def _verdict(silent: list[int], waits: dict[int, PendingCollective]) -> str:
    """What became of the ranks that say nothing, and who waited for them in what; waits: by rank."""
    parts = []
    for text in list(dict.fromkeys(str(wait) for wait in waits.values()))[:_WAITS_SHOWN]:
        ranks = ", ".join(str(rank) for rank, wait in waits.items() if str(wait) == text)
        parts.append(f"rank {ranks} waited in {text}")
    waiting = "; ".join(parts)
    if not silent:
        return f"the ranks wait for each other: {waiting or 'in nothing that is recorded'}"
    gone = f"rank {', '.join(map(str, silent))} ended or hangs without a message (killed?)"
    return f"{gone}: did not come where {waiting}" if waiting else gone


def _answer(ask: Callable[[], str]) -> str | None:
    """What `ask` returns; None where it takes so long that the server of the store must hang."""
    answers: list[str] = []
    # A request to a process that is stopped, or to a node that is, blocks for ever.
    thread = threading.Thread(target=lambda: answers.append(ask()), name="failure board's question", daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    return answers[0] if answers else None


def _wait_until(condition: Callable[[], bool], seconds: float = _PATIENCE_SECONDS) -> None:
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    while time.monotonic() < deadline and not condition():
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)


def _frames_of_thread(thread: int) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]


def _place(frames: list[FrameType]) -> str:
    """What a rank was doing, for a person: the function of this project, and the one of torch that it called."""
    libraries = tuple(str(Path(module.__file__).parent) for module in (torch, numpy, threading) if module.__file__)
    own = next((frame for frame in frames if not frame.f_code.co_filename.startswith(libraries)), None)
    if own is None:
        return "outside this program"
    called = "" if own is frames[0] else f"{frames[0].f_code.co_name} of "
    return f"in {called}{own.f_code.co_name} ({Path(own.f_code.co_filename).name}:{own.f_lineno})"
