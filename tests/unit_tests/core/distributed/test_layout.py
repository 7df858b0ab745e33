"""Layouts have known offsets, and each element belongs to one place, one bucket and one shard."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.distributed.layout import ALIGNMENT, Span, lay_out, locate, resolve_bucket_size


@pytest.mark.parametrize(
    ("settings", "starts", "ends", "unpadded"),
    [
        ({"num_shards": 1, "bucket_size": None}, (128, 64, 0), [256], [228]),
        ({"num_shards": 2, "bucket_size": None}, (128, 64, 0), [256], [228]),
        ({"num_shards": 3, "bucket_size": None}, (128, 64, 0), [384], [228]),
        ({"num_shards": 2, "bucket_size": 60}, (128, 64, 0), [128, 256], [114, 100]),
        ({"num_shards": 4, "bucket_size": 60, "high_busbw": True}, (65536, 64, 0), [65536, 131072], [114, 100]),
        ({"num_shards": 2, "bucket_size": None, "own_bucket": {0}}, (128, 64, 0), [128, 256], [114, 100]),
        # Shards of 64 elements for each of four ranks, where Megatron aligns to 128 elements in total.
        ({"num_shards": 4, "bucket_size": 60}, (256, 64, 0), [256, 512], [114, 100]),
        ({"num_shards": 2, "bucket_size": 60, "split": True}, (128, 64, 0), [128, 256], [128, 100]),
        ({"num_shards": 2, "bucket_size": 9999, "split": True}, (128, 64, 0), [256], [228]),
    ],
)
def test_three_parameters_lie_where_they_should(settings, starts, ends, unpadded):
    layout = lay_out([100, 50, 7], **settings)
    assert tuple(span.start for span in layout.spans) == starts
    assert [bucket.span.end for bucket in layout.buckets] == ends and layout.numel == ends[-1]
    assert [bucket.numel_unpadded for bucket in layout.buckets] == unpadded


def _are_gapless(spans, end):
    return [0, *(span[1] for span in spans)] == [*(span[0] for span in spans), end]


SIZES = st.lists(st.one_of(st.sampled_from([0, 1, 7, 63, 64, 65, 129]), st.integers(0, 700)), max_size=12)


@st.composite
def layouts(draw):
    sizes, split = draw(SIZES), draw(st.booleans())
    own = draw(st.sets(st.sampled_from(range(len(sizes))))) if sizes and not split else set()
    size = draw(st.one_of(st.none(), st.integers(1, 999)))
    return (
        sizes,
        own,
        split,
        lay_out(sizes, num_shards=draw(st.integers(1, 7)), bucket_size=size, own_bucket=own, split=split),
    )


@given(layouts(), st.sampled_from([1, 2]))
def test_every_element_is_owned_exactly_once(drawn, instances):
    sizes, _, _, layout = drawn
    shards = layout.num_shards
    owned = sorted((span.start, span.end) for rank in range(shards * instances) for span in layout.owned(rank % shards))
    assert all(start % ALIGNMENT == 0 for span in owned for start in span)
    # All instances have the same shards, and each shard occurs once per instance.
    assert all(owned[i : i + instances] == [owned[i]] * instances for i in range(0, len(owned), instances))
    assert _are_gapless(owned[::instances], layout.numel)
    assert [span.numel for span in layout.spans] == sizes
    assert all(span.start % ALIGNMENT == 0 and span.end <= layout.numel for span in layout.spans)
    used = sorted((span.start, span.end) for span in layout.spans if span.numel)
    assert all(a[1] <= b[0] for a, b in pairwise(used))


@given(layouts())
def test_parameters_lie_in_their_buckets_in_order_and_without_a_gap(drawn):
    sizes, own, split, layout = drawn
    covered = [0] * len(sizes)
    for bucket in layout.buckets:
        assert split or len(bucket.params) == 1 or not own & set(bucket.params)
        for index in bucket.params:
            part = layout.spans[index].intersection(bucket.span)
            assert not part.numel or part.start == layout.spans[index].start + covered[index]
            assert split or part.numel == sizes[index]
            covered[index] += part.numel
    assert covered == sizes


@pytest.mark.parametrize(
    ("given_size", "num_buckets", "single", "expected"),
    [(None, None, False, 64_000_000), (5, None, False, 5), (None, 3, False, None), (5, None, True, None)],
)
def test_the_bucket_size_follows_from_what_was_given(given_size, num_buckets, single, expected):
    assert resolve_bucket_size(given_size, num_buckets, num_ranks=64, single_bucket=single) == expected


@given(SIZES, st.integers(1, 14), st.sets(st.integers(0, 11), max_size=3))
def test_there_are_as_many_buckets_as_asked_for_where_the_parameters_allow_it(sizes, num_buckets, own):
    own = {index for index in own if index < len(sizes)}
    layout = lay_out(sizes, num_shards=2, bucket_size=None, num_buckets=num_buckets, own_bucket=own)
    # Parameters in `own` have separate buckets. Parameters between two of them share at least one bucket.
    least = sum(index in own or index - 1 in own or index == 0 for index in range(len(sizes)))
    assert len(layout.buckets) == max(least, min(num_buckets, len(sizes)))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"num_shards": 0}, ValueError),
        ({"bucket_size": 0}, ValueError),
        ({"bucket_size": 1.5}, TypeError),
        ({"bucket_size": True}, TypeError),
        ({"num_buckets": 0}, ValueError),
        ({"own_bucket": {1}}, ValueError),
        ({"split": True, "own_bucket": {0}}, ValueError),
    ],
)
def test_impossible_layouts_are_refused_by_name(wrong, error):
    with pytest.raises(error, match=list(wrong)[-1]):
        lay_out([3], **{"num_shards": 1, "bucket_size": None, **wrong})
    with pytest.raises(ValueError, match=r"sizes\[1\] is -3: must be at least 0"):
        lay_out([5, -3], num_shards=1, bucket_size=None)


def test_a_part_is_located_in_the_span_that_has_it_also_behind_an_empty_one() -> None:
    spans = [Span(0, 64), Span(64, 0), Span(64, 128), Span(256, 64)]
    assert locate(Span(0, 64), spans) == (0, slice(0, 64))
    assert locate(Span(64, 64), spans) == (2, slice(0, 64))
    assert locate(Span(128, 64), spans) == (2, slice(64, 128))
    assert locate(Span(300, 20), spans) == (3, slice(44, 64))
