"""Measures one rank of Qwen3-30B-A3B with expert parallelism of 8: all 48 layers, 16 of 128 experts, the vocabulary.

    python -m benchmarks.gpu.checks.stack48 [--seconds N] [--small]

Each microbatch has 4096 tokens, a step has two. See steps.py for the lines of a side. Weights, gradients and states
take 93 GB, so the sides run one after another, and the most important one first. The planner predicts 121 GB for the
stash, 133 GB for static buffers and 119 GB for dropless buffers, of 150 GB. If static buffers do not fit after all, the
line of their side says so, with the predicted bytes, and is no failure.

Expected seconds on an H200: headline 40, graph 40, dropless 36: 116 s of 130 s. A build takes 15 s, because 5.2 G
parameters are initialized and copied to fp32 masters; eager warm-up steps 1.5 s each, the capture of 48 layers and two
microbatches 8 s, and ten steps of 0.5 s. The planner needs 8 s for each side, on another core.
"""

from collections.abc import Mapping

from benchmarks.gpu.checks import steps
from benchmarks.gpu.checks.steps import Figures, Section, Turn, memory_targets
from benchmarks.gpu.record import Target
from benchmarks.gpu.shapes import DROPLESS, GRAPHED, HEADLINE

LEAST_MFU = 0.36


def targets_of(figures: Figures, predicted: Mapping[str, int]) -> list[Target]:
    """Returns the targets of the headline: MFU and memory."""
    mfu = figures.get(HEADLINE, {}).get("mfu")
    return [Target(f"{HEADLINE}, MFU", mfu, LEAST_MFU, is_least=True), *memory_targets(figures, predicted)]


SECTION = Section(
    "Qwen3-30B-A3B, one rank of EP 8",
    [Turn(HEADLINE, 40), Turn(GRAPHED, 40, may_not_fit=True), Turn(DROPLESS, 36)],
    targets_of,
)


def main() -> None:
    """Measures the section and exits with its status, which steps.py defines."""
    steps.main(SECTION)


if __name__ == "__main__":
    main()
