"""Loss scales for fp16: constant, and one that follows overflow.

They hold numbers only; who multiplies losses and divides gradients is optimizer.py.
"""

from typing import Any, Protocol


class GradScaler(Protocol):
    """What the optimizer needs of a loss scale."""

    @property
    def scale(self) -> float: ...
    def update(self, found_inf: bool) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class ConstantGradScaler:
    """A loss scale that overflow does not change."""

    def __init__(self, initial_scale: float):
        if initial_scale <= 0:
            raise ValueError(f"initial_scale is {initial_scale}: must be more than 0")
        self._scale = float(initial_scale)

    @property
    def scale(self) -> float:
        """Factor of the loss."""
        return self._scale

    def update(self, found_inf: bool) -> None:
        """Does nothing: the user chose the scale."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep: the scale comes from the configuration."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the scale of the configuration."""


class DynamicGradScaler:
    """A loss scale that grows after `growth_interval` clean steps and backs off after `hysteresis` overflows.

    The count of overflows starts anew only when the scale grows, as Megatron's does.
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
        _check(min_scale > 0, "min_scale", value=min_scale, wanted="more than 0")
        _check(
            initial_scale >= min_scale, "initial_scale", value=initial_scale, wanted=f"at least min_scale ({min_scale})"
        )
        _check(growth_factor > 1, "growth_factor", value=growth_factor, wanted="more than 1")
        _check(0 < backoff_factor < 1, "backoff_factor", value=backoff_factor, wanted="between 0 and 1")
        _check(growth_interval > 0, "growth_interval", value=growth_interval, wanted="more than 0")
        _check(hysteresis > 0, "hysteresis", value=hysteresis, wanted="more than 0")
        self._scale = float(initial_scale)
        self._min_scale = float(min_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._hysteresis = hysteresis
        # Both go into checkpoints: a resumed run must double its scale at the same step.
        self._clean_steps = 0
        self._overflows_left = hysteresis

    @property
    def scale(self) -> float:
        """Factor of the loss of the next step."""
        return self._scale

    def update(self, found_inf: bool) -> None:
        """Takes note of one step; found_inf: whether its gradients overflowed on any rank."""
        if found_inf:
            # The window counts clean steps in a row.
            self._clean_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self._scale = max(self._scale * self._backoff_factor, self._min_scale)
            return
        self._clean_steps += 1
        if self._clean_steps == self._growth_interval:
            self._clean_steps = 0
            self._overflows_left = self._hysteresis
            # Without a ceiling: the next overflow is the ceiling.
            self._scale *= self._growth_factor

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters, under Megatron's names; JSON values."""
        return {
            "scale": self._scale,
            "growth_tracker": self._clean_steps,
            "hysteresis_tracker": self._overflows_left,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from `state_dict`; the limits stay those of the configuration."""
        if not state_dict:
            return  # saved by a run with a constant scale
        # JSON may have made an integer of it.
        self._scale = float(state_dict["scale"])
        self._clean_steps = int(state_dict["growth_tracker"])
        self._overflows_left = int(state_dict["hysteresis_tracker"])


def _check(holds: bool, name: str, *, value: float, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}: must be {wanted}")
