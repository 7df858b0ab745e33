"""Steps of a layer, a router and a dispatcher, called one by one as in Megatron plug-ins."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from megatron.core.transformer.moe.permutation import Routing
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)
from megatron.core.transformer.spec_utils import build_module
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config
from tests.unit_tests.core.transformer.moe import naive_router as naive
from tests.unit_tests.core.transformer.moe.small_experts import EXPERTS, moe_layer

S, B, H = 5, 2, 32
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
KINDS: dict[str, dict[str, Any]] = {
    "allgather": {},
    "alltoall": ALLTOALL,
    "capacity": {"moe_expert_capacity_factor": 0.7, **ALLTOALL},
    "padded": {"moe_expert_capacity_factor": 0.7, "moe_pad_expert_input_to_capacity": True, **ALLTOALL},
    "static": {"moe_expert_rank_capacity_factor": 4.0},
    "shared": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "overlap": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True, **ALLTOALL},
}


def hidden_states() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1)).requires_grad_()


def run_steps(layer: MoELayer, hidden: Tensor, *, with_tables: bool) -> Tensor:
    routed = layer.route(hidden)
    if with_tables:
        probs, routing_map = routed
        assert probs.shape == routing_map.shape == (S * B, EXPERTS) and routing_map.dtype is torch.bool
        assert (probs[~routing_map] == 0).all()
    else:
        probs, routing_map = routed.weights, routed.indices
    rows, probs = layer.preprocess(hidden, probs, routing_map)
    rows, probs = layer.dispatch(rows, probs)
    shared = layer.shared_experts_compute(hidden)
    output, bias = layer.routed_experts_compute(rows, probs)
    assert bias is None
    return layer.postprocess(layer.combine(output), shared)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_tables", [False, True])
def test_the_steps_of_a_layer_are_its_forward(kind: str, with_tables: bool) -> None:
    layer = moe_layer(grouped=True, moe_aux_loss_coeff=0.1, **KINDS[kind])
    found = []
    for is_by_steps in (False, True):
        if layer.expert_step is not None:
            layer.expert_step.begin()
        hidden = hidden_states()
        layer.zero_grad()
        output = run_steps(layer, hidden, with_tables=with_tables) if is_by_steps else layer(hidden)[0]
        assert output.shape == hidden.shape
        output.square().sum().backward()
        found.append([output, hidden.grad, *(param.grad.clone() for param in layer.parameters())])
    for one, other in zip(*found, strict=True):
        # Tables order a token's experts by index, so its rows are summed in a different order.
        torch.testing.assert_close(one, other)
    # The dispatcher of a copied layer runs the copy's shared expert.
    assert torch.equal(copy.deepcopy(layer)(hidden_states())[0], layer(hidden_states())[0])


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_a_dispatcher_takes_tables_with_any_number_of_experts_of_a_token(kind: str) -> None:
    config = small_config(
        num_moe_experts=EXPERTS, moe_router_topk=2, moe_grouped_gemm=True, **LLAMA_LIKE, **KINDS[kind]
    )
    build = {"allgather": MoEAllGatherTokenDispatcher, "alltoall": MoEAlltoAllTokenDispatcher}[kind]
    dispatcher = build(EXPERTS, list(range(EXPERTS)), config, ProcessGroupCollection())
    routing_map = torch.rand(S * B, EXPERTS, generator=torch.Generator().manual_seed(2)) > 0.6
    routing_map[0], routing_map[1] = False, True
    probs = torch.rand(S * B, EXPERTS).masked_fill(~routing_map, 0).requires_grad_()
    hidden = hidden_states()
    if kind == "alltoall":
        assert torch.equal(dispatcher.preprocess(routing_map), routing_map.sum(0))
    ready = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    rows, counts, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*ready))
    assert torch.equal(counts, routing_map.sum(0))
    flat = hidden.view(-1, H)
    chosen = [(expert, token) for expert in range(EXPERTS) for token in range(S * B) if routing_map[token, expert]]
    assert torch.equal(rows, flat[[token for _, token in chosen]])
    assert torch.equal(weights, torch.stack([probs[token, expert] for expert, token in chosen]))
    back = dispatcher.combine_preprocess(rows * weights.unsqueeze(1))
    output = dispatcher.combine_postprocess(dispatcher.token_combine(back))
    torch.testing.assert_close(output, (flat * probs.sum(1, keepdim=True)).view(S, B, H))
    output.backward(hidden.detach())
    torch.testing.assert_close(probs.grad, flat.square().sum(1, keepdim=True) * routing_map)


def test_tables_of_the_wrong_kind_are_refused() -> None:
    layer = moe_layer(grouped=True, **ALLTOALL)
    probs, routing_map = layer.route(hidden_states())
    for wrong, message in (
        (routing_map.int(), r"routing_map has shape \[10, 4\] and dtype torch.int32: must be bool \[T, 4\], or int64"),
        (routing_map[:, :2], r"probs has shape \[10, 4\] and routing_map \[10, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.preprocess(hidden_states(), probs, wrong)
    rows = layer.dispatch(*layer.preprocess(hidden_states(), probs, routing_map))[0]
    with pytest.raises(ValueError, match="token_combine: async_finish is False"):
        layer.token_dispatcher.token_combine(rows, async_finish=False)
    with pytest.raises(ValueError, match="shared_experts is 3: must be a module or function"):
        layer.token_dispatcher.set_shared_experts(3)
    with pytest.raises(ValueError, match="intermediate_tensors is .*never resumes"):
        layer(hidden_states(), intermediate_tensors=(1,))


def test_a_dispatcher_runs_a_shared_expert_while_rows_are_sent() -> None:
    layer = moe_layer(grouped=True, **ALLTOALL)
    plain, hidden = layer(hidden_states())[0], hidden_states()
    shared = nn.Linear(H, H)
    layer.token_dispatcher.set_shared_experts(lambda tokens: (F.linear(tokens, shared.weight), shared.bias))
    torch.testing.assert_close(layer(hidden)[0], plain + shared(hidden))


class ExpertChoiceRouter(nn.Module):
    """A plug-in's router that returns tables and whose experts choose tokens."""

    def __init__(self, config: Any, pg_collection: Any = None, is_mtp_layer: bool = False) -> None:
        super().__init__()
        self.weight, self.layer_number = nn.Parameter(torch.randn(config.num_moe_experts, config.hidden_size)), 0

    def set_layer_number(self, layer_number: int) -> None:
        self.layer_number = layer_number

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """input: [S, B, H], fp32."""
        scores = F.linear(input.reshape(-1, input.shape[-1]), self.weight).softmax(-1)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(0, scores.topk(3, dim=0).indices, True)
        return scores * chosen, chosen


@pytest.mark.parametrize("kind", ["allgather", "alltoall", "static"])
def test_a_router_of_a_plug_in_returns_tables(kind: str) -> None:
    torch.manual_seed(0)
    config = small_config(num_moe_experts=EXPERTS, moe_grouped_gemm=True, **LLAMA_LIKE, **KINDS[kind])
    submodules = MoESubmodules(experts=TEGroupedMLP, router=ExpertChoiceRouter)
    layer = MoELayer(config, submodules, 3, ProcessGroupCollection(), False, "experts")
    assert layer.router.layer_number == 3 and isinstance(layer, BaseMoELayer)
    layer.set_layer_number(4)
    assert layer.router.layer_number == layer.layer_number == 4
    if layer.expert_step is not None:
        layer.expert_step.begin()
    hidden = hidden_states()
    output, _ = layer(hidden)
    probs, chosen = layer.router(hidden)
    assert chosen.sum(0).tolist() == [3] * EXPERTS and chosen.sum(1).unique().numel() > 1
    every = MoELayer(
        small_config(num_moe_experts=EXPERTS, moe_router_topk=EXPERTS, moe_grouped_gemm=True, **LLAMA_LIKE), submodules
    )
    every.experts.load_state_dict(copy.deepcopy(layer.experts.state_dict()))
    everyone = torch.arange(EXPERTS).expand(S * B, EXPERTS)
    rows = every.dispatch(*every.preprocess(hidden, probs, everyone))
    expected = every.postprocess(every.combine(every.routed_experts_compute(*rows)[0]), None)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert layer.router.weight.grad.abs().sum() > 0


class TableRouter(TopKRouter):
    """A router subclass that drops tokens itself and returns tables."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        probs, routing_map = super().routing(logits, padding_mask)
        return apply_router_token_dropping(probs, routing_map, self.topk, 0.7)


def test_a_subclass_of_the_router_may_drop_tokens_itself() -> None:
    expected = moe_layer(grouped=True, moe_expert_capacity_factor=0.7, **ALLTOALL)
    layer = moe_layer(grouped=True, **ALLTOALL)
    layer.router = TableRouter(layer.config)
    layer.load_state_dict(expected.state_dict())
    torch.testing.assert_close(layer(hidden_states())[0], expected(hidden_states())[0])


def test_submodules_that_cannot_be_used_are_named() -> None:
    config = small_config(num_moe_experts=EXPERTS, moe_grouped_gemm=True, **LLAMA_LIKE)
    with pytest.raises(ValueError, match="submodules has no experts: pass MoESubmodules"):
        MoELayer(config)
    assert TEGroupedMLP is GroupedMLP
    with pytest.raises(ValueError, match="linear_fc2 of GroupedMLP must be ExpertAdapter or None; use SequentialMLP"):
        TEGroupedMLP(EXPERTS, config, MLPSubmodules(linear_fc1=nn.Linear, linear_fc2=nn.Linear))
    experts = TEGroupedMLP(EXPERTS, config, None, ProcessGroupCollection(), "experts")
    rows = torch.randn(4, H), torch.ones(EXPERTS, dtype=torch.int64), torch.ones(4)
    with pytest.raises(ValueError, match="output_buffer is tensor"):
        experts(*rows, torch.empty(4, H))
    with pytest.raises(ValueError, match="factor is None: must be set for dispatchers of type flex"):
        MoEFlexTokenDispatcher(EXPERTS, list(range(EXPERTS)), config)
    static = small_config(
        num_moe_experts=EXPERTS, moe_grouped_gemm=True, moe_expert_rank_capacity_factor=2.0, **LLAMA_LIKE
    )
    with pytest.raises(ValueError, match="flex_dispatcher_backend deepep, which requires a CUDA device"):
        MoEFlexTokenDispatcher(EXPERTS, list(range(EXPERTS)), static)


# --- Padding ---

LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.5, 0.7],
    "moe_z_loss_coeff": 0.2,
}


@pytest.mark.parametrize("lengths", [[5, 3], [5, 0], [1, 4], [0, 0], None])
def test_losses_and_loads_leave_padding_out(lengths: list[int] | None) -> None:
    """A sequence of padding alone has no loss, and the mean over sequences does not count it. None: without a mask."""
    config = small_config(num_moe_experts=EXPERTS, **LLAMA_LIKE, **LOSSES, params_dtype=torch.float64)
    router = TopKRouter(config, None, True)
    assert router.is_aux_loss_enabled()
    logits = torch.randn(
        S, B, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    ).requires_grad_()
    mask = torch.arange(S).unsqueeze(1) >= torch.tensor(lengths or [S] * B)
    routing = router.routing(logits, None if lengths is None else mask)
    assert torch.equal(routing.indices, router.eval().routing(logits).indices), "padding is routed as well"
    router.train()
    parts = [logits[:length, b] for b, length in enumerate(lengths or [S] * B) if length]
    zero = logits.sum() * 0
    valid = torch.cat(parts) if parts else logits[:0, 0]
    probs, counts = naive.shares(valid, config)
    whole = naive.balancing_loss(probs, counts, config) if parts else zero
    of_sequences = [naive.balancing_loss(*naive.shares(one, config), config) for one in parts]
    expected = {
        "load_balancing_loss": whole,
        "seq_load_balancing_loss": sum(of_sequences) / len(parts) if parts else zero,
        "global_load_balancing_loss": whole,
        "z_loss": valid.logsumexp(1).square().mean() if parts else zero,
    }
    tokens = router.aux_losses.layer_totals().tokens_per_expert[0]
    assert tokens.tolist() == list(counts)
    for name, (total, _) in router.aux_losses.take_totals().items():
        if name in expected:
            assert total.item() == pytest.approx(expected[name].item(), rel=1e-6), name
    total = sum(c * expected[n] for c, n in zip((0.3, 0.5, 0.7, 0.2), expected, strict=True))
    (routing.weights * 0).sum().backward()
    torch.testing.assert_close(logits.grad, torch.autograd.grad(total, logits)[0])
    with pytest.raises(ValueError, match=r"padding_mask has shape \[3\] and dtype torch.bool: must be bool, with one"):
        router.routing(logits, mask[:3, 0])


COEFFICIENTS = {
    "load_balancing_loss": 0.3,
    "seq_load_balancing_loss": 0.5,
    "global_load_balancing_loss": 0.7,
    "z_loss": 0.2,
}
PER_TOKEN = {"calculate_per_token_loss": True}
SIGMOID = {"moe_router_score_function": "sigmoid"}
# Numbers of tokens of each sequence, of S positions, by micro-batch; and fields of the configuration.
UNEVEN: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "24 to 3": ([[5, 5], [1, 2]], {}),
    "3 to 24": ([[2, 1], [5, 5]], {}),
    "four micro-batches": ([[5, 1], [2, 2], [1, 5], [3, 4]], SIGMOID),
    "one token each": ([[1, 1], [1, 1], [1, 1]], {"moe_router_pre_softmax": True}),
    "an empty sequence": ([[5, 0], [0, 3]], {}),
    "an empty micro-batch first": ([[0, 0], [4, 1]], SIGMOID),
    "an empty micro-batch between": ([[3, 5], [0, 0], [5, 2]], {}),
    "per token": ([[5, 5], [1, 2]], PER_TOKEN),
    "per token, empty parts": ([[0, 4], [0, 0], [1, 0]], {**PER_TOKEN, **SIGMOID}),
    "bias": ([[2, 5], [4, 0]], {**SIGMOID, "moe_router_enable_expert_bias": True}),
    "sqrtsoftplus, per token": ([[1, 0], [5, 4]], {**PER_TOKEN, "moe_router_score_function": "sqrtsoftplus"}),
    "one expert": ([[4, 3], [1, 0]], {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
    "three experts": ([[5, 2], [0, 1]], {"moe_router_topk": 3}),
}


def naive_losses(sequences: list[Tensor], totals: list[int], config: Any) -> dict[str, Tensor]:
    """Returns the losses of a micro-batch in plain formulas, and adds its counts to `totals`.

    sequences: the logits of the real tokens of each sequence with any, [T, E], fp64.
    """
    if not sequences:
        return dict.fromkeys(COEFFICIENTS, torch.zeros((), dtype=torch.float64))
    probs, counts = naive.shares(torch.cat(sequences), config)
    totals[:] = [one + other for one, other in zip(totals, counts, strict=True)]
    of_sequences = [naive.balancing_loss(*naive.shares(one, config), config) for one in sequences]
    losses = (
        naive.balancing_loss(probs, counts, config),
        sum(of_sequences) / len(sequences),
        naive.balancing_loss(probs, totals, config),
        torch.cat(sequences).logsumexp(1).square().mean(),
    )
    return dict(zip(COEFFICIENTS, losses, strict=True))


@pytest.mark.parametrize("name", UNEVEN)
def test_losses_of_unequal_micro_batches_are_ratios_of_sums(name: str) -> None:
    """Micro-batches of padding alone add zero to the recorded sums and are counted."""
    microbatches, fields = UNEVEN[name]
    config = small_config(
        **{"num_moe_experts": EXPERTS, **LLAMA_LIKE, **LOSSES, "params_dtype": torch.float64, **fields}
    )
    router, outputs, expected = TopKRouter(config), [], []
    totals, sums, rows = [0] * EXPERTS, dict.fromkeys(COEFFICIENTS, 0.0), []
    for number, lengths in enumerate(microbatches):
        generator = torch.Generator().manual_seed(number)
        logits = torch.randn(S, B, EXPERTS, dtype=torch.float64, generator=generator).requires_grad_()
        mask = torch.arange(S).unsqueeze(1) >= torch.tensor(lengths)
        rows.append(logits)
        outputs.append(router.routing(logits, mask).weights)
        losses = naive_losses([logits[:n, b] for b, n in enumerate(lengths) if n], totals, config)
        sums = {loss: value + losses[loss].item() for loss, value in sums.items()}
        # With per-token loss the main loss is a sum over tokens, and so are the terms of routers.
        factor = sum(lengths) if config.calculate_per_token_loss else 1
        total = factor * sum(COEFFICIENTS[loss] * value for loss, value in losses.items()) + logits.sum() * 0
        expected.append(torch.autograd.grad(total, logits)[0])
    for weights in reversed(outputs):
        (weights * 0).sum().backward()
    for logits, grad in zip(rows, expected, strict=True):
        torch.testing.assert_close(logits.grad, grad, rtol=1e-12, atol=1e-14)
    recorded = router.aux_losses.take_totals()
    for loss, value in sums.items():
        assert recorded[loss].tolist() == [pytest.approx(value, rel=1e-6), len(microbatches)], loss
    assert router.aux_losses.tokens_per_expert[0].tolist() == totals


def test_a_layer_gives_its_mask_to_the_router() -> None:
    layer = moe_layer(grouped=True, moe_aux_loss_coeff=0.1)
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[:, 3:] = True
    plain = layer(hidden_states())[0]
    layer.router.aux_losses.finalize_step(None)
    assert torch.equal(layer(hidden_states(), padding_mask=mask)[0], plain)
    assert layer.router.aux_losses.tokens_per_expert.sum() == 3 * B * layer.config.moe_router_topk
    with pytest.raises(ValueError, match=rf"padding_mask has shape \[{S}, {B}\]: .* \[{B}, {S}\]"):
        layer(hidden_states(), padding_mask=mask.t())


# --- Public methods of routers ---


def test_methods_of_a_router_do_their_parts_of_the_routing() -> None:
    config = small_config(
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="sinkhorn",
        moe_z_loss_coeff=0.5,
        **{**LLAMA_LIKE, "params_dtype": torch.float64},
    )
    router = TopKRouter(config)
    logits = torch.randn(S * B, EXPERTS, dtype=torch.float64, requires_grad=True)
    routing = router.routing(logits)
    assert isinstance(routing, Routing) and len(routing) == 2 and torch.equal(routing[1], routing[:][1])
    assert not router.is_aux_loss_enabled() and router.apply_input_jitter(logits) is logits
    (routing.weights * 0).sum().backward()
    (wanted,) = torch.autograd.grad(0.5 * logits.logsumexp(1).square().mean(), logits)
    torch.testing.assert_close(logits.grad, wanted)
    before = router.weight.detach().clone()
    router.reset_parameters()
    assert not torch.equal(before, router.weight) and router.weight.detach().std().item() == pytest.approx(
        before.std().item(), rel=0.5
    )


def test_a_spec_of_megatrons_shape_builds_a_layer() -> None:
    spec = get_mlp_module_spec(EXPERTS, True)
    config = small_config(num_moe_experts=EXPERTS, moe_grouped_gemm=True, **LLAMA_LIKE)
    layer = build_module(spec, config=config, layer_number=2, pg_collection=ProcessGroupCollection(), name="mlp")
    assert layer.name == "mlp" and layer.layer_number == layer.router.layer_number == 2
