"""Writes the fixtures with the package megatron-core, or continues with it from a checkpoint of this project.

Not a test. Run it on the CPU, where that package is installed and this project's `megatron` is not on the path:

    torchrun --nproc-per-node RANKS write_fixtures.py CASE write FOLDER      trains STEPS, saves, trains FURTHER steps
    torchrun --nproc-per-node RANKS write_fixtures.py CASE continue FOLDER   loads, trains FURTHER steps

`continue` uses the optimizer that is not distributed, because without Apex megatron-core 0.16.1 cannot load the state
of the distributed one.

Both print the losses of the further steps as JSON, and `write` also stores them in FOLDER/losses.json. README.md lists
the versions that wrote the fixtures.
"""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parent))
from settings import FURTHER, STEPS

BATCHES = Path(__file__).parent / "fixtures" / "batches.npz"
MICRO_BATCH, GLOBAL_BATCH, SEQUENCE = 2, 4, 16
# Each case's tensor- and expert-parallel sizes, whether the optimizer is distributed, and whether weights are bf16.
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {"tensor": 2, "expert": 1, "distributed": True, "bf16": False},
    "experts": {"tensor": 1, "expert": 2, "distributed": True, "bf16": False},
    "masters": {"tensor": 1, "expert": 1, "distributed": False, "bf16": True},
}
SHAPE = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_router_dtype": "fp64",
}


class _OnCPU(TorchFunctionMode):
    """Creates tensors on the CPU that the package requests on a GPU, and reports GPU tensor types for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(map(_host, args))
        return func(*args, **kwargs)


def _host(value: Any) -> Any:
    is_gpu = (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return "cpu" if is_gpu else value


def without_a_gpu() -> None:
    """Replaces the functions of torch.cuda and Transformer Engine that the package calls even without a GPU."""
    warnings.filterwarnings("ignore")
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda._lazy_init = torch.cuda.synchronize = torch.cuda.empty_cache = lambda *unused: None
    torch.cuda._lazy_call = lambda *unused, **options: None
    _OnCPU().__enter__()
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


class Run:
    """A model with its optimizer and scheduler, built as in a training script for megatron-core."""

    def __init__(self, case: str, *, distributed: bool) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        layout = {**LAYOUTS[case], "distributed": distributed}
        self.case, self.layout = case, layout
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout["tensor"], expert_model_parallel_size=layout["expert"]
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(5)
        experts = EXPERTS if case == "experts" else {}
        dtype = torch.bfloat16 if layout["bf16"] else torch.float32
        config = TransformerConfig(
            **SHAPE,
            **experts,
            use_cpu_initialization=True,
            params_dtype=dtype,
            bf16=layout["bf16"],
            normalization="RMSNorm",
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            transformer_impl="local",
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=layout["tensor"],
            expert_model_parallel_size=layout["expert"],
        )
        spec = get_gpt_layer_local_spec(
            num_experts=4 if experts else None, moe_grouped_gemm=False, normalization="RMSNorm"
        )
        self.model = GPTModel(
            config,
            spec,
            vocab_size=64,
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        wrapped: torch.nn.Module = Float16Module(config, self.model) if layout["bf16"] else self.model
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=layout["distributed"], grad_reduce_in_fp32=True
        )
        self.ddp = DistributedDataParallel(config, ddp_config, wrapped)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.01,
                min_lr=0.001,
                weight_decay=0.1,
                adam_beta2=0.95,
                clip_grad=1.0,
                bf16=layout["bf16"],
                params_dtype=dtype,
                use_distributed_optimizer=layout["distributed"],
            ),
            [self.ddp],
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=0.01,
            min_lr=0.001,
            lr_warmup_steps=2 * GLOBAL_BATCH,
            lr_decay_steps=10 * GLOBAL_BATCH,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=10 * GLOBAL_BATCH,
            wd_incr_style="constant",
        )
        self.iteration = 0
        self.tokens = torch.from_numpy(numpy.load(BATCHES)["tokens"].astype(numpy.int64))

    def step(self) -> float:
        """Trains one step and returns the mean loss of the global batch."""
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        ranks = parallel_state.get_data_parallel_world_size()
        rank = parallel_state.get_data_parallel_rank()
        count = GLOBAL_BATCH // MICRO_BATCH // ranks
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0 / count))
        total = torch.zeros(1)
        mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
        positions = torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE)
        for number in range(count):
            # Micro-batches of a step are assigned to the ranks in round-robin order.
            first = (number * ranks + rank) * MICRO_BATCH
            samples = self.tokens[self.iteration, first : first + MICRO_BATCH]
            losses = self.ddp(samples[:, :-1], positions, mask, labels=samples[:, 1:])
            loss = losses.float().mean()
            (loss / count).backward()
            total += loss.detach() / count
        finalize_model_grads([self.ddp])
        self.optimizer.step()
        self.scheduler.step(increment=GLOBAL_BATCH)
        self.iteration += 1
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.item() / ranks

    def state(self, *, is_loading: bool) -> dict[str, Any]:
        """Returns the contents of a training script's distributed checkpoint, except for random generator states."""
        model = self.model.sharded_state_dict()
        sharding = {"distrib_optim_sharding_type": "fully_reshardable"}
        kind = {"metadata": sharding} if self.layout["distributed"] else {}
        flags = {
            **SHAPE,
            **(EXPERTS if self.case == "experts" else {}),
            "num_experts": 4 if self.case == "experts" else None,
            "group_query_attention": True,
            "seq_length": SEQUENCE,
            "max_position_embeddings": SEQUENCE,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "swiglu": True,
            "untie_embeddings_and_output_weights": True,
            "bf16": self.layout["bf16"],
            "fp16": False,
            "optimizer": "adam",
            "lr": 0.01,
            "min_lr": 0.001,
            "weight_decay": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1e-8,
            "make_vocab_size_divisible_by": 64,
            "padded_vocab_size": 64,
            "vocab_size": 64,
            "tokenizer_type": "NullTokenizer",
            "consumed_train_samples": self.iteration * GLOBAL_BATCH,
            "consumed_valid_samples": 0,
            "tensor_model_parallel_size": self.layout["tensor"],
            "expert_model_parallel_size": self.layout["expert"],
        }
        return {
            "args": argparse.Namespace(**flags),
            "checkpoint_version": 3.0,
            "iteration": self.iteration,
            "num_floating_point_operations_so_far": 0,
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading, **kind),
            "opt_param_scheduler": self.scheduler.state_dict(),
        }

    def save(self, folder: Path) -> None:
        """Writes a checkpoint to FOLDER/iter_NNNNNNN, and the tracker."""
        from megatron.core import dist_checkpointing

        target = folder / f"iter_{self.iteration:07d}"
        if dist.get_rank() == 0:
            target.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(self.state(is_loading=False), str(target))
        if dist.get_rank() == 0:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(self.iteration), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Restores the state written by `save`."""
        from megatron.core import dist_checkpointing

        iteration = int((folder / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8"))
        state = dist_checkpointing.load(self.state(is_loading=True), str(folder / f"iter_{iteration:07d}"))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])
        self.iteration = state["iteration"]


def main(case: str, mode: str, folder: Path) -> None:
    """Writes a fixture or continues a checkpoint, and prints the losses of the further steps."""
    dist.init_process_group("gloo")
    without_a_gpu()
    run = Run(case, distributed=mode == "write" and LAYOUTS[case]["distributed"])
    if mode == "continue":
        run.load(folder)
    else:
        first = [run.step() for _ in range(STEPS)]
        run.save(folder)
    losses = {number: run.step() for number in range(run.iteration + 1, run.iteration + 1 + FURTHER)}
    if dist.get_rank() == 0:
        print(json.dumps(losses))
        if mode == "write":
            text = json.dumps({"first": first, "further": losses}, indent=1)
            (folder / "losses.json").write_text(text + "\n", encoding="utf-8")
    dist.barrier()


def _names_alone(kind: Any, error: BaseException, trace: Any) -> None:
    # A full traceback would print source lines of megatron-core.
    places = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{os.path.basename(code.co_filename)}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    print(kind.__name__, str(error)[-600:], *places[-6:], sep="\n  ", file=sys.stderr)


if __name__ == "__main__":
    sys.excepthook = _names_alone
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
