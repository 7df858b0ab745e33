"""Number of gradients that a bucket group expects from its parameters."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.core.distributed.bucket_group import _ExpectedGrads


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_expected_gradients_grow_at_once_and_shrink_after_four_steps(counts):
    grads, expected, fewer = _ExpectedGrads(1), 1, []
    for count in counts:
        complete = [grads.count(0) for _ in range(count)]
        assert [at + 1 for at, now in enumerate(complete) if now] == ([expected] if count >= expected else [])
        assert grads.is_complete == (count >= expected)
        grads.learn()
        fewer = [] if count >= expected else [*fewer, count]
        if count > expected:
            expected = count
        elif len(fewer) == 4:
            expected, fewer = max(1, *fewer), []
