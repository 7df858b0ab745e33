"""Message memory on a CPU: which blocks are reused, which are kept and which are released."""

import torch

from benchmarks.live_bytes import LiveBytes
from megatron.core.distributed.bucket_storage import MessagePool

CPU = torch.device("cpu")


def test_memory_of_a_message_is_that_of_the_next_one_that_fits() -> None:
    pool = MessagePool(torch.float32, CPU, is_kept=True)
    first, second = pool.open(100), pool.open(50)
    places = first.data_ptr(), second.data_ptr()
    assert places[0] != places[1], "both blocks are in use"
    pool.close(first)
    pool.close(second)
    assert pool.open(40).data_ptr() == places[1], "must reuse the smallest block that fits"
    again = pool.open(60)
    assert (again.data_ptr(), again.numel(), again.dtype) == (places[0], 60, torch.float32)


def test_a_larger_message_takes_the_place_of_a_piece_that_is_too_small() -> None:
    pool = MessagePool(torch.float32, CPU, is_kept=True)
    for numel in (10, 20, 30):
        pool.close(pool.open(numel))
    kept = pool.open(30)
    small = pool.open(5)
    assert small.untyped_storage().nbytes() == 4 * 5, "only the largest block was free"
    assert kept.untyped_storage().nbytes() == 4 * 30


def test_no_more_than_a_few_pieces_stay() -> None:
    pool = MessagePool(torch.float32, CPU, is_kept=True)
    with LiveBytes() as live:
        some = [pool.open(8) for _ in range(10)]
        places = {message.data_ptr() for message in some}
        for message in some:
            pool.close(message)
        del some, message
        assert live.total() == 3 * 4 * 8
        again = [pool.open(8) for _ in range(3)]
        assert {message.data_ptr() for message in again} <= places
        assert live.total() == 3 * 4 * 8


def test_messages_that_it_did_not_allocate_or_does_not_keep_are_ignored() -> None:
    pool = MessagePool(torch.float32, CPU, is_kept=True)
    freed = MessagePool(torch.float32, CPU, is_kept=False)
    with LiveBytes() as live:
        pool.close(torch.zeros(4))
        freed.close(freed.open(4))
        assert live.total() == 0
