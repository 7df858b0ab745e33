"""Inspects and converts checkpoints: `tools/checkpoint.py inspect | verify | diff | prune | convert | merge`.

Each command has --help. Exit status of verify: 1 if anything is damaged. Exit status of diff: 1 if a tensor differs, 2
if one cannot be read.

This file contains the command line and its output. Each format has a separate module.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.dist_checkpointing import ShardedTensor, StreamReader, VerifiedCheckpoint, verify
from megatron.core.dist_checkpointing import folder as folders
from megatron.tools.convert_legacy import TargetLayout, from_canonical, to_canonical
from megatron.tools.convert_megatron_core import from_megatron_core
from megatron.tools.hugging_face.convert import DTYPES, from_hub, to_hub
from megatron.tools.hugging_face.verify import compare_logits
from megatron.tools.merge_adapters import merge_adapters
from megatron.tools.safetensors_files import TensorKind, new_folder, write_tensor_files
from megatron.tools.stored_checkpoints import (
    NOT_WEIGHTS,
    StoredTensor,
    TensorDifference,
    checkpoint_of_load,
    checkpoints_in,
    damages,
    differences,
    named_checkpoint,
    opened,
    removable,
    stored_tensors,
    values_named,
)
from megatron.tools.write_megatron_core import CoreTarget, to_megatron_core
from megatron.training.checkpointing.folder import iteration_folder
from megatron.training.errors import exit_on_user_error
from megatron.version_flag import PrintVersions

# Formats, with their --ckpt-format names if any: one file per rank; the canonical format, with two names; weights in
# safetensors files; models of transformers; and Megatron-Core's own torch_dist.
_CORE = "torch_dist_mcore"
_LEGACY, _CANONICAL, _SAFETENSORS, _MEGATRON, _HUB = "torch", "torch_dist", "safetensors", "megatron", "hf"
_AXES = ("tensor", "pipeline", "expert")  # sharded axes of older files
_MOST_GIGABYTES = 1e6  # largest file size, more than any disk has
# Options of convert that apply only to some formats of --from, or of --to.
_OF_SOURCE = {
    "--ckpt-step": (_LEGACY, _CANONICAL, _MEGATRON, _CORE),
    "--vocab-size": (_LEGACY, _CORE),
    "--model-config": (_CORE,),
}
_OF_TARGET = {
    "--max-shard-size": (_SAFETENSORS, _HUB),
    "--hf-reference": (_HUB,),
    **{f"--target-{axis}-parallel-size": (_LEGACY, _CORE) for axis in _AXES if axis != "pipeline"},
    "--target-pipeline-parallel-size": (_LEGACY,),
    "--target-transformer-impl": (_LEGACY, _CORE),
    "--target-optimizer": (_CORE,),
    "--target-padded-vocab-size": (_CORE,),
}
# Stored arguments that describe how the checkpoint was trained.
_LAYOUT = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "optimizer",
)


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status. Prints one line for a user error and raises SystemExit."""
    options = parse_options(argv)
    try:
        with exit_on_user_error():
            return int(options.run(options) or 0)
    except SystemExit as error:
        # Lets scripts distinguish unreadable checkpoints from different ones.
        if options.run is _diff and error.code == 1:
            raise SystemExit(2) from error
        raise


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action=PrintVersions)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_inspect(commands.add_parser("inspect", help="show the contents of a checkpoint", allow_abbrev=False))
    _add_verify(commands.add_parser("verify", help="verify the checksums of all data", allow_abbrev=False))
    _add_diff(
        commands.add_parser("diff", help="show the tensors that differ between two checkpoints", allow_abbrev=False)
    )
    _add_prune(commands.add_parser("prune", help="delete old checkpoints", allow_abbrev=False))
    _add_convert(commands.add_parser("convert", help="convert weights from one format to another", allow_abbrev=False))
    _add_merge(commands.add_parser("merge", help="merge low-rank adapters into the weights", allow_abbrev=False))
    return parser.parse_args(argv)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_inspect)
    parser.add_argument("path", type=Path, help="a checkpoint, or the folder of --save")
    parser.add_argument("--ckpt-step", type=int, help="iteration; default: the latest")
    parser.add_argument("--tensors", action="store_true", help="print a line for each tensor")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_verify)
    parser.add_argument("path", type=Path, help="a checkpoint, or the folder of --save")
    parser.add_argument("--ckpt-step", type=int, help="iteration; default: all in the folder")


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_diff)
    parser.add_argument(
        "a", type=Path, metavar="A", help="a checkpoint, or the folder of --save, which selects the latest"
    )
    parser.add_argument("b", type=Path, metavar="B", help="the other checkpoint")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="PATTERN", help="keys to leave out, for example 'optimizer.*'"
    )


def _add_prune(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_prune)
    parser.add_argument("path", type=Path, help="the folder of --save")
    parser.add_argument("--keep-latest", type=int, required=True, metavar="N", help="keep the latest N")
    parser.add_argument("--keep-interval", type=int, metavar="N", help="also keep iterations that are multiples of N")
    parser.add_argument("--dry-run", action="store_true", help="print what would be deleted, and delete nothing")


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_merge)
    parser.add_argument("--load", type=Path, required=True, help="folder of checkpoints of a run with --lora-rank")
    parser.add_argument("--save", type=Path, required=True, help="folder for the merged checkpoint")
    parser.add_argument("--ckpt-step", type=int, help="iteration to merge; default: the latest")


def _merge(options: argparse.Namespace) -> None:
    print(f"wrote {merge_adapters(options.load, options.save, step=options.ckpt_step)}")


def _inspect(options: argparse.Namespace) -> None:
    checkpoint = opened(named_checkpoint(options.path, options.ckpt_step))
    tensors, common, console = stored_tensors(checkpoint), checkpoint.common, _console()
    num_bytes = sum(entry.num_bytes for entry in checkpoint.files.values())
    console.print(f"{checkpoint.folder}: {len(checkpoint.files)} files, {num_bytes:,} bytes", soft_wrap=True)
    if "iteration" in common:
        samples = values_named("train_state", common).get("consumed_train_samples", 0)
        console.print(f"iteration {common['iteration']}, {samples} samples consumed")
    arguments = values_named("args", common)
    layout = ", ".join(f"{name} {arguments[name]}" for name in _LAYOUT if name in arguments)
    if layout:
        console.print(f"saved with {layout}", soft_wrap=True)
    if isinstance(frozen := common.get("frozen"), list) and frozen:
        console.print(f"{len(frozen)} frozen parameters without optimizer state")
    console.print(_table_of_parts(tensors))
    if options.tensors:
        console.print(_table_of_tensors(tensors))


def _table_of_parts(tensors: Sequence[StoredTensor]) -> Table:
    table = Table("part", *(_right(name) for name in ("tensors", "elements", "bytes")), "dtypes")
    parts: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.part, []).append(tensor)
    for part, own in sorted(parts.items(), key=lambda item: (item[0] != "weights", item[0])):
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in own})
        elements, num_bytes = sum(one.num_elements for one in own), sum(one.num_bytes for one in own)
        table.add_row(part, f"{len(own):,}", f"{elements:,}", f"{num_bytes:,}", ", ".join(dtypes))
    return table


def _table_of_tensors(tensors: Sequence[StoredTensor]) -> Table:
    table = Table("tensor", "shape", "dtype", _right("pieces"), "files")
    for tensor in tensors:
        files = ", ".join(sorted({name for name, _ in tensor.pieces}))
        dtype = str(tensor.dtype).removeprefix("torch.")
        table.add_row(tensor.key, str(list(tensor.shape)), dtype, str(len(tensor.pieces)), files)
    return table


def _verify(options: argparse.Namespace) -> int:
    console, num_damaged = _console(), 0
    for folder in checkpoints_in(options.path, options.ckpt_step):
        problems = list(damages(folder))
        console.print(f"{folder}: {'damaged' if problems else 'undamaged'}", soft_wrap=True)
        for problem in problems:
            console.print(f"  {problem}", soft_wrap=True)
        num_damaged += bool(problems)
    return int(num_damaged > 0)


def _diff(options: argparse.Namespace) -> int:
    a, b = (verify(named_checkpoint(path, None)) for path in (options.a, options.b))
    console = _console()
    console.print(f"A: {a.folder}\nB: {b.folder}", soft_wrap=True)
    found = list(differences(a, b, ignored=options.ignore))
    _print_values(console, a, other=b)
    if not found:
        console.print("All tensors are bitwise equal.")
        return 0
    table = Table("tensor", "different elements", _right("largest difference"), _right("relative"))
    for one in found:
        share = one.what or f"{one.num_different:,} of {one.num_elements:,}"
        sizes = ("", "") if one.what else (f"{one.largest:.3e}", f"{one.relative:.3e}")
        table.add_row(one.key, share, *sizes)
    console.print(table)
    console.print(_summary_of(found))
    return 1


def _summary_of(found: Sequence[TensorDifference]) -> str:
    # Tensors that exist on one side only, or have different shapes, have no numeric difference. 0 would mean equal
    # values.
    by_value, words = [one for one in found if not one.what], f"{len(found)} tensors differ"
    if not by_value:
        return f"{words}, all of them in shape or dtype or on one side only"
    worst = max(by_value, key=lambda one: one.largest)
    return f"{words}; the largest difference is {worst.largest:.3e}, in {worst.key}"


def _print_values(console: Console, a: VerifiedCheckpoint, *, other: VerifiedCheckpoint) -> None:
    """Prints differences of values that are not tensors.

    Arguments often differ between checkpoints, so these differences do not change the exit status.
    """
    x, y = (
        {**one.common, **{f"args.{name}": value for name, value in values_named("args", one.common).items()}}
        for one in (a, other)
    )
    for name in sorted(x.keys() | y.keys()):
        if name != "args" and x.get(name) != y.get(name):
            console.print(f"{name}: {x.get(name)} | {y.get(name)}", soft_wrap=True)


def _prune(options: argparse.Namespace) -> None:
    _require_positive({"--keep-latest": options.keep_latest, "--keep-interval": options.keep_interval})
    gone, stay = removable(options.path, keep_latest=options.keep_latest, keep_interval=options.keep_interval)
    for iteration in gone:
        folder = iteration_folder(options.path, iteration)
        if not options.dry_run:
            folders.remove(folder)
        print(f"{'would delete' if options.dry_run else 'deleted'} {folder}")
    print(f"{len(gone)} {'would be deleted' if options.dry_run else 'deleted'}; kept: {', '.join(map(str, stay))}")


def _require_positive(counts: dict[str, int | None]) -> None:
    """Raises ValueError for a number below 1. counts: values by flag, None for absent flags."""
    for flag, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{flag} is {value}: must be at least 1")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)


def _right(name: str) -> Column:
    return Column(name, justify="right")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=partial(_convert, parser))
    both = (_LEGACY, _CANONICAL, _MEGATRON, _HUB)
    sources = (*both, _CORE)
    source_text = f"format of --load; {_CORE} is Megatron-Core's own torch_dist"
    parser.add_argument("--from", dest="source", choices=sources, required=True, help=source_text)
    targets = (*both, _SAFETENSORS, _CORE)
    text = f"format of --save; {_MEGATRON} is {_CANONICAL}, {_HUB} a model of transformers"
    parser.add_argument("--to", dest="target", choices=targets, required=True, help=text)
    parser.add_argument("--load", type=Path, required=True, help="folder of checkpoints, or of a model of transformers")
    parser.add_argument("--save", type=Path, required=True, help="folder for the converted checkpoint")
    parser.add_argument("--ckpt-step", type=int, help="iteration to convert; default: the latest")
    parser.add_argument(
        "--vocab-size", type=int, help="vocabulary size of the tokenizer, if the files do not contain it"
    )
    parser.add_argument(
        "--model-config", type=Path, help=f"YAML file with the model's flags, for --from {_CORE} without arguments"
    )
    parser.add_argument(
        "--max-shard-size",
        type=float,
        default=5.0,
        help=f"maximum size of a file of --to {_SAFETENSORS} or {_HUB} in GB (default: 5)",
    )
    of_hub = parser.add_argument_group(f"--from {_HUB} and --to {_HUB}")
    of_hub.add_argument("--dtype", choices=tuple(DTYPES), help="dtype of the converted weights; default: unchanged")
    of_hub.add_argument(
        "--hf-reference",
        type=Path,
        help="folder from which config.json and tokenizer are copied; default: written from the checkpoint",
    )
    of_hub.add_argument(
        "--verify",
        action="store_true",
        help="compare logits of both models in fp32 on random tokens; requires transformers",
    )
    of_target = parser.add_argument_group(f"layout and format of --to {_LEGACY} and --to {_CORE}")
    of_target.add_argument("--target-tensor-parallel-size", type=int, default=1, help="default: 1")
    of_target.add_argument("--target-pipeline-parallel-size", type=int, default=1, help="default: 1")
    of_target.add_argument("--target-expert-parallel-size", type=int, default=1, help="default: 1")
    of_target.add_argument(
        "--target-transformer-impl",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="implementation whose parameter names are used (default: transformer_engine)",
    )
    text = f"vocabulary rows of --to {_CORE}; default: padded as by Megatron-LM"
    of_target.add_argument("--target-padded-vocab-size", type=int, help=text)
    of_target.add_argument(
        "--target-optimizer",
        choices=("distributed", "plain"),
        default="distributed",
        help=f"optimizer that will load --to {_CORE}, matching --use-distributed-optimizer (default: distributed)",
    )


def _convert(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    _require_taken(parser, options)
    for side in ("source", "target"):
        if vars(options)[side] == _MEGATRON:
            vars(options)[side] = _CANONICAL
    sizes = {f"--target-{axis}-parallel-size": vars(options)[f"target_{axis}_parallel_size"] for axis in _AXES}
    _require_positive({**sizes, "--vocab-size": options.vocab_size})
    if not 0 < options.max_shard_size <= _MOST_GIGABYTES:
        raise ValueError(
            f"--max-shard-size is {options.max_shard_size:g}: must be above 0 and at most {_MOST_GIGABYTES:g}"
        )
    if _HUB in (options.source, options.target):
        return _convert_hub(options)
    _convert_files(options)
    return 0


def _require_taken(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Raises ValueError for an option that this conversion would ignore."""
    sides = (("--from", options.source, _OF_SOURCE), ("--to", options.target, _OF_TARGET))
    for side, found, taken in sides:
        for flag, formats in taken.items():
            name = flag[2:].replace("-", "_")
            value = vars(options)[name]
            if found not in formats and value != parser.get_default(name):
                raise ValueError(f"{flag} is {value}: requires {side} {' or '.join(formats)}, but {side} is {found}")
    for flag, value in (("--dtype", options.dtype), ("--verify", options.verify)):
        if value and _HUB not in (options.source, options.target):
            raise ValueError(f"{flag} is {value}: requires --from {_HUB} or --to {_HUB}")


def _convert_hub(options: argparse.Namespace) -> int:
    if {options.source, options.target} != {_HUB, _CANONICAL}:
        raise ValueError(
            f"--from {options.source} --to {options.target}: {_HUB} can only be converted to and from {_MEGATRON}"
        )
    dtype = DTYPES.get(options.dtype)
    if options.source == _HUB:
        folder, hub, run = from_hub(options.load, options.save, dtype=dtype), options.load, options.save
    else:
        num_bytes = int(options.max_shard_size * 1e9)
        hub, run = options.save, options.load
        folder = to_hub(
            run, hub, step=options.ckpt_step, dtype=dtype, max_shard_bytes=num_bytes, reference=options.hf_reference
        )
    print(f"wrote {folder}")
    if not options.verify:
        return 0
    report = compare_logits(run, hub, step=options.ckpt_step, dtype=dtype)
    print(report.text)
    return int(not report.agrees)


def _convert_core(options: argparse.Namespace) -> None:
    if options.target != _CANONICAL:
        raise ValueError(f"--from {_CORE} requires --to {_CANONICAL}, but --to is {options.target}")
    result = from_megatron_core(
        options.load,
        options.save,
        step=options.ckpt_step,
        vocab_size=options.vocab_size,
        model_config=options.model_config,
    )
    print(f"wrote {result.folder}")
    if result.unknown:
        print(f"not converted, because it is unknown: {', '.join(result.unknown)}")
    if result.why_no_state is None:
        print(
            f"not converted: {result.num_left} entries that are neither weights nor optimizer state, such as generators"
        )
    else:
        print(f"not converted: {result.num_left} entries that are not weights, such as optimizer and generator states")
        print(f"{result.why_no_state}: continue with --no-load-optim, or with --finetune")


def _write_core(options: argparse.Namespace) -> None:
    if options.source != _CANONICAL:
        raise ValueError(f"--to {_CORE} requires --from {_CANONICAL}, but --from is {options.source}")
    target = CoreTarget(
        tensor=options.target_tensor_parallel_size,
        expert=options.target_expert_parallel_size,
        distributed=options.target_optimizer == "distributed",
        fused=options.target_transformer_impl == "transformer_engine",
        padded_vocab_size=options.target_padded_vocab_size,
    )
    print(f"wrote {to_megatron_core(options.load, options.save, target=target, step=options.ckpt_step)}")
    print("random-number generators are not converted: continue with --no-load-rng")


def _convert_files(options: argparse.Namespace) -> None:
    if options.source == options.target:
        raise ValueError(
            f"--from and --to are both {options.source}: must differ. To change only the layout, no conversion is "
            f"needed: {_CANONICAL} checkpoints can be loaded in any layout"
        )
    if options.source == _CORE:
        return _convert_core(options)
    if options.target == _CORE:
        return _write_core(options)
    if options.target == _SAFETENSORS:
        if options.source != _CANONICAL:
            raise ValueError(f"--to {_SAFETENSORS} requires --from {_CANONICAL}, but --from is {options.source}")
        folder = _export_safetensors(options)
    elif options.target == _CANONICAL:
        folder = to_canonical(options.load, options.save, step=options.ckpt_step, vocab_size=options.vocab_size)
    else:
        layout = TargetLayout(
            options.target_tensor_parallel_size,
            options.target_pipeline_parallel_size,
            options.target_expert_parallel_size,
            fused=options.target_transformer_impl == "transformer_engine",
        )
        folder = from_canonical(options.load, options.save, layout=layout, step=options.ckpt_step)
    print(f"wrote {folder}")
    if options.target != _SAFETENSORS:
        flags = "--no-load-optim" if options.target == _CANONICAL else "--no-load-optim --no-load-rng"
        print(f"optimizer states are not converted: continue with {flags}, or with --finetune")


def _export_safetensors(options: argparse.Namespace) -> Path:
    """Writes the weights of a checkpoint under their stored names, without layout and padding, and returns the folder.

    Files are named as on the Hugging Face Hub. Only one tensor is in memory at a time.
    """
    found = checkpoint_of_load(options.load, options.ckpt_step)
    with new_folder(options.save) as temporary:
        checkpoint = verify(found.path)
        stored = {key: kind for key, kind in sorted(checkpoint.tensors.items()) if not key.startswith(NOT_WEIGHTS)}
        kinds = {key: TensorKind(*kind) for key, kind in stored.items()}
        reader = StreamReader(checkpoint)

        def read(key: str) -> torch.Tensor:
            tensor = torch.empty(kinds[key].shape, dtype=kinds[key].dtype)
            reader.fill([ShardedTensor.whole(key, tensor)])
            return tensor

        write_tensor_files(
            temporary,
            kinds,
            read=read,
            max_shard_bytes=int(options.max_shard_size * 1e9),
            metadata={"iteration": found.iteration},
            always_index=True,
        )
    return Path(options.save)


if __name__ == "__main__":
    sys.exit(main())
