"""Re-exports TorchFullyShardedDataParallelConfig under Megatron's import path.

torch_fsdp2_config.py defines the class.
"""

from megatron.core.distributed.torch_fsdp2_config import TorchFullyShardedDataParallelConfig

__all__ = ["TorchFullyShardedDataParallelConfig"]
