"""The best layouts of a model: which fit, and which of these nothing beats in both memory and time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from megatron.planner.layout_costs import Advice, Cost, LayoutCosts
from megatron.planner.layout_space import Layout, Space
from megatron.training.command_line.errors import CommandLineError

# Scaled facts are a little off: what is this near is no progress either.
_PROGRESS = 0.98
# Of layouts that do not fit: how many are counted anew in the search for one that the run does not refuse.
_MOST_TRIED = 12


@dataclass(frozen=True)
class Found:
    """The result of a search. front: layouts that none beats in both memory and time, the fastest first. nearest: where
    nothing fits, the one that needs least. compared, fitting: numbers of layouts.
    """

    front: tuple[Advice, ...]
    nearest: Advice | None
    compared: int
    fitting: int


# Called with a line of status for each layout; decides itself what to print.
Progress = Callable[[str], None]


def search(space: Space, costs: LayoutCosts, *, limit: int, most: int, progress: Progress) -> Found:
    """Layouts that fit into `limit` bytes, up to `most` of the front. Raises CommandLineError where there are none."""
    micro_batch = space.fixed.get("micro_batch")
    if micro_batch and space.global_batch % micro_batch:
        raise CommandLineError(
            f"--global-batch-size is {space.global_batch}: must be a multiple of --micro-batch-size ({micro_batch})"
        )
    compared, known = _costs(space, costs, limit=limit, progress=progress)
    fitting = [one for one in known if one[0].num_bytes <= limit]
    if not compared:
        raise CommandLineError(
            f"no layout has {space.world_size} GPUs: tensor x pipeline x context must divide them and leave "
            f"data-parallel ranks that divide the global batch of {space.global_batch}; sizes that were given: "
            f"{', '.join(f'{name} {value}' for name, value in space.fixed.items() if value is not None) or 'none'}"
        )
    front = _front(fitting, costs, limit=limit, most=most, progress=progress)
    nearest = None
    if not front:
        if known and not fitting:
            # Parameters of more than twice a limit are not looked at any further: here this leaves out nothing that
            # needs less than what is known.
            _, known = _costs(space, costs, limit=min(cost.num_bytes for cost, _ in known), progress=progress)
        nearest = _least(sorted(known, key=lambda one: one[0].num_bytes), costs)
        if nearest is None:
            why = (costs.last_refusal or "").replace(
                "\n", "; "
            ) or "the parameters of a rank alone take more than twice the memory"
            raise CommandLineError(f"none of {compared} layouts can be had: {why}")
    return Found(tuple(front), nearest, compared, len(fitting))


def _costs(
    space: Space, costs: LayoutCosts, *, limit: int, progress: Progress
) -> tuple[int, list[tuple[Cost, Layout]]]:
    """The number of layouts, and those with costs."""
    total = sum(1 for _ in space.layouts())
    compared = 0
    known: list[tuple[Cost, Layout]] = []
    for layout in space.layouts():
        progress(f"{compared} of {total} layouts compared")
        compared += 1
        cost = costs.cost(layout, limit=limit)
        if cost is not None:
            known.append((cost, layout))
    return compared, known


def _front(
    fitting: list[tuple[Cost, Layout]], costs: LayoutCosts, *, limit: int, most: int, progress: Progress
) -> list[Advice]:
    """Returns the best layouts that the run accepts and that fit by their own facts."""
    found: list[Advice] = []
    smallest = float("inf")
    for cost, layout in sorted(fitting, key=lambda one: (one[0].seconds, one[0].num_bytes)):
        if len(found) == most:
            break
        if cost.num_bytes > smallest * _PROGRESS:
            continue
        progress(f"{len(fitting)} layouts fit, {len(found)} of the best looked at closely")
        advice = costs.advice(layout)
        if advice is not None and advice.num_bytes <= limit:
            found.append(advice)
            smallest = min(cost.num_bytes, advice.num_bytes)
    return sorted(found, key=lambda one: one.time.seconds)


def _least(candidates: Iterable[tuple[Cost, Layout]], costs: LayoutCosts) -> Advice | None:
    tried = [costs.advice(layout) for _, layout in islice(candidates, _MOST_TRIED)]
    return min((advice for advice in tried if advice is not None), key=lambda one: one.num_bytes, default=None)
