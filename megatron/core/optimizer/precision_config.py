"""Settings of what an optimizer keeps in fewer bits than it computes with; the forms are in stored_floats.py."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron.core.config_field import config_field

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MOMENTS = ("fp32", "fp16", "bf16", "fp8")


@dataclass(kw_only=True)
class PrecisionConfig:
    """Part of OptimizerConfig, which checks the values."""

    cli_group: ClassVar[str] = "optimizer"

    use_precision_aware_optimizer: bool = config_field(
        False, help="Keep masters, gradients and moments of --optimizer adam in the types of the flags below."
    )
    main_grads_dtype: str = config_field(
        "fp32",
        choices=("fp32", "bf16"),
        help="Type in which the optimizer finds gradients; bf16 if they are reduced so.",
    )
    main_params_dtype: str = config_field(
        "fp32", choices=("fp32", "fp16"), help="Type of the masters of 16-bit parameters; fp16 is scaled by blocks."
    )
    exp_avg_dtype: str = config_field(
        "fp32", choices=_MOMENTS, help="Type of Adam's first moment; fp16 is scaled by blocks, fp8 is not there."
    )
    exp_avg_sq_dtype: str = config_field(
        "fp32", choices=_MOMENTS, help="Type of Adam's second moment; fp16 is scaled by blocks, fp8 is not there."
    )
    store_param_remainders: bool = config_field(
        True,
        flags=(),
        help="Of fp32 masters beside bf16 parameters, keep only the 16 bits that the parameters lack.",
    )

    @property
    def keeps_remainders(self) -> bool:
        """Whether masters of bf16 parameters are the 16 bits that these lack."""
        return self.use_precision_aware_optimizer and self.main_params_dtype == "fp32" and self.store_param_remainders

    def validate_stored_types(self, optimizer: str) -> None:
        """optimizer: the name of the update rule. Raises ValueError for what cannot be kept so."""
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            value = vars(self)[name]
            if value == "fp8":
                raise ValueError(f"OptimizerConfig.{name} is fp8: must be fp32, bf16 or fp16, there is no fp8 here")
            if value != "fp32" and not self.use_precision_aware_optimizer:
                raise ValueError(f"OptimizerConfig.{name} is {value}: needs use_precision_aware_optimizer")
        if self.use_precision_aware_optimizer and optimizer not in ("adam", "distributed_fused_adam"):
            raise ValueError(
                "OptimizerConfig.use_precision_aware_optimizer is set: optimizer must be adam or "
                f"distributed_fused_adam, not {optimizer}"
            )
