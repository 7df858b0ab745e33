"""Builds the CUDA graphs of a run's steps, and restores the host's state after each replay.

graphs/capture.py defines participants. full_cuda_graph.py captures whole passes, and transformer/cuda_graphs.py parts
of layers.
"""

import gc
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.device import CudaGraphs, default_device
from megatron.core.distributed import DistributedDataParallel, GraphedReductions
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.graphs.capture import GraphDevice, GraphParticipant
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.timers import Timers
from megatron.core.transformer.cuda_graph_config import graphed_modules
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.moe.paged_stash import PagedStash
from megatron.core.transformer.moe_config import layers_with_experts
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.command_line.errors import CommandLineError
from megatron.training.config import RunConfig
from megatron.training.step.expert_memory import ExpertMemory
from megatron.training.step.update import DeferredFinalizer, GraphedUpdate, StepUpdate


def build_step_graph(
    run_config: RunConfig,
    model: Sequence[nn.Module],
    *,
    device: GraphDevice | None,
    finalize: DeferredFinalizer,
    update: StepUpdate | None,
    timers: Timers,
    memory: ExpertMemory | None,
) -> FullCudaGraphWrapper | CudaGraphManager | None:
    """Builds the object that captures training steps, or parts of layers, as CUDA graphs.

    Returns None unless the flags request graphs.
    """
    if device is None:
        return None
    graph: FullCudaGraphWrapper | CudaGraphManager
    config = run_config.transformer
    if config.cuda_graph_impl == "local":
        graph = _graphed_parts(config, model, device=device, memory=memory)
    else:
        graph = _graphed_passes(
            config, model, device=device, finalize=finalize, update=update, timers=timers, memory=memory
        )
    if memory is not None:
        memory.release_graphs = partial(_release, graph)
    return graph


def _release(graph: FullCudaGraphWrapper | CudaGraphManager) -> None:
    """Drops the graphs, which hold the last references to the stash and the pages that they use."""
    graph.drop_graphs()
    # Graphs in a reference cycle would otherwise keep their memory while new pages are allocated.
    gc.collect()


def _graphed_passes(
    config: TransformerConfig,
    model: Sequence[nn.Module],
    *,
    device: GraphDevice,
    finalize: DeferredFinalizer,
    update: StepUpdate | None,
    timers: Timers,
    memory: ExpertMemory | None,
) -> FullCudaGraphWrapper:
    chunks = [chunk for chunk in model if isinstance(chunk, DistributedDataParallel)]
    participants: list[GraphParticipant] = [GraphedPasses(finalize, timers), GraphedReductions(chunks)]
    follow_up = None
    if isinstance(update, GraphedUpdate):
        follow_up = update.follow
        participants.append(update)
    if memory is not None:
        # Last, so that its context exits first and the stash's copies end before gradients are reduced.
        participants.append(GraphedExperts(memory))
    return FullCudaGraphWrapper(
        get_forward_backward_func(),
        config.cuda_graph_warmup_steps,
        device=device,
        participants=participants,
        follow_up=follow_up,
    )


def _graphed_parts(
    config: TransformerConfig, model: Sequence[nn.Module], *, device: GraphDevice, memory: ExpertMemory | None
) -> CudaGraphManager:
    has_experts = layers_with_experts(config.num_moe_experts, config.moe_layer_freq, num_layers=config.num_layers)
    modules = graphed_modules(config.cuda_graph_modules, has_experts)
    manager = CudaGraphManager(
        get_forward_backward_func(),
        config.cuda_graph_warmup_steps,
        device=device,
        fingerprint=lambda: None if memory is None else memory.epoch,
    )
    for chunk in model:
        wait = None
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            wait = partial(chunk.wait_params, prefetch=True)
        manager.graph_layers(chunk, modules=modules, wait_for_params=wait)
    return manager


def build_step_update(
    run_config: RunConfig,
    finalize: DeferredFinalizer,
    *,
    optimizer: MegatronOptimizer | None,
    timers: Timers,
    memory: ExpertMemory | None,
) -> StepUpdate | None:
    """Builds the object that updates a run's parameters. Returns None for a run without an optimizer."""
    if optimizer is None:
        return None
    if not run_config.optimizer.optimizer_cuda_graph:
        return StepUpdate(finalize, optimizer, timers=timers)
    if not finalize.is_default:
        raise ValueError(
            "--optimizer-cuda-graph is given, but the model's configuration has a finalize_model_grads_func, "
            "which may wait for the device: leave one of them out"
        )
    return GraphedUpdate(
        finalize,
        optimizer,
        timers=timers,
        overflow_flags=None if memory is None else memory.overflow_flags,
        checks_losses=run_config.training.check_for_nan_in_loss_and_grad,
    )


def graph_device() -> GraphDevice:
    """Returns the GraphDevice of this process's GPU, with the model's random-number streams.

    Raises CommandLineError without a GPU.
    """
    if default_device().type != "cuda":
        raise CommandLineError(
            "--cuda-graph-impl is given, but this process has no GPU. Leave it out, or set it to none, to train "
            "here with the same results; run tools/check_capture.py with these flags to check whether a GPU could "
            "capture them"
        )
    return CudaGraphs(default_device(), generators=get_cuda_rng_tracker().generators)


class GraphedPasses(GraphParticipant):
    """Restores the arguments of gradient finalization after a replay, and pauses timers during a capture.

    A graph records neither of them. StepRunner discards the gradients of a retried step.
    """

    def __init__(self, finalize: DeferredFinalizer, timers: Timers) -> None:
        self._finalize, self._timers = finalize, timers

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with self._timers.paused():
            yield

    def captured(self) -> tuple[Any, ...]:
        """Returns the arguments of gradient finalization, which include tensors of the graph."""
        return self._finalize.handed_over

    def replayed(self, account: tuple[Any, ...]) -> None:
        self._finalize.replayed(account)


@dataclass(frozen=True)
class _Account:
    """State of ExpertStep after a capture.

    passes: numbers of the layers whose forwards ran, in order. rows: live rows of each forward, [n], int64, on the
    device. stash: referenced so that its memory, which the graph reads, lives as long as the graph.
    """

    passes: list[int]
    rows: Tensor
    stash: PagedStash | None


class GraphedExperts(GraphParticipant):
    """Restores the state of ExpertStep after a replay. Call ExpertMemory.begin_step before each capture and replay."""

    def __init__(self, memory: ExpertMemory) -> None:
        self._memory = memory

    def fingerprint(self) -> Hashable:
        """Returns the expert memory's epoch, which changes when buffers or pools change."""
        return self._memory.epoch

    @contextmanager
    def capturing(self) -> Iterator[None]:
        stash = self._memory.stash
        if stash is None:
            yield
        else:
            with stash.captured():
                yield

    def captured(self) -> _Account:
        step = self._memory.step
        return _Account(list(step.passes), step.rows, step.stash)

    def replayed(self, account: _Account) -> None:
        self._memory.step.passes, self._memory.step.rows = list(account.passes), account.rows
