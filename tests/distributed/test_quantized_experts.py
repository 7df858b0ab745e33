"""Training with experts in 8 bits: copies of weights are never stale, sent bytes change nothing, layouts agree."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.quantized_experts import QuantizedLinear, QuantizedWeights
from megatron.training.run import TrainingRun
from tests.distributed.parity import layout
from tests.distributed.stash_runs import STEPS, Trained, argv_of, stash, train_here
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS, digest_of
from tests.functional_tests.case import Flags
from tests.harness import run_on_ranks

IN_8_BITS: Flags = {
    "bf16": True,
    "fp8-format": "e4m3",
    "fp8-recipe": "mxfp8",
    "num-layers": 3,
    # Rows of several blocks, of either recipe.
    "hidden-size": 144,
    "moe-ffn-hidden-size": 160,
    "global-batch-size": 8,
    "moe-expert-rank-capacity-factor": 2,
}
IN_BACKWARD: Flags = {"optimizer-in-backward": True, "optimizer-in-backward-clip": "exact"}
# Ways in which parameters change between the steps.
UPDATES: dict[str, Flags] = {
    "after backward": {},
    "shards gathered in forward": OVERLAPPED_SMALL_BUCKETS,
    "in backward": {**OVERLAPPED_SMALL_BUCKETS, **IN_BACKWARD},
    "fsdp2": {"use-torch-fsdp2": True, "untie-embeddings-and-output-weights": True},
    "retried steps": {"moe-expert-rank-capacity-factor": 1, **layout(ep=2), **stash(0.05)},
    "evaluations": {"eval-interval": 1, "eval-iters": 2, "split": "80,20,0"},
}
_of_step = QuantizedWeights.of_step


class _Count:
    """Counts forwards of experts, and how often their weights were quantized."""

    def __init__(self, *, always: bool = False) -> None:
        """always: quantize in each forward."""
        self.forwards, self.quantized, self._always = 0, 0, always

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager that counts."""

        def of_step(
            weights: QuantizedWeights, step: int | None, *given: Tensor, **params: Any
        ) -> tuple[QuantizedLinear, QuantizedLinear]:
            assert step is not None, "a trainer begins steps"
            before, self.forwards = weights._quantized_for, self.forwards + 1
            found = _of_step(weights, None if self._always else step, *given, **params)
            self.quantized += weights._quantized_for != before
            return found

        with patch.object(QuantizedWeights, "of_step", of_step):
            yield


def _compare_updates(name: str) -> tuple[Trained, int, int]:
    flags = argv_of(IN_8_BITS, UPDATES[name])
    once, always = _Count(), _Count(always=True)
    with always.watching():
        expected = train_here(flags)
    with once.watching():
        trained = train_here(flags)
    trained.assert_same(expected, name)
    return trained, once.forwards, once.quantized


@pytest.mark.parametrize("name", UPDATES)
def test_weights_are_quantized_once_a_step_and_never_stale(name: str) -> None:
    for trained, forwards, quantized in run_on_ranks(_compare_updates, 2, name):
        retries = sum(step.voids for step in trained.pages)
        evaluations = 2 * STEPS if name == "evaluations" else 0
        assert quantized == 3 * (STEPS + retries + evaluations)
        assert quantized < forwards and len({step["grad_norm"] for step in trained.steps}) == STEPS


# The matrices of 4 experts are [64, 128] and [64, 64], so that half of a layer consists of whole blocks.
GATHERED: dict[str, Flags] = {
    "one bucket": {"use-distributed-optimizer": True},
    "in forward": {
        "use-distributed-optimizer": True,
        "overlap-grad-reduce": True,
        "overlap-param-gather": True,
        "ddp-bucket-size": 40_000,
    },
    "biases, blocks of 128": {
        "use-distributed-optimizer": True,
        "fp8-recipe": "blockwise",
        "disable-bias-linear": None,
    },
    "in backward": {"use-distributed-optimizer": True, "overlap-grad-reduce": True, **IN_BACKWARD},
}
WIDE: Flags = {"hidden-size": 64, "moe-ffn-hidden-size": 64, "num-experts": 4}


def _trained(*flags: Flags) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Trains, and returns the reports of the steps and digests of the parameters."""
    digests: dict[str, str] = {}

    @contextmanager
    def reading(run: TrainingRun) -> Iterator[None]:
        yield
        for chunk in run.model:
            assert isinstance(chunk, DistributedDataParallel)
            chunk.finish_param_sync()
            chunk.restore_params()
            digests.update((name, digest_of(param)) for name, param in chunk.named_parameters())

    steps = train_here(argv_of(IN_8_BITS, WIDE, *flags), reading).steps
    # The last step before an end says that it is the last one.
    return [{**step, "is_last": None} for step in steps], digests


def _compare_gathered(name: str, folder: str) -> int:
    flags, packed = GATHERED[name], {"fp8-param-gather": True, "save": folder, "save-interval": 3}
    steps, params = _trained(flags)
    first, _ = _trained(flags, packed, {"exit-interval": 3})
    rest, resumed_params = _trained(flags, packed, {"load": folder, "save": None, "save-interval": None})
    assert [*first, *rest] == steps
    assert resumed_params == params
    plain, plain_params = _trained(flags, {"load": folder})
    assert plain == rest and plain_params == params, "a checkpoint has the parameters as they are"
    return len(steps)


@pytest.mark.parametrize("name", GATHERED)
def test_weights_that_are_gathered_in_8_bits_have_the_same_results(name: str, tmp_path: Path) -> None:
    assert run_on_ranks(_compare_gathered, 2, name, str(tmp_path)) == [STEPS, STEPS]


SENT: dict[str, Flags] = {
    "alltoall": layout(ep=2),
    "shared expert, overlapped": {
        **layout(ep=2),
        "moe-shared-expert-intermediate-size": 16,
        "moe-shared-expert-overlap": True,
    },
    "recomputed": {**layout(ep=2), "recompute-granularity": "selective", "recompute-modules": ["moe"]},
    "experts in parts": {**layout(2, etp=2), "fp8-recipe": "blockwise"},
    "layers in bf16": {**layout(ep=2), "first-last-layers-bf16": True},
}


def _compare_sent(name: str) -> int:
    flags = {**IN_8_BITS, "moe-token-dispatcher-type": "alltoall", **SENT[name]}
    plain = train_here(argv_of(flags))
    sent = train_here(argv_of(flags, {"moe-dispatch-fwd-dtype": flags["fp8-recipe"]}))
    sent.assert_same(plain, name)
    return len(plain.steps)


@pytest.mark.parametrize("name", SENT)
def test_rows_that_are_sent_in_8_bits_have_the_same_results(name: str) -> None:
    assert run_on_ranks(_compare_sent, 2, name) == [STEPS, STEPS]


FOUR: Flags = {"num-layers": 4}
# Other losses depend on which tokens a rank has.
WITHOUT_AUX: Flags = {"moe-aux-loss-coeff": 0, "moe-z-loss-coeff": None, "moe-router-load-balancing-type": "none"}


def _losses(flags: Flags) -> Any:
    return [step["losses"]["lm loss"] for step in train_here(argv_of(IN_8_BITS, WITHOUT_AUX, flags)).steps]


def test_layouts_have_losses_within_the_rounding_of_their_sums() -> None:
    # In fp32, because a difference in the last bit of bf16 moves many elements to the next number of 8 bits.
    flags: Flags = {**FOUR, "bf16": None}
    (alone,) = run_on_ranks(_losses, 1, flags)
    (plain,) = run_on_ranks(_losses, 1, {**flags, "fp8-format": None, "fp8-recipe": None})
    by_8_bits = max(abs(one - other) for one, other in zip(alone, plain, strict=True))
    for more in (layout(ep=2), {**layout(ep=2), "moe-token-dispatcher-type": "alltoall"}, layout(pp=2), layout(2)):
        for found in run_on_ranks(_losses, 2, {**flags, **more}):
            by_layout = max(abs(one - other) for one, other in zip(found, alone, strict=True))
            print(more, by_layout, by_8_bits)
            assert by_layout < by_8_bits / 3, more
