"""Parameter groups: decoupled learning rates, overrides by scripts, and their effect on a step."""

import json

import pytest
import torch

from megatron.core.optimizer import (
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.param_groups import ParamGrouping
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from tests.unit_tests.core.models.small_models import small_config, small_model
from tests.unit_tests.core.optimizer.reference import microbatches, our_step, tiny_model, wrap, wrap_and_build


def rates_by_name(wrapped, optimizer):
    """Returns each parameter's learning rate and weight decay. Parameters are fp32, so groups contain views of them."""
    flats = [(flat, group) for group in optimizer.param_groups for flat in group["params"]]
    return {
        name: next((group["lr"], group["weight_decay"]) for flat, group in flats if _holds(flat, param))
        for name, param in wrapped.module.named_parameters()
    }


def _holds(flat, param):
    return flat.data_ptr() <= param.data_ptr() < flat.data_ptr() + flat.nbytes


def build(overrides, model=None, **settings):
    settings = {"lr": 0.1, "weight_decay": 0.01, **settings}
    return wrap_and_build(model or tiny_model(), config_overrides=overrides, **settings)


def test_overrides_match_by_name_attribute_and_shape_and_the_later_wins():
    model = tiny_model()
    model[0].bias.is_special = True
    wide = ParamKey(predicate=ParamPredicate("wide", lambda param: param.shape[-1] == 33))
    wrapped, optimizer = build(
        {
            wide: ParamGroupOverride(wd_mult=3.0),
            ParamKey(name="4.*"): ParamGroupOverride(max_lr=0.7, min_lr=0.2, start_wd=0.5, end_wd=0.5),
            ParamKey(attr="is_special"): ParamGroupOverride(lr_mult=2.0, wd_mult=1.0),
        },
        model,
    )
    values = {"init_lr": 0.0, "max_lr": 0.1, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 10}
    decay = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": 10, "wd_incr_style": "constant"}
    scheduler = OptimizerParamScheduler(optimizer, **values, **decay, lr_decay_style="linear")
    scheduler.step(5)
    expected = {
        "0.weight": (0.05, 0.01),
        "0.bias": (0.1, 0.01),
        "1.weight": (0.05, 0.0),
        "1.bias": (0.05, 0.0),
        "2.weight": (0.05, 0.01),
        "2.bias": (0.05, 0.03),
        "4.weight": (0.45, 1.5),
        "4.bias": (0.45, 0.0),
    }
    found = rates_by_name(wrapped, optimizer)
    assert found.keys() == expected.keys()
    for name, rates in expected.items():
        assert found[name] == pytest.approx(rates), name


@pytest.mark.parametrize("applies", [False, True])
def test_norms_of_queries_and_keys_decay_where_asked(applies):
    grouping = ParamGrouping(OptimizerConfig(lr=0.1, apply_wd_to_qk_layernorm=applies))
    norms = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.bias", "input_layernorm.weight")
    factors = [grouping.key_of(f"decoder.layers.0.{name}", torch.ones(4)).override.wd_mult for name in norms]
    assert factors == [float(applies), float(applies), 0.0]


def test_a_step_with_overrides_equals_torch_with_such_groups():
    model, twin = tiny_model(), tiny_model()
    wrapped, optimizer = build({ParamKey(name="2.*"): ParamGroupOverride(lr_mult=0.5, wd_mult=2.0)}, model, clip_grad=0)
    groups = [{"params": [p], "weight_decay": 0.01 if p.dim() > 1 else 0.0} for p in twin.parameters()]
    for group in groups[4:6]:
        group.update(lr=0.05, weight_decay=0.02)
    adamw = torch.optim.AdamW(groups, lr=0.1)
    for step in range(5):
        (x,) = microbatches(step)
        our_step(wrapped, optimizer, [x])
        adamw.zero_grad()
        twin(x).square().mean().backward()
        adamw.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_decoupled_rates_are_for_word_embeddings_and_output_layer(tied):
    model = small_model(small_config(), share_embeddings_and_output_weights=tied)
    wrapped, optimizer = build(None, model, decoupled_lr=0.5, decoupled_min_lr=0.4, min_lr=0.01)
    decoupled = {name for name, (rate, _) in rates_by_name(wrapped, optimizer).items() if rate == 0.5}
    assert decoupled == {"embedding.word_embeddings.weight"} | (set() if tied else {"output_layer.weight"})
    group = next(group for group in optimizer.param_groups if group["is_decoupled_lr"])
    assert (group["max_lr"], group["min_lr"]) == (0.5, 0.4) and optimizer.param_groups[0]["lr"] == 0.1


def test_overrides_that_cannot_be_honoured_are_refused():
    with pytest.raises(ValueError, match=r"name='\*.nothing'.* matches no parameter"):
        build({ParamKey(name="*.nothing"): ParamGroupOverride(lr_mult=2.0)})
    with pytest.raises(ValueError, match="min_lr is 0.05: must be at most max_lr, which is 0.01"):
        build({ParamKey(name="0.*"): ParamGroupOverride(max_lr=0.01)}, min_lr=0.05)
    with pytest.raises(ValueError, match="wd_mult is -1.0"):
        ParamGroupOverride(wd_mult=-1.0)
    with pytest.raises(ValueError, match="set both or neither"):
        ParamGroupOverride(end_wd=0.1)
    with pytest.raises(ValueError, match="decoupled_min_lr is 0.1: requires"):
        OptimizerConfig(decoupled_min_lr=0.1)


def decays_of(overrides, **settings):
    config = OptimizerConfig(lr=0.1, weight_decay=0.01, **settings)
    wrapped = wrap(tiny_model())
    optimizer = get_megatron_optimizer(config, [wrapped], overrides)
    return {name: decay for name, (_, decay) in rates_by_name(wrapped, optimizer).items()}


def test_no_overrides_exempt_biases_and_norms_and_empty_ones_exempt_nothing():
    standard = decays_of(None)
    assert {name for name, decay in standard.items() if decay} == {"0.weight", "2.weight", "4.weight"}
    assert set(decays_of({}).values()) == {0.01}
    config = OptimizerConfig(lr=0.1)
    assert decays_of(get_standard_config_overrides(config)) == standard


def test_a_mapping_replaces_the_standard_overrides_and_may_hold_dictionaries():
    found = decays_of({ParamKey(name="0.*"): {"wd_mult": 0.0}, ParamKey(name="*.bias"): {"wd_mult": 2.0}})
    assert found["0.weight"] == 0.0 and found["0.bias"] == 0.02 and found["1.weight"] == 0.01
    with pytest.raises(ValueError, match="config_overrides contains the key 'wd': must be one of max_lr, min_lr"):
        decays_of({ParamKey(name="0.*"): {"wd": 0.0}})


def test_the_map_of_groups_is_written_as_json(tmp_path):
    wrapped = wrap(tiny_model())
    config = OptimizerConfig(lr=0.1, weight_decay=0.01)
    get_megatron_optimizer(config, [wrapped], None, True, None, str(tmp_path / "groups.json"))
    found = json.loads((tmp_path / "groups.json").read_text())
    assert set(found) == {name for name, _ in wrapped.module.named_parameters()}
    assert found["0.bias"]["weight_decay"] == 0.0 and found["0.weight"]["weight_decay"] == 0.01


def test_predicates_are_equal_by_name_and_any_condition_selects():
    param = torch.nn.Parameter(torch.zeros(3))
    short, named = ParamPredicate("short", lambda param: param.numel() < 3), ParamPredicate("short", bool)
    assert short == named and ParamKey((), (), short) == ParamKey(predicate=named)
    ends = ParamWithNamePredicate("ends in x", lambda param, name: name.endswith("x"))
    key = ParamKey(("a.*", "b"), predicate=(short,), with_name_predicate=ends)
    assert [key.matches(param, name) for name in ("a.c", "b", "c", "c.x")] == [True, True, False, True]
    assert key.matches(torch.nn.Parameter(torch.zeros(2)), "c")
