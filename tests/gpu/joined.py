"""Sets up a rank on a GPU with the program's process groups. Contains no tests."""

import torch

from megatron.core import parallel_state
from megatron.core.device import default_device, prepare_device
from megatron.training.config import DistributedConfig, LaunchConfig
from megatron.training.startup_handshake import join_process_group


def join() -> torch.device:
    """Initializes the process groups as the program does, and returns the device of this rank."""
    device = default_device()
    prepare_device(device)
    join_process_group(DistributedConfig(), LaunchConfig(), device, settings=dict, broadcast=None)
    parallel_state.initialize_model_parallel()
    return device
