"""Muon on the matrices stored in a model's parameters, compared with a plain loop over explicit matrices."""

import copy
import math

import pytest
import torch

from megatron.core.optimizer import ChainedOptimizer
from tests.unit_tests.core.models.small_models import LATENT, LLAMA_LIKE, loss_of, small_config, small_model
from tests.unit_tests.core.optimizer.reference import microbatches, our_step, tiny_model, wrap_and_build

EXPERTS, HIDDEN, FFN, GROUPS, WIDTH = 3, 32, 24, 2, 8
LR, DECAY = 0.02, 0.1


def latent_model():
    config = small_config(num_layers=1, **LATENT)
    return small_model(config, share_embeddings_and_output_weights=False)


def moe_model(grouped=True):
    experts = {"num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": FFN}
    config = small_config(num_layers=1, num_query_groups=GROUPS, moe_grouped_gemm=grouped, **experts, **LLAMA_LIKE)
    return small_model(config, share_embeddings_and_output_weights=False)


def orthogonal(update, steps):
    """Orthogonalizes by Newton-Schulz iteration in bf16, like torch: singular values become close to 1."""
    x = update.bfloat16()
    wide = x.T if x.size(0) > x.size(1) else x
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), wide, beta=3.4445)
    return wide.T if x.size(0) > x.size(1) else wide


def matrices(name, tensor, split_qkv):
    """Returns a parameter's matrices [outputs, inputs], and a function that merges them into the parameter's shape."""
    if name.endswith("weight1"):
        return [one.T for one in tensor.view(EXPERTS, HIDDEN, 2 * FFN)], lambda ms: torch.stack([m.T for m in ms])
    if name.endswith("weight2"):
        return [one.T for one in tensor.view(EXPERTS, FFN, HIDDEN)], lambda ms: torch.stack([m.T for m in ms])
    return attention_matrices(name, tensor) if split_qkv else ([tensor], lambda ms: ms[0])


def attention_matrices(name, tensor):
    if name.endswith("linear_qkv.weight"):
        parts = tensor.view(GROUPS, -1, HIDDEN).split([2 * WIDTH, WIDTH, WIDTH], dim=1)
        return [p.reshape(-1, HIDDEN) for p in parts], lambda ms: torch.cat([m.view(GROUPS, -1, HIDDEN) for m in ms], 1)
    if name.endswith("linear_kv_up_proj.weight"):
        # 4 heads with 6 key rows and 7 value rows each.
        parts = tensor.view(4, 13, -1).split([6, 7], dim=1)
        return [p.flatten(0, 1) for p in parts], lambda ms: torch.cat([m.unflatten(0, (4, -1)) for m in ms], dim=1)
    if name.endswith("linear_kv_down_proj.weight"):
        return list(tensor.split([10, 4])), torch.cat
    return [tensor], lambda ms: ms[0]


class PlainMuonAndAdam:
    """Steps matrices in a plain loop; torch's AdamW steps embeddings, the output layer, norms and biases."""

    def __init__(self, model, *, nesterov=False, steps=5, mode="spectral", factor=1.0, split_qkv=True):
        self.nesterov, self.steps, self.mode, self.factor, self.split = nesterov, steps, mode, factor, split_qkv
        named = dict(model.named_parameters())
        is_matrix = {n: p.dim() == 2 and "embedding" not in n and "output_layer" not in n for n, p in named.items()}
        self.hidden = {n: p for n, p in named.items() if is_matrix[n]}
        self.momenta = {n: torch.zeros_like(p) for n, p in self.hidden.items()}
        rest = [p for n, p in named.items() if not is_matrix[n]]
        groups = [{"params": [p], "weight_decay": DECAY if p.dim() > 1 else 0.0} for p in rest]
        self.adam = torch.optim.AdamW(groups, lr=LR)

    @torch.no_grad()
    def step(self):
        self.adam.step()
        for name, p in self.hidden.items():
            momentum = self.momenta[name].lerp_(p.grad, 0.1)
            update = p.grad.lerp(momentum, 0.9) if self.nesterov else momentum
            parts, join = matrices(name, update, self.split)
            done = []
            for part in parts:
                m, n = part.shape
                shapes = {"spectral": max(m, n), "unit_rms_norm": m / n, "shape_scaling": max(1, m / n)}
                done.append(orthogonal(part, self.steps).float() * (math.sqrt(shapes[self.mode]) * self.factor))
            p.mul_(1 - LR * DECAY).sub_(join(done).reshape(p.shape), alpha=LR)


@pytest.mark.parametrize(
    "make, plain, settings",
    [
        (moe_model, {}, {}),
        (latent_model, {}, {}),
        (latent_model, {"split_qkv": False}, {"muon_split_qkv": False}),
        (
            moe_model,
            {"nesterov": True, "steps": 3, "mode": "shape_scaling", "split_qkv": False},
            {
                "muon_nesterov": True,
                "muon_num_ns_steps": 3,
                "muon_scale_mode": "shape_scaling",
                "muon_split_qkv": False,
            },
        ),
        (
            moe_model,
            {"mode": "unit_rms_norm", "factor": 0.2},
            {"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 0.2, "clip_grad": 0.05},
        ),
    ],
)
def test_twenty_steps_of_muon_and_adam_follow_a_plain_loop_over_matrices(make, plain, settings):
    model = make()
    twin = copy.deepcopy(model)
    reference = PlainMuonAndAdam(twin, **plain)
    base = {"optimizer": "muon", "muon_momentum": 0.9, "lr": LR, "weight_decay": DECAY, "clip_grad": 0.0}
    wrapped, optimizer = wrap_and_build(model, **{**base, **settings})
    assert isinstance(optimizer, ChainedOptimizer) and len(optimizer.chained_optimizers) == 2
    for _ in range(20):
        # Orthogonalization amplifies rounding errors in the directions of the smallest singular values, so that
        # independent runs diverge. Each step therefore starts from the same weights.
        twin.load_state_dict(model.state_dict())
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss_of(wrapped.module).backward()
        wrapped.finish_grad_sync()
        updated, norm, _ = optimizer.step()
        twin.zero_grad()
        loss_of(twin).backward()
        reference_norm = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()])
        if settings.get("clip_grad"):
            torch.nn.utils.clip_grad_norm_(twin.parameters(), settings["clip_grad"])
        reference.step()
        assert updated and norm == pytest.approx(float(reference_norm), rel=1e-5)
        for (name, p), q, start in zip(model.named_parameters(), twin.parameters(), before, strict=True):
            difference = (p - q).detach().norm() / (q - start).detach().norm()
            assert float(difference) < 2e-2, name


def test_stacked_experts_are_updated_like_single_ones():
    updates = []
    for grouped in (True, False):
        model = moe_model(grouped)
        wrapped, optimizer = wrap_and_build(model, optimizer="muon", lr=LR)
        loss_of(wrapped.module).backward()
        wrapped.finish_grad_sync()
        optimizer.step()
        experts = model.decoder.layers[0].mlp.experts
        weights = (
            matrices("weight1", experts.weight1, True)[0]
            if grouped
            else [expert.linear_fc1.weight for expert in experts.local_experts]
        )
        updates.append(torch.stack(list(weights)))
    torch.testing.assert_close(*updates, rtol=0, atol=2e-2 * LR)


@pytest.mark.parametrize("dtype, settings", [("bf16", {}), ("fp16", {"loss_scale": 256.0})])
def test_sixteen_bit_gradients_step_fp32_masters_after_the_loss_scale_is_taken_off(dtype, settings):
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    model, twin, masters = tiny_model(torch_dtype), tiny_model(torch_dtype), tiny_model(torch_dtype).float()
    (x,) = microbatches(0, rows=64, dtype=torch_dtype)
    scale = settings.get("loss_scale", 1.0)
    (twin(x).square().mean().float() * scale).backward()
    for p, master in zip(twin.parameters(), masters.parameters()):
        master.grad = p.grad.float() / scale
    PlainMuonAndAdam(masters).step()
    base = {"optimizer": "muon", "lr": LR, "weight_decay": DECAY, "clip_grad": 0.0, dtype: True}
    wrapped, optimizer = wrap_and_build(model, **base, **settings)
    our_step(wrapped, optimizer, [x])
    for p, master in zip(model.parameters(), masters.parameters()):
        torch.testing.assert_close(p, master.to(torch_dtype))
