"""Functions with Megatron's names, each compared with plain torch computed token by token."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

TOKENS, EXPERTS, TOPK, HIDDEN = 12, 8, 2, 5


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3))


def routing(logits: Tensor) -> tuple[Tensor, Tensor]:
    return moe_utils.topk_routing_with_score_function(logits, TOPK)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_topk_routing_gives_tables_or_indices_and_takes_a_given_choice(logits: Tensor, score_function: str) -> None:
    probs, routing_map = moe_utils.topk_routing_with_score_function(logits, TOPK, score_function=score_function)
    scores = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid(), "sqrtsoftplus": F.softplus(logits).sqrt()}
    for token in range(TOKENS):
        best = scores[score_function][token].topk(TOPK).indices
        wanted = scores[score_function][token][best]
        assert set(routing_map[token].nonzero().view(-1).tolist()) == set(best.tolist())
        torch.testing.assert_close(probs[token][best], wanted / wanted.sum())
    weights, indices = moe_utils.topk_routing_with_score_function(
        logits, TOPK, score_function=score_function, dense_output=True
    )
    assert weights.shape == indices.shape == (TOKENS, TOPK)
    assert torch.equal(torch.zeros_like(probs).scatter(1, indices, weights), probs)
    given = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % EXPERTS
    probs, routing_map = moe_utils.topk_routing_with_score_function(
        logits, TOPK, score_function=score_function, precomputed_indices=given
    )
    assert torch.equal(routing_map, torch.zeros_like(routing_map).scatter(1, given, True))
    wanted = scores[score_function].gather(1, given)
    torch.testing.assert_close(probs.gather(1, given), wanted / wanted.sum(1, keepdim=True))


def test_topk_routing_refuses_what_it_cannot_do(logits: Tensor) -> None:
    with pytest.raises(ValueError, match="topk_routing_with_score_function: fused is True"):
        moe_utils.topk_routing_with_score_function(logits, TOPK, fused=True)
    with pytest.raises(ValueError, match=r"precomputed_indices has shape \[3, 2\]: must be 2 experts"):
        moe_utils.topk_routing_with_score_function(logits, TOPK, precomputed_indices=torch.zeros(3, 2))


def test_topk_routing_records_and_replays(logits: Tensor) -> None:
    replay = RouterReplay()
    replay.set_router_replay_action(RouterReplayAction.RECORD)
    _, first = moe_utils.topk_routing_with_score_function(logits, TOPK, router_replay=replay)
    replay.set_target_indices(replay.get_recorded_indices())
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    probs, again = moe_utils.topk_routing_with_score_function(-logits, TOPK, router_replay=replay)
    assert torch.equal(first, again)
    torch.testing.assert_close(probs.sum(1), torch.ones(TOKENS))


def test_group_limited_topk_chooses_within_the_best_groups(logits: Tensor) -> None:
    values, indices = moe_utils.group_limited_topk(logits, TOPK, TOKENS, EXPERTS, num_groups=4, group_topk=2)
    for token, scores in enumerate(logits):
        groups = scores.view(4, 2).max(dim=1).values.topk(2).indices.tolist()  # K // M is 1: ranked by the best expert
        allowed = [expert for expert in range(EXPERTS) if expert // 2 in groups]
        best = sorted(allowed, key=lambda expert: -scores[expert])[:TOPK]
        assert indices[token].tolist() == best and torch.equal(values[token], scores[best])
    with pytest.raises(ValueError, match=r"scores has shape \[12, 8\]: must be num_tokens \(11\) by num_experts \(8\)"):
        moe_utils.group_limited_topk(logits, TOPK, 11, EXPERTS, 4, 2)


def test_scores_for_losses_leave_padding_out(logits: Tensor) -> None:
    mask = torch.arange(TOKENS) % 3 == 0
    chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, TOPK, "sigmoid", padding_mask=mask)
    plain = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
    torch.testing.assert_close(scores, plain * ~mask.unsqueeze(1))
    assert chosen.sum(1).tolist() == [0 if is_padding else TOPK for is_padding in mask]
    counts, local, total = moe_utils.get_tokens_per_expert_and_token_count(chosen, None, TOPK, with_padding_mask=True)
    assert counts.tolist() == chosen.sum(0).tolist() and int(local) == int(total) == int((~mask).sum())
    assert moe_utils.get_tokens_per_expert_and_token_count(chosen, None)[1:] == (TOKENS, TOKENS)


def test_losses_with_a_mask_are_those_of_the_other_tokens(logits: Tensor) -> None:
    mask = torch.arange(TOKENS) % 4 == 1
    valid = logits[~mask]
    z_loss = moe_utils.z_loss_func(logits, 0.3, mask)
    torch.testing.assert_close(z_loss, valid.logsumexp(1).square().mean() * 0.3)
    counts = routing(valid)[1].sum(0)
    found = moe_utils.switch_load_balancing_loss_func(
        logits.softmax(1), counts, (~mask).sum(), TOPK, EXPERTS, 0.5, padding_mask=mask
    )
    share, mean = counts / counts.sum(), valid.softmax(1).mean(0)
    torch.testing.assert_close(found, 0.5 * EXPERTS * (share * mean).sum())
    assert moe_utils.z_loss_func(logits, 0.3, torch.ones(TOKENS, dtype=torch.bool)).item() == 0
    with pytest.raises(ValueError, match="fused is True"):
        moe_utils.switch_load_balancing_loss_func(logits.softmax(1), counts, 9, TOPK, EXPERTS, 0.5, fused=True)


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_token_dropping_keeps_what_each_expert_has_room_for(logits: Tensor, policy: str, is_padded: bool) -> None:
    probs, routing_map = routing(logits)
    kept_probs, kept = moe_utils.apply_router_token_dropping(probs, routing_map, TOPK, 0.7, policy, is_padded)
    capacity = -(-TOKENS * TOPK * 7 // (EXPERTS * 10))
    for expert in range(EXPERTS):
        chosen = routing_map[:, expert].nonzero().view(-1).tolist()
        if policy == "probs":
            chosen.sort(key=lambda token: -probs[token, expert])
        wanted = set(chosen[:capacity])
        assert set(kept_probs[:, expert].nonzero().view(-1).tolist()) == wanted
        found = set(kept[:, expert].nonzero().view(-1).tolist())
        assert (wanted <= found and len(found) == capacity) if is_padded else found == wanted
    with pytest.raises(ValueError, match="drop_policy is 'age'"):
        moe_utils.apply_router_token_dropping(probs, routing_map, TOPK, 0.7, "age")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_a_padded_map_adds_the_first_free_tokens(logits: Tensor, dtype: torch.dtype) -> None:
    routing_map = routing(logits)[1].to(dtype)
    routing_map[:, 0] = 0
    padded = moe_utils.pad_routing_map(routing_map, 4)
    assert padded.dtype == dtype and not (routing_map.bool() & ~padded.bool()).any()
    for expert in range(EXPERTS):
        count = int(routing_map[:, expert].sum())
        added = (padded[:, expert].bool() & ~routing_map[:, expert].bool()).nonzero().view(-1).tolist()
        free = [token for token in range(TOKENS) if not routing_map[token, expert]]
        assert added == free[: -count % 4]


def test_quantile_balancing_finds_thresholds_with_equal_loads() -> None:
    scores = torch.rand(64, EXPERTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores[:, 0] += 0.5  # all tokens would choose this expert
    beta = torch.zeros(EXPERTS, dtype=torch.float64)
    alpha, kept = moe_utils.qb_dual_update(scores, TOPK, beta, update_beta=False)
    assert kept is beta and ((scores > alpha.unsqueeze(1)).sum(1) == TOPK).all()
    for _ in range(20):
        alpha, beta = moe_utils.qb_dual_update(scores, TOPK, beta)
        left = scores - alpha.unsqueeze(1)
        # Tokens whose thresholds come from the same expert are tied.
        assert ((left > beta).sum(0) <= 64 * TOPK // EXPERTS).all() and ((left >= beta).sum(0) > 16).all()
    before = scores.topk(TOPK).indices.flatten().bincount(minlength=EXPERTS)
    after = (scores - beta).topk(TOPK).indices.flatten().bincount(minlength=EXPERTS)
    assert before.max() > 30 and after.max() <= 20


@pytest.mark.parametrize("probs_given", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
def test_rows_go_to_experts_and_back(logits: Tensor, probs_given: bool, is_padded: bool) -> None:
    probs, routing_map = routing(logits)
    capacity = 6
    if is_padded:
        probs, routing_map = moe_utils.apply_router_token_dropping(probs, routing_map, TOPK, 2.0, "probs", True)
    tokens = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    options: dict[str, Any] = {"drop_and_pad": True} if is_padded else {}
    rows, weights, order = moe_utils.permute(
        tokens, routing_map, probs, capacity * EXPERTS if is_padded else None, **options
    )
    place = 0
    for expert in range(EXPERTS):
        for token in routing_map[:, expert].nonzero().view(-1).tolist():
            assert torch.equal(rows[place], tokens[token]) and weights[place] == probs[token, expert]
            assert order[place] == token
            place += 1
    assert place == len(rows)
    back = moe_utils.unpermute(rows, order, tokens.shape, probs if probs_given else None, routing_map, **options)
    factor = probs.sum(1, keepdim=True) if probs_given else routing_map.float().sum(1, keepdim=True)
    torch.testing.assert_close(back, tokens * factor)
    back.sum().backward()
    torch.testing.assert_close(tokens.grad, factor.expand_as(tokens))


def test_permutation_refuses_what_it_cannot_do(logits: Tensor) -> None:
    probs, routing_map = routing(logits)
    tokens = torch.randn(TOKENS, HIDDEN)
    for options, message in (
        ({"fused": True}, "permute: fused is True"),
        ({"align_size": 16}, "align_size is 16"),
        ({"drop_and_pad": True, "num_out_tokens": 9}, "with drop_and_pad it must be a multiple of the 8"),
        ({"drop_and_pad": True, "num_out_tokens": 800}, "is 100 per expert: must be at most the number of tokens, 12"),
    ):
        with pytest.raises(ValueError, match=message):
            moe_utils.permute(tokens, routing_map, probs, **options)
    with pytest.raises(ValueError, match="unpermute: fused is True"):
        moe_utils.unpermute(tokens, torch.arange(TOKENS), tokens.shape, fused=True)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_chunks_are_sorted_with_their_weights(as_tensor: bool) -> None:
    x, probs = torch.randn(9, 3, requires_grad=True), torch.rand(9)
    sizes, order = [2, 0, 4, 3], [3, 0, 2, 1]
    given = (torch.tensor(sizes), torch.tensor(order)) if as_tensor else (sizes, order)
    rows, weights = moe_utils.sort_chunks_by_idxs(x, *given, probs)
    places = [6, 7, 8, 0, 1, 2, 3, 4, 5]
    assert torch.equal(rows, x[places]) and torch.equal(weights, probs[places])
    assert moe_utils.sort_chunks_by_idxs(x, *given)[1] is None
    rows[0].sum().backward()
    assert x.grad.sum(1).tolist() == [0, 0, 0, 0, 0, 0, 3, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(TOKENS,), (4, 3)])
def test_gating_computes_in_the_dtype_of_the_router(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inp = torch.randn(*shape, HIDDEN).bfloat16().requires_grad_()
    weight, bias = (torch.randn(*size).bfloat16().requires_grad_() for size in ((EXPERTS, HIDDEN), (EXPERTS,)))
    plain = [tensor.detach().to(dtype).requires_grad_() for tensor in (inp, weight, bias)]
    found, expected = moe_utils.router_gating_linear(inp, weight, bias, dtype), F.linear(*plain)
    assert found.dtype == dtype and torch.equal(found, expected)
    upstream = torch.randn_like(found)
    found.backward(upstream)
    expected.backward(upstream)
    for ours, theirs in zip((inp, weight, bias), plain, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        torch.testing.assert_close(ours.grad, theirs.grad.bfloat16())


def test_noise_replaces_or_biases_logits_and_gradients_pass_on(logits: Tensor) -> None:
    logits.requires_grad_()
    torch.manual_seed(0)
    noise = moe_utils.apply_random_logits(logits)
    torch.manual_seed(0)
    assert torch.equal(noise, torch.randn_like(logits))
    biased = moe_utils.apply_biased_logits(logits, 2.0, layer_number=3)
    added = (biased - logits).detach()
    torch.testing.assert_close(added, added[:1].expand_as(added))
    assert torch.equal(biased, moe_utils.apply_biased_logits(logits, 2.0, layer_number=3))
    assert not torch.equal(biased, moe_utils.apply_biased_logits(logits, 2.0, layer_number=4))
    wide = moe_utils.apply_biased_logits(torch.zeros(1, 4096), 2.0)
    assert wide.std().item() == pytest.approx(2.0, rel=0.1)
    (noise.sum() + 2 * biased.sum()).backward()
    assert torch.equal(logits.grad, torch.full_like(logits, 3))


def test_tensors_on_the_host_stay_and_other_values_too() -> None:
    x = torch.randn(3, requires_grad=True)
    assert moe_utils.maybe_move_tensor_to_cpu(x) is x and moe_utils.maybe_move_tensor_to_cpu([1]) == [1]
    assert moe_utils.maybe_move_tensor_to_cpu(x, as_numpy=True).tolist() == x.tolist()
