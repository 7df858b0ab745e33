"""Fuzzed command lines. With one process, they train; with more, one rank of the layout builds its model."""

import contextlib
import io
import os
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

import pretrain_gpt
from megatron.planner.fake_ranks import fake_rank
from megatron.training.arguments import parse_args, read_run_config, validate_args
from megatron.training.command_line.flags import Flag, FlagState, flag_table
from megatron.training.errors import exit_on_user_error
from megatron.training.gpt_builder import build_gpt
from megatron.training.setup import model_parts, setup_tokenizer
from tests.functional_tests.case import FOLDER, Flags, command_line, read_bases, read_cases
from tests.functional_tests.expectations import EXPECTATIONS
from tests.fuzz.judging import Verdict, judged
from tests.fuzz.values import NO_NUMBERS, ODD_FLOATS, ODD_INTS, ODD_WORDS, Choices

# Flags that end a run soon.
SHORT: Flags = {"train-iters": 2, "lr-warmup-iters": 1, "eval-iters": 1, "exit-interval": 2, "num-workers": 0}
# Flags whose plausible values are neither small numbers nor choices.
WORDS: dict[str, list[str]] = {
    "moe_layer_freq": ["1", "2", "[1,0]", "[0]+[1]", "([1]*1+[0])", "[1]*9999999999", "[2]", "(" * 500, "[1"],
    "window_size": ["4,0", "(8,0)", "-1,0", "1,1", "0,0", "99,0", "4"],
    "window_attn_skip_freq": ["1", "2", "[1,0]", "[0,1]*1"],
    "moe_paged_stash_buffer_bytes": ["1M", "64K", "0", "1", "99999999999T", "-1", "1.5M", "1G"],
    "exit_signal": ["SIGTERM", "term", "15", "9", "999", "SIGX", "SIGUSR1", "0"],
    "attention_backend": ["flash", "unfused", "local", "auto", "fused", "x"],
    "pipeline_model_parallel_layout": ["Et|tL", "E|t|t|L", "Ett|L", "(t|)*2L", "Et*99999999999|L", "|", "((", "t*0|tL"],
    "step_batch_size_schedule": ["0:2", "0:2,256:4", "0:4 1K:8", "5:2", "0:0", "0:2 1T:4", "0:4 99999999999999T:8"],
    "split": ["1,0,0", "8,1,1", "0,0,0", "-1,1,1", "nan,1,1", "1e308,1e308,1", "1,2,3,4", "100", "1,,1"],
    "tokenizer_type": ["NullTokenizer", "ByteLevelTokenizer", "HuggingFaceTokenizer", "TikTokenizer"],
    "hybrid_layer_pattern": ["M*M-"],
}
PATHS = ["load", "save", "tensorboard_dir", "data_cache_path", "record_routing", "memory_snapshot_path", "config"]
PATHS += ["tokenizer_model", "vocab_file", "merge_file", "data_args_path", "data_path", "train_data_path"]
# The largest values to draw for flags that would otherwise make a run slow.
_BOUNDED = {"num_workers": 1, "eval_iters": 3, "exit_duration_in_mins": 2}
_LAYOUT = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
_LAYOUT += ["expert_model_parallel_size", "expert_tensor_parallel_size", "num_virtual_stages_per_pipeline_rank"]
_LAYOUT += ["num_distributed_optimizer_instances", "decoder_first_pipeline_num_layers", "sequence_parallel"]


@dataclass(frozen=True)
class CommandLine:
    """A command line and its number of processes. rank: the rank whose model is built if there are several."""

    argv: list[str]
    world_size: int
    rank: int = 0

    def __str__(self) -> str:
        return f"WORLD_SIZE={self.world_size} RANK={self.rank} {self.argv}"


class FlagFuzzer:
    """Draws command lines of tiny models, with flags of functional cases and random flags that are valid together.

    Some command lines are invalid: they contain a contradiction or a hostile value.
    """

    def __init__(self, _shared: Path) -> None:
        self._bases = read_bases()
        self._cases = [
            {name: value for name, value in case.flags.items() if name not in SHORT}
            for path in sorted((FOLDER / "cases").glob("*.yaml"))
            for case in read_cases(path, self._bases, set(EXPECTATIONS))
        ]
        self._flags = {flag.dest: flag for flag in flag_table().flags}

    def draw(self, choices: Choices, folder: Path) -> CommandLine:
        world_size = choices.one([1, 1, 1, 1, 2, 3, 4, 6, 8])
        base = self._bases[choices.one(["dense", "llama", "moe", "moe"])]
        case = CommandLine(command_line({**base, **SHORT}), world_size, choices.below(world_size))
        tweaks = [self._of_case(choices, base, folder=folder) for _ in range(choices.one([0, 1, 1, 2]))]
        tweaks += [self._drawn(choices, folder=folder, among=self._works()) for _ in range(choices.integer(0, 4))]
        if world_size > 1:
            tweaks += [self._drawn(choices, folder=folder, among=_LAYOUT) for _ in range(choices.integer(1, 4))]
        for words in choices.shuffled(tweaks):
            tweaked = replace(case, argv=[*case.argv, *words])
            # Most changes that validation rejects are dropped, so that the examples reach the rest of the program.
            if choices.chance(0.1) or not _is_refused(tweaked):
                case = tweaked
        if choices.chance(0.3):
            among = list(self._flags) if choices.chance(0.1) else self._works()
            case.argv.extend(self._drawn(choices, folder=folder, among=among, hostile=True))
        if choices.chance(0.02):
            case.argv.insert(choices.below(len(case.argv)), choices.one(ODD_WORDS).replace("\x00", ""))
        return case

    def _works(self) -> list[str]:
        return [name for name, flag in self._flags.items() if flag.state is FlagState.WORKS]

    def _of_case(self, choices: Choices, base: Flags, *, folder: Path) -> list[str]:
        """Returns the flags, or some of the flags, in which a functional case differs from a base."""
        flags = choices.one(self._cases)
        different = {name: value for name, value in flags.items() if value is not None and base.get(name) != value}
        if choices.chance(0.3):
            different = dict(choices.some(list(different.items()), len(different) // 2))
        places = {"{tmp}": str(folder), "{tests}": str(FOLDER)}
        return [re.sub(r"{tmp}|{tests}", lambda found: places[found[0]], word) for word in command_line(different)]

    def _drawn(self, choices: Choices, *, folder: Path, among: list[str], hostile: bool = False) -> list[str]:
        return self._words(choices, self._flags[choices.one(among)], folder=folder, hostile=hostile)

    def _words(self, choices: Choices, flag: Flag, *, folder: Path, hostile: bool) -> list[str]:
        if flag.constant is not None:
            return [flag.flags[0], "yes"] if hostile and choices.chance(0.3) else [flag.flags[0]]
        count = flag.nargs if isinstance(flag.nargs, int) else choices.integer(1, 3) if flag.takes_list else 1
        count = choices.integer(0, 4) if hostile and choices.chance(0.2) else count
        values = [as_drawn(choices, flag, folder=folder, hostile=hostile) for _ in range(count)]
        # With `=`, a value may begin with a dash.
        return [f"{flag.flags[0]}={values[0]}"] if count == 1 else [flag.flags[0], *values]

    def check(self, case: CommandLine, folder: Path) -> Verdict:
        run = _run if case.world_size == 1 else _build_one_rank
        return judged(partial(run, case), folder)


def as_drawn(choices: Choices, flag: Flag, *, folder: Path = Path("."), hostile: bool = False) -> str:
    """Draws a value for a flag, usually a plausible one. hostile: usually an invalid or extreme value instead."""
    if flag.dest in _BOUNDED:
        return str(choices.one([-1, *range(_BOUNDED[flag.dest] + 1)]))
    if hostile and choices.chance(0.8):
        kinds = {"int": [*map(str, ODD_INTS), *NO_NUMBERS], "float": [*ODD_FLOATS, *map(str, ODD_INTS)]}
        # argv cannot contain NUL.
        return str(choices.one(kinds.get(flag.type_name, ODD_WORDS))).replace("\x00", "")
    if flag.dest in PATHS:
        return str(folder / choices.one(["a", "b/c", "a", "a.b"]))
    if flag.dest in WORDS:
        return choices.one(WORDS[flag.dest])
    if flag.choice_names():
        return choices.one(flag.choice_names())
    if flag.type_name == "float":
        return str(choices.one([0, 0.1, 0.5, 1, 1.5, 2, 100, choices.fraction()]))
    return str(choices.one([1, 1, 2, 2, 3, 4, 4, 5, 8, 16, 32, 33, 48, 64, choices.integer(0, 70)]))


def _run(case: CommandLine) -> None:
    pretrain_gpt.main(list(case.argv))


def _build_one_rank(case: CommandLine) -> None:
    with patch.dict(os.environ, WORLD_SIZE=str(case.world_size), RANK=str(case.rank)), exit_on_user_error():
        run_config = read_run_config(case.argv)
        with fake_rank(run_config, case.rank, world_size=case.world_size):
            setup_tokenizer(run_config)
            parts = [part for part, _ in model_parts(partial(build_gpt, run_config), run_config.transformer)]
            values = [p for part in parts for p in part.parameters() if p.numel() and not p.is_meta]
            assert all(torch.isfinite(p).all() for p in values)


def _is_refused(case: CommandLine) -> bool:
    silence = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with patch.dict(os.environ, WORLD_SIZE=str(case.world_size)), silence[0], silence[1]:
        try:
            validate_args(parse_args(argv=case.argv))
        except (ValueError, SystemExit):
            return True
    return False
