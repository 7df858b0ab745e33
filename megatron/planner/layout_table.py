"""What a search for layouts found, in words and as JSON values; the search is layout_search.py's."""

import shlex
from collections.abc import Sequence
from typing import Any

from megatron.planner.layout_costs import Advice
from megatron.planner.layout_search import Found
from megatron.planner.step_time import StepTime

# Columns of what is printed.
WIDTH = 100
_GIB = 1 << 30
_COLUMNS = "tp pp vpp cp ep etp mbs states recompute experts GiB step/s MFU bubble exposed".split()


def table_lines(advice: Sequence[Advice]) -> list[str]:
    """One line each, under a line with names."""
    rows = [["", *_COLUMNS], *([f"{number}.", *_cells(one)] for number, one in enumerate(advice, start=1))]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]


def flag_lines(advice: Advice) -> str:
    """The command, ready for a shell, in lines of at most WIDTH where a flag and its values are no longer."""
    lines = ["pretrain_gpt.py"]
    flags: list[list[str]] = []
    for word in advice.words:
        if word.startswith("--") or not flags:
            flags.append([])
        flags[-1].append(word)
    for flag in map(shlex.join, flags):
        # Room for the number before it, and for what goes on behind it.
        if len(lines[-1]) + 1 + len(flag) + 6 > WIDTH:
            lines.append(f"    {flag}")
        else:
            lines[-1] += f" {flag}"
    return " \\\n".join(lines)


def bytes_in_words(num_bytes: int) -> str:
    """With all digits, and in GiB."""
    return f"{num_bytes:,} bytes ({num_bytes / _GIB:.2f} GiB)"


def found_as_json(found: Found, *, verified: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The front, fastest first, with the differences that dry runs of its first layouts had."""
    return {
        "compared": found.compared,
        "fitting": found.fitting,
        "layouts": [_advice_as_json(one) for one in found.front],
        "nearest": None if found.nearest is None else _advice_as_json(found.nearest),
        "dry_runs": list(verified),
    }


def _advice_as_json(advice: Advice) -> dict[str, Any]:
    layout, time = advice.layout, advice.time
    return {
        "words": list(advice.words),
        "layers": list(layout.counts),
        "bytes": advice.num_bytes,
        "fullest_stage": advice.fullest,
        "stages": [
            {
                **vars(stage.standing),
                "pages": stage.pages,
                "host_pages": stage.host_pages,
                "activations": dict(stage.activations),
            }
            for stage in advice.stages
        ],
        "seconds": time.seconds,
        "mfu": time.mfu,
        "tokens_per_second": time.tokens_per_second,
        "bubble_seconds": _bubble(time),
        "exposed_seconds": _exposed(time),
    }


def _cells(advice: Advice) -> list[str]:
    layout, time = advice.layout, advice.time
    choices = (layout.sharding, layout.recompute, layout.experts)
    sizes = (
        layout.tensor,
        layout.stages,
        layout.chunks,
        layout.context,
        layout.expert,
        layout.expert_tensor,
        layout.micro_batch,
    )
    return [
        *map(str, sizes),
        *("-" if one is None else one.value for one in choices),
        f"{advice.num_bytes / _GIB:.2f}",
        f"{time.seconds:.3g}",
        "-" if time.mfu is None else f"{100 * time.mfu:.1f}%",
        f"{100 * _bubble(time) / time.seconds:.1f}%",
        f"{100 * _exposed(time) / time.seconds:.1f}%",
    ]


def _bubble(time: StepTime) -> float:
    """Seconds that the stages wait for each other, on average."""
    # Differences of sums may end a rounding below nothing.
    return max(0.0, sum(stage.bubble for stage in time.stages) / len(time.stages))


def _exposed(time: StepTime) -> float:
    """Seconds that the stages wait for messages that nothing hides, on average."""
    return sum(sum(stage.exposed.values()) for stage in time.stages) / len(time.stages)
