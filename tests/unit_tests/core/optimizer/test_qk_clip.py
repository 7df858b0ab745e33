"""Clipping of attention scores after a step, and the largest scores, compared with explicitly computed scores."""

import copy

import pytest
import torch

from megatron.core.optimizer import ChainedOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import CheckpointFunction, checkpoint
from megatron.core.transformer import attention_tiles
from megatron.core.transformer.context_parallel_attention import ContextParallelAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.tiled_attention import Alone
from tests.unit_tests.core.models.small_models import (
    LATENT,
    LLAMA_LIKE,
    loss_of,
    small_batch,
    small_config,
    small_model,
)
from tests.unit_tests.core.optimizer.reference import wrap_and_build

GROUPED = {"num_query_groups": 2, "add_qkv_bias": True, **LLAMA_LIKE}
THRESHOLD = 0.5


def clipping_model(**fields):
    config = small_config(**{"qk_clip": True, "qk_clip_threshold": THRESHOLD, **fields})
    return small_model(config, share_embeddings_and_output_weights=False)


def plain_largest(query, key, allowed, scale):
    """Computes each head's largest score: [S, B, N, D], [S, B, G, D], [B or 1, 1, S, S] -> [N]."""
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) * scale
    return scores.masked_fill(~allowed, -torch.inf).amax((0, 2, 3))


def observed(model):
    """Runs the small batch and returns each layer's largest scores, computed explicitly."""
    found, handles = [], []
    for core in (one for one in model.modules() if isinstance(one, DotProductAttention)):

        def note(core, inputs):
            query, key = (one.detach() for one in inputs[:2])
            allowed = torch.ones(len(query), len(query), dtype=torch.bool).tril()
            found.append(plain_largest(query, key, allowed, core.softmax_scale))

        handles.append(core.register_forward_pre_hook(note))
    loss_of(model)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("max_scores", [1 << 24, 700])
@pytest.mark.parametrize("shape", ["causal", "window", "mask", "packed", "full"])
def test_largest_scores_are_those_of_scores_written_out(shape, max_scores, monkeypatch):
    monkeypatch.setattr(attention_tiles, "_MAX_SCORES", max_scores)
    window = {"window_size": (5, 0)} if shape == "window" else {}
    core = DotProductAttention(small_config(log_max_attention_logit=True, num_query_groups=2, **window), layer_number=1)
    torch.manual_seed(3)
    query, key, value = torch.randn(16, 2, 4, 8), torch.randn(16, 2, 2, 8), torch.randn(16, 2, 2, 8)
    mask, packed, options = None, None, {}
    ahead = torch.arange(16) - torch.arange(16).unsqueeze(1)
    allowed = (ahead <= 0).expand(2, 1, 16, 16)
    if shape == "window":
        allowed = allowed & (ahead >= -5)
    if shape == "mask":
        mask = torch.rand(2, 1, 16, 16) < 0.6
        allowed = ~mask
    if shape == "packed":
        packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 5, 16, 28, 32], dtype=torch.int32))
        documents = torch.tensor([0] * 5 + [1] * 11 + [2] * 12 + [3] * 4).view(2, 16)
        allowed = allowed & (documents.unsqueeze(1) == documents.unsqueeze(2)).unsqueeze(1)
    if shape == "full":
        allowed, options = torch.ones_like(allowed), {"attn_mask_type": AttnMaskType.no_mask}
    core(query, key, value, mask, packed_seq_params=packed, **options)
    expected = plain_largest(query, key, allowed, core.softmax_scale)
    torch.testing.assert_close(core.largest_logits.values.float(), expected)
    core.eval()
    core(query * 9, key, value, mask, packed_seq_params=packed, **options)
    torch.testing.assert_close(core.largest_logits.values.float(), expected)


@pytest.mark.parametrize("alpha", [0.5, 0.2])
@pytest.mark.parametrize("fields", [GROUPED, LATENT, {**LATENT, "q_lora_rank": None, "qk_layernorm": False}])
def test_a_clipped_step_divides_the_scores_of_heads_above_the_threshold(fields, alpha):
    model = clipping_model(**fields, qk_clip_alpha=alpha)
    before = copy.deepcopy(model)
    # The learning rate is nearly 0, so only clipping changes the weights.
    wrapped, optimizer = wrap_and_build(model, lr=1e-30, weight_decay=0.0)
    first = observed(before)
    optimizer.zero_grad()
    loss_of(model).backward()
    wrapped.finish_grad_sync()
    optimizer.step()
    assert optimizer.largest_attention_logit_sync() == pytest.approx(float(torch.stack(first).max()))
    # The first layer's input has not changed, so its scores are clipped exactly.
    clipped = observed(copy.deepcopy(model))[0]
    torch.testing.assert_close(clipped, first[0].clamp(max=THRESHOLD), rtol=1e-5, atol=1e-6)
    assert (first[0] > THRESHOLD).any(), "the test needs a head to clip"
    changed = {n for (n, p), q in zip(model.named_parameters(), before.parameters()) if not torch.equal(p, q)}
    names = ("linear_qkv.", "linear_q_proj.", "linear_q_up_proj.", "linear_kv_up_proj.")
    assert changed and all(any(name in one for name in names) for one in changed)


@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_chain_of_optimizers_clips_as_they_do(is_on_device):
    model = clipping_model(**GROUPED)
    wrapped, optimizer = wrap_and_build(model, lr=1e-30, weight_decay=0.0)
    chained = ChainedOptimizer([optimizer])
    chained.zero_grad()
    loss_of(model).backward()
    wrapped.finish_grad_sync()
    if is_on_device:
        chained.prepare_device_step()
        chained.settle_step_sync(chained.step_on_device())
    else:
        chained.step()
    assert observed(copy.deepcopy(model))[0].max() < THRESHOLD + 1e-6 < chained.largest_attention_logit_sync()


def test_a_group_shares_the_smallest_factor_of_its_heads():
    attention = clipping_model(**GROUPED, qk_clip_alpha=0.25).decoder.layers[0].self_attention
    factors = torch.tensor([0.5, 1.0, 1.0, 1.0])
    rows = attention.row_factors(factors)[0][1].view(2, 4, 8)[..., 0]
    key = 0.5**0.75
    torch.testing.assert_close(rows, torch.tensor([[0.5**0.25, 1 / key, key, 1.0], [1.0, 1.0, 1.0, 1.0]]))


@pytest.mark.parametrize("settings", [{}, {"optimizer": "muon"}])
def test_masters_of_16_bit_weights_are_clipped_too(settings):
    model = clipping_model(params_dtype=torch.bfloat16, bf16=True, **GROUPED).bfloat16()
    wrapped, optimizer = wrap_and_build(model, bf16=True, lr=1e-3, **settings)
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(model).backward()
        wrapped.finish_grad_sync()
        optimizer.step()
    weight = model.decoder.layers[0].self_attention.linear_qkv.weight
    assert torch.equal(weight, weight.main_param.bfloat16())
    # Every step clips, so scores exceed the threshold by at most one step's update.
    assert float(torch.stack(observed(model)).max()) < 1.5 * THRESHOLD


def test_a_skipped_step_clips_nothing_and_forgets_its_scores():
    model = clipping_model(**GROUPED)
    wrapped, optimizer = wrap_and_build(model, lr=1e-30, weight_decay=0.0)
    optimizer.zero_grad()
    (loss_of(model) * float("inf")).backward()
    before = copy.deepcopy(model)
    wrapped.finish_grad_sync()
    updated, *_ = optimizer.step()
    assert not updated
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters()))
    assert all(layer.self_attention.largest_logits.values.isneginf().all() for layer in model.decoder.layers)


def test_the_device_clips_as_the_host_does_and_not_in_a_discarded_step():
    models = [clipping_model(**GROUPED) for _ in range(3)]
    for number, model in enumerate(models):
        wrapped, optimizer = wrap_and_build(model, lr=0.01)
        optimizer.zero_grad()
        loss_of(model).backward()
        wrapped.finish_grad_sync()
        if number == 0:
            optimizer.step()
        else:
            optimizer.prepare_device_step()
            optimizer.step_on_device(torch.tensor(float(number == 2)))
    host, device, discarded = (list(model.parameters()) for model in models)
    for one, other in zip(host, device, strict=True):
        torch.testing.assert_close(one, other)
    assert all(torch.equal(p, q) for p, q in zip(discarded, clipping_model(**GROUPED).parameters(), strict=True))


def test_clip_qk_of_a_loop_with_a_torch_optimizer():
    model = clipping_model(**GROUPED)
    attention = model.decoder.layers[0].self_attention
    first = observed(model)[0]
    attention.clip_qk()
    torch.testing.assert_close(observed(model)[0], first.clamp(max=THRESHOLD), rtol=1e-5, atol=1e-6)
    plain = small_model(small_config(**GROUPED), share_embeddings_and_output_weights=False)
    with pytest.raises(ValueError, match="qk_clip is False"):
        plain.decoder.layers[0].self_attention.clip_qk()


def test_errors_name_the_fields():
    with pytest.raises(ValueError, match=r"qk_clip_alpha is 0\.3: requires qk_clip"):
        small_config(qk_clip_alpha=0.3)
    with pytest.raises(ValueError, match="qk_clip and qk_layernorm are both True"):
        small_config(qk_clip=True, qk_layernorm=True)
    model = clipping_model(**GROUPED)
    model.decoder.layers[1].self_attention.linear_qkv.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="projection of shape .* is frozen"):
        wrap_and_build(model)


@pytest.mark.parametrize(
    "again", [{}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}]
)
def test_a_forward_without_gradients_leaves_the_scores_of_the_step(again):
    found = []
    for evaluates in (False, True):
        model = clipping_model(**GROUPED, **again)
        loss = loss_of(model)
        if evaluates:
            with torch.no_grad():
                tokens, positions, _ = small_batch()
                model(tokens.flip(0) // 2, positions, None)
        loss.backward()
        for layer in model.decoder.layers:
            layer.self_attention.clip_qk()
        found.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *found))


def in_ring(core, query, key, value):
    """Runs the core as the ring of a single context-parallel rank."""
    config = small_config(log_max_attention_logit=True, num_query_groups=2)
    ring = ContextParallelAttention(config, exchange=lambda group, seq_length: Alone(seq_length), group=None)
    return ring(core, query, key, value)


@pytest.mark.parametrize("run", [lambda core, *inputs: core(*inputs), in_ring], ids=["core", "ring"])
@pytest.mark.parametrize("again", [checkpoint, CheckpointFunction.apply], ids=["checkpoint", "reentrant"])
def test_each_forward_records_its_scores_once(run, again):
    """Two forwards, one under no_grad between; a reentrant checkpoint records in its second run."""
    core = DotProductAttention(small_config(log_max_attention_logit=True, num_query_groups=2), layer_number=1)
    generator = torch.Generator().manual_seed(3)

    def inputs(factor):
        query, key, value = (torch.randn(16, 2, heads, 8, generator=generator) for heads in (4, 2, 2))
        return (query * factor).requires_grad_(), key, value

    first, between, second = inputs(3), inputs(9), inputs(1)
    causal = torch.ones(16, 16, dtype=torch.bool).tril()
    largest = [plain_largest(query, key, causal, core.softmax_scale) for query, key, _ in (first, between, second)]
    outputs = [again(lambda *given: run(core, *given), False, *first)]
    with torch.no_grad():
        run(core, *between)
    outputs.append(again(lambda *given: run(core, *given), False, *second))
    of_forwards = core.largest_logits.on(torch.device("cpu")).clone()
    core.largest_logits.reset()
    for output in reversed(outputs):
        output.sum().backward()
    of_backwards = core.largest_logits.on(torch.device("cpu"))
    recorded, nothing = (of_forwards, of_backwards) if again is checkpoint else (of_backwards, of_forwards)
    torch.testing.assert_close(recorded.float(), torch.maximum(largest[0], largest[2]))
    assert nothing.isneginf().all()
