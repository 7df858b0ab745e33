"""Checks of flags that contradict CUDA graphs; graphed_step.py checks for a GPU, which tools may do without."""

import argparse
from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.cuda_graph_config import OF_EXPERTS
from megatron.core.transformer.moe_config import layers_with_experts


def check_graphs(args: argparse.Namespace) -> Iterator[str]:
    """Yields flags under which a part of what would be captured reads the device, or changes from step to step."""
    if args.cuda_graph_modules and args.cuda_graph_impl != "local":
        yield (
            f"--cuda-graph-modules is {' '.join(args.cuda_graph_modules)} and --cuda-graph-impl is "
            f"{args.cuda_graph_impl}: modules are captured by local alone; set it, or leave the modules out"
        )
    yield from check_optimizer_graph(args)
    if args.cuda_graph_impl == "none":
        return
    for name, is_set, why in _contradictions(args):
        if is_set:
            value = vars(args)[name]
            # None: a short form of the flag was given.
            shown = "given" if value in (True, None) else " ".join(value) if isinstance(value, list) else value
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} is {shown} and --cuda-graph-impl is {args.cuda_graph_impl}: {why}"


def check_optimizer_graph(args: argparse.Namespace) -> Iterator[str]:
    """Yields flags that contradict a graph of the optimizer's step.

    OptimizerConfig checks its own fields.
    """
    if not args.optimizer_cuda_graph:
        return
    if args.cuda_graph_impl != "full_iteration":
        yield (
            f"--optimizer-cuda-graph is given and --cuda-graph-impl is {args.cuda_graph_impl}: the step is a part of "
            "the whole iteration's graph; set --cuda-graph-impl full_iteration, or drop --optimizer-cuda-graph"
        )
        return
    start, end = args.start_weight_decay, args.end_weight_decay
    if args.weight_decay_incr_style != "constant" and start != end:
        yield (
            f"--start-weight-decay is {start} and --end-weight-decay is {end}: with --optimizer-cuda-graph weight "
            "decay stays as it was captured, so use --weight-decay alone"
        )


def graph_modules(args: argparse.Namespace) -> list[str]:
    """Returns --cuda-graph-modules, or its default for --cuda-graph-impl local: attention and feed-forward layers."""
    has_experts = layers_with_experts(args.num_experts, args.moe_layer_freq, num_layers=args.num_layers)
    feed_forward = [name for name, kind in (("mlp", 0), ("moe", 1)) if kind in has_experts]
    return args.cuda_graph_modules or ["attn", *feed_forward]


def _contradictions(args: argparse.Namespace) -> list[tuple[str, Any, str]]:
    """Returns flags that one or both kinds of graphs cannot support: name, whether it is set, and why not."""
    draws = args.hidden_dropout > 0 or args.attention_dropout > 0 or args.moe_input_jitter_eps is not None
    common: list[tuple[str, Any, str]] = [
        (
            "recompute_granularity",
            (args.recompute_granularity is not None or args.recompute_activations) and draws,
            "what is computed again draws the numbers of dropout or jitter again, which a graph cannot; set "
            "--hidden-dropout 0 and --attention-dropout 0 without --moe-input-jitter-eps, or compute nothing again",
        ),
        (
            "cpu_offloading_num_layers",
            args.cpu_offloading_num_layers,
            "activations on the host get memory while a step runs; leave it out",
        ),
        (
            "fine_grained_activation_offloading",
            args.fine_grained_activation_offloading,
            "activations on the host get memory while a step runs; leave it out, --moe-paged-stash can do what it does",
        ),
    ]
    if args.cuda_graph_impl == "local":
        return [*_of_modules(args), *common]
    return [
        *common,
        *_of_dispatch(args),
        (
            "reset_attention_mask",
            args.reset_attention_mask,
            "borders of documents, and with them the shapes in attention, change from batch to batch; use "
            f"--cuda-graph-impl local with --cuda-graph-modules {_rest(args)}, which leaves attention eager",
        ),
        (
            "record_routing",
            args.record_routing,
            "the host writes down each micro-batch; record without graphs",
        ),
        ("ddp_debug", args.ddp_debug, "the host looks at each gradient; debug without graphs"),
    ]


def _rest(args: argparse.Namespace) -> str:
    """Returns the part of a layer that can be captured in addition to attention."""
    return "mlp" if args.num_experts is None else "moe"


def _of_dispatch(args: argparse.Namespace) -> list[tuple[str, Any, str]]:
    """Returns contradictions with graphs that contain a dispatcher, or the experts' rows that it receives."""
    has_fixed_size = args.moe_expert_rank_capacity_factor is not None or args.moe_pad_expert_input_to_capacity
    reads_counts = args.num_experts is not None and not has_fixed_size
    return [
        (
            "expert_model_parallel_size",
            reads_counts and args.expert_model_parallel_size > 1,
            "with --expert-model-parallel-size above 1 the host reads how many tokens each rank gets; give the "
            "experts' buffers a fixed size by --moe-expert-rank-capacity-factor (2, say, with --moe-paged-stash)",
        ),
        (
            "moe_flex_dispatcher_backend",
            args.moe_token_dispatcher_type == "flex" and args.moe_flex_dispatcher_backend == "deepep",
            "deepep lets the host wait for the number of tokens; use symm_mem, or another --moe-token-dispatcher-type",
        ),
    ]


def _of_modules(args: argparse.Namespace) -> list[tuple[str, Any, str]]:
    """Returns contradictions with the modules that --cuda-graph-impl local captures."""
    modules = set(graph_modules(args))
    has_experts = layers_with_experts(args.num_experts, args.moe_layer_freq, num_layers=args.num_layers)
    of_experts = sorted(modules & OF_EXPERTS)
    return [
        ("cuda_graph_modules", of_experts and not any(has_experts), f"no layer has experts for {' '.join(of_experts)}"),
        ("cuda_graph_modules", "mlp" in modules and all(has_experts), "no layer is dense for mlp; give moe"),
        (
            "cuda_graph_modules",
            "moe" in modules and len(of_experts) > 1,
            f"moe is the whole layer, with {' '.join(sorted(set(of_experts) - {'moe'}))} in it; leave one of them out",
        ),
        (
            "cuda_graph_modules",
            "moe_preprocess" in modules and "moe_router" not in modules,
            "moe_preprocess goes on with what the router chose, in one graph with it; add moe_router",
        ),
        *(_of_dispatch(args) if modules & {"moe", "moe_preprocess", "experts"} else []),
        (
            "reset_attention_mask",
            args.reset_attention_mask and "attn" in modules,
            "borders of documents, and with them the shapes in attention, change from batch to batch; leave attention "
            f"eager by --cuda-graph-modules {_rest(args)}",
        ),
        (
            "recompute_granularity",
            args.recompute_granularity == "full",
            "whole layers would run again in backward, with their graphs in them; choose selective",
        ),
        (
            "record_routing",
            args.record_routing and modules & {"moe", "moe_router"},
            "the host writes down each micro-batch; leave the router eager by --cuda-graph-modules attn experts",
        ),
    ]
