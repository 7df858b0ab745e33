"""Plans a run without training it: memory and time of each rank, layouts that fit, and pages of the paged stash.

Imports megatron.training to build the run's own model and run its steps without memory.
"""

from megatron.planner.report import print_plan

__all__ = ["print_plan"]
