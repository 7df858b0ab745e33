"""Checks flags of graphs, FSDP2, overlap, gradient-sharding optimizers and bad-step policies against other flags.

Each check yields a line for each conflicting flag. validation.py checks sizes, data, positions, schedules and
checkpoints. Most conflicts with CUDA graphs concern only fields of TransformerConfig, but that class accepts them:
tools/check_capture.py builds such models to find the operations that cannot be captured.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.cuda_graph_config import OF_EXPERTS, graphed_modules
from megatron.core.transformer.moe_config import layers_with_experts


def check_graphs(args: argparse.Namespace) -> Iterator[str]:
    """Yields an error for each flag that prevents capture, because work needs the host or changes between steps."""
    if args.cuda_graph_modules and args.cuda_graph_impl != "local":
        yield (
            f"--cuda-graph-modules is {' '.join(args.cuda_graph_modules)} and --cuda-graph-impl is "
            f"{args.cuda_graph_impl}: only local captures modules; set it, or drop --cuda-graph-modules"
        )
    yield from check_optimizer_graph(args)
    if args.cuda_graph_impl == "none":
        return
    for name, is_set, why in _graph_conflicts(args):
        if is_set:
            value = vars(args)[name]
            # None means that a short form of the flag was given.
            shown = "given" if value is True or value is None else " ".join(value) if isinstance(value, list) else value
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} is {shown} and --cuda-graph-impl is {args.cuda_graph_impl}: {why}"


def check_optimizer_graph(args: argparse.Namespace) -> Iterator[str]:
    """Yields an error for each flag that conflicts with --optimizer-cuda-graph.

    OptimizerConfig checks its own fields.
    """
    if not args.optimizer_cuda_graph:
        return
    if args.cuda_graph_impl != "full_iteration":
        yield (
            f"--optimizer-cuda-graph is given and --cuda-graph-impl is {args.cuda_graph_impl}: the optimizer step "
            "is captured as part of the full-iteration graph; set --cuda-graph-impl full_iteration, or drop "
            "--optimizer-cuda-graph"
        )
        return
    start, end = args.start_weight_decay, args.end_weight_decay
    if args.weight_decay_incr_style != "constant" and start != end:
        yield (
            f"--start-weight-decay is {start} and --end-weight-decay is {end}: --optimizer-cuda-graph captures a "
            "constant weight decay; use only --weight-decay"
        )


def _graph_conflicts(args: argparse.Namespace) -> list[tuple[str, Any, str]]:
    """Returns (argument, whether it conflicts, reason) for flags that the chosen kind of graph does not support."""
    draws = args.hidden_dropout > 0 or args.attention_dropout > 0 or args.moe_input_jitter_eps is not None
    common: list[tuple[str, Any, str]] = [
        (
            "recompute_granularity",
            (args.recompute_granularity is not None or args.recompute_activations) and draws,
            "recomputation must draw the same numbers for dropout or jitter, which is impossible in a graph; set "
            "--hidden-dropout 0 and --attention-dropout 0 without --moe-input-jitter-eps, or disable "
            "recomputation",
        ),
        (
            "cpu_offloading_num_layers",
            args.cpu_offloading_num_layers,
            "host memory for activations is allocated during a step; omit the flag",
        ),
        (
            "fine_grained_activation_offloading",
            args.fine_grained_activation_offloading,
            "host memory for activations is allocated during a step; omit the flag, or use --moe-paged-stash",
        ),
    ]
    if args.cuda_graph_impl == "local":
        return [*_module_conflicts(args), *common]
    return [
        *common,
        *_dispatch_conflicts(args),
        (
            "reset_attention_mask",
            args.reset_attention_mask,
            "document boundaries, and with them the shapes in attention, change from batch to batch; use "
            f"--cuda-graph-impl local with --cuda-graph-modules {_rest(args)}, which leaves attention eager",
        ),
        (
            "record_routing",
            args.record_routing,
            "the host records each micro-batch; record without graphs",
        ),
        ("ddp_debug", args.ddp_debug, "the host reads each gradient; debug without graphs"),
        (
            "moe_enable_routing_replay",
            args.moe_enable_routing_replay,
            "the host selects in each forward whether routers record or replay; replay without graphs",
        ),
    ]


def _rest(args: argparse.Namespace) -> str:
    """Returns the module that can be captured while attention remains eager: mlp, or moe for models with experts."""
    return "mlp" if args.num_experts is None else "moe"


def _dispatch_conflicts(args: argparse.Namespace) -> list[tuple[str, Any, str]]:
    """Returns conflicts with graphs that capture a token dispatcher or the experts' rows, as in _graph_conflicts."""
    has_fixed_size = args.moe_expert_rank_capacity_factor is not None or args.moe_pad_expert_input_to_capacity
    reads_counts = args.num_experts is not None and not has_fixed_size
    return [
        (
            "expert_model_parallel_size",
            reads_counts and args.expert_model_parallel_size > 1,
            "with --expert-model-parallel-size above 1 the host reads the number of tokens of each rank; give the "
            "expert buffers a fixed size with --moe-expert-rank-capacity-factor (for example 2 with "
            "--moe-paged-stash)",
        ),
        (
            "moe_flex_dispatcher_backend",
            args.moe_token_dispatcher_type == "flex" and args.moe_flex_dispatcher_backend == "deepep",
            "deepep makes the host wait for the number of tokens; use symm_mem, or another --moe-token-dispatcher-type",
        ),
    ]


def _module_conflicts(args: argparse.Namespace) -> list[tuple[str, Any, str]]:
    """Returns conflicts with the modules that --cuda-graph-impl local captures, as in _graph_conflicts."""
    has_experts = layers_with_experts(args.num_experts, args.moe_layer_freq, num_layers=args.num_layers)
    modules = set(graphed_modules(args.cuda_graph_modules, has_experts))
    of_experts = sorted(modules & OF_EXPERTS)
    recomputes_experts = args.moe_layer_recompute or "moe" in (args.recompute_modules or ())
    return [
        (
            "cuda_graph_modules",
            of_experts and not any(has_experts),
            f"{' '.join(of_experts)} needs MoE layers, and no layer has experts",
        ),
        (
            "cuda_graph_modules",
            "mlp" in modules and all(has_experts),
            "mlp needs dense layers, and no layer is dense; give moe",
        ),
        (
            "cuda_graph_modules",
            "moe" in modules and len(of_experts) > 1,
            f"moe captures the whole layer, which includes {' '.join(sorted(set(of_experts) - {'moe'}))}; leave "
            "one of them out",
        ),
        (
            "cuda_graph_modules",
            "moe_preprocess" in modules and "moe_router" not in modules,
            "moe_preprocess requires the router's output in the same graph; add moe_router",
        ),
        *(_dispatch_conflicts(args) if modules & {"moe", "moe_preprocess", "experts"} else []),
        (
            "reset_attention_mask",
            args.reset_attention_mask and "attn" in modules,
            "document boundaries, and with them the shapes in attention, change from batch to batch; leave attention "
            f"eager by --cuda-graph-modules {_rest(args)}",
        ),
        (
            "recompute_granularity",
            args.recompute_granularity == "full",
            "whole layers, including their graphs, would be recomputed in backward; choose selective",
        ),
        (
            "recompute_modules",
            recomputes_experts and modules & {"moe_router", "moe_preprocess", "experts"},
            "expert layers, including their graphs, would be recomputed in backward; capture moe instead of its "
            "parts, or recompute other modules",
        ),
        (
            "record_routing",
            args.record_routing and modules & {"moe", "moe_router"},
            "the host records each micro-batch; leave the router eager by --cuda-graph-modules attn experts",
        ),
        (
            "moe_enable_routing_replay",
            args.moe_enable_routing_replay and modules & {"moe", "moe_router"},
            "the host selects in each forward whether routers record or replay; leave the router eager by "
            "--cuda-graph-modules attn experts",
        ),
    ]


_OFFLOADED = "saved tensors are offloaded to the host, including gathered parameters whose memory is already released"
_HELD = "fully_shard reduces the gradients of a module at the end of its backward, before held ones are computed"


def check_fully_sharded(args: argparse.Namespace) -> Iterator[str]:
    """Yields an error for each flag that conflicts with --use-torch-fsdp2, or that requires it.

    The conflicting features use whole parameters or gradient buckets, which FSDP2 does not have.
    """
    if not args.use_torch_fsdp2:
        if not args.torch_fsdp2_reshard_after_forward:
            yield (
                "--torch-fsdp2-no-reshard-after-forward is given without --use-torch-fsdp2: add "
                "--use-torch-fsdp2, or drop the flag"
            )
        if args.init_model_with_meta_device:
            yield (
                "--init-model-with-meta-device is given without --use-torch-fsdp2: other modes keep whole "
                "parameters on each rank; add --use-torch-fsdp2, or drop the flag"
            )
        return
    for words, is_set, why in _fully_sharded_conflicts(args):
        if is_set:
            yield f"{words} and --use-torch-fsdp2 is given: {why}; leave one of them out"
    # DistributedDataParallelConfig would require a sharded optimizer for it.
    args.fp8_param_gather = False


def _fully_sharded_conflicts(args: argparse.Namespace) -> list[tuple[str, Any, str]]:
    """Returns (description, whether it is set, reason) for settings that conflict with --use-torch-fsdp2."""
    stages = args.pipeline_model_parallel_size
    return [
        (
            f"--pipeline-model-parallel-size is {stages}",
            stages > 1,
            "each micro-batch of each stage would gather all of its parameters",
        ),
        (
            f"--optimizer is {args.optimizer}",
            args.optimizer == "distributed_fused_adam",
            "this optimizer shards gradients in its own buckets, whereas fully_shard shards them by module",
        ),
        (
            "--optimizer is muon",
            args.optimizer == "muon",
            "muon requires whole matrices, but each rank has only some rows",
        ),
        (
            f"--cuda-graph-impl is {args.cuda_graph_impl}",
            args.cuda_graph_impl != "none",
            "each gather of parameters allocates memory, but graphs require persistent memory",
        ),
        (
            "--fp8-param-gather is given",
            args.fp8_param_gather,
            "fully_shard gathers parameters in their own dtype",
        ),
        (
            "--overlap-moe-expert-parallel-comm is given",
            args.overlap_moe_expert_parallel_comm,
            "the backward of one micro-batch would release parameters that the forward of another still uses",
        ),
        ("--delay-wgrad-compute is given", args.delay_wgrad_compute, _HELD),
        (
            "--overlap-dispatch-backward-with-experts-wgrad is given",
            args.overlap_dispatch_backward_with_experts_wgrad,
            _HELD,
        ),
        (
            "--fine-grained-activation-offloading is given",
            args.fine_grained_activation_offloading,
            _OFFLOADED,
        ),
        (
            f"--cpu-offloading-num-layers is {args.cpu_offloading_num_layers}",
            args.cpu_offloading_num_layers > 0,
            _OFFLOADED,
        ),
    ]


def check_expert_overlap(args: argparse.Namespace) -> Iterator[str]:
    """Yields an error for each flag that overlaps exchanges of rows in a model none of whose layers exchanges rows.

    TransformerConfig checks its own fields, but a planner's model may contain the dense layers alone.
    """
    if args.num_experts is None or any(
        layers_with_experts(args.num_experts, args.moe_layer_freq, num_layers=args.num_layers)
    ):
        return
    for flag, is_given in (
        ("--overlap-moe-expert-parallel-comm", args.overlap_moe_expert_parallel_comm),
        ("--delay-wgrad-compute", args.delay_wgrad_compute),
        ("--overlap-dispatch-backward-with-experts-wgrad", args.overlap_dispatch_backward_with_experts_wgrad),
    ):
        if is_given:
            yield (
                f"{flag} is given and --moe-layer-freq is {args.moe_layer_freq}: no layer has "
                "experts whose rows are exchanged; omit the flag, or choose layers with experts"
            )


def check_optimizer(args: argparse.Namespace) -> Iterator[str]:
    """Sets arguments implied by distributed_fused_adam and --optimizer-in-backward, and yields conflicting flags."""
    yield from _check_in_backward(args)
    if args.fp8_param_gather and args.fp8 is None:
        yield (
            "--fp8-param-gather is given without --fp8-format: only weights of experts that compute in 8 bits are "
            "gathered in 8 bits; add --fp8-format e4m3, or drop the flag"
        )
    args.shard_gradients = False
    if args.optimizer != "distributed_fused_adam":
        return
    args.use_distributed_optimizer = True
    patterns = args.ddp_param_name_patterns_for_fp32_local_accumulation
    contradictions = [
        (
            f"--cuda-graph-impl is {args.cuda_graph_impl}",
            args.cuda_graph_impl != "none",
            "gradients are allocated during each backward, but graphs require persistent gradients",
        ),
        (
            "--fp8-param-gather is given",
            args.fp8_param_gather,
            "it gathers parameters in buckets of its own, in the dtype of its all-gather",
        ),
        (
            "--ddp-debug is given",
            args.ddp_debug,
            "it checks gradients that persist in buffers and are reduced once per step",
        ),
        (
            "--ddp-param-name-patterns-for-fp32-local-accumulation is " + " ".join(patterns),
            patterns,
            "micro-batches are reduced before they accumulate, and --accumulate-allreduce-grads-in-fp32 reduces "
            "in fp32",
        ),
    ]
    for words, is_set, why in contradictions:
        if is_set:
            yield (
                f"{words} and --optimizer is distributed_fused_adam: {why}; leave it out, or use --optimizer adam with "
                "--use-distributed-optimizer"
            )
    # DistributedDataParallelConfig would report the same contradictions again.
    args.shard_gradients = not any(is_set for _, is_set, _ in contradictions)


def _check_in_backward(args: argparse.Namespace) -> Iterator[str]:
    args.release_gradients = False
    if not args.optimizer_in_backward:
        return
    clip, patterns = args.optimizer_in_backward_clip, args.ddp_param_name_patterns_for_fp32_local_accumulation
    refused = [
        (
            f"--cuda-graph-impl is {args.cuda_graph_impl}",
            args.cuda_graph_impl != "none",
            "graphs require persistent gradients",
        ),
        ("--ddp-debug is given", args.ddp_debug, "it checks gradients that persist in buffers"),
        (
            "--ddp-param-name-patterns-for-fp32-local-accumulation is " + " ".join(patterns),
            patterns,
            "--accumulate-allreduce-grads-in-fp32 accumulates and reduces in fp32",
        ),
    ]
    for words, is_set, why in refused:
        if is_set:
            yield (
                f"{words} and --optimizer-in-backward is given: gradients are allocated during each backward, and "
                f"{why}; leave one of them out"
            )
    # DistributedDataParallelConfig would report the same contradictions again.
    args.release_gradients = not any(is_set for _, is_set, _ in refused)
    if clip == "exact":
        return
    needs_exact = [
        (
            "--calculate-per-token-loss is given",
            args.calculate_per_token_loss,
            "gradients are divided by the number of tokens, which is known only after backward",
        ),
        (
            f"--moe-expert-rank-capacity-factor is {args.moe_expert_rank_capacity_factor}",
            args.moe_expert_rank_capacity_factor is not None,
            "a step with expert overflow is retried, and must not have changed any state",
        ),
        (
            f"--tensor-model-parallel-size is {args.tensor_model_parallel_size}",
            clip == "per-bucket" and max(args.tensor_model_parallel_size, args.expert_tensor_parallel_size or 1) > 1,
            "bucket norms differ between tensor-parallel ranks, and replicated weights would diverge",
        ),
    ]
    for words, is_set, why in needs_exact:
        if is_set:
            chosen = "not given" if clip is None else clip
            yield (
                f"{words} and --optimizer-in-backward-clip is {chosen}: {why}; use exact, or leave out "
                "--optimizer-in-backward"
            )


def check_faults(args: argparse.Namespace) -> Iterator[str]:
    """Yields an error for each flag that prevents skipping steps, rewinding to a checkpoint or comparing replicas.

    Raises --timing-log-level to 1 if --log-straggler is given.
    """
    if args.log_straggler:
        args.timing_log_level = max(args.timing_log_level, 1)
    if args.check_weight_hash_across_dp_replicas_interval is not None and args.use_torch_fsdp2:
        yield (
            "--check-weight-hash-across-dp-replicas-interval and --use-torch-fsdp2 are given: sharded parameters have "
            "no replicas; leave one of them out"
        )
    policy = args.non_finite_policy
    if policy != "stop":
        yield from _check_policy(args, f"--non-finite-policy is {policy}")
    rewinds = [f"--non-finite-policy is {policy}"] if policy == "rewind" else []
    if args.loss_spike_rewind is not None:
        rewinds.append(f"--loss-spike-rewind is {args.loss_spike_rewind:g}")
    for words in rewinds:
        if args.save is None or args.save_interval is None:
            yield f"{words}: needs --save and --save-interval, because it rewinds to a checkpoint"
        if args.no_save_optim or args.no_save_rng:
            yield f"{words}: needs complete checkpoints; leave out --no-save-optim and --no-save-rng"
        if args.cuda_graph_impl != "none":
            yield (
                f"{words} and --cuda-graph-impl is given: loading a checkpoint invalidates graphs; leave one of "
                "them out"
            )
        if args.dataloader_type == "external":
            yield (
                f"{words} and --dataloader-type is external: a script's iterators cannot be rewound; leave one "
                "of them out"
            )


def _check_policy(args: argparse.Namespace, words: str) -> Iterator[str]:
    if not args.check_for_nan_in_loss_and_grad:
        yield f"{words} and --no-check-for-nan-in-loss-and-grad is given: leave one of them out"
    if args.cuda_graph_impl != "none":
        yield (
            f"{words} and --cuda-graph-impl is given: the host cannot inspect a captured step; leave one of them out"
        )
    clip = args.optimizer_in_backward_clip
    if args.optimizer_in_backward and clip != "exact" and args.non_finite_policy == "skip":
        yield (
            f"{words} and --optimizer-in-backward-clip is {clip}: parameters are updated before all gradients are "
            "known to be finite; use exact"
        )
