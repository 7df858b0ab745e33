"""Checkpoints written by Megatron-Core continue here as they did there. See tests/megatron_core/README.md."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron.core.dist_checkpointing import StreamReader, VerifiedCheckpoint, verify
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.storage import read_metadata
from megatron.tools.checkpoint import main as convert
from megatron.training.checkpointing.megatron_core import megatron_core_values
from megatron.training.checkpointing.megatron_core_files import STAND_INS, MegatronCoreFiles
from megatron.training.checkpointing.run_values import load_run_values
from tests.functional_tests.launch import Run, run_program
from tests.megatron_core.settings import FLAGS, STEPS, STEPS_IN_ALL, case_flags
from tests.unit_tests.tools.megatron_core_writer import read_tensors, saved, write_entries

FIXTURES = Path(__file__).parents[1] / "megatron_core" / "fixtures"
FURTHER = ["--train-iters", str(STEPS_IN_ALL), "--eval-iters", "0"]


def _run(case: str, folder: Path, *flags: str, ranks: int = 1, load: Path | None = None) -> Run:
    argv = [*FLAGS, *case_flags(case), *FURTHER, "--load", str(load or FIXTURES / case), *flags]
    return run_program(argv, ranks, folder=folder)


def _losses(run: Run) -> dict[int, float]:
    assert set(run.exit_codes) == {0}, run.written()
    return {iteration: fields["lm_loss"] for iteration, fields in run.steps.items()}


def _expected(case: str) -> dict[int, float]:
    found = json.loads((FIXTURES / case / "losses.json").read_text(encoding="utf-8"))["further"]
    return {int(iteration): loss for iteration, loss in found.items()}


# Megatron-Core wrote the fixtures with sharded state, on two tensor-parallel (dense) or expert-parallel ranks.
@pytest.mark.parametrize(
    ("case", "flags", "ranks"),
    [
        ("dense", [], 1),
        ("dense", ["--pipeline-model-parallel-size", "2"], 2),
        ("dense", ["--use-distributed-optimizer", "--micro-batch-size", "1"], 2),
        ("dense", ["--tensor-model-parallel-size", "2", "--sequence-parallel"], 2),
        ("experts", [], 1),
        ("experts", ["--pipeline-model-parallel-size", "2"], 2),
        ("experts", ["--expert-model-parallel-size", "2", "--use-distributed-optimizer"], 2),
    ],
    ids=lambda value: " ".join(value) or "alone" if isinstance(value, list) else str(value),
)
def test_further_steps_have_the_losses_of_the_run_that_went_on_there(
    case: str, flags: list[str], ranks: int, tmp_path: Path
) -> None:
    losses = _losses(_run(case, tmp_path, *flags, ranks=ranks))
    assert losses == pytest.approx(_expected(case), abs=1e-5)


@pytest.mark.parametrize(("case", "tolerance"), [("experts", 1e-5), ("masters", 2e-3)])
def test_a_common_state_inside_the_data_files_goes_on_likewise(case: str, tolerance: float, tmp_path: Path) -> None:
    """Megatron-Core 0.19 and later write no common.pt."""
    old, load = FIXTURES / case / f"iter_{STEPS:07d}", tmp_path / "new"
    common = torch.load(old / "common.pt", weights_only=False) | {"dataloader_state": 1}
    write_entries(load / old.name, read_tensors(old), {"common_state/shard_0_1": saved([common])})
    (load / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    run = _run(case, tmp_path / "log", load=load)
    assert _losses(run) == pytest.approx(_expected(case), abs=tolerance)
    assert f"note: {load / old.name} also holds dataloader_state, which is not read" in run.written()


def test_state_by_bucket_is_named_and_its_weights_are_loaded(tmp_path: Path) -> None:
    old, load = FIXTURES / "dense" / f"iter_{STEPS:07d}", tmp_path / "new"
    tensors = {key: value for key, value in read_tensors(old).items() if not key.startswith("optimizer.")}
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0"
    tensors |= {f"{bucket}.{kind}": torch.zeros(64) for kind in ("param", "exp_avg", "exp_avg_sq")}
    common = torch.load(old / "common.pt", weights_only=False)
    write_entries(load / old.name, tensors, {"common_state/shard_0_1": saved([common])})
    (load / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    refused = _run("dense", tmp_path / "refused", load=load)
    assert refused.exit_codes == [1], refused.written()
    assert f"{load / old.name}: its optimizer state is stored by bucket of the distributed" in refused.written()
    assert "--dist-ckpt-optim-fully-reshardable: add --no-load-optim, or --finetune" in refused.written()
    losses = _losses(_run("dense", tmp_path / "weights", "--no-load-optim", load=load))
    # The first of them only depends on the weights.
    assert losses[STEPS + 1] == pytest.approx(_expected("dense")[STEPS + 1], abs=1e-5)


def test_a_converted_checkpoint_goes_on_like_the_one_that_was_loaded(tmp_path: Path) -> None:
    save = tmp_path / "ours"
    _convert("dense", save)
    runs = [_run("dense", tmp_path / "converted", load=save), _run("dense", tmp_path / "loaded")]
    converted, loaded = map(_losses, runs)
    assert converted == loaded
    # Neither checkpoint contains random generator states, and neither load requires --no-load-rng.
    stored = [load_run_values(root / f"iter_{STEPS:07d}")["contents"] for root in (save, FIXTURES / "dense")]
    assert stored == [{"optimizer": True, "rng": False}] * 2
    assert all("dropout continues with fresh seeds" in run.written() for run in runs)
    assert converted == pytest.approx(_expected("dense"), abs=1e-5)


def _convert(case: str, save: Path) -> None:
    words = ["convert", "--from", "torch_dist_mcore", "--to", "torch_dist", "--load", str(FIXTURES / case)]
    assert convert([*words, "--save", str(save)]) == 0


def test_masters_are_loaded_beside_16_bit_weights(tmp_path: Path) -> None:
    # Megatron-Core accumulates bf16 GEMMs in a different order.
    assert _losses(_run("masters", tmp_path / "log")) == pytest.approx(_expected("masters"), abs=2e-3)
    _convert("masters", tmp_path / "ours")
    stored = verify(tmp_path / "ours" / f"iter_{STEPS:07d}")
    keys = [key for key in stored.tensors if not key.startswith("optimizer.")]
    masters = [_read(stored, f"optimizer.fp32_param.{key}") for key in keys]
    weights = [_read(stored, key) for key in keys]
    # Each master rounds to its weight, and some masters are more precise than their weights.
    assert all(torch.equal(master.bfloat16(), weight) for master, weight in zip(masters, weights, strict=True))
    assert any(not torch.equal(master, weight.float()) for master, weight in zip(masters, weights, strict=True))


@pytest.mark.parametrize(
    ("case", "target"),
    [
        ("dense", ["--target-tensor-parallel-size", "2"]),
        ("experts", ["--target-expert-parallel-size", "2"]),
        ("masters", ["--target-optimizer", "plain"]),
    ],
)
def test_a_checkpoint_goes_back_as_it_came(case: str, target: list[str], tmp_path: Path) -> None:
    """Compares every entry of the checkpoint. README.md reports how megatron-core continues from it."""
    _convert(case, tmp_path / "ours")
    words = ["convert", "--from", "torch_dist", "--to", "torch_dist_mcore", "--load", str(tmp_path / "ours")]
    command = [*words, "--save", str(tmp_path / "theirs"), "--target-transformer-impl", "local", *target]
    command += ["--target-padded-vocab-size", "64"]
    assert convert(command) == 0
    came, went = (root / f"iter_{STEPS:07d}" for root in (FIXTURES / case, tmp_path / "theirs"))
    raw = [_raw(MegatronCoreFiles.open(folder)) for folder in (came, went)]
    assert raw[0].tensors == raw[1].tensors
    assert [key for key in raw[0].tensors if not torch.equal(_read(raw[0], key), _read(raw[1], key))] == []
    objects = [_objects(folder) for folder in (came, went)]
    assert objects[0] == objects[1] and len(objects[0]) > 0
    common = [MegatronCoreFiles.open(folder).common for folder in (came, went)]
    assert _shape_of(common[0]["optimizer"]) == _shape_of(common[1]["optimizer"])
    assert common[0]["opt_param_scheduler"] == common[1]["opt_param_scheduler"]
    assert megatron_core_values(came)["optimizer"] == megatron_core_values(went)["optimizer"]


def _raw(files: MegatronCoreFiles) -> VerifiedCheckpoint:
    return VerifiedCheckpoint(files.folder, {}, files.metadata, files.checked())


def _objects(folder: Path) -> dict[str, bytes]:
    """Returns the stored objects by key, such as empty states of modules."""
    metadata = read_metadata(folder, stand_ins=STAND_INS)
    found = {}
    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            data = (folder / place.relative_path).read_bytes()
            found[index.fqn] = data[place.offset : place.offset + place.length]
    return {key: torch.load(io.BytesIO(content), weights_only=True) for key, content in found.items()}


def _shape_of(state: Any) -> Any:
    """Returns the nested state without current learning rates, which the schedule sets."""
    if isinstance(state, dict):
        return {key: _shape_of(value) for key, value in state.items() if key != "lr"}
    return [_shape_of(one) for one in state] if isinstance(state, list) else state


@pytest.mark.parametrize("is_nested", [True, False], ids=["with masters or sharded", "fp32"])
def test_the_step_count_is_found_in_each_form_of_optimizer_state(is_nested: bool, tmp_path: Path) -> None:
    load = tmp_path / "plain"
    shutil.copytree(FIXTURES / "dense", load)
    path = load / f"iter_{STEPS:07d}" / "common.pt"
    common = torch.load(path, weights_only=False)
    groups = [
        {key: value for key, value in group.items() if key != "step"}
        for group in common["optimizer"]["optimizer"]["param_groups"]
    ]
    inner = {"state": {"common_step": torch.tensor(3.0)}, "param_groups": groups}
    torch.save({**common, "optimizer": {"optimizer": inner} if is_nested else inner}, path)
    assert megatron_core_values(path.parent)["optimizer"] == {"step": 3, "grad_scaler": None}


def test_groups_that_stepped_differently_are_refused(tmp_path: Path) -> None:
    load = tmp_path / "uneven"
    shutil.copytree(FIXTURES / "dense", load)
    path = load / f"iter_{STEPS:07d}" / "common.pt"
    common = torch.load(path, weights_only=False)
    common["optimizer"]["optimizer"]["param_groups"][0]["step"] = 2.0
    torch.save(common, path)
    with pytest.raises(ValueError, match=r"parameters have been updated \[2, 3\] times: must be one number"):
        megatron_core_values(path.parent)


def _read(checkpoint: VerifiedCheckpoint, key: str) -> torch.Tensor:
    shape, dtype = checkpoint.tensors[key]
    values = torch.empty(shape, dtype=dtype)
    StreamReader(checkpoint).fill([ShardedTensor.whole(key, values)])
    return values


def test_a_run_saves_in_our_format_and_resumes_from_it(tmp_path: Path) -> None:
    save = tmp_path / "ours"
    first = _losses(_run("dense", tmp_path / "first", "--save", str(save), "--train-iters", str(STEPS + 2)))
    second = _losses(_run("dense", tmp_path / "second", load=save))
    assert {**first, **second} == pytest.approx(_expected("dense"), abs=1e-5)
    assert sorted(first) == [4, 5] and sorted(second) == [6, 7, 8]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden-size", "32"], "--hidden-size is 32 here, 16 in the checkpoint"),
        (["--vocab-size", "65"], "the vocabulary has 65 tokens: must be from 1 to 64, the number of rows"),
        (["--optimizer", "sgd"], "checkpoint of another optimizer: --optimizer is sgd here, adam in the checkpoint"),
        (["--lr", "0.5"], "lr"),
        # These flags change no weights, and the fixture's arguments do not contain them.
        (["--apply-layernorm-1p"], "--apply-layernorm-1p is on here, off in the checkpoint"),
        (["--rotary-interleaved"], "--rotary-interleaved is on here, off in the checkpoint"),
        (["--softmax-type", "off-by-one"], "--softmax-type is off-by-one here, vanilla in the checkpoint"),
        (["--use-mup", "--mup-base-hidden-size", "8"], "--use-mup is on here, off in the checkpoint"),
    ],
    ids=[
        "another model",
        "more tokens",
        "another optimizer",
        "another schedule",
        "norms around zero",
        "interleaved",
        "softmax",
        "width",
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(flags: list[str], message: str, tmp_path: Path) -> None:
    run = _run("dense", tmp_path, *flags, "--pipeline-model-parallel-size", "2", ranks=2)
    assert all(code != 0 for code in run.exit_codes)
    assert message in run.written()


def test_damage_is_found_before_a_tensor_is_touched(tmp_path: Path) -> None:
    load = tmp_path / "damaged"
    shutil.copytree(FIXTURES / "dense", load)
    data = load / f"iter_{STEPS:07d}" / "__1_0.distcp"
    content = bytearray(data.read_bytes())
    for place in range(len(content) // 2, len(content) // 2 + 64):
        content[place] ^= 1
    data.write_bytes(bytes(content))
    run = _run("dense", tmp_path / "log", "--pipeline-model-parallel-size", "2", ranks=2, load=load)
    assert all(code != 0 for code in run.exit_codes)
    assert f"{data} is corrupt" in run.written()
