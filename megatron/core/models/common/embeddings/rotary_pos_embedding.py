"""Re-exports the rotary embedding under Megatron's import path. transformer/rope.py implements it."""

from megatron.core.transformer.rope import RotaryEmbedding, apply_rotary_pos_emb

__all__ = ["RotaryEmbedding", "apply_rotary_pos_emb"]
