"""Command-line flags for data paths, splits and reading. Samples are created in gpt_dataset.py."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from megatron.core.config_field import config_field, run_checks, validate_fields
from megatron.core.datasets.utils import DEFAULT_SPLIT, Blend, get_blend_from_list, parse_split


@dataclass(kw_only=True)
class DataConfig:
    """Selects the data, and controls how it is split and read."""

    cli_group: ClassVar[str] = "data and dataloader"

    data_path: list[str] | None = config_field(
        None,
        help="Prefix of a .bin/.idx pair written by tools/preprocess_data.py; or several prefixes, or WEIGHT PREFIX "
        "pairs.",
        nargs="*",
    )
    train_data_path: list[str] | None = config_field(
        None,
        help="Like --data-path, for training only; --valid-data-path and --test-data-path select the other data.",
        nargs="*",
    )
    valid_data_path: list[str] | None = config_field(
        None, help="Validation data; with --train-data-path and without this flag there is no validation.", nargs="*"
    )
    test_data_path: list[str] | None = config_field(
        None, help="Test data; with --train-data-path and without this flag there is no test.", nargs="*"
    )
    data_args_path: str | None = config_field(
        None, help="File with the values of --data-path, separated by whitespace; for long blends."
    )
    split: str | None = config_field(
        None,
        help=f"Shares of the documents for training, validation and test, such as 949,50,1. Default: {DEFAULT_SPLIT}.",
    )
    data_cache_path: str | None = config_field(
        None,
        help="Folder for cached sample indices; default: cache/GPTDataset_indices in the folder of the data.",
    )
    mmap_bin_files: bool = config_field(
        True,
        flags=("--no-mmap-bin-files",),
        help="Read .bin files with file reads instead of a memory map.",
    )
    dataloader_fast_cache_load: bool = config_field(
        False, help="Use cached sample indices without reading them to verify checksums."
    )
    dataloader_defer_npy_index_mmap: bool = config_field(
        False, help="Open cached sample indices when the first sample is read instead of at startup."
    )
    mock_data: bool = config_field(False, help="Train on synthetic token sequences, without data files.")
    reset_position_ids: bool = config_field(
        False, help="Restart positions after each end-of-document token. No effect with rope, which is relative."
    )
    reset_attention_mask: bool = config_field(False, help="Limit attention to the tokens of one document.")
    eod_mask_loss: bool = config_field(
        False, help="Exclude positions whose input is the end-of-document token from the loss."
    )
    seq_length: int = config_field(None, filled_in=True, help="Tokens per sample.", at_least=1)
    num_workers: int = config_field(
        2,
        help="Worker processes of each data iterator (at most one per core); 0 reads in the training process.",
        at_least=0,
    )
    dataloader_type: str = config_field(
        None,
        filled_in=True,
        choices=("single", "cyclic", "external"),
        help="single (default): samples in dataset order; cyclic: in a random order for each epoch; external: the "
        "iterators returned by the script's dataset provider.",
    )
    full_validation: bool = config_field(
        False, help="Read all validation samples once in each evaluation, instead of --eval-iters batches."
    )
    multiple_validation_sets: bool = config_field(
        False, help="Evaluate and log each validation dataset separately, instead of a blend of them."
    )
    validation_set_names: list[str] | None = config_field(
        None, help="Names of the --multiple-validation-sets in the log; default: their file names."
    )
    create_attention_mask_in_dataloader: bool = config_field(
        True,
        flags=("--no-create-attention-mask-in-dataloader",),
        help="With --reset-attention-mask, add document borders to batches instead of S x S masks.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        run_checks(partial(parse_split, self.split or DEFAULT_SPLIT), self.validate_source, self.validate_validation)
        self.dataloader_type = self.dataloader_type or "single"
        # Causal attention needs no S x S mask.
        self.create_attention_mask_in_dataloader &= self.reset_attention_mask

    def validate_source(self) -> None:
        separate = [words_of(flag, words) for flag, words in self.paths_per_split().items() if words is not None]
        for flag, words in {"--data-path": self.data_path, **self.paths_per_split()}.items():
            if words is not None and not words:
                raise ValueError(f"{flag} has no value: must be the prefix of a .bin/.idx pair")
            get_blend_from_list(words)
        sources = ["--mock-data"] if self.mock_data else []
        sources += [] if self.data_path is None else [words_of("--data-path", self.data_path)]
        sources += [] if self.data_args_path is None else [f"--data-args-path {self.data_args_path}"]
        sources += separate[:1]
        if len(sources) > 1:
            raise ValueError(f"{sources[0]} conflicts with {sources[1]}: give only one of them")
        if separate and self.split is not None:
            raise ValueError(f"{separate[0]} conflicts with --split {self.split}: remove --split")

    def validate_validation(self) -> None:
        if self.full_validation and self.dataloader_type == "external":
            raise ValueError(
                "--full-validation does not support --dataloader-type external, because the size of external data is "
                "unknown; use --eval-iters"
            )
        names = self.validation_set_names
        if names is None:
            return
        if not self.multiple_validation_sets:
            raise ValueError(f"--validation-set-names {' '.join(names)} requires --multiple-validation-sets")
        if len(set(names)) < len(names):
            raise ValueError(f"--validation-set-names is {' '.join(names)}: names must be unique")

    def paths_per_split(self) -> dict[str, list[str] | None]:
        """Returns the values of --train-data-path, --valid-data-path and --test-data-path, by flag."""
        return {
            "--train-data-path": self.train_data_path,
            "--valid-data-path": self.valid_data_path,
            "--test-data-path": self.test_data_path,
        }

    def names_data(self) -> bool:
        """Returns whether any flag selects data."""
        named = (self.data_path, self.data_args_path, *self.paths_per_split().values())
        return self.mock_data or any(one is not None for one in named)

    def read_blend(self) -> Blend | None:
        """Returns the blend in --data-path or in the file of --data-args-path. Raises OSError or ValueError."""
        if self.data_args_path is None:
            return get_blend_from_list(self.data_path)
        path = Path(self.data_args_path)
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise FileNotFoundError(f"--data-args-path {path} {what}: must be a file with values as for --data-path")
        try:
            words = path.read_text(encoding="utf-8").split()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--data-args-path {path} is not UTF-8 text: must contain values as for --data-path"
            ) from error
        if not words:
            raise ValueError(f"--data-args-path {path} is empty: must contain values as for --data-path")
        return get_blend_from_list(words)

    def blend_per_split(self) -> list[Blend | None] | None:
        """Returns the blends of train, valid and test if separate flags select them, otherwise None."""
        blends = [get_blend_from_list(words) for words in self.paths_per_split().values()]
        return blends if any(blend is not None for blend in blends) else None


def words_of(flag: str, words: list[str]) -> str:
    """Formats a flag and its values as they appear on a command line."""
    return " ".join([flag, *words])
