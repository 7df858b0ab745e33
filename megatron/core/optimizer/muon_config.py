"""Settings of Muon, which steps matrices; what it does with them is in muon_rule.py."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field


@dataclass(kw_only=True)
class MuonConfig:
    """Part of OptimizerConfig, which checks the values."""

    cli_group: ClassVar[str] = "optimizer"

    muon_momentum: float = config_field(0.9, at_least=0, less_than=1, help="Momentum of --optimizer muon.")
    muon_nesterov: bool = config_field(False, help="Look ahead by Nesterov's rule in --optimizer muon.")
    muon_num_ns_steps: int = config_field(
        5, at_least=1, less_than=100, help="Newton-Schulz steps that make Muon's updates orthogonal."
    )
    muon_scale_mode: str = config_field(
        "spectral",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
        help="Scale of Muon's update of an [m, n] matrix: sqrt(max(m, n)), sqrt(m / n) or sqrt(max(1, m / n)).",
    )
    muon_extra_scale_factor: float = config_field(1.0, more_than=0, help="Another factor of Muon's updates.")
    muon_split_qkv: bool = config_field(
        True,
        flags=("--muon-no-split-qkv",),
        help="Make the update of q, k and v orthogonal as one matrix, where one weight holds them.",
    )
    muon_tp_mode: str = config_field(
        "duplicated",
        choices=("blockwise", "duplicated", "distributed"),
        help="How Muon treats matrices that lie on several ranks; all the same while none does.",
    )
