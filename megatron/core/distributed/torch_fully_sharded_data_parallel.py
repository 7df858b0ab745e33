"""Re-exports TorchFullyShardedDataParallel under Megatron's import path. torch_fsdp2.py defines the class."""

from megatron.core.distributed.torch_fsdp2 import TorchFullyShardedDataParallel

__all__ = ["TorchFullyShardedDataParallel"]
