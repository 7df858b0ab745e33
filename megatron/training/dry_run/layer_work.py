"""What a microbatch costs in each kind of layer: arithmetic, bytes and messages, by formula; pure.

For comparing many layouts: a dry run counts kernels and messages one by one. Rates and schedules are the same, those of
rates.py and step_time.py.
"""

import argparse
import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.training.dry_run.activations import EXPERTS, REST
from megatron.training.dry_run.layer_facts import LayerKind, PartFacts
from megatron.training.dry_run.layout_space import Recompute
from megatron.training.dry_run.rates import Kernel, Kernels, Unit
from megatron.training.dry_run.step_time import BACKWARD, FORWARD, ChunkWork
from megatron.training.dry_run.traffic import Traffic
from megatron.training.flops import num_floating_point_operations

# Forward, and a backward of two products for each of its own.
_PASSES = 3
_CORE = "attention"
_REST_OF_LAYER = "feed-forward"
# Launches of one layer's forward beside its products: norms, rotations, activation functions, permutations, sums.
_SMALL_KERNELS = 24
# A saved tensor is written by one kernel and read by the next.
_TOUCHES = 2


@dataclass(frozen=True)
class Flops:
    """Of one sample in one layer, forward: of attention's two products with all positions, of routed experts, of dense
    feed-forward layers and shared experts, and of all else.
    """

    core: float
    experts: float
    feed_forward: float
    rest: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.core + self.experts + self.feed_forward + self.rest


def layer_flops(args: argparse.Namespace, kinds: Sequence[LayerKind]) -> tuple[dict[LayerKind, Flops], Flops]:
    """Of each kind, and of what follows the layers, multi-token prediction too, as the log of a run counts them."""
    found = {kind: _flops_of(args, kind) for kind in dict.fromkeys(kinds)}
    last = kinds[-1]
    with_end = _count(args, [last], mtp_num_layers=args.mtp_num_layers)
    return found, Flops(0.0, 0.0, 0.0, with_end - found[last].total)


def _flops_of(args: argparse.Namespace, kind: LayerKind) -> Flops:
    def one(**changed: int) -> float:
        return _count(args, [kind, kind], **changed) - _count(args, [kind], **changed)

    total = one()
    # What grows with the square of the sequence.
    core = one(seq_length=2 * args.seq_length) - 2 * total
    core = core / 2
    ffn = {"ffn_hidden_size": 0, "moe_ffn_hidden_size": 0, "moe_shared_expert_intermediate_size": 0}
    experts = total - one(moe_router_topk=0) if kind.has_experts else 0.0
    rest = one(**({**ffn, "moe_router_topk": 0} if kind.has_experts else {"ffn_hidden_size": 0}))
    return Flops(core, experts, total - experts - rest, rest - core)


def _count(args: argparse.Namespace, kinds: Sequence[LayerKind], **changed: int | None) -> float:
    args = copy.copy(args)
    args.num_layers, args.mtp_num_layers = len(kinds), None
    if args.num_experts is not None:
        args.moe_layer_freq = [int(kind.has_experts) for kind in kinds]
    vars(args).update(changed)
    return num_floating_point_operations(args, 1) / _PASSES


@dataclass(frozen=True)
class PartWork:
    """Of one microbatch in one part of a chunk. traffic: with the phases forward and backward."""

    chunk: ChunkWork
    traffic: tuple[Traffic, ...] = ()


@dataclass(frozen=True)
class Split:
    """Over what a layer's work is spread. samples: of a microbatch. token_bytes: of the hidden states of one token."""

    tensor: int
    context: int
    expert: int
    expert_tensor: int
    samples: int
    seq_length: int
    token_bytes: int
    topk: int
    key_value_bytes: int
    dtype: str = "bf16"

    @property
    def tokens(self) -> int:
        """Of a microbatch that tensor-parallel ranks share."""
        return self.samples * self.seq_length // self.context


def layer_work(facts: PartFacts, flops: Flops, *, split: Split, recompute: Recompute, has_experts: bool) -> PartWork:
    """Of a layer. facts: with what a microbatch of one sample saves."""
    forward = _kernels(facts, flops, split=split)
    again: Kernels = Counter()
    if recompute is Recompute.LAYERS:
        again = forward
    elif recompute is not Recompute.NOTHING:
        wanted = {EXPERTS, _REST_OF_LAYER, REST} if recompute is Recompute.FEED_FORWARD else {REST}
        again = Counter({kernel: count for kernel, count in forward.items() if kernel.kind in wanted})
    backward: Kernels = Counter({kernel: 2 * count for kernel, count in forward.items()})
    messages = _messages(split, has_experts=has_experts, has_dense=flops.feed_forward > 0)
    repeated = recompute is Recompute.LAYERS
    of_experts = [one for one in messages if one.group in ("ep", "etp")]
    if recompute is Recompute.FEED_FORWARD:
        messages = [*messages, *(replace(one, phase=BACKWARD) for one in of_experts if one.phase == FORWARD)]
    elif repeated:
        messages = [*messages, *(replace(one, phase=BACKWARD) for one in messages if one.phase == FORWARD)]
    return PartWork(ChunkWork(forward, backward, again), tuple(messages))


def end_work(facts: PartFacts, flops: Flops, *, split: Split) -> PartWork:
    """Of the output layer, and layers of multi-token prediction before it."""
    forward = _kernels(facts, flops, split=split)
    return PartWork(ChunkWork(forward, Counter({kernel: 2 * count for kernel, count in forward.items()})))


def _kernels(facts: PartFacts, flops: Flops, *, split: Split) -> Kernels:
    share = split.samples / (split.tensor * split.context)
    weights = {is_expert: params for is_expert, (params, _) in facts.weights.items()}
    saved = sum(size for kind, size in (facts.saved or {}).items() if kind != _CORE)
    small = saved * split.samples * _TOUCHES / _SMALL_KERNELS
    kernels: Kernels = Counter()
    for kind, unit, count, num_bytes in (
        (_CORE, Unit.ATTENTION, flops.core, 0),
        (EXPERTS, Unit.MATMUL, flops.experts, weights.get(True, 0)),
        (_REST_OF_LAYER, Unit.MATMUL, flops.feed_forward, 0),
        (_CORE, Unit.MATMUL, flops.rest, weights.get(False, 0)),
    ):
        if count:
            kernels[Kernel(kind, unit, split.dtype, count * share, num_bytes)] += 1
    kernels[Kernel(REST, Unit.MEMORY, split.dtype, 0.0, small)] += _SMALL_KERNELS
    return kernels


def _messages(split: Split, *, has_experts: bool, has_dense: bool) -> list[Traffic]:
    """Of a layer's forward and backward, with sequence parallelism where tensors are cut."""
    found: list[Traffic] = []
    hidden = split.tokens * split.token_bytes
    # Attention, and a dense or shared feed-forward layer, begin with a gather and end with a scatter of the sequence.
    pairs = 1 + has_dense
    for phase, gathers in ((FORWARD, pairs), (BACKWARD, 2 * pairs)):
        found += _both("tp", split.tensor, phase=phase, num_bytes=hidden, gathers=gathers, scatters=pairs)
    if split.context > 1:
        # Keys and values go round; their gradients as well.
        size = split.tokens * split.key_value_bytes // split.tensor * split.context
        found += _both("cp", split.context, phase=FORWARD, num_bytes=size, gathers=1, scatters=0)
        found += _both("cp", split.context, phase=BACKWARD, num_bytes=size, gathers=1, scatters=1)
    if has_experts:
        rows = split.tokens // split.tensor * split.topk * split.token_bytes
        for phase in (FORWARD, BACKWARD):
            if split.expert > 1:
                found.append(Traffic("ep", split.expert, "all-to-all", phase, 2, 2 * rows))
            found += _both(
                "etp", split.expert_tensor, phase=phase, num_bytes=rows * split.expert_tensor, gathers=1, scatters=1
            )
    return found


def _both(group: str, size: int, *, phase: str, num_bytes: int, gathers: int, scatters: int) -> list[Traffic]:
    counts = {"all-gather": gathers, "reduce-scatter": scatters}
    return [
        Traffic(group, size, operation, phase, count, count * num_bytes)
        for operation, count in counts.items()
        if size > 1 and count
    ]
