"""A small model, its training with our optimizer, and the same training with only torch's optimizer."""

import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.process_groups_config import ProcessGroupCollection

ALIGNMENT = 64


def tiny_model(dtype=torch.float32, seed=0):
    """Builds a small model. No parameter size is a multiple of 64, and every other parameter has weight decay."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 33), nn.GELU(), nn.Linear(33, 4)).to(dtype)


def microbatches(step, count=1, dtype=torch.float32, rows=6):
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(rows, 5, generator=generator).to(dtype) for _ in range(count)]


def wrap(model, group=None, *, overlap=None, pg_collection=None, **settings):
    """Wraps a model in data parallelism with fp32 gradients. overlap and settings: fields of the two configurations."""
    return DistributedDataParallel(
        ModelParallelConfig(**settings),
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, **overlap or {}),
        model,
        pg_collection=pg_collection or ProcessGroupCollection(dp_cp=group),
    )


def wrap_and_build(model, group=None, config_overrides=None, **settings):
    """Returns the wrapped model and its optimizer. settings: OptimizerConfig's fields; lr defaults to 0.01.

    config_overrides: added to the standard overrides.
    """
    wrapped = wrap(model, group, deterministic_mode=settings.get("deterministic_mode", False))
    config = OptimizerConfig(**{"lr": 0.01, **settings})
    if config_overrides is not None:
        config_overrides = {**get_standard_config_overrides(config), **config_overrides}
    return wrapped, get_megatron_optimizer(config, [wrapped], config_overrides=config_overrides)


def our_step(wrapped, optimizer, inputs):
    """Makes one step whose loss is the mean of squares, averaged over the microbatches `inputs`."""
    optimizer.zero_grad()
    for x in inputs:
        optimizer.scale_loss(wrapped(x).square().mean() / len(inputs)).backward()
    finalize_model_grads([wrapped])
    return optimizer.step()


class TorchReference:
    """Trains with torch's fused optimizer, one padded fp32 tensor per parameter, and gradients summed in fp32."""

    def __init__(self, model, make_optimizer, clip_grad=0.0):
        self.model, self.clip_grad = model, clip_grad
        self.mains = [self._padded(p.detach().float()) for p in model.parameters()]
        decays = [p.dim() > 1 for p in model.parameters()]
        groups = [{"params": [m for m, d in zip(self.mains, decays) if d]}]
        groups.append({"params": [m for m, d in zip(self.mains, decays) if not d], "weight_decay": 0.0})
        self.optimizer = make_optimizer(groups)

    def step(self, inputs):
        totals = [torch.zeros_like(p, dtype=torch.float32) for p in self.model.parameters()]
        for x in inputs:
            self.model.zero_grad()
            (self.model(x).square().mean() / len(inputs)).backward()
            for total, p in zip(totals, self.model.parameters()):
                total += p.grad.float()
        norm = torch.linalg.vector_norm(torch.cat([t.flatten() for t in totals]).double()).float().item()
        # Divides gradients instead of multiplying by the clip factor clip / (norm + eps).
        divisor = torch.tensor(max(1.0, 1.0 / (self.clip_grad / (norm + 1e-6))) if self.clip_grad else 1.0)
        for main, total in zip(self.mains, totals):
            main.grad = self._padded(total / divisor)
        self.optimizer.step()
        for p, main in zip(self.model.parameters(), self.mains):
            p.data.copy_(main[: p.numel()].view_as(p))
        return norm

    @staticmethod
    def _padded(tensor):
        out = torch.zeros(-(-tensor.numel() // ALIGNMENT) * ALIGNMENT)
        out[: tensor.numel()] = tensor.flatten()
        return out


def assert_same_parameters(a, b):
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(p, q), name
