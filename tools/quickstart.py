"""`make train`: prepares text and a tokenizer, trains a mixture-of-experts GPT on two processes, and generates text.

Runs commands that a user could type, in order, and skips those whose results exist. Prints a line for each stage, and
lines of training steps. `--dry-run` of the training command prints the contents of its plan page.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron
from megatron.core.datasets.indexed_dataset import IndexedDataset, get_idx_path
from megatron.core.datasets.table_files import Columns
from megatron.core.datasets.text_files import (
    INPUT_HELP,
    BadLine,
    check_tables,
    decode_document,
    find_text_files,
    read_raw_documents,
)
from megatron.core.datasets.utils import split_documents
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.tools.preprocess_data import wrong_keys
from megatron.version_flag import PrintVersions

IMPORTED_FROM = Path(str(megatron.__file__)).resolve().parents[1]  # a clone, or site-packages
VOCAB_SIZE = 4096
SEQ_LENGTH = 256
SAMPLE_TOKENS = SEQ_LENGTH + 1  # the last token is only a label
# Shares of the tokens for training, and for training and validation; the rest is for the test.
TRAIN_SHARE, VALID_END = 0.96, 0.99
# At least one of this many first documents must have text under the key.
CHECKED_DOCUMENTS = 100
INTERRUPTED = 130  # exit code by shell convention
# Number of tokens of a test document in the prompt, and number of tokens that the trained model generates.
PROMPT_TOKENS, NEW_TOKENS = 128, 80
# Among temperatures of 0.5 to 0.9 and top-p of 0.8 and 0.9, this setting had the fewest words that do not occur in the
# corpus: 3%, in 12 continuations after two minutes of training. 0.9 had 15%, and 0.5 repeated itself more.
SAMPLING = f"--max-new-tokens {NEW_TOKENS} --temperature 0.6 --top-p 0.8"
# Width of a stage's name in characters.
NAME_WIDTH = 10

NUM_EXPERTS = 8
# Best loss after equal CPU time among: AdamW and Muon, 2 to 4 layers, hidden sizes 96 and 128, 8 and 16 experts.
# More steps of a small model help more than a larger model. With 4096 tokens most words are single tokens.
MODEL = f"""
--num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2
--num-experts {NUM_EXPERTS} --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --moe-expert-rank-capacity-factor 2
--moe-paged-stash --moe-paged-stash-prefetch-layers 0 --moe-paged-stash-buffer-size-factor-cuda 1.25
--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH}
"""
# Fraction of the training time for the planned steps. The rest is for evaluation, saving and unplanned work.
PLANNED_SHARE = 0.7
MIN_STEPS, NUM_LINES, NUM_EVALUATIONS = 100, 20, 4
# Largest learning rates of the first run and of each continuation, and the rate at the end of both.
FIRST_RATE, NEXT_RATE, LAST_RATE = 2e-3, 1e-3, 1e-4
SCHEDULE = f"""
--micro-batch-size 4 --global-batch-size 8
--lr {FIRST_RATE} --min-lr {LAST_RATE} --weight-decay 0.1 --adam-beta2 0.95
--eval-iters 5 --num-workers 0 --override-opt-param-scheduler
--log-format compact --exit-signal-handler --exit-signal SIGINT
"""


@dataclass(frozen=True)
class Workspace:
    """Files of one corpus. `folder` contains the text, the tokenizer, the tokens and the run.

    key: key or column of the text.
    """

    folder: Path
    texts: tuple[Path, ...]
    key: str = "text"

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
        return self.folder / f"tokens_{self.key}_document"

    @property
    def has_tokens(self) -> bool:
        """Whether the tokens are complete. The .idx file is written last."""
        return Path(get_idx_path(str(self.tokens))).exists()

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints, logs and TensorBoard files."""
        return self.folder / "checkpoints"


def main() -> None:
    """Runs every command whose results do not exist yet, and resumes training."""
    options = parse_options()
    workspace = make_workspace(options.data, key=options.json_key)
    prepare(workspace)
    split = split_of(document_lengths(workspace))
    steps = train(workspace, split=split, minutes=options.minutes, processes=options.processes)
    prompt = held_out_passage(workspace, split=split)
    longer = f"a longer run improves it (MINUTES={5 * options.minutes})"
    stage("sample", f"a passage of a test document, and the model's continuation (|); {longer}:")
    sample = ("megatron.tools.generate", "--load", workspace.checkpoints, *shlex.split(SAMPLING))
    print(indented(output_of(*sample, "--prompt", prompt), prompt=prompt), flush=True)
    if find_spec("plotly") and find_spec("jinja2"):
        output_of("megatron.tools.report", workspace.checkpoints)
        stage("report", f"{shown(workspace.checkpoints / 'report.html')}")
    stage("run", f"{shown(workspace.checkpoints)}: {outcome_words(workspace, steps=steps, minutes=options.minutes)}")


def parse_options() -> argparse.Namespace:
    """Parses the options that `make train` passes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action=PrintVersions)
    parser.add_argument(
        "--data", help=f"{INPUT_HELP} (preprocess_data.py --input); default: the text that Python ships"
    )
    parser.add_argument("--json-key", default="text", help="key or column of the text (text)")
    parser.add_argument("--minutes", type=int, default=4, help="training time of this call (4)")
    parser.add_argument("--processes", type=int, default=2, help="processes that torchrun starts")
    options = parser.parse_args()
    for name in ("minutes", "processes"):
        if vars(options)[name] < 1:
            parser.error(f"--{name} is {vars(options)[name]}: must be at least 1")
    if (problem := wrong_keys([options.json_key])) is not None:
        parser.error(problem)
    return options


def make_workspace(data: str | None, *, key: str = "text") -> Workspace:
    """Returns the workspace of this corpus: runs/<name of the corpus> in the current folder."""
    if data is None:
        folder = Path.cwd() / "runs" / "python"
        return Workspace(folder, (folder / "text.jsonl",), key)
    try:
        texts = tuple(path.resolve() for path in find_text_files([data]))
        check_key(texts, key)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: DATA is {data}: {error}") from None
    name = re.sub(r"[^\w.-]+", "_", Path(data).stem).strip("._") or "text"
    return Workspace(Path.cwd() / "runs" / name, texts, key)


def check_key(texts: Sequence[Path], key: str) -> None:
    """Raises ValueError or OSError if a table lacks the column, or if no early document has text under the key."""
    columns = Columns((key,), flag="KEY= (--json-key)")
    check_tables(texts, columns)
    bad_lines: list[BadLine] = []
    documents = chain.from_iterable(read_raw_documents(path, columns) for path in texts)
    for document in islice(documents, CHECKED_DOCUMENTS):
        text, bad = decode_document(document, json_key=key)
        if text:
            return
        bad_lines += bad
    if bad_lines:
        raise ValueError(f"{bad_lines[0]}. Choose the key of the text with {columns.flag}")
    raise ValueError(f"no text in the first {CHECKED_DOCUMENTS} documents")


def prepare(workspace: Workspace) -> None:
    """Creates the text, the tokenizer and the tokens, unless they exist."""
    workspace.folder.mkdir(parents=True, exist_ok=True)
    if workspace.is_own:
        (text,) = workspace.texts
        if not text.exists():
            stage("text", last_line("megatron.tools.python_corpus", "--output", text))
    check_source(workspace)
    if not workspace.tokenizer.exists():
        remove_tokens(workspace)
        sizes = ("--vocab-size", VOCAB_SIZE, "--json-key", workspace.key)
        files = ("--input", *workspace.texts, "--output", workspace.tokenizer)
        stage("tokenizer", last_line("megatron.tools.train_tokenizer", *sizes, *files))
    if not workspace.has_tokens:
        files = ("--input", *workspace.texts, "--output-prefix", workspace.folder / "tokens")
        flags = ("--json-keys", workspace.key, "--append-eod", "--workers", os.cpu_count() or 1)
        stage("tokens", last_line("megatron.tools.preprocess_data", *files, *flags, *tokenizer_flags(workspace)))


def check_source(workspace: Workspace) -> None:
    """Removes tokenizer and tokens of a different text. Raises SystemExit if a model was trained on that text.

    A run always continues with the tokenizer that it started with.
    """
    record = workspace.folder / "source.json"
    source = {"key": workspace.key, "files": [[str(text), sha256(text)] for text in workspace.texts]}
    found = json.loads(record.read_text()) if record.exists() else None
    is_same = found is not None and compared(found) == compared(source)
    if steps_trained(workspace):
        if not is_same:
            was = "text that is not recorded" if found is None else source_words(found)
            rename = "" if workspace.is_own else ", or give the text another name"
            raise SystemExit(
                f"error: {shown(workspace.folder)} has a run on {was}, not on {source_words(source)}: "
                f"move that folder away{rename}"
            )
        if not workspace.tokenizer.exists():
            folder = shown(workspace.folder)
            raise SystemExit(f"error: {folder} does not contain the tokenizer of its run: move that folder away")
    elif not is_same:
        workspace.tokenizer.unlink(missing_ok=True)
        remove_tokens(workspace)
    record.write_text(json.dumps(source, indent=1))


def compared(source: dict[str, Any]) -> object:
    """Returns the part of a source that determines tokens: files may move to another folder."""
    return source["key"], [(Path(path).name, digest) for path, digest in source["files"]]


def source_words(source: dict[str, Any]) -> str:
    """Describes a source by its first file and the start of the hash, which distinguishes versions of the file."""
    (path, digest), *others = source["files"]
    more = f" and {len(others)} more" if others else ""
    return f"{shown(Path(path))}{more} (KEY={source['key']}, sha256 {digest[:8]})"


def sha256(path: Path) -> str:
    """Returns the hash of a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_tokens(workspace: Workspace) -> None:
    """Removes all token files of the workspace, whatever their key."""
    for path in workspace.folder.glob("tokens_*_document.*"):
        path.unlink()


def split_of(lengths: Sequence[int]) -> str:
    """Returns the numbers of documents for training, validation and test, for --split.

    The three parts are consecutive and contain about 96%, 3% and 1% of the tokens, and at least one sample each.
    lengths: number of tokens of each document. Raises SystemExit if no such split exists.
    """
    ends = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])  # tokens before each border
    total = int(ends[-1])

    def first_border(num_tokens: float) -> int:
        """Returns the first border with at least this number of tokens before it."""
        return int(np.searchsorted(ends, num_tokens))

    def last_border(num_tokens: float) -> int:
        """Returns the last border with at most this number of tokens before it; -1 if there is none."""
        return int(np.searchsorted(ends, num_tokens, side="right")) - 1

    last_test = last_border(total - SAMPLE_TOKENS)
    last_valid = last_border(ends[last_test] - SAMPLE_TOKENS) if last_test > 0 else -1
    first_valid = first_border(SAMPLE_TOKENS)
    if last_valid < first_valid:
        raise SystemExit(
            f"error: DATA has {total:,} tokens in {len(lengths):,} documents (.txt and .md are cut at blank lines, "
            f"after 4 KiB or more): must be at least {3 * SAMPLE_TOKENS} in 3 documents, {SAMPLE_TOKENS} each for "
            "training, validation and test; add more text"
        )
    valid = min(max(first_border(TRAIN_SHARE * total), first_valid), last_valid)
    test = min(max(first_border(VALID_END * total), first_border(ends[valid] + SAMPLE_TOKENS)), last_test)
    return f"{valid},{test - valid},{len(lengths) - test}"


def document_lengths(workspace: Workspace) -> list[int]:
    """Returns the number of tokens of each document."""
    lengths: list[int] = IndexedDataset(str(workspace.tokens)).sequence_lengths.tolist()
    return lengths


def train(workspace: Workspace, *, split: str, minutes: int, processes: int) -> int:
    """Trains for `minutes` or less, from the latest checkpoint if there is one. Returns the planned last step."""
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
    if trained:
        rates = f"restarts at {NEXT_RATE:g} and decays to {LAST_RATE:g}"
        stage("continued", f"from step {trained:,} for {steps:,} more steps; the learning rate {rates}")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", processes, "-m")
    interval, log_interval = steps // NUM_EVALUATIONS, steps // NUM_LINES
    length = ("--train-iters", trained + steps, "--exit-duration-in-mins", minutes, *rate_flags(trained, steps=steps))
    intervals = ("--eval-interval", interval, "--save-interval", interval, "--log-interval", log_interval)
    load = ("--load", workspace.checkpoints) if trained else ()
    run(*torchrun, "pretrain_gpt", *flags, *length, *intervals, *load)
    return trained + steps


def rate_flags(trained: int, *, steps: int) -> list[object]:
    """Returns the flags of the learning rate for `steps` steps after `trained` ones.

    The first run warms up and decays. A continuation restarts at half the rate and decays again: after the first decay
    the rate is too low to learn much from more text. WSD places the decay at the end of the run, in the new steps.
    """
    if not trained:
        return ["--lr-decay-style", "cosine", "--lr-warmup-iters", steps // 20]
    return [
        *("--lr", NEXT_RATE, "--lr-decay-style", "WSD", "--lr-wsd-decay-style", "cosine"),
        *("--lr-wsd-decay-iters", steps),
    ]


def outcome_words(workspace: Workspace, *, steps: int, minutes: int) -> str:
    """Describes where the training stopped. steps: planned last step."""
    trained = steps_trained(workspace)
    stopped = f"stopped by time ({minutes} min) at step {trained:,} of {steps:,}" if trained < steps else "complete"
    return f"{stopped}; run the same command to continue"


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
    """Returns whole lines from the first third of the first test document that is longer than a prompt.

    Uses the longest document if all are shorter, and returns part of a line if it has only one line.
    """
    tokens = IndexedDataset(str(workspace.tokens))
    _, _, documents = split_documents(split, len(tokens.sequence_lengths))
    assert documents is not None, "split_of gives each split a document"
    lengths = tokens.sequence_lengths
    longest = max(documents, key=lambda document: int(lengths[document]))
    first = next((document for document in documents if lengths[document] > PROMPT_TOKENS), longest)
    start = int(lengths[first]) // 3
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
