"""A rank's part of training runs that are compared with models of transformers. Holds no tests.

Does not import transformers, because a rank would spend more time on the import than on its training step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megatron.core.utils import unwrap_model
from megatron.training.run import TrainingRun
from megatron.training.training import run_step
from tests.distributed.parity import Box, record_gradients
from tests.distributed.tiny_runs import Batch, Recorder, started_run


@dataclass
class RankStep:
    """A rank's record of a run's first step.

    logits: output of the last layer, [S, B, part of V], None on ranks without that layer. grads: boxes of its
    gradients.
    """

    batch: Batch
    logits: Tensor | None
    grads: list[Box]


def first_steps(argvs: Sequence[Sequence[str]]) -> list[RankStep]:
    """Returns this rank's record of the first step of each run."""
    return [_first_step(argv) for argv in argvs]


def _first_step(argv: Sequence[str]) -> RankStep:
    recorder, logits, grads = Recorder(), [], list[list[Box]]()
    with started_run(argv) as run:
        recorder.attach(run)
        record_gradients(run, grads)
        for output_layer in _output_layers(run):
            output_layer.register_forward_hook(lambda _, __, output: logits.append(output[0].detach().clone()))
        run_step(run)
    return RankStep(recorder.batches[0][0], logits[0] if logits else None, grads[0])


def _output_layers(run: TrainingRun) -> list[nn.Module]:
    chunks = unwrap_model(run.model)
    return [chunk.output_layer for chunk in chunks if chunk.output_layer is not None]


def losses_of_run(argv: Sequence[str], steps: int) -> tuple[list[Batch], list[float]]:
    """Returns the batches of a run and its loss in every step."""
    recorder = Recorder()
    with started_run(argv) as run:
        recorder.attach(run)
        losses = [run_step(run)[0].losses["lm loss"] for _ in range(steps)]
    return [step[0] for step in recorder.batches], losses
