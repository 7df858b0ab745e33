"""The estimated step of a planned run: its flags say what overlaps, its ranks where groups lie. See step_time.py."""

import argparse

from megatron.core.pipeline_parallel.schedule import Pipeline, stage_orders
from megatron.planner.plan import Plan
from megatron.planner.rates import ranks_in_node
from megatron.planner.step_time import GRADS, PARAMS, Overlap, StageLoad, StepTime, estimate_step
from megatron.training.compute.devices import Device
from megatron.training.data_parallel import ddp_config_of

# Said wherever a time is shown.
ASSUMPTIONS = (
    "each kernel takes the longer of its arithmetic and its bytes, at the shares of peaks of the table of devices",
    "kernels are those that torch calls, one after the other: nothing is fused beside attention and norms",
    "messages have links to themselves; ranks lie on nodes in their order, one network port for each",
    "all ranks of a stage take equally long; data come in time",
)


def run_time(plan: Plan, args: argparse.Namespace, *, device: Device) -> StepTime | None:
    """Estimates a step of the plan; None for runs that train nothing.

    Raises ValueError for products that the device does not compute.
    """
    if not all(stage.chunks for stage in plan.stages):
        return None
    stages = [StageLoad(stage.chunks, stage.links, stage.update) for stage in plan.stages]
    orders = stage_orders(
        Pipeline(len(stages), len(stages[0].chunks)),
        plan.num_microbatches,
        group_size=args.microbatch_group_size_per_vp_stage,
    )
    samples = plan.num_microbatches * args.micro_batch_size * args.data_parallel_size
    return estimate_step(
        stages,
        orders,
        device=device,
        overlap=overlap_of(args),
        in_node=places(plan, device),
        tokens=samples * args.seq_length,
        flops_per_rank=plan.flops_per_sample * samples / args.world_size,
    )


def overlap_of(args: argparse.Namespace) -> Overlap:
    """Returns the communication that the flags overlap with computation."""
    behind: dict[str, tuple[str, ...]] = {"ep": ("shared experts",)} if args.moe_shared_expert_overlap else {}
    if args.cp_comm_type in ("p2p", ["p2p"]):
        # Blocks go round while attention works on the one before.
        behind["cp"] = ("attention",)
    in_every_pass: frozenset[str] = frozenset()
    if args.use_torch_fsdp2:
        # Its units are gathered ahead of their layer, in both passes of each microbatch.
        in_every_pass = frozenset((GRADS, PARAMS))
    elif args.overlap_grad_reduce and ddp_config_of(args).has_bucket_lifetime_grads:
        # Buckets are sent while the backward that filled them goes on, of every microbatch.
        in_every_pass = frozenset((GRADS,))
    return Overlap(
        gradients=args.overlap_grad_reduce,
        parameters=args.overlap_param_gather,
        in_every_pass=in_every_pass,
        transfers=args.overlap_p2p_comm,
        behind=behind,
    )


def places(plan: Plan, device: Device) -> dict[str, int]:
    """Returns for each group how many of its ranks share a node, in the stage where they are fewest."""
    found: dict[str, int] = {}
    for stage in plan.stages:
        for name, ranks in stage.groups.items():
            shared = ranks_in_node(ranks, device.devices_per_node)
            found[name] = min(shared, found.get(name, shared))
    return found
