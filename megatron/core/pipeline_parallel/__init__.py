"""Pipeline schedules of forward and backward passes, and the runner that executes them."""

from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

__all__ = ["get_forward_backward_func"]
