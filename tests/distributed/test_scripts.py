"""Calls of scripts written for Megatron-LM: a custom loop trains, saves and loads as pretrain() does."""

import argparse
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron import torch_range
from megatron.core import parallel_state
from megatron.core.datasets.data_iterators import BatchPlan, build_data_iterators
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.utils import get_model_config
from megatron.training import (
    get_args,
    get_tensorboard_writer,
    get_timers,
    get_tokenizer,
    get_wandb_writer,
    inprocess_restart,
    pretrain,
)
from megatron.training.arguments import parse_args
from megatron.training.callbacks import Callback, StepReport
from megatron.training.checkpointing import get_checkpoint_name, load_checkpoint, save_checkpoint
from megatron.training.initialize import initialize_megatron, leave_process_group
from megatron.training.scripts import script_of_call
from megatron.training.training import (
    get_model,
    get_optimizer_param_scheduler,
    setup_model_and_optimizer,
    train_step,
    update_train_iters,
)
from megatron.training.utils import (
    calc_params_l2_norm,
    get_batch_on_this_tp_rank,
    is_first_or_last_pipeline_stage,
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
)
from tests.harness import launch_on_ranks, run_on_ranks

FLAGS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --mock-data --num-workers 0 --eval-iters 0
--tokenizer-type NullTokenizer --vocab-size 256
"""
KIND = ModelType.encoder_or_decoder
DATASETS = pretrain_gpt.train_valid_test_datasets_provider


class Losses(Callback):
    """Records the losses of a run."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, report: StepReport) -> None:
        self.losses.append(report.losses["lm loss"])


@contextmanager
def script(words: str, **arguments: Any):
    """Calls initialize_megatron with these flags, as a script does, and leaves the process group at exit."""
    try:
        yield initialize_megatron(argv=(FLAGS + words).split(), **arguments)
    finally:
        leave_process_group()


def own_loop(words: str, steps: int, *, save: bool = False) -> list[float]:
    """Runs a custom training loop and returns its losses on the last stage."""
    with script(words) as args:
        model, optimizer, scheduler = setup_model_and_optimizer(pretrain_gpt.model_provider, KIND)
        groups = parallel_state.get_process_groups()
        plan = BatchPlan(
            micro_batch_size=args.micro_batch_size,
            dp_rank=group_rank(groups.dp),
            dp_size=group_size(groups.dp),
            consumed_train_samples=args.consumed_train_samples,
        )
        iterator = build_data_iterators(DATASETS([32, 0, 0]), plan)[0]
        losses = []
        for _ in range(steps):
            reduced, skipped, should_save, should_exit, code, norm, zeros = train_step(
                pretrain_gpt.forward_step,
                iterator,
                model,
                optimizer,
                scheduler,
                get_model_config(model[0]),
                get_forward_backward_func(),
            )
            assert (skipped, should_save, should_exit, code, zeros) == (0, False, False, 0, None) and norm > 0
            args.consumed_train_samples += args.global_batch_size
            args.iteration += 1
            losses += [float(value) for value in reduced.values()]
        if save:
            save_checkpoint(args.iteration, model, optimizer, scheduler, 5e20)
        return losses


def loop_and_pretrain(words: str, folder: str) -> tuple[list[float], list[float], list[float]]:
    saved = f"{words} --save {folder} --load {folder}"
    mine = own_loop(saved, 2, save=True)
    further = own_loop(saved, 2)
    record = Losses()
    pretrain(
        DATASETS, pretrain_gpt.model_provider, KIND, pretrain_gpt.forward_step, callbacks=[record],
        argv=(FLAGS + words).split(),
    )  # fmt: skip
    return mine, further, record.losses


@pytest.mark.parametrize(
    "words", ["", "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2 --calculate-per-token-loss"]
)
def test_a_loop_of_the_script_trains_and_resumes_as_pretrain_does(tmp_path: Path, words: str) -> None:
    results = run_on_ranks(loop_and_pretrain, 2, words, str(tmp_path), backend=None)
    for rank, (mine, further, expected) in enumerate(results):
        assert len(expected) == 4
        if rank == 0 and "pipeline" in words:
            assert mine == further == []
        else:
            assert mine + further == pytest.approx(expected, rel=1e-6)


def model_of_flags(provider: Callable[..., Any] | None) -> list[str]:
    with script("") as args:
        wrapped, plain = get_model(pretrain_gpt.model_provider), get_model(pretrain_gpt.model_provider, KIND, False)
        kinds = [type(wrapped[0]).__name__, type(plain[0]).__name__]
        with pytest.raises(ValueError, match="model_type is"):
            get_model(pretrain_gpt.model_provider, ModelType.encoder_and_decoder)
        with pytest.raises(ValueError, match="config does not belong to the model"):
            train_step(pretrain_gpt.forward_step, None, wrapped, None, None, object(), None)
        # Builds the model from the flags, without a provider, with the arguments in the order of Megatron's main
        # branch.
        _, optimizer, _ = setup_model_and_optimizer(KIND)
        assert 0 <= get_optimizer_param_scheduler(optimizer).get_lr(optimizer.param_groups[0]) <= args.lr
        assert get_tokenizer().vocab_size >= args.vocab_size and get_timers() is not None
        assert get_wandb_writer() is None and get_tensorboard_writer() is None
        args.train_samples = 60
        update_train_iters(args)
        assert args.train_iters == 7
        iteration = load_checkpoint(plain, None, None)
        assert iteration == (0, 0)
        return kinds


def test_models_are_built_from_the_flags_and_wrapped_on_request() -> None:
    assert run_on_ranks(model_of_flags, 1, None, backend=None) == [["DistributedDataParallel", "GPTModel"]]


def norm_on_ranks(words: str) -> tuple[float, float, float | None, bool]:
    with script(words):
        model = get_model(pretrain_gpt.model_provider, wrap_with_ddp=False)
        norm = calc_params_l2_norm(model)
        # Sums over the parameters of every rank, so that a parameter on two tensor-parallel ranks counts twice.
        squares = torch.stack([param.detach().double().square().sum() for param in model[0].parameters()]).sum()
        dist.all_reduce(squares)
        rank = dist.get_rank()
        largest = reduce_max_stat_across_model_parallel_group(3.5 if rank == 1 else None)
        return norm, float(squares.sqrt()), largest, logical_and_across_model_parallel_group(rank == 0)


def test_statistics_count_each_parameter_once() -> None:
    for norm, counted_twice, largest, holds in run_on_ranks(
        norm_on_ranks, 2, "--tensor-model-parallel-size 2", backend=None
    ):
        assert 0 < norm < counted_twice
        assert largest == 3.5 and holds is False
    for norm, counted_once, _, _ in run_on_ranks(
        norm_on_ranks, 2, "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights", backend=None
    ):
        assert norm == pytest.approx(counted_once, rel=1e-6)


def batches_on_ranks(words: str) -> list[Any]:
    with script(words):
        rank = dist.get_rank()
        batch = {
            "tokens": torch.arange(6).view(2, 3) + 100 * rank,
            "loss_mask": torch.rand(2, 3),
            "kind": "text",
            "cu_seqlens": torch.tensor([0, 3, 6], dtype=torch.int32),
            "odd": torch.ones(5, dtype=torch.bool),
        }
        received = get_batch_on_this_tp_rank(iter([batch]) if rank == 0 else None)
        with pytest.raises(ValueError, match="data_iterator is None on the first tensor-parallel rank"):
            get_batch_on_this_tp_rank(None)
        return [received, is_first_or_last_pipeline_stage(None)]


def test_a_batch_is_read_once_and_received_by_all_tensor_parallel_ranks() -> None:
    (first, _), (second, _) = run_on_ranks(batches_on_ranks, 2, "--tensor-model-parallel-size 2", backend=None)
    assert first.keys() == second.keys() >= {"tokens", "labels", "loss_mask", "attention_mask", "position_ids"}
    for name, value in first.items():
        same = torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        assert same, name
    assert first["labels"] is None and first["tokens"].max() == 5 and first["kind"] == "text"


def parsed_arguments_and_groups() -> list[float]:
    """Calls pretrain() as on Megatron's main branch: with parsed arguments first, and the GPT that they describe."""
    args = parse_args(argv=FLAGS.split())
    record = Losses()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    pretrain(args, DATASETS, KIND, pretrain_gpt.forward_step, skip_model_parallel_init=True, callbacks=[record])
    return record.losses


def released_call() -> list[float]:
    record = Losses()
    pretrain(
        train_valid_test_dataset_provider=DATASETS,
        model_provider=pretrain_gpt.model_provider,
        model_type=KIND,
        forward_step_func=pretrain_gpt.forward_step,
        callbacks=[record],
        argv=FLAGS.split(),
    )
    return record.losses


def test_both_forms_of_pretrain_train_the_same_model() -> None:
    (mine,), (released,) = (
        run_on_ranks(call, 1, backend=None) for call in (parsed_arguments_and_groups, released_call)
    )
    assert len(mine) == 4 and mine == released


def groups_of_other_sizes(sizes: dict[str, Any], flags: str, words: str) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**sizes)
    with pytest.raises(ValueError, match=words):
        initialize_megatron(argv=[*FLAGS.split(), *flags.split()], skip_model_parallel_init=True)
    leave_process_group()


@pytest.mark.parametrize(
    ("sizes", "flags", "words"),
    [
        ({}, "--tensor-model-parallel-size 2", "tensor_model_parallel_size is 2: the script has initialized 1"),
        (
            {"context_parallel_size": 2, "hierarchical_context_parallel_sizes": [1, 2]},
            "--context-parallel-size 2 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1 "
            "--attention-dropout 0",
            r"hierarchical_context_parallel_sizes is \[2, 1\]: the script has initialized \[1, 2\]",
        ),
    ],
)
def test_groups_of_the_script_must_be_those_of_the_flags(sizes: dict[str, Any], flags: str, words: str) -> None:
    run_on_ranks(groups_of_other_sizes, 2, sizes, flags, words, backend=None)


def provide_data(sizes: list[int]) -> list[Any]:
    return []


def provide_model(pre_process: bool = True, post_process: bool = True) -> Any:
    return None


def step(iterator: Any, model: Any) -> Any:
    return None


def process(data: Any, iteration: int, writer: Any) -> None:
    """Does nothing: a process_non_loss_data_func."""


NAMESPACE = argparse.Namespace()


@pytest.mark.parametrize(
    ("call", "args", "processes"),
    [
        ((provide_data, provide_model, KIND, step, None, None), None, False),
        ((provide_data, provide_model, KIND, step, process, None), None, True),
        ((provide_data, provide_model, KIND, step, None, process), None, True),
        ((provide_data, None, KIND, step, provide_model, None), None, False),
        ((None, provide_data, KIND, step, provide_model, process), None, True),
        ((NAMESPACE, provide_data, KIND, step, provide_model, process), NAMESPACE, True),
    ],
)
def test_the_forms_of_pretrain_are_told_apart(call: tuple[Any, ...], args: Any, processes: bool) -> None:
    found = script_of_call(*call)
    assert (found.datasets_provider, found.model_provider, found.forward_step_func) == (
        provide_data,
        provide_model,
        step,
    )
    assert found.args is args and found.process_non_loss_data_func is (process if processes else None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((3, provide_data, KIND, step, provide_model, None), "cfg_container is a int"),
        (
            (None, None, KIND, step, provide_model, None),
            "train_valid_test_dataset_provider is None: must be a function",
        ),
        ((None, provide_data, KIND, step, None, None), "model_provider is None: must be a function"),
        ((None, provide_data, KIND, None, provide_model, None), "forward_step_func is None: must be a function"),
        ((None, provide_data, step, KIND, provide_model, None), "model_type is <function step"),
    ],
)
def test_wrong_calls_of_pretrain_name_the_argument(call: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        script_of_call(*call)


@pytest.mark.parametrize(
    "call",
    [
        partial(pretrain, provide_data, provide_model, KIND, step, store=object()),
        partial(pretrain, provide_data, provide_model, KIND, step, get_embedding_ranks=len),
        partial(initialize_megatron, seed_tp_group=object()),
        partial(initialize_megatron, skip_mpu_initialization=True),
        partial(save_checkpoint, 1, [], None, None, 0, release=True),
        partial(load_checkpoint, [], None, None, dp_group=object()),
    ],
)
def test_arguments_of_what_is_not_here_are_refused_by_name(call: partial[Any]) -> None:
    name = next(iter(call.keywords))
    with pytest.raises(ValueError, match=f"{name} is .*; keep the default"):
        call()


def test_checkpoint_names_are_those_of_each_rank() -> None:
    assert get_checkpoint_name("c", 12, return_base_dir=True) == "c/iter_0000012"
    assert get_checkpoint_name("c", 0, release=True, return_base_dir=True) == "c/release"
    name = partial(get_checkpoint_name, "c", 3, tensor_rank=1, pipeline_rank=2, expert_rank=4)
    assert name(pipeline_parallel=False, expert_parallel=False) == "c/iter_0000003/mp_rank_01/model_optim_rng.pt"
    assert name(pipeline_parallel=True, expert_parallel=True) == "c/iter_0000003/mp_rank_01_002_004/model_optim_rng.pt"


def test_arguments_of_refused_flags_read_as_their_defaults() -> None:
    args = parse_args(argv=FLAGS.split())
    assert args.qk_l2_norm is False and args.mid_level_dataset_surplus == 0.005 and args.use_legacy_models is False
    assert "qk_l2_norm" not in vars(args)
    with pytest.raises(AttributeError, match="no argument qk_layernrm; did you mean qk_layernorm"):
        _ = args.qk_layernrm


def test_global_variables_need_a_run() -> None:
    with pytest.raises(RuntimeError, match="initialize_megatron"):
        get_args()


def test_pretrain_stays_itself_without_restarts_inside_a_process() -> None:
    wrapped, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    assert wrapped is pretrain and store is None
    with pytest.raises(ValueError, match="--inprocess-restart"):
        parse_args(argv=["--inprocess-restart"])


def with_extra(**position: Any) -> torch.nn.Module:
    model = pretrain_gpt.model_provider(**position)
    model.extra = torch.nn.Linear(3, 3)
    return model


def partial_loads(folder: str) -> tuple[float, float]:
    """Returns the sum of a saved model's weights, and the sum in a model with an additional part that loads them."""
    sums = []
    with script(f"--save {folder} --load {folder} --no-load-optim --no-load-rng"):
        for provider in (pretrain_gpt.model_provider, with_extra):
            model = get_model(provider)
            own = [param for name, param in model[0].named_parameters() if "extra" not in name]
            if provider is with_extra:
                kept = model[0].module.extra.weight.detach().clone()
                with torch.no_grad():
                    own[0].zero_()
                with pytest.raises(ValueError, match="extra.weight is not in it"):
                    load_checkpoint(model, None, None)
                assert load_checkpoint(model, None, None, strict=False)[0] == 1
                assert torch.equal(model[0].module.extra.weight, kept)
            else:
                save_checkpoint(1, model, None, None, 0)
            sums.append(float(torch.stack([param.detach().double().abs().sum() for param in own]).sum()))
    return sums[0], sums[1]


def test_a_load_that_is_not_strict_keeps_what_the_checkpoint_lacks(tmp_path: Path) -> None:
    ((saved, loaded),) = run_on_ranks(partial_loads, 1, str(tmp_path), backend=None)
    assert saved == loaded > 0


def start_on_torch(version: str) -> None:
    torch.__version__ = version  # the process of this rank ends with the test
    with script(""):
        pass


@pytest.mark.parametrize(("version", "count"), [("2.11.0", 0), ("2.99.1", 1)])
def test_the_first_rank_warns_once_of_a_torch_newer_than_the_tested_ones(version: str, count: int) -> None:
    outcomes = launch_on_ranks(start_on_torch, 2, version, backend=None)
    assert [outcome.error for outcome in outcomes] == [None, None]
    lines = [line for outcome in outcomes for line in (outcome.stdout + outcome.stderr).splitlines()]
    warnings = [line for line in lines if version in line]
    expected = f"WARNING: torch {version} is newer than the tested versions, {torch_range()} (docs/torch_versions.md)"
    assert warnings == [expected] * count
    assert warnings == [line for line in outcomes[0].stdout.splitlines() if version in line]
