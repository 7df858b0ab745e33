"""What a rank sends and how its parameters lie, in words: tables of a plan's links and lines on its buffers."""

from collections.abc import Sequence

from megatron.planner.buffers import BufferLayout
from megatron.planner.plan import RankPlan
from megatron.planner.traffic import link_bytes

_HEAD = ("group", "ranks", "operation", "phase", "count", "payload", "on links")


def links_lines(stage: RankPlan, *, unit: str, size: int) -> list[str]:
    """What a rank sends in a step, largest first; on links: bytes that leave it where collectives run as rings."""
    if not stage.links:
        return []
    rows: list[tuple[str, ...]] = [_HEAD]
    for one in sorted(stage.links, key=lambda one: -one.num_bytes):
        sizes = (f"{one.num_bytes / size:.2f}", f"{link_bytes(one) / size:.2f}")
        rows.append((one.group, str(one.group_size), one.operation, one.phase, str(one.count), *sizes))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    return [f"sent in a step by rank {stage.rank}, of stage {stage.stage}, in {unit}:", *lines]


def buffer_lines(stages: Sequence[RankPlan], *, unit: str, size: int) -> list[str]:
    """Buckets and padding of each buffer of the stage with the most padding."""
    most = max(stages, key=lambda stage: sum(one.padding_bytes for one in stage.buffers))
    return [_buffer_line(one, most.stage, unit=unit, size=size) for one in most.buffers]


def _buffer_line(one: BufferLayout, stage: int, *, unit: str, size: int) -> str:
    buckets = f"{len(one.bucket_bytes)} {'bucket' if len(one.bucket_bytes) == 1 else 'buckets'}"
    return (
        f"buffer of stage {stage}, chunk {one.chunk}: {one.kind}, {one.param_dtype} with {one.grad_dtype} gradients, "
        f"{buckets}, {one.num_bytes / size:.2f} {unit}, of which {100 * one.padding_share:.3f} % are padding"
    )
