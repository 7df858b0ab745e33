"""Document, sample and shuffle indices compared with plain loops over the token stream."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.core.datasets.gpt_indices import build_gpt_indices, build_sample_index, plan_epochs

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=12)


def naive_order(documents: list[int], seq_length: int, num_samples: int, *, lengths: list[int], seed: int):
    """Builds the indices as Megatron describes them: documents in stream order, and samples in request order."""
    per_epoch = sum(lengths[document] for document in documents)
    epochs = 1
    while epochs * per_epoch < num_samples * seq_length + 1:
        epochs += 1
    total = (epochs * per_epoch - 1) // seq_length
    sans_last = ((epochs - 1) * per_epoch - 1) // seq_length
    apart = epochs > 1 and num_samples - sans_last < int(0.80 * ((per_epoch - 1) // seq_length))
    rng = np.random.RandomState(seed)
    stream = []
    for count in [epochs - 1, 1] if apart else [epochs]:
        part = np.array(documents * count, dtype=np.int32)
        rng.shuffle(part)
        stream += part.tolist()
    order = []
    for begin, end in [(0, sans_last), (sans_last, total)] if apart else [(0, total)]:
        part = np.arange(begin, end)
        rng.shuffle(part)
        order += part.tolist()
    return stream, order


@given(lengths=LENGTHS, seq_length=st.integers(1, 6), num_samples=st.integers(1, 40), seed=st.integers(0, 99))
def test_samples_are_cut_from_the_stream_as_a_plain_loop_cuts_them(lengths, seq_length, num_samples, seed) -> None:
    assume(sum(lengths) > seq_length)
    documents = list(range(len(lengths)))
    indices = build_gpt_indices(
        np.array(lengths, dtype=np.int32),
        np.array(documents),
        seq_length=seq_length,
        num_samples=num_samples,
        seed=seed,
    )
    stream, order = naive_order(documents, seq_length, num_samples, lengths=lengths, seed=seed)
    assert indices.document.tolist() == stream
    assert indices.shuffle.tolist() == order
    assert len(order) >= num_samples
    tokens = [(place, offset) for place, document in enumerate(stream) for offset in range(lengths[document])]
    assert indices.sample[1:].tolist() == [list(tokens[i * seq_length]) for i in range(1, len(order) + 1)]
    assert indices.sample[0].tolist() == [0, 0]


def test_indices_depend_on_the_seed_alone() -> None:
    lengths = np.full(50, 20, dtype=np.int32)
    first, again, other = (
        build_gpt_indices(lengths, np.arange(50), seq_length=8, num_samples=300, seed=seed) for seed in (1, 1, 2)
    )
    for name in ("document", "sample", "shuffle"):
        assert np.array_equal(vars(first)[name], vars(again)[name])
    assert not np.array_equal(first.document, other.document)


def test_every_epoch_reads_every_document_once_and_a_partial_last_one_comes_last() -> None:
    lengths = np.full(100, 10, dtype=np.int32)
    indices = build_gpt_indices(lengths, np.arange(100), seq_length=10, num_samples=210, seed=0)
    assert np.bincount(indices.document).tolist() == [3] * 100
    assert sorted(indices.document[200:]) == list(range(100))
    plan = plan_epochs(1000, 10, num_samples=210)
    assert plan.separate_last
    assert indices.shuffle[: plan.num_samples_before_last].max() < plan.num_samples_before_last


def test_no_number_of_samples_means_one_epoch() -> None:
    plan = plan_epochs(1000, 10, num_samples=None)
    assert (plan.num_epochs, plan.num_samples, plan.separate_last) == (1, 99, False)


@pytest.mark.parametrize("tokens", [0, 10])
def test_text_shorter_than_a_sample_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{tokens} tokens are too few for one sample of 10"):
        plan_epochs(tokens, 10, num_samples=5)


def test_positions_beyond_32_bits_are_exact() -> None:
    lengths = np.array([2**31 - 1], dtype=np.int32)
    document = np.zeros(4, dtype=np.int32)
    sample = build_sample_index(lengths, document, seq_length=2**31, num_samples=3)
    assert sample.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
