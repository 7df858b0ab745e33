"""Callbacks for logs, files, displays and profiles, called at named moments of a run."""

from megatron.training.callbacks.base import (
    Callback,
    CallbackList,
    EvaluationReport,
    PoolReport,
    RankTimes,
    RunStart,
    StashReport,
    StepReport,
)

__all__ = [
    "Callback",
    "CallbackList",
    "EvaluationReport",
    "PoolReport",
    "RankTimes",
    "RunStart",
    "StashReport",
    "StepReport",
]
