"""What a step of Adam is told besides tensors of the run; how it steps is flat_adam.py's and triton_adam.py's."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AdamRates:
    """What torch.optim.Adam and AdamW call so. lr: [], on the runs' device, fp64 on the CPU, else fp32.

    adam_w_mode: weights decay apart from their gradients (Loshchilov & Hutter, 2019, Decoupled Weight Decay
    Regularization). bias_correction: as in Adam: A Method for Stochastic Optimization (Kingma & Ba, 2015), else moments
    count as they are.
    """

    lr: torch.Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    adam_w_mode: bool = True
    bias_correction: bool = True
