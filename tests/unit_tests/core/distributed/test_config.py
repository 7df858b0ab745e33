"""Settings of wrappers that contradict each other."""

import pytest

from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig


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


@pytest.mark.parametrize("name", ["overlap_param_gather", "shard_gradients", "use_distributed_optimizer"])
def test_fsdp2_refuses_settings_of_buckets_without_asking_for_others(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is True with use_torch_fsdp2: .* anyway; leave out one of them"):
        TorchFullyShardedDataParallelConfig(**{name: True})
