"""Configuration of blended datasets of any kind. GPTDatasetConfig adds the options of GPT samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

from megatron.core.config_field import MegatronConfig, config_field, validate_fields
from megatron.core.datasets.utils import DEFAULT_SPLIT, Blend, Split, parse_split

# The sample order of a blend stores dataset numbers as int16, as Megatron does.
MOST_DATASETS = 32767


class Vocabulary(Protocol):
    """Tokenizer interface that datasets require. Ids are 0 to vocab_size - 1, and eod marks the end of a document."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...


@dataclass(kw_only=True)
class BlendedMegatronDatasetConfig(MegatronConfig):
    """Datasets to blend, and options of their samples, with Megatron's field names.

    Two fields are derived from others. split_matrix: (begin, end) of train, valid and test as fractions of the
    documents, or None for a part without documents; None with blend_per_split. mock: True if no blend is given, which
    selects mock data.
    """

    random_seed: int = config_field(1234, help="Random seed of all shuffles.")
    sequence_length: int = config_field(help="Tokens per sample.", at_least=1)
    blend: Blend | None = config_field(None, help="Prefixes of .bin/.idx pairs, and their weights or None.")
    blend_per_split: list[Blend | None] | None = config_field(
        None, help="Blends of train, valid and test, None for no data; replaces blend and split."
    )
    multiple_validation_sets: bool | None = config_field(
        None, help="Return the validation datasets of a blend as a list, instead of blending them."
    )
    full_validation: bool | None = config_field(
        None, help="Use one epoch of the validation documents, regardless of the requested number of samples."
    )
    split: str | None = config_field(None, help=f"Shares of train, valid and test documents; {DEFAULT_SPLIT} if None.")
    split_matrix: list[tuple[float, float] | None] | None = field(init=False, default=None)
    path_to_cache: str | None = config_field(
        None, help="Folder of cached indices; None means a folder next to the data."
    )
    mmap_bin_files: bool = config_field(True, help="Map .bin files into memory instead of reading them.")
    num_dataset_builder_threads: int = config_field(1, help="No effect, because building takes seconds.", at_least=1)
    mock: bool = field(init=False, default=False)
    tokenizer: Vocabulary | None = config_field(None, help="Provides the vocabulary against which tokens are checked.")
    fast_cache_load: bool = config_field(
        False, help="Use cached indices with matching inputs and sizes without reading them to verify checksums."
    )
    defer_npy_index_mmap: bool = config_field(
        False, help="Open cached indices when the first sample is read instead of when the dataset is built."
    )

    planned_samples: int | None = config_field(
        None,
        help="Number of samples that fixed the order, 0 for one epoch; larger datasets append epochs. None: its size.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.split is not None:
            parse_split(self.split)
        self.validate_blends()
        self.mock = self.blend is None and self.blend_per_split is None
        if self.blend_per_split is None:
            self.split_matrix = convert_split_vector_to_split_matrix(parse_split(self.split or DEFAULT_SPLIT))

    def validate_blends(self) -> None:
        if self.blend_per_split is not None and all(blend is None for blend in self.blend_per_split):
            self.blend_per_split = None  # scripts with unset flags pass this
        if self.blend_per_split is not None:
            if self.blend is not None or self.split is not None:
                raise ValueError("blend_per_split is given together with blend or split: give only one of them")
            if len(self.blend_per_split) != len(Split):
                raise ValueError(
                    f"blend_per_split has {len(self.blend_per_split)} parts: must have three, for train, valid and test"
                )
        for blend in [self.blend, *(self.blend_per_split or [])]:
            if blend is not None:
                validate_blend(blend)


def validate_blend(blend: Blend) -> None:
    """Raises ValueError unless a blend has at least one dataset, and weights for all datasets or for none."""
    prefixes, weights = blend
    if not 0 < len(prefixes) <= MOST_DATASETS:
        raise ValueError(f"blend has {len(prefixes)} datasets: must have 1 to {MOST_DATASETS}")
    if weights is None:
        return
    if len(prefixes) != len(weights) or any(weight < 0 for weight in weights) or not 0 < sum(weights) < math.inf:
        raise ValueError(
            f"blend has weights {weights} for {len(prefixes)} datasets: must have one weight for each, at least 0 and "
            "not all 0"
        )


def convert_split_vector_to_split_matrix(
    vector_a: Sequence[float], vector_b: Sequence[float] | None = None
) -> list[tuple[float, float] | None]:
    """Returns (begin, end) of each part as fractions of the corpus, or None for a part without documents.

    vector_a: shares of the parts, which sum to 1. vector_b: shares of an earlier split of the corpus; each part is then
    limited to the range that both splits assign to it.
    """
    ranges = [pairwise(accumulate(vector, initial=0.0)) for vector in (vector_a, vector_b or vector_a)]
    common = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(*ranges)]
    return [(begin, end) if begin < end else None for begin, end in common]
