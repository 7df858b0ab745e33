"""Memory of messages on a CPU: what is used again, what is kept and what is let go."""

import torch

from benchmarks.live_bytes import LiveBytes
from megatron.core.distributed.transient_buffer import MessageMemory

CPU = torch.device("cpu")


def test_memory_of_a_message_is_that_of_the_next_one_that_fits() -> None:
    memory = MessageMemory(torch.float32, CPU, is_kept=True)
    first, second = memory.take(100), memory.take(50)
    places = first.data_ptr(), second.data_ptr()
    assert places[0] != places[1], "both are in use"
    memory.give_back(first)
    memory.give_back(second)
    assert memory.take(40).data_ptr() == places[1], "the smallest that fits"
    again = memory.take(60)
    assert (again.data_ptr(), again.numel(), again.dtype) == (places[0], 60, torch.float32)


def test_a_larger_message_takes_the_place_of_a_piece_that_is_too_small() -> None:
    memory = MessageMemory(torch.float32, CPU, is_kept=True)
    for numel in (10, 20, 30):
        memory.give_back(memory.take(numel))
    kept = memory.take(30)
    small = memory.take(5)
    assert small.untyped_storage().nbytes() == 4 * 5, "nothing but the largest was left"
    assert kept.untyped_storage().nbytes() == 4 * 30


def test_no_more_than_a_few_pieces_stay() -> None:
    memory = MessageMemory(torch.float32, CPU, is_kept=True)
    with LiveBytes() as live:
        some = [memory.take(8) for _ in range(10)]
        places = {message.data_ptr() for message in some}
        for message in some:
            memory.give_back(message)
        del some, message
        assert live.total() == 3 * 4 * 8
        again = [memory.take(8) for _ in range(3)]
        assert {message.data_ptr() for message in again} <= places
        assert live.total() == 3 * 4 * 8


def test_what_it_did_not_give_or_does_not_keep_is_none_of_its_business() -> None:
    memory = MessageMemory(torch.float32, CPU, is_kept=True)
    freed = MessageMemory(torch.float32, CPU, is_kept=False)
    with LiveBytes() as live:
        memory.give_back(torch.zeros(4))
        freed.give_back(freed.take(4))
        assert live.total() == 0
