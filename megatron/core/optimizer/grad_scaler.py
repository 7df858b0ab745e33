"""Loss scales for fp16: ConstantGradScaler, and DynamicGradScaler, which reacts to overflow.

The classes only track the scale; optimizer.py multiplies losses and divides gradients by it.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch


class MegatronGradScaler(ABC):
    """Base class of loss scales, which multiply the loss of the next step and may react to overflow.

    Subclasses change the number `_scale`.
    """

    def __init__(self, initial_scale: float) -> None:
        if not isinstance(initial_scale, int | float) or not 0 < initial_scale < math.inf:
            raise ValueError(f"initial_scale is {initial_scale!r}: must be a finite number above 0")
        self._scale = float(initial_scale)

    @property
    def value(self) -> float:
        """Loss scale of the next step."""
        return float(self._scale)

    @property
    def scale(self) -> torch.Tensor:
        """Loss scale of the next step: [], fp32, on the CPU."""
        # A tensor, because scripts written for Megatron call .item() on it.
        return torch.tensor(self.value, dtype=torch.float32)

    @property
    def inv_scale(self) -> torch.Tensor:
        """Inverse loss scale, by which gradients are multiplied: [], fp32, on the CPU."""
        return torch.tensor(1.0 / self.value, dtype=torch.float32)

    @abstractmethod
    def update(self, found_inf: bool | torch.Tensor) -> None:
        """Records a step's outcome. found_inf: whether gradients overflowed on any rank, a bool or [1], any dtype."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state to store in a checkpoint, as JSON values."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""


class ConstantGradScaler(MegatronGradScaler):
    """A loss scale that never changes."""

    def update(self, found_inf: bool | torch.Tensor) -> None:
        """Ignores found_inf, a bool or [1], any dtype, because the user chose the scale."""

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty dict, because the configuration sets the scale."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing, because the configuration sets the scale."""


class DynamicGradScaler(MegatronGradScaler):
    """A loss scale that grows after `growth_interval` steps without overflow and shrinks after `hysteresis` overflows.

    The count of overflows is reset only when the scale grows, as in Megatron. Dynamic loss scaling is from Micikevicius
    et al., 2018, Mixed Precision Training.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
    ):
        _check_finite(
            initial_scale=initial_scale,
            min_scale=min_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
        )
        _check(min_scale > 0, "min_scale", value=min_scale, wanted="more than 0")
        _check(
            initial_scale >= min_scale, "initial_scale", value=initial_scale, wanted=f"at least min_scale ({min_scale})"
        )
        _check(growth_factor > 1, "growth_factor", value=growth_factor, wanted="more than 1")
        _check(0 < backoff_factor < 1, "backoff_factor", value=backoff_factor, wanted="between 0 and 1")
        _check(growth_interval > 0, "growth_interval", value=growth_interval, wanted="more than 0")
        _check(hysteresis > 0, "hysteresis", value=hysteresis, wanted="more than 0")
        super().__init__(initial_scale)
        self._min_scale = float(min_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._hysteresis = hysteresis
        # Both counters are in checkpoints, because a resumed run must double its scale at the same step.
        self._clean_steps = 0
        self._overflows_left = hysteresis

    def update(self, found_inf: bool | torch.Tensor) -> None:
        """Records a step's outcome. found_inf: whether gradients overflowed on any rank, a bool or [1], any dtype."""
        if found_inf:
            # Only consecutive steps without overflow count.
            self._clean_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self._scale = max(self._scale * self._backoff_factor, self._min_scale)
            return
        self._clean_steps += 1
        # More than the interval after a resume with a shorter one.
        if self._clean_steps >= self._growth_interval:
            self._clean_steps = 0
            self._overflows_left = self._hysteresis
            # No upper limit is needed: the next overflow reduces the scale.
            self._scale *= self._growth_factor

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and its counters under Megatron's names, as JSON values."""
        return {
            "scale": self._scale,
            "growth_tracker": self._clean_steps,
            "hysteresis_tracker": self._overflows_left,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the scale and its counters; limits come from the configuration."""
        if not state_dict:
            return  # saved by a run with a constant scale
        # JSON may have turned it into an integer.
        self._scale = max(float(state_dict["scale"]), self._min_scale)
        self._clean_steps = int(state_dict["growth_tracker"])
        # The limit applies to a resumed run with a lower hysteresis from the first step on.
        self._overflows_left = min(int(state_dict["hysteresis_tracker"]), self._hysteresis)


def _check_finite(**values: object) -> None:
    """Raises ValueError if a keyword argument is not a finite number."""
    for name, value in values.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}: must be a finite number")


def _check(holds: bool, name: str, *, value: float, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}: must be {wanted}")
