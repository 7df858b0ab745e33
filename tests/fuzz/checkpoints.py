"""Fuzzed checkpoints: damaged files, and contents that no save writes with valid checksums."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import pretrain_gpt
from megatron.core.dist_checkpointing import ShardedTensor, list_tensors, load_items
from megatron.tools import checkpoint as checkpoint_tool
from megatron.tools import generate as generate_tool
from megatron.training.checkpointing.folder import find_checkpoint
from megatron.training.errors import exit_on_user_error
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.fuzz.checkpoint_damage import DAMAGES, LATEST, Damaged
from tests.fuzz.judging import Verdict, judged, note_of
from tests.fuzz.values import Choices

_TINY: Flags = {
    "num-layers": 1,
    "hidden-size": 8,
    "num-attention-heads": 2,
    "seq-length": 8,
    "max-position-embeddings": 8,
}
_SAVING: Flags = {
    **_TINY,
    "train-iters": 2,
    "save-interval": 1,
    "lr-warmup-iters": 0,
    "eval-iters": 0,
    "vocab-size": 15,
}
_SAVING |= {"global-batch-size": 2, "make-vocab-size-divisible-by": 8}
_FORMAT_1 = Path(__file__).parents[1] / "unit_tests/core/dist_checkpointing/format_1"


class CheckpointFuzzer:
    """Damages the checkpoints of a tiny run, and passes them to a program or tool that reads checkpoints."""

    def __init__(self, shared: Path) -> None:
        self._flags = {kind: {**read_bases()[kind], **_SAVING, **more} for kind, more in _KINDS.items()}
        for kind, flags in self._flags.items():
            if not (shared / kind).exists():
                argv = command_line({**flags, "save": shared / kind})
                assert judged(partial(pretrain_gpt.main, argv), shared) is Verdict.RIGHT
        if not (shared / "format_1").exists():
            shutil.copytree(_FORMAT_1, shared / "format_1" / LATEST)
        self._shared = shared
        self._tensors = {folder: _tensors(folder) for folder in shared.glob("*/iter_*")}

    def draw(self, choices: Choices, folder: Path) -> Damaged:
        kind = choices.one(["dense", "moe", "moe", "format_1"])
        action = choices.one(list(_ACTIONS)[:6] if kind == "format_1" else list(_ACTIONS))
        case = Damaged(kind, action, choices.one(_WORDS.get(action, [[]])))
        shutil.copytree(self._shared / kind, folder / "saved")
        for _ in range(choices.one([0, 1, 1, 1, 1, 2])):
            damage = choices.one(DAMAGES)
            note = note_of(partial(damage, choices, folder / "saved", case), earlier=case.notes)
            case.notes.append(f"{damage.__name__}: {note}")
        case.is_plain &= len(case.notes) == 1
        return case

    def check(self, case: Damaged, folder: Path) -> Verdict:
        act = _ACTIONS[case.action]
        verdict = judged(partial(act, self, case, folder=folder), folder)
        assert not (folder / "harm").exists(), "code in the checkpoint was executed"
        return verdict

    def load(self, case: Damaged, *, folder: Path) -> None:
        """Loads a window of each tensor and compares it with the saved values."""
        with exit_on_user_error():
            found = find_checkpoint(str(folder / "saved"))
            if found is None:
                # Without a tracker, nothing refers to a checkpoint that a killed save set aside.
                assert case.kind == "format_1" and "replaced" in str(case.notes)
                return
            # A checkpoint that was set aside, or copied under a different name, contains the same tensors.
            name = found.path.name if found.iteration == 1 else LATEST
            whole = self._tensors[self._shared / case.kind / name]
            for key, tensor in whole.items():
                window = tuple(slice(size // 3, size) for size in tensor.shape)
                read = torch.zeros_like(tensor[window])
                load_items(
                    [ShardedTensor.at(key, read, tuple(tensor.shape), tuple(one.start for one in window))], found.path
                )
                same = read.view(torch.uint8) == tensor[window].contiguous().view(torch.uint8) if read.ndim else True
                assert case.is_content_changed or bool(torch.as_tensor(same).all()), (
                    f"{key} differs from the saved tensor"
                )

    def inspect(self, case: Damaged, *, folder: Path) -> None:
        assert checkpoint_tool.main(["inspect", str(folder / "saved"), *case.words]) == 0

    def verify(self, case: Damaged, *, folder: Path) -> None:
        code = checkpoint_tool.main(["verify", str(folder / "saved"), *case.words])
        assert code == 1 or not case.is_plain, "damage was not found"

    def diff(self, case: Damaged, *, folder: Path) -> None:
        checkpoint_tool.main(["diff", str(folder / "saved"), str(self._shared / case.kind / LATEST), *case.words])

    def prune(self, case: Damaged, *, folder: Path) -> None:
        assert checkpoint_tool.main(["prune", str(folder / "saved"), *case.words]) == 0

    def to_safetensors(self, case: Damaged, *, folder: Path) -> None:
        self._convert(case, "safetensors", folder=folder)

    def to_legacy(self, case: Damaged, *, folder: Path) -> None:
        self._convert(case, "torch", folder=folder)

    def _convert(self, case: Damaged, target: str, *, folder: Path) -> None:
        words = ["--load", str(folder / "saved"), "--save", str(folder / "converted"), *case.words]
        assert checkpoint_tool.main(["convert", "--from", "torch_dist", "--to", target, *words]) == 0

    def train(self, case: Damaged, *, folder: Path) -> None:
        flags = {**self._flags[case.kind], "load": folder / "saved", "train-iters": 4, "exit-interval": 1}
        flags |= {"override-opt-param-scheduler": True, "lr-decay-iters": 4}
        pretrain_gpt.main([*command_line(flags), *case.words])

    def generate(self, case: Damaged, *, folder: Path) -> None:
        generate_tool.main(["--load", str(folder / "saved"), "--prompt", "1 2", "--max-new-tokens", "2"])


_KINDS: dict[str, Flags] = {"dense": {}, "moe": {"bf16": True, "moe-ffn-hidden-size": 8}}
# The first six actions accept any checkpoint, not only checkpoints of training runs.
_ACTIONS: dict[str, Callable[..., None]] = {
    name: vars(CheckpointFuzzer)[name]
    for name in ("load", "inspect", "verify", "diff", "prune", "to_safetensors", "to_legacy", "train", "generate")
}
_WORDS: dict[str, list[list[str]]] = {
    "inspect": [[], ["--tensors"], ["--ckpt-step", "2"], ["--ckpt-step", "1"], ["--ckpt-step", "-1"]],
    "verify": [[], ["--ckpt-step", "2"]],
    "diff": [[], ["--ignore", "choices*"], ["--ignore", "["]],
    "prune": [
        ["--keep-latest", "1"],
        ["--keep-latest", "1", "--dry-run"],
        ["--keep-latest", "9", "--keep-interval", "2"],
    ],
    "to_legacy": [[], ["--target-tensor-parallel-size", "2"], ["--target-tensor-parallel-size", "-1"]],
    "train": [
        [],
        [],
        ["--use-checkpoint-args"],
        ["--finetune"],
        ["--no-load-optim", "--no-load-choices"],
        ["--ckpt-step", "2"],
        ["--dist-ckpt-strictness", "log_all"],
        ["--use-distributed-optimizer", "--ckpt-fully-parallel-load"],
        ["--use-checkpoint-opt-param-scheduler"],
        ["--skip-train", "--eval-iters", "1"],
    ],
}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Loads all tensors of an undamaged checkpoint."""
    tensors = {key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in list_tensors(folder).items()}
    load_items([ShardedTensor.whole(key, tensor) for key, tensor in tensors.items()], folder)
    return tensors
