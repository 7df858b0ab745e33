"""Megatron-Core's checkpoints mean the same wherever their common state is stored, and unknown parts are named.

The expected values and tensors are those of fixtures that megatron-core 0.16.1 wrote, with common.pt.
"""

import argparse
import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing import ShardedTensor, StreamReader, verify
from megatron.tools.checkpoint import main
from megatron.training.checkpointing.megatron_core import megatron_core_values
from megatron.training.checkpointing.megatron_core_files import MegatronCoreFiles
from tests.unit_tests.tools.harmful import Harmful
from tests.unit_tests.tools.megatron_core_writer import read_tensors, saved, write_entries

FIXTURES = Path(__file__).parents[3] / "megatron_core" / "fixtures"
STEP = "iter_0000003"
KEY = "common_state/shard_0_1"
CASES = ("dense", "experts", "masters")
Values = dict[str, Any]


def tensors_of(case: str) -> dict[str, torch.Tensor]:
    return read_tensors(FIXTURES / case / STEP)


def common_of(case: str) -> Values:
    return torch.load(FIXTURES / case / STEP / "common.pt", weights_only=False)


def as_object(folder: Path, tensors: dict[str, torch.Tensor], common: Any, *, key: str = KEY) -> None:
    write_entries(folder, tensors, {key: saved(common), "rng_state/shard_0_1": saved([b"state"])})


def as_shard(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    as_object(folder, tensors, [common])


def without_shard(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    as_object(folder, tensors, common, key="common_state")


def wrapped(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    as_object(folder, {f"module.{key}": value for key, value in tensors.items()}, common, key=f"module.{KEY}")


def as_leaves(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    """torch flattens nested dicts, so that each value is an entry, and tensors are stored like weights."""
    in_torch(folder, {**tensors, KEY: common})


def in_torch(folder: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def as_stream(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    """torch saves the bytes that Megatron-Core's planner would write as they are."""
    stream = io.BytesIO()
    torch.save([common], stream)
    in_torch(folder, {**tensors, KEY: stream})


def as_bytes(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    stream = io.BytesIO()
    torch.save(common, stream)
    in_torch(folder, {**tensors, KEY: stream.getvalue()})


def as_list(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    in_torch(folder, {**tensors, KEY: [common]})


def by_shard(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    in_torch(folder, {**tensors, "common_state": {"shard_0_1": common}})


def in_both(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    as_shard(folder, tensors, common)
    torch.save(common, folder / "common.pt")


def in_a_file(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    write_entries(folder, tensors, {})
    torch.save(common, folder / "common.pt")


Write = Callable[[Path, dict[str, torch.Tensor], Any], None]


FORMS = [as_object, as_shard, without_shard, wrapped, as_leaves, as_stream, as_bytes, as_list, by_shard, in_both]


@pytest.mark.parametrize("write", [*FORMS, in_a_file])
@pytest.mark.parametrize("case", CASES)
def test_the_common_state_means_the_same_in_each_place(case: str, write: Write, tmp_path: Path) -> None:
    folder, common = tmp_path / "theirs" / STEP, common_of(case)
    if case == "masters":
        # Contains tensors, which torch stores as entries of their own.
        common["optimizer"]["grad_scaler"] = {"scale": torch.tensor([256.0]), "growth_tracker": 7}
    write(folder, tensors_of(case), common)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("3")
    expected = megatron_core_values(FIXTURES / case / STEP)
    if case == "masters":
        expected["optimizer"]["grad_scaler"] = {"scale": 256.0, "growth_tracker": 7.0}
    assert megatron_core_values(folder) == expected
    assert expected["optimizer"]["step"] == 3 and expected["scheduler"]["num_steps"] == 12
    # Also after a conversion, with weights and optimizer state.
    for source, target in ((FIXTURES / case, "from fixture"), (folder.parent, "converted")):
        words = ["--from", "torch_dist_mcore", "--to", "torch_dist", "--load", str(source)]
        assert main(["convert", *words, "--save", str(tmp_path / target)]) == 0
    one, two = (verify(tmp_path / name / STEP) for name in ("from fixture", "converted"))
    assert one.tensors == two.tensors and any(key.startswith("optimizer.exp_avg_sq.") for key in two.tensors)
    assert main(["diff", str(one.folder), str(two.folder)]) == 0
    same = ("iteration", "train_state", "scheduler", "contents")
    assert {name: one.common[name] for name in same} == {name: two.common[name] for name in same}


def two_shards(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    write_entries(folder, tensors, {"common_state/shard_0_2": saved(common), "common_state/shard_1_2": saved(common)})


def two_places(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    as_object(folder, tensors, common)
    torch.save({**common, "iteration": 2}, folder / "common.pt")


def no_place(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    write_entries(folder, tensors, {})


def as_tensor(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    write_entries(folder, {**tensors, KEY: torch.zeros(3)}, {})


def with_code(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    as_object(folder, tensors, {**common, "hook": Harmful()})


def of_no_run(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    as_object(folder, tensors, {**common, "iteration": -3})


def older(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    as_object(folder, tensors, {**common, "checkpoint_version": 1.0})


def with_other_args(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    as_object(folder, tensors, {**common, "args": vars(common["args"])})


def of_another_model(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    args = argparse.Namespace(**{**vars(common["args"]), "qk_l2_norm": True})
    as_object(folder, tensors, {**common, "args": args})


def with_code_in_bytes(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    as_bytes(folder, tensors, {**common, "hook": Harmful()})


def flipped(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    marked = {**common, "content_metadata": {"text": "a text to find in the file"}}
    as_object(folder, tensors, marked)
    data = folder / "__0_0.distcp"
    data.write_bytes(data.read_bytes().replace(b"a text to find", b"a test to find"))


def of_a_module(folder: Path, tensors: dict[str, torch.Tensor], common: Any) -> None:
    write_entries(folder, tensors, {KEY: saved(common), "decoder.layers.mlp.scales/shard_0_2": saved([1])})


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (two_shards, "does not locate common_state/shard_0_2 among the values of the common state"),
        (two_places, "common.pt and .*common_state/shard_0_1 hold different values: remove the one of an earlier save"),
        (no_place, "has neither common.pt nor common_state/shard_0_1 in .metadata"),
        (as_tensor, "common_state/shard_0_1 holds a Tensor: must be a dict"),
        (with_code, "common_state/shard_0_1 cannot be read: it refers to posix.mkdir, which is not one"),
        (with_code_in_bytes, "common_state/shard_0_1 cannot be read: it refers to posix.mkdir, which is not one"),
        (of_no_run, "common_state/shard_0_1 holds -3 as iteration: must be a non-negative integer"),
        (older, "common_state/shard_0_1 holds 1.0 as checkpoint_version: must be 2.0 or 3.0"),
        (with_other_args, "common_state/shard_0_1 holds {.* as args: must be the Namespace"),
        (of_another_model, "common_state/shard_0_1: qk_l2_norm is True: must be unset"),
        (flipped, "__0_0.distcp is corrupt: common_state/shard_0_1: Bad CRC-32"),
        (of_a_module, "holds an object as decoder.layers.mlp.scales/shard_0_2: must be a tensor"),
    ],
)
def test_other_common_states_are_refused_by_name(
    write: Write, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    write(tmp_path / STEP, tensors_of("dense"), common_of("dense"))
    with pytest.raises(ValueError, match=message):
        megatron_core_values(tmp_path / STEP)
    assert not (tmp_path / "harm").exists()


def by_bucket(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the entries of the distributed optimizer's default form, which the files key by flat buffer."""
    place = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0"
    weights = {key: value for key, value in tensors.items() if not key.startswith("optimizer.")}
    return {**weights, **{f"{place}.{kind}": torch.zeros(64) for kind in ("param", "exp_avg", "exp_avg_sq")}}


def with_momenta(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the entries of an optimizer whose state is not Adam's."""
    return {key.replace(".exp_avg.", ".momentum_buffer."): value for key, value in tensors.items()}


def weights_alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors.items() if not key.startswith("optimizer.")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            by_bucket,
            r"stored by bucket of the distributed optimizer \(optimizer.distributed.dp_group_idx_0.*which is not",
        ),
        (
            with_momenta,
            "its optimizer state momentum_buffer is not read: only exp_avg, exp_avg_sq, fp32_param, param are",
        ),
        (weights_alone, "it contains no optimizer state"),
    ],
)
def test_optimizer_state_that_is_not_read_is_named_and_weights_are_read(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensors = tensors_of("dense")
    as_shard(tmp_path / "theirs" / STEP, change(tensors), common_of("dense"))
    values = megatron_core_values(tmp_path / "theirs" / STEP)
    assert values["contents"]["optimizer"] is False
    with pytest.raises(ValueError, match=message):
        raise ValueError(values["not_read"]["optimizer"])
    words = ["--from", "torch_dist_mcore", "--to", "torch_dist", "--load", str(tmp_path / "theirs" / STEP)]
    assert main(["convert", *words, "--save", str(tmp_path / "ours")]) == 0
    assert values["not_read"]["optimizer"] in capsys.readouterr().out
    ours = verify(tmp_path / "ours" / STEP)
    found = torch.empty(ours.tensors["decoder.final_layernorm.weight"][0])
    StreamReader(ours).fill([ShardedTensor.whole("decoder.final_layernorm.weight", found)])
    assert torch.equal(found, tensors["decoder.final_layernorm.weight"])


def test_unknown_entries_and_values_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = copy.deepcopy(common_of("dense")) | {"dataloader_state": {"epoch": 1}}
    objects = {KEY: saved([common]), "tokens_seen/shard_0_1": saved([1]), "rng_state/shard_0_1": saved([b""])}
    write_entries(tmp_path / STEP, tensors_of("dense"), objects)
    assert MegatronCoreFiles.open(tmp_path / STEP).unknown == ("dataloader_state", "tokens_seen")
    words = ["--from", "torch_dist_mcore", "--to", "torch_dist", "--load", str(tmp_path / STEP)]
    assert main(["convert", *words, "--save", str(tmp_path / "ours")]) == 0
    written = capsys.readouterr().out
    assert "not converted, because it is unknown: dataloader_state, tokens_seen\n" in written
    assert "not converted: 2 entries that are neither weights nor optimizer state" in written
