"""The ranks of a group in few words: ranks of a layout lie in regular steps, however many there are; pure."""

from collections.abc import Iterator, Sequence


def rank_range(ranks: Sequence[int]) -> str:
    """Such as 0:8:1 for 0 to 7, start:stop:step as Python's range has them; at least one rank, rising.

    A sum, as 2:4:1 + 0:17:16, has one of each: 2, 3, 18, 19. What is no such sum is several, with commas between.
    """
    terms: list[range] = []
    rest = list(ranks)
    while len(rest) > 1:
        length = _regular(rest)
        blocks = [rest[at : at + length] for at in range(0, len(rest), length)]
        offsets = [[rank - block[0] for rank in block] for block in blocks]
        if any(one != offsets[0] for one in offsets):
            return ", ".join(" + ".join(map(_term, (one, *terms))) for one in _steady(rest))
        terms.append(_range(offsets[0]))
        rest = [block[0] for block in blocks]
    # The first rank is where the smallest steps start.
    first = terms.pop(0) if terms else range(1)
    moved = range(first.start + rest[0], first.stop + rest[0], first.step)
    return " + ".join(_term(one) for one in (moved, *terms))


def _steady(ranks: Sequence[int]) -> Iterator[range]:
    """The same ranks in parts of equal steps, each as long as can be."""
    while ranks:
        length = _regular(ranks)
        yield _range(ranks[:length])
        ranks = ranks[length:]


def _regular(ranks: Sequence[int]) -> int:
    """How many of the first are in equal steps."""
    steps = [after - before for before, after in zip(ranks, ranks[1:])]
    return next((at + 1 for at, step in enumerate(steps) if step != steps[0]), len(ranks))


def _range(ranks: Sequence[int]) -> range:
    return range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0] if len(ranks) > 1 else 1)


def _term(one: range) -> str:
    return f"{one.start}:{one.stop}:{one.step}"
