"""Finds parallel layouts for a model: python tools/plan_layout.py --model deepseek-v3 --gpus 2048 --memory 80GB

Compares the possible layouts on a number of GPUs by memory and estimated step time without building the whole model,
then plans the best layouts like --dry-run. Further flags are those of pretrain_gpt.py. Parallel sizes among them are
fixed. See docs/planning.md.
"""

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.transformer.moe.paged_stash.sizing import encoding_words
from megatron.core.transformer.paged_stash_config import parse_bytes
from megatron.planner.layout_search import Advice, Found, LayoutCosts, search
from megatron.planner.layout_space import Request, read_request
from megatron.planner.plan import plan_run
from megatron.planner.report import WIDTH, bytes_in_words, flag_lines, found_as_json, pair_line, table_lines
from megatron.tools.train import pretrain_gpt
from megatron.training.arguments import read_run_config
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.parser import FlagParser
from megatron.training.compute.devices import Device, device_of_name, planned_device
from megatron.training.errors import exit_on_user_error
from megatron.version_flag import PrintVersions

_FRONT_SIZE = 12
_SECONDS_BETWEEN_LINES = 10
# A number below this without a unit was probably meant to have one.
_LEAST_BYTES = 1_000_000
_NOT_COUNTED = "temporary buffers, such as logits and messages, and for memory cached by the allocator"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the Pareto-optimal layouts and the flags of the fastest ones. Exits with status 1 if no layout fits."""
    with exit_on_user_error():
        own, words = _parser().parse_known_args(argv)
        device = planned_device() if own.device is None else device_of_name(own.device, source="--device")
        _check_counts(own)
        memory, kept = _memory_of(own, device)
        _check_others(own, words)
        request = read_request(words, world_size=own.gpus, devices_per_node=device.devices_per_node)
        costs = LayoutCosts(
            request.words,
            request.run_config,
            space=request.space,
            device=device,
            model_provider=pretrain_gpt.model_provider,
            forward_step=pretrain_gpt.forward_step,
        )
        progress = _Progress()
        found = search(request.space, costs, limit=memory - kept, most=max(_FRONT_SIZE, own.top), progress=progress)
        _print_head(found, request, device=device, memory=memory, kept=kept)
        verified = _print_found(found, own, memory=memory, kept=kept, progress=progress)
        if own.json:
            Path(own.json).write_text(json.dumps(found_as_json(found, verified=verified), indent=1), encoding="utf-8")
    if not found.front:
        sys.exit(1)


def _check_counts(own: argparse.Namespace) -> None:
    if own.gpus is None:
        raise CommandLineError("missing --gpus: give the number of ranks of the run, for example --gpus 64")
    for flag, count in (("--gpus", own.gpus), ("--top", own.top)):
        if count < 1:
            raise CommandLineError(f"{flag} is {count}: must be at least 1")


def _memory_of(own: argparse.Namespace, device: Device) -> tuple[int, int]:
    """Returns the bytes of a rank's memory, and how many of them to keep free."""
    memory = device.memory_bytes if own.memory is None else _bytes(own.memory, "--memory")
    kept = memory // 10 if own.keep_free is None else _bytes(own.keep_free, "--keep-free")
    if not 0 <= kept < memory:
        raise CommandLineError(f"--keep-free is {own.keep_free}: must be less than the memory, {memory} bytes")
    return memory, kept


def _check_others(own: argparse.Namespace, words: Sequence[str]) -> None:
    """Raises CommandLineError before the search for an unwritable --json file and for flags of single-layout plans."""
    for flag in ("--world-size", "--dry-run"):
        if any(word.partition("=")[0] == flag for word in words):
            raise CommandLineError(
                f"{flag} applies to pretrain_gpt.py's plan of a single layout: omit it, because --gpus sets "
                "the number of ranks"
            )
    folder = Path(own.json or "").parent
    if not folder.is_dir():
        raise CommandLineError(
            f"--json is {own.json}: its folder {folder} does not exist; give a file in an existing folder"
        )


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="Flags of pretrain_gpt.py may follow: the model (--model NAME, or its sizes), and settings of all "
        "layouts.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=PrintVersions)
    parser.add_argument("--gpus", type=int, metavar="N", help="Number of ranks of the run; required.")
    parser.add_argument("--memory", metavar="SIZE", help="Memory of a GPU, such as 80GB; unset: the device's memory.")
    parser.add_argument(
        "--keep-free", metavar="SIZE", help="Memory to reserve for uncounted allocations; unset: a tenth."
    )
    parser.add_argument(
        "--device", metavar="NAME", help="A device of configs/devices.yaml; unset: MEGATRON_PLAN_DEVICE, or H100."
    )
    parser.add_argument(
        "--top", type=int, default=3, metavar="N", help="Number of layouts whose flags are printed (default: 3)."
    )
    parser.add_argument("--json", metavar="FILE", help="JSON file for all results.")
    return parser


def _bytes(text: str, flag: str) -> int:
    try:
        num_bytes = parse_bytes(text, field=flag)
    except ValueError as error:
        raise CommandLineError(str(error)) from None
    if flag == "--memory" and text.strip().isdigit() and num_bytes < _LEAST_BYTES:
        raise CommandLineError(
            f"{flag} is {text}, a number of bytes without a unit: add the unit, for example {text.strip()}GB"
        )
    return num_bytes


def _print_head(found: Found, request: Request, *, device: Device, memory: int, kept: int) -> None:
    run_config, space = request.run_config, request.space
    _print_wrapped(
        f"{found.compared} layouts of {space.world_size} x {device.name} compared, {found.fitting} fit into "
        f"{bytes_in_words(memory - kept)} per rank; {bytes_in_words(kept)} are kept free for {_NOT_COUNTED}"
    )
    print(f"a step: {run_config.training.global_batch_size} x {run_config.data.seq_length} tokens")
    for words in encoding_words(run_config.transformer):
        _print_wrapped(words)
    if request.assumed:
        _print_wrapped(f"assumed: {' '.join(request.assumed)}")


def _print_wrapped(text: str) -> None:
    # Does not wrap inside flags, so that they can be copied.
    print(textwrap.fill(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False))


class _Progress:
    """Prints the status of a search to stderr: on the first call, then at most every 10 s."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next = self._start

    def __call__(self, doing: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SECONDS_BETWEEN_LINES
            print(f"{now - self._start:4.0f} s: {doing}", file=sys.stderr, flush=True)


def _print_found(
    found: Found, own: argparse.Namespace, *, memory: int, kept: int, progress: _Progress
) -> list[dict[str, Any]]:
    """Prints the table, and the flags of the first layouts that a dry run of all stages confirms."""
    if not found.front:
        assert found.nearest is not None, "the search raises an error if there is none"
        over = found.nearest.num_bytes - (memory - kept)
        print(
            f"no layout fits: the smallest one requires {bytes_in_words(over)} more on a rank of stage "
            f"{found.nearest.fullest}"
        )
        print("\n".join(table_lines([found.nearest])))
        print(flag_lines(found.nearest))
        return []
    print("Pareto-optimal layouts in memory of the fullest rank and step time:")
    print("\n".join(table_lines(found.front)))
    verified = []
    fitting = 0
    for number, advice in enumerate(found.front, start=1):
        if fitting == own.top:
            break
        progress(f"dry run of layout {number}")
        verified.append({"layout": number, **_dry_run(advice, own.gpus)})
        over = verified[-1]["peak"] - memory
        if over > 0:
            print(f"\n{number}. does not fit: {verified[-1]['words']}; {bytes_in_words(over)} too much", flush=True)
            continue
        fitting += 1
        print(f"\n{number}. {flag_lines(advice)}", flush=True)
        if (line := pair_line(advice)) is not None:
            _print_wrapped(f"   {line}")
        _print_wrapped(f"   dry run of {verified[-1]['words']}")
    return verified


def _dry_run(advice: Advice, world_size: int) -> dict[str, Any]:
    """Plans the fullest stage, and the last stage, whose logits may require more memory.

    Returns the memory of the fullest stage, its difference from the estimate, and the larger peak of the two stages.
    """
    words = [*advice.words, "--dry-run", "--world-size", str(world_size)]
    run_config = read_run_config(words)
    stage = advice.fullest
    plan = plan_run(
        run_config,
        pretrain_gpt.model_provider,
        forward_step_func=pretrain_gpt.forward_step,
        only_stages={stage, len(advice.stages) - 1},
    )
    planned = next(one.memory.total for one in plan.stages if one.stage == stage)
    quick, peak = advice.stages[stage].total, max(plan.stages, key=lambda one: one.memory.peak)
    words_of = (
        "as estimated" if planned == quick else f"{planned - quick:+,} bytes ({100 * (planned / quick - 1):+.2f}%)"
    )
    return {
        "stage": stage,
        "bytes": planned,
        "difference": planned - quick,
        "peak": peak.memory.peak,
        "peak_stage": peak.stage,
        "words": f"stage {stage}: {bytes_in_words(planned)}, {words_of}; at most "
        f"{bytes_in_words(peak.memory.peak)} with temporary buffers, on stage {peak.stage}",
    }


if __name__ == "__main__":
    main(sys.argv[1:])
