"""DDP settings that contradict each other are rejected."""

import pytest

from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_distributed_optimizer_instances": 2}, "instances is 2: requires use_distributed_optimizer"),
        ({"bucket_size": 8, "num_buckets": 2}, "bucket_size is 8 and num_buckets is 2: set only one of them"),
    ],
)
def test_contradictions_are_named_with_their_values(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedDataParallelConfig(**settings)


@pytest.mark.parametrize("name", ["overlap_param_gather", "shard_gradients", "use_distributed_optimizer"])
def test_fsdp2_refuses_settings_of_buckets_without_asking_for_others(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"^TorchFullyShardedDataParallelConfig.{name} is True .* anyway; do not set it$"
    ):
        TorchFullyShardedDataParallelConfig(**{name: True})
    with pytest.raises(ValueError, match=f"(?s)^[^\n]*{name} is True [^\n]*\n[^\n]*_instances is 2 .*must be 1$"):
        TorchFullyShardedDataParallelConfig(**{name: True}, num_distributed_optimizer_instances=2)


@pytest.mark.parametrize("patterns", [["all"], ("all",)])
def test_patterns_of_names_are_a_list_or_a_tuple(patterns: list[str] | tuple[str, ...]) -> None:
    config = DistributedDataParallelConfig(param_name_patterns_for_fp32_local_accumulation=patterns)
    assert config.param_name_patterns_for_fp32_local_accumulation == patterns


def test_a_pattern_outside_a_list_is_refused() -> None:
    with pytest.raises(ValueError, match="local_accumulation is 'all': must be a list or a tuple"):
        DistributedDataParallelConfig(param_name_patterns_for_fp32_local_accumulation="all")
