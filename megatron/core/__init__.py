"""Building blocks of the framework: parallel state, model parts, optimizer, data and checkpoints."""

from megatron.core import parallel_state
from megatron.core import parallel_state as mpu
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.package_info import __version__
from megatron.core.timers import Timers

__all__ = ["ModelParallelConfig", "Timers", "__version__", "mpu", "parallel_state"]
