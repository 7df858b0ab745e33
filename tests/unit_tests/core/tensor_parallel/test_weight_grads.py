"""Weight gradients that layers accumulate in place: equal to plain autograd's, without extra memory."""

import io
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, gradients, loss_of, small_config, small_model

EXPERTS = {**LLAMA_LIKE, "num_moe_experts": 4, "moe_router_load_balancing_type": "none", "moe_router_topk": 2}
GROUPED = {**EXPERTS, "moe_grouped_gemm": True}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": GROUPED,
    "experts one by one": EXPERTS,
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "parts recomputed": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "core_attn"]},
}
FROZEN = "decoder.layers.0.self_attention.linear_qkv.weight"


def model_of(fields: dict[str, Any], tied: bool = False) -> Any:
    model = small_model(small_config(**fields), share_embeddings_and_output_weights=tied)
    model.get_parameter(FROZEN).requires_grad = False
    return model


def wrapped(model: Any) -> Any:
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(overlap_grad_reduce=True), model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_gradients_of_microbatches_are_those_of_autograd(fields: dict[str, Any], tied: bool) -> None:
    plain, ddp = (model_of({"params_dtype": torch.float64, **fields}, tied) for _ in range(2))
    ddp = wrapped(ddp)
    for _ in range(2):
        plain.zero_grad()
        for factor in (1.0, 3.0):
            (loss_of(plain) * factor).backward()
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            loss_of(ddp.module).backward()
        (loss_of(ddp.module) * 3.0).backward()
        ddp.finish_grad_sync()
        torch.testing.assert_close(dict(ddp.named_main_grads()), gradients(plain), rtol=1e-10, atol=1e-12)
        assert not gradients(ddp.module)


class MadeShapes(TorchDispatchMode):
    """Records the shapes of tensors that operations return in newly allocated memory."""

    def __init__(self, *flats: torch.Tensor) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()
        self._known = {flat.untyped_storage().data_ptr() for flat in flats}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._known:
                self.shapes.add(tensor.shape)
        return result


@pytest.mark.parametrize("fuses", [True, False])
def test_no_memory_of_a_weights_size_is_taken(fuses: bool) -> None:
    # Widths exceed the number of tokens, so that no activation has the shape of a weight.
    fields = {**GROUPED, "hidden_size": 128, "ffn_hidden_size": 80, "gradient_accumulation_fusion": fuses}
    ddp = wrapped(model_of(fields))
    params = dict(ddp.module.named_parameters())
    names = [n for n, p in params.items() if p.dim() == 2 and p.requires_grad and "router" not in n]
    for _ in range(2):
        loss = loss_of(ddp.module)
        with MadeShapes(*params.values(), *(buffer.grad_data for buffer in ddp.all_buffers)) as made:
            loss.backward()
        assert [params[name].shape in made.shapes for name in names] == [not fuses] * len(names)


def test_what_is_asked_of_autograd_is_not_added_up() -> None:
    ddp = wrapped(model_of({"params_dtype": torch.float64, **GROUPED}, tied=True))
    params = {name: param for name, param in ddp.module.named_parameters() if param.requires_grad}
    calls: list[str] = []
    for name, param in params.items():
        param.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    asked = torch.autograd.grad(loss_of(ddp.module), list(params.values()), create_graph=True)
    norm = "decoder.final_layernorm.weight"
    loss_of(ddp.module).backward(inputs=[params[norm]])
    assert calls == [norm] and all(grad.any() == (name == norm) for name, grad in ddp.named_main_grads())
    # Second-order gradients through the layers' autograd functions.
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(asked[0].square().sum(), list(params.values())))
    ddp.zero_grad_buffer()
    calls.clear()
    watched = "decoder.layers.1.self_attention.linear_qkv.weight"
    seen: list[torch.Tensor] = []
    params[watched].register_hook(seen.append)
    loss_of(ddp.module).backward()
    assert sorted(calls) == sorted(params)
    torch.testing.assert_close(dict(ddp.named_main_grads()), dict(zip(params, asked)), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(seen[0], asked[list(params).index(watched)])


def test_a_stored_weight_has_no_owner() -> None:
    file = io.BytesIO()
    torch.save(wrapped(model_of({})).module.output_layer.weight, file)
    file.seek(0)
    assert "grad_owner" not in vars(torch.load(file, weights_only=False))
