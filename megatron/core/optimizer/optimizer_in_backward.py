"""UpdatesInBackward: updates each bucket of parameters when the next one is being reduced, and frees its gradients.

It also computes the statistics of gradients (GradStats), because they are freed before the step.

The data-parallel wrapper decides when a bucket is reduced and which hooks run first; adam.py implements an update.

[Note: half a step] An update in backward cannot be undone. From an iteration's first update to the end of its step(),
parameters and states therefore belong to two different steps. If the iteration is discarded in between, they stay
inconsistent until a checkpoint is loaded, as after an error inside the update of any other step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from megatron.core.device.trace_ranges import trace_range
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.grad_hooks import ReadyBucket, ReleasedBucket
from megatron.core.distributed.layout import FlatBuffer
from megatron.core.logical_tensors import LogicalPiece
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.adam import GradScale, UpdateRule
from megatron.core.optimizer.clip_grads import (
    GradStats,
    PartialStat,
    clip_coefficient,
    clip_coefficient_on_device,
    total_norm,
)
from megatron.core.optimizer.flat_params import FlatParamRange
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import InBackwardClip, OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection, group_size

_PREVIOUS_NORM = "previous_grad_norm"
# Error raised by later calls until the step has ended; see [Note: half a step].
_UNFINISHED_STEP = (
    "parameters were updated in backward, but the step of that iteration never ended, so parameters and optimizer "
    "states belong to different steps: load a checkpoint. With OptimizerConfig.optimizer_in_backward_clip exact "
    "nothing is updated before optimizer.step()"
)


def check_in_backward(
    config: OptimizerConfig,
    wrapped: Sequence[tuple[DistributedDataParallelConfig, ModelParallelConfig]],
    *,
    groups: ProcessGroupCollection,
) -> None:
    """Raises ValueError if the settings of optimizer and wrappers contradict each other.

    The optimizer must update in backward if and only if all wrappers release gradients, and the model must allow the
    clipping policy. wrapped: the settings of each wrapper and of its model.
    """
    found = [of_wrapper.release_gradients for of_wrapper, _ in wrapped]
    if any(releases != config.optimizer_in_backward for releases in found):
        raise ValueError(
            f"OptimizerConfig.optimizer_in_backward is {config.optimizer_in_backward} and "
            f"DistributedDataParallelConfig.release_gradients of the chunks is {found}: must be the same"
        )
    if not config.optimizer_in_backward or config.holds_gradients:
        return
    clip = config.optimizer_in_backward_clip
    if any(of_model.calculate_per_token_loss for _, of_model in wrapped):
        raise ValueError(
            "ModelParallelConfig.calculate_per_token_loss and OptimizerConfig.optimizer_in_backward are both set: "
            "gradients are divided by the tokens of all microbatches and ranks, known only after backward, so "
            "OptimizerConfig.optimizer_in_backward_clip must be exact"
        )
    split = max(group_size(groups.tp), group_size(groups.expt_tp))
    if config.in_backward_clip is InBackwardClip.PER_BUCKET and split > 1:
        raise ValueError(
            f"OptimizerConfig.optimizer_in_backward_clip is {clip} and layers are split over {split} tensor-parallel "
            "ranks: their buckets have different norms, so copies of unsplit weights would diverge; must be exact or "
            "previous-norm"
        )


class HandedGrads:
    """Gradients of one buffer that were released to the optimizer and are currently held."""

    def __init__(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer
        self._grads: dict[int, Tensor] = {}

    def hold(self, bucket: int, grad: Tensor) -> None:
        """Stores a bucket's gradients. grad: [n], any float dtype, all elements of the bucket that this rank owns."""
        self._grads[bucket] = grad

    @contextmanager
    def holding(self, bucket: int, grad: Tensor) -> Iterator[None]:
        """Stores a bucket's gradients inside the block and drops them at its end. grad: [n], any float dtype."""
        self.hold(bucket, grad)
        yield
        del self._grads[bucket]

    def forget(self) -> None:
        """Releases the memory of all held gradients."""
        self._grads.clear()

    def grad_of(self, bucket: int) -> Tensor:
        """Returns the gradients of a bucket's owned span: [elements of the span], any float dtype."""
        return self._grads[bucket]


class _Iteration(Enum):
    """State of the buckets released so far in an iteration; NONE means that no bucket was released."""

    NONE = "none"
    HELD = "held"
    UPDATED = "updated"


@dataclass(frozen=True)
class _Counted:
    """Statistics of a bucket's gradients, which have already been freed. zeros: None if zeros are not counted."""

    norms: PartialStat
    zeros: PartialStat | None


class UpdatesInBackward(GradStats):
    """Consumes the buckets that chunks release, and computes the statistics of their gradients. In an iteration:

    1. `take` receives each bucket during backward, or when gradients are finalized; the first call copies the learning
       rates;
    2. it measures the bucket's gradients and updates its ranges by the rules; with the policy `exact` it holds this
       rank's part instead;
    3. step() combines the measured norms, and with `exact` clips and updates as any other step does.

    Norms and unclipped updates are bit-identical to training without this class. See [Note: half a step]. handed: the
    released gradients of each buffer of the model. rules: the rules of the optimizer that is attached later, none of
    them collective. The other arguments are described in GradStats.
    """

    _optimizer: MegatronOptimizer

    def __init__(
        self,
        config: OptimizerConfig,
        groups: ProcessGroupCollection,
        handed: Mapping[FlatBuffer, HandedGrads],
        *,
        rules: Sequence[UpdateRule],
        ranges: Sequence[FlatParamRange],
        logical_pieces: Mapping[str, list[LogicalPiece]],
        device: torch.device,
    ) -> None:
        super().__init__(config, groups, list(handed), ranges=ranges, logical_pieces=logical_pieces, device=device)
        # Keyed by object, because wrappers pass the same buffers under a different type.
        self._handed: dict[object, HandedGrads] = {one.buffer: one for one in handed.values()}
        self._rules = list(rules)
        self._ranges_in: dict[tuple[FlatBuffer, int], list[FlatParamRange]] = {}
        for param_range in ranges:
            self._ranges_in.setdefault((param_range.buffer, param_range.bucket), []).append(param_range)
        self._clip = config.in_backward_clip
        self._iteration = _Iteration.NONE
        self._taken: set[tuple[FlatBuffer, int]] = set()
        self._counted: dict[tuple[FlatBuffer, int], _Counted] = {}
        # Norm of the last step that updated parameters; None before the first update.
        self._previous_norm: float | None = None

    def attach(self, optimizer: MegatronOptimizer, chunks: Sequence[_BaseDataParallel]) -> None:
        """Subscribes to the buckets that chunks release, which are then updated by `optimizer`."""
        self._optimizer = optimizer
        for chunk in chunks:
            chunk.set_consumer(self)

    # Called by the wrapper.

    def begin(self) -> None:
        """Begins an iteration, possibly a retry, and drops gradients held from the previous one."""
        self.forget()

    @trace_range("UpdatesInBackward.take")
    def take(self, bucket: ReadyBucket, place: ReleasedBucket) -> None:
        """Updates the ranges of a bucket, or holds its gradients; called once per iteration and bucket, on all ranks.

        The caller has disabled autograd. Collective with the policy `per-bucket`. Raises RuntimeError and ValueError
        under the same conditions as a step.
        """
        if self._iteration is _Iteration.NONE:
            self._check_policy()
            self._optimizer.prepare_update()
            self._iteration = _Iteration.HELD if self._must_hold else _Iteration.UPDATED
        handed, index = self._handed[place.buffer], place.layout.index
        key = handed.buffer, index
        assert key not in self._taken, "a bucket was released twice in one iteration"
        self._taken.add(key)
        if self._iteration is _Iteration.HELD:
            handed.hold(index, bucket.keep())
            return
        # Before the first parameter changes. The update in step() calls mark_whole.
        self._optimizer.mark_half_done(_UNFINISHED_STEP)
        ranges = self._ranges_in.get(key, [])
        with handed.holding(index, bucket.grad):
            # Measured first, because the kernel may overwrite gradients with scaled ones.
            zeros = self.zeros_of(ranges) if self._config.log_num_zeros_in_grad else None
            self._counted[key] = _Counted(self.norms_of(ranges), zeros)
            scale = self._scale_of(bucket.grad, handed.buffer)
            for rule in self._rules:
                rule.update(scale, frozenset(ranges))
        bucket.note_written()

    # Called by the optimizer's step.

    @property
    def is_updated(self) -> bool:
        """Whether `take` has already prepared the step and updated parameters."""
        return self._iteration is _Iteration.UPDATED

    def norm(self) -> Tensor:
        """Returns the 2-norm of all reduced gradients: [], fp64. Collective.

        Raises RuntimeError if a bucket was not released to the optimizer yet.
        """
        missing = [one for key, ranges in self._ranges_in.items() if key not in self._taken for one in ranges]
        if missing:
            raise RuntimeError(
                f"optimizer.step() was called before the gradient of {missing[0].params[0].name} was released: with "
                "OptimizerConfig.optimizer_in_backward call zero_grad, backward and finalize_model_grads before each "
                "step"
            )
        if not self.is_updated:
            return super().norm()
        return self.join_norms([counted.norms for counted in self._in_order()])

    def count_zeros(self) -> Tensor:
        """Returns the number of exact zeros in all gradients of all ranks: [], int64. Collective."""
        if not self.is_updated:
            return super().count_zeros()
        return self.join_zeros([one.zeros for one in self._in_order() if one.zeros is not None])

    def end_step(self, grad_norm: float) -> None:
        """Records the norm for the next step. Held gradients were freed by mark_whole."""
        self._previous_norm = grad_norm

    def skip_step(self, grad_norm: float) -> None:
        """Frees held gradients. Raises RuntimeError if parameters have already been updated."""
        if self.is_updated:
            raise RuntimeError(
                f"the norm of all gradients is {grad_norm}, but parameters were already updated in backward: load a "
                "checkpoint. With OptimizerConfig.optimizer_in_backward_clip exact such steps are skipped, and "
                "DistributedDataParallelConfig.check_for_nan_in_grad names the rank and the parameters"
            )
        self.forget()

    def forget(self) -> None:
        """Drops held gradients and the statistics of released buckets."""
        for grads in self._handed.values():
            grads.forget()
        self._taken.clear()
        self._counted.clear()
        self._iteration = _Iteration.NONE

    def state_dict(self) -> dict[str, Any]:
        """Returns the norm that clips the next step with the policy `previous-norm`; otherwise an empty dict."""
        return {_PREVIOUS_NORM: self._previous_norm} if self._clip is InBackwardClip.PREVIOUS_NORM else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the norm that clips the next step. If it is missing, the first step clips exactly."""
        self._previous_norm = state_dict.get(_PREVIOUS_NORM)

    # Inside.

    @property
    def _must_hold(self) -> bool:
        if self._clip is InBackwardClip.PREVIOUS_NORM:
            return self._previous_norm is None
        return self._clip is InBackwardClip.EXACT

    def _check_policy(self) -> None:
        """Raises ValueError if a script has changed settings that this object was built with."""
        self._config.validate_clip_in_backward(self._config.clip_grad, fp16=self._config.fp16)
        if self._config.in_backward_clip is not self._clip:
            before = None if self._clip is None else self._clip.value
            raise ValueError(
                f"OptimizerConfig.optimizer_in_backward_clip is {self._config.optimizer_in_backward_clip} and was "
                f"{before} when the optimizer was built: must not change; build another optimizer instead"
            )

    def _scale_of(self, grad: Tensor, buffer: FlatBuffer) -> GradScale:
        """Returns the divisor that clips a bucket's gradients. grad: [n], floating point."""
        if self._clip is None:
            return GradScale(1.0)
        if self._clip is InBackwardClip.PREVIOUS_NORM:
            assert self._previous_norm is not None, "without a previous norm gradients must be held"
            return GradScale(1.0 / clip_coefficient(self._config.clip_grad, self._previous_norm))
        group = buffer.data_parallel_group if buffer.is_sharded else None
        # The norm of the whole bucket, so that a tied weight's copy on another stage is clipped identically.
        norm = total_norm([grad], 2, groups=[group], accumulate_in=self._norm_dtype)
        # Divided on the device, so that the host does not wait during backward.
        return GradScale(clip_coefficient_on_device(self._config.clip_grad, norm).reciprocal().float())

    def _in_order(self) -> list[_Counted]:
        """Returns the statistics of all buckets in the order of the ranges.

        If there are no ranges, returns the statistics of an empty list, which still determine a device.
        """
        counted = [self._counted[key] for key in self._ranges_in]
        return counted or [_Counted(self.norms_of([]), self.zeros_of([]))]
