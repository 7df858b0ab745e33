"""Megatron's path of TorchFullyShardedDataParallelConfig; re-exports only. torch_fsdp2_config.py has the class."""

from megatron.core.distributed.torch_fsdp2_config import TorchFullyShardedDataParallelConfig

__all__ = ["TorchFullyShardedDataParallelConfig"]
