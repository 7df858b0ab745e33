"""Determines whether a plan fits into the device's memory, and otherwise finds flags that make it fit.

The quick plan (stage_costs.py) chooses flags, and a full plan of the changed command line confirms them.
layout_search.py compares other sizes of the layout.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from itertools import product

from torch import nn

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.planner.layer_costs import ModelCosts, measure_memory
from megatron.planner.layout_space import EXPERT_FLAGS, Experts, Recompute, recompute_flags, recompute_modules
from megatron.planner.plan import ForwardStep, Plan
from megatron.planner.stage_costs import quick_stages
from megatron.training.command_line.errors import CommandLineError
from megatron.training.compute.devices import Device
from megatron.training.config import RunConfig
from megatron.training.meters.memory import fit_in_words, gib, is_tight, room_in_words

# Maximum number of changes that are planned in full, each of which takes as long as the first plan. The change with the
# smallest estimate may be planned in addition.
_MAX_PLANNED = 4


@dataclass(frozen=True)
class Change:
    """Words added to a command line, and the resulting peak bytes of the fullest rank."""

    words: tuple[str, ...]
    peak: int


@dataclass(frozen=True)
class Fit:
    """Comparison of the peak memory of a plan's fullest rank with the memory of a device, in bytes.

    place: names the fullest stage and rank; empty if all stages have the same peak. change: flags that make the plan
    fit. least: if no flags make it fit, the flags with the smallest peak. advice: a suggestion for that case.
    """

    device: str
    memory: int
    peak: int
    place: str = ""
    change: Change | None = None
    least: Change | None = None
    advice: str = ""

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the memory of the device."""
        return self.peak <= self.memory

    @property
    def line(self) -> str:
        """The comparison as one line of text, with the flags that make the plan fit, or with advice."""
        found = ", ".join(filter(None, [fit_in_words(self.device, self.peak, self.memory), self.place]))
        if self.fits:
            room = room_in_words(self.peak, self.memory)
            return f"{found} ({room})" if room else found
        if self.change is not None:
            size = f"{gib(self.change.peak)} GiB"
            room = room_in_words(self.change.peak, self.memory)
            return f"{found}; fits with {' '.join(self.change.words)} ({', '.join(filter(None, [size, room]))})"
        if self.least is None:
            return f"{found}; no flag lowers it without changing the training result: {self.advice}"
        words = " ".join(self.least.words)
        return (
            f"{found}; even with {words}, the smallest option found, it needs {gib(self.least.peak)} GiB: {self.advice}"
        )


@dataclass(frozen=True)
class _Candidate:
    """A changed command line. peak: the quick plan's estimate, or None if it does not support the flags."""

    words: tuple[str, ...]
    run_config: RunConfig
    peak: int | None


@dataclass(frozen=True)
class _Choice:
    """Words that change one setting. cost: position in order of slowdown, from 1; 0 means that nothing changes."""

    cost: int = 0
    words: tuple[str, ...] = ()


class Planner:
    """Plans the run of a command line, and the same run with additional flags.

    reread: appends words to the command line and returns its settings. plan: plans a run with given settings.
    """

    def __init__(
        self,
        *,
        reread: Callable[[Sequence[str]], RunConfig],
        plan: Callable[[RunConfig], Plan],
        model_provider: Callable[..., nn.Module],
        forward_step: ForwardStep,
    ) -> None:
        self.plan = plan
        self._reread, self._provider, self._forward_step = reread, model_provider, forward_step
        self._costs: dict[tuple[object, ...], ModelCosts] = {}

    def changed(self, words: Sequence[str]) -> RunConfig | None:
        """Returns the settings with these words appended, or None if the run rejects them."""
        try:
            # Messages about the command line were printed when it was first parsed.
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                return self._reread(words)
        except CommandLineError:
            return None

    def quick_peak(self, run_config: RunConfig, plan: Plan) -> int | None:
        """Estimates the peak bytes with changed settings, or returns None if the quick plan does not support them.

        plan: the plan without the change, which provides the temporary memory of passes and updates.
        """
        try:
            stages = quick_stages(run_config, self._costs_of(run_config))
        except ValueError:
            return None
        return max(
            replace(one, temporary=before.memory.temporary).peak
            for one, before in zip(stages, plan.stages, strict=True)
        )

    def _costs_of(self, run_config: RunConfig) -> ModelCosts:
        """Measures the memory of the model's layers, cached by the flags that change activations."""
        transformer = run_config.transformer
        key = (
            *(transformer.recompute_granularity, transformer.recompute_method, transformer.recompute_num_layers),
            *(tuple(transformer.recompute_modules or ()), transformer.moe_paged_stash),
        )
        if key not in self._costs:
            self._costs[key] = measure_memory(run_config, self._provider, forward_step=self._forward_step)
        return self._costs[key]


def fit_of(plan: Plan, device: Device) -> Fit:
    """Compares the fullest rank of a plan with the memory of the device."""
    fullest = max(plan.stages, key=lambda stage: stage.memory.peak)
    differ = len({stage.memory.peak for stage in plan.stages}) > 1
    place = f"most on stage {fullest.stage} (rank {fullest.rank})" if differ else ""
    return Fit(device.name, device.memory_bytes, fullest.memory.peak, place)


def with_change(fit: Fit, plan: Plan, run_config: RunConfig, planner: Planner) -> Fit:
    """Completes a fit with the first change that makes the plan fit, or with the change of least memory and advice.

    Prefers changes that leave a tenth of the memory free. Plans in full only the first changes that fit according to
    the quick plan, and the change with the smallest estimate.
    """
    candidates = []
    for words in changes_of(run_config):
        changed = planner.changed(words)
        if changed is not None:
            candidates.append(_Candidate(words, changed, planner.quick_peak(changed, plan)))
    hopeful = [one for one in candidates if one.peak is None or one.peak <= fit.memory]
    hopeful.sort(key=lambda one: one.peak is not None and is_tight(one.peak, fit.memory))
    planned: list[Change] = []
    for one in hopeful[:_MAX_PLANNED]:
        planned += _planned(one, planner)
        if planned and not is_tight(planned[-1].peak, fit.memory):
            return replace(fit, change=planned[-1])
    if candidates and all(one.peak > fit.memory for one in planned):
        # Without estimates, this is the last candidate, which changes the most settings.
        smallest = min(reversed(candidates), key=lambda one: fit.memory if one.peak is None else one.peak)
        if smallest not in hopeful[:_MAX_PLANNED]:
            planned += _planned(smallest, planner)
    fitting = [one for one in planned if one.peak <= fit.memory]
    if fitting:
        return replace(fit, change=fitting[0])
    least = min(planned, key=lambda one: one.peak, default=None)
    return replace(fit, least=least if least and least.peak < fit.peak else None, advice=_advice(run_config))


def _planned(one: _Candidate, planner: Planner) -> list[Change]:
    """Plans a candidate in full. Returns the change with its peak, or an empty list if the run cannot be built."""
    try:
        stages = planner.plan(one.run_config).stages
    except ValueError:
        return []
    return [Change(one.words, max(stage.memory.peak for stage in stages))]


def changes_of(run_config: RunConfig) -> Iterator[tuple[str, ...]]:
    """Yields combinations of flags that reduce a run's memory without changing the training result.

    Sorted by use of host memory (none first, because its size is unknown), number of changes, and total cost. The run
    may reject some combinations.
    """
    if run_config.training.skip_train:
        return
    transformer = run_config.transformer
    # Offloading is last, where order() finds it.
    kinds = [_sharding(run_config), _experts(transformer), _recompute(transformer), _offload(run_config.optimizer)]

    def order(chosen: tuple[_Choice, ...]) -> tuple[int, int, int]:
        return chosen[-1].cost, sum(one.cost > 0 for one in chosen), sum(one.cost for one in chosen)

    for chosen in sorted(product(*([_Choice(), *kind] for kind in kinds)), key=order)[1:]:
        yield tuple(word for one in chosen for word in one.words)


def _sharding(run_config: RunConfig) -> list[_Choice]:
    transformer = run_config.transformer
    of_replica = transformer.tensor_model_parallel_size * transformer.pipeline_model_parallel_size
    ranks = run_config.launch.world_size // of_replica
    if ranks == 1 or run_config.sharded_parameters.use_torch_fsdp2:
        return []
    found = [] if run_config.ddp.use_distributed_optimizer else [_Choice(1, ("--use-distributed-optimizer",))]
    if run_config.optimizer.optimizer == "adam":
        # ZeRO-2 frees gradients during backward only if their reduction is overlapped.
        overlap = () if run_config.ddp.overlap_grad_reduce else ("--overlap-grad-reduce",)
        found.append(_Choice(2, ("--optimizer", "distributed_fused_adam", *overlap)))
    return found


def _experts(config: TransformerConfig) -> list[_Choice]:
    # Experts that drop tokens use other buffers.
    drops_tokens = config.moe_expert_capacity_factor is not None
    if config.num_moe_experts is None or config.moe_paged_stash or drops_tokens:
        return []
    has_buffers = config.moe_expert_rank_capacity_factor is not None
    return [_Choice(4, ("--moe-paged-stash",) if has_buffers else EXPERT_FLAGS[Experts.PAGED])]


def _recompute(config: TransformerConfig) -> list[_Choice]:
    """Returns recompute choices, each including the parts already recomputed. Whole layers only if none are given."""
    if config.recompute_granularity == "full":
        return []
    given = tuple(config.recompute_modules or ()) if config.recompute_granularity == "selective" else ()
    parts = recompute_modules(config)
    found = []
    for cost, choice in ((3, Recompute.CHEAP), (5, Recompute.FEED_FORWARD)):
        modules = tuple(dict.fromkeys([*given, *parts[choice]]))
        if modules != given:
            found.append(_Choice(cost, recompute_flags(choice, modules)))
    return found if given else [*found, _Choice(6, recompute_flags(Recompute.LAYERS, ()))]


def _offload(config: OptimizerConfig) -> list[_Choice]:
    # Activation offloading is not offered, because recomputing layers saves more device memory.
    is_refused = config.optimizer_cpu_offload or config.optimizer == "muon"
    return [] if is_refused else [_Choice(7, ("--optimizer-cpu-offload",))]


def _advice(run_config: RunConfig) -> str:
    sizes = ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"]
    sizes += ["--expert-model-parallel-size"] if run_config.transformer.num_moe_experts is not None else []
    model = "FLAGS" if run_config.command_line.model is None else f"--model {run_config.command_line.model}"
    return (
        f"use more GPUs or a larger {', '.join(sizes[:-1])} or {sizes[-1]} "
        f"(tools/plan_layout.py {model} --gpus N finds a layout)"
    )
