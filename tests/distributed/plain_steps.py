"""A subclass of the fused Adam as some trainers write it. Holds no tests."""

from megatron.core.optimizer import DistributedFusedAdam


class PlainSteps(DistributedFusedAdam):
    """A fused Adam that leaves unscaling gradients and skipping steps to the grad scaler."""

    _step_supports_amp_scaling = False
