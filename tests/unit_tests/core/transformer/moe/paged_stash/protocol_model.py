"""A model of how plan, stash, restore and release share a pool on two streams, and a search over all interleavings.

A stream runs stages in order, a stage runs its lanes concurrently, and a lane runs its steps in order. Operations that
hardware may reorder within a kernel are separate lanes. A step reads or writes one word, or copies one page. A step
that must wait returns False. Words are entries of one dictionary. Some belong to one kernel, "owner" to the checks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

Word = tuple
Memory = dict[Word, Any]
Step = Callable[[Memory], bool | None]
Stage = list[list[Step]]
Stream = list[Stage]
TIERS = (0, 1)

# Violations of the protocol. Each of them must cause an error.
MUTANTS = (
    "tails are published beside ring entries",
    "release runs beside the restore",
    "restore does not wait for its stash",
    "ring entries are read before tails",
    "room in the table is lent before the release passed",
    "plan writes tails",
    "heads are written while lanes still read them",
    "plans run on two streams",
    "the main stream waits for the copy back, not for the release",
)


def check(holds: bool, message: str) -> None:
    assert holds, message


def copy_word(source: Word, target: Word) -> Step:
    return lambda memory: memory.update({target: memory.get(source)})


def write(target: Word, value: object) -> Step:
    return lambda memory: memory.update({target: value})


def record(event: Word) -> Stage:
    return [[write(event, True)]]


def joined(streams: Iterable[Stream]) -> Stream:
    return [stage for stream in streams for stage in stream]


def wait(event: Word) -> Stage:
    return [[lambda memory: event in memory]]


@dataclass(frozen=True)
class Case:
    """A small pool and its groups. tiers: pages per tier. needs: pages of each group's tensors. order: restore order.

    room: number of groups that fit in the page table; group g uses the same entries as group g - room.
    early: whether the main stream runs each backward as early as possible, or as late as the page table allows. A stash
    waits for the main stream, which waits for the restores of the backwards that it ran before.
    """

    tiers: tuple[int, int]
    needs: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    room: int
    early: bool = False
    mutant: str = ""

    @property
    def possible(self) -> bool:
        """Whether a host can launch this: a group is restored before a later group reuses its page-table entries."""
        rank = self.order.index
        return all(
            max(self.order[: rank(group - self.room) + 1]) < group for group in range(self.room, len(self.needs))
        )

    def memory(self) -> Memory:
        """Returns the memory before the step, with all pages free."""
        memory: Memory = {("head", tier): 0 for tier in TIERS}
        for tier, pages in enumerate(self.tiers):
            memory["tail", tier] = pages
            memory |= {("ring", tier, slot): page for slot, page in enumerate(self.ids(tier))}
        return memory

    def ids(self, tier: int) -> range:
        return range(self.tiers[0]) if tier == 0 else range(self.tiers[0], sum(self.tiers))

    def streams(self) -> list[Stream]:
        """Returns the concurrent streams: without a mutant, the stash stream and the restore stream."""
        groups = range(len(self.needs))
        stash = [[*self._behind_main(g), *self.plan(g), self.stash(g), record(("stashed", g))] for g in groups]
        restore = [[wait(("stashed", group)), self.restore(group)] for group in self.order]
        give: list[Stream] = [[*self.release(group), record(("arrived", group))] for group in self.order]
        if self.mutant == "restore does not wait for its stash":
            restore = [stages[1:] for stages in restore]
        if self.mutant == "the main stream waits for the copy back, not for the release":
            give = [[stages[-1], *stages[:-1]] for stages in give]
        if self.mutant == "release runs beside the restore":
            give = [[wait(("stashed", group)), *stages] for group, stages in zip(self.order, give)]
            return [joined(stash), joined(restore), joined(give)]
        backward = joined(first + second for first, second in zip(restore, give))
        if self.mutant == "plans run on two streams":
            return [joined(stash[::2]), joined(stash[1::2]), backward]
        return [joined(stash), backward]

    def plan(self, group: int) -> Stream:
        """Reads tails and plans, copies ring entries to the table in one lane per entry, and writes heads."""
        tails: Stage = [[copy_word(("tail", tier), ("seen", group, tier))] for tier in TIERS]
        entries: Stage = [
            [
                *(copy_word(("head", tier), ("from", group, entry, tier)) for tier in TIERS),
                partial(self._take, group, entry),
            ]
            for entry in self._entries(group)
        ]
        heads: Stage = [[partial(self._write_head, group, tier)] for tier in TIERS]
        entries.append([partial(self._write_held, group)])
        last = [entries + heads] if self.mutant == "heads are written while lanes still read them" else [entries, heads]
        stages: Stream = [tails, [[partial(self._decide, group)]], *last]
        if self.mutant == "plan writes tails":
            stages.append([[copy_word(("seen", group, tier), ("tail", tier))] for tier in TIERS])
        if self.mutant == "ring entries are read before tails":
            slots = [(tier, slot) for tier in TIERS for slot in range(self.tiers[tier])]
            stages.insert(0, [[copy_word(("ring", *slot), ("early", *slot)) for slot in slots]])
        return stages

    def stash(self, group: int) -> Stage:
        return [[partial(self._copy_out, group, entry)] for entry in self._entries(group)]

    def restore(self, group: int) -> Stage:
        """Copies each page in a lane of its own: reads the held count and the page id, and copies the bytes."""
        place = group % self.room
        return [
            [
                copy_word(("held", place), ("restoring", entry)),
                copy_word(("table", place, entry), ("source", entry)),
                partial(self._copy_in, group, entry),
            ]
            for entry in self._entries(group)
        ]

    def release(self, group: int) -> Stream:
        """Reads the held count, tails and table entries, writes ring entries, then tails, and clears the held count."""
        place = group % self.room
        first = [copy_word(("tail", tier), ("end", tier)) for tier in TIERS]
        ids: Stage = [[copy_word(("table", place, entry), ("leaving", entry))] for entry in self._entries(group)]
        ring: Stage = [[partial(self._give_back, group, entry)] for entry in self._entries(group)]
        publish: Stage = [[partial(self._publish, tier)] for tier in TIERS]
        publish.append([write(("held", place), 0)])
        last = [ring + publish] if self.mutant == "tails are published beside ring entries" else [ring, publish]
        return [[[copy_word(("held", place), ("count",)), *first]], ids, *last]

    def _entries(self, group: int) -> range:
        return range(sum(self.needs[group]))

    def _before(self, group: int) -> tuple[int, ...]:
        """Returns the groups whose backward the main stream runs before this group's forward."""
        if self.early:
            return tuple(takewhile(lambda other: other < group, self.order))
        last = max((self.order.index(other) for other in range(group + 1 - self.room)), default=-1)
        return self.order[: last + 1]

    def _behind_main(self, group: int) -> Stream:
        if self.mutant == "room in the table is lent before the release passed":
            return []
        return [wait(("arrived", other)) for other in self._before(group)[-1:]]

    def _decide(self, group: int, memory: Memory) -> None:
        heads = [memory["head", tier] for tier in TIERS]
        free = [memory["seen", group, tier] - heads[tier] for tier in TIERS]
        open_groups = [other for other in range(group) if other not in self._before(group)]
        for tier in TIERS:
            truly_free = sum(("owner", page) not in memory for page in self.ids(tier))
            check(free[tier] <= truly_free, f"group {group} counts {free[tier]} free pages where {truly_free} are")
            # The reserve relies on this bound.
            plans = [memory.get(("plan", other), (0, 0, *self.tiers)) for other in open_groups]
            least = self.tiers[tier] - sum(plan[2 + tier] for plan in plans)
            check(free[tier] >= least, f"group {group} does not see that backward freed: {free[tier]} of {least} pages")
        taken = [0, 0]
        for need in self.needs[group]:
            device = min(need, free[0] - taken[0])
            if need <= sum(free) - sum(taken):
                taken = [taken[0] + device, taken[1] + need - device]
        memory["plan", group] = (*heads, *taken)

    def _take(self, group: int, entry: int, memory: Memory) -> None:
        heads = [memory.pop(("from", group, entry, tier)) for tier in TIERS]
        device, host = memory["plan", group][2:]
        if entry >= device + host:
            return
        tier, rank = (0, entry) if entry < device else (1, entry - device)
        name = "early" if self.mutant == "ring entries are read before tails" else "ring"
        page = memory[name, tier, (heads[tier] + rank) % self.tiers[tier]]
        check(("owner", page) not in memory, f"page {page} is held twice, also by group {group}")
        memory["owner", page] = group
        memory["table", group % self.room, entry] = page

    def _write_head(self, group: int, tier: int, memory: Memory) -> None:
        plan = memory["plan", group]
        memory["head", tier] = plan[tier] + plan[2 + tier]

    def _write_held(self, group: int, memory: Memory) -> None:
        memory["held", group % self.room] = sum(memory["plan", group][2:])

    def _copy_out(self, group: int, entry: int, memory: Memory) -> None:
        if entry < memory["held", group % self.room]:
            page = memory["table", group % self.room, entry]
            check(memory.get(("owner", page)) == group, f"page {page} is overwritten by group {group}, not its owner")
            memory["bytes", page] = (group, entry)

    def _copy_in(self, group: int, entry: int, memory: Memory) -> None:
        page, held = memory.pop(("source", entry)), memory.pop(("restoring", entry))
        planned = sum(memory.get(("plan", group), (0, 0, 0, 0))[2:])
        check(("plan", group) in memory and held == planned, f"group {group} restores {held} pages of {planned}")
        found = memory.get(("bytes", page))
        check(entry >= planned or found == (group, entry), f"group {group} gets {found} from page {page}")

    def _give_back(self, group: int, entry: int, memory: Memory) -> None:
        if entry >= memory["count",]:
            return
        page = memory["leaving", entry]
        check(memory.pop(("owner", page), None) == group, f"page {page} is given back by group {group}, not its owner")
        tier = int(page not in self.ids(0))
        rank = sum(memory["leaving", earlier] in self.ids(tier) for earlier in range(entry))
        memory["ring", tier, (memory["end", tier] + rank) % self.tiers[tier]] = page

    def _publish(self, tier: int, memory: Memory) -> None:
        given = sum(memory["leaving", entry] in self.ids(tier) for entry in range(memory["count",]))
        memory["tail", tier] = memory["end", tier] + given

    def check_end(self, memory: Memory) -> None:
        """Checks that every page is free exactly once."""
        for tier, pages in enumerate(self.tiers):
            head, tail = memory["head", tier], memory["tail", tier]
            check(tail - head == pages, f"tier {tier} ends with {tail - head} free pages of {pages}")
            ring = sorted(memory["ring", tier, slot] for slot in range(pages))
            check(ring == list(self.ids(tier)), f"tier {tier} ends with pages {ring}")
        check(not any(memory["held", place] for place in range(self.room)), "a group still holds pages")


def explore(case: Case) -> int:
    """Runs every interleaving and returns the number of distinct states. Raises AssertionError for a violation."""
    streams = case.streams()
    start = (tuple((0, (0,) * len(stages[0])) for stages in streams), case.memory())
    seen = {(start[0], frozenset(start[1].items()))}
    todo = [start]
    while todo:
        positions, memory = todo.pop()
        moved = False
        for number, (stage, lanes) in enumerate(positions):
            for lane, done in enumerate(lanes):
                if done == len(streams[number][stage][lane]) if stage < len(streams[number]) else True:
                    continue
                later = dict(memory)
                if streams[number][stage][lane][done](later) is False:
                    continue
                moved = True
                place = _advance(streams[number], stage, (*lanes[:lane], done + 1, *lanes[lane + 1 :]))
                state = ((*positions[:number], place, *positions[number + 1 :]), later)
                key = (state[0], frozenset(later.items()))
                if key not in seen:
                    seen.add(key)
                    todo.append(state)
        if not moved:
            check(all(stage == len(stream) for (stage, _), stream in zip(positions, streams)), "all streams wait")
            case.check_end(memory)
    return len(seen)


def _advance(stream: Stream, stage: int, lanes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Returns the position after a step. A stage ends once all of its lanes have ended; empty stages are skipped."""
    while stage < len(stream) and all(done == len(steps) for done, steps in zip(lanes, stream[stage])):
        stage += 1
        lanes = (0,) * len(stream[stage]) if stage < len(stream) else ()
    return stage, lanes
