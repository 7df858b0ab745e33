"""Enumerations of the transformer: attention masks and attention kernels."""

import enum

from megatron.core.enums import ModelType

__all__ = ["AttnBackend", "AttnMaskType", "ModelType", "parse_attn_backend"]


class AttnMaskType(enum.Enum):
    """Positions that a query may attend to without an explicit mask; `causal`: itself and earlier positions."""

    padding = 1
    causal = 2
    no_mask = 3
    arbitrary = 4


class AttnBackend(enum.Enum):
    """Attention kernel: `auto` lets torch choose, `unfused` and `local` are the fp32 reference."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5

    def __str__(self) -> str:
        return self.name


def parse_attn_backend(word: str) -> AttnBackend:
    """Returns the backend of that name; raises ValueError naming the choices."""
    if word not in AttnBackend.__members__:
        raise ValueError(f"{word!r} is not an attention backend: choose from {', '.join(AttnBackend.__members__)}")
    return AttnBackend[word]
