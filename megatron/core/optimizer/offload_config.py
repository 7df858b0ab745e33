"""Settings of optimizer state in the host's memory; what is kept there is decided in param_runs.py."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field


@dataclass(kw_only=True)
class OptimizerOffloadConfig:
    """Part of OptimizerConfig, which checks the values."""

    cli_group: ClassVar[str] = "optimizer"

    optimizer_cpu_offload: bool = config_field(
        False, help="Keep masters and moments in the host's memory, and update there; no effect on a CPU."
    )
    optimizer_offload_fraction: float = config_field(
        1.0, at_least=0, at_most=1, help="Part of the parameters that --optimizer-cpu-offload is for."
    )
    overlap_cpu_optimizer_d2h_h2d: bool = config_field(
        False,
        help="With --optimizer-cpu-offload: gradients come and parameters go while the host updates others.",
    )

    @property
    def host_fraction(self) -> float:
        """Part of the parameters whose state is in the host's memory."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    def validate_offload(self, optimizer: str) -> None:
        """optimizer: the name of the update rule. Raises ValueError for what cannot be offloaded."""
        if self.optimizer_cpu_offload and optimizer == "muon":
            raise ValueError("OptimizerConfig.optimizer_cpu_offload is set: any optimizer will do but muon")
        if self.overlap_cpu_optimizer_d2h_h2d and not self.optimizer_cpu_offload:
            raise ValueError(
                "OptimizerConfig.overlap_cpu_optimizer_d2h_h2d is set: needs optimizer_cpu_offload as well"
            )
        if self.optimizer_offload_fraction < 1 and not self.optimizer_cpu_offload:
            raise ValueError(
                f"OptimizerConfig.optimizer_offload_fraction is {self.optimizer_offload_fraction}: "
                "needs optimizer_cpu_offload"
            )
