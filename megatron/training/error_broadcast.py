"""Implements ErrorBroadcast, with which ranks exchange errors through the rendezvous store, without collectives.

errors.py decides which errors end a run with one line. startup_handshake.py compares the ranks' settings at startup.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import numpy
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import _world

from megatron.core.group_collectives import RemoteRankError

# Number of entries in torch's flight recorder. A dump, once per second, takes 1 ms for 100 entries and 16 ms for 500.
_BUFFER_SIZE = "100"
_OVERDUE_SHARE = 0.95
# Dumps of the flight recorders of gloo and of NCCL. torch before 2.12 may lack the first.
_RECORDERS = tuple(
    vars(_distributed_c10d)[name]
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    if name in vars(_distributed_c10d)
)

# Messages of gloo about lost connections and timeouts, for which torch has no exception class.
_LOST_MESSAGES = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")

# Keys in the store.
_CAUSE, _LOST, _NUM_LOST = "cause", "lost {}", "num lost"
_NUM_SEARCHING, _NUM_SILENT, _NUM_PARTED = "num searching", "num silent", "num parted"
_EXIT_CODE = 1
_GRACE_SECONDS = 2.0  # lets the main thread fail by itself first, which ends the rank more cleanly
_PATIENCE_SECONDS = 8.0  # for all ranks to report that they lost a connection
_ANSWER_SECONDS = 20.0  # for the store to answer all requests of a search, whose own waits are shorter
_LONG_SECONDS = 1.0  # minimum duration of collectives that errors mention
_MAX_WAITS_SHOWN = 3
_NO_ANSWER = "rank 0 or its node hangs: the store there does not answer"
_SILENT_SECONDS = 5.0  # for the thread of a hanging rank to read the cause and wait the grace period
_FIRST_PAUSE_SECONDS, _POLL_SECONDS = 0.01, 0.1  # ranks without an error end within milliseconds of each other
_REQUESTS_PER_SECOND = 4000  # to the store, from all ranks together, during normal operation


@dataclass(frozen=True)
class PendingCollective:
    """A collective in progress on this rank.

    number: sequence number in its group. is_on_gpu: whether NCCL executes it. NCCL ends the process after a timeout,
    without raising an exception.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    number: int
    seconds: float
    limit_seconds: float
    is_on_gpu: bool

    @property
    def is_overdue_on_gpu(self) -> bool:
        """Whether NCCL's timeout is about to end the process."""
        return self.is_on_gpu and self.seconds > _OVERDUE_SHARE * self.limit_seconds > 0

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.operation} number {self.number} of group {self.group} (ranks {ranks})"


def record_collectives() -> None:
    """Enables torch's flight recorder, unless TORCH_FR_BUFFER_SIZE is set. Called before the first process group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _BUFFER_SIZE)


def oldest_pending() -> PendingCollective | None:
    """Returns the oldest collective in progress, or None if none is recorded. Callable from any thread.

    gloo does not record point-to-point transfers.
    """
    found = []
    for dump in _RECORDERS:
        # Dumps all entries, because gloo's recorder ignores a request for active ones only.
        record = json.loads(dump())
        found += [entry for entry in record.get("entries", []) if not entry.get("retired", False)]
    found = [entry for entry in found if entry["state"] != "completed"]
    return _collective(min(found, key=lambda entry: entry["time_created_ns"])) if found else None


def _collective(entry: dict[str, Any]) -> PendingCollective:
    library, _, operation = str(entry["profiling_name"]).rpartition(":")
    name, description = entry["process_group"]
    return PendingCollective(
        operation=operation,
        group="world" if description == "default_pg" else description,
        ranks=_ranks_of(name),
        number=entry["collective_seq_id"],
        seconds=time.time() - entry["time_created_ns"] / 1e9,
        limit_seconds=entry.get("timeout_ms", 0) / 1e3,
        is_on_gpu=library == "nccl",
    )


def _ranks_of(name: str) -> tuple[int, ...]:
    # A copy, because another thread may create groups.
    groups = [group for group, group_name in list(_world.pg_names.items()) if group_name == name]
    return tuple(dist.get_process_group_ranks(groups[0])) if groups else ()


def place_of(error: BaseException) -> str:
    """Describes where an error was raised: "in FUNCTION (FILE:LINE)"."""
    # Innermost frame first.
    return _place([frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1])


def lost_another_rank(error: BaseException) -> bool:
    """Returns whether the error only means that a different rank has ended or does not respond."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(message in str(error) for message in _LOST_MESSAGES)
    )


class ErrorBroadcast:
    """Context manager around a run that sends the error of a failing rank to all other ranks.

    Without it, the other ranks would only report a lost connection.
    1. A rank that fails stores its error as the cause, then closes its connections.
    2. A rank that loses a connection reports the loss and the collective in which it was waiting, then waits for the
       cause. A killed rank stores no cause. It is identified as the only rank without a report.
    3. A thread on each rank polls the store, because a rank that waits for the failed rank indirectly, or inside a GPU
       kernel, does not notice lost connections. The thread then ends the process.

    An error that leaves the body is sent to the other ranks. An error that only means that a connection was lost is
    replaced with a RemoteRankError that names the failed rank. Before `connect`, and in a run of one process, nothing
    is sent.
    """

    def __init__(self, *, describe: Callable[[BaseException], str], leave: Callable[[], None]) -> None:
        """Prepares the broadcast without connecting it.

        describe: formats the line to send about an error. leave: destroys the process groups; called at the end.
        """
        self._describe, self._leave = describe, leave
        self._store: dist.Store | None = None
        self._rank, self._world_size, self._hosts_store = 0, 1, False
        self._leaving = threading.Event()
        self._main_thread = threading.get_ident()
        # Updated at each poll, because a collective that has failed is no longer in progress.
        self._waited_in: PendingCollective | None = None
        self._thread: threading.Thread | None = None

    def connect(self, store: dist.Store, *, rank: int, world_size: int, watched: dist.Store, hosts_store: bool) -> None:
        """Connects this rank to the others through `store`, and starts the polling thread.

        watched: the same store over a separate connection, for the thread. hosts_store: whether this process hosts the
        store's server and must therefore leave last.
        """
        self._store, self._rank, self._world_size, self._hosts_store = store, rank, world_size, hosts_store
        self._thread = threading.Thread(target=self._watch, args=(watched,), name="error broadcast", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._leaving.set()
        try:
            if self._store is not None:
                self._report_exit(self._store, error)
        finally:
            if self._thread is not None:
                # The interpreter must not end during a request of the thread, unless the store does not answer it.
                self._thread.join(_PATIENCE_SECONDS)
            self._leave()

    def _report_exit(self, store: dist.Store, error: BaseException | None) -> None:
        """Reports to the other ranks how this rank ended. Raises RemoteRankError if it lost a connection."""
        if error is None:
            self._release_store(store)
        elif lost_another_rank(error):
            doing = place_of(error)
            cause = _with_timeout(lambda: self._find_cause(store, then=self._leave))
            if cause is None:
                self._leave()
                raise RemoteRankError(f"{_NO_ANSWER}; this rank was {doing}") from error
            self._release_store(store)
            raise RemoteRankError(f"{cause}; this rank was {doing}") from error
        else:
            # The rank named by a RemoteRankError sends the cause itself.
            if not isinstance(error, RemoteRankError):
                self._store_cause(store, f"rank {self._rank} failed: {self._describe(error)}")
            self._leave()
            self._release_store(store)

    def _store_cause(self, store: dist.Store, text: str) -> None:
        # Keeps the first cause. Sends nothing if the store's server has ended.
        with suppress(RuntimeError):
            store.compare_set(_CAUSE, "", text)

    def _find_cause(self, store: dist.Store, *, then: Callable[[], None]) -> str:
        """Reports a lost connection, calls `then`, and returns the cause as far as it is known."""
        try:
            store.set(_LOST.format(self._rank), json.dumps(self._waited_in and asdict(self._waited_in)))
            store.add(_NUM_LOST, 1)
            then()
            _wait_until(lambda: store.check([_CAUSE]) or store.add(_NUM_LOST, 0) >= self._world_size - 1)
            # One rank searches on behalf of all. With thousands of ranks, a search by each would take minutes.
            if not store.check([_CAUSE]) and store.add(_NUM_SEARCHING, 1) == 1:
                if self._waited_in is not None:
                    # If ranks wait for each other, all of them report, but the last report may arrive slightly later.
                    _wait_until(lambda: store.add(_NUM_LOST, 0) == self._world_size, _GRACE_SECONDS)
                silent = [rank for rank in range(self._world_size) if not store.check([_LOST.format(rank)])]
                store.add(_NUM_SILENT, len(silent))
                self._store_cause(store, _describe_silent_ranks(silent, self._waits(store, silent)))
            store.wait([_CAUSE], timedelta(seconds=_PATIENCE_SECONDS))
            return store.get(_CAUSE).decode()
        except dist.DistStoreError:
            return "the connection to another rank was lost, and no rank reported the cause"
        except RuntimeError:
            return "rank 0 or its node has ended: the connections to the store there and to another rank were lost"

    def _waits(self, store: dist.Store, silent: list[int]) -> dict[int, PendingCollective]:
        """Returns the collective in which each rank waited, by rank.

        If some ranks are silent, includes only collectives in which a silent rank takes part.
        """
        others = [rank for rank in range(self._world_size) if rank not in silent]
        reports = [json.loads(report) for report in store.multi_get([_LOST.format(rank) for rank in others])]
        waits = {rank: PendingCollective(**report) for rank, report in zip(others, reports) if report is not None}
        return {rank: wait for rank, wait in waits.items() if not silent or set(silent) & set(wait.ranks)}

    def _release_store(self, store: dist.Store) -> None:
        """Reports that this rank no longer uses the store. The store's host waits for the reports of all live ranks."""
        # The host may have ended.
        with suppress(RuntimeError):
            store.add(_NUM_PARTED, 1)
            if not self._hosts_store:
                return
            _wait_until(lambda: store.add(_NUM_PARTED, 0) + store.add(_NUM_SILENT, 0) >= self._world_size)
            # A silent rank may hang instead of having been killed. Its thread ends it after reading the cause.
            _wait_until(lambda: store.add(_NUM_PARTED, 0) >= self._world_size, _SILENT_SECONDS)

    # Section: runs in the thread.

    def _watch(self, store: dist.Store) -> None:
        try:
            while not store.check([_CAUSE]) and not store.check([_NUM_LOST]):
                pending = oldest_pending()
                self._waited_in = pending if pending is not None and pending.seconds > _LONG_SECONDS else None
                if self._waited_in is not None and self._waited_in.is_overdue_on_gpu:
                    # NCCL would end the process without a report to the others.
                    break
                if self._leaving.wait(max(1.0, self._world_size / _REQUESTS_PER_SECOND)):
                    return
        except RuntimeError:
            # The store has ended. The main thread has ended too, or will notice.
            return
        if self._leaving.wait(_GRACE_SECONDS):
            return
        waiting = _place(_frames_of_thread(self._main_thread))
        cause = self._find_cause(store, then=lambda: None)
        if not self._leaving.is_set():
            print(f"[rank {self._rank}] error: {cause}; this rank was {waiting}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            self._release_store(store)
            os._exit(_EXIT_CODE)


def named_ranks(ranks: Sequence[int]) -> str:
    """Returns "rank 1" or "ranks 0, 2"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _describe_silent_ranks(silent: list[int], waits: dict[int, PendingCollective]) -> str:
    """Describes the silent ranks, and the collectives in which other ranks waited for them.

    waits: maps a rank to the collective in which it waited.
    """
    parts = []
    for text in list(dict.fromkeys(str(wait) for wait in waits.values()))[:_MAX_WAITS_SHOWN]:
        parts.append(f"{named_ranks([rank for rank, wait in waits.items() if str(wait) == text])} waited in {text}")
    waiting = "; ".join(parts)
    if not silent:
        return f"the ranks wait for each other: {waiting or 'in no recorded collective'}"
    gone = f"{named_ranks(silent)} ended or {'hangs' if len(silent) == 1 else 'hang'} without a message (killed?)"
    return f"{gone}; {waiting}" if waiting else gone


def _with_timeout(request: Callable[[], str]) -> str | None:
    """Runs `request` in a thread and returns its result, or None after a timeout, when the store's server hangs."""
    answers: list[str] = []
    # A request to a stopped process or node blocks forever.
    thread = threading.Thread(target=lambda: answers.append(request()), name="error broadcast's question", daemon=True)
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
    """Describes the innermost function of this project in a stack, and the torch function that it called."""
    libraries = tuple(str(Path(module.__file__).parent) for module in (torch, numpy, threading) if module.__file__)
    own = next((frame for frame in frames if not frame.f_code.co_filename.startswith(libraries)), None)
    if own is None:
        return "outside this program"
    called = "" if own is frames[0] else f"{frames[0].f_code.co_name} of "
    return f"in {called}{own.f_code.co_name} ({Path(own.f_code.co_filename).name}:{own.f_lineno})"
