"""A dense checkpoint loads into a model with experts in any layout, which at first computes the same."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.core.group_collectives import RemoteRankError
from megatron.training.checkpointing.run_state import ModelWeights
from megatron.training.training import run_step
from tests.counts import slow
from tests.distributed.parity import Box, layout, put_together
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

BASES = read_bases()
DENSE: Flags = {**BASES["llama"], "num-layers": 3, "ffn-hidden-size": 32, "eval-iters": 0}
EXPERTS: Flags = {
    **DENSE,
    **{name: BASES["moe"][name] for name in ("num-experts", "moe-router-topk", "moe-grouped-gemm")},
    "moe-layer-freq": "[1,0,1]",
    "moe-use-upcycling": True,
}
SEQUENTIAL: Flags = {"moe-grouped-gemm": None, "disable-bias-linear": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, {**layout(2), "swiglu": True}),
        (2, {"expert-model-parallel-size": 2, **OVERLAPPED_SMALL_BUCKETS, "bf16": True}),
        slow(2, {"use-torch-fsdp2": True}),
        slow(2, {**layout(pp=2, pipeline_model_parallel_layout="Ett|tL"), **SEQUENTIAL}),
    ],
)
def test_experts_begin_as_the_layers_that_they_replace(ranks: int, flags: Flags, tmp_path: Path) -> None:
    same = {name: flags[name] for name in ("bf16", "disable-bias-linear") if name in flags}
    trained = command_line({**DENSE, **same, "save": str(tmp_path)})
    again = command_line({**DENSE, **same, "load": str(tmp_path), "finetune": True})
    [(expected, dense)] = run_on_ranks(_trained_and_loaded, 1, trained, again)
    found = run_on_ranks(_first_step, ranks, command_line({**EXPERTS, **flags, "load": str(tmp_path)}))
    for loss, _ in found:
        assert loss == pytest.approx(expected, rel=2e-3 if "bf16" in flags else 1e-6)
    weights = put_together([box for _, boxes in found for box in boxes])
    for name, tensor in put_together(dense).items():
        if name in weights:
            assert weights[name].equal(tensor), name
        else:
            experts = weights[name.replace(".mlp.", ".mlp.experts.")]
            assert len(experts) == 4 and all(expert.equal(tensor) for expert in experts), name


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Trains a dense model and returns the folder of its checkpoint."""
    folder = str(tmp_path_factory.mktemp("dense"))
    run_on_ranks(_train_and_save, 1, command_line({**DENSE, "save": folder}))
    return folder


def _trained_and_loaded(trained: Sequence[str], again: Sequence[str]) -> tuple[float, list[Box]]:
    _train_and_save(trained)
    return _first_step(again)


def _train_and_save(argv: Sequence[str]) -> None:
    with started_run(argv) as run:
        run_step(run)
        run.save_checkpoint()


def _first_step(argv: Sequence[str]) -> tuple[float, list[Box]]:
    """Returns the loss of the first step and the weights before it."""
    with started_run(argv) as run:
        assert run.state.iteration == 0
        held = ModelWeights(run.model).tensors
        weights = [Box(t.key, t.global_shape, t.global_offset, t.data.clone()) for t in held]
        return run_step(run)[0].losses["lm loss"], weights


def test_an_upcycled_model_resumes_as_any_other(dense: str, tmp_path: Path) -> None:
    run_on_ranks(_upcycle_and_resume, 1, dense, str(tmp_path))


def _upcycle_and_resume(dense: str, folder: str) -> None:
    experts = {**EXPERTS, "save": folder}
    with started_run(command_line({**experts, "load": dense})) as run:
        run_step(run)
        run.save_checkpoint()
        expected = run_step(run)[0].losses
    with started_run(command_line({**experts, "load": folder})) as run:
        assert run.state.iteration == 1
        assert run_step(run)[0].losses == expected


ROUTERS: dict[str, Flags] = {
    "sigmoid": {"moe-router-score-function": "sigmoid"},
    "sigmoid, bias": {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True},
    "sqrtsoftplus, bias": {"moe-router-score-function": "sqrtsoftplus", "moe-router-enable-expert-bias": True},
    "softmax before the choice of all": {"moe-router-pre-softmax": True, "moe-router-topk": 4},
    "groups": {"moe-router-num-groups": 2, "moe-router-group-topk": 1, "moe-router-score-function": "sigmoid"},
    "top 3 of sigmoid": {"moe-router-score-function": "sigmoid", "moe-router-topk": 3},
    "all of sqrtsoftplus": {"moe-router-score-function": "sqrtsoftplus", "moe-router-topk": 4},
    "groups, sqrtsoftplus, bias": {
        "moe-router-num-groups": 2,
        "moe-router-group-topk": 1,
        "moe-router-score-function": "sqrtsoftplus",
        "moe-router-enable-expert-bias": True,
    },
    "fp64 scores": {"moe-router-dtype": "fp64", "moe-router-score-function": "sigmoid"},
    "jitter": {"moe-input-jitter-eps": 0.2},
    "losses": {
        "moe-router-load-balancing-type": ["seq_aux_loss"],
        "moe-aux-loss-coeff": [0.1],
        "moe-z-loss-coeff": 0.1,
    },
    "even loads": {"moe-router-force-load-balancing": True},
    "capacity": {"moe-expert-capacity-factor": 4.0, "moe-token-drop-policy": "position"},
    "replay": {"moe-enable-routing-replay": True, "moe-router-score-function": "sigmoid"},
}
# Weights that do not sum to one scale the output of the replaced layers.
SCALED: dict[str, Flags] = {
    "softmax before the choice": {"moe-router-pre-softmax": True},
    "twice the weights": {"moe-router-topk-scaling-factor": 2.0, "moe-router-score-function": "sigmoid"},
    "top 1 of sigmoid": {"moe-router-score-function": "sigmoid", "moe-router-topk": 1},
    "sinkhorn": {"moe-router-load-balancing-type": ["sinkhorn"], "moe-aux-loss-coeff": [0.0]},
    "few rows": {"moe-expert-capacity-factor": 0.5},
}


def test_a_dense_checkpoint_contradicts_no_router(dense: str) -> None:
    """If the weights of the chosen experts sum to one, the loss is the dense model's."""
    [(expected, losses)] = run_on_ranks(_losses_of_routers, 1, dense)
    scaled = {name: losses.pop(name) for name in SCALED}
    assert losses == pytest.approx(dict.fromkeys(ROUTERS, expected), rel=1e-6)
    assert all(1e-6 < abs(loss / expected - 1) < 0.01 for loss in scaled.values()), scaled


def _losses_of_routers(dense: str) -> tuple[float, dict[str, float]]:
    again = command_line({**DENSE, "load": dense, "finetune": True})
    runs = {name: command_line({**EXPERTS, **flags, "load": dense}) for name, flags in {**ROUTERS, **SCALED}.items()}
    return _first_step(again)[0], {name: _first_step(argv)[0] for name, argv in runs.items()}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"moe-use-upcycling": None}, "checkpoint of another model: --num-experts is 4"),
        ({"moe-ffn-hidden-size": 48}, "--moe-ffn-hidden-size is 48 .* --ffn-hidden-size is 32: must be equal"),
        ({"moe-shared-expert-intermediate-size": 16}, "--moe-shared-expert-intermediate-size is 16: must be left out"),
        ({"hidden-size": 64}, "checkpoint of another model: --hidden-size is 64"),
    ],
)
def test_what_cannot_become_experts_is_refused_on_every_rank(flags: Flags, message: str, dense: str) -> None:
    run_on_ranks(_refused, 2, command_line({**EXPERTS, **flags, "load": dense}), message)


def _refused(argv: Sequence[str], message: str) -> None:
    with pytest.raises((ValueError, RemoteRankError), match=message), started_run(argv):
        pass
