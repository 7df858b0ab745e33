"""What a microbatch computes and sends in each part of a model, found by a step of a short model without memory.

The recorders are those of a dry run; here they tell parts apart, so that stages of any length can be added up of them
(stage_load.py). What parts hold is layer_facts.py's.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from megatron.planner.rates import Kernel, Kernels, Unit
from megatron.planner.recorder import MessageRecorder
from megatron.planner.step_time import BACKWARD, FORWARD, ChunkWork
from megatron.planner.traffic import Traffic, merged
from megatron.planner.work import GROUPED, RECOMPUTE, ROWS_OF_TABLES, WorkRecorder, dtype_name

# Over ranks that share experts.
_OF_EXPERTS = ("ep", "tp_ep")


@dataclass(frozen=True)
class Table:
    """Elements of a storage that belong to one parameter, its own or its gradient's; shape: of the parameter."""

    start: int
    end: int
    is_expert: bool
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Counted:
    """A kernel, and of its bytes those of parameters and their gradients, which more tokens do not change: of experts
    and of the rest.
    """

    kernel: Kernel
    standing: float
    of_experts: float


# How often each runs.
Counts = Counter[Counted]


@dataclass(frozen=True)
class PartWork:
    """The work of one microbatch in one part of a chunk; counts may be negative where it is a difference of parts.

    recompute: forwards that backward runs again. traffic: with the phases forward and backward.
    """

    forward: Counts
    backward: Counts
    recompute: Counts
    traffic: tuple[Traffic, ...] = ()

    def chunk(self) -> ChunkWork:
        """Returns the kernels in the form that a plan uses."""
        return ChunkWork(*(_kernels(counts) for counts in (self.forward, self.backward, self.recompute)))

    def times(self, number: int) -> "PartWork":
        """Returns the work of that many such parts."""

        def counts(some: Counts) -> Counts:
            return Counter({one: n * number for one, n in some.items()})

        traffic = (replace(t, count=t.count * number, num_bytes=t.num_bytes * number) for t in self.traffic)
        return PartWork(counts(self.forward), counts(self.backward), counts(self.recompute), tuple(traffic))

    def scaled(self, *, samples: float, experts: float, expert_ranks: float) -> "PartWork":
        """Returns the work with samples, experts of a rank and ranks of experts multiplied by these factors."""

        def counts(some: Counts) -> Counts:
            found: Counts = Counter()
            for one, number in some.items():
                moving = max(0.0, one.kernel.num_bytes - one.standing - one.of_experts)
                own = one.of_experts * experts
                num_bytes = moving * samples + one.standing + own
                kernel = replace(one.kernel, flops=one.kernel.flops * samples, num_bytes=num_bytes)
                found[Counted(kernel, one.standing, own)] += number
            return found

        traffic = (
            replace(
                one,
                num_bytes=round(one.num_bytes * samples),
                group_size=round(one.group_size * (expert_ranks if one.group in _OF_EXPERTS else 1.0)),
            )
            for one in self.traffic
        )
        return PartWork(counts(self.forward), counts(self.backward), counts(self.recompute), tuple(traffic))


NO_WORK = PartWork(Counter(), Counter(), Counter())


def together(parts: Iterable[PartWork]) -> PartWork:
    """The sum of parts."""
    forward, backward, recompute = Counts(), Counts(), Counts()
    traffic: list[Traffic] = []
    for part in parts:
        forward.update(part.forward)
        backward.update(part.backward)
        recompute.update(part.recompute)
        traffic += part.traffic
    return PartWork(forward, backward, recompute, merged(traffic))


def without(whole: PartWork, parts: Iterable[PartWork]) -> PartWork:
    """Returns the difference of a whole and its parts."""
    return together([whole, together(parts).times(-1)])


def _kernels(counts: Counts) -> Kernels:
    found = Kernels()
    for one, number in counts.items():
        found[one.kernel] += number
    return found


class PartRecorder(WorkRecorder):
    """Notes kernels of the one chunk of a model by part. part_of: from the name of a module, "" outside of all, and how
    many layers have been entered. tables: of parameters and gradients, by the storage that they lie in.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        live_rows: float,
        part_of: Callable[[str, int], str],
        tables: Mapping[int, Sequence[Table]],
    ) -> None:
        super().__init__([model], live_rows=live_rows)
        self._layers, self._part_of = list(unwrap_model(model).decoder.layers), part_of
        self._tables = tables
        # Whether weights of that shape are experts'.
        self._shapes = {one.shape: one.is_expert for some in tables.values() for one in some}
        self._entered, self._kept, self._standing = 0, "", {False: 0.0, True: 0.0}
        self._counts: dict[tuple[str, str], Counts] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records inside the block, and counts the layers that are entered."""
        handles = [
            layer.register_forward_pre_hook(self._enter_layer(number))
            for number, layer in enumerate(self._layers, start=1)
        ]
        try:
            with super().recording():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def part(self) -> str:
        """Which runs at this moment, or whose backward does."""
        if self._running or self.pass_name in (None, FORWARD):
            return self._part_of(self._running.name, self._entered)
        return self._kept

    def parts(self, messages: Mapping[str, Sequence[Traffic]]) -> dict[str, PartWork]:
        """Returns the recorded work, with the messages of each part."""
        names = {part for part, _ in self._counts} | {*messages}

        def counts(part: str, name: str) -> Counts:
            return self._counts.get((part, name), Counts())

        return {
            part: PartWork(
                counts(part, FORWARD), counts(part, BACKWARD), counts(part, RECOMPUTE), merged(messages.get(part, ()))
            )
            for part in sorted(names)
        }

    def note(self, unit: Unit, tensor: Tensor, *, flops: float, num_bytes: float) -> None:
        """Counts a fused kernel by part, too. tensor: any shape, of the dtype it computes in."""
        super().note(unit, tensor, flops=flops, num_bytes=num_bytes)
        name = self.pass_name
        if name is not None:
            kernel = Kernel(self.kind, unit, dtype_name(tensor), float(flops), float(num_bytes))
            counts = self._counts.setdefault((self.part, name), Counts())
            counts[Counted(kernel, self._standing[False], self._standing[True])] += 1

    def _count(self, func: Any, name: str, *, args: Any, kwargs: Any, result: Any) -> None:
        if name not in ROWS_OF_TABLES:
            # What is changed in place is read and written.
            written = args[:1] if func._schema.is_mutable else ()
            leaves = [leaf for leaf in tree_leaves((args, kwargs, written)) if isinstance(leaf, Tensor)]
            known = [leaf for leaf in leaves if leaf.untyped_storage()._cdata in self._tables]
            for leaf in known:
                self._standing[self._is_of_experts(leaf)] += leaf.nbytes
            results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if name in GROUPED or func._overloadpacket in flop_registry:
                # Grouped ones may be given the place of their result.
                places = [*leaves, *results] if name in GROUPED else results
                self._count_gradients([] if known else places, is_grouped=name in GROUPED)
            else:
                self._count_alike([*leaves, *results], known)
        super()._count(func, name, args=args, kwargs=kwargs, result=result)
        self._standing = {False: 0.0, True: 0.0}

    def _count_gradients(self, results: Iterable[Tensor], *, is_grouped: bool) -> None:
        """Counts weight gradients among the results of a product without weights.

        A result with a weight's shape, or with one matrix for each expert, is a gradient.
        """
        for leaf in results:
            if is_grouped and leaf.dim() == 3:
                self._standing[True] += leaf.nbytes
            elif not is_grouped and tuple(leaf.shape) in self._shapes:
                self._standing[self._shapes[tuple(leaf.shape)]] += leaf.nbytes

    def _count_alike(self, leaves: Iterable[Tensor], known: Sequence[Tensor]) -> None:
        """Counts the gradient of an operator that adds it to its place in a buffer."""
        shapes = {tuple(leaf.shape): self._is_of_experts(leaf) for leaf in known}
        for leaf in leaves:
            if tuple(leaf.shape) in shapes and leaf.untyped_storage()._cdata not in self._tables:
                self._standing[shapes[tuple(leaf.shape)]] += leaf.nbytes

    def _is_of_experts(self, leaf: Tensor) -> bool:
        start = leaf.storage_offset()
        tables = self._tables[leaf.untyped_storage()._cdata]
        return any(one.is_expert for one in tables if one.start <= start < one.end)

    def _enter_layer(self, number: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._entered = number

        return enter

    def _pack(self, tensor: Tensor) -> Any:
        return self.part, super()._pack(tensor)

    def _unpack(self, kept: Any) -> Tensor:
        self._kept, packed = kept
        return super()._unpack(packed)


class PartMessages(MessageRecorder):
    """Notes messages of passes by part; part: which runs."""

    def __init__(self, groups: ProcessGroupCollection, part: Callable[[], str]) -> None:
        super().__init__(groups)
        self._part = part
        self.of_passes: dict[str, list[Traffic]] = {}

    def _note(self, name: str, args: Sequence[Any]) -> None:
        before = len(self._messages)
        super()._note(name, args)
        new = [one for one in self._messages[before:] if one.phase in (FORWARD, BACKWARD)]
        self.of_passes.setdefault(self._part(), []).extend(new)
