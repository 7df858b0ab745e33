"""Modules built on the meta device, then wrapped in TorchFullyShardedDataParallel: values, memory, hooks and errors.

Values equal those of the same modules built with memory. fsdp2.yaml has a case for the program's flag.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.live_bytes import PeakBytes
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_attributes import mark_partial_gradient, param_facts
from megatron.core.transformer.module import Float16Module
from tests.counts import long_count, soak_only
from tests.distributed.fsdp2_runs import DETERMINISTIC, FSDP2, STEPS, Net, train_losses
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config, small_model

EXPERTS: dict[str, Any] = {
    **LLAMA_LIKE,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}
# Models to build: fields of the configuration, arguments of the model.
GPTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"position_embedding_type": "learned_absolute"}),
    ({**EXPERTS, "bf16": True, "moe_grouped_gemm": True}, {}),
    (EXPERTS, {"share_embeddings_and_output_weights": True}),
    ({"qk_layernorm": True, "fp16": True, "init_method": nn.init.xavier_uniform_}, {"rope_scaling": True}),
]


def _gpt(fields: dict[str, Any], arguments: dict[str, Any], *, is_meta: bool) -> nn.Module:
    config = small_config(**fields, init_model_with_meta_device=is_meta)
    model = small_model(config, unpadded_vocab_size=91, **arguments)
    assert {param.is_meta for param in model.parameters()} == {is_meta}
    assert not any(buffer.is_meta for buffer in model.buffers())
    model.decoder.layers[0].requires_grad_(False)
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


def _wrap(net: nn.Module, **settings: Any) -> TorchFullyShardedDataParallel:
    init_fn, groups = settings.pop("param_init_fn", None), settings.pop("pg_collection", None)
    config = replace(FSDP2, **settings)
    return TorchFullyShardedDataParallel(DETERMINISTIC, config, net, pg_collection=groups, param_init_fn=init_fn)


def _held(wrapped: nn.Module) -> dict[str, Tensor]:
    return {**dict(wrapped.named_parameters()), **dict(wrapped.named_buffers())}


def _written_on(tensor: Tensor) -> dict[str, object]:
    # __getstate__ is a function bound to this tensor, so it differs for each tensor.
    return {name: value for name, value in vars(tensor).items() if name != "__getstate__"}


def _assert_same(wrapped: nn.Module, plain: nn.Module) -> None:
    found, expected = _held(wrapped), _held(plain)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        local, reference = (getattr(one, "_local_tensor", one) for one in (tensor, expected[name]))
        assert torch.equal(local, reference), name
        assert tensor.device == expected[name].device and tensor.dtype == expected[name].dtype, name
        assert _written_on(tensor) == _written_on(expected[name]), name
        assert tensor.requires_grad == expected[name].requires_grad, name


def _compare_gpts() -> None:
    alone = ProcessGroupCollection(dp=dist.group.WORLD, dp_cp=dist.group.WORLD, expt_dp=dist.group.WORLD)
    several = ({}, {"cpu_offload": True, "pg_collection": alone}, {"release_gradients": True})
    every = [(gpt, settings) for gpt in GPTS for settings in several]
    # Each model with one of the settings, and each setting with one model.
    some = [every[number] for number in (1, 3, 8, 9)]
    for (fields, arguments), settings in every if long_count(0, soak=1) else some:
        of_meta, plain = (_wrap(_gpt(fields, arguments, is_meta=m), **settings) for m in (True, False))
        _assert_same(of_meta, plain)
        assert any(value.abs().sum() > 0 for value in of_meta.all_buffers[0].param_data.split(64))


# On three ranks, each rank draws its own rows of one random sequence; on one rank, it draws all of them.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [soak_only(1), 3])
def test_a_gpt_built_on_the_meta_device_has_the_bits_of_one_that_was_not(ranks: int) -> None:
    run_on_ranks(_compare_gpts, ranks)


class Scale(nn.Module):
    """A module with a weight and with buffers of several kinds, all of which affect its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6))
        self.register_buffer("table", torch.empty(2, 6), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.register_buffer("is_on", torch.empty(6, dtype=torch.bool))
        self.register_buffer("turns", torch.empty(3, dtype=torch.complex64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight)
        # Replaces the tensor, as a module does that recomputes a table.
        self.table = torch.arange(12.0).view(2, 6) / 12
        self.count.fill_(3)
        self.is_on.fill_(True)
        self.turns.copy_(torch.polar(torch.ones(3), torch.arange(3.0)))

    def forward(self, x: Tensor) -> Tensor:
        turns = torch.view_as_real(self.turns).view(-1)
        return x * self.weight * self.count * self.is_on + self.table.sum(0) + turns


class Various(Net):
    """A net with tied tables, a Scale and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.scale = Scale()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, words: Tensor) -> Tensor:
        words = self.table(words)
        hidden = self.scale(words).to(words.dtype)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        normed = self.norm(hidden.flatten(0, 1).float()).view_as(hidden)
        return self.out(normed.to(hidden.dtype)).float()


def _various(dtype: torch.dtype, *, is_meta: bool) -> tuple[Various, Counter[str]]:
    """Builds a partly frozen net with a mark and a hook on each parameter; returns it and the counts of hook calls."""
    with torch.device("meta" if is_meta else "cpu"):
        net = Various()
    for part in (net.table, net.layers, net.out):
        part.to(dtype)
    torch.manual_seed(0)
    seen: Counter[str] = Counter()
    net.layers[1].requires_grad_(False)
    for name, param in net.named_parameters():
        mark_partial_gradient(param)
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _, name=name: seen.update([name]))
    return net, seen


def _train_various(settings: dict[str, Any], dtype: torch.dtype) -> list[list[tuple[float, float]]]:
    losses = []
    for is_meta in (False, True):
        net, seen = _various(dtype, is_meta=is_meta)
        wrapped = _wrap(net, **settings)
        assert all(param_facts(param).sequence_parallel for param in wrapped.parameters())
        losses.append(train_losses(wrapped, bf16=dtype == torch.bfloat16))
        trained = [name for name, param in wrapped.module.named_parameters() if param.requires_grad]
        assert seen == Counter(dict.fromkeys(trained, STEPS))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, soak_only(3)])
def test_b27_any_module_trains_as_if_built_with_memory_and_keeps_hooks_marks_and_buffers(ranks: int) -> None:
    for settings, dtype in (({}, torch.float32), ({"cpu_offload": True}, torch.bfloat16)):
        for plain, of_meta in run_on_ranks(_train_various, ranks, settings, dtype):
            assert of_meta == plain
            assert len({loss for loss, _ in plain}) == STEPS


def _built(make: str, *, is_meta: bool) -> TorchFullyShardedDataParallel:
    if make == "gpt":
        return _wrap(_gpt({"hidden_size": 128, "num_layers": 4, "bf16": True}, {}, is_meta=is_meta))
    with torch.device("meta" if is_meta else "cpu"):
        net = nn.Sequential(*[nn.Linear(128, 128) for _ in range(16)])
    return _wrap(net)


def _bytes(make: str) -> tuple[int, int, int, int]:
    """Returns peak and persistent bytes of a wrapped model, and the number of elements of its largest parameter.

    The peaks are those of building and wrapping on the meta device, and with memory; persistent memory comes third.
    """
    kept: list[TorchFullyShardedDataParallel] = []
    with PeakBytes() as held:
        of_meta = held.peak_of(lambda: kept.append(_built(make, is_meta=True)))
        wrapped = kept.pop()
        own = [memory for flat in wrapped.all_buffers for memory in (flat.param_data, flat.grad_data)]
        own += [one.values for one in wrapped.shard_weights() if one.is_frozen] + list(wrapped.buffers())
        largest = max(param.numel() for param in wrapped.parameters())
        total = sum(memory.nbytes for memory in own)
        plain = held.peak_of(lambda: kept.append(_built(make, is_meta=False))) - total
    return of_meta, plain, total, largest


@pytest.mark.slow
@pytest.mark.parametrize("make", ["gpt", "linears"])
def test_nothing_but_shards_and_one_parameter_has_memory_while_a_model_is_built(make: str) -> None:
    for peak, plain, held, largest in run_on_ranks(_bytes, 4, make):
        # A GPT draws only its rows, and rounds them; other models draw the parameters of one module whole.
        assert held <= peak <= held + (2 * largest / 4 if make == "gpt" else 4 * largest) + 4096
        assert plain > 2 * peak


class Bare(nn.Module):
    """A module whose parameter is never initialized."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Forgetful(Bare):
    """A module whose reset does not fill its table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4, dtype=torch.bool), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Growing(Bare):
    """A module whose reset changes the shape of its weight."""

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.ones(5, 4))


class Half(Growing):
    """A module with one parameter that has a value and one that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4, device="cpu"), requires_grad=False)


def _refused() -> list[str]:
    texts = []
    for kind in (Bare, Forgetful, Growing, Half):
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(4, 4), kind())
        with pytest.raises(ValueError) as error:
            _wrap(net)
        texts.append(str(error.value))
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 4), Forgetful())

    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 2.0)

    given = _wrap(net, param_init_fn=init)
    assert all((param._local_tensor == 2).all() for param in given.parameters())  # type: ignore[attr-defined]
    # Parameters that a checkpoint will fill need no values; buffers are not part of a checkpoint.
    with torch.device("meta"):
        loaded = _wrap(nn.Sequential(nn.Linear(4, 4), Forgetful()), param_init_fn=lambda _: None)
    assert not any(value.any() for value in [*loaded.all_buffers[0].param_data.split(8), *loaded.buffers()])
    loaded.load_state_dict(given.state_dict(), assign=True)
    _assert_same(loaded, given)
    partly = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4, device="meta"))
    weight = partly[0].weight.detach().clone()
    wrapped = _wrap(partly)
    assert torch.equal(wrapped.get_parameter("module.0.weight").full_tensor(), weight)  # type: ignore[operator]
    return texts


def test_what_has_no_values_is_refused_by_name_and_param_init_fn_gives_them() -> None:
    for texts in run_on_ranks(_refused, 2):
        bare, forgetful, growing, half = texts
        assert "1.weight is on the meta device and its Bare has no reset_parameters()" in bare
        assert "1.table was on the meta device, and Forgetful.reset_parameters() has left it" in forgetful
        assert "1.weight has shape (5, 4) after it was initialized, and was built with (4, 4)" in growing
        assert "1.weight is on the meta device and 1.bias of the same Half is not" in half


def test_a_gpt_on_the_meta_device_follows_the_configuration_or_the_default_device() -> None:
    with torch.device("meta"):
        model: GPTModel = small_model(small_config(**EXPERTS, moe_grouped_gemm=True))
    assert all(param.is_meta for param in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
