"""Transformer Engine's layers in place of local ones, through a stand-in with the published signatures."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.training.arguments import parse_args, validate_args
from megatron.training.gpt_builder import build_gpt
from tests.distributed.tiny_runs import parameters, started_run, train_steps
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks
from tests.unit_tests.core.extensions.fake_engine import CLASSES, bound, fake_engine
from tests.unit_tests.core.extensions.write_engine_signatures import SIGNATURES_FILE, signatures
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_batch, small_config

ENGINE: Flags = {"transformer-impl": "transformer_engine"}
TP: Flags = {"tensor-model-parallel-size": 2}
RUNS: dict[str, tuple[str, Flags]] = {
    "biases, LayerNorm": ("dense", {}),
    "tensor parallel": ("dense", TP),
    "RMSNorm, groups, sequence parallel": (
        "llama",
        {**TP, "sequence-parallel": True, "use-distributed-optimizer": True},
    ),
    "window, norms of heads, stages": (
        "llama",
        {"window-size": "9,0", "qk-layernorm": True, "pipeline-model-parallel-size": 2},
    ),
    "latent attention": ("latent", TP),
    "latent attention, sequence parallel": ("latent", {**TP, "sequence-parallel": True, "q-lora-rank": None}),
    "context parallel": ("llama", {"context-parallel-size": 2, "cp-comm-type": "p2p"}),
    "packed samples": ("llama", {"reset-attention-mask": True, "reset-position-ids": True}),
    "experts": ("moe", {"expert-model-parallel-size": 2, "moe-shared-expert-intermediate-size": 32}),
}


def _argv(name: str, more: Flags) -> list[str]:
    base, flags = RUNS[name]
    return command_line({**read_bases()[base], "attention-backend": "unfused", **flags, **more})


def _trained(folder: str) -> dict[str, list[Any]]:
    """Trains each run with local layers and with the engine, and continues each from the other's checkpoint."""
    found = {}
    for number, name in enumerate(RUNS):
        found[name] = []
        for kind in (False, True):
            saved = f"{folder}/{number}-{kind}"
            found[name].append(_run(_argv(name, {"save": saved}), by_engine=kind, saves=True))
        for kind in (False, True):
            other = f"{folder}/{number}-{not kind}"
            found[name].append(_run(_argv(name, {"load": other}), by_engine=kind, saves=False))
    return found


def _run(argv: list[str], *, by_engine: bool, saves: bool) -> Any:
    engine = command_line(ENGINE) if by_engine else []
    with fake_engine() if by_engine else nullcontext(), started_run([*argv, *engine]) as run:
        classes = {type(module).__name__ for chunk in run.model for module in chunk.modules()}
        assert ("TEColumnParallelLinear" in classes) == by_engine
        names = parameters(*run.model)
        steps = train_steps(run, 2)
        if saves:
            run.save_checkpoint()
        return list(names), [step["losses"] | {"norm": float(step["grad_norm"])} for step in steps]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    return run_on_ranks(_trained, 2, str(tmp_path_factory.mktemp("engine")), timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_runs_are_those_of_local_layers_and_go_on_from_each_others_checkpoints(
    name: str, trained: list[dict[str, list[Any]]]
) -> None:
    for of_rank in trained:
        local, engine, after_engine, after_local = of_rank[name]
        assert local[0] == engine[0], "parameter names differ"
        for one, other in ((local, engine), (after_engine, after_local)):
            for step, reference in zip(other[1], one[1], strict=True):
                assert step == pytest.approx(reference, rel=2e-5)
        assert local[1] != after_local[1], "the resumed run restarted from scratch"


LEVELS: Flags = {
    "context-parallel-size": 4,
    "cp-comm-type": ["a2a+p2p", "p2p"],
    "hierarchical-context-parallel-sizes": [2, 2],
}


def _of_both(flags: Flags) -> list[Any]:
    argv = command_line({**read_bases()["llama"], "attention-backend": "unfused", **flags})
    return [_run(argv, by_engine=kind, saves=False) for kind in (False, True)]


@pytest.mark.slow
def test_two_levels_of_context_parallelism_are_given_as_two_groups() -> None:
    for local, engine in run_on_ranks(_of_both, 4, LEVELS, timeout=120):
        for step, reference in zip(engine[1], local[1], strict=True):
            assert step == pytest.approx(reference, rel=2e-5)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"lora-rank": 2}, "--lora-rank is 2"),
        ({"softmax-type": "learnable"}, "--softmax-type is learnable"),
        ({"init-model-with-meta-device": True, "use-torch-fsdp2": True}, "--init-model-with-meta-device is True"),
    ],
)
def test_what_its_layers_do_not_have_is_refused(flags: Flags, named: str) -> None:
    args = validate_args(parse_args(argv=command_line({**read_bases()["llama"], **ENGINE, **flags})))
    args.padded_vocab_size = args.unpadded_vocab_size = 128
    with fake_engine(), pytest.raises(ValueError, match=named):
        build_gpt(args)


@pytest.mark.parametrize(
    ("layer", "setting"),
    [
        ("TERowParallelLinear", {"input_is_parallel": False}),
        ("TERowParallelLinear", {"is_expert": True}),
        ("TEColumnParallelLinear", {"gather_output": True}),
    ],
)
def test_a_linear_layer_names_the_setting_that_it_does_not_have(layer: str, setting: dict[str, bool]) -> None:
    [(name, value)] = setting.items()
    with fake_engine(), pytest.raises(ValueError, match=f"{name} is {value}: .*must be {not value}"):
        getattr(transformer_engine, layer)(4, 4, config=None, init_method=None, **setting)


def _fresh_weight(mode: str | None) -> Tensor:
    model_parallel_cuda_manual_seed(7, tp_rank=dist.get_rank())
    config = small_config()
    with fake_engine():
        layer = transformer_engine.TELinear(
            4, 4, config=config, init_method=config.init_method, parallel_mode=mode, tp_group=dist.group.WORLD
        )
    return layer.weight.detach()


@pytest.mark.parametrize("mode", [None, "column"])
def test_ranks_draw_the_same_weight_where_each_holds_it_whole_and_other_parts_of_a_split_one(mode: str | None) -> None:
    first, second = run_on_ranks(_fresh_weight, 2, mode)
    assert torch.equal(first, second) == (mode is None) and first.std() > 0


def test_packed_samples_are_cut_at_their_borders_and_only_where_ranks_have_them_whole() -> None:
    tokens, positions, labels = small_batch()
    batch, length = tokens.shape
    borders = [0, *(start + end for start in range(0, batch * length, length) for end in (length // 3, length))]
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor(borders, dtype=torch.int32))
    config, losses = small_config(**LLAMA_LIKE), []
    with fake_engine():
        for spec in (get_gpt_layer_local_spec(), get_gpt_layer_with_transformer_engine_spec()):
            torch.manual_seed(3)
            model = GPTModel(config, spec, 128, length, position_embedding_type="rope")
            losses.append(model(tokens, positions, None, labels=labels, packed_seq_params=packed))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    core: Any = model.decoder.layers[0].self_attention.core_attention
    rows = torch.zeros(batch * length, 4, 8)
    with pytest.raises(ValueError, match="got causal, a mask and 1.*set transformer_impl to local"):
        core(rows, rows, rows, torch.zeros(1, 1, 1, 1, dtype=torch.bool), packed_seq_params=packed)
    core.cp_size = 2
    with pytest.raises(ValueError, match="got causal, None and 2"):
        core(rows, rows, rows, packed_seq_params=packed)
    with pytest.raises(ValueError, match="attention_bias is given"):
        core(rows, rows, rows, attention_bias=rows)


def test_without_the_package_the_error_says_what_to_install() -> None:
    args = validate_args(parse_args(argv=command_line({**read_bases()["llama"], **ENGINE})))
    args.padded_vocab_size = args.unpadded_vocab_size = 128
    with pytest.raises(ValueError, match=r"--transformer-impl is transformer_engine, .*transformer-engine\[pytorch\]"):
        build_gpt(args)
    with pytest.raises(ImportError, match="transformer_engine cannot be imported"):
        get_gpt_layer_with_transformer_engine_spec()


def test_the_stand_in_refuses_what_the_published_classes_do_not_take() -> None:
    with pytest.raises(TypeError, match="unknown .'no_such'"):
        bound("Linear", "__init__", (1, 2), {"no_such": 3})
    with pytest.raises(TypeError, match="missing .'out_features'"):
        bound("Linear", "__init__", (1,), {})
    assert set(CLASSES) == {"Linear", "LayerNorm", "RMSNorm", "DotProductAttention"}


# Downloads the package. In `make test`, all other tests here bind calls to the signatures in SIGNATURES_FILE.
@pytest.mark.soak
def test_signatures_are_those_of_the_published_package(tmp_path: Path) -> None:
    version = re.search(r'"version": "(.+)"', SIGNATURES_FILE.read_text())
    assert version is not None
    words = ["download", "--quiet", "--no-deps", f"transformer-engine=={version[1]}", "--dest", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"the package registry cannot be reached: {done.stderr[-200:]}")
    assert signatures(next(tmp_path.glob("*.whl"))) == json.loads(SIGNATURES_FILE.read_text())
