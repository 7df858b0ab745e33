"""Settings of wrappers that contradict each other."""

import pytest

from megatron.core.distributed import DistributedDataParallelConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_distributed_optimizer_instances": 2}, "instances is 2: needs use_distributed_optimizer"),
        ({"bucket_size": 8, "num_buckets": 2}, "bucket_size is 8 and num_buckets is 2: give one of them"),
    ],
)
def test_contradictions_are_named_with_their_values(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedDataParallelConfig(**settings)
