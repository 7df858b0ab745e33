"""Configuration shared by all parallel components: the layout over ranks, pipeline stages, precision, and callables.

Process groups are built in parallel_state.py. Network shapes are in transformer/transformer_config.py.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import ClassVar

import torch

from megatron.core.config_field import MegatronConfig, config_field, validate_fields
from megatron.core.parallel_state import check_hierarchy
from megatron.core.pipeline_placement import V_SCHEDULES
from megatron.core.timers import Timers

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_LAYOUT_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}

# Initializes a weight of any shape and float dtype in place.
InitMethod = Callable[[torch.Tensor], object]
NoSync = Callable[[], AbstractContextManager[None]]
# Receives the parameters of a model chunk.
SyncOfChunk = Callable[..., None]


@dataclass(frozen=True)
class ConstantInit:
    """Initializes a parameter with a constant."""

    value: float

    def __call__(self, param: torch.Tensor) -> torch.Tensor:
        """Fills `param` with the constant in place and returns it."""
        return param.fill_(self.value)


@dataclass(frozen=True)
class XavierUniformInit:
    """Initializes a weight uniformly within +-sqrt(6 / (rows + columns)), after Glorot and Bengio.

    fans: rows + columns of the whole matrix, for a weight that is a shard or a stack of matrices; None means the sum of
    the weight's last two dimensions.
    """

    fans: int | None = None

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Fills a weight in place from torch's default generator and returns it.

        weight: [*, rows, columns], any float dtype.
        """
        bound = self.bound(weight.shape)
        return torch.nn.init.uniform_(weight, -bound, bound)

    def bound(self, shape: Sequence[int]) -> float:
        """Returns the largest absolute value that a weight of this shape may receive."""
        return math.sqrt(6 / (self.fans or sum(shape[-2:])))


def init_of_matrix(init_method: InitMethod, rows: int, columns: int) -> InitMethod:
    """Returns the init method for shards of a [rows, columns] matrix.

    Xavier initialization uses the size of the whole matrix. Other methods are returned unchanged.
    """
    return XavierUniformInit(rows + columns) if isinstance(init_method, XavierUniformInit) else init_method


@dataclass(kw_only=True)
class ParallelLayoutConfig:
    """Sizes of the rank grid: how weights, layers, sequences and experts are split over ranks.

    The remaining ranks are data-parallel replicas. virtual_pipeline_model_parallel_size: model chunks per stage; None
    means one.
    """

    cli_group: ClassVar[str] = "parallel layout"

    tensor_model_parallel_size: int = config_field(
        1, help="Ranks over which each layer's weights are split.", at_least=1
    )
    sequence_parallel: bool = config_field(
        False,
        help="Split activations between tensor-parallel layers along the sequence dimension; experts require it.",
    )
    pipeline_model_parallel_size: int = config_field(
        1, help="Pipeline stages, each with consecutive layers.", at_least=1
    )
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = config_field(1, help="Ranks over which each sequence is split.", at_least=1)
    hierarchical_context_parallel_sizes: list[int] | None = config_field(
        None,
        help="Levels A P into which --context-parallel-size (A x P) is divided for --cp-comm-type a2a+p2p. Groups of A "
        "neighboring ranks exchange heads, and P of these groups form a ring that passes keys and values.",
        at_least=1,
    )
    expert_model_parallel_size: int = config_field(
        1,
        help="Ranks over which the experts of a layer are distributed, among all ranks of a pipeline stage.",
        at_least=1,
    )
    expert_tensor_parallel_size: int = config_field(
        None,
        filled_in=True,
        help="Ranks over which each expert's weights are split; default: --tensor-model-parallel-size.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def sequence_parts(self) -> int:
        """Number of ranks over which the hidden states of a sequence are divided between layers."""
        return self.context_parallel_size * (self.tensor_model_parallel_size if self.sequence_parallel else 1)


@dataclass(kw_only=True)
class PipelineConfig:
    """Distribution of layers over pipeline stages, and communication between stages.

    By default all stages and chunks have the same number of layers; transformer/pipeline_split.py computes it.
    pipeline_dtype: dtype of the tensors sent between stages, equal to the dtype of hidden states; None means
    hidden_dtype.
    """

    cli_group: ClassVar[str] = "pipeline stages"

    pipeline_dtype: torch.dtype | None = None

    pipeline_schedule: str = config_field(
        "1f1b",
        help="Order of the passes of a step. 1f1b alternates forward and backward passes, also over the chunks of "
        "virtual stages. zb-h1 delays the computation of weight gradients to fill the time in which stages would wait. "
        "zbv does so with two chunks per stage, placed in a V: the first stage holds both ends of the model, and "
        "stages wait only at the beginning. dualpipev is zbv with pairs of passes for "
        "--overlap-moe-expert-parallel-comm, which it requires. Results are the same, except that dropout draws other "
        "numbers if layers are on other stages.",
        choices=("1f1b", "zb-h1", *V_SCHEDULES),
    )
    microbatch_group_size_per_vp_stage: int | None = config_field(
        None,
        flags=("--microbatch-group-size-per-virtual-pipeline-stage",),
        help="Number of micro-batches that a stage processes in one model chunk before it continues with the next "
        "chunk; default and minimum: the number of stages.",
        at_least=1,
    )
    num_layers_in_first_pipeline_stage: int | None = config_field(
        None,
        flags=("--decoder-first-pipeline-num-layers",),
        dest="decoder_first_pipeline_num_layers",
        help="Layers of the first stage; the other stages share the remaining layers evenly.",
        at_least=1,
    )
    num_layers_in_last_pipeline_stage: int | None = config_field(
        None,
        flags=("--decoder-last-pipeline-num-layers",),
        dest="decoder_last_pipeline_num_layers",
        help="Layers of the last stage; the other stages share the remaining layers evenly.",
        at_least=1,
    )
    account_for_embedding_in_pipeline_split: bool = config_field(
        False, help="Count the embedding as a layer of the first stage when layers are distributed evenly."
    )
    account_for_loss_in_pipeline_split: bool = config_field(
        False, help="Count output layer and loss as a layer of the last stage when layers are distributed evenly."
    )
    pipeline_model_parallel_layout: str | None = config_field(
        None,
        help="Contents of each stage, chunk by chunk over all stages: E embedding, t layer, m layer of multi-token "
        "prediction, L loss, | next stage, *N times, (...) group; for example Et*3|(tt|)*2tL.",
    )
    overlap_p2p_comm: bool = config_field(
        False,
        cli_default=True,
        flags=("--no-overlap-p2p-communication",),
        help="Receive the next input of a stage when it is needed, instead of during computation.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class ExpertOverlapConfig:
    """Overlap of the exchanges between expert-parallel ranks with computation.

    pipeline_parallel/pass_turns.py runs the passes of a pair, and tensor_parallel/weight_grads.py holds weight
    gradients. Neither changes results.
    """

    cli_group: ClassVar[str] = "overlap of expert communication"

    overlap_moe_expert_parallel_comm: bool = config_field(
        False,
        help="Run the forward pass of one micro-batch and the backward pass of another in turns, so that each computes "
        "while rows of the other one are exchanged between the ranks of experts. Results are the same. Stages run more "
        "forward passes ahead, which require memory. With dropless experts, includes --delay-wgrad-compute. Requires "
        "--moe-token-dispatcher-type alltoall.",
    )
    delay_wgrad_compute: bool = config_field(
        False,
        help="Compute the weight gradients of a backward pass while it exchanges rows between the ranks of experts, "
        "instead of together with the gradients of activations. Results are the same. Requires "
        "--moe-token-dispatcher-type alltoall.",
    )
    overlap_dispatch_backward_with_experts_wgrad: bool = config_field(
        False,
        help="As --delay-wgrad-compute, for the weights of experts only: their gradients are computed while the "
        "gradients of their rows are sent back.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class LayerOffloadConfig:
    """Settings for offloading whole layers. transformer/offload_config.py contains the settings for parts of layers."""

    cli_group: ClassVar[str] = "activation offloading"

    cpu_offloading: bool = config_field(
        False, flags=(), help="Offload whole layers. Setting cpu_offloading_num_layers is sufficient."
    )
    cpu_offloading_num_layers: int = config_field(
        0,
        help="Number of layers, from the first, whose activations are stored on the host between forward and backward.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class ModelParallelConfig(
    ParallelLayoutConfig, PipelineConfig, ExpertOverlapConfig, LayerOffloadConfig, MegatronConfig
):
    """Precision and schedule callables of a model, with its parallel layout; `TransformerConfig` inherits the fields.

    The training loop sets the callables. `grad_scale_func` scales the loss before backward, and the auxiliary losses of
    a model that implements `set_aux_loss_scale`. `no_sync_func` defers gradient reduction to the last microbatch.
    `grad_sync_func` and `param_sync_func` launch collectives of a model chunk at the times that
    pipeline_parallel/sync_callables.py documents; with several chunks each is a list with one callable per chunk.
    `finalize_model_grads_func` runs after the last microbatch. `timers` measures the forward and backward passes.
    """

    cli_group: ClassVar[str] = "mixed precision and determinism"

    fp16: bool = config_field(False, help="Train in fp16 with fp32 master weights and dynamic loss scaling.")
    bf16: bool = config_field(False, help="Train in bf16 with fp32 master weights.")
    deterministic_mode: bool = config_field(
        False, help="Sum over ranks in rank order in fp32 and use deterministic kernels, for bit-identical reruns."
    )
    use_cpu_initialization: bool = config_field(
        False, help="Draw initial weights on the CPU; the same seed gives the same weights on every device."
    )
    init_model_with_meta_device: bool = config_field(
        False,
        help="Build the model on the meta device; each rank then initializes only its shards (--use-torch-fsdp2).",
    )
    cross_entropy_loss_fusion: bool = config_field(
        False, help="No effect, because logits are always converted to losses in one fused pass."
    )
    gradient_accumulation_fusion: bool = config_field(
        False,
        cli_default=True,
        flags=("--no-gradient-accumulation-fusion",),
        help="Accumulate weight gradients separately instead of inside the kernels that compute them.",
    )
    calculate_per_token_loss: bool = config_field(
        False,
        help="Average the loss over all tokens of a global batch, even if micro-batches have different numbers of "
        "tokens.",
    )
    params_dtype: torch.dtype = torch.float32
    perform_initialization: bool = True
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    no_sync_func: NoSync | Sequence[NoSync] | None = None
    grad_sync_func: SyncOfChunk | Sequence[SyncOfChunk] | None = None
    param_sync_func: SyncOfChunk | Sequence[SyncOfChunk] | None = None
    finalize_model_grads_func: Callable[..., None] | None = None
    timers: Timers = plain_field(
        default_factory=Timers, compare=False
    )  # excluded from comparisons, because each config creates separate timers

    def __post_init__(self) -> None:
        normalize_given_forms(self)
        validate_fields(self)
        set_timers(self)
        validate_precision(self)
        validate_parallel_layout(self)
        validate_layer_offload(self)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of the hidden states between layers and between pipeline stages."""
        return self.params_dtype

    @property
    def compute_itemsize(self) -> int:
        """Bytes per element of a weight in forward: a model built in fp32 is cast by Float16Module."""
        return 2 if self.bf16 or self.fp16 else self.params_dtype.itemsize


def validate_parallel_layout(config: ParallelLayoutConfig) -> None:
    """Raises ValueError for virtual stages without pipeline stages, or for invalid context-parallel levels."""
    check_hierarchy(config.hierarchical_context_parallel_sizes, config.context_parallel_size)
    virtual, stages = config.virtual_pipeline_model_parallel_size, config.pipeline_model_parallel_size
    if virtual is not None and (virtual < 1 or virtual > 1 and stages == 1):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size is {virtual}: must be 1 with pipeline_model_parallel_size {stages}"
        )


def normalize_given_forms(config: ModelParallelConfig) -> None:
    """Converts the alternative forms of values that Megatron scripts use, in place.

    These are dtype names, and a pipeline layout as lists of layer names. Raises ValueError for unknown names.
    """
    config.params_dtype = _as_dtype("params_dtype", config.params_dtype)
    if config.pipeline_dtype is not None:
        config.pipeline_dtype = _as_dtype("pipeline_dtype", config.pipeline_dtype)
    config.pipeline_model_parallel_layout = _layout_as_letters(config.pipeline_model_parallel_layout)


def _as_dtype(name: str, value: object) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str) or value not in _DTYPES:
        raise ValueError(f"{name} is {value!r}: must be a torch dtype, or one of {', '.join(_DTYPES)}")
    return _DTYPES[value]


def _layout_as_letters(layout: object) -> str | None:
    """Returns a pipeline layout as letters. layout: letters, a list of layer names per stage and chunk, or None."""
    if layout is None or isinstance(layout, str):
        return layout
    if not isinstance(layout, (list, tuple)) or not all(isinstance(part, (list, tuple)) for part in layout):
        raise ValueError(
            f"pipeline_model_parallel_layout is {layout!r}: must be letters such as Et*3|(tt|)*2,L, or a list of "
            "layer names for each stage and chunk"
        )
    unknown = [name for part in layout for name in part if name not in _LAYOUT_LETTERS]
    if unknown:
        raise ValueError(
            f"pipeline_model_parallel_layout contains {unknown[0]!r}: must consist of lists of "
            f"{', '.join(_LAYOUT_LETTERS)}"
        )
    return "|".join("".join(_LAYOUT_LETTERS[name] for name in part) for part in layout)


def set_timers(config: ModelParallelConfig) -> None:
    """Replaces `timers` of None, which Megatron scripts pass, with timers that are never read."""
    config.timers = config.timers or Timers()


def validate_layer_offload(config: LayerOffloadConfig) -> None:
    """Raises ValueError if offloading is enabled for zero layers."""
    if config.cpu_offloading and config.cpu_offloading_num_layers == 0:
        raise ValueError("cpu_offloading is True and cpu_offloading_num_layers is 0: must be at least 1")


def check_multiple(name: str, value: int, *, of: str, size: int) -> None:
    """Raises ValueError unless `size` divides `value`. The message names both fields, `name` and `of`."""
    if value % size:
        raise ValueError(f"{name} is {value}: must be a multiple of {of} ({size})")


def validate_precision(config: ModelParallelConfig) -> None:
    """Raises ValueError if the precision flags contradict each other."""
    if config.fp16 and config.bf16:
        raise ValueError("ModelParallelConfig.fp16 and ModelParallelConfig.bf16 are both given: choose one precision")
