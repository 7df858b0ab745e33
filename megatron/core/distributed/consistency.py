"""Comparisons of settings, weights and gradients between ranks, and the local checks on which they are based.

Sections, in order: settings and parameters before a module is wrapped; a weight tied between two stages; weights of
replicas at the start of training; weights of replicas during training; gradients before they are reduced. Each
comparison raises the same error on every participating rank. A group of None means this rank alone.

Differences are reported, not repaired, except that a tied weight's copy receives its owner's values. iteration.py
compares the launches of collectives, in the agreement at the end of a step.
"""

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.dense_memory import dense_strides
from megatron.core.device import default_device
from megatron.core.dist_checkpointing import buffer_sharded_tensors, canonical_name
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.group_collectives import RemoteRankError, all_ranks_agree, gather_objects
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.param_attributes import param_facts
from megatron.core.utils import unwrap_model

logger = logging.getLogger(__name__)

# Maximum number of parameter names in an error message.
_NAMES_SHOWN = 3

# Before a module is wrapped. This comparison is the first collective, because any other collective could hang or be
# mismatched if ranks differ.

_COMPARED_SIZES = ("dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "inter_dist_opt")
_ABSENT = "no such parameter"


def settings_of_all_ranks(
    config: ModelParallelConfig,
    ddp_config: DistributedDataParallelConfig,
    *,
    disable_bucketing: bool,
    chunk: int,
) -> dict[str, object]:
    """Returns all settings that determine buffers, scales and collectives, by name.

    chunk: index of the model chunk.
    """
    of_config = ("calculate_per_token_loss", "deterministic_mode", "gradient_accumulation_fusion")
    return {
        **{f"DistributedDataParallelConfig.{name}": value for name, value in vars(ddp_config).items()},
        **{f"ModelParallelConfig.{name}": vars(config)[name] for name in of_config},
        "disable_bucketing": bool(disable_bucketing),
        "index of the chunk in launch_order": chunk,
    }


def check_wraps_agree(
    module: nn.Module,
    groups: ProcessGroupCollection,
    *,
    settings: Mapping[str, object],
    stage_group: dist.ProcessGroup | None,
    check_alone: Callable[[], None],
) -> None:
    """Raises the same ValueError on all ranks of the stage if settings, or parameters of replicas, differ. Collective.

    settings: everything that determines buffers, scales and collectives, by name. check_alone: runs this rank's local
    checks. If it raises ValueError on a rank, the other ranks raise RemoteRankError.
    """
    group = groups.dp_cp if group_size(stage_group) == 1 else stage_group
    own = _wrapping(module, groups, settings=settings)
    problem = None
    try:
        check_alone()
    except ValueError as error:
        problem = error
    per_rank = gather_objects((own.rank, *own.brief(), problem and str(problem)), group)
    by_replicas: dict[Any, set[int]] = {}
    for _, crc, parts, _ in per_rank:
        by_replicas.setdefault("settings", set()).add(crc)
        for kind, (ranks, crc_of_part) in enumerate(parts):
            by_replicas.setdefault((kind, ranks), set()).add(crc_of_part)
    if any(len(crcs) > 1 for crcs in by_replicas.values()):
        raise ValueError(_difference_of_wraps(gather_objects(own, group)))
    if problem is not None:
        raise problem
    for rank, _, _, text in per_rank:
        if text is not None:
            raise RemoteRankError(f"rank {rank}: {text}")


@dataclass(frozen=True)
class _Wrapping:
    """Description of the module that a rank is about to wrap.

    replicas: the ranks that share its dense parameters, and the ranks that share its expert parameters. params:
    descriptions of the dense and of the expert parameters, by name, with everything that determines buffers and
    reductions.
    """

    rank: int
    settings: dict[str, str]
    replicas: tuple[tuple[int, ...], tuple[int, ...]]
    params: tuple[dict[str, str], dict[str, str]]

    def brief(self) -> tuple[int, list[tuple[tuple[int, ...], int]]]:
        """Returns a checksum of the settings and, for each set of replicas, its ranks and a parameter checksum."""
        return _crc(self.settings), [(ranks, _crc(params)) for ranks, params in zip(self.replicas, self.params)]

    def describe(self, name: str) -> str:
        """Describes the parameter with this name, which may be dense, expert or absent on this rank."""
        return self.params[0].get(name) or self.params[1].get(name, _ABSENT)


def _wrapping(module: nn.Module, groups: ProcessGroupCollection, *, settings: Mapping[str, object]) -> _Wrapping:
    params: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for name, param in module.named_parameters():
        params[param_facts(param).is_expert][name] = _describe_param(param)
    sizes = {f"size of pg_collection.{name}": group_size(vars(groups)[name]) for name in _COMPARED_SIZES}
    rank = dist.get_rank() if dist.is_initialized() else 0
    return _Wrapping(
        rank,
        {name: repr(value) for name, value in {**sizes, **settings}.items()},
        (_ranks_of(groups.dp_cp, rank), _ranks_of(groups.expt_dp, rank)),
        params,
    )


def _describe_param(param: nn.Parameter) -> str:
    facts = param_facts(param)
    words = [f"{list(param.shape)} {param.dtype}"]
    if not param.is_contiguous():
        # Buffers store the elements in memory order.
        words.append(f"strides {dense_strides(param)}")
    # follow_owner copies requires_grad to a tied weight's copy later.
    if not facts.shared:
        words.append("requires grad" if param.requires_grad else "requires no grad")
    marks = {
        "allreduce=False": facts.is_expert,
        "shared_embedding": facts.shared_embedding,
        "shared": facts.shared,
        f"width_mult={facts.width_mult}": facts.width_mult != 1,
        "sequence_parallel": facts.sequence_parallel,
        "tensor_model_parallel": facts.tensor_model_parallel,
    }
    return ", ".join([*words, *(f"marked {mark}" for mark, is_set in marks.items() if is_set)])


def _difference_of_wraps(per_rank: list[_Wrapping]) -> str:
    for name in _all_names(own.settings for own in per_rank):
        values = {own.rank: own.settings.get(name, "missing") for own in per_rank}
        if len(set(values.values())) > 1:
            return f"{name} is {_by_rank(values)}: must be the same on all ranks of a pipeline stage"
    for kind in (0, 1):
        for ranks in {own.replicas[kind]: None for own in per_rank}:
            replicas = [own for own in per_rank if own.replicas[kind] == ranks]
            if len({_crc(own.params[kind]) for own in replicas}) > 1:
                found = _difference_of_params(replicas, kind)
                return f"{found}: all replicas must wrap the same parameters in the same order"
    raise AssertionError("the summaries of ranks differ, but their settings and parameters do not")


def _difference_of_params(replicas: list[_Wrapping], kind: int) -> str:
    for name in _all_names(own.params[kind] for own in replicas):
        values = {own.rank: own.describe(name) for own in replicas}
        if len(set(values.values())) > 1:
            return f"parameter {name} is {_by_rank(values)}"
    place = next(
        place for place, names in enumerate(zip(*(own.params[kind] for own in replicas))) if len(set(names)) > 1
    )
    return f"parameter number {place} is {_by_rank({own.rank: list(own.params[kind])[place] for own in replicas})}"


def _all_names(dictionaries: Iterable[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for dictionary in dictionaries for name in dictionary))


def _by_rank(values: dict[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return " and ".join(
        f"{value} on rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}" for value, of in ranks.items()
    )


def _crc(lines: dict[str, str]) -> int:
    return zlib.crc32(repr(lines).encode())


def _ranks_of(group: dist.ProcessGroup | None, rank: int) -> tuple[int, ...]:
    # A group of one rank may be given as None, ALONE or a group of the process grid.
    return (rank,) if group_size(group) == 1 else tuple(dist.get_process_group_ranks(group))


# A tied weight, which both the first and the last stage store. The model marks it, and finalize_model_grads.py sums its
# gradients.


def follow_owner(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Copies values and requires_grad of a tied weight from the first stage, its owner, to the last.

    Freezing the word embeddings therefore also freezes the copy. Collective over `group`, the first and last stage;
    does nothing for a module without a tied weight. Raises ValueError on both stages if shapes or dtypes differ.
    """
    for name, param in module.named_parameters():
        if not param_facts(param).shared_embedding:
            continue
        if group_size(group) == 1:
            continue
        owner, copy = gather_objects((param.requires_grad, tuple(param.shape), param.dtype), group)
        if owner[1:] != copy[1:]:
            raise ValueError(
                f"tied weight {name} is {owner[2]} of shape {list(owner[1])} on the first stage and {copy[2]} of "
                f"shape {list(copy[1])} on the last: must be identical"
            )
        param.requires_grad_(owner[0])
        # A script may seed the stages differently, or load weights into one of them only.
        dist.broadcast(param.data, group=group, group_src=0)


# Replicas at the start of a run, compared by parameter name.


def check_weights_agree(
    model: nn.Module, group: dist.ProcessGroup | None, *, expert_group: dist.ProcessGroup | None = None
) -> None:
    """Raises an error on all ranks, naming parameter and ranks, unless replicas are bit-identical. Collective.

    Compares values and requires_grad. The error is ValueError on ranks of a group with a difference, and
    RemoteRankError on all other ranks. group, expert_group: the ranks that store the same dense parameters, and the
    same expert parameters. Call it only at the start of a run, because it computes a checksum of each parameter on the
    host and gathers all checksums.
    """
    dense: dict[str, tuple[int, bool]] = {}
    experts: dict[str, tuple[int, bool]] = {}
    for name, param in model.named_parameters():
        # Parameters on the meta device have no values yet.
        fingerprint = 0 if param.is_meta else bits_sync(param), param.requires_grad
        (experts if param_facts(param).is_expert else dense)[canonical_name(name)] = fingerprint
    differences = [_difference_of_weights(dense, group), _difference_of_weights(experts, expert_group)]
    with all_ranks_agree():
        for difference in differences:
            if difference is not None:
                raise ValueError(difference)


def _difference_of_weights(fingerprints: dict[str, tuple[int, bool]], group: dist.ProcessGroup | None) -> str | None:
    per_rank = gather_objects(fingerprints, group)
    if all(other == per_rank[0] for other in per_rank):
        return None
    name = next(n for n in [*per_rank[0], *fingerprints] if any(r.get(n) != per_rank[0].get(n) for r in per_rank))
    ranks = [rank for rank, other in enumerate(per_rank) if other.get(name) != per_rank[0].get(name)]
    return (
        f"parameter {name} differs between data-parallel rank 0 and ranks {ranks}: "
        "all replicas must start from the same seed or checkpoint and train the same parameters"
    )


def bits_sync(param: torch.Tensor) -> int:
    """Returns a checksum of a tensor's bytes; NaNs with the same bit pattern are equal.

    param: any shape and dtype. NOTE: waits for the device, so it is used only at the start of a run.
    """
    # Viewed as bytes, because numpy has no bfloat16.
    return zlib.crc32(param.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


# Replicas during training: a hash of each tensor on its device, and one small exchange per group.

_ROW = 1024
_ODD, _EVEN = 0x9E3779B97F4A7C15 - (1 << 64), 0x2545F4914F6CDD1E  # arbitrary odd and even factors
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightMismatchError(RuntimeError):
    """Error on every rank: parameters or buffers that must be equal across ranks differ."""


def check_weight_hashes_sync(chunks: Sequence[nn.Module], groups: ProcessGroupCollection, *, iteration: int) -> None:
    """Raises WeightMismatchError on every rank, naming tensors and ranks, unless all replicas are bit-identical.

    Compares data-parallel replicas (of experts, expert-data-parallel replicas), parameters that tensor-parallel ranks
    replicate, tied weights of the first and last stage, and the buffers stored in checkpoints, such as router biases.
    chunks: all model chunks of this stage, with all parameters gathered. Collective over all ranks. NOTE: reads the
    device once, and again only to report a difference.
    """
    compared = [one for one in _replicas(chunks, groups) if one.tensors and group_size(one.group) > 1]
    hashes = [torch.stack([weight_hash(tensor) for tensor in one.tensors]) for one in compared]
    is_different = torch.zeros((), dtype=torch.int64, device=default_device())
    for one, own in zip(compared, hashes):
        # The MAX of complements is the complement of the lowest hash. All hashes are equal if the highest and the
        # lowest are.
        extremes = torch.cat([own, ~own])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=one.group)
        highest, negated_lowest = extremes.chunk(2)
        is_different |= (highest != ~negated_lowest).any()
    if dist.is_initialized():
        dist.all_reduce(is_different, op=dist.ReduceOp.MAX)
    if bool(is_different):
        _raise_unequal_sync(compared, hashes, iteration=iteration)


def weight_hash(param: Tensor) -> Tensor:
    """Returns a hash of a tensor's bytes: [], int64, on the tensor's device.

    Tensors that differ in exactly one element always have different hashes. NaNs with the same bit pattern are equal;
    0.0 and -0.0 differ. param: any shape and dtype.
    """
    words = param.detach().contiguous().view(-1).view(_INTEGER_OF_SIZE[param.element_size()])
    whole = words.numel() // _ROW * _ROW
    # Uses only sums of rows and of columns, so that no temporary has the parameter's size. An element is weighted by
    # the sum of its column's odd factor and its row's even factor, which is odd. A difference times an odd number is
    # never 0 modulo 2**64.
    table, rest = words[:whole].view(-1, _ROW), words[whole:]
    columns = torch.arange(1, _ROW + 1, device=words.device) * 2 + 1
    rows = torch.arange(1, table.shape[0] + 2, device=words.device) * _EVEN
    total = (table.sum(dim=0, dtype=torch.int64) * (columns * _ODD)).sum()
    total += (table.sum(dim=1, dtype=torch.int64) * rows[:-1]).sum()
    return total + (rest.to(torch.int64) * (columns[: rest.numel()] * _ODD + rows[-1])).sum()


@dataclass(frozen=True)
class _Replicas:
    """Tensors that every rank of `group` stores, with their names, in the same order."""

    group: dist.ProcessGroup | None
    names: list[str]
    tensors: list[Tensor]

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, named: Sequence[tuple[str, Tensor]]) -> "_Replicas":
        """Builds the replicas of `group`; named: (name, tensor) pairs, with tensors of any shape and dtype."""
        return cls(group, [name for name, _ in named], [tensor for _, tensor in named])


def _replicas(chunks: Sequence[nn.Module], groups: ProcessGroupCollection) -> list[_Replicas]:
    named = [
        (canonical_name(name), param, param_facts(param))
        for chunk in unwrap_model(list(chunks))
        for name, param in chunk.named_parameters()
    ]
    # Module buffers of which a checkpoint stores one copy for all ranks.
    buffers = [(held.key, held.data) for chunk in unwrap_model(list(chunks)) for held in buffer_sharded_tensors(chunk)]
    kinds = []
    for is_expert, data_group, tensor_group, also in (
        (False, groups.dp_cp, groups.tp, buffers),
        (True, groups.expt_dp, groups.expt_tp, []),
    ):
        own = [(name, param, facts) for name, param, facts in named if facts.is_expert is is_expert]
        whole = [(name, param) for name, param, facts in own if not facts.tensor_model_parallel]
        kinds.append(_Replicas.of(data_group, [*((name, param) for name, param, _ in own), *also]))
        kinds.append(_Replicas.of(tensor_group, [*whole, *also]))
    kinds.append(_Replicas.of(groups.embd, [(name, param) for name, param, facts in named if facts.shared_embedding]))
    return kinds


def _raise_unequal_sync(compared: list[_Replicas], hashes: list[Tensor], *, iteration: int) -> None:
    """Raises WeightMismatchError on every rank, with the differences that any rank has found.

    NOTE: reads every hash; called only after a mismatch.
    """
    lines: list[str] = []
    for one, own in zip(compared, hashes):
        assert one.group is not None
        ranks = dist.get_process_group_ranks(one.group)
        gathered = gather_objects((one.names, own.tolist()), one.group)
        # The first rank's names are used, because a tied output layer and the embedding have different names.
        lines += _unequal_hashes(gathered[0][0], dict(zip(ranks, (hashes_of_rank for _, hashes_of_rank in gathered))))
    found = dict.fromkeys(line for lines_of_rank in gather_objects(lines, dist.group.WORLD) for line in lines_of_rank)
    shown = list(found)[:_NAMES_SHOWN]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    raise WeightMismatchError(
        f"replicas differ after iteration {iteration}: {'; '.join(shown)}{more}. A device or its memory may be faulty; "
        "resume from an earlier checkpoint"
    )


def _unequal_hashes(names: list[str], by_rank: dict[int, list[int]]) -> list[str]:
    """Returns a line for each name with unequal hashes, listing the ranks in the minority.

    by_rank: the hashes of each rank, in the order of names.
    """
    lines = []
    for index, name in enumerate(names):
        ranks_with: dict[int, list[int]] = {}
        for rank, hashes in by_rank.items():
            ranks_with.setdefault(hashes[index], []).append(rank)
        if len(ranks_with) > 1:
            # In a tie, the lowest ranks are assumed to be correct.
            usual, *others = sorted(ranks_with.values(), key=len, reverse=True)
            odd = sorted(rank for ranks in others for rank in ranks)
            lines.append(f"{name} on rank {', '.join(map(str, odd))} differs from rank {', '.join(map(str, usual))}")
    return lines


# Gradients are checked before they are reduced, because a sum over ranks does not show which rank's gradient was bad.
# They are measured on the device without waiting for it. GradChecks itself does not raise, because ranks must first
# agree, so that all of them raise.

# A norm is large if it exceeds the parameter's largest so far by this factor, after this number of steps.
_LARGE_FACTOR, _LARGE_AFTER_STEPS = 10.0, 5
# For _same_finiteness: number of elements per sum, and the smallest gradient size at which sums save time.
_ELEMENTS_IN_SUM, _MIN_ELEMENTS = 256, 4096


class NonFiniteGradientError(RuntimeError):
    """Error on every rank of a group: a rank's gradient was NaN or infinite before it was reduced."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one iteration's gradients, on the device.

    by_bucket: for each bucket, the parameter names and a tensor, [1 or 2, names], fp64. Its first row is finite if and
    only if the whole gradient is finite; its second row, if norms are checked, contains the norms. finite_so_far: for
    each name, one flag per gradient, [], bool: whether the parameter's accumulated gradient was still finite.
    """

    by_bucket: list[tuple[list[str], torch.Tensor]] = field(default_factory=list)
    finite_so_far: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class GradChecks:
    """Finds non-finite gradients (`nan`), and warns about norms far larger than in earlier steps (`large`).

    each: also checks every parameter's accumulated gradient after each microbatch, to report the first microbatch that
    made it non-finite. Otherwise only `probe`, a small parameter near the model's input, is checked after each
    microbatch. This costs next to nothing and usually suffices, because a non-finite gradient of a later layer
    propagates to the probe.
    """

    def __init__(self, *, nan: bool, large: bool, each: bool = False, probe: nn.Parameter | None = None) -> None:
        self._nan, self._large, self._each, self._probe = nan, large, each, probe
        self._measured = Measured()
        # The largest norm of each parameter so far, and the number of steps.
        self._largest: dict[str, tuple[float, int]] = {}

    @classmethod
    def of(cls, config: DistributedDataParallelConfig, module: nn.Module | None = None) -> "GradChecks | None":
        """Returns the checks that `config` enables, or None if it enables none.

        module: a model whose gradients accumulate over microbatches. The probe is one of its parameters.
        """
        if not (config.check_for_nan_in_grad or config.check_for_large_grads):
            return None
        params = () if module is None else module.parameters()
        # The first vector, such as the weight of a norm or a bias.
        probe = next((param for param in params if param.requires_grad and param.ndim == 1), None)
        return cls(
            nan=config.check_for_nan_in_grad, large=config.check_for_large_grads, each=config.ddp_debug, probe=probe
        )

    def looks_at(self, param: nn.Parameter) -> bool:
        """Returns whether a parameter's accumulated gradient is measured after each microbatch."""
        return self._nan and (self._each or param is self._probe)

    def measure(self, named_grads: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Records whether gradients are finite and, if enabled, their norms, without waiting for the device.

        named_grads: (name, gradient) pairs; gradients of any shape, floating point, all on one device.
        """
        # Empty gradients have no largest element.
        named_grads = [(name, grad) for name, grad in named_grads if grad.numel()]
        if not named_grads:
            return
        names, grads = zip(*named_grads)
        # One operator measures all gradients. On a GPU it launches a few kernels for a bucket, which read its memory
        # once and still distinguish the parameters. The measurement cannot be deferred until an error is known, because
        # the reduction overwrites this rank's gradients. The largest magnitude is NaN if any element is NaN. A plain
        # sum may overflow although every element is finite. Matrix multiplications in bf16 or tf32 would round the
        # largest fp32 numbers to infinity.
        in_sums = torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]
        largest = torch._foreach_norm([_same_finiteness(grad, in_sums=in_sums) for grad in grads], float("inf"))
        numbers = [torch.stack(largest)]
        if self._large:
            numbers.append(torch.stack(torch._foreach_norm(grads, 2, dtype=_wide(grads))))
        self._measured.by_bucket.append((list(names), torch.stack([n.double() for n in numbers])))

    def measure_sum(self, name: str, total: torch.Tensor) -> None:
        """Records whether a parameter's accumulated gradient is still finite; total: any shape, floating point."""
        self._measured.finite_so_far.setdefault(name, []).append(total.isfinite().all())

    def take_measured(self) -> Measured:
        """Returns and clears the measurements; used for backward passes captured in a CUDA graph."""
        measured = self._measured
        self.forget()
        return measured

    def restore_measured(self, measured: Measured) -> None:
        """Restores measurements returned by `take_measured`, after a graph replay has written their tensors."""
        self._measured = measured

    def forget(self) -> None:
        """Drops all measurements."""
        self._measured = Measured()

    def non_finite_sync(self) -> list[str]:
        """Returns the names of measured gradients that are not finite, and drops the measurements."""
        if not self._measured.by_bucket:
            return []
        # NOTE: reads the device, once a step.
        extremes, *norms = torch.cat([numbers for _, numbers in self._measured.by_bucket], dim=1).tolist()
        names = [name for names, _ in self._measured.by_bucket for name in names]
        bad = [name for name, element in zip(names, extremes) if not element < float("inf")]
        # New lists, because a captured graph may refer to the old ones. finite_so_far is still needed for late
        # gradients, which are measured separately.
        self._measured = Measured(finite_so_far=self._measured.finite_so_far if bad or self._each else {})
        if norms and not bad:
            for name, norm in zip(names, norms[0]):
                self._compare(name, norm)
        # An error message lists only a few names, so names with a known first microbatch come first.
        bad = sorted(dict.fromkeys(bad), key=lambda name: name not in self._measured.finite_so_far)
        return [self._since_when_sync(name) for name in bad] if self._nan else []

    def _since_when_sync(self, name: str) -> str:
        # NOTE: reads the device; called only for an error message.
        so_far = [bool(finite) for finite in self._measured.finite_so_far.get(name, [])]
        if all(so_far):
            return name
        return f"{name} (since microbatch {so_far.index(False)}, counted from 0, of {len(so_far)})"

    def _compare(self, name: str, norm: float) -> None:
        largest, steps = self._largest.get(name, (0.0, 0))
        if steps >= _LARGE_AFTER_STEPS and norm > _LARGE_FACTOR * largest > 0:
            logger.warning(
                "gradient norm of %s is %.3g: more than ten times its previous maximum, %.3g", name, norm, largest
            )
        self._largest[name] = (max(largest, norm), steps + 1)


def _same_finiteness(grad: torch.Tensor, *, in_sums: bool) -> torch.Tensor:
    """Returns the gradient, or a smaller tensor, [n], that is finite if and only if the gradient is finite.

    in_sums: allows sums of 256 elements each, scaled so that they cannot overflow, for large fp32 gradients on a CPU.
    Computing them takes half the time of finding the extremes of all elements, which was 2% of a step.
    """
    is_on_cpu, is_large = grad.device.type == "cpu", grad.numel() >= _MIN_ELEMENTS
    if not (in_sums and is_on_cpu and is_large and grad.dtype == torch.float32 and grad.is_contiguous()):
        return grad
    flat, whole = grad.view(-1), grad.numel() // _ELEMENTS_IN_SUM * _ELEMENTS_IN_SUM
    sums = torch.mv(flat[:whole].view(-1, _ELEMENTS_IN_SUM), flat.new_full((_ELEMENTS_IN_SUM,), 0.5 / _ELEMENTS_IN_SUM))
    return sums if whole == len(flat) else torch.cat([sums, flat[whole:]])


def _wide(grads: Sequence[torch.Tensor]) -> torch.dtype:
    # A sum of squares overflows in fp16.
    return reduce(torch.promote_types, {grad.dtype for grad in grads}, torch.float32)


def raise_non_finite(
    names: list[str], groups: Sequence[dist.ProcessGroup | None], *, in_backward: bool = False
) -> NoReturn:
    """Raises NonFiniteGradientError with the findings of all ranks. Collective over the groups.

    names: this rank's parameters with a non-finite gradient. groups: findings are gathered over each group in turn, so
    that findings of the first group reach the ranks of the next. in_backward: whether an optimizer in backward may
    already have used the gradients.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {rank: names} if names else {}
    for group in groups:
        found = {rank: names for part in gather_objects(found, group) for rank, names in part.items()}
    lines = [f"rank {rank}: {', '.join(n[:_NAMES_SHOWN])}{_and_more(n)}" for rank, n in sorted(found.items())]
    left = "The model was not updated"
    if in_backward:
        left = (
            "Parameters updated in backward may be wrong: load a checkpoint, unless optimizer_in_backward_clip is exact"
        )
    raise NonFiniteGradientError(f"gradient is not finite on {'; '.join(lines)}. {left}")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - _NAMES_SHOWN} more parameters" if len(names) > _NAMES_SHOWN else ""
