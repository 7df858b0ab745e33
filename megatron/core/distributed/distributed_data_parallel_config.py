"""DistributedDataParallelConfig: settings for storage, reduction and overlap of gradients, without process groups."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import MegatronConfig, config_field, run_checks, validate_fields


@dataclass(kw_only=True)
class DistributedDataParallelConfig(MegatronConfig):
    """Settings of DistributedDataParallel, and of the buffers that a distributed optimizer shards.

    The validate methods raise ValueError, naming fields and values. Gradients have a *bucket lifetime* if their memory
    exists only from the first gradient of a bucket to the end of its reduction.
    """

    cli_group: ClassVar[str] = "data parallelism"

    grad_reduce_in_fp32: bool = config_field(
        False, flags=(), help="Accumulate and reduce gradients in fp32, not in the parameters' dtype."
    )
    overlap_grad_reduce: bool = config_field(
        False, help="Reduce each bucket of gradients as soon as it is complete, during backward."
    )
    overlap_param_gather: bool = config_field(
        False,
        help="Gather updated parameters during forward, each bucket before the module that needs it.",
    )
    align_param_gather: bool = config_field(
        False,
        cli_default=True,
        flags=("--no-align-param-gather",),
        help="Let each pipeline stage start its parameter gathers independently, instead of at the same point of the "
        "schedule.",
    )
    use_distributed_optimizer: bool = config_field(
        False, help="Shard optimizer state and update over the data-parallel ranks (ZeRO-1)."
    )
    shard_gradients: bool = config_field(
        False,
        flags=(),
        help="With a sharded optimizer: reduce gradients in every backward and store only this rank's shard (ZeRO-2).",
    )
    release_gradients: bool = config_field(
        False,
        flags=(),
        help="Free each bucket of gradients after hooks and optimizer have used it, in the last backward of a step "
        "(docs/hooks.md).",
    )
    num_distributed_optimizer_instances: int = config_field(
        1,
        at_least=1,
        help="Number of groups of data-parallel ranks that each hold a complete sharded optimizer.",
    )
    check_for_nan_in_grad: bool = config_field(
        False,
        flags=(),
        help="Raise an error naming ranks and parameters if a gradient is not finite before its reduction.",
    )
    check_for_large_grads: bool = config_field(
        False, help="Warn if a parameter's gradient norm is ten times its previous maximum."
    )
    bucket_size: int | None = config_field(
        None,
        flags=("--ddp-bucket-size",),
        dest="ddp_bucket_size",
        at_least=1,
        help="Number of elements at which a bucket of gradients is closed.",
    )
    num_buckets: int | None = config_field(
        None,
        flags=("--ddp-num-buckets",),
        dest="ddp_num_buckets",
        at_least=1,
        help="Number of gradient buckets per buffer, instead of their size.",
    )
    pad_buckets_for_high_nccl_busbw: bool = config_field(
        False,
        flags=("--ddp-pad-buckets-for-high-nccl-busbw",),
        dest="ddp_pad_buckets_for_high_nccl_busbw",
        help="End buckets at multiples of 65536 elements, which NCCL transfers faster.",
    )
    average_in_collective: bool = config_field(
        False,
        flags=("--ddp-average-in-collective",),
        dest="ddp_average_in_collective",
        help="Average over ranks in the collective, instead of scaling gradients before it.",
    )
    reduce_scatter_with_fp32_accumulation: bool = config_field(
        False,
        flags=("--ddp-reduce-scatter-with-fp32-accumulation",),
        dest="ddp_reduce_scatter_with_fp32_accumulation",
        help="Send gradients in their own dtype, but sum over ranks in fp32.",
    )
    param_name_patterns_for_fp32_local_accumulation: list[str] | tuple[str, ...] = config_field(
        (),
        cli_default=[],
        flags=("--ddp-param-name-patterns-for-fp32-local-accumulation",),
        dest="ddp_param_name_patterns_for_fp32_local_accumulation",
        nargs="+",
        help="Parameters, by name patterns or `all`, whose micro-batch gradients accumulate in fp32 although they "
        "are reduced in 16 bits.",
    )
    fp8_param_gather: bool = config_field(
        False,
        help="Gather the weights of experts that compute in 8 bits (--fp8-format) in 8 bits. Results and checkpoints "
        "are the same. Requires --use-distributed-optimizer, and shards that consist of whole blocks.",
    )
    overlap_param_gather_with_optimizer_step: bool = config_field(
        False, help="Gather each bucket of parameters as soon as the optimizer has updated it."
    )
    ddp_debug: bool = config_field(
        False,
        help="Raise an error naming the parameter if a buffer is read or written at the wrong time, and compare "
        "collective launches across ranks; slow.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        run_checks(
            self.validate_bucket_size,
            self.validate_overlap,
            self.validate_reduction,
            self.validate_bucket_lifetime_grads,
        )

    def validate_bucket_size(self) -> None:
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ValueError(
                f"DistributedDataParallelConfig.bucket_size is {self.bucket_size} and num_buckets is "
                f"{self.num_buckets}: set only one of them"
            )

    def validate_overlap(self) -> None:
        self._needs("overlap_param_gather", "use_distributed_optimizer", "overlap_grad_reduce")
        self._needs("overlap_param_gather_with_optimizer_step", "overlap_param_gather")
        self._needs("fp8_param_gather", "use_distributed_optimizer")
        if self.num_distributed_optimizer_instances > 1 and not self.use_distributed_optimizer:
            raise ValueError(
                "DistributedDataParallelConfig.num_distributed_optimizer_instances is "
                f"{self.num_distributed_optimizer_instances}: requires use_distributed_optimizer"
            )

    def validate_reduction(self) -> None:
        self._needs("reduce_scatter_with_fp32_accumulation", "use_distributed_optimizer")
        if self.reduce_scatter_with_fp32_accumulation and self.average_in_collective:
            raise ValueError(
                "DistributedDataParallelConfig.reduce_scatter_with_fp32_accumulation and average_in_collective are "
                "both set: gradients are then added after the collective, which therefore cannot average them; set "
                "only one"
            )
        if self.reduce_scatter_with_fp32_accumulation and self.num_distributed_optimizer_instances > 1:
            raise ValueError(
                "DistributedDataParallelConfig.reduce_scatter_with_fp32_accumulation is set and "
                f"num_distributed_optimizer_instances is {self.num_distributed_optimizer_instances}: must be 1"
            )
        patterns = self.param_name_patterns_for_fp32_local_accumulation
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(
                "DistributedDataParallelConfig.param_name_patterns_for_fp32_local_accumulation is "
                f"{patterns!r}: must be a list or a tuple of strings (parameter name patterns)"
            )
        if patterns and self.grad_reduce_in_fp32:
            raise ValueError(
                f"DistributedDataParallelConfig.param_name_patterns_for_fp32_local_accumulation is {patterns}: "
                "grad_reduce_in_fp32 already accumulates all parameters in fp32; set only one of them"
            )

    def validate_bucket_lifetime_grads(self) -> None:
        self._needs("shard_gradients", "use_distributed_optimizer")
        name = "shard_gradients" if self.shard_gradients else "release_gradients"
        if not self.has_bucket_lifetime_grads:
            return
        if self.ddp_debug:
            raise ValueError(
                f"DistributedDataParallelConfig.ddp_debug and {name} are both set: ddp_debug checks gradients that "
                f"are persistent in buffers and reduced once per step; disable {name} while debugging"
            )
        patterns = self.param_name_patterns_for_fp32_local_accumulation
        if patterns:
            raise ValueError(
                f"DistributedDataParallelConfig.param_name_patterns_for_fp32_local_accumulation is {patterns} and "
                f"{name} is set: micro-batch gradients are reduced before they accumulate; set grad_reduce_in_fp32 to "
                "accumulate in fp32, or set only one of the two"
            )

    def without_effect(self, *, has_16_bit_grads: bool, has_packed_params: bool) -> list[str]:
        """Describes settings that have no effect.

        has_16_bit_grads: whether any gradients are reduced in 16 bits. has_packed_params: whether any parameters are
        gathered in 8 bits.
        """
        narrow = ("reduce_scatter_with_fp32_accumulation", "param_name_patterns_for_fp32_local_accumulation")
        found = {
            "bucket_size without overlap_grad_reduce": self.bucket_size is not None and not self.cuts_buckets,
            "num_buckets without overlap_grad_reduce": self.num_buckets is not None and not self.cuts_buckets,
            "fp8_param_gather without weights in 8 bits that several ranks share": self.fp8_param_gather
            and not has_packed_params,
            **{f"{name} with fp32 gradients": vars(self)[name] and not has_16_bit_grads for name in narrow},
        }
        return [words for words, is_so in found.items() if is_so]

    @property
    def cuts_buckets(self) -> bool:
        """Whether several buckets are useful, either to overlap reductions or to free memory earlier."""
        return self.overlap_grad_reduce or self.has_bucket_lifetime_grads

    @property
    def has_bucket_lifetime_grads(self) -> bool:
        """Whether the memory of unsharded gradients is freed when their bucket is reduced."""
        return self.shard_gradients or self.release_gradients

    @property
    def reduces_in_backward(self) -> bool:
        """Whether a bucket is reduced as soon as it is complete."""
        return self.overlap_grad_reduce or self.release_gradients

    def _needs(self, name: str, *needed: str) -> None:
        for other in needed:
            if vars(self)[name] and not vars(self)[other]:
                raise ValueError(f"DistributedDataParallelConfig.{name} is set: requires {other} as well")
