"""`make train`: prepares text and a tokenizer, trains a mixture-of-experts GPT on two processes, and generates text.

Runs commands that a user could type, in order, and skips those whose results exist. Prints a line for each stage, and
lines of training steps. `--dry-run` of the training command prints the contents of its plan page.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.text_files import INPUT_HELP, find_text_files
from megatron.core.datasets.utils import split_documents
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.version_flag import PrintVersions

IMPORTED_FROM = Path(str(megatron.__file__)).resolve().parents[1]  # a clone, or site-packages
MIN_DOCUMENTS = 3  # one each for training, validation and test
VOCAB_SIZE = 4096
INTERRUPTED = 130  # exit code by shell convention
# Number of tokens of a test document in the prompt, and number of tokens that the trained model generates.
PROMPT_TOKENS, NEW_TOKENS = 64, 120
# Width of a stage's name in characters.
NAME_WIDTH = 10

NUM_EXPERTS = 8
# Best loss after equal CPU time among: AdamW and Muon, 2 to 4 layers, hidden sizes 96 and 128, 8 and 16 experts.
# More steps of a small model help more than a larger model. With 4096 tokens most words are single tokens.
MODEL = f"""
--num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2
--num-experts {NUM_EXPERTS} --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --moe-expert-rank-capacity-factor 2
--moe-paged-stash --moe-paged-stash-prefetch-layers 0 --moe-paged-stash-buffer-size-factor-cuda 1.15
--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--seq-length 256 --max-position-embeddings 256
"""
# Fraction of the training time for the planned steps. The rest is for evaluation, saving and unplanned work.
PLANNED_SHARE = 0.7
MIN_STEPS, NUM_LINES, NUM_EVALUATIONS = 100, 20, 4
SCHEDULE = """
--micro-batch-size 4 --global-batch-size 8
--lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95
--eval-iters 5 --num-workers 0 --override-opt-param-scheduler
--log-format compact --exit-signal-handler --exit-signal SIGINT
"""


@dataclass(frozen=True)
class Workspace:
    """The files of one corpus. `folder` contains the text, the tokenizer, the tokens and the run."""

    folder: Path
    texts: tuple[Path, ...]

    @property
    def is_own(self) -> bool:
        """Whether the text is written into the folder rather than given by the user."""
        return self.texts[0].parent == self.folder

    @property
    def tokenizer(self) -> Path:
        """Path of the trained tokenizer."""
        return self.folder / "tokenizer.json"

    @property
    def tokens(self) -> Path:
        """Path prefix of the .bin/.idx pair."""
        return self.folder / "tokens_text_document"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints, logs and TensorBoard files."""
        return self.folder / "checkpoints"


def main() -> None:
    """Runs every command whose results do not exist yet, and resumes training."""
    options = parse_options()
    workspace = make_workspace(options.data)
    prepare(workspace)
    split = split_of(num_documents(workspace))
    train(workspace, split=split, minutes=options.minutes, processes=options.processes)
    prompt = held_out_passage(workspace, split=split)
    stage("sample", "a passage of a test document, and its continuation by the trained model (|):")
    sample = (
        "megatron.tools.generate",
        "--load",
        workspace.checkpoints,
        "--max-new-tokens",
        NEW_TOKENS,
        "--top-p",
        0.9,
    )
    print(indented(output_of(*sample, "--prompt", prompt), prompt=prompt), flush=True)
    if find_spec("plotly") and find_spec("jinja2"):
        output_of("megatron.tools.report", workspace.checkpoints)
        stage("report", f"{shown(workspace.checkpoints / 'report.html')}")
    stage("run", f"{shown(workspace.checkpoints)}; run the same command to continue training")


def parse_options() -> argparse.Namespace:
    """Parses the options that `make train` passes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action=PrintVersions)
    parser.add_argument(
        "--data", help=f"{INPUT_HELP} (preprocess_data.py --input); default: the text that Python ships"
    )
    parser.add_argument("--minutes", type=int, default=4, help="training time of this call in minutes (default: 4)")
    parser.add_argument(
        "--processes", type=int, default=2, help="number of processes that torchrun starts (default: 2)"
    )
    options = parser.parse_args()
    for name in ("minutes", "processes"):
        if vars(options)[name] < 1:
            parser.error(f"--{name} is {vars(options)[name]}: must be at least 1")
    return options


def make_workspace(data: str | None) -> Workspace:
    """Returns the corpus's workspace, runs/<name of the corpus> in the current folder."""
    if data is None:
        folder = Path.cwd() / "runs" / "python"
        return Workspace(folder, (folder / "text.jsonl",))
    try:
        texts = tuple(path.resolve() for path in find_text_files([data]))
        for text in texts:
            text.stat()
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: DATA is {data}: {error}") from None
    name = re.sub(r"[^\w.-]+", "_", Path(data).stem).strip("._") or "text"
    return Workspace(Path.cwd() / "runs" / name, texts)


def prepare(workspace: Workspace) -> None:
    """Creates the text, the tokenizer and the tokens, unless they exist."""
    workspace.folder.mkdir(parents=True, exist_ok=True)
    check_source(workspace)
    if workspace.is_own:
        (text,) = workspace.texts
        if not text.exists():
            stage("text", last_line("megatron.tools.python_corpus", "--output", text))
    if not workspace.tokenizer.exists():
        sizes = ("--vocab-size", VOCAB_SIZE, "--input", *workspace.texts, "--output", workspace.tokenizer)
        stage("tokenizer", last_line("megatron.tools.train_tokenizer", *sizes))
    if not workspace.tokens.with_suffix(".idx").exists():
        files = ("--input", *workspace.texts, "--output-prefix", workspace.folder / "tokens")
        flags = ("--append-eod", "--workers", os.cpu_count() or 1, *tokenizer_flags(workspace))
        stage("tokens", last_line("megatron.tools.preprocess_data", *files, *flags))


def check_source(workspace: Workspace) -> None:
    """Raises SystemExit if the folder's tokens and checkpoints were made from a different text of the same name."""
    if workspace.is_own:
        return
    record = workspace.folder / "source.txt"
    source = "".join(f"{text}, {text.stat().st_size} bytes\n" for text in workspace.texts)
    if not record.exists() or not workspace.checkpoints.exists():
        # Nothing has been trained yet, so files of an earlier text are replaced.
        if not record.exists() or record.read_text() != source:
            for made in (workspace.tokenizer, *workspace.folder.glob("tokens_*")):
                made.unlink(missing_ok=True)
        record.write_text(source)
    elif record.read_text() != source:
        raise SystemExit(
            f"error: {workspace.folder} was made from {record.read_text().strip()}, DATA is {source.strip()}: "
            "move that folder away, or give the text another name"
        )


def split_of(num_documents: int) -> str:
    """Returns the value of --split: 3% of the documents for validation, 1% for test, and at least one for each."""
    if num_documents < MIN_DOCUMENTS:
        raise SystemExit(
            f"error: DATA has {num_documents} documents (a .txt is split at blank lines into 4 KiB or more): must "
            f"be at least {MIN_DOCUMENTS}, for training, validation and test; give more text"
        )
    valid, test = max(1, round(0.03 * num_documents)), max(1, round(0.01 * num_documents))
    return f"{num_documents - valid - test},{valid},{test}"


def num_documents(workspace: Workspace) -> int:
    """Returns the number of tokenized documents."""
    return len(IndexedDataset(str(workspace.tokens)).document_indices) - 1


def train(workspace: Workspace, *, split: str, minutes: int, processes: int) -> None:
    """Trains for up to `minutes`, from the latest checkpoint if there is one."""
    flags = (
        *shlex.split(MODEL + SCHEDULE),
        *("--expert-model-parallel-size", gcd(processes, NUM_EXPERTS)),
        *tokenizer_flags(workspace),
        *("--data-path", workspace.tokens, "--split", split),
        *("--save", workspace.checkpoints),
    )
    logs = ("--tensorboard-dir", workspace.checkpoints)
    trained = steps_trained(workspace)
    # The plan does not depend on the number of steps, which is chosen by the planned step time.
    dry_run = ("--dry-run", "--world-size", processes, "--train-iters", MIN_STEPS)
    output_of("pretrain_gpt", *flags, *logs, *dry_run, MEGATRON_PLAN_DEVICE="here")
    # Without the flag, training writes its log to the folder of --save, which is the same.
    if find_spec("tensorboard"):
        flags += logs
    plan = json.loads((workspace.checkpoints / "plan.json").read_text())
    page = next(file for file in ("plan.html", "plan.json") if (workspace.checkpoints / file).exists())
    stage("plan", f"{plan_words(plan)}: {shown(workspace.checkpoints / page)}")
    steps = planned_steps(plan, minutes=minutes)
    sizes = plan["parameters"]
    stage(
        "training",
        f"{NUM_EXPERTS} experts, {sizes['all'] / 1e6:.1f}M parameters ({sizes['of_a_token'] / 1e6:.1f}M active), "
        f"{processes} processes, {minutes} min (Ctrl-C saves and stops)",
    )
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", processes, "-m")
    interval, log_interval = steps // NUM_EVALUATIONS, steps // NUM_LINES
    length = ("--train-iters", trained + steps, "--lr-warmup-iters", steps // 20, "--exit-duration-in-mins", minutes)
    intervals = ("--eval-interval", interval, "--save-interval", interval, "--log-interval", log_interval)
    load = ("--load", workspace.checkpoints) if trained else ()
    run(*torchrun, "pretrain_gpt", *flags, *length, *intervals, *load)


def steps_trained(workspace: Workspace) -> int:
    """Returns the step of the latest checkpoint, or 0 if there is none."""
    latest = workspace.checkpoints / "latest_checkpointed_iteration.txt"
    return int(latest.read_text()) if latest.exists() else 0


def planned_steps(plan: dict[str, Any], *, minutes: int) -> int:
    """Returns the number of steps that fit into `minutes` by the plan, so that the learning-rate decay completes."""
    steps = int(60 * minutes * PLANNED_SHARE / plan["step"]["seconds"])
    return max(MIN_STEPS, steps // MIN_STEPS * MIN_STEPS)


def plan_words(plan: dict[str, Any]) -> str:
    """Describes the memory and step time of a plan for this machine."""
    device, world = plan["device"], plan["world_size"]
    needed = max(stage["peak"] for stage in plan["stages"])
    have = f"{'the machine' if device['name'] == 'cpu' else device['name']}'s {device['memory_gib']:.1f}"
    seconds = plan["step"]["seconds"]
    return f"each of {world} processes needs {needed / 2**30:.2f} GiB of {have}, about {seconds:.2g} s per step"


def held_out_passage(workspace: Workspace, *, split: str) -> str:
    """Returns whole lines of the first test document, starting a third of the way in.

    Returns part of a line if the passage contains no whole line.
    """
    tokens = IndexedDataset(str(workspace.tokens))
    _, _, documents = split_documents(split, num_documents(workspace))
    assert documents is not None, "split_of assigns at least one document to each split"
    first = int(tokens.document_indices[documents[0]])
    start = int(tokens.sequence_lengths[first]) // 3
    length = min(PROMPT_TOKENS, max(1, start))
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(workspace.tokenizer))
    )
    text = tokenizer.detokenize(tokens.get(first, offset=start, length=length).tolist())
    first_end, last_end = text.find("\n"), text.rfind("\n")
    return text[first_end + 1 : last_end + 1].lstrip("\n") or text


def indented(text: str, *, prompt: str) -> str:
    """Indents a prompt and its continuation. The continuation begins on a new line, with a bar before each line."""
    given = [f"    {line}" for line in prompt.rstrip("\n").split("\n")]
    added = [f"  | {line}" for line in text.removeprefix(prompt).rstrip().split("\n")]
    return "\n".join([*given, *added])


def tokenizer_flags(workspace: Workspace) -> list[object]:
    """Returns the flags that select the trained tokenizer."""
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", workspace.tokenizer]


def stage(name: str, result: str) -> None:
    """Prints the result line of a stage."""
    print(f"{name:<{NAME_WIDTH}} {result}", flush=True)


def shown(path: Path) -> Path:
    """Returns a path relative to the working directory if it is inside it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def run(*command: object, capture: bool = False, **variables: str) -> str:
    """Runs a Python module with its arguments. Exits with its exit code if it fails.

    capture: return its standard output instead of showing it. variables: additional environment variables.
    """
    path = os.pathsep.join(filter(None, (str(IMPORTED_FROM), os.environ.get("PYTHONPATH"))))
    # Safe path: the current folder may contain modules of the same names, for example a clone of Megatron-LM.
    ours = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, command)],
        env={**ours, **variables},
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )
    try:
        output, _ = process.communicate()
    except KeyboardInterrupt:
        # The program also received the signal. It cleans up, and training saves a checkpoint.
        process.wait()
        raise SystemExit(INTERRUPTED) from None
    if process.returncode:
        if output:
            print(output, end="")
        raise SystemExit(process.returncode)
    return output or ""


def output_of(*command: object, **variables: str) -> str:
    """Runs a program like `run` and returns its standard output."""
    return run(*command, capture=True, **variables)


def last_line(*command: object) -> str:
    """Runs a program and returns the last line that it prints, with paths relative to the working directory."""
    line = output_of(*command).rstrip().rpartition("\n")[2]
    return line.replace(f"{Path.cwd()}/", "")


if __name__ == "__main__":
    main()
