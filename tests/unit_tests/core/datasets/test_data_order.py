"""A resumed run continues the order of the checkpoint's run, compared with an order written in plain Python."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.data_iterators import BatchPlan, DataIterator, build_data_iterators
from megatron.core.datasets.data_order import (
    SplitOrder,
    SplitSize,
    SplitSizes,
    continued_blend_indices,
    data_order_from_json,
    data_order_to_json,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.datasets.gpt_indices import build_gpt_indices, check_gpt_indices
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.megatron_dataset import MegatronDataset
from tests.unit_tests.core.datasets.corpora import VOCABULARY, dataset_config
from tests.unit_tests.core.datasets.plain_order import (
    CORPORA,
    SEED,
    PlainRun,
    S,
    plain_blend,
    plain_greedy,
    plain_source,
    write,
)

# The code under test, as a run uses it.


@dataclass
class Run:
    """The processes of a run, each of which continues the order that the previous one stored."""

    folder: Path
    stored: object = None
    consumed: int = 0
    read: list[list[int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def process(
        self,
        blend: dict[str, float] | None,
        length: int,
        stop: int,
        *,
        micro: int = 1,
        ranks: int = 1,
        seed: int = SEED,
        cyclic: bool = False,
        unweighted: bool = False,
        seq_length: int = S,
        split: str = "1,0,0",
    ) -> "Run":
        """Reads up to sample `stop` of a run planned for `length` samples, on several ranks."""
        stored = data_order_from_json(json.loads(json.dumps(self.stored))) or {}
        prefixes = None if blend is None else [str(self.folder / name) for name in blend]
        weights = None if blend is None or unweighted or len(blend) == 1 else list(blend.values())
        data = {"blend": None if prefixes is None else (prefixes, weights), "split": split}
        config = dataset_config(None, **data, random_seed=seed, sequence_length=seq_length)
        sizes = SplitSizes(
            [
                SplitSize(
                    size=length, planned=length, consumed=self.consumed, stored=stored.get("train", ()), cyclic=cyclic
                ),
                SplitSize(size=0, planned=0),
                SplitSize(size=0, planned=0),
            ]
        )
        cls = MockGPTDataset if blend is None else GPTDataset
        train = BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config).build()[0]
        assert isinstance(train, (GPTDataset, BlendedDataset)) and train.order is not None
        self.notes = list(train.order.notes)
        self.stored = data_order_to_json({"train": (train.order,)})
        order = data_order_from_json(json.loads(json.dumps(self.stored)))
        assert order is not None
        iterators = []
        for rank in range(ranks):
            plan = BatchPlan(
                micro_batch_size=micro,
                dp_rank=rank,
                dp_size=ranks,
                consumed_train_samples=self.consumed,
                seed=seed,
                data_order=order,
                dataloader_type="cyclic" if cyclic else "single",
            )
            iterators.append(build_data_iterators((train, None, None), plan)[0])
        while self.consumed < stop:
            for iterator in iterators:
                assert isinstance(iterator, DataIterator)
                tokens = next(iterator)["tokens"]
                self.read += tokens[:, :1].tolist() if blend else tokens[:, :3].tolist()
                self.consumed += len(tokens)
        return self

    @property
    def firsts(self) -> list[int]:
        return [row[0] for row in self.read]


LEGS = st.lists(
    st.tuples(
        st.integers(1, 90),  # samples for which the process is planned, beyond its position
        st.integers(1, 30),  # rounds that it reads
        st.sampled_from([1, 2, 3]),  # micro-batch size
        st.sampled_from([1, 2, 4]),  # data-parallel ranks
        st.integers(0, 9),  # --seed
    ),
    min_size=1,
    max_size=4,
)
BLENDS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.01, 0.2, 0.5, 1.0, 3.0]), min_size=1, max_size=4)


@settings(max_examples=60)
@given(legs=LEGS, blend=BLENDS)
def test_a_run_in_any_parts_reads_the_order_that_its_first_part_fixed(tmp_path_factory, legs, blend) -> None:
    folder = tmp_path_factory.mktemp("order")
    write(folder, list(blend))
    run = Run(folder)
    for beyond, rounds, micro, ranks, seed in legs:
        stop = run.consumed + rounds * micro * ranks
        # A process may also be planned for less than was read before.
        length = stop if run.consumed and beyond % 2 else max(stop, beyond)
        run.process(blend, length, stop, micro=micro, ranks=ranks, seed=seed)
        assert run.notes == []
    beyond, rounds, micro, ranks, seed = legs[0]
    plain = PlainRun(blend, planned=max(rounds * micro * ranks, beyond), seed=seed)
    assert run.firsts == plain.read(0, run.consumed)
    # Independent of the order: within an epoch that is shuffled separately, no sample is read twice.
    for name in blend:
        index = list(CORPORA).index(name)
        own = [token for token in run.firsts if token // 200 == index]
        per_epoch = (sum(CORPORA[name]) - 1) // S
        if len(own) > per_epoch and plain_blend([*blend.values()], plain.planned, plain.planned).count(
            list(blend).index(name)
        ) in range(1, per_epoch + 1):
            assert len(set(own[:per_epoch])) == per_epoch


@pytest.mark.parametrize("planned, size", [(7, 90), (40, 41), (30, 300), (1, 16)])
def test_appended_epochs_have_every_token_once(planned: int, size: int) -> None:
    lengths, documents = np.array(CORPORA["c"], dtype=np.int32), np.arange(6, dtype=np.int32)
    arguments = {"seq_length": S, "seed": 3, "planned_samples": planned}
    long = build_gpt_indices(lengths, documents, num_samples=size, **arguments)
    base = build_gpt_indices(lengths, documents, num_samples=planned, seq_length=S, seed=3)
    for name in ("document", "sample", "shuffle"):
        assert np.array_equal(vars(long)[name][: len(vars(base)[name])], vars(base)[name])
    epochs, rest = divmod(len(long.document), 6)
    assert rest == 0 and len(long.shuffle) >= size
    for epoch in range(len(base.document) // 6, epochs):
        assert sorted(long.document[6 * epoch : 6 * epoch + 6]) == list(range(6))
        begin, end = ((e * int(lengths.sum()) - 1) // S for e in (epoch, epoch + 1))
        assert sorted(long.shuffle[begin:end]) == list(range(begin, end))
    check_gpt_indices(long, lengths, documents=documents, seq_length=S, num_samples=size, planned_samples=planned)


# Ten inputs whose sample sequences are computed by the plain reference above.

_AB = {"a": 0.3, "b": 0.7}
CASES: dict[str, tuple[PlainRun, list[tuple[int, int, dict]]]] = {
    # (reference, [(length, stop, options of the process), ...])
    "longer within the first epoch": (PlainRun({"b": 1}, 4), [(4, 4, {}), (11, 11, {})]),
    "longer by several epochs": (PlainRun({"a": 1}, 5), [(5, 3, {}), (50, 40, {})]),
    "shorter, then longer": (PlainRun({"a": 1}, 30), [(30, 6, {}), (12, 12, {}), (60, 60, {})]),
    "epochs that are mixed": (PlainRun({"c": 1}, 22), [(22, 2, {}), (70, 70, {})]),
    "a separate last epoch": (PlainRun({"c": 1}, 13), [(13, 12, {}), (44, 44, {})]),
    "other seeds": (PlainRun(_AB, 20), [(20, 10, {}), (80, 30, {"seed": 9}), (80, 80, {"seed": 77})]),
    "a set without planned samples": (PlainRun({"a": 1, "d": 0.01}, 12), [(12, 6, {}), (220, 220, {})]),
    "weights from numbers of tokens": (
        PlainRun({"a": 75, "b": 90, "c": 91}, 25),
        [(25, 20, {"unweighted": True}), (90, 90, {"unweighted": True})],
    ),
    "more ranks and larger batches": (
        PlainRun(_AB, 16),
        [(16, 12, {"ranks": 3, "micro": 2}), (76, 76, {"ranks": 4, "micro": 4})],
    ),
    "one sample at a time": (PlainRun({"d": 1}, 1), [(n, n, {}) for n in range(1, 34)]),
}


@pytest.mark.parametrize("case", CASES)
def test_consumed_samples_stay_the_prefix(tmp_path: Path, case: str) -> None:
    reference, processes = CASES[case]
    write(tmp_path)
    run = Run(tmp_path)
    for length, stop, options in processes:
        run.process(reference.blend, length, stop, **options)
        assert run.notes == []
    assert run.firsts == reference.read(0, processes[-1][1])


def test_synthetic_data_continue_too(tmp_path: Path) -> None:
    whole = Run(tmp_path).process(None, 60, 60)
    parts = Run(tmp_path).process(None, 60, 25).process(None, 400_000 // S, 40, seed=8).process(None, 41, 60)
    assert parts.read == whole.read


def test_scaled_and_permuted_blends_are_the_same_data(tmp_path: Path) -> None:
    write(tmp_path)
    run = Run(tmp_path).process({"a": 0.3, "b": 0.7}, 20, 11).process({"b": 7, "a": 3}, 70, 70)
    assert run.notes == [] and run.firsts == PlainRun(_AB, 20).read(0, 70)


def test_moved_and_recoded_files_are_the_same_data(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    write(tmp_path)
    run = Run(tmp_path).process({"a": 1}, 20, 11)
    with IndexedDatasetBuilder(str(tmp_path / "moved" / "a.bin"), dtype=np.int32) as builder:
        builder.add_concatenated(np.arange(75, dtype=np.int32), CORPORA["a"])
        builder.finalize(str(tmp_path / "moved" / "a.idx"))
    run.folder = tmp_path / "moved"
    run.process({"a": 1}, 70, 70)
    assert run.notes == [] and run.firsts == PlainRun({"a": 1}, 20).read(0, 70)


def test_new_weights_continue_each_set_after_its_read_samples(tmp_path: Path) -> None:
    write(tmp_path)
    run = Run(tmp_path).process(_AB, 20, 10)
    counts = {name: plain_blend([0.3, 0.7], 20, 10).count(n) for n, name in enumerate("ab")}
    plans = {name: plain_blend([0.3, 0.7], 20, 20).count(n) for n, name in enumerate("ab")}
    run.process({"a": 0.5, "b": 0.2, "c": 0.3}, 50, 40)
    assert run.notes == [
        "the share of a is 0.5 here, 0.3 in the checkpoint",
        "the share of b is 0.2 here, 0.7 in the checkpoint",
        "the documents of c are new",
    ]
    later = PlainRun({"a": 0.5, "b": 0.2, "c": 0.3}, 40, start=10, offsets=counts, planned_of=plans)
    assert run.firsts == PlainRun(_AB, 20).read(0, 10) + later.read(10, 40)
    # Back to one of them: it continues after all its samples, also in a third process.
    read = sum(token < 200 for token in run.firsts)
    run.process({"a": 1}, 60, 50)
    run.process({"a": 1}, 90, 60)
    alone = PlainRun({"a": 1}, 20, start=40, offsets={"a": read}, planned_of=plans)
    assert run.firsts[40:] == alone.read(40, 60)
    # And a set that was away continues as well.
    away = sum(400 <= token < 600 for token in run.firsts)
    run.process({"c": 1}, 70, 64)
    count = plain_blend([0.5, 0.2, 0.3], 40, 40).count(2)
    assert run.firsts[60:] == plain_source("c", count, away + 4)[away:]


@pytest.mark.parametrize(
    "change, note",
    [
        ({"seq_length": 4}, "--seq-length is 4 here, 8 in the checkpoint"),
        ({"split": "1,1,0"}, "the documents of a are missing or changed"),
        ({"cyclic": True}, "--dataloader-type is cyclic here, single in the checkpoint"),
    ],
)
def test_other_documents_start_a_new_order_with_a_note(tmp_path: Path, change: dict, note: str) -> None:
    write(tmp_path)
    run = Run(tmp_path).process({"a": 1}, 20, 5).process({"a": 1}, 20, 7, **change)
    assert run.notes[0] == note
    fresh = Run(tmp_path).process({"a": 1}, 15, 2, **change)
    assert run.read[5:] == fresh.read
    # The new order is stored, and continues without a note.
    run.process({"a": 1}, 60, 15, **change)
    fresh.process({"a": 1}, 55, 10, **change)
    assert run.notes == [] and run.read[5:] == fresh.read


def test_rewritten_files_of_the_same_shape_are_other_data(tmp_path: Path) -> None:
    write(tmp_path)
    run = Run(tmp_path).process({"a": 1}, 20, 5)
    with IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16) as builder:
        builder.add_concatenated(np.arange(75, dtype=np.uint16) + 1, CORPORA["a"])
        builder.finalize(str(tmp_path / "a.idx"))
    run.process({"a": 1}, 20, 7)
    assert run.notes == ["the documents of a are missing or changed", "the documents of a are new"]
    assert run.firsts[5:] == [token + 1 for token in plain_source("a", 15, 2)]


def test_a_cyclic_order_repeats_the_samples_that_it_was_planned_for(tmp_path: Path) -> None:
    write(tmp_path)
    run = Run(tmp_path).process({"b": 1}, 6, 5, cyclic=True).process({"b": 1}, 300, 33, cyclic=True, seed=8)
    one_epoch = plain_source("b", 6, 11)
    for epoch in range(3):
        order = np.random.RandomState([SEED, epoch]).permutation(11)
        assert run.firsts[11 * epoch : 11 * epoch + 11] == [one_epoch[place] for place in order]


def _validation_orders(
    folder: Path, names: str, *, are_apart: bool, stored: tuple[SplitOrder, ...] = ()
) -> tuple[SplitOrder, ...]:
    """Returns the orders of the validation sets `names` of a process that continues at sample 4."""
    prefixes = [str(folder / name) for name in names]
    blends = [([str(folder / "a")], None), (prefixes, None), None]
    apart = {"multiple_validation_sets": True} if are_apart else {}
    config = dataset_config(None, blend_per_split=blends, split=None, random_seed=SEED, sequence_length=S, **apart)
    valid = SplitSize(size=12, planned=12, consumed=4 if stored else 0, stored=stored)
    sizes = SplitSizes([SplitSize(size=8, planned=8), valid, SplitSize(size=0, planned=0)])
    found = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[1]
    return tuple(one.order for one in (found if isinstance(found, list) else [found]))


@pytest.mark.parametrize(
    "before, after, notes",
    [
        # Sets in any sequence, fewer or more of them.
        ("cd", "dc", [[], []]),
        ("cd", "c", [[]]),
        ("c", "dc", [["the documents of d are new"], []]),
        ("cd", "dbc", [[], ["the documents of b are new"], []]),
        ("cd", "cb", [[], ["the documents of d are missing or changed", "the documents of b are new"]]),
        # Lower case: separate sets; upper case: a blend of them.
        ("cd", "DC", [["the validation sets are blended on one side and separate on the other"]]),
        ("CD", "cd", 2 * [["the validation sets are blended on one side and separate on the other"]]),
        ("CD", "DC", [[]]),
    ],
)
def test_notes_name_only_validation_sets_that_changed(tmp_path: Path, before: str, after: str, notes) -> None:
    write(tmp_path)
    stored = _validation_orders(tmp_path, before.lower(), are_apart=before.islower())
    found = _validation_orders(tmp_path, after.lower(), are_apart=after.islower(), stored=stored)
    assert [list(one.notes) for one in found] == notes


def test_copies_of_a_set_are_one_blend_in_any_sequence(tmp_path: Path) -> None:
    write(tmp_path)
    orders = []
    for names, weights in (("aab", [0.3, 0.2, 0.5]), ("aba", [0.2, 0.5, 0.3]), ("baa", [5.0, 3.0, 2.0])):
        blend = ([str(tmp_path / name) for name in names], weights)
        config = dataset_config(None, blend=blend, split="1,0,0", random_seed=SEED, sequence_length=S)
        train = SplitSize(size=24, planned=24, consumed=6 if orders else 0, stored=tuple(orders[:1]))
        sizes = SplitSizes([train, SplitSize(size=0, planned=0), SplitSize(size=0, planned=0)])
        dataset = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
        assert isinstance(dataset, BlendedDataset) and dataset.order is not None and dataset.order.notes == ()
        orders.append(dataset.order)
        firsts = [int(dataset[sample]["tokens"][0]) for sample in range(24)]
        # Greedy choices of the first sequence; both copies read the corpus from its first sample.
        places = [0, 0, 0]
        for number, token in zip(plain_greedy([0.3, 0.2, 0.5], 24), firsts):
            planned = plain_greedy([0.3, 0.2, 0.5], 24).count(number)
            assert token == plain_source("aab"[number], planned, places[number] + 1)[places[number]]
            places[number] += 1


@settings(max_examples=20)
@given(blend=BLENDS, planned=st.integers(1, 30), stop=st.integers(1, 30), length=st.integers(1, 90))
def test_a_cyclic_blend_permutes_groups_of_the_planned_samples(tmp_path_factory, blend, planned, stop, length) -> None:
    blend = {**blend, "a": 1.0, "b": 0.5}
    folder = tmp_path_factory.mktemp("cyclic")
    write(folder, list(blend))
    stop = min(stop, planned)
    end = max(length, stop)
    run = Run(folder).process(blend, planned, stop, cyclic=True).process(blend, end, end, cyclic=True, seed=8)
    groups = -(-end // planned)
    once = PlainRun(blend, planned).read(0, planned * groups)
    places = [np.random.RandomState([SEED, group]).permutation(planned) + planned * group for group in range(groups)]
    assert run.firsts == [once[place] for place in np.concatenate(places)[:end].tolist()]


@given(
    weights=st.lists(st.sampled_from([0.001, 0.02, 0.3, 1.0, 2.5]), min_size=1, max_size=5),
    planned=st.integers(1, 60),
    size=st.integers(1, 120),
)
def test_every_length_of_a_blend_has_the_same_first_samples(weights, planned, size) -> None:
    chosen, within = continued_blend_indices(weights, size, planned=planned)
    expected = plain_blend(weights, planned, size)
    assert chosen.tolist() == expected
    assert within.tolist() == [expected[:i].count(number) for i, number in enumerate(expected)]


def test_a_new_run_reads_what_runs_without_stored_orders_read(tmp_path: Path) -> None:
    write(tmp_path)
    for blend, length in (({"a": 1}, 30), (_AB, 45), ({"a": 1, "d": 0.01}, 12)):
        prefixes = [str(tmp_path / name) for name in blend]
        weights = list(blend.values()) if len(blend) > 1 else None
        config = dataset_config(None, blend=(prefixes, weights), split="1,0,0", random_seed=SEED)
        train = BlendedMegatronDatasetBuilder(GPTDataset, [length, 0, 0], lambda: True, config).build()[0]
        assert [int(train[i]["tokens"][0]) for i in range(length)] == PlainRun(blend, length).read(0, length)


def test_a_long_run_has_cached_indices_of_its_own(tmp_path: Path) -> None:
    write(tmp_path)
    run = Run(tmp_path).process({"a": 1}, 20, 5)
    cache = tmp_path / "cache" / "GPTDataset_indices"
    first = {path.name: path.read_bytes() for path in cache.iterdir()}
    # Within the planned epochs, the indices of the first process are read.
    run.process({"a": 1}, 10, 6)
    assert {path.name for path in cache.iterdir()} == first.keys()
    run.process({"a": 1}, 90, 7)
    assert len(list(cache.iterdir())) == 2 * len(first)
    assert all((cache / name).read_bytes() == content for name, content in first.items())
    fresh = Run(tmp_path).process({"a": 1}, 90, 7)
    assert fresh.firsts == plain_source("a", 90, 7) != run.firsts


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": -1}, r"data_order.seed is -1: must be an integer, at least 0"),
        ({"planned": "9"}, "data_order.planned is '9'"),
        ({"cyclic": 1}, "data_order.cyclic is 1: must be true or false"),
        ({"sources": [{"name": "a", "facts": {}}]}, "data_order.weight is None"),
        ({"sources": {}}, "data_order.sources is {}: must be a list of data sets"),
        ({"length": 0}, "data_order.length is 0: must be an integer, at least 1"),
    ],
)
def test_damaged_orders_of_checkpoints_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data_order_from_json({"train": [{**SplitOrder(1, 2, VOCABULARY.eod).to_json(), **change}]})
    with pytest.raises(ValueError, match="must contain lists of orders"):
        data_order_from_json({"train": SplitOrder(1, 2).to_json()})


def _build_splits(
    folder: Path, stored: dict, consumed: tuple[int, int], sizes: tuple[int, int], cls=GPTDataset, **fields
) -> list:
    splits = [
        SplitSize(size=size, planned=size, consumed=done, stored=stored.get(name, ()))
        for name, size, done in zip(("train", "valid"), sizes, consumed)
    ]
    config = dataset_config(None, **{"split": None, "random_seed": SEED, **fields})
    return BlendedMegatronDatasetBuilder(
        cls, SplitSizes([*splits, SplitSize(size=0, planned=0)]), lambda: True, config
    ).build()


def _firsts(dataset, begin: int, end: int) -> list[int]:
    return [int(dataset[i - dataset.order.origin]["tokens"][0]) for i in range(begin, end)]


def test_blends_of_each_split_and_separate_validation_sets_continue(tmp_path: Path) -> None:
    write(tmp_path)
    paths = {name: str(tmp_path / name) for name in CORPORA}

    def blends(*valid: str) -> list:
        return [([paths["a"], paths["b"]], [0.3, 0.7]), ([paths[name] for name in valid], None), None]

    for is_apart in (False, True):
        fields = {"blend_per_split": blends("c", "d"), "multiple_validation_sets": is_apart}
        train, valid, _ = _build_splits(tmp_path, {}, (0, 0), (20, 9), **fields)
        sets = valid if is_apart else [valid]
        stored = {"train": (train.order,), "valid": tuple(one.order for one in sets)}
        stored = data_order_from_json(json.loads(json.dumps(data_order_to_json(stored))))
        fields["blend_per_split"] = blends("d", "c")
        train, valid, _ = _build_splits(tmp_path, stored, (11, 6), (90, 70), random_seed=3, **fields)
        assert _firsts(train, 0, 90) == PlainRun({"a": 0.3, "b": 0.7}, 20).read(0, 90)
        if is_apart:
            assert [_firsts(one, 0, 70) for one in valid] == [plain_source(name, 9, 70) for name in "dc"]
        else:
            assert _firsts(valid, 0, 70) == PlainRun({"c": 91, "d": 120}, 9).read(0, 70)


def test_validation_sets_that_are_separated_continue_after_the_samples_of_their_blend(tmp_path: Path) -> None:
    write(tmp_path)
    blend = ([str(tmp_path / "c"), str(tmp_path / "d")], [1.0, 3.0])
    fields = {"blend_per_split": [([str(tmp_path / "a")], None), blend, None]}
    valid = _build_splits(tmp_path, {}, (0, 0), (4, 8), **fields)[1]
    stored = {"valid": (valid.order,)}
    sets = _build_splits(tmp_path, stored, (4, 8), (9, 12), multiple_validation_sets=True, **fields)[1]
    assert [_firsts(one, 8, 12) for one in sets] == [plain_source("c", 2, 6)[2:], plain_source("d", 6, 10)[6:]]


class _Backwards(GPTDataset):
    """A subclass as scripts have it."""

    def __getitem__(self, idx: int) -> dict:
        return {"tokens": super().__getitem__(idx)["tokens"].flip(0)}


class _Own(MegatronDataset):
    """A dataset class of a script that knows nothing of appended epochs."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: object) -> range:
        return range(10)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: range) -> int:
        return len(low_level_dataset)

    def __len__(self) -> int:
        return self.num_samples or 0

    def __getitem__(self, idx: int) -> dict:
        return {"tokens": [np.random.RandomState(self.num_samples).permutation(len(self))[idx]]}


def test_subclasses_continue_and_other_classes_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    fields = {"blend": ([str(tmp_path / "a")], None), "split": "1,0,0"}
    for cls in (_Backwards, _Own):
        first = _build_splits(tmp_path, {}, (0, 0), (12, 0), cls, **fields)[0]
        stored = {"train": (first.order,)}
        for size, has_note in ((6, False), (12, False), (13, cls is _Own)):
            train = _build_splits(tmp_path, stored, (5, 0), (size, 0), cls, random_seed=1, **fields)[0]
            note = ("_Own may read more samples than planned in a different order",) if has_note else ()
            assert train.order.notes == note
            if not has_note:
                assert _firsts(train, 0, size) == _firsts(first, 0, size)
