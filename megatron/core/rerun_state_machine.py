"""Result validation that loss functions written for Megatron-LM call. Nothing inside megatron/ calls it.

Unlike in Megatron-LM, steps are not rerun to find a faulty device. --non-finite-policy determines the reaction to a
loss that is not finite.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron.core.config_field import require_defaults


class RerunStateMachine:
    """Checks results of a step on the rank that computed them."""

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], bool | torch.Tensor],
        message: str = "unexpected result",
        comparison_func: Callable[[Any, Any], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Raises RuntimeError if `rejection_func` rejects `result`, or prints a warning if `fatal` is False.

        result: for example a loss, [], fp32. The error ends the run on all ranks. comparison_func: must be None,
        because steps are not rerun and compared. tolerance: unused. NOTE: waits for the device if rejection_func
        returns a device tensor.
        """
        require_defaults(
            "validate_result",
            "steps are not rerun, so there are no two results to compare",
            comparison_func=(comparison_func, None),
        )
        if not bool(rejection_func(result)):
            return
        problem = f"{message}: the result is {_shown(result)}"
        if fatal:
            raise RuntimeError(problem)
        print(f"WARNING: {problem}", flush=True)


_CHECKS = RerunStateMachine()


def get_rerun_state_machine() -> RerunStateMachine:
    """Returns the RerunStateMachine of this process, which is stateless."""
    return _CHECKS


def _shown(result: Any) -> str:
    is_number = isinstance(result, torch.Tensor) and result.numel() == 1
    return str(result.item() if is_number else result)
