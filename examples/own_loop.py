"""A custom training loop for any parallel layout that uses only the library: groups, model, wrapper, optimizer.

    torchrun --nproc-per-node 4 examples/own_loop.py --tensor 2 --pipeline 2 --experts 4
    torchrun --nproc-per-node 2 examples/own_loop.py --expert-parallel 2 --experts 4 --sharded

All layouts read the same microbatches and print the same losses, up to rounding.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without installation

from megatron.core import parallel_state
from megatron.core.device import default_device, prepare_device, require_launch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

SEQUENCE, MICRO_BATCH, MICRO_BATCHES, VOCABULARY = 32, 2, 8, 128


def main(argv: Sequence[str] | None = None) -> None:
    """Trains on sequences in which each token is the previous token plus one."""
    options = parse_options(argv)
    require_launch()
    prepare_device(default_device())
    dist.init_process_group()
    parallel_state.initialize_model_parallel(
        options.tensor, options.pipeline, expert_model_parallel_size=options.expert_parallel
    )
    # The first seed makes the weights equal in all layouts. The second call gives each rank a separate dropout seed.
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=options.sharded, overlap_param_gather=options.sharded
    )
    config = build_config(options)
    model = DistributedDataParallel(config, ddp_config, build_model(config))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3, weight_decay=0.0), [model])
    config.no_sync_func = model.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    num_microbatches = MICRO_BATCHES // parallel_state.get_data_parallel_world_size()
    for step in range(options.steps):
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=microbatches(step, num_microbatches),
            model=[model],
            num_microbatches=num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
        )
        _, grad_norm, _ = optimizer.step()
        report_step(step, reports, grad_norm=grad_norm)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build_config(options: argparse.Namespace) -> TransformerConfig:
    """Returns the model's configuration, with the same layout as the process groups."""
    return TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=options.experts,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=options.experts is not None,
        add_bias_linear=options.experts is None,
        tensor_model_parallel_size=options.tensor,
        sequence_parallel=options.tensor > 1,
        pipeline_model_parallel_size=options.pipeline,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=options.expert_parallel,
    )


def build_model(config: TransformerConfig) -> nn.Module:
    """Builds this rank's pipeline stage."""
    experts = config.num_moe_experts
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=experts is not None),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    ).to(default_device())


def microbatches(step: int, count: int) -> Iterator[Tensor]:
    """Yields this rank's `count` microbatches of a step, each [B, S + 1], int64.

    Ranks of one model replica read the same tokens.
    """
    first = parallel_state.get_data_parallel_rank() * count
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * step + number)
        start = torch.randint(0, VOCABULARY, (MICRO_BATCH, 1), generator=generator)
        yield ((start + torch.arange(SEQUENCE + 1)) % VOCABULARY).to(default_device())


def forward_step(data_iterator: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Any]:
    """Runs forward for one microbatch.

    Returns the stage's output, [S, B, H], or on the last stage the losses, [B, S], fp32, and a function that returns
    their mean.
    """
    tokens = next(data_iterator)
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(MICRO_BATCH, -1)
    output = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def report_step(step: int, reports: list[dict[str, Tensor]], *, grad_norm: float) -> None:
    """Prints the mean of the reported losses, each [] fp32.

    Only the last pipeline stage has losses, and its first rank prints.
    """
    if not parallel_state.is_pipeline_last_stage():
        return
    loss = torch.stack([report["loss"] for report in reports]).mean()
    dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    loss /= parallel_state.get_data_parallel_world_size()
    if parallel_state.get_data_parallel_rank() == parallel_state.get_tensor_model_parallel_rank() == 0:
        print(f"step {step} loss {loss.item():.5f} norm {grad_norm:.4f}", flush=True)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line of this example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size, with sequence parallelism")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--expert-parallel", type=int, default=1, help="number of ranks that share the experts")
    parser.add_argument("--experts", type=int, help="number of experts per layer; unset: a dense model")
    parser.add_argument("--sharded", action="store_true", help="shard the optimizer states over the replicas")
    parser.add_argument("--steps", type=int, default=10, help="number of optimizer steps")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
