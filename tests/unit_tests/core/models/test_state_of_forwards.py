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
from megatron.core.tensor_parallel.random import (
    CheckpointFunction,
    CheckpointWithoutOutput,
    checkpoint,
    is_recomputing,
    remembered,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from tests.pairwise import pairwise
from tests.unit_tests.core.models.small_models import VOCAB, small_config, small_model
from tests.unit_tests.core.transformer.moe import naive_router as naive
from tests.unit_tests.core.transformer.moe.paged_stash.expert_models import is_empty_sync, make_stash

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
    "parts": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "offloaded layers": {"cpu_offloading_num_layers": 1, "min_offloaded_tensor_size": 1},
    "offloaded parts": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn", "expert_fc1", "moe_act", "attn_norm"],
        "min_offloaded_tensor_size": 1,
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm"],
    },
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


STATIC = {"moe_expert_rank_capacity_factor": 4.0}


def steps_with_static_buffers(model: GPTModel, order: str, *, has_stash: bool) -> list[Any]:
    """Returns the gradients, and the layers and rows that the expert layers recorded, of two steps."""
    found: list[Any] = []
    steps = [layer.mlp.expert_step for layer in model.decoder.layers]
    stash = make_stash(4000) if has_stash else None
    for _ in range(2):
        model.zero_grad()
        for step in steps:
            step.begin()
            step.stash = stash
        found.append({name: grad.clone() for name, grad in gradients(model, order, "all losses").items()})
        found.append([(step.passes, step.rows[: len(step.passes)].tolist()) for step in steps])
        if stash is not None:
            assert not stash.is_void_sync()
            stash.reset()
            assert is_empty_sync(stash)
    return found


OF_BUFFERS = {"none": {}, **{name: RECOMPUTE[name] for name in ("layers", "experts", "parts")}}
BUFFER_CASES = pairwise(recompute=[*OF_BUFFERS], order=[*ORDERS], has_stash=[False, True])


@pytest.mark.parametrize(("recompute", "order", "has_stash"), [tuple(case.values()) for case in BUFFER_CASES])
def test_rows_and_pages_belong_to_their_forward(recompute: str, order: str, has_stash: bool) -> None:
    """The second step of a stash follows the order that it has learned in the first."""
    fields = {**KINDS["all losses"], **STATIC}
    plain = steps_with_static_buffers(build(fields), ORDERS[order], has_stash=False)
    model = build({**fields, **OF_BUFFERS[recompute]})
    found = steps_with_static_buffers(model, ORDERS[order], has_stash=has_stash)
    for number, (grads, records) in enumerate(zip(found[::2], found[1::2], strict=True)):
        assert records == plain[2 * number + 1] and len(records[0][0]) == sum(
            e[0] in "FD" for e in ORDERS[order].split()
        )
        for name, grad in plain[2 * number].items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-12, atol=1e-14, msg=name)


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


# --- Routers alone, in plain PyTorch ---

LENGTH, EXPERT_COUNT, COEFFICIENTS = 4, 4, (0.3, 0.5, 0.7, 0.2)
LOSS_NAMES = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss")
ALL_LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": list(COEFFICIENTS[:3]),
    "moe_z_loss_coeff": COEFFICIENTS[3],
}
SIGMOID = {"moe_router_score_function": "sigmoid"}
REPLAY = {"moe_enable_routing_replay": True}
# Name: how the router runs, the order as in ORDERS, and fields of its configuration.
ROUTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "softmax, reversed": ("checkpoint", "F0 F1 B1 B0", {}),
    "biased, three mixed": ("checkpoint", "F0 F1 F2 B1 B0 B2", {**SIGMOID, "moe_router_enable_expert_bias": True}),
    "pre-softmax, one dropped": ("nested", "F0 D1 F2 B0 B2", {"moe_router_pre_softmax": True}),
    "sqrtsoftplus, no_grad between": (
        "checkpoint",
        "F0 N1 F2 N1 B0 B2",
        {"moe_router_score_function": "sqrtsoftplus"},
    ),
    "groups": ("checkpoint", "F0 F1 B0 B1", {**SIGMOID, "moe_router_num_groups": 2, "moe_router_group_topk": 1}),
    "scaled, last dropped": ("nested", "F0 F1 D2 B1 B0", {**SIGMOID, "moe_router_topk_scaling_factor": 2.5}),
    "one expert, two dropped": (
        "checkpoint",
        "F0 D1 D2 B0",
        {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    ),
    "two backwards of one": ("checkpoint", "F0 F1 B0 B0 B1", {}),
    "output freed, reversed": ("without output", "F0 F1 F2 B2 B1 B0", SIGMOID),
    "replay, reversed": ("checkpoint", "F0 F1 B1 B0", REPLAY),
    "replay, dropped and no_grad": ("nested", "F0 D1 N2 F2 N0 B0 B2", {**REPLAY, "moe_router_pre_softmax": True}),
    "replay, output freed": ("without output", "F0 F1 D2 B0 B1", REPLAY),
    "reentrant": ("reentrant", "F0 D2 F1 B0 B1", SIGMOID),
    "reentrant, reversed": ("reentrant", "F0 F1 N2 B1 B0", {}),
    "reentrant replay": ("reentrant", "F0 F1 B1 B0", REPLAY),
}


def routed(run: str, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if run == "checkpoint":
        return checkpoint(function, False, x)  # type: ignore[no-any-return]
    if run == "nested":
        return checkpoint(lambda y: checkpoint(function, False, y * 1) * 1, False, x)  # type: ignore[no-any-return]
    if run == "reentrant":
        return CheckpointFunction.apply(function, False, x)
    part = CheckpointWithoutOutput()
    inner = part.checkpoint(function, x)
    output: torch.Tensor = inner.sin()  # saves the output for its backward
    part.discard_output_and_register_recompute(output)
    return output


def plain_routing(
    logits: torch.Tensor, config: Any, bias: torch.Tensor | None, targets: torch.Tensor | None
) -> tuple[torch.Tensor, list[list[int]]]:
    """Returns a weighted sum of the routing weights, and the experts of each token.

    logits: [S, B, E], fp64. targets: [S, B, K], the experts to use; None without a replay.
    """
    total, chosen = logits.sum() * 0, []
    for token, row in enumerate(logits.flatten(0, 1)):
        weights, experts = naive.route_token(row, config, bias)
        if targets is not None:
            experts = targets.flatten(0, 1)[token].tolist()
            weights = [*(row.softmax(0)[experts] if config.moe_router_pre_softmax else row[experts].softmax(0))]
        total = total + sum(weight * (expert + 1) for weight, expert in zip(weights, experts, strict=True))
        chosen.append(experts)
    return total, chosen


def plain_losses(
    logits: torch.Tensor, padding: torch.Tensor, config: Any, targets: torch.Tensor | None, totals: list[int]
) -> list[torch.Tensor]:
    """Returns the losses in the order of LOSS_NAMES, and adds the counts of the losses to `totals`.

    padding: [S, B], which leaves tokens of all sequences. The other arguments are as in plain_routing.
    """

    def shares(sequences: list[int]) -> tuple[list[torch.Tensor], list[int]]:
        probs, counts = naive.shares(torch.cat([logits[~padding[:, b], b] for b in sequences]), config)
        if targets is not None:
            used = torch.cat([targets[~padding[:, b], b] for b in sequences])
            counts = used.flatten().bincount(minlength=EXPERT_COUNT).tolist()
        return probs, counts

    everything = [*range(logits.shape[1])]
    probs, own = shares(everything)
    totals[:] = [one + other for one, other in zip(totals, own, strict=True)]
    return [
        naive.balancing_loss(probs, own, config),
        sum(naive.balancing_loss(*shares([b]), config) for b in everything) / len(everything),
        naive.balancing_loss(probs, totals, config),
        logits[~padding].logsumexp(1).square().mean(),
    ]


@pytest.mark.parametrize("name", ROUTED)
def test_a_router_gives_the_gradients_of_plain_pytorch_in_any_order(name: str) -> None:
    run, order, fields = ROUTED[name]
    config = small_config(**{**EXPERTS, **ALL_LOSSES, **fields})
    router, replays = TopKRouter(config), config.moe_enable_routing_replay
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.tensor([0.1, -0.1, 0.05, 0.0]))
    generator = torch.Generator().manual_seed(11)
    hidden = [torch.randn(LENGTH + n, 2, 32, dtype=torch.float64, generator=generator) for n in range(3)]
    lengths = [torch.tensor(one) for one in ([4, 2], [1, 5], [3, 6])]
    padding = [torch.arange(len(x)).unsqueeze(1) >= one for x, one in zip(hidden, lengths, strict=True)]
    chosen = [torch.rand(len(x), 2, EXPERT_COUNT, generator=generator).topk(2).indices for x in hidden]
    targets = torch.empty(0, dtype=torch.int64)  # a script may use one tensor for all forwards

    def forward(number: int) -> torch.Tensor:
        if replays:
            given = chosen[number].flatten(0, 1)
            router.router_replay.set_target_indices(targets.resize_(given.shape).copy_(given))
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

        def function(tokens: torch.Tensor) -> torch.Tensor:
            routing = router(tokens, padding[number])
            return (routing.weights * (routing.indices + 1)).sum()

        return routed(run, function, hidden[number].clone().requires_grad_())

    events = [(event[0], int(event[1])) for event in order.split()]
    outputs = {}
    for kind, number in events:
        if kind == "B":
            outputs[number].backward(retain_graph=order.count(f"B{number}") > 1)
            continue
        with torch.set_grad_enabled(kind != "N"):
            output = forward(number)
        if kind == "F":
            outputs[number] = output
    # The first forward of a reentrant checkpoint has no gradients, so its backward counts.
    counted = [number for kind, number in events if kind in ("B" if run == "reentrant" else "FD")]
    totals, loads, sums, values = [0] * EXPERT_COUNT, [0] * EXPERT_COUNT, [0.0] * len(LOSS_NAMES), {}
    for number in counted:
        logits, given = hidden[number] @ router.weight.t(), chosen[number] if replays else None
        weighted, experts = plain_routing(logits, config, router.expert_bias, given)
        for of_token, is_padding in zip(experts, padding[number].flatten().tolist(), strict=True):
            for expert in () if is_padding else of_token:
                loads[expert] += 1
        losses = plain_losses(logits, padding[number], config, given, totals)
        sums = [one + loss.item() for one, loss in zip(sums, losses, strict=True)]
        values[number] = weighted.sin() if run == "without output" else weighted
        values[number] = values[number] + sum(c * loss for c, loss in zip(COEFFICIENTS, losses, strict=True))
    backwards = [values[number] for kind, number in events if kind == "B"]
    expected = sum(torch.autograd.grad(one, router.weight, retain_graph=True)[0] for one in backwards)
    torch.testing.assert_close(router.weight.grad, expected, rtol=1e-11, atol=1e-13)
    assert router.aux_losses.tokens_per_expert[0].tolist() == loads
    recorded = router.aux_losses.take_totals()
    for loss, value in zip(LOSS_NAMES, sums, strict=True):
        assert recorded[loss].tolist() == [pytest.approx(value, rel=1e-6), len(counted)], loss


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
