"""Plans a run before it is paid for: memory and time of each rank, layouts that fit, and pages of a stash.

Lies above megatron.training: it builds the run's own model and steps without memory. Trains nothing.
"""

from megatron.planner.report import print_plan

__all__ = ["print_plan"]
