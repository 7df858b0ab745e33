"""TRAPS B18 and B21: layouts of 8 ranks that combine kinds of parallelism train as one process in fp64.

Compares losses, norms, gradients and weights. `make test` runs the layouts that combine the most kinds;
test_*_parity.py cover single kinds of parallelism, and `make soak` runs every layout. The data-parallel size fills up
to 8 ranks.
"""

from itertools import product

import pytest
import torch

from tests.counts import long_count, soak_only
from tests.distributed.parity import assert_layouts_agree, layout
from tests.distributed.whole_references import references
from tests.functional_tests.case import Flags

RANKS = 8
CLIP = 0.1  # below every norm, so that a wrong norm changes the weights
LAYOUTS_A_LAUNCH = 8  # run in sequence in the same processes, which takes less time
# One sample is a token group, so each data-parallel rank has at least one. Documents end within samples, and their last
# tokens are masked: ranks, microbatches and parts of sequences have unequal numbers of tokens in the loss.
SHARED: Flags = {
    "num-layers": 4,
    "seq-length": 32,
    "micro-batch-size": 1,
    "global-batch-size": long_count(4, soak=RANKS),
    "clip-grad": CLIP,
    "eod-mask-loss": True,
    "reset-position-ids": True,
    "reset-attention-mask": True,
    "no-create-attention-mask-in-dataloader": True,
}
LLAMA: Flags = {**SHARED, "num-query-groups": 4, "qk-layernorm": True, "calculate-per-token-loss": True}
MODELS: dict[str, tuple[str, Flags]] = {
    "gpt": (
        "dense",
        {
            **SHARED,
            "position-embedding-type": "learned_absolute",
            "window-size": "9,0",
            "softmax-type": "learnable",
        },
    ),
    "tied llama": ("llama", {**LLAMA, "untie-embeddings-and-output-weights": None}),
    "moe": (
        "moe",
        {
            **LLAMA,
            "num-experts": 8,
            "moe-layer-freq": "[0,1,1,1]",
            "moe-shared-expert-intermediate-size": 16,
            "moe-shared-expert-gate": True,
            "moe-router-load-balancing-type": ["aux_loss", "seq_aux_loss"],
            "moe-aux-loss-coeff": [0.05, 0.03],
            "moe-z-loss-coeff": 0.01,
            "moe-router-score-function": "sigmoid",
            "moe-router-enable-expert-bias": True,
        },
    ),
}
# First the layouts with all kinds of parallelism, then those with several replicas.
COMBINED: dict[str, list[Flags]] = {
    "gpt": [layout(2, 2, 2, vpp=2)],
    "tied llama": [layout(cp=2, pp=2, vpp=2)],
    "moe": [
        layout(2, 2, 2, vpp=2, ep=2, etp=2),
        layout(cp=2, ep=4, moe_token_dispatcher_type="alltoall"),
    ],
}
DENSE = [
    layout(2, sequence_parallel=False),
    layout(2),
    layout(pp=2),
    layout(pp=4),
    layout(pp=2, vpp=2),
    layout(cp=2),
    layout(cp=2, cp_comm_type="all_gather"),
    layout(cp=2, cp_comm_type="a2a"),
    layout(2, 2, 2, vpp=2),
]
EXPERTS = [
    layout(ep=2),
    layout(ep=4, moe_token_dispatcher_type="alltoall"),
    layout(ep=2, etp=2),
    layout(2, pp=2, ep=2),
    layout(cp=2, ep=4, moe_token_dispatcher_type="alltoall"),
    layout(2, 2, 2, vpp=2, ep=2, etp=2),
]


def _all_layouts(*, experts: bool) -> list[Flags]:
    """Returns the layouts that fit 8 ranks and the model's 8 heads in 4 groups, 4 layers and 8 experts."""
    found = []
    for tp, cp, pp, ep, etp in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4)):
        if tp * cp * pp > RANKS or ep * etp * pp > RANKS or (not experts and ep * etp > 1):
            continue
        more: Flags = {"cp_comm_type": "all_gather"} if (tp + pp) % 4 == 3 else {}
        if ep % 4 == 0:
            more["moe_token_dispatcher_type"] = "alltoall"
        found.append(layout(tp, cp, pp, vpp=2 if pp == 2 and cp < 4 else 1, ep=ep, etp=etp, **more))
    return found


# Experts with tensor parallelism require sequence parallelism. How attention exchanges its parts does not affect them.
BESIDE_EXPERTS = [sizes for sizes in DENSE[1:] if "cp-comm-type" not in sizes]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_b18_b21_eight_ranks_train_as_one(model: str) -> None:
    assert all(report.grad_norm > 2 * CLIP for report in _reference(model).reports)
    _check(model, COMBINED[model])


@pytest.mark.parametrize(
    ("model", "layouts"),
    [soak_only("gpt", DENSE), soak_only("tied llama", DENSE), soak_only("moe", BESIDE_EXPERTS + EXPERTS)],
)
def test_b18_b21_every_layout_of_eight_ranks_trains_as_one(model: str, layouts: list[Flags]) -> None:
    """Repeats test_b18_b21_eight_ranks_train_as_one and test_*_parity.py with all layouts."""
    layouts = layouts + _all_layouts(experts=model == "moe")
    for start in range(0, len(layouts), LAYOUTS_A_LAUNCH):
        _check(model, layouts[start : start + LAYOUTS_A_LAUNCH])


@pytest.mark.slow
def test_fp32_training_of_a_layout_agrees_with_one_process_in_fp64() -> None:
    base, flags = MODELS["moe"]
    layouts = [layout(2, pp=2, ep=2)]
    assert_layouts_agree(base, flags, 4, layouts, reference=_reference("moe"), dtype=torch.float32, tolerance=5e-5)


def _check(model: str, layouts: list[Flags]) -> None:
    base, flags = MODELS[model]
    assert_layouts_agree(base, flags, RANKS, layouts, reference=_reference(model))


_reference = references(MODELS)
