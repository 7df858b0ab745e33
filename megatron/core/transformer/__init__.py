"""The transformer: its configuration, specs, layers and block. Models are in ../models."""

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

__all__ = ["MLATransformerConfig", "MegatronModule", "ModuleSpec", "TransformerConfig"]
