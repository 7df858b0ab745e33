"""Logging and display that hang on named moments of a run."""

from megatron.training.callbacks.base import Callback, CallbackList, EvaluationReport, RankTimes, RunStart, StepReport

__all__ = ["Callback", "CallbackList", "EvaluationReport", "RankTimes", "RunStart", "StepReport"]
