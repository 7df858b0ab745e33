"""Casts, moves, copies and loads of models leave statistics and rotary tables in the dtype that they need."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.kept_dtypes import KeepsDtypes, kept_dtype
from megatron.core.transformer.module import (
    Float16Module,
    MegatronModule,
    convert_module_to_dtype_except_fp32_marked,
    mark_keep_in_fp32,
)
from megatron.core.utils import ModelWrapper
from tests.unit_tests.core.models.small_models import small_batch, small_config, small_model
from tests.unit_tests.core.optimizer.reference import wrap

STEPS, RATE = 600, 1e-3


def sigmoid_model(**fields: Any) -> GPTModel:
    router = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    rate = {"moe_router_bias_update_rate": RATE, "moe_aux_loss_coeff": 0.1}
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_grouped_gemm": True}
    dense = {"gated_linear_unit": True, "add_bias_linear": False, "activation_func": torch.nn.functional.silu}
    return small_model(small_config(**experts, **router, **rate, **dense, **fields))


def assigned(model: nn.Module) -> nn.Module:
    """Loads a state dict in half precision by assignment, as tools that avoid a copy do."""
    state = {name: value.bfloat16() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def on_meta_and_back(model: nn.Module) -> nn.Module:
    """Replaces all memory, as for deferred initialization, then restores the values."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rest = [(inside, name) for inside in model.modules() for name in inside._non_persistent_buffers_set]
    values = [inside.get_buffer(name).clone() for inside, name in rest]
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(state)
    for (inside, name), value in zip(rest, values, strict=True):
        inside.get_buffer(name).copy_(value)
    return model


def copied_layers(model: GPTModel) -> GPTModel:
    model.decoder.layers = copy.deepcopy(model.decoder.layers)
    for number, layer in enumerate(model.decoder.layers, 1):
        layer.mlp.router.report_to(model.aux_losses, layer_number=number)
    return model


def in_ddp(model: GPTModel, **half: bool) -> nn.Module:
    return wrap(Float16Module(small_config(**half), model), pg_collection=ProcessGroupCollection())


def cast_with(setting: str, model: GPTModel) -> GPTModel:
    """Casts a model while torch replaces parameters in another way than by default."""
    change = getattr(torch.__future__, f"set_{setting}_module_params_on_conversion")
    change(True)
    try:
        return model.bfloat16()
    finally:
        change(False)


def loaded_through(wrapper: nn.Module) -> nn.Module:
    """Assigns a state dict in half precision to a wrapper, then casts it."""
    wrapper.load_state_dict({name: value.half() for name, value in wrapper.state_dict().items()}, assign=True)
    return wrapper.half()


CASTS: dict[str, Callable[[GPTModel], nn.Module]] = {
    "bfloat16()": lambda model: model.bfloat16(),
    "half()": lambda model: model.half(),
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "to(device, half)": lambda model: model.to("cpu", torch.float16),
    "to(other)": lambda model: model.to(torch.ones(1, dtype=torch.bfloat16)),
    "type()": lambda model: model.type(torch.bfloat16),
    "half() twice, float() between": lambda model: model.half().float().bfloat16(),
    "cast of a copy": lambda model: copy.deepcopy(model).bfloat16(),
    "copy of a cast": lambda model: copy.deepcopy(model.bfloat16()),
    "cast inside a foreign module": lambda model: nn.Sequential(model).bfloat16()[0],
    "cast of a wrapper": lambda model: ModelWrapper(model).half().module,
    "cast of each layer": lambda model: [layer.bfloat16() for layer in model.decoder.layers] and model,
    "Float16Module": lambda model: Float16Module(small_config(bf16=True), model).module,
    "cast of Float16Module": lambda model: Float16Module(small_config(bf16=True), model).bfloat16().module,
    "convert": lambda model: convert_module_to_dtype_except_fp32_marked(model, torch.bfloat16),
    "assigned state, then cast": lambda model: assigned(model).bfloat16(),
    "meta, then cast": lambda model: on_meta_and_back(model).bfloat16(),
    "cast, then meta": lambda model: on_meta_and_back(model.bfloat16()),
    "apply(half)": lambda model: model.apply(lambda module: module.half()),
    "parameters swapped": lambda model: cast_with("swap", model),
    "parameters overwritten": lambda model: cast_with("overwrite", model),
    "cast of an average": lambda model: AveragedModel(model, use_buffers=True).bfloat16().module,
    "cast of copied layers": lambda model: copied_layers(model).bfloat16(),
    "fp16 Float16Module in DDP": lambda model: in_ddp(model, fp16=True).module.module,
    "bf16 Float16Module in DDP, copied": lambda model: copy.deepcopy(in_ddp(model, bf16=True).module).module,
    "state assigned to a wrapper": lambda model: loaded_through(ModelWrapper(model)).module,
    "wrapper of a wrapper": lambda model: ModelWrapper(nn.Sequential(ModelWrapper(model))).bfloat16().module[0].module,
}


@pytest.mark.parametrize("name", CASTS)
def test_biases_sums_counts_and_tables_keep_their_precision_through(name: str) -> None:
    plain, model = sigmoid_model(), CASTS[name](sigmoid_model())
    assert isinstance(model, GPTModel)
    loads = torch.tensor([10, 20, 30, 40])
    for _ in range(STEPS):
        model.aux_losses.tokens_per_expert[0] = loads  # always unbalanced in the same way
        model.aux_losses.record("load_balancing_loss", torch.tensor(1.25), layer_number=1)
        model.finalize_step(None)
    bias = model.decoder.layers[0].mlp.router.expert_bias
    assert (bias.double() - STEPS * RATE * torch.tensor([1.0, 1.0, -1.0, -1.0])).abs().max() < 1e-4
    assert model.aux_losses.take_totals()["load_balancing_loss"].tolist() == [1.25 * STEPS, STEPS]
    assert model.aux_losses.backward_scale.dtype == torch.float64
    for table in ("cos", "sin"):
        expected, found = (vars(one.rotary_pos_emb)["_buffers"][table] for one in (plain, model))
        assert torch.equal(expected, found)
    loss = model(*small_batch()[:2], None, labels=small_batch()[2])
    assert loss.isfinite().all() and model.aux_losses.sums.dtype == torch.float32


def test_a_cast_to_more_precision_widens_and_a_later_float_returns() -> None:
    model = sigmoid_model().double()
    router, recorder = model.decoder.layers[0].mlp.router, model.aux_losses
    assert (router.expert_bias.dtype, recorder.sums.dtype, model.rotary_pos_emb.cos.dtype) == (torch.float64,) * 3
    model.float()
    assert (router.expert_bias.dtype, recorder.sums.dtype, recorder.backward_scale.dtype) == (
        torch.float32,
        torch.float32,
        torch.float64,
    )


class Marked(KeepsDtypes):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)  # a foreign module
        mark_keep_in_fp32(self.inner.bias)


def reloaded(model: Marked) -> Marked:
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    loaded: Marked = torch.load(memory, weights_only=False)
    return loaded


def test_a_marked_parameter_of_a_foreign_module_keeps_its_values_and_its_gradient() -> None:
    model = Marked()
    model.inner(torch.ones(3)).sum().backward()
    bias, values = model.inner.bias, model.inner.bias.detach().clone()
    model.bfloat16()
    assert model.inner.bias is bias and torch.equal(bias, values) and kept_dtype(bias) == torch.float32
    again = reloaded(model)
    assert kept_dtype(again.inner.bias) == torch.float32 and torch.equal(again.half().inner.bias, values)
    assert bias.grad is not None and bias.grad.dtype == torch.float32
    assert model.inner.weight.dtype == model.inner.weight.grad.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_a_marked_parameter_keeps_its_mark_through_the_meta_device() -> None:
    with torch.device("meta"):
        model = Marked()
    model.to_empty(device="cpu").bfloat16()
    assert kept_dtype(model.inner.bias) == model.inner.bias.dtype == torch.float32
    assert model.inner.weight.dtype == torch.bfloat16
    model.to("meta")
    assert kept_dtype(model.inner.bias) == torch.float32


def test_an_assigned_state_cannot_narrow_a_marked_buffer() -> None:
    model = assigned(sigmoid_model())
    assert isinstance(model, GPTModel)
    bias = model.decoder.layers[0].mlp.router.expert_bias
    assert (bias.dtype, kept_dtype(bias)) == (torch.float32, torch.float32)
    assert model.embedding.word_embeddings.weight.dtype == torch.bfloat16


class Foreign(nn.Module):
    """A model of other code with a scale and a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = mark_keep_in_fp32(nn.Parameter(torch.full((4,), 1 + 2**-12)))
        self.register_buffer("count", mark_keep_in_fp32(torch.zeros(())))


class Holder(MegatronModule):
    def __init__(self) -> None:
        super().__init__(small_config(bf16=True))
        self.foreign = Foreign()


def assigned_parameters(model: Holder) -> Holder:
    model.load_state_dict({name: value.bfloat16() for name, value in model.state_dict().items()}, assign=True)
    return model


FOREIGN: dict[str, Callable[[], nn.Module]] = {
    "Float16Module": lambda: Float16Module(small_config(bf16=True), Foreign()).bfloat16(),
    "Float16Module, half": lambda: Float16Module(small_config(fp16=True), Foreign()).half(),
    "DDP": lambda: wrap(Foreign(), pg_collection=ProcessGroupCollection()).bfloat16(),
    "DDP of Float16Module": lambda: wrap(
        Float16Module(small_config(bf16=True), Foreign()), pg_collection=ProcessGroupCollection()
    ).to(torch.bfloat16),
    "convert": lambda: convert_module_to_dtype_except_fp32_marked(Foreign(), torch.float16),
    "inside a layer": lambda: Holder().bfloat16(),
    "inside a copied layer": lambda: copy.deepcopy(Holder()).half(),
    "copy of a cast layer": lambda: copy.deepcopy(Holder().bfloat16()).bfloat16(),
    "copy of a wrapped layer": lambda: copy.deepcopy(Float16Module(small_config(bf16=True), Holder())).bfloat16(),
    "list of layers, copied": lambda: copy.deepcopy(nn.ModuleList([Holder()])).bfloat16(),
    "8 bits": lambda: Holder().to(torch.float8_e4m3fn),
    "8 bits by convert": lambda: convert_module_to_dtype_except_fp32_marked(Foreign(), torch.float8_e5m2),
    "float and half in turns": lambda: Holder().half().float().bfloat16().half(),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_marks_of_foreign_modules_hold_in_every_wrapper_and_copy(name: str) -> None:
    model = FOREIGN[name]()
    (foreign,) = (module for module in model.modules() if isinstance(module, Foreign))
    assert foreign.linear.weight.dtype.itemsize < 4
    for _ in range(STEPS):  # bf16 counts stop at 256
        foreign.count += 1
    assert foreign.count.item() == STEPS
    with torch.no_grad():
        for _ in range(STEPS):
            foreign.scale += 2**-14
    assert foreign.scale.double().tolist() == [1 + 2**-12 + STEPS * 2**-14] * 4


def test_an_assigned_state_cannot_narrow_a_marked_parameter() -> None:
    model = assigned_parameters(Holder())
    assert model.foreign.scale.dtype == kept_dtype(model.foreign.scale) == torch.float32
    assert model.foreign.linear.weight.dtype == torch.bfloat16
    assert model.bfloat16().foreign.scale.dtype == torch.float32
