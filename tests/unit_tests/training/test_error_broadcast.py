"""Tests of errors sent between ranks. functional_tests/test_faults.py covers killed and hanging processes."""

import threading
import time
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from megatron.core.group_collectives import RemoteRankError
from megatron.training import error_broadcast
from megatron.training.error_broadcast import ErrorBroadcast, PendingCollective

OPERATIONS = ("all_reduce", "all_gather")


def _message_of_rank(rank: int, store: dist.Store, *, delay: float) -> str:
    """Returns the error of a rank that loses its connection in a collective after another rank has reported a loss."""
    # A working store would let the watching thread end this process.
    unwatched = Mock(check=Mock(side_effect=RuntimeError))
    with pytest.raises(RemoteRankError) as caught, ErrorBroadcast(describe=str, leave=lambda: None) as broadcast:
        broadcast.connect(store, rank=rank, world_size=2, watched=unwatched, hosts_store=False)
        broadcast._waited_in = PendingCollective(OPERATIONS[rank], "world", (0, 1), 3, 60.0, 60.0, False)
        if delay:
            # Waits until rank 0 has reported its lost connection.
            store.wait(["num lost"], timedelta(seconds=30))
        time.sleep(delay)
        raise RuntimeError("Connection closed by peer")
    return str(caught.value)


def test_no_rank_is_accused_where_ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_broadcast, "_GRACE_SECONDS", 30.0)
    # HashStore's `add` and `compare_set` do not wake threads that wait for the key.
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    messages: dict[int, str] = {}
    first = threading.Thread(target=lambda: messages.update({0: _message_of_rank(0, host, delay=0.0)}), daemon=True)
    first.start()
    messages[1] = _message_of_rank(1, client, delay=0.2)
    first.join(60)
    expected = (
        "the ranks wait for each other: rank 0 waited in all_reduce number 3 of group world (ranks 0, 1); "
        "rank 1 waited in all_gather number 3 of group world (ranks 0, 1)"
    )
    assert messages.keys() == {0, 1} and all(text.startswith(expected) for text in messages.values()), messages
