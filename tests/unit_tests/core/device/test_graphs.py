"""Order of CudaGraphs' calls to torch, recorded by a mock of torch.cuda, without a GPU."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import pytest
import torch

from megatron.core.device import CudaGraphs

# Whether torch has released the pool when it raises at the end of a failed capture, which depends on the version.
LETS_GO_FIRST = [False, True]


class Noted:
    """A mock of torch.cuda.CUDAGraph; the next `broken` captures fail when they end."""

    log: list[Any] = []
    broken = 0

    def register_generator_state(self, generator: object) -> None:
        self.log.append(generator)

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        self.log.append(("begin", pool))

    def capture_end(self) -> None:
        if Noted.broken:
            Noted.broken -= 1
            raise RuntimeError("capture is broken")
        self.log.append("end")


@pytest.fixture
def graphs() -> Iterator[CudaGraphs]:
    Noted.log, Noted.broken = [], 0
    handles = map("pool {}".format, count())
    fake = {"CUDAGraph": Noted, "graph_pool_handle": lambda: next(handles), "stream": lambda stream: nullcontext()}
    with (
        patch.multiple(
            torch.cuda, **fake, Stream=Mock(), current_stream=Mock(), synchronize=Mock(), empty_cache=Mock()
        ),
        patch.object(torch, "zeros", Mock()),
    ):
        yield CudaGraphs(torch.device("cuda", 0), generators=lambda: ["generator"])  # type: ignore[list-item]


def begun(pool: str | None) -> list[Any]:
    return ["generator", ("begin", pool)]


def test_graphs_share_a_pool_until_the_last_is_gone(graphs: CudaGraphs) -> None:
    for kept, pool in (([], "pool 1"), ([], "pool 2")):
        for _ in range(2):
            with graphs.capturing() as graph:
                assert not gc.isenabled()
            kept.append(graph)
        assert gc.isenabled() and Noted.log == 2 * [*begun(pool), "end"]
        kept.clear()
        del graph
        Noted.log.clear()


def test_each_pool_has_a_handle_of_its_own_until_its_last_graph_is_gone(graphs: CudaGraphs) -> None:
    pools, kept = [graphs.new_pool(), graphs.new_pool()], {}
    for place in (0, 1, 0):
        with graphs.capturing(pools[place]) as graph:
            pass
        kept.setdefault(place, []).append(graph)
    del kept[1], graph
    for place in (0, 1):
        with graphs.capturing(pools[place]):
            pass
    begun_in = [entry[1] for entry in Noted.log if isinstance(entry, tuple)]
    assert begun_in[0] == begun_in[2] == begun_in[3] and len({*begun_in}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("lets_go_first", LETS_GO_FIRST)
def test_a_broken_capture_lets_go_of_pool_and_generators(graphs: CudaGraphs, lets_go_first: bool) -> None:
    end = Mock(side_effect=RuntimeError("not recording") if lets_go_first else None)
    with patch.multiple(torch._C, create=True, _cuda_endAllocateToPool=end, _cuda_releasePool=DEFAULT) as patched:
        Noted.broken = 1
        with pytest.raises(RuntimeError, match="capture is broken") as raised:
            with graphs.capturing():
                raise ValueError("the cause")
        assert patched["_cuda_releasePool"].call_count == (not lets_go_first)
    assert end.call_args.args[1] == "pool 1" and isinstance(raised.value.__context__, ValueError)
    # The second, empty capture unregisters the generators.
    assert Noted.log == [*begun("pool 1"), *begun(None), "end"] and gc.isenabled()
    Noted.log.clear()
    with graphs.capturing():
        pass
    assert Noted.log == [*begun("pool 2"), "end"]


def test_captures_of_one_step_wait_for_the_gpu_and_empty_its_cache_once(graphs: CudaGraphs) -> None:
    waits, emptied = torch.cuda.synchronize, torch.cuda.empty_cache
    assert isinstance(waits, Mock) and isinstance(emptied, Mock)
    kept, pools = [], [graphs.new_pool(), graphs.new_pool()]
    for num_steps in (1, 2):
        with graphs.on_capture_stream():
            for pool in pools * 3:
                with graphs.capturing(pool) as graph:
                    kept.append(graph)
        assert (waits.call_count, emptied.call_count) == (num_steps, num_steps)
    with graphs.on_capture_stream():
        pass
    # A step without captures does neither. A capture outside such a step, such as that of a whole step, does both.
    for num_captures in (3, 4):
        with graphs.capturing():
            pass
        assert (waits.call_count, emptied.call_count) == (num_captures, num_captures)


def test_the_capture_after_a_broken_one_empties_the_cache_again(graphs: CudaGraphs) -> None:
    with (
        patch.multiple(torch._C, create=True, _cuda_endAllocateToPool=DEFAULT, _cuda_releasePool=DEFAULT),
        graphs.on_capture_stream(),
    ):
        for broken, num_emptied in ((0, 1), (0, 1), (1, 1), (0, 2), (0, 2)):
            Noted.broken = broken
            with pytest.raises(RuntimeError) if broken else nullcontext():
                with graphs.capturing():
                    pass
            assert torch.cuda.empty_cache.call_count == num_emptied  # type: ignore[attr-defined]
