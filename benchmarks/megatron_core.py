"""Provides the megatron-core side of fixed_cost.py on CPUs, from a separate folder, because both packages share a name.

megatron-core requires CUDA in a few places: for the device of its buffers, which becomes the CPU, and for random
states, which are not needed here. Its model uses its local layer spec (SequentialMLP, because its grouped GEMM requires
a GPU). The optimizers use torch's fused AdamW, which megatron-core selects without Apex and Transformer Engine.
"""

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.plain_model import PlainConfig

ROOT = Path(__file__).resolve().parent.parent


def build_megatron_core(
    folder: str, config: PlainConfig, *, sequence: int, micro_batch: int, sharded: bool
) -> Callable[[], None]:
    """Builds megatron-core's GPTModel with its DDP and optimizer. Returns a step without a schedule.

    sharded: use the distributed optimizer.
    """
    use_megatron_core(folder)
    warnings.simplefilter("ignore")  # it warns about every missing optional package
    # Imported by name, because a type checker would find our package under these names.
    rng, moe_utils, parallel_state, distributed, gpt, specs, optimizers, transformer = (
        import_module(f"megatron.core.{name}")
        for name in (
            *("tensor_parallel.random", "transformer.moe.moe_utils", "parallel_state", "distributed", "models.gpt"),
            *("models.gpt.gpt_layer_specs", "optimizer", "transformer"),
        )
    )
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tracker = SimpleNamespace(fork=lambda *_: nullcontext(), is_initialized=lambda: True)
    vars(rng).update(_CUDA_RNG_STATE_TRACKER=tracker, _CUDA_RNG_STATE_TRACKER_INITIALIZED=True)
    # megatron-core's marker for "not installed", which it does not set.
    vars(moe_utils)["te_general_gemm"] = None
    torch.manual_seed(1234)
    settings = transformer.TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_moe_experts=config.num_experts,
        moe_router_topk=config.topk,
        moe_ffn_hidden_size=config.ffn_hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    inner = gpt.GPTModel(
        settings,
        specs.get_gpt_layer_local_spec(config.num_experts, normalization="RMSNorm"),
        vocab_size=config.vocab_size,
        max_sequence_length=sequence,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    ddp = distributed.DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_grad_reduce=False)
    model = distributed.DistributedDataParallel(settings, ddp, inner)
    rates = optimizers.OptimizerConfig(
        optimizer="adam", lr=1e-4, weight_decay=0.01, clip_grad=1.0, use_distributed_optimizer=sharded
    )
    optimizer = optimizers.get_megatron_optimizer(rates, [model], use_gloo_process_groups=False)
    positions = torch.arange(sequence).repeat(micro_batch, 1)
    mask = torch.ones(1, 1, sequence, sequence, dtype=torch.bool).triu(1)

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        tokens = torch.randint(config.vocab_size, (micro_batch, sequence + 1))
        losses = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
        loss = losses.float().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        loss.item()

    return step


def use_megatron_core(folder: str) -> None:
    """Makes `import megatron` find the package in `folder`, and CUDA's current device the CPU, in this process."""
    for name in [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]:
        del sys.modules[name]
    # Its folder has no __init__.py, so a package of that name anywhere on the path would take precedence.
    sys.path[:] = [folder, *(place for place in sys.path if Path(place or os.curdir).resolve() != ROOT)]
    # A package without an __init__.py has no __file__, so inspect would fail if it has already seen our package's.
    import_module("megatron").__file__ = str(Path(folder) / "megatron")
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    # Its optimizers and its clipping accept only CUDA tensor types.
    kind_of = torch.Tensor.type

    def kind_on_cuda(tensor: torch.Tensor, *to: Any) -> Any:
        return kind_of(tensor, *to) if to else kind_of(tensor).replace("torch.", "torch.cuda.")

    torch.Tensor.type = kind_on_cuda  # type: ignore[method-assign, assignment]
    for name in ("empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def on_cpu(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps a torch factory function, any shape and dtype, to allocate on the CPU when CUDA is requested."""

    @wraps(function)
    def make(*args: Any, device: Any = None, **keywords: Any) -> torch.Tensor:
        return function(*args, device="cpu" if device == "cuda" else device, **keywords)

    return make
