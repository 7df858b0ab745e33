"""Measures the memory of a run: bytes allocated on the ranks by kind, and whether weights and states fit a device.

planner/plan.py predicts the same kinds of memory before a run starts.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.core.device import default_device, device_name, memory_bytes, peak_memory_bytes, total_memory_bytes
from megatron.core.device.torch_internals import storage_id
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.state_memory import StateBytes, state_bytes_of
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe_config import layers_with_experts
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from megatron.training.callbacks import StepReport
from megatron.training.config import RunConfig
from megatron.training.step.expert_memory import ExpertMemory


def parameter_tensors(model: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yields tensors that store the chunks' parameters and module buffers: any shape and dtype."""
    for chunk in model:
        yield from chunk.parameters()
        yield from unwrap_model(chunk).buffers()
        if isinstance(chunk, _BaseDataParallel):
            yield from (flat for buffer in chunk.all_buffers for flat in buffer.persistent_params)


def gradient_tensors(model: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yields tensors that persistently store the chunks' gradients: any shape and dtype."""
    for chunk in model:
        if isinstance(chunk, _BaseDataParallel):
            yield from (flat for buffer in chunk.all_buffers for flat in buffer.persistent_grads)


def parameter_bytes(model: Sequence[nn.Module]) -> int:
    """Returns the bytes of the chunks' parameters, module buffers, and weights in 8 bits, once a step has run."""
    return bytes_of(parameter_tensors(model)) + quantized_bytes(model)


def quantized_bytes(model: Sequence[nn.Module]) -> int:
    """Returns the bytes of the chunks' weights in 8 bits, which experts allocate in their first forward."""
    modules = (part for chunk in model for part in unwrap_model(chunk).modules())
    return sum(part.quantized_bytes for part in modules if isinstance(part, GroupedMLP))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Returns the total bytes of the tensors' storages, each counted once. A DTensor counts with its local shard.

    tensors: any shape and dtype.
    """
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    memory = {storage_id(part.untyped_storage()): part.untyped_storage().nbytes() for part in parts}
    return sum(memory.values())


def held_bytes(
    model: Sequence[nn.Module], optimizer: MegatronOptimizer, *, memory: ExpertMemory | None = None
) -> dict[str, int]:
    """Returns the persistent bytes that this rank has allocated, by kind.

    memory: the expert memory, whose stash may own pages.
    """
    pages = {"device_pages": 0, "host_pages": 0, "scratch": 0}
    if memory is not None and memory.stash is not None:
        pages = memory.stash.pool.num_bytes
    return {
        "parameters": parameter_bytes(model),
        "gradients": bytes_of(gradient_tensors(model)),
        **optimizer.state_bytes,
        "pages": pages["device_pages"] + pages["scratch"],
        "host_pages": pages["host_pages"],
    }


@dataclass(frozen=True)
class PersistentFit:
    """Whether weights, gradients and optimizer states fit the device, and a line of text with the result."""

    fits: bool
    line: str


def persistent_fit(model: Sequence[nn.Module], run_config: RunConfig) -> PersistentFit:
    """Compares the bytes of weights, gradients and optimizer states with the memory of the device. Collective.

    Called before the optimizer is built, because its allocation may fail. The optimizer's states are estimated. The
    largest sum of all ranks is compared with this rank's device. Ranks on CPUs share the memory of their machine.
    """
    device = default_device()
    needed = parameter_bytes(model) + bytes_of(gradient_tensors(model))
    chunks = [chunk for chunk in model if isinstance(chunk, _BaseDataParallel)]
    if not run_config.training.skip_train:
        config = run_config.optimizer
        states = state_bytes_of(chunks, config)
        needed += int((states.masters + states.moments) * (1 - config.host_fraction))
    most = torch.tensor([needed], dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    needed, memory = int(most.item()), total_memory_bytes(device)
    if device.type != "cuda":
        memory //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    name = device_name(device) if device.type == "cuda" else "this machine"
    what = "weights" if run_config.training.skip_train else "weights, gradients and optimizer states"
    more = f"--dry-run --world-size {run_config.launch.world_size}"
    found = f"{fit_in_words(name, needed, memory)} for {what}"
    if needed > memory:
        return PersistentFit(False, f"{found}; run with {more} to find flags that fit")
    return PersistentFit(True, f"{found}, without activations; see {more}")


class HeldMemoryMeter:
    """Measures the bytes allocated on all ranks, after the first step, at log lines and after the last step.

    A single measurement would not suffice, because page pools may grow.
    """

    def __init__(
        self,
        model: Sequence[nn.Module],
        optimizer: MegatronOptimizer,
        *,
        memory: ExpertMemory | None,
        groups: ProcessGroupCollection,
        device: torch.device,
        interval: int,
    ) -> None:
        self._model, self._optimizer, self._memory = model, optimizer, memory
        self._device, self._interval = device, interval
        self._stage, self._num_stages = group_rank(groups.pp), group_size(groups.pp)
        self._is_first = True

    def measure(self, report: StepReport) -> StepReport:
        """Sets held: bytes by kind of "rank_0", the "max" over all ranks, and the maximum in each of the "stages".

        The kinds are the keys of held_bytes and the peak so far: peak_allocated of torch's allocator on a GPU, or
        peak_rss of the process on a CPU.
        """
        is_due = self._is_first or report.is_last or report.iteration % self._interval == 0
        if not is_due:
            return report
        self._is_first = False
        own = held_bytes(self._model, self._optimizer, memory=self._memory)
        peak = "peak_allocated" if self._device.type == "cuda" else "peak_rss"
        own[peak] = peak_memory_bytes(self._device)
        first, *stages = self._largest_sync(list(own.values()))
        largest = [max(column) for column in zip(*stages, strict=True)]
        held = {
            "rank_0": dict(zip(own, first, strict=True)),
            "max": dict(zip(own, largest, strict=True)),
            "stages": {stage: dict(zip(own, row, strict=True)) for stage, row in enumerate(stages)},
        }
        return replace(report, held=held)

    def _largest_sync(self, own: list[int]) -> list[list[int]]:
        """Returns the first rank's numbers, followed by the maximum over the ranks of each stage. Collective.

        own: this rank's numbers. NOTE: reads the device once per log line.
        """
        rows = torch.zeros(1 + self._num_stages, len(own), dtype=torch.int64)
        rows[1 + self._stage] = torch.tensor(own, dtype=torch.int64)
        if not dist.is_initialized() or dist.get_rank() == 0:
            rows[0] = torch.tensor(own, dtype=torch.int64)
        if dist.is_initialized() and dist.get_world_size() > 1:
            rows = rows.to(self._device)
            dist.all_reduce(rows, op=dist.ReduceOp.MAX)
        return rows.tolist()


_MEMORY_WORDS = {
    "allocated": "allocated",
    "max_allocated": "max allocated",
    "reserved": "reserved",
    "max_reserved": "max reserved",
    "rss": "resident",
    "peak_rss": "max resident",
}


class MemoryMeter:
    """Measures bytes by kind on this rank at each log line, and adds notes below the first log line.

    state: planned bytes of weights, gradients and optimizer states; None for a run that only evaluates. has_notes:
    whether to add the notes.
    """

    def __init__(
        self, device: torch.device, interval: int, *, state: StateBytes | None = None, has_notes: bool = True
    ) -> None:
        self._device = device
        self._interval = interval
        self._state = state
        self._has_noted = not has_notes

    def measure(self, report: StepReport) -> StepReport:
        """Returns the report with memory use, and with notes at the first log line; unchanged between log lines."""
        if report.iteration % self._interval:
            return report
        memory = memory_bytes(self._device)
        # Memory is stable after the first steps, so later notes would repeat the first.
        notes: tuple[str, ...] = ()
        if not self._has_noted:
            notes = (memory_line(memory, report.iteration, on_gpu=self._device.type == "cuda"),)
            notes += () if self._state is None else (state_line(self._state),)
        self._has_noted = True
        return replace(report, memory=memory, notes=(*report.notes, *notes))


def memory_line(memory: dict[str, int], iteration: int, *, on_gpu: bool) -> str:
    """Formats the note about memory below the first log line: of the GPU, or of the process on a CPU."""
    kinds = [kind for kind in memory if kind.endswith("rss") != on_gpu]
    figures = [f" {_MEMORY_WORDS[kind]}: {memory[kind] / 2**20:.1f}" for kind in kinds]
    return " |".join([f"[Rank 0] (after {iteration} iterations) memory (MB)", *figures])


def state_line(state: StateBytes) -> str:
    """Formats the note about planned persistent memory."""
    figures = [f" {name}: {value / 2**20:.1f}" for name, value in asdict(state).items()]
    return " |".join(["[Rank 0] persistent memory (MB)", *figures, f" sum: {state.total / 2**20:.1f}"])


# Share of a device's memory that plans reserve for the CUDA context and for fragmentation of the allocator.
_KEPT_FREE = 0.1


def fit_in_words(device: str, num_bytes: int, memory: int) -> str:
    """Formats the result of a fit: whether num_bytes per rank fit into a device's memory, in bytes."""
    verdict = "fits" if num_bytes <= memory else "does NOT fit"
    return f"{verdict} {device}: {gib(num_bytes)} of {gib(memory)} GiB per rank"


def room_in_words(num_bytes: int, memory: int) -> str:
    """Returns a warning if num_bytes leaves little memory free. Empty if enough is left, or if it does not fit."""
    if num_bytes > memory or not is_tight(num_bytes, memory):
        return ""
    return f"less than {_KEPT_FREE:.0%} left for the CUDA context and the allocator"


def is_tight(num_bytes: int, memory: int) -> bool:
    """Returns whether num_bytes would leave less free memory than the reserved share."""
    return num_bytes > (1 - _KEPT_FREE) * memory


def gib(num_bytes: float) -> str:
    """Formats bytes in GiB, with one decimal, or four below 1 GiB."""
    size = num_bytes / 2**30
    return f"{size:.1f}" if size >= 1 else f"{size:.4f}"


def check_weights_fit(config: TransformerConfig, vocab_size: int) -> None:
    """Raises ValueError if the matrices of an average rank are larger than the memory of this machine.

    The operating system would kill such a run without a message, after minutes of building layers. Weights on a GPU are
    not checked, because the GPU's allocator fails immediately. Weights on the meta device occupy no memory.
    """
    on_host = config.use_cpu_initialization or default_device().type == "cpu"
    if not on_host or config.init_model_with_meta_device or torch.get_default_device().type == "meta":
        return
    needed = _weights_of_a_rank(config, vocab_size) * config.params_dtype.itemsize
    available = total_memory_bytes(torch.device("cpu"))
    if needed > available:
        raise ValueError(
            f"the weights of a rank require at least {needed / 2**30:.1f} GiB, but this machine has "
            f"{available / 2**30:.1f} GiB: reduce num_layers ({config.num_layers}), hidden_size "
            f"({config.hidden_size}), ffn_hidden_size ({config.ffn_hidden_size}) or the vocabulary ({vocab_size}), "
            "or increase the tensor, pipeline or expert parallel size"
        )


def _weights_of_a_rank(config: TransformerConfig, vocab_size: int) -> int:
    """Returns a lower bound for the number of weight elements of a rank, from its large matrices.

    Ignores the second matrix of gated layers, keys, values and the output layer.
    """
    hidden, tp = config.hidden_size, config.tensor_model_parallel_size
    num_experts = config.num_moe_experts or 0
    moe_layers = sum(layers_with_experts(num_experts or None, config.moe_layer_freq, num_layers=config.num_layers))
    attention = 2 * hidden * config.kv_channels * config.num_attention_heads // tp
    dense = 2 * hidden * config.ffn_hidden_size // tp
    ffn, etp = config.moe_ffn_hidden_size, config.expert_tensor_parallel_size
    experts = num_experts // config.expert_model_parallel_size * 2 * hidden * ffn // etp
    layers = config.num_layers * attention + (config.num_layers - moe_layers) * dense + moe_layers * experts
    return (layers + vocab_size * hidden // tp) // config.pipeline_model_parallel_size


# Messages of torch about CPU memory and about impossible sizes. A GPU's allocator raises OutOfMemoryError instead.
_OUT_OF_MEMORY = ("can't allocate memory", "Storage size calculation overflowed", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error means that a memory allocation failed."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _OUT_OF_MEMORY)
