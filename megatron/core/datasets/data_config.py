"""Command-line fields of the data: where it lies, how it is split and read; the samples are made in gpt_dataset.py."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields
from megatron.core.datasets.splits import DEFAULT_SPLIT, parse_split
from megatron.core.datasets.utils import get_blend_from_list


@dataclass(kw_only=True)
class DataConfig:
    """Flags of the group "data and dataloader"."""

    cli_group: ClassVar[str] = "data and dataloader"

    data_path: list[str] | None = config_field(
        None,
        help="Prefix of a .bin/.idx pair of tools/preprocess_data.py; or several, alone or as WEIGHT PREFIX pairs.",
        nargs="*",
    )
    split: str | None = config_field(
        None,
        help=f"Shares of the documents for training, validation and test, such as 949,50,1. Default {DEFAULT_SPLIT}.",
    )
    data_cache_path: str | None = config_field(
        None,
        help="Folder for the sample indices; by default cache/GPTDataset_indices beside the data.",
    )
    mmap_bin_files: bool = config_field(
        True,
        flags=("--no-mmap-bin-files",),
        help="Read .bin files with file reads instead of a memory map.",
    )
    mock_data: bool = config_field(False, help="Train on made-up token sequences; needs no data files.")
    seq_length: int | None = config_field(None, help="Tokens per sample.", at_least=1)
    num_workers: int = config_field(
        2,
        help="Processes per data iterator that read ahead (at most one per core); 0 reads in the training process.",
        at_least=0,
    )
    create_attention_mask_in_dataloader: bool = config_field(
        True,
        flags=("--no-create-attention-mask-in-dataloader",),
        help="Leave attention masks out of the batches. Plain causal attention never has one.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.split is not None:
            parse_split(self.split)
        self.validate_source()

    def validate_source(self) -> None:
        if self.data_path is not None and not self.data_path:
            raise ValueError("--data-path has no value: must be the prefix of a .bin/.idx pair")
        if self.mock_data and self.data_path:
            raise ValueError(f"--mock-data contradicts --data-path {' '.join(self.data_path)}: give one of them")
        get_blend_from_list(self.data_path)
