"""Builds a run's datasets in the order of the run, which checkpoints store, and logs where it changes.

core/datasets/data_order.py defines the order, and setup.py builds the iterators.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.data_iterators import validation_sets
from megatron.core.datasets.data_order import DataOrder, SplitOrder, SplitSize, SplitSizes
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.core.group_collectives import gather_objects
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.config import planned_samples
from megatron.training.run import TrainingRun

_MOST_CHARACTERS = 300  # of a value in a message


def split_sizes(run: TrainingRun) -> SplitSizes:
    """Returns the numbers of train, validation and test samples that the run reads, with the order to continue.

    They are at least the planned numbers. More are required if earlier steps had larger batches, or if samples are
    skipped. A validation set that is read as a whole has None.
    """
    training, state, batches = run.training, run.state, run.batches.running
    train, valid, test = planned_samples(training, batches)
    skipped = sum(position >= state.consumed_train_samples for position in run.recovery.skipped_positions)
    steps = max(run.train_iters - state.iteration, 0) + skipped
    last_train = batches.samples_after(steps, consumed=state.consumed_train_samples)
    evaluation = (training.eval_iters + run.non_loss_data.reads_batch) * run.evaluation_batch_size
    evaluations = 1
    if training.eval_interval is not None:
        due, done = (n // training.eval_interval for n in (run.train_iters, state.evaluated_iteration))
        evaluations += max(due - done, 0)
    last_valid: int | None = max(valid, state.consumed_valid_samples + evaluations * evaluation)
    is_cyclic, evaluates = run.config.data.dataloader_type == "cyclic", training.eval_iters > 0
    if run.config.data.full_validation:
        last_valid = None
    orders = state.data_order or {}
    read = {
        Split.train: (0 if training.skip_train else max(train, last_train), train, state.consumed_train_samples),
        Split.valid: (last_valid if evaluates else 0, valid, state.consumed_valid_samples),
        Split.test: (max(test, evaluation) if evaluates else 0, test, 0),
    }
    return SplitSizes(
        [
            SplitSize(
                size=size, planned=planned, consumed=consumed, stored=orders.get(split.name, ()), cyclic=is_cyclic
            )
            for split, (size, planned, consumed) in read.items()
        ]
    )


def build_datasets(run: TrainingRun) -> None:
    """Builds the datasets by the script's provider, and stores their order in the run's state. Collective.

    Prints how the order differs from the checkpoint's. Raises ValueError on every rank if ranks read different data.
    """
    assert run.datasets_provider is not None, "set by setup_data"
    sizes = split_sizes(run)
    run.datasets, run.split_sizes = run.datasets_provider(sizes), sizes
    if run.config.data.dataloader_type == "external":
        return
    found = _agreed({split.name: _orders(run, split, sizes) for split in Split})
    before = run.state.data_order or {}
    # Sets that this run does not read keep the order for a later run.
    # Without notes, which would be printed again if a rewind rebuilds the datasets.
    kept = {name: tuple(replace(one, notes=()) for one in sets) for name, sets in found.items() if sets}
    run.state.data_order = {**before, **kept}
    if run.state.iteration and not any(one.sources or one.length for sets in before.values() for one in sets):
        how = "follows from its arguments" if before else "is the one of a new run"
        print_rank_0(f"  note: the checkpoint does not store the order of its data, which {how}")
    for line in _lines(run, sizes, found):
        print_rank_0(line)


def _orders(run: TrainingRun, split: Split, sizes: SplitSizes) -> tuple[SplitOrder, ...]:
    size = sizes.splits[split.value]
    if size.size is None:
        return ()
    datasets = validation_sets(run.datasets[split.value])
    return tuple(_order(one, size, number, seed=run.training.seed) for number, one in enumerate(datasets))


def _order(dataset: Any, split: SplitSize, number: int, *, seed: int) -> SplitOrder:
    order = dataset.order if isinstance(dataset, (BlendedDataset, MegatronDataset)) else None
    stored = split.stored[number] if number < len(split.stored) else None
    if order is None:
        return _order_of_script(len(dataset), split, stored, seed=seed)
    planned = {(one.seed, one.planned, one.start) for one in split.stored}
    if not planned or order.notes or (order.seed, order.planned, order.start) in planned:
        return order
    note = "the dataset provider of the script does not pass on the list of sizes that it receives"
    return replace(order, notes=(note,))


def _order_of_script(length: int, split: SplitSize, stored: SplitOrder | None, *, seed: int) -> SplitOrder:
    """Returns the order of a script's dataset of `length` samples, whose sample i must not depend on its size."""
    order = SplitOrder(seed, planned=0, length=length, cyclic=split.cyclic)
    if stored is None or stored.length is None or stored.sources is not None:
        return order
    notes = []
    if stored.cyclic != split.cyclic:
        here, there = (("cyclic" if cyclic else "single") for cyclic in (split.cyclic, stored.cyclic))
        notes.append(f"--dataloader-type is {here} here, {there} in the checkpoint")
    elif split.consumed and length >= stored.length and (split.cyclic or split.consumed > stored.length):
        # Its samples are read repeatedly, so the number of samples in a repetition must not change.
        return stored
    if length != stored.length:
        notes.append(f"the dataset has {length} samples here, {stored.length} in the checkpoint")
    return replace(order, seed=stored.seed, notes=tuple(notes))


def _agreed(own: DataOrder) -> DataOrder:
    """Returns the orders of all ranks, some of which may not build all datasets. Collective."""
    if dist.get_world_size() == 1:
        return own
    found = gather_objects(own, dist.group.WORLD)
    agreed: dict[str, tuple[SplitOrder, ...]] = {}
    for rank, orders in enumerate(found):
        for name, sets in orders.items():
            first = agreed.get(name) or sets
            # Ranks of a script may read other objects than datasets of files.
            if all(one.sources is not None for one in (*sets, *first)) and (difference := _difference(sets, first)):
                raise ValueError(f"rank {rank} reads other {name} data than the ranks before it: {difference}")
            agreed[name] = first
    return agreed


def _difference(sets: Sequence[SplitOrder], others: Sequence[SplitOrder]) -> str | None:
    """Describes the first difference between the stored values of two orders, or returns None."""
    if len(sets) != len(others):
        return f"it reads {len(sets)} sets, must be {len(others)}" if sets else None
    for one, other in zip(sets, others):
        here, there = one.to_json(), other.to_json()
        for name in here:
            if here[name] != there[name]:
                return f"its {name} is {_short(here[name], there[name])}, must be {_short(there[name], here[name])}"
    return None


def _short(value: Any, other: Any) -> str:
    """Returns a value as text. Of a list, only the items that `other` does not contain."""
    if isinstance(value, list) and isinstance(other, list):
        value = [one for one in value if one not in other]
    return f"{value}"[:_MOST_CHARACTERS]


def _lines(run: TrainingRun, sizes: SplitSizes, found: DataOrder) -> list[str]:
    """Describes how the orders of a resumed run differ from those of the checkpoint's run, and from a new run's."""
    lines = []
    kept, seeds = [], set()
    for split, size in zip(Split, sizes.splits):
        for order in found.get(split.name, ()) if size.stored else ():
            seeds.add(order.seed)
            if order.notes:
                lines.append(_changed(split, order, starts_again=order.start == size.consumed > 0))
            elif order.sources is not None and order.start + order.planned != size.size:
                kept.append(f"{split.name} {order.start + order.planned} samples (now {size.size})")
    if kept:
        planned = ", ".join(dict.fromkeys(kept))
        lines.append(f"  the data order of the checkpoint's run continues, which was planned for {planned}")
    if seeds - {run.training.seed}:
        seed = ", ".join(map(str, sorted(seeds)))
        lines.append(
            f"  note: the data order continues with the checkpoint's seed {seed}, not --seed {run.training.seed}"
        )
    return list(dict.fromkeys(lines))


def _changed(split: Split, order: SplitOrder, *, starts_again: bool) -> str:
    if order.sources is None or not starts_again:
        return f"  WARNING: the order of the {split.name} data differs from the checkpoint's: {'; '.join(order.notes)}"
    carried = [one.name for one in order.sources if one.first]
    how = f"; {', '.join(carried)} continue after the samples that were read" if carried else ""
    return (
        f"  WARNING: the {split.name} data differ from the checkpoint's: {'; '.join(order.notes)}. "
        f"A new data order starts at sample {order.start}{how}"
    )
