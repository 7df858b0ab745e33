"""A small model with our optimizer and schedule, trained, saved and loaded. Contains no tests."""

import argparse
import random

import numpy
import torch

from megatron.core.device import seed_all
from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.moe.paged_stash.sizing import LearnedSizes
from megatron.training.arguments import parse_args
from megatron.training.checkpointing import load_run, save_run
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.config import CheckpointConfig
from tests.unit_tests.core.optimizer.reference import wrap

ARGS = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "swiglu": False,
    "add_bias_linear": True,
    "bf16": False,
    "fp16": False,
    "optimizer": "adam",
    "use_checkpoint_opt_param_scheduler": False,
    "seed": 7,
    "micro_batch_size": 4,
}


class SmallRun:
    """A small model with a buffer, our optimizer and schedule, trained on noise with dropout."""

    def __init__(self, *, dtype=torch.float32, frozen=(), group=None, more=(), **args):
        seed_all(1)
        layers = torch.nn.Linear(5, 7), torch.nn.Dropout(0.5), torch.nn.Linear(7, 3), *more
        model = torch.nn.Sequential(*layers).to(dtype)
        model.register_buffer("expert_bias", torch.zeros(3))
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        bf16 = dtype == torch.bfloat16
        self.dtype, self.args = dtype, argparse.Namespace(**{**vars(parse_args(argv=[])), **ARGS, "bf16": bf16, **args})
        self.model = wrap(model, group)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, bf16=bf16), [self.model])
        schedule = {"init_lr": 0.0, "max_lr": 0.1, "min_lr": 0.0, "lr_warmup_steps": 2, "lr_decay_steps": 20}
        decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 20, "wd_incr_style": "constant"}
        self.scheduler = OptimizerParamScheduler(self.optimizer, **schedule, **decay, lr_decay_style="cosine")
        self.state = TrainState()

    def train(self, steps):
        for _ in range(steps):
            noise = torch.randn(4, 5) + random.random() + float(numpy.random.normal())
            self.optimizer.zero_grad()
            self.model(noise.to(self.dtype)).square().mean().backward()
            finalize_model_grads([self.model])
            self.optimizer.step()
            self.model.module.expert_bias += 1
            self.scheduler.step(4)
            self.state.iteration += 1
            self.state.consumed_train_samples += 4
            grown = LearnedSizes(capacity_factor=1 + self.state.iteration / 8, rows_share={1: 1.5})
            self.state.learned_sizes = self.state.learned_sizes.merged(grown)
        return self

    def optimizer_tensors(self):
        """Returns moments and masters by their checkpoint keys."""
        pieces = model_logical_pieces(self.model)
        return {tensor.key: tensor.data for tensor in self.optimizer.sharded_state(pieces)}

    def snapshot(self):
        """Copies all state that a resumed run must restore, and the next draws of each generator."""
        state = {key: tensor.clone() for key, tensor in self.optimizer_tensors().items()}
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        draws = torch.tensor([random.gauss(0, 1), random.random(), *numpy.random.normal(size=3), torch.randn(())])
        numbers = torch.tensor([self.optimizer.param_groups[0]["lr"], self.optimizer.state_dict()["step"]])
        sizes = self.state.learned_sizes
        learned = [sizes.capacity_factor or 0.0, sizes.rows_share.get(1, 0.0)]
        counts = [count for count in vars(self.state).values() if isinstance(count, int)]
        counters = torch.tensor([*counts, *learned], dtype=torch.float64)
        return {**state, **weights, "draws": draws, "numbers": numbers, "counters": counters}

    def save(self, folder, **settings):
        config = CheckpointConfig(save=str(folder), **settings)
        objects = [self.model], self.optimizer, self.scheduler
        return save_run(
            self.state.iteration, *objects, train_state=self.state, run_config=run_config_of(self.args), config=config
        )

    def load(self, folder, **settings):
        config = CheckpointConfig(load=str(folder), **settings)
        objects = [self.model], self.optimizer, self.scheduler
        return load_run(*objects, train_state=self.state, run_config=run_config_of(self.args), config=config)
