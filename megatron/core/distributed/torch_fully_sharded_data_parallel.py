"""Megatron's path of TorchFullyShardedDataParallel; re-exports only. torch_fsdp2.py has the class."""

from megatron.core.distributed.torch_fsdp2 import TorchFullyShardedDataParallel

__all__ = ["TorchFullyShardedDataParallel"]
