"""Enumerations of the transformer: attention masks and attention kernels."""

import enum

from megatron.core.enums import ModelType

__all__ = ["AttnBackend", "AttnMaskType", "ModelType", "parse_attn_backend"]


class AttnMaskType(enum.Enum):
    """Positions to which a query attends without an explicit mask. causal: its own and earlier; otherwise all."""

    padding = 1
    causal = 2
    no_mask = 3
    arbitrary = 4


class AttnBackend(enum.Enum):
    """Attention kernel. auto lets torch choose; unfused and local use the fp32 reference implementation."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5

    def __str__(self) -> str:
        return self.name


def parse_attn_backend(word: str) -> AttnBackend:
    """Returns the backend with the given name. Raises ValueError with the choices for an unknown name."""
    if word not in AttnBackend.__members__:
        raise ValueError(f"{word!r} is not an attention backend: choose from {', '.join(AttnBackend.__members__)}")
    return AttnBackend[word]
