"""The transformer: its configuration, specs, layers and block; models are in ../models."""

from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["TransformerConfig"]
