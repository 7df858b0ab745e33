"""Plans a run without training it: memory and time of each rank, layouts that fit, and pages of the paged stash.

Uses megatron.training to build the run's model and to trace its steps without allocating memory.
"""

from megatron.planner.report import print_plan

__all__ = ["print_plan"]
