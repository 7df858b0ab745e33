"""Reports of a step and of an evaluation, for tests that replace their fields. Contains no tests."""

from megatron.training.callbacks import EvaluationReport, StepReport

STEP = StepReport(
    iteration=3,
    losses={"lm loss": 2.0, "z_loss": 0.25},
    grad_norm=1.23456,
    num_zeros=None,
    learning_rate=3e-4,
    loss_scale=1.0,
    global_batch_size=8,
    consumed_samples=24,
    tokens=512,
    seconds=0.5,
    skipped=False,
    nan=False,
)
EVALUATION = EvaluationReport(iteration=4, split="validation", losses={"lm loss": 1.5})
