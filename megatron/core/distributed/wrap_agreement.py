"""What the ranks of a stage agree on before a module is wrapped: settings, and the parameters that replicas share.

It comes before anything else is sent: where ranks differ, what follows pairs up wrongly, or waits for ever.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron.core.agreement import RemoteRankError
from megatron.core.dense_memory import dense_strides
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.group_collectives import gather_objects
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.param_attributes import param_facts

_ABSENT = "no such parameter"


@dataclass(frozen=True)
class _Wrapping:
    """The module that a rank is about to wrap, in words.

    replicas: the ranks that share its dense, and its expert parameters; params: names of both, with what shapes buffers
    and sums.
    """

    rank: int
    settings: dict[str, str]
    replicas: tuple[tuple[int, ...], tuple[int, ...]]
    params: tuple[dict[str, str], dict[str, str]]

    def brief(self) -> tuple[int, list[tuple[tuple[int, ...], int]]]:
        """Equal for ranks without a difference, and small."""
        return _crc(self.settings), [(ranks, _crc(params)) for ranks, params in zip(self.replicas, self.params)]

    def describe(self, name: str) -> str:
        """A parameter in words, whichever kind this rank takes it for."""
        return self.params[0].get(name) or self.params[1].get(name, _ABSENT)


def settings_of_all_ranks(
    config: ModelParallelConfig,
    ddp_config: DistributedDataParallelConfig,
    *,
    disable_bucketing: bool,
    chunk: int,
) -> dict[str, object]:
    """Returns, by name, all settings that buffers, scales and collectives depend on. chunk: number of the chunk."""
    of_config = ("calculate_per_token_loss", "deterministic_mode", "gradient_accumulation_fusion")
    return {
        **{f"DistributedDataParallelConfig.{name}": value for name, value in vars(ddp_config).items()},
        **{f"ModelParallelConfig.{name}": vars(config)[name] for name in of_config},
        "disable_bucketing": bool(disable_bucketing),
        "number of the chunk in launch_order": chunk,
    }


def check_wraps_agree(
    module: nn.Module,
    groups: ProcessGroupCollection,
    *,
    settings: Mapping[str, object],
    stage_group: dist.ProcessGroup | None,
    check_alone: Callable[[], None],
) -> None:
    """Raises the same ValueError on all ranks of the stage where settings, or replicas' parameters, differ. Collective.

    settings: all that shapes buffers, scales and collectives, by name. check_alone: what each rank can check by itself;
    where it raises ValueError, the others raise RemoteRankError.
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
        raise ValueError(_first_difference(gather_objects(own, group)))
    if problem is not None:
        raise problem
    for rank, _, _, text in per_rank:
        if text is not None:
            raise RemoteRankError(f"rank {rank}: {text}")


def _wrapping(module: nn.Module, groups: ProcessGroupCollection, *, settings: Mapping[str, object]) -> _Wrapping:
    params: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for name, param in module.named_parameters():
        params[param_facts(param).is_expert][name] = _describe(param)
    sizes = {f"size of pg_collection.{name}": group_size(vars(groups)[name]) for name in _SIZES}
    rank = dist.get_rank() if dist.is_initialized() else 0
    return _Wrapping(
        rank,
        {name: repr(value) for name, value in {**sizes, **settings}.items()},
        (_ranks(groups.dp_cp, rank), _ranks(groups.expt_dp, rank)),
        params,
    )


_SIZES = ("dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "inter_dist_opt")


def _describe(param: nn.Parameter) -> str:
    facts = param_facts(param)
    words = [f"{list(param.shape)} {param.dtype}"]
    if not param.is_contiguous():
        # Buffers have it in this order.
        words.append(f"strides {dense_strides(param)}")
    # Whether the copy of a tied weight trains, its owner will say.
    if not facts.shared:
        words.append("requires grad" if param.requires_grad else "needs no grad")
    marks = {
        "allreduce=False": facts.is_expert,
        "shared_embedding": facts.shared_embedding,
        "shared": facts.shared,
        "sequence_parallel": facts.sequence_parallel,
        "tensor_model_parallel": facts.tensor_model_parallel,
    }
    return ", ".join([*words, *(f"marked {mark}" for mark, is_set in marks.items() if is_set)])


def _first_difference(per_rank: list[_Wrapping]) -> str:
    for name in _names(own.settings for own in per_rank):
        values = {own.rank: own.settings.get(name, "not there") for own in per_rank}
        if len(set(values.values())) > 1:
            return f"{name} is {_by_rank(values)}: must be the same on all ranks of a pipeline stage"
    for kind in (0, 1):
        for ranks in {own.replicas[kind]: None for own in per_rank}:
            replicas = [own for own in per_rank if own.replicas[kind] == ranks]
            if len({_crc(own.params[kind]) for own in replicas}) > 1:
                return f"{_difference(replicas, kind)}: all replicas must wrap the same parameters in the same order"
    raise AssertionError("ranks differ in what this function does not compare")


def _difference(replicas: list[_Wrapping], kind: int) -> str:
    for name in _names(own.params[kind] for own in replicas):
        values = {own.rank: own.describe(name) for own in replicas}
        if len(set(values.values())) > 1:
            return f"parameter {name} is {_by_rank(values)}"
    place = next(
        place for place, names in enumerate(zip(*(own.params[kind] for own in replicas))) if len(set(names)) > 1
    )
    return f"parameter number {place} is {_by_rank({own.rank: list(own.params[kind])[place] for own in replicas})}"


def _names(dictionaries: Iterable[dict[str, str]]) -> list[str]:
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


def _ranks(group: dist.ProcessGroup | None, rank: int) -> tuple[int, ...]:
    # A group of this rank alone is None, or ALONE, or one of a grid.
    return (rank,) if group_size(group) == 1 else tuple(dist.get_process_group_ranks(group))
