"""State that belongs to a forward is used by its own backward, whatever the order of forwards and backwards.

Each loop below computes the gradients of some forwards; the right value is the sum of their gradients when each forward
is followed directly by its backward, without recompute.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import CheckpointFunction, checkpoint, is_recomputing, remembered
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from tests.pairwise import pairwise
from tests.unit_tests.core.models.small_models import VOCAB, small_config, small_model

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_grouped_gemm": True,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "params_dtype": torch.float64,
}
KINDS: dict[str, dict[str, Any]] = {
    "global loss": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0},
    "all losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.5, 0.5, 1.0],
        "moe_z_loss_coeff": 0.1,
    },
    "global loss, sigmoid, bias": {
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 1.0,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "replay": {"moe_enable_routing_replay": True},
    "replay, capacity": {
        "moe_enable_routing_replay": True,
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    },
    "further tokens": {
        "mtp_num_layers": 1,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 1.0,
    },
    "dropout": {
        "hidden_dropout": 0.2,
        "attention_dropout": 0.2,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 1.0,
    },
    "jitter": {"moe_input_jitter_eps": 0.1, "moe_aux_loss_coeff": 0.5},
    "adapters": {"lora_rank": 4, "moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0},
    "padding": {
        "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.5, 1.0],
    },
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "pairs": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]},
    "parts": {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"]},
}
# The forwards of a step, F and its number, and the backwards, B. N is a forward under no_grad, D one that is dropped.
ORDERS = {
    "pairs": "F0 B0 F1 B1",
    "both forwards first": "F0 F1 B0 B1",
    "reversed": "F0 F1 B1 B0",
    "no_grad between": "F0 N2 F1 B1 N2 B0",
    "one dropped": "F0 D1 F1 B0 B1",
    "last dropped": "F0 F1 D0 B1 B0",
    "three, mixed": "F0 F1 B0 F2 B2 B1",
}


def build(fields: dict[str, Any]) -> GPTModel:
    model = small_model(small_config(**EXPERTS, **fields), share_embeddings_and_output_weights=False)
    if fields.get("moe_router_enable_expert_bias"):
        for layer in model.decoder.layers:
            layer.mlp.router.expert_bias.copy_(torch.tensor([0.1, -0.1, 0.05, 0.0]))
    return model


def batch(number: int, kind: str) -> dict[str, Any]:
    """A batch of its own length for each forward."""
    length = (12, 5, 9)[number]
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCAB, (2, length + 1), generator=generator)
    given = {
        "input_ids": tokens[:, :-1],
        "position_ids": torch.arange(length).repeat(2, 1),
        "attention_mask": None,
        "labels": tokens[:, 1:],
    }
    if kind == "padding":
        lengths = torch.tensor([length, number])  # the second sequence of the first batch is padding alone
        given["padding_mask"] = torch.arange(length) >= lengths.unsqueeze(1)
    return given


def forward(model: GPTModel, number: int, kind: str, *, chosen: dict[int, list[torch.Tensor]]) -> torch.Tensor:
    torch.manual_seed(number)
    for layer, indices in zip(model.decoder.layers, chosen.get(number, ())):
        layer.mlp.router.router_replay.set_target_indices(indices)
        layer.mlp.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    loss: torch.Tensor = model(**batch(number, kind)).mean()
    return loss


def choices(kind: str) -> dict[int, list[torch.Tensor]]:
    """Experts that no router of the model would choose, for each batch and layer."""
    if "replay" not in kind:
        return {}
    generator = torch.Generator().manual_seed(3)
    return {
        number: [torch.rand(2 * (12, 5, 9)[number], 4, generator=generator).topk(2).indices for _ in range(2)]
        for number in range(3)
    }


def gradients(model: GPTModel, order: str, kind: str) -> dict[str, torch.Tensor]:
    chosen, losses = choices(kind), {}
    for event in order.split():
        name, number = event[0], int(event[1])
        if name == "F":
            losses[number] = forward(model, number, kind, chosen=chosen)
        elif name == "N":
            with torch.no_grad():
                forward(model, number, kind, chosen=chosen)
        elif name == "D":
            forward(model, number, kind, chosen=chosen)
        else:
            for layer in model.decoder.layers if chosen else ():
                layer.mlp.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            losses.pop(number).backward()
    model.finalize_step(None)
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


CASES = pairwise(kind=[*KINDS], recompute=[*RECOMPUTE], order=[*ORDERS])


@pytest.mark.parametrize(("kind", "recompute", "order"), [tuple(case.values()) for case in CASES])
def test_a_recomputed_forward_repeats_itself_in_any_order(kind: str, recompute: str, order: str) -> None:
    """The counts of the global loss depend on the forwards before, so both models run the same forwards."""
    expected = gradients(build(KINDS[kind]), ORDERS[order], kind)
    found = gradients(build({**KINDS[kind], **RECOMPUTE[recompute]}), ORDERS[order], kind)
    assert expected.keys() == found.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize(
    ("kind", "order"), [("replay", "reversed"), ("jitter", "one dropped"), ("dropout", "no_grad between")]
)
def test_gradients_of_forwards_without_counts_are_those_of_each_alone(kind: str, order: str) -> None:
    fields = {**KINDS[kind], "moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"}
    events = ORDERS[order].split()
    alone = [f"F{event[1]} B{event[1]}" for event in events if event[0] == "B"]
    expected = gradients(build(fields), " ".join(alone), kind)
    found = gradients(build({**fields, **RECOMPUTE["layers"]}), ORDERS[order], kind)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-11, atol=1e-13, msg=name)


def test_losses_and_loads_are_recorded_once_a_forward() -> None:
    records = []
    for recompute in ({}, *RECOMPUTE.values()):
        model = build({**KINDS["all losses"], "mtp_num_layers": 1, **recompute})
        for number in range(2):
            model(**batch(number, "")).mean().backward()
        loads = model.aux_losses.tokens_per_expert.clone()
        records.append((loads, model.aux_losses.take_totals()))
    for loads, totals in records[1:]:
        assert torch.equal(loads, records[0][0])
        assert all(torch.equal(total, records[0][1][name]) for name, total in totals.items())


def test_layers_in_checkpoints_of_torch_record_once_and_refuse_state_that_these_lack() -> None:
    loads = []
    for wrap in (lambda function, *args: function(*args), torch_checkpoint):
        model = build(KINDS["jitter"])
        layer = model.decoder.layers[0].mlp
        hidden = torch.randn(6, 2, 32, dtype=torch.float64, requires_grad=True)
        wrap(lambda x, layer=layer: layer(x)[0], hidden).sum().backward()
        loads.append(model.aux_losses.tokens_per_expert.sum())
    assert loads[0] == loads[1] == 24
    for kind in ("global loss", "replay"):
        layer = build(KINDS[kind]).decoder.layers[0].mlp
        output = torch_checkpoint(lambda x, layer=layer: layer(x)[0], hidden)
        with pytest.raises(RuntimeError, match="recomputed by torch.utils.checkpoint, which does not store that state"):
            output.sum().backward()


def torch_checkpoint(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    output: torch.Tensor = torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
    return output


@pytest.mark.parametrize("kind", ["global loss", "all losses", "replay"])
def test_reentrant_checkpoints_record_once_and_repeat_themselves(kind: str) -> None:
    """Their first run has no gradients, so the counts of the global loss are those of the order of backwards."""
    found = []
    for reentrant in (False, True):
        model, chosen = build(KINDS[kind]), choices(kind)
        layers = [layer.mlp for layer in model.decoder.layers]
        for number in range(2):
            hidden = torch.randn(6, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
            hidden.requires_grad_()
            for layer in layers:
                if chosen:
                    layer.router.router_replay.set_target_indices(chosen[0][number][:12])
                    layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
                run = CheckpointFunction.apply if reentrant else lambda function, _, x: function(x)
                run(lambda x, layer=layer: layer(x)[0], False, hidden).square().sum().backward()
        loads = model.aux_losses.tokens_per_expert.clone()
        found.append((loads, model.aux_losses.take_totals(), [layer.router.weight.grad for layer in layers]))
    (loads, totals, grads), (again, other, repeated) = found
    assert torch.equal(loads, again) and loads.sum() == 2 * 2 * 24
    for name, total in totals.items():
        torch.testing.assert_close(other[name], total, msg=name)
    torch.testing.assert_close(repeated, grads)


def test_threads_recompute_their_own_forwards() -> None:
    """Two models train in two threads with values of their forwards."""
    found: dict[int, dict[str, torch.Tensor]] = {}

    def train(seed: int) -> None:
        model = small_model(
            small_config(**{**EXPERTS, **KINDS["global loss"], **RECOMPUTE["layers"], "init_seed": seed}),
            share_embeddings_and_output_weights=False,
        )
        for number in range(3):
            model(**batch(number, "")).mean().backward()
        found[seed] = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}

    for seed in (1, 2):
        train(seed)
    alone = dict(found)
    threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        for name, grad in alone[seed].items():
            torch.testing.assert_close(found[seed][name], grad, rtol=1e-12, atol=1e-14, msg=name)


# --- Values of a forward ---


class Counter:
    """A value that changes with each call."""

    def __init__(self) -> None:
        self.count, self.again = 0, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.again += is_recomputing()
        return (x * remembered(self._next, key=self)).tanh() * remembered(self._next, key=self)

    def _next(self) -> int:
        self.count += 1
        return self.count


def nested(function: Counter, run: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: function(run(function, x)).sin()


RUNS: dict[str, Callable[..., torch.Tensor]] = {
    "checkpoint": lambda function, x: checkpoint(function, False, x),
    "reentrant": lambda function, x: CheckpointFunction.apply(function, False, x),
}


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", RUNS)
def test_values_of_a_forward_are_repeated_and_freed_with_it(kind: str, is_nested: bool) -> None:
    run, found = RUNS[kind], []
    for through in (lambda function, x: function(x), run):
        function, inputs, outputs = Counter(), [], []
        for value in (0.1, 0.2, 0.3):
            inputs.append(torch.tensor(value, dtype=torch.float64, requires_grad=True))
            inside = nested(function, run if through is run else through) if is_nested else function
            outputs.append(through(inside, inputs[-1]))
        outputs.pop(1)
        for output in reversed(outputs):
            output.backward()
        assert function.count == 6 * (1 + is_nested)
        # The later run of a reentrant checkpoint records what its first run, without gradients, has not.
        assert (function.again > 0) == (through is run and kind == "checkpoint")
        found.append([x.grad for x in inputs])
    torch.testing.assert_close(found[1], found[0])
