"""Rotary embedding under the path Megatron users import it from; the code is in transformer/rope.py."""

from megatron.core.transformer.rope import RotaryEmbedding, apply_rotary_pos_emb

__all__ = ["RotaryEmbedding", "apply_rotary_pos_emb"]
