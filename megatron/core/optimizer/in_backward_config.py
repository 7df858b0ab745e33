"""Settings of updates in backward; how they are done is in optimizer_in_backward.py."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from megatron.core.config_field import config_field


class InBackwardClip(Enum):
    """How gradients are clipped that are updated with before the norm of all is known."""

    EXACT = "exact"
    PREVIOUS_NORM = "previous-norm"
    PER_BUCKET = "per-bucket"


@dataclass(kw_only=True)
class InBackwardConfig:
    """Part of OptimizerConfig, which checks the values."""

    cli_group: ClassVar[str] = "optimizer"

    optimizer_in_backward: bool = config_field(
        False, help="Update each bucket of parameters as soon as its gradients are reduced, and free these."
    )
    optimizer_in_backward_clip: str | None = config_field(
        None,
        choices=tuple(clip.value for clip in InBackwardClip),
        help="How --optimizer-in-backward clips: exact keeps reduced gradients until the norm is known, previous-norm "
        "takes the norm of the step before, per-bucket that of each bucket.",
    )

    @property
    def in_backward_clip(self) -> InBackwardClip | None:
        """The policy; None: updates in backward without clipping, or none in backward."""
        chosen = self.optimizer_in_backward_clip
        return None if chosen is None else InBackwardClip(chosen)

    @property
    def holds_gradients(self) -> bool:
        """Whether nothing changes before all gradients are known, so that a step may be skipped or dropped."""
        return self.in_backward_clip is InBackwardClip.EXACT

    def validate_in_backward(
        self, optimizer: str, *, clip_grad: float, fp16: bool, offloads: bool, has_graph: bool
    ) -> None:
        """Raises ValueError for what updates in backward cannot be.

        optimizer: the name of the update rule. offloads: the host has states. has_graph: a CUDA graph has the step.
        """
        if self.optimizer_in_backward:
            self.validate_clip_in_backward(clip_grad, fp16=fp16)
            others = [
                ("optimizer is muon", optimizer == "muon", "its step takes matrices apart that lie in several buckets"),
                (
                    "optimizer_cpu_offload is set",
                    offloads,
                    "the host updates in step(), while gradients are sent to it",
                ),
                ("optimizer_cuda_graph is set", has_graph, "graphs need gradients that stand in memory"),
            ]
            for words, is_set, why in others:
                if is_set:
                    raise ValueError(
                        f"OptimizerConfig.{words} and OptimizerConfig.optimizer_in_backward is set: {why}; leave out "
                        "one of them"
                    )
        elif self.optimizer_in_backward_clip is not None:
            raise ValueError(
                f"OptimizerConfig.optimizer_in_backward_clip is {self.optimizer_in_backward_clip}: needs "
                "OptimizerConfig.optimizer_in_backward"
            )

    def validate_clip_in_backward(self, clip_grad: float, *, fp16: bool) -> None:
        """Raises ValueError where updates in backward would not clip as these two say."""
        clip = self.optimizer_in_backward_clip
        if clip_grad > 0 and clip is None:
            # What others do here is to clip nothing, silently.
            raise ValueError(
                f"OptimizerConfig.clip_grad is {clip_grad} and OptimizerConfig.optimizer_in_backward is set: the norm "
                "of all gradients is not known before backward ends, so OptimizerConfig.optimizer_in_backward_clip "
                "must be exact, previous-norm or per-bucket, or OptimizerConfig.clip_grad be 0"
            )
        if clip_grad == 0 and clip is not None and not self.holds_gradients:
            raise ValueError(
                f"OptimizerConfig.optimizer_in_backward_clip is {clip} and OptimizerConfig.clip_grad is 0, which clips "
                "nothing: give the norm to clip to, or leave OptimizerConfig.optimizer_in_backward_clip out"
            )
        if fp16 and not self.holds_gradients:
            raise ValueError(
                "OptimizerConfig.fp16 and OptimizerConfig.optimizer_in_backward are both set: a step that overflows is "
                "skipped, which is not known before backward ends, so OptimizerConfig.optimizer_in_backward_clip must "
                "be exact"
            )
