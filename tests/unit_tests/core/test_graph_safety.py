"""assert_capturable rejects code that a CUDA graph cannot capture, and names its line; capturable code passes."""

import copy
import ctypes
import inspect
import linecache
import pkgutil
import queue
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from megatron.core import device
from megatron.core.graphs import refusals
from megatron.core.graphs.refusals import Reason
from megatron.core.graphs.safety import CaptureError, assert_capturable, collect_refusals

Snippet = Callable[[Any], Any]
THREADS = ThreadPoolExecutor(1)
STREAM = device.RandomStream(1, torch.device("cpu"))
REASONS = {name: value for name, value in vars(refusals).items() if isinstance(value, Reason)}


# One line each. t: tensors from before the region. Tensors stored in t.held outlive it.
BAD: dict[str, list[Snippet]] = {
    "READ": [
        lambda t: t.i.item(),
        lambda t: t.x.tolist(),
        lambda t: t.x.cpu(),
        lambda t: t.x.detach().numpy(),
        lambda t: numpy.asarray(t.x),
        lambda t: bool(t.i),
        lambda t: 1 if t.i > 0 else 2,
        lambda t: int(t.i),
        lambda t: float(t.i),
        lambda t: [1, 2, 3, 4][t.i],
        lambda t: t.x[t.i],
        lambda t: range(t.i),
        lambda t: f"{t.i}",
        lambda t: repr(t.x),
        lambda t: str(t.x.sum()),
        lambda t: t.i in t.x,
        lambda t: t.x.to("cpu"),
        lambda t: t.x.to("cpu:0", torch.float64),
        lambda t: t.x.to(device="cpu"),
        lambda t: t.x.to(torch.device("cpu")),
        lambda t: torch.full((2,), t.i, device=t.x.device),
        lambda t: torch.arange(t.i, device=t.x.device),
        lambda t: torch.add(t.x, t.x, alpha=t.i),
        lambda t: torch.tensor_split(t.x, t.ints),
        lambda t: torch.equal(t.x, t.x),
        lambda t: torch.allclose(t.x, t.x),
        lambda t: torch.is_nonzero(t.i),
        lambda t: F.one_hot(t.ints).item(),
        lambda t: max(t.x),
        lambda t: torch.save(t.x, "/dev/null"),
    ],
    "SHAPE": [
        lambda t: t.x.nonzero(),
        lambda t: torch.where(t.mask),
        lambda t: torch.argwhere(t.x),
        lambda t: t.x.masked_select(t.mask),
        lambda t: t.x.unique(),
        lambda t: torch.unique_consecutive(t.x),
        lambda t: torch.unique(t.square, dim=0),
        lambda t: t.x[t.mask],
        lambda t: t.x[t.x > 0],
        lambda t: t.x.__setitem__(t.mask, t.x.sum()),
        lambda t: t.x.index_put_((t.mask,), t.x.sum()),
        lambda t: t.x.repeat_interleave(t.ints),
        lambda t: torch.repeat_interleave(t.ints),
        lambda t: torch.bincount(t.ints),
        lambda t: torch.combinations(t.x),
    ],
    "CHECK": [
        lambda t: torch.histc(t.x),
        lambda t: torch.multinomial(t.x.abs(), 2),
        lambda t: torch.normal(t.x, t.x.abs()),
        lambda t: torch.isin(t.x, t.x),
        lambda t: torch.mode(t.x),
        lambda t: torch.searchsorted(t.x, t.x, sorter=t.ints),
        lambda t: F.embedding(t.ints, t.square, max_norm=1.0),
        lambda t: torch.linalg.inv(t.square),
        lambda t: torch.linalg.solve(t.square, t.x),
        lambda t: torch.linalg.cholesky(t.square),
        lambda t: torch.linalg.eigh(t.square),
        lambda t: torch.linalg.svd(t.square),
        lambda t: torch.linalg.matrix_exp(t.square),
    ],
    "SCALAR": [
        lambda t: t.x.masked_fill(t.mask, t.x.sum()),
        lambda t: t.x.index_fill_(0, t.ints, t.x.sum()),
    ],
    "HOST_DATA": [
        lambda t: torch.tensor([1.0, 2.0]),
        lambda t: torch.tensor([1, 2], device=t.x.device),
        lambda t: torch.tensor(3.0, device=t.x.device),
        lambda t: t.x.new_tensor(3.0),
        lambda t: torch.as_tensor([1, 2]),
        lambda t: torch.from_numpy(numpy.ones(3)),
        lambda t: torch.as_tensor(numpy.ones(3), device=t.x.device),
        lambda t: torch.LongTensor([1, 2]),
        lambda t: t.x[[0, 2]],
        lambda t: t.x[numpy.array([0, 1])],
        lambda t: torch.frombuffer(bytearray(16), dtype=torch.float32),
        lambda t: torch.from_dlpack(numpy.ones(3)),
    ],
    "HOST_MEMORY": [
        lambda t: t.x.pin_memory(),
        lambda t: torch.empty(4, pin_memory=True),
        lambda t: torch.zeros(4),
        lambda t: torch.arange(4),
        lambda t: torch.randn(4, device="cpu"),
        lambda t: torch.ones(4, device=torch.device("cpu")),
        lambda t: device.host_bytes(4, t.x.device),
    ],
    "GENERATOR": [
        lambda t: torch.rand(4, generator=t.generator, device=t.x.device),
        lambda t: t.x.bernoulli_(0.5, generator=t.generator),
        lambda t: torch.randperm(4, generator=t.generator, device=t.x.device),
    ],
    "GENERATOR_STATE": [
        lambda t: torch.get_rng_state(),
        lambda t: torch.manual_seed(1),
        lambda t: t.generator.manual_seed(1),
        lambda t: torch.default_generator.get_state(),
    ],
    "HOST_RANDOM": [lambda t: t.x * random.random(), lambda t: random.randint(0, 3)],
    "WAIT": [
        lambda t: torch.cuda.synchronize(),
        lambda t: torch.accelerator.synchronize(),
        lambda t: torch.Event().synchronize(),
        lambda t: torch.Event().query(),
        lambda t: torch.Stream(device="cpu").synchronize(),
        lambda t: device.synchronize(t.x.device),
    ],
    "ALLOCATOR": [lambda t: torch.accelerator.memory.empty_cache()],
    "OBJECTS": [
        lambda t: dist.barrier(),
        lambda t: dist.monitored_barrier(),
        lambda t: dist.all_gather_object([None], 1),
        lambda t: dist.broadcast_object_list([1]),
    ],
    "OUTLIVES": [
        lambda t: t.held.append(t.x * 2),
        lambda t: t.held.append(t.x[1:].exp()[1:]),
        lambda t: setattr(t, "y", t.x.clone()),
    ],
    "ADDRESS": [
        lambda t: t.x.__dlpack__(),
        lambda t: torch.utils.dlpack.to_dlpack(t.x),
        lambda t: torch.from_dlpack(t.x),
        lambda t: ctypes.c_float.from_address(t.x.data_ptr()),
        lambda t: t.x.untyped_storage().data_ptr(),
        lambda t: t.x.share_memory_(),
    ],
    "UNSEEN_COPY": [
        lambda t: t.held.append(copy.deepcopy(t.x)),
        lambda t: copy.deepcopy({"made inside": t.x * 2}),
        lambda t: t.x.untyped_storage().clone(),
        lambda t: t.x.untyped_storage().cpu(),
    ],
    "THREAD": [
        lambda t: threading.Thread(target=t.x.sum).start(),
        lambda t: THREADS.submit(t.x.sum).result(),
    ],
    "RESIZED": [
        lambda t: torch.add(t.x, t.x, out=t.empty),
        lambda t: t.empty.resize_(8),
        lambda t: t.empty.untyped_storage().resize_(64),
    ],
}
# The tensors are fake GPU tensors.
BAD_ON_A_GPU: dict[str, list[Snippet]] = {
    "COPY": [
        lambda t: t.x.to(t.number.device),
        lambda t: t.number.to(t.x.device),
        lambda t: t.host.to(t.x.device, non_blocking=True),
        lambda t: t.x.copy_(t.host),
        lambda t: t.x[t.host.long()],
    ],
    "BAKED": [lambda t: t.x * t.number],
}
GOOD: list[Snippet] = [
    lambda t: t.x.mul_(2).add_(1),
    lambda t: t.x.masked_fill_(t.mask, 0.0),
    lambda t: t.x.__setitem__(t.mask, 0.0),
    lambda t: t.x.__setitem__(slice(1, 3), 0.0),
    lambda t: torch.where(t.mask, t.x, 0.0),
    lambda t: t.x.index_select(0, t.ints),
    lambda t: t.x[t.ints],
    lambda t: t.x[None, 1:-1, ...],
    lambda t: t.x.index_put_((t.ints,), t.x * 2, accumulate=True),
    lambda t: t.x.scatter_(0, t.ints, t.x * 2),
    lambda t: torch.zeros_like(t.x).index_add_(0, t.ints, t.x),
    lambda t: t.x.topk(2),
    lambda t: t.x.sort(stable=True),
    lambda t: t.x.cumsum(0).argmax(),
    lambda t: torch.searchsorted(t.x, t.x, right=True),
    lambda t: F.one_hot(t.ints, 4),
    lambda t: torch.repeat_interleave(t.x, t.ints, output_size=4),
    lambda t: torch.full((4,), 3.0, device=t.x.device),
    lambda t: torch.arange(4, device=t.x.device),
    lambda t: t.x.new_zeros(3),
    lambda t: torch.tensor(3.0) * t.x,
    lambda t: torch.ones(()) * t.x,
    lambda t: torch.multinomial(t.x.abs(), 2, replacement=True),
    lambda t: torch.histc(t.x, 4, min=0, max=1),
    lambda t: torch.linalg.inv_ex(t.square),
    lambda t: F.dropout(t.x, 0.5),
    lambda t: torch.rand(4, device=t.x.device),
    lambda t: torch.rand(4, generator=t.known, device=t.x.device),
    lambda t: drawn_from_a_stream(t.x),
    lambda t: reads_on_the_cpu(t.i) if t.x.device.type == "cpu" and type(t.x) is torch.Tensor else None,
    lambda t: torch.ops.graph_zoo.reads(t.x),
    lambda t: t.x.to(t.x.device, torch.float64).to(t.ints),
    lambda t: t.x.copy_(t.x + 1),
    lambda t: t.region.keep(t.held.append(t.x * 2) or t.held[-1]),
    lambda t: t.held.append(t.x[1:]),
    lambda t: (t.x * 2).untyped_storage().resize_(0),
    lambda t: dist.all_reduce(t.x),
    lambda t: dist.all_gather_into_tensor(torch.empty_like(t.x), t.x),
    lambda t: t.x.size(0) if t.x.shape[0] == t.x.dim() + 3 else len(t.x),
]


def drawn_from_a_stream(x: torch.Tensor) -> torch.Tensor:
    with STREAM.drawn():
        return F.dropout(x, 0.5)


@device.cpu_alone
def reads_on_the_cpu(x: torch.Tensor) -> int:
    return int(x)


def zoo_loss(t: Any) -> None:
    F.cross_entropy(F.linear(t.square * t.weight, t.square), t.ints).backward()


GOOD_BACKWARD: list[Snippet] = [
    zoo_loss,
    lambda t: torch.autograd.grad(t.weight.max(), t.weight),
    lambda t: (checkpoint(torch.exp, t.weight, use_reentrant=False, preserve_rng_state=False)).sum().backward(),
    lambda t: F.dropout(t.weight, 0.1).norm().backward(),
]


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * grad.sum().tolist()


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum()) if torch._C._current_autograd_node() else x.exp()


def hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda grad: grad.unique())
    return x


# Code that runs in backward, and the line that the error names.
BAD_BACKWARD: list[tuple[Snippet, str]] = [
    (lambda t: ReadsInBackward.apply(t.weight).sum().backward(), "return grad * grad.sum().tolist()"),
    (lambda t: hooked(t.weight * 2).sum().backward(), "x.register_hook(lambda grad: grad.unique())"),
    (lambda t: checkpoint(twice, t.weight, use_reentrant=False, preserve_rng_state=False).sum().backward(), "float(x"),
    (lambda t: torch.cumprod(t.weight, 0).sum().backward(), "cumprod at"),
    (lambda t: t.weight.prod().backward(), "prod at"),
    (lambda t: t.fresh.exp().sum().backward(), "t.fresh.exp()"),
]
KINDS = ("cpu", "fake cpu", "fake cuda")


@contextmanager
def zoo(kind: str) -> Iterator[Any]:
    """Yields the tensors of a snippet: on the CPU, or fake ones on the CPU or a GPU."""
    place = kind.split()[-1]
    with FakeTensorMode() if "fake" in kind else nullcontext():
        with torch.device(place):
            t = SimpleNamespace(
                x=torch.ones(4),
                i=torch.ones((), dtype=torch.int64),
                ints=torch.ones(4, dtype=torch.int64),
                mask=torch.ones(4, dtype=torch.bool),
                square=torch.ones(4, 4),
                empty=torch.empty(0),
                # Autograd aborts the process for tensors of a device that torch was built without.
                weight=torch.ones(4, requires_grad=place == "cpu"),
                fresh=torch.ones(4, requires_grad=place == "cpu"),
                number=torch.ones((), device="cpu"),
                host=torch.ones(4, device="cpu"),
                generator=torch.Generator("cpu"),
                known=torch.Generator("cpu"),
                held=[],
            )
        if place == "cpu":
            t.weight.grad = torch.zeros_like(t.weight)
        yield t


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def reads() -> Iterator[None]:
    """Registers a custom operator whose CPU implementation reads values."""
    with torch.library._scoped_library("graph_zoo", "FRAGMENT") as library:
        library.define("reads(Tensor x) -> Tensor")
        library.impl("reads", lambda x: x * x.sum().item() + torch.from_numpy(x.numpy()), "CPU")
        torch.library.register_fake("graph_zoo::reads", torch.empty_like, lib=library)
        yield


def source(snippet: Snippet) -> str:
    return linecache.getline(__file__, snippet.__code__.co_firstlineno).strip()


def each(kinds: Sequence[str], snippets: Iterable[tuple[Snippet, str]]) -> Any:
    cases = [
        pytest.param(kind, snippet, expected, id=f"{kind}-{source(snippet)}")
        for snippet, expected in snippets
        for kind in kinds
        # Torch's indexing requires the device's library, even for a fake tensor.
        if kind != "fake cuda"
        or torch.backends.cuda.is_built()
        or not re.search(r"\[t\.|[tx]\[|_set|nonzero|copy_|from_dlpack\(t", source(snippet))
    ]
    return pytest.mark.parametrize(("kind", "snippet", "expected"), cases)


def by_reason(table: dict[str, list[Snippet]]) -> Iterator[tuple[Snippet, str]]:
    return ((snippet, reason) for reason, snippets in table.items() for snippet in snippets)


def run(kind: str, snippet: Snippet) -> None:
    with zoo(kind) as t, assert_capturable(generators=[t.known]) as t.region:
        snippet(t)


def check_refused(kind: str, snippet: Snippet, expected: str) -> None:
    with pytest.raises(CaptureError) as caught:
        run(kind, snippet)
    error, line = caught.value, snippet.__code__.co_firstlineno
    assert (error.line.file, error.line.number) == (__file__, line), str(error)
    assert error.why == REASONS[expected].why
    assert str(error) == f"{error.operation} at {__file__}:{line} ({source(snippet)}): {error.why}; {error.instead}"


@pytest.mark.slow
@each(KINDS, by_reason(BAD))
def test_what_a_graph_cannot_hold_is_refused_with_its_line(kind: str, snippet: Snippet, expected: str) -> None:
    check_refused(kind, snippet, expected)


@each(["fake cuda"], by_reason(BAD_ON_A_GPU))
def test_copies_and_numbers_of_the_host_are_refused_on_a_gpu(kind: str, snippet: Snippet, expected: str) -> None:
    check_refused(kind, snippet, expected)


@each(KINDS[:2], BAD_BACKWARD)
def test_what_backward_does_is_refused_with_the_line_that_caused_it(kind: str, snippet: Snippet, expected: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(expected)):
        run(kind, snippet)


@each(KINDS, ((snippet, "") for snippet in GOOD))
def test_what_a_graph_can_hold_passes(kind: str, snippet: Snippet, expected: str) -> None:
    run(kind, snippet)


@each(KINDS[:2], ((snippet, "") for snippet in GOOD_BACKWARD))
def test_backward_passes(kind: str, snippet: Snippet, expected: str) -> None:
    run(kind, snippet)


@pytest.mark.parametrize(
    ("snippet", "is_refused"),
    [(lambda t: t.x * 2, True), (lambda t: t.ints.add_(1), True), (lambda t: [t.square, t.x + t.square][0], False)],
)
@pytest.mark.parametrize("name", ["item", "tolist", "__bool__", "data_ptr"])
def test_what_other_threads_read_of_memory_that_the_region_makes_or_writes_is_refused(
    snippet: Snippet, is_refused: bool, name: str
) -> None:
    asked: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    line = read_when_asked.__code__.co_firstlineno + 1
    thread = threading.Thread(target=read_when_asked, args=(name, asked, answers))
    thread.start()
    with zoo("cpu") as t, collect_refusals() as region:
        asked.put(snippet(t).flatten()[0])
        answers.get()
    thread.join()
    expected = [(f"torch.Tensor.{name}", REASONS["THREAD"].why, line)] if is_refused else []
    assert [(one.operation, one.why, one.line.number) for one in region.refusals] == expected


def read_when_asked(name: str, asked: "queue.SimpleQueue[torch.Tensor]", answers: "queue.SimpleQueue[Any]") -> None:
    answers.put(getattr(asked.get(), name)())


def test_an_error_that_somebody_caught_is_raised_at_the_end() -> None:
    def careless(t: Any) -> None:
        with suppress(RuntimeError):
            t.i.item()

    with pytest.raises(CaptureError, match="t.i.item"):
        run("cpu", careless)


def test_everything_is_collected_once_a_line_and_nothing_stops() -> None:
    with zoo("cpu") as t, collect_refusals() as region:
        for _ in range(2):
            t.held += [t.i.item(), t.x.tolist()]
        t.held.append(t.x + 1)
    region.check_memory()
    assert [refusal.operation for refusal in region.refusals] == [
        "torch.Tensor.item",
        "torch.Tensor.tolist",
        "the memory of aten.add.Tensor",
    ]
    assert len(t.held) == 5


def test_nothing_is_watched_outside() -> None:
    with zoo("cpu") as t:
        with suppress(CaptureError), assert_capturable():
            t.i.item()
        assert t.i.item() == 1
        t.weight.sum().backward()
    assert sys.getprofile() is None


def name_in_frames(function: Callable[..., Any]) -> str:
    """Returns the name by which the linter recognizes a call of this function: its module and qualified name."""
    undecorated = inspect.unwrap(function)
    return f"{undecorated.__globals__['__name__']}.{undecorated.__code__.co_qualname}"


@pytest.mark.parametrize("name", [*refusals.PYTHON_CALLS, refusals.GRAPH_SAFE_STATES])
def test_each_rule_names_a_function_by_the_module_that_defines_it(name: str) -> None:
    assert name_in_frames(pkgutil.resolve_name(name)) == name


def test_functions_of_ours_have_rules() -> None:
    of_ours = [device.synchronize, device.seconds_between, device.CopyStream.host_waits_for, device.host_bytes]
    assert {name_in_frames(function) for function in of_ours} <= set(refusals.PYTHON_CALLS)
    assert name_in_frames(device.RandomStream.drawn) == refusals.GRAPH_SAFE_STATES
    alone = device.cpu_alone(len)
    assert refusals.ON_CPU_ALONE == f"{alone.__globals__['__name__']}.{alone.__code__.co_qualname}"
