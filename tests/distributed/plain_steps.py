"""The fused Adam as trainers subclass it. No test here."""

from megatron.core.optimizer import DistributedFusedAdam


class PlainSteps(DistributedFusedAdam):
    """As subclasses of trainers set it: the scaler unscales gradients before the step, and skips it itself."""

    _step_supports_amp_scaling = False
