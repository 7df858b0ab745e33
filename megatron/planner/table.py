"""A plan in words: a line for each pipeline stage, and what it does not know. What is planned is plan.py's."""

import argparse
from collections.abc import Sequence

from megatron.planner.links_table import buffer_lines, links_lines
from megatron.planner.plan import NOT_PLANNED, Plan, RankPlan

_COLUMNS = ("parameters", "gradients", "masters", "moments", "pages", "activations", "total", "peak")
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def plan_lines(plan: Plan, args: argparse.Namespace) -> list[str]:
    """The plan of a run with these arguments, line by line."""
    unit, size = next(
        ((unit, size) for unit, size in _UNITS if max(stage.total for stage in plan.stages) >= size), ("bytes", 1)
    )
    rows: list[tuple[str, ...]] = [("stage", "rank", "layers", *_COLUMNS)]
    for stage in plan.stages:
        values = [_value(stage, column) / size for column in _COLUMNS]
        rows.append((str(stage.stage), str(stage.rank), _range(stage.layers), *(f"{value:.2f}" for value in values)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    fullest = max(plan.stages, key=lambda stage: stage.total)
    return [
        f"plan of {_number(args.world_size, 'rank')}: {_layout(args)}; "
        f"{_number(plan.num_microbatches, 'microbatch', several='microbatches')} of "
        f"{args.micro_batch_size} x {args.seq_length} tokens a step",
        f"parameters: {plan.num_parameters:,}, of which a token meets {plan.active_parameters:,}",
        f"memory of {'the first rank' if plan.stages[0].rank == 0 else 'one rank'} of each stage, in {unit}:",
        *table,
        f"activations of stage {fullest.stage}, which holds most: {_kinds(fullest, unit=unit, size=size)}",
        f"peak: with what is taken for a while, of stage {fullest.stage} by passes up to {fullest.working / size:.2f} "
        f"{unit} beside activations, by the update, without them, up to {fullest.updating / size:.2f} {unit}; messages "
        f"of it at once up to {fullest.messages / size:.2f} {unit}",
        *buffer_lines(plan.stages, unit=unit, size=size),
        *links_lines(fullest, unit=unit, size=size),
        *_notes(plan, unit=unit, size=size),
    ]


def _number(count: int, one: str, *, several: str | None = None) -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"


def _value(stage: RankPlan, column: str) -> int:
    value = sum(stage.activations.values()) if column == "activations" else getattr(stage, column)
    assert isinstance(value, int)
    return value


def layout_sizes(args: argparse.Namespace) -> dict[str, int]:
    """The sizes of a run's layout, by the names that plans have for them; expert tensor: of a model with experts."""
    tensor = args.tensor_model_parallel_size
    experts = {} if args.num_experts is None else {"expert tensor": args.expert_tensor_parallel_size or tensor}
    return {
        "tensor": tensor,
        "pipeline": args.pipeline_model_parallel_size,
        "virtual": args.virtual_pipeline_model_parallel_size or 1,
        "context": args.context_parallel_size,
        "expert": args.expert_model_parallel_size,
        **experts,
        "data": args.data_parallel_size,
    }


def _layout(args: argparse.Namespace) -> str:
    sizes = layout_sizes(args)
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "data")


def _range(layers: Sequence[int]) -> str:
    """Numbers that follow each other as first-last."""
    starts = [n for n in layers if n - 1 not in layers]
    ends = [n for n in layers if n + 1 not in layers]
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)) or "none"


def _kinds(stage: RankPlan, *, unit: str, size: int) -> str:
    kinds = sorted(stage.activations.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {count / size:.2f} {unit}" for kind, count in kinds if count) or "none"


def _notes(plan: Plan, *, unit: str, size: int) -> list[str]:
    notes = [f"not in it: {NOT_PLANNED}"]
    if plan.is_balanced:
        notes.append("rows of experts are those of tokens that choose all experts equally often")
    return [*notes, *plan.stand_ins, *_host_lines(plan, unit=unit, size=size)]


def _host_lines(plan: Plan, *, unit: str, size: int) -> list[str]:
    """Returns a line about the stage with most in the host's memory, if any uses it."""
    most = max(plan.stages, key=lambda stage: sum(stage.host.values()))
    kinds = ", ".join(f"{kind} {count / size:.2f} {unit}" for kind, count in most.host.items() if count)
    if not kinds:
        return []
    return [
        f"in the host's memory, and not in the table: up to {sum(most.host.values()) / size:.2f} {unit} a rank, "
        f"of stage {most.stage}: {kinds}"
    ]
