"""A script in Megatron-LM's form, with custom providers, losses and datasets, trains exactly like pretrain_gpt.py."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.functional_tests.launch import PROGRAM, Run, run_program
from tests.padded_corpus import write_packed

OWN = "tests.functional_tests.plugin_script:main"
# The vocabulary is not padded, since a model without unpadded_vocab_size assigns probabilities to padding columns.
FLAGS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-2 --mock-data --num-workers 0 --eval-iters 0
--tokenizer-type NullTokenizer --vocab-size 256 --log-interval 1
"""
LAYOUTS = [
    "--tensor-model-parallel-size 2 --sequence-parallel --bf16",
    "--pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
    "--context-parallel-size 2",
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --use-distributed-optimizer",
]


def train(program: str, ranks: int, folder: Path, words: str) -> Run:
    run = run_program([*FLAGS.split(), *words.split()], ranks, folder=folder, program=program)
    assert run.exit_codes == [0] * ranks, run.written()
    return run


def assert_equal_steps(one: Run, other: Run, *, rel: float = 0.0) -> None:
    assert one.steps.keys() == other.steps.keys() == {1, 2, 3}
    for number, step in one.steps.items():
        for name in ("lm_loss", "grad_norm"):
            assert step[name] == pytest.approx(other.steps[number][name], rel=rel, abs=0), (number, name)


@pytest.mark.slow
@pytest.mark.parametrize("words", LAYOUTS)
def test_plugins_train_as_pretrain_gpt_does_under_every_layout(tmp_path: Path, words: str) -> None:
    assert_equal_steps(train(OWN, 2, tmp_path / "own", words), train(PROGRAM, 2, tmp_path / "gpt", words), rel=1e-6)


def test_a_builder_bound_to_the_model_provider_trains_as_pretrain_gpt_does(tmp_path: Path) -> None:
    words = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"
    bound = train("tests.functional_tests.plugin_script:main_with_builder", 2, tmp_path / "own", words)
    assert_equal_steps(bound, train(PROGRAM, 2, tmp_path / "gpt", words))


def test_all_conventions_of_a_loss_function_are_the_same_loss(tmp_path: Path) -> None:
    expected = train(PROGRAM, 1, tmp_path / "gpt", "")
    for convention in ("tokens", "pair", "mean"):
        own = train(OWN, 1, tmp_path / convention, f"--loss-convention {convention}")
        assert_equal_steps(own, expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["tokens", "pair", "mean"])
def test_conventions_are_the_same_loss_over_parts_of_sequences(tmp_path: Path, convention: str) -> None:
    plain = "--hidden-dropout 0 --attention-dropout 0"
    own = train(OWN, 2, tmp_path / "own", f"{plain} --loss-convention {convention} --context-parallel-size 2")
    assert_equal_steps(own, train(PROGRAM, 1, tmp_path / "one", plain), rel=2e-4)


def test_a_dataset_of_the_script_is_read(tmp_path: Path) -> None:
    reversed_ = train(OWN, 1, tmp_path / "reversed", "--reverse-documents")
    plain = train(OWN, 1, tmp_path / "plain", "")
    assert reversed_.steps[1]["lm_loss"] != plain.steps[1]["lm_loss"]


def test_data_of_evaluations_reaches_the_script_on_the_last_rank(tmp_path: Path) -> None:
    words = "--eval-iters 1 --eval-interval 2 --train-iters 2 --pipeline-model-parallel-size 2"
    run = train(OWN, 2, tmp_path, words)
    first, last = (outcome.stdout for outcome in run.outcomes)
    assert "largest per-token loss" not in first
    # One evaluation at the interval, and the final evaluations of the validation and the test split.
    assert last.count("largest per-token loss at iteration 2: ") == 3
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [point.step for point in events.Scalars("largest per-token loss")][:1] == [2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"), [(2, "--tensor-model-parallel-size 2"), (3, "--pipeline-model-parallel-size 3 --num-layers 3")]
)
def test_ranks_for_which_the_script_builds_no_datasets_take_part_in_evaluations(
    tmp_path: Path, ranks: int, words: str
) -> None:
    evaluated = f"{words} --eval-interval 2 --eval-iters 1"
    own = train(OWN, ranks, tmp_path / "own", evaluated)
    expected = train(PROGRAM, ranks, tmp_path / "gpt", evaluated)
    assert_equal_steps(own, expected, rel=1e-6)
    # In the first evaluation the script reads an additional batch for logging, so later evaluations use other batches.
    assert own.validation_losses.keys() == {2, 3}
    assert own.validation_losses[2] == pytest.approx(expected.validation_losses[2], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"]
)
def test_plugins_leave_padding_out_as_pretrain_gpt_does(tmp_path: Path, words: str) -> None:
    chats = [[2 + number % 9, 3 + number % 14] for number in range(40)]
    prefix = write_packed(tmp_path / "a", chats, length=32, eod=255, fill=255)
    words += f" --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 --data-path {prefix} --split 100,0,0"
    flags = FLAGS.replace("--mock-data", words).split()
    runs = [run_program(flags, 2, folder=tmp_path / name, program=name) for name in (OWN, PROGRAM)]
    assert_equal_steps(*runs, rel=1e-6)
    for own, other in zip(*(run.steps.values() for run in runs), strict=True):
        assert own["expert_load"] == other["expert_load"] and own["padding_tokens"] == other["padding_tokens"] > 0
        assert {sum(load) for load in own["expert_load"].values()} == {2 * (8 * 32 - own["padding_tokens"])}
