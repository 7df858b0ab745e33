"""Logging and display that hang on named moments of a run."""

from megatron.training.callbacks.base import Callback, CallbackList, EvaluationReport, RunStart, StepReport

__all__ = ["Callback", "CallbackList", "EvaluationReport", "RunStart", "StepReport"]
