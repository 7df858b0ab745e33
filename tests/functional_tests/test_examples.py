"""Every script of examples/ runs at a small size and demonstrates what it claims."""

import os
import re
import string
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

from examples import ddp_cnn, own_loop
from examples.any_module import train as any_module
from megatron.training.arguments import parse_args, validate_args
from tests.counts import soak_only
from tests.functional_tests.launch import ROOT, read_log, run_program
from tests.functional_tests.warm_scripts import run_script
from tests.harness import launch_on_ranks, run_on_ranks

EXAMPLES = ROOT / "examples"
SMALL = "--num-layers 2 --hidden-size 32 --seq-length 32 --train-iters 4 --log-interval 2".split()
TEXT = "The quick brown fox jumps over the lazy dog.\n\n" * 400


def run_example(name: str, folder: Path, *words: str) -> str:
    """Runs the script on warm ranks with its files in `folder`, and returns its output."""
    finished = run_script([str(EXAMPLES / name), *words], env={"OUT": str(folder)})
    assert finished.exit_code == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.slow
def test_dense_trains_on_a_text_and_continues_it(tmp_path: Path) -> None:
    text = tmp_path / "fox.txt"
    text.write_text(TEXT)
    printed = run_example("dense.sh", tmp_path, str(text), *SMALL, "--bf16")
    assert "A continuation of 'The ':\nThe " in printed
    assert [line["iteration"] for line in read_log(tmp_path / "checkpoints") if "lm_loss" in line] == [1, 2, 3, 4]


@pytest.mark.slow
def test_moe_logs_the_losses_of_its_router_on_two_processes(tmp_path: Path) -> None:
    printed = run_example("moe.sh", tmp_path, *SMALL, "--num-layers", "4", "--micro-batch-size", "2")
    assert "load_balancing_loss: " in printed and "z_loss: " in printed
    # Each process wrote a file of tensors.
    assert len(list((tmp_path / "checkpoints" / "iter_0000004").glob("__[01]_*.distcp"))) == 2


@pytest.mark.slow
def test_paged_stash_has_the_same_losses_with_the_sizes_that_its_report_asks_for(tmp_path: Path) -> None:
    printed = run_example("paged_stash.sh", tmp_path, *SMALL, "--num-layers", "3")
    assert printed.count("factor needed at p99.9: 1.") == 2 and "All 4 losses are bitwise equal" in printed


@pytest.mark.slow
def test_cuda_graph_checks_its_step_and_trains_it(tmp_path: Path) -> None:
    printed = run_example("cuda_graph.sh", tmp_path, *SMALL)
    assert printed.startswith("CAPTURABLE: --cuda-graph-impl full_iteration --optimizer-cuda-graph")
    assert "REPLAYED: 3 steps" in printed or "All 4 losses are bitwise equal" in printed


@pytest.mark.slow
def test_resume_finds_every_step_equal(tmp_path: Path) -> None:
    # The full example's warm-up alone has more steps.
    printed = run_example("resume.sh", tmp_path, "--hidden-size", "32", "--seq-length", "16", "--train-iters", "4")
    assert "exiting at iteration 3" in printed and "All 4 steps are bitwise equal" in printed


@pytest.mark.slow
def test_sft_packs_chats_and_answers(tmp_path: Path) -> None:
    printed = run_example("sft.sh", tmp_path, "--train-iters", "4", "--log-interval", "2")
    assert "500 documents" not in printed and "padding tokens" in printed and "An answer:\nQ:17 A:" in printed


@pytest.mark.slow
def test_ddp_cnn_has_the_same_losses_with_overlap_and_without() -> None:
    plain, overlapped = (
        launch_on_ranks(ddp_cnn.main, 3, ["--steps", "20", *words], backend=None)[0].stdout.splitlines()
        for words in ([], ["--overlap"])
    )
    assert len(plain) == 3 and plain[:2] == overlapped[:2] and float(plain[1].split()[3]) < 1
    # The first step only records the order in which the buckets become complete, so 19 of 20 steps overlap.
    assert overlapped[2] == "4 buckets; in flight before the next was complete in [19, 19, 19] steps"


@pytest.mark.slow
def test_own_loop_has_the_same_losses_on_any_layout() -> None:
    def printed(ranks: int, *words: str) -> list[float]:
        ended = launch_on_ranks(own_loop.main, ranks, ["--experts", "4", "--steps", "4", *words], backend=None)
        lines = [line.split() for one in ended for line in one.stdout.splitlines() if line.startswith("step")]
        return [float(line[index]) for line in lines for index in (3, 5)]

    alone = printed(1)
    assert len(alone) == 8 and alone[6] < 4
    assert printed(4, "--tensor", "2", "--pipeline", "2") == pytest.approx(alone, rel=1e-4)
    assert printed(2, "--expert-parallel", "2", "--sharded") == pytest.approx(alone, rel=1e-4)


def run_any_module(ranks: int, *words: str) -> list[float]:
    """Runs the example and returns the printed losses and gradient norms of every second step."""
    ended = launch_on_ranks(any_module.main, ranks, ["--log-every", "2", "--paint", "0", *words], backend=None)
    assert [one.exit_code for one in ended] == [0] * ranks, [one.stderr for one in ended]
    lines = [line.split() for line in ended[0].stdout.splitlines() if line.startswith("step")]
    return [float(line[index]) for line in lines for index in (3, 6)]


@pytest.mark.slow
def test_any_module_learns_alike_on_any_number_of_processes() -> None:
    alone = run_any_module(1, "--steps", "8")
    assert run_any_module(1, "--steps", "4") == alone[:4]
    assert len(alone) == 8 and alone[-2] < 0.4 * alone[0]
    assert run_any_module(2, "--steps", "8", "--overlap") == pytest.approx(alone, rel=1e-2)


# Only bf16 also restores fp32 masters.
@pytest.mark.slow
@pytest.mark.parametrize("words", [soak_only([]), ["--bf16"]], ids=["fp32", "bf16"])
def test_any_module_goes_on_from_a_checkpoint_of_fewer_processes(tmp_path: Path, words: list[str]) -> None:
    whole = run_any_module(3, "--steps", "6", *words)
    words = [*words, "--save", str(tmp_path / "rings")]
    halves = run_any_module(1, "--steps", "4", *words) + run_any_module(3, "--steps", "6", *words)
    assert halves == pytest.approx(whole, rel=5e-2 if "--bf16" in words else 1e-3)
    assert run_any_module(2, "--steps", "6", *words) == []


def run_own_script(folder: Path, ranks: int, *words: str):
    """Runs examples/own_script.py for four steps of eight samples, with the flag that the script adds."""
    own = "--mock-data --label-smoothing 0.2 --lr-warmup-iters 2 --eval-iters 1 --num-workers 0"
    batch = "--micro-batch-size 2 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0"
    run = run_program(
        [*SMALL, *own.split(), *batch.split(), *words], ranks, folder=folder, program="examples.own_script:main"
    )
    assert run.exit_codes == [0] * ranks, run.written()
    return run


def test_own_script_has_its_own_model_loss_flag_and_callback(tmp_path: Path) -> None:
    run = run_own_script(tmp_path, 2)
    assert all(0 <= step["accuracy"] <= 1 for step in run.steps.values()) and len(run.steps) == 4
    assert run.outcomes[0].stdout.count("best step: ") == 1


@pytest.mark.slow
def test_own_script_loses_as_much_under_every_layout(tmp_path: Path) -> None:
    layouts = [
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2"],
        ["--context-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
    ]
    one = run_own_script(tmp_path / "one", 1)
    others = [run_own_script(tmp_path / str(index), 4, *words) for index, words in enumerate(layouts)]
    for run in others:
        for number, step in run.steps.items():
            for name in ("lm_loss", "accuracy", "grad_norm"):
                assert step[name] == pytest.approx(one.steps[number][name], rel=2e-4), (number, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, words, percent, shows",
    [
        # Soak only, since the last case also has a pool that is large enough.
        soak_only("pytorch", "", 75, r"\| 0 act, 0 gate_up"),
        ("pytorch", "--device-pages 0.12", 40, r"\| [1-9] act, [1-9] gate_up"),
        ("pytorch", "--device-pages 0.1 --host-pages 0.5", 40, r"\| +[1-9]\S* \| 0 act, 0 gate_up"),
        ("hf", "", 70, r"\| +[1-9]\S*\n"),
    ],
)
def test_a_paged_stash_holds_less_and_changes_no_loss(
    name: str, words: str, percent: int, shows: str, monkeypatch, capsys, request
) -> None:
    torch.set_num_threads(2)  # as for users: sums must not depend on the order of threads
    request.addfinalizer(lambda: torch.set_num_threads(1))
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    # Two steps, since the order of the layers is not known in the first one.
    monkeypatch.setattr(sys, "argv", [name, "--steps", "2", *words.split()])
    import_module(f"examples.paged_stash_{name}").main()
    printed = capsys.readouterr().out
    assert "All 2 losses are bitwise equal to the losses without the stash." in printed and re.search(shows, printed), (
        printed
    )
    shares = [int(share) for share in re.findall(r"\( *(\d+)%\)", printed)]
    assert len(shares) == 2 and max(shares) < percent


CLUSTER = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "FIRST": "node1", "GPUS_PER_NODE": "4"}


def _cluster_command(name: str) -> tuple[str, str]:
    """Returns the command that a cluster's file starts on each node, and the arguments for torchrun."""
    text = (EXAMPLES / name).read_text()
    if name == "moe_8ranks.sh":
        return f"examples/{name}", ""
    if name.endswith(".sh"):
        checked = subprocess.run(["bash", "-n", str(EXAMPLES / name)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
        command = re.search(r' srun .*\\\n +(.*) "\$@"', text)
        launch = re.search(r'^export LAUNCH="(.*)"$', text, re.MULTILINE)
        assert command is not None and launch is not None
        words = launch[1].replace("${MASTER_PORT:-29500}", "29500")
        return command[1], string.Template(words).substitute(CLUSTER)
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] and job["spec"]["completionMode"] == "Indexed"
    (container,) = pod["containers"]
    # A value may refer only to earlier variables.
    node_rank, launch, _ = container["env"]
    assert (node_rank["name"], launch["name"]) == ("NODE_RANK", "LAUNCH")
    _, _, script = container["command"]
    return " ".join([script, *container["args"]]), launch["value"].replace("$(NODE_RANK)", "1")


@pytest.mark.parametrize("name", ["slurm.sh", "kubernetes.yaml", "moe_8ranks.sh"])
def test_clusters_start_the_command_of_eight_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, launch = _cluster_command(name)
    assert launch == "" or command == _cluster_command("slurm.sh")[0], "more than the launcher differs"
    environment = {**os.environ, "PYTHON": "echo", "LAUNCH": launch}
    done = subprocess.run(command.split(), cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    # The first line is the plan with the same flags.
    plan, words = (line.split() for line in done.stdout.splitlines())
    script = words.index(str(ROOT / "pretrain_gpt.py"))
    torchrun = get_args_parser().parse_args([*words[2:script], "script"])
    monkeypatch.setenv("WORLD_SIZE", str(int(torchrun.nnodes.partition(":")[0]) * int(torchrun.nproc_per_node)))
    assert plan[1:] == [*words[script + 1 :], "--dry-run", "--world-size", "8"]
    args = validate_args(parse_args(argv=words[script + 1 :]))
    assert (args.world_size, args.tensor_model_parallel_size, args.data_parallel_size) == (8, 2, 4)


@pytest.mark.slow
def test_the_code_of_the_library_page_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(encoding="utf-8"), re.DOTALL)
    exec("".join(blocks), {})
    loss, *tensors = capsys.readouterr().out.splitlines()
    assert float(loss.split()[1]) < 1 and any(line.startswith("embedding.word_embeddings.weight") for line in tensors)


def test_the_loop_of_the_sharded_optimizers_page_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    losses = run_on_ranks(loss_of_page, 2, "distributed_optimizer.md")
    assert losses == [losses[0]] * 2 and losses[0] < 0.7  # starts at 1.1


# Soak only for one rank, since two ranks run the same page and test_distributed_fused_adam.py covers one rank.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [soak_only(1), 2])
def test_the_loop_of_the_fused_adams_page_runs(ranks: int) -> None:
    losses = run_on_ranks(loss_of_page, ranks, "fused_adam.md")
    assert max(losses) < 0.8  # starts at 2.5


def loss_of_page(page: str) -> float:
    """Runs the code block of a page and returns its last loss."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(block, names)
    return float(names["loss"])


def test_every_example_is_executable_or_a_module() -> None:
    scripts = [path for path in EXAMPLES.iterdir() if path.is_file()]
    assert [path.name for path in scripts if path.suffix == ".sh" and not os.access(path, os.X_OK)] == []
