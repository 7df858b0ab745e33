"""Looks after checkpoints: `python tools/checkpoint.py convert --from torch --to torch_dist --load DIR --save DIR`.

What each format is, its module knows; this is the command line.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from megatron.training.errors import exit_on_user_error  # noqa: E402
from tools.convert_legacy import TargetLayout, from_canonical, to_canonical  # noqa: E402
from tools.export_safetensors import export_safetensors  # noqa: E402

# Formats by Megatron's words of --ckpt-format: a file for each rank, and the canonical one; and weights by their names.
_LEGACY, _CANONICAL, _SAFETENSORS = "torch", "torch_dist", "safetensors"


def main(argv: list[str] | None = None) -> None:
    """Runs a command; exits non-zero after one line that says what is wrong."""
    options = parse_options(argv)
    with exit_on_user_error():
        options.run(options)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_convert(commands.add_parser("convert", help="weights from one format to another", allow_abbrev=False))
    return parser.parse_args(argv)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_convert)
    parser.add_argument("--from", dest="source", choices=(_LEGACY, _CANONICAL), required=True, help="format of --load")
    targets = (_LEGACY, _CANONICAL, _SAFETENSORS)
    parser.add_argument("--to", dest="target", choices=targets, required=True, help="format of --save")
    parser.add_argument("--load", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--save", type=Path, required=True, help="folder for the converted checkpoint")
    parser.add_argument("--ckpt-step", type=int, help="iteration to convert; default: the latest")
    parser.add_argument("--vocab-size", type=int, help="tokens of the tokenizer, where the files do not say")
    parser.add_argument(
        "--max-shard-size", type=float, default=5.0, help=f"GB of a file that --to {_SAFETENSORS} writes (default: 5)"
    )
    of_target = parser.add_argument_group(f"layout of the files that --to {_LEGACY} writes")
    of_target.add_argument("--target-tensor-parallel-size", type=int, default=1, help="default: 1")
    of_target.add_argument("--target-pipeline-parallel-size", type=int, default=1, help="default: 1")
    of_target.add_argument("--target-expert-parallel-size", type=int, default=1, help="default: 1")
    of_target.add_argument(
        "--target-transformer-impl",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="whose names parameters get (default: transformer_engine)",
    )


def _convert(options: argparse.Namespace) -> None:
    if options.source == options.target:
        raise ValueError(
            f"--from and --to are both {options.source}: must differ; {_CANONICAL} loads in any layout as it is"
        )
    if options.target == _SAFETENSORS:
        if options.source != _CANONICAL or not options.max_shard_size > 0:
            raise ValueError(
                f"--to {_SAFETENSORS}: must be --from {_CANONICAL}, which is {options.source}, with --max-shard-size "
                f"above 0, which is {options.max_shard_size:g}"
            )
        num_bytes = int(options.max_shard_size * 1e9)
        folder = export_safetensors(options.load, options.save, step=options.ckpt_step, max_shard_bytes=num_bytes)
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


if __name__ == "__main__":
    main()
