"""TRAPS B20: unevenly masked ranks, microbatches and parts of sequences produce the fp64 gradients of one process."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import (
    get_data_parallel_rank,
    get_pipeline_model_parallel_rank,
    get_process_groups,
    initialize_model_parallel,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training.training import run_step
from megatron.training.utils import get_batch_on_this_cp_rank
from tests.counts import slow, soak_only
from tests.distributed.parity import TOLERANCE, Box, boxes_of, put_together, relative_errors
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import command_line, read_bases
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, SEQ, VOCAB, small_config, small_model
from tests.unit_tests.core.optimizer.reference import wrap

MICROBATCHES = 2
LOSSES = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, **LOSSES}


def build(
    *, per_token: bool, ends: tuple[bool, bool] = (True, True), vp_stage: int | None = None, **fields: Any
) -> GPTModel:
    fields = {"params_dtype": torch.float64, "calculate_per_token_loss": per_token, **LLAMA_LIKE, **fields}
    return small_model(small_config(**fields), pre_process=ends[0], post_process=ends[1], vp_stage=vp_stage)


def microbatch(index: int) -> dict[str, Tensor]:
    """Returns one microbatch of [2, S] tensors with a random mask, which keeps from one token to all tokens.

    Microbatches 1 and 2 keep no token, and microbatch 3 keeps only the first quarter.
    """
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
    share = [0.05, 0.0, 0.0, 1.0, 0.5, 0.1][index]
    mask = (torch.rand(2, SEQ, generator=generator) < share).float()
    if index == 3:
        # Keeps only tokens of the first of two or three context-parallel ranks.
        mask[:, SEQ // 4 :] = 0
    places = torch.arange(SEQ).expand(2, SEQ)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": places}


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    arguments = {name: batch[name] for name in ("labels", "loss_mask")}
    return model(batch["tokens"], batch["position_ids"], None, **arguments)


def forward_step(indices: Any, model: nn.Module, *, returns_share: bool) -> Any:
    whole = microbatch(next(indices))
    batch = get_batch_on_this_cp_rank(whole)
    mask, of_whole = batch["loss_mask"], whole["loss_mask"].sum().clamp(min=1)
    if returns_share:
        return losses_of(model, batch), lambda losses: ((losses * mask).sum() / of_whole, {})
    return losses_of(model, batch), lambda losses: ((losses * mask).sum(), mask.sum(), {})


def gradients_of_a_rank(sizes: dict[str, int], fields: dict[str, Any]) -> list[list[Box]]:
    """Returns gradients without per-token loss, from sums and from shares of the mean, and with per-token loss."""
    initialize_model_parallel(**sizes)
    groups, found = get_process_groups(), []
    for per_token, returns_share in ((False, False), (False, True), (True, False)):
        model = [
            wrap(chunk, pg_collection=groups, calculate_per_token_loss=per_token)
            for chunk in chunks_of_a_rank(sizes, per_token=per_token, **fields)
        ]
        config = get_model_config(model[0])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = lambda loss: loss * 4.0  # like the loss scale of fp16, which the optimizer divides out
        first = get_data_parallel_rank() * MICROBATCHES
        get_forward_backward_func()(
            forward_step_func=partial(forward_step, returns_share=returns_share),
            data_iterator=[iter(range(first, first + MICROBATCHES)) for _ in model],
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQ,
            micro_batch_size=2,
        )
        grads = [(name, grad / 4.0) for chunk in model for name, grad in chunk.named_main_grads()]
        found.append(boxes_of(model, grads))
    return found


def chunks_of_a_rank(sizes: dict[str, int], *, per_token: bool, **fields: Any) -> list[GPTModel]:
    count = sizes.get("virtual_pipeline_model_parallel_size", 1)
    stage, stages = get_pipeline_model_parallel_rank(), sizes.get("pipeline_model_parallel_size", 1)
    sequence = sizes.get("tensor_model_parallel_size", 1) > 1
    return [
        build(
            per_token=per_token,
            ends=(stage == index == 0, stage == stages - 1 and index == count - 1),
            vp_stage=index if count > 1 else None,
            **{**sizes, "sequence_parallel": sequence, "pipeline_dtype": torch.float64, **fields},
        )
        for index in range(count)
    ]


def gradients_of_one_process(dp_size: int, *, per_token: bool, **fields: Any) -> dict[str, Tensor]:
    reference, batches = build(per_token=per_token, **fields), [microbatch(i) for i in range(dp_size * MICROBATCHES)]
    counts = torch.stack([batch["loss_mask"].double().sum() for batch in batches])
    weights = (1 / counts.sum()).expand_as(counts) if per_token else 1 / counts.clamp(min=1) / len(batches)
    # A router's loss includes all tokens of its microbatch, masked or not.
    reference.aux_losses.set_backward_scale(
        weights[0] if per_token else torch.tensor(1 / len(batches), dtype=torch.float64)
    )
    for batch, weight in zip(batches, weights):
        ((losses_of(reference, batch) * batch["loss_mask"]).sum() * weight).backward()
    return put_together(boxes_of([reference], [(name, param.grad) for name, param in reference.named_parameters()]))


TP, CP, PP = "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"
STAGES = {PP: 2, "virtual_pipeline_model_parallel_size": 2}
DEEP = {**EXPERTS, "num_layers": 4}
FURTHER = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sizes", "fields"),
    [
        (3, {}, EXPERTS),
        slow(4, {CP: 2}, {**EXPERTS, **FURTHER}),
        slow(4, {TP: 2, **STAGES}, {**DEEP, **FURTHER}),
        # The cases above split each axis, alone or with another; these are other sizes of the same axes.
        soak_only(4, {PP: 2}, {**EXPERTS, **FURTHER}),
        soak_only(4, {TP: 2}, {**EXPERTS, **FURTHER}),
        soak_only(4, {TP: 2, **STAGES}, DEEP),
        soak_only(4, {TP: 2}, EXPERTS),
        soak_only(4, {CP: 2}, {"cp_comm_type": "all_gather"}),
        soak_only(4, {CP: 4}, {}),
        soak_only(4, STAGES, DEEP),
        soak_only(8, {TP: 2, **STAGES}, DEEP),
        soak_only(8, {TP: 2, CP: 2, PP: 2}, EXPERTS),
    ],
)
def test_b20_uneven_tokens_give_the_gradients_of_one_process(
    ranks: int, sizes: dict[str, int], fields: dict[str, Any]
) -> None:
    outcomes = run_on_ranks(gradients_of_a_rank, ranks, sizes, fields)
    dp_size = ranks // math.prod(sizes.get(name, 1) for name in (TP, CP, PP))
    for index, per_token in enumerate((False, False, True)):
        expected = gradients_of_one_process(dp_size, per_token=per_token, **fields)
        found = put_together([box for outcome in outcomes for box in outcome[index]])
        wrong = {name: error for name, error in relative_errors(found, expected).items() if not error <= TOLERANCE}
        assert not wrong, (per_token, wrong)


def script_model(pre_process: bool = True, post_process: bool = True) -> nn.Module:
    model = pretrain_gpt.model_provider(pre_process, post_process)
    get_model_config(model).calculate_per_token_loss = True
    return model


def steps_of_script_and_flag() -> list[tuple[float, float]]:
    flags = {**read_bases()["dense"], "mock-data": True, "eval-iters": 0, "train-iters": 3, "global-batch-size": 4}
    found = []
    for extra, provider in (({}, script_model), ({"calculate-per-token-loss": True}, pretrain_gpt.model_provider)):
        with started_run(command_line({**flags, **extra}), model_provider=provider) as run:
            reports = [run_step(run)[0] for _ in range(2)]
            found.append((reports[1].losses["lm loss"], reports[1].grad_norm))
    return found


def test_a_script_may_ask_for_it_in_the_model_as_the_flag_does() -> None:
    (by_script, by_flag), _ = run_on_ranks(steps_of_script_and_flag, 2)
    assert by_script == by_flag
