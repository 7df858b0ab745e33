"""Performs the startup handshake: processes find each other and compare their settings before they form groups.

error_broadcast.py exchanges errors between ranks afterwards.
"""

import contextlib
import functools
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.device import distributed_backend, require_launch
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import flag_table, yaml_of_value
from megatron.training.command_line.yaml_config import config_values, shown_flags
from megatron.training.config import DistributedConfig, LaunchConfig, RunConfig
from megatron.training.error_broadcast import ErrorBroadcast, named_ranks, record_collectives

Settings = Mapping[str, str]

_ALL_IS_WELL = "all is well"
# A store answers immediately, or within seconds while thousands of ranks send requests.
_ANSWER_WITHIN = timedelta(seconds=10)
_RETRY_SECONDS = 0.2
_SETTINGS_SHOWN, _RANKS_SHOWN = 5, 8
# Arguments whose values may differ between machines. Ranks compare only whether they are given.
_MACHINE_SPECIFIC = frozenset(
    """
    data_path train_data_path valid_data_path test_data_path data_args_path data_cache_path mmap_bin_files
    num_workers tokenizer_model vocab_file merge_file save load tensorboard_dir memory_snapshot_path
    """.split()
)


def join_process_group(
    config: DistributedConfig,
    launch: LaunchConfig,
    device: torch.device,
    *,
    settings: Callable[[], Settings],
    broadcast: ErrorBroadcast | None,
) -> None:
    """Initializes torch.distributed from the launcher's environment. A single process requires no address. Collective.

    launch: used only with --fake-process-group, whose groups do not communicate, so that settings are not compared and
    the broadcast is not connected. settings: called if the launcher has started ranks to compare with; see
    `common_settings`. broadcast: connected in the same case.
    Raises LaunchError if the environment is incomplete, CommandLineError on every rank if settings differ, and OSError
    naming the ranks that did not arrive in time.
    """
    if dist.is_initialized():
        return
    if config.fake_process_group:
        dist.init_process_group("fake", store=FakeStore(), rank=launch.rank, world_size=launch.world_size)
        return
    require_launch()
    backend = _backend(config, device)
    record_collectives()
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    if "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rendezvous = Rendezvous.of_environment()
    root_store = rendezvous.connect(timeout)
    # A script may train several times in the same processes. Each run uses separate keys.
    prefix = _prefix_of_visit(root_store, rendezvous.rank)
    store = dist.PrefixStore(prefix, root_store)
    if broadcast is not None:
        broadcast.connect(
            dist.PrefixStore("failures", store),
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            watched=dist.PrefixStore("failures", dist.PrefixStore(prefix, rendezvous.connect(timeout))),
            hosts_store=rendezvous.serves,
        )
    agree_on_settings(
        dist.PrefixStore("settings", store), settings(), rank=rendezvous.rank, world_size=rendezvous.world_size
    )
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("groups", store),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
    )


def _backend(config: DistributedConfig, device: torch.device) -> str:
    backend = config.distributed_backend or distributed_backend(device)
    if backend == "nccl" and device.type != "cuda":
        raise ValueError("--distributed-backend is nccl, but this process has no GPU: use gloo or leave the flag out")
    if backend == "nccl" and config.use_gloo_process_groups:
        # With gloo, host data such as errors and file lists does not wait for the GPU's work.
        return "cpu:gloo,cuda:nccl"
    return backend


@dataclass(frozen=True)
class Rendezvous:
    """Address and size of a run's rendezvous. serves: whether this process hosts the store."""

    host: str
    port: int
    rank: int
    world_size: int
    serves: bool
    attempt: str

    @classmethod
    def of_environment(cls) -> "Rendezvous":
        """Reads the rendezvous from the environment, after require_launch."""
        rank = int(os.environ["RANK"])
        return cls(
            host=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
            # torchrun's agent on the first node hosts a store that outlives the ranks.
            serves=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    def connect(self, timeout: timedelta) -> dist.Store:
        """Connects to the store. Raises OSError if it does not answer in time, or if another program uses its port."""
        if self.serves:
            try:
                _serve(self.host, self.port, world_size=self.world_size)
            except dist.DistNetworkError as error:
                raise OSError(self._cannot_serve(error)) from error
        self._wait_for_listener(timeout)
        store = self._connect_to_listener(timeout)
        if store is None:
            raise OSError(
                f"{self.host}:{self.port} (MASTER_ADDR and MASTER_PORT) is used by a program other than this run's "
                "rank 0 or its torchrun: choose a free MASTER_PORT"
            )
        # Separates this attempt's keys from the keys of earlier attempts. The prefix includes the number of ranks,
        # because torchrun does not count a restart when a node joins.
        return dist.PrefixStore(f"attempt {self.attempt} of {self.world_size} ranks", store)

    def _cannot_serve(self, error: dist.DistNetworkError) -> str:
        if "EADDRINUSE" in str(error):
            return (
                f"MASTER_PORT is {self.port}, but another program on this machine uses that port: choose another, "
                "or end that program (perhaps an earlier run)"
            )
        return f"cannot listen at {self.host}:{self.port} (MASTER_ADDR and MASTER_PORT): {str(error).splitlines()[0]}"

    def _wait_for_listener(self, timeout: timedelta) -> None:
        """Waits until a process listens at the port. The process may belong to a different run."""
        end = time.monotonic() + timeout.total_seconds()
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=5).close()
            except OSError as error:
                if time.monotonic() > end:
                    raise OSError(
                        f"no process answers at {self.host}:{self.port} (MASTER_ADDR and MASTER_PORT) within "
                        f"{_minutes(timeout)}, where rank 0 or its torchrun should be"
                    ) from error
                # No event signals that another machine begins to listen.
                time.sleep(_RETRY_SECONDS)
            else:
                return

    def _connect_to_listener(self, timeout: timedelta) -> dist.Store | None:
        """Connects to the listening process. Returns None if it is not a store."""
        found: list[dist.Store] = []

        def connect() -> None:
            with contextlib.suppress(dist.DistNetworkError):
                # agree_on_settings counts the arriving ranks, and can name the missing ranks.
                found.append(
                    dist.TCPStore(self.host, self.port, self.world_size, False, _ANSWER_WITHIN, wait_for_workers=False)
                )

        # torch would wait forever for an answer, and cannot be interrupted.
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(_ANSWER_WITHIN.total_seconds())
        for store in found:
            store.set_timeout(timeout)
        return next(iter(found), None)


@functools.cache
def _serve(host: str, port: int, *, world_size: int) -> dist.Store:
    # Cached until the process ends: in a second run, ranks could otherwise find a server that is about to close.
    return dist.TCPStore(host, port, world_size, True, wait_for_workers=False, multi_tenant=True)


def _prefix_of_visit(store: dist.Store, rank: int) -> str:
    """Returns this run's key prefix in the store. It is equal on all processes, unless two have the same rank."""
    process = f"{socket.gethostname()} {os.getpid()}"
    visits = f"visits of rank {rank}"
    if store.compare_set(f"process of rank {rank}", "", process).decode() == process:
        return f"visit {store.add(visits, 1)}"
    # Another process has this rank, which agree_on_settings reports on both.
    return f"visit {max(store.add(visits, 0), 1)}"


def common_settings(run_config: RunConfig) -> dict[str, str]:
    """Returns the settings that must be equal on all ranks, by flag, as text. File paths count only as given or not."""
    settings = {"WORLD_SIZE": str(run_config.launch.world_size), "the torch version": str(torch.__version__)}
    for flag in shown_flags(run_config.values, flag_table()):
        value = run_config.values[flag.dest]
        given = "given" if flag.dest in _MACHINE_SPECIFIC and value is not None else json.dumps(yaml_of_value(value))
        settings[flag.flags[0]] = given
    return {**settings, **_settings_of_script(run_config)}


def _settings_of_script(run_config: RunConfig) -> dict[str, str]:
    """Returns the numbers and switches that a script's own flags have set. Texts may be paths, which may differ."""
    known = flag_table().by_dest
    values = {name: value for name, value in config_values(run_config.values).items() if name not in known}
    return {name: json.dumps(value) for name, value in values.items() if isinstance(value, (bool, int, float))}


def agree_on_settings(store: dist.Store, settings: Settings, *, rank: int, world_size: int) -> None:
    """Waits until all ranks have arrived, and compares their settings, with a few requests per rank.

    Raises CommandLineError with the same message on every rank, naming the ranks that differ from the majority, and
    OSError naming the ranks that did not arrive within the store's timeout.
    """
    text = json.dumps(settings)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    # Equal settings have equal keys.
    store.set(digest, text)
    if store.add(f"processes of rank {rank}", 1) > 1:
        store.set("verdict", f"RANK is {rank} in several processes: must differ between processes; torchrun sets it")
    store.set(f"rank {rank}", digest)
    if store.add("num arrivals", 1) == world_size:
        store.compare_set("verdict", "", _difference(store, world_size) or _ALL_IS_WELL)
    try:
        verdict = store.get("verdict").decode()
    except dist.DistStoreError as error:
        late = [other for other in range(world_size) if not store.check([f"rank {other}"])]
        raise OSError(
            f"{named_ranks(late)} did not arrive in time (--distributed-timeout-minutes): not started, ended, or "
            "started with a different MASTER_ADDR or MASTER_PORT"
        ) from error
    if verdict != _ALL_IS_WELL:
        raise CommandLineError(verdict)


def _difference(store: dist.Store, world_size: int) -> str:
    """Describes the ranks and settings that differ from the majority. Returns "" if all settings are equal."""
    ranks: dict[str, list[int]] = {}
    for rank, known in enumerate(store.multi_get([f"rank {rank}" for rank in range(world_size)])):
        ranks.setdefault(known.decode(), []).append(rank)
    # In a tie, the settings of rank 0 count as the majority.
    usual = max(ranks, key=lambda digest: len(ranks[digest]))
    expected = json.loads(store.get(usual))
    parts = []
    for digest in ranks.keys() - {usual}:
        found = json.loads(store.get(digest))
        different = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
        values = [f"{name} is {found.get(name)}, not {expected.get(name)}" for name in different[:_SETTINGS_SHOWN]]
        parts.append(f"on rank {_listed(ranks[digest])} {' and '.join(values)}")
    if not parts:
        return ""
    return f"ranks were started differently: {'; '.join(sorted(parts))}, as on rank {_listed(ranks[usual])}"


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    return shown if len(ranks) <= _RANKS_SHOWN else f"{shown} and {len(ranks) - _RANKS_SHOWN} others"


def _minutes(time: timedelta) -> str:
    return f"{time.total_seconds() / 60:g} minutes"
