"""Defines RunConfig: all settings of a run, as a dataclass for each area.

command_line/config_builder.py builds it from the parsed arguments. All code after their validation reads it.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from megatron.core.config_field import field_dest
from megatron.core.datasets.data_config import DataConfig
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.torch_fsdp2_config import FullyShardConfig, TorchFullyShardedDataParallelConfig
from megatron.core.models.gpt.gpt_config import GPTModelConfig
from megatron.core.num_microbatches_calculator import NumMicroBatches
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamSchedulerConfig
from megatron.core.tokenizers.build import TokenizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.distributed import (
    DistributedConfig,
    GradientReductionConfig,
    LaunchConfig,
    ShardedParametersConfig,
    VirtualStagesConfig,
)
from megatron.training.config.logging import GarbageCollectionConfig, LoggingConfig, ProfilingConfig
from megatron.training.config.training import (
    BatchScheduleConfig,
    CommandLineConfig,
    DryRunConfig,
    FaultConfig,
    TrainingConfig,
)


class RunConfig:
    """The settings of a run: a dataclass for each area, such as `run_config.optimizer.lr`.

    An area is built when it is first read, and again only after a script has changed an argument from which it was
    built (`get_args().lr = 1e-4`). Its dataclass checks its fields and computes unset ones.

    values: the dict that scripts hold as `vars(get_args())`, by Megatron-LM's names. It also contains arguments that a
    script has added, and the position of the run, which scripts read. build: builds a dataclass from `values`.
    """

    command_line: CommandLineConfig
    training: TrainingConfig
    batch_schedule: BatchScheduleConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    transformer: TransformerConfig
    gpt: GPTModelConfig
    virtual_stages: VirtualStagesConfig
    optimizer: OptimizerConfig
    scheduler: OptimizerParamSchedulerConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    profiling: ProfilingConfig
    garbage_collection: GarbageCollectionConfig
    faults: FaultConfig
    distributed: DistributedConfig
    ddp: DistributedDataParallelConfig
    gradient_reduction: GradientReductionConfig
    sharded_parameters: ShardedParametersConfig
    fully_shard: FullyShardConfig
    dry_run: DryRunConfig
    # These have no flags of their own.
    launch: LaunchConfig
    torch_fsdp2: TorchFullyShardedDataParallelConfig

    def __init__(self, values: dict[str, Any], *, build: Callable[[type[Any], Mapping[str, Any]], Any]) -> None:
        self.values, self._build = values, build
        self._built: dict[str, tuple[list[Any], Any]] = {}

    # Hidden from type checkers, which would accept every name as an area.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns the configuration of an area. Python calls this for names that are not in the instance."""
            if name not in _areas():
                raise AttributeError(f"RunConfig has no area {name!r}; areas: {', '.join(_areas())}")
            config_class, names = _areas()[name]
            values = self._values_of(names)
            if name not in self._built or not _same(self._built[name][0], values):
                self._built[name] = values, self._build(config_class, self.values)
            return self._built[name][1]

    def _values_of(self, names: Sequence[str]) -> list[Any]:
        # Copies of lists, because a script may append to them.
        values = [self.values.get(name) for name in names]
        return [[*value] if isinstance(value, list) else value for value in values]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunConfig) and self.values == other.values

    def changed(self, **values: Any) -> "RunConfig":
        """Returns a copy with other values of some arguments. It shares the areas that do not depend on them.

        The values of other arguments stay, including those that validation has derived, such as data_parallel_size.
        Fields of areas may be changed even if they have no argument.
        """
        unknown = values.keys() - self.values.keys() - {name for _, names in _areas().values() for name in names}
        if unknown:
            raise ValueError(f"the run has no argument {', '.join(sorted(unknown))}")
        other = RunConfig({**self.values, **values}, build=self._build)
        other._built = dict(self._built)
        return other

    def write_back(self, area: str, *names: str) -> None:
        """Copies fields that an area has computed to the arguments of the same names, where scripts read them."""
        config = getattr(self, area)
        self.values.update({name: vars(config)[name] for name in names})
        self._built[area] = self._values_of(_areas()[area][1]), config

    def batch_sizes(self) -> NumMicroBatches:
        """Returns the batch sizes of the run. Raises ValueError if they do not divide into microbatches."""
        return self.batch_schedule.batch_sizes(
            global_batch_size=self.training.global_batch_size,
            micro_batch_size=self.training.micro_batch_size,
            data_parallel_size=self.launch.data_parallel_size,
            seq_length=self.data.seq_length,
        )

    def model_config(self) -> TransformerConfig:
        """Returns a copy of the transformer's configuration for one model, whose callables and timers it will hold."""
        return copy.copy(self.transformer)


def _same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    for one, other in zip(before, now):
        # 1.0 and np.float32(1.0) are equal, but a field may refuse the latter.
        if one is not other and (type(one) is not type(other) or one != other):
            return False
    return True


# Arguments from which build_config computes further fields of a class.
_INPUTS_WITHOUT_FIELD: Mapping[type[Any], tuple[str, ...]] = {
    TransformerConfig: (
        "group_query_attention",
        "swiglu",
        "quick_geglu",
        "squared_relu",
        "init_method_xavier_uniform",
    ),
    DistributedDataParallelConfig: ("grad_reduce_in_bf16", "check_for_nan_in_loss_and_grad", "fp16"),
    TorchFullyShardedDataParallelConfig: ("grad_reduce_in_bf16", "check_for_nan_in_loss_and_grad", "fp16"),
}


@functools.cache
def _areas() -> Mapping[str, tuple[type[Any], tuple[str, ...]]]:
    """Returns the class of each area, and the names of the arguments from which it is built."""
    areas = {}
    for name, kind in get_type_hints(RunConfig).items():
        names = (field_dest(field) for field in dataclasses.fields(kind) if field.init)
        areas[name] = kind, (*names, *_INPUTS_WITHOUT_FIELD.get(kind, ()))
    return areas


def areas_with_flags() -> Mapping[str, type[Any]]:
    """Returns the classes whose fields have flags, by area, in the order in which --help shows them."""
    without = (LaunchConfig, TorchFullyShardedDataParallelConfig)
    return {name: kind for name, (kind, _) in _areas().items() if kind not in without}
