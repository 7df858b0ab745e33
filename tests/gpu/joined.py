"""A rank on a GPU, in the groups of the program. Holds no tests."""

import torch

from megatron.core import parallel_state
from megatron.core.device import default_device, prepare_device
from megatron.training.config import DistributedConfig
from megatron.training.startup_handshake import join_process_group


def join() -> torch.device:
    """Initializes process groups as the program does; the device of this rank."""
    device = default_device()
    prepare_device(device)
    join_process_group(DistributedConfig(), device, rank=0, settings={}, broadcast=None)
    parallel_state.initialize_model_parallel()
    return device
