"""Activations that wait for backward in host memory: standing buffers, and what moves tensors there and back."""

from megatron.core.transformer.activation_offload.offloader import ActivationOffloader, Offloaded

__all__ = ["ActivationOffloader", "Offloaded"]
