"""GradChecks: this rank's gradients looked at before they are reduced, after which nobody can tell whose one was.

Measured on the device without waiting for it; raises nothing itself, since all ranks must.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

# So many times the largest norm that a parameter's gradient ever had, and steps before a norm means anything.
_LARGE_FACTOR, _LARGE_AFTER_STEPS = 10.0, 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """Measurements of one iteration's gradients, on the device. by_bucket: names, and [1 or 2, names], fp64.

    finite_so_far: by name, after each gradient of a parameter, whether its sum is finite: [], bool.
    """

    by_bucket: list[tuple[list[str], torch.Tensor]] = field(default_factory=list)
    finite_so_far: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class GradChecks:
    """Finds gradients that are not finite (`nan`), and warns of those that are far larger than before (`large`).

    each: looks at the sums after every gradient that comes, to tell with which of them it began. Else only at those of
    `probe`, one small parameter near the model's input, which costs next to nothing: what goes wrong behind it comes
    down to it.
    """

    def __init__(self, *, nan: bool, large: bool, each: bool = False, probe: nn.Parameter | None = None) -> None:
        self._nan, self._large, self._each, self._probe = nan, large, each, probe
        self._measured = Measured()
        # The largest norm of each parameter so far, and in how many steps.
        self._largest: dict[str, tuple[float, int]] = {}

    @classmethod
    def of(cls, config: DistributedDataParallelConfig, module: nn.Module | None = None) -> "GradChecks | None":
        """Returns the checks that the settings enable, or None. module: a model that accumulates over microbatches."""
        if not (config.check_for_nan_in_grad or config.check_for_large_grads):
            return None
        params = () if module is None else module.parameters()
        # A norm's weight or a bias.
        probe = next((param for param in params if param.requires_grad and param.ndim == 1), None)
        return cls(
            nan=config.check_for_nan_in_grad, large=config.check_for_large_grads, each=config.ddp_debug, probe=probe
        )

    def looks_at(self, param: nn.Parameter) -> bool:
        """Whether the sum of this parameter's gradients, any shape, is to be measured after each of them."""
        return self._nan and (self._each or param is self._probe)

    def measure(self, named_grads: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Notes a number or two of each gradient: any shapes, floating point, on one device."""
        # An empty one has no largest element.
        named_grads = [(name, grad) for name, grad in named_grads if grad.numel()]
        if not named_grads:
            return
        # Extremes, NaN if an element is, and not sums: those of finite elements overflow.
        lows, highs = zip(*(torch.aminmax(grad) for _, grad in named_grads))
        numbers = [torch.maximum(-torch.stack(lows), torch.stack(highs))]
        if self._large:
            numbers.append(torch.stack([torch.linalg.vector_norm(grad, dtype=_wide(grad)) for _, grad in named_grads]))
        self._measured.by_bucket.append(([name for name, _ in named_grads], torch.stack([n.double() for n in numbers])))

    def measure_sum(self, name: str, total: torch.Tensor) -> None:
        """Notes whether the sum of a parameter's gradients is finite so far: any shape, floating point."""
        self._measured.finite_so_far.setdefault(name, []).append(total.isfinite().all())

    def take_measured(self) -> Measured:
        """Returns and clears the measurements of passes that a CUDA graph captures."""
        measured = self._measured
        self.forget()
        return measured

    def restore_measured(self, measured: Measured) -> None:
        """Restores the measurements of `take_measured`, whose tensors a graph replay has written."""
        self._measured = measured

    def forget(self) -> None:
        """Drops what was measured."""
        self._measured = Measured()

    def non_finite_sync(self) -> list[str]:
        """Names of the measured gradients that are not finite; forgets what was measured."""
        if not self._measured.by_bucket:
            return []
        # NOTE: reads the device, once a step.
        largest_elements, *norms = torch.cat([numbers for _, numbers in self._measured.by_bucket], dim=1).tolist()
        names = [name for names, _ in self._measured.by_bucket for name in names]
        bad = [name for name, element in zip(names, largest_elements) if not element < float("inf")]
        # New lists: a graph may keep the old ones. What is kept tells of late gradients, which are measured apart.
        self._measured = Measured(finite_so_far=self._measured.finite_so_far if bad or self._each else {})
        if norms and not bad:
            for name, norm in zip(names, norms[0]):
                self._compare(name, norm)
        # First what says when it began: a message has room for few names.
        bad = sorted(dict.fromkeys(bad), key=lambda name: name not in self._measured.finite_so_far)
        return [self._since_when_sync(name) for name in bad] if self._nan else []

    def _since_when_sync(self, name: str) -> str:
        # NOTE: reads the device, when there is an error to tell.
        so_far = [bool(finite) for finite in self._measured.finite_so_far.get(name, [])]
        if all(so_far):
            return name
        return f"{name} (since microbatch {so_far.index(False)}, of {len(so_far)} that gave it a gradient)"

    def _compare(self, name: str, norm: float) -> None:
        largest, steps = self._largest.get(name, (0.0, 0))
        if steps >= _LARGE_AFTER_STEPS and norm > _LARGE_FACTOR * largest > 0:
            logger.warning(
                "gradient norm of %s is %.3g: more than ten times the largest so far, %.3g", name, norm, largest
            )
        self._largest[name] = (max(largest, norm), steps + 1)


def _wide(grad: torch.Tensor) -> torch.dtype:
    # fp16 has no room for a sum of squares.
    return torch.float32 if grad.dtype.itemsize < 4 else grad.dtype
