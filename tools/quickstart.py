"""`make train`: prepares text and a tokenizer, trains a mixture-of-experts GPT on two processes, and generates text.

Runs commands that a user could type, in order, and skips those with existing results.
"""

import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from math import gcd
from pathlib import Path

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron
from megatron.core.datasets.indexed_dataset import IndexedDataset

IMPORTED_FROM = Path(str(megatron.__file__)).resolve().parents[1]  # a clone, or site-packages
MIN_DOCUMENTS = 3  # one each for training, validation and test
VOCAB_SIZE = 2048
INTERRUPTED = 130  # exit code by shell convention
PROMPT = "def read_lines(path):\n"

NUM_EXPERTS = 8
MODEL = f"""
--num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2
--num-experts {NUM_EXPERTS} --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --moe-expert-rank-capacity-factor 2
--moe-paged-stash --moe-paged-stash-prefetch-layers 0 --moe-paged-stash-buffer-size-factor-cuda 1.15
--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--seq-length 256 --max-position-embeddings 256
"""
SCHEDULE = """
--micro-batch-size 8 --global-batch-size 16 --train-iters 2000
--lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters 30 --weight-decay 0.1 --adam-beta2 0.95
--eval-interval 100 --eval-iters 10 --num-workers 0
--log-interval 20 --save-interval 100 --exit-signal-handler --exit-signal SIGINT
"""


@dataclass(frozen=True)
class Workspace:
    """The files of one corpus: `folder` has the text, the tokenizer, the tokens and the run."""

    folder: Path
    text: Path

    @property
    def tokenizer(self) -> Path:
        """The trained tokenizer."""
        return self.folder / "tokenizer.json"

    @property
    def tokens(self) -> Path:
        """Prefix of the .bin/.idx pair."""
        return self.folder / "tokens_text_document"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints, log and TensorBoard files."""
        return self.folder / "checkpoints"


def main() -> None:
    """Runs every command. Skips one whose result exists, and resumes training."""
    options = parse_options()
    workspace = make_workspace(options.data)
    prepare(workspace)
    train(workspace, minutes=options.minutes, processes=options.processes)
    print(f"\nA continuation of {PROMPT!r} by the trained model:\n", flush=True)
    run("megatron.tools.generate", "--load", workspace.checkpoints, "--prompt", PROMPT, "--max-new-tokens", 120)
    print(flush=True)
    if find_spec("plotly") and find_spec("jinja2"):
        run("megatron.tools.report", workspace.checkpoints)
    print(f"Checkpoints and log: {workspace.checkpoints}\nRun the same command again to train on from here.")


def parse_options() -> argparse.Namespace:
    """Parses the options that `make train` passes on."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", type=Path, help="a .txt or .jsonl file; default: the text that Python ships")
    parser.add_argument("--minutes", type=int, default=4, help="training time of this call (4)")
    parser.add_argument("--processes", type=int, default=2, help="processes that torchrun starts")
    options = parser.parse_args()
    for name in ("minutes", "processes"):
        if vars(options)[name] < 1:
            parser.error(f"--{name} is {vars(options)[name]}: must be at least 1")
    return options


def make_workspace(data: Path | None) -> Workspace:
    """Returns the workspace of this corpus: runs/<name of the corpus> in the current folder."""
    if data is None:
        folder = Path.cwd() / "runs" / "python"
        return Workspace(folder, folder / "text.jsonl")
    if not data.is_file():
        raise SystemExit(f"error: DATA is {data}: there is no such file; give a .txt or .jsonl file")
    return Workspace(Path.cwd() / "runs" / data.stem, data.resolve())


def prepare(workspace: Workspace) -> None:
    """Creates text, tokenizer and tokens."""
    workspace.folder.mkdir(parents=True, exist_ok=True)
    check_source(workspace)
    if not workspace.text.exists():
        step("Writing the documentation and source that Python ships as text")
        run("megatron.tools.python_corpus", "--output", workspace.text)
    if not workspace.tokenizer.exists():
        step(f"Training a tokenizer of up to {VOCAB_SIZE} tokens")
        run(
            *("megatron.tools.train_tokenizer", "--vocab-size", VOCAB_SIZE),
            *("--input", workspace.text, "--output", workspace.tokenizer),
        )
    if not workspace.tokens.with_suffix(".idx").exists():
        step("Turning the text into tokens")
        run(
            *("megatron.tools.preprocess_data", "--input", workspace.text, "--append-eod"),
            *("--output-prefix", workspace.folder / "tokens", "--workers", os.cpu_count() or 1),
            *tokenizer_flags(workspace),
        )


def check_source(workspace: Workspace) -> None:
    """Raises SystemExit if tokens and checkpoints in the folder are of another text with the same name."""
    text = workspace.text
    if text.parent == workspace.folder:
        return
    record = workspace.folder / "source.txt"
    source = f"{text}, {text.stat().st_size} bytes\n"
    if not record.exists() or not workspace.checkpoints.exists():
        # Nothing is trained yet: files of an earlier text are replaced.
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
    """Returns the shares of --split with 3% and 1% of the documents for validation and test, at least one document
    each.
    """
    if num_documents < MIN_DOCUMENTS:
        raise SystemExit(
            f"error: DATA has {num_documents} documents (a .txt is cut at blank lines, after 4 KiB or more): must "
            f"be at least {MIN_DOCUMENTS}, for training, validation and test; give more text"
        )
    valid, test = max(1, round(0.03 * num_documents)), max(1, round(0.01 * num_documents))
    return f"{num_documents - valid - test},{valid},{test}"


def train(workspace: Workspace, *, minutes: int, processes: int) -> None:
    """Trains for `minutes`, from the latest checkpoint if there is one."""
    split = split_of(len(IndexedDataset(str(workspace.tokens)).document_indices) - 1)
    step(f"Training a mixture-of-experts GPT on {processes} processes for {minutes} minutes (Ctrl-C: stop)")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", processes, "-m")
    folders = ("--save", workspace.checkpoints, "--load", workspace.checkpoints)
    flags = (
        *shlex.split(MODEL + SCHEDULE),
        *("--expert-model-parallel-size", gcd(processes, NUM_EXPERTS)),
        *tokenizer_flags(workspace),
        *("--data-path", workspace.tokens, *folders, "--tensorboard-dir", workspace.checkpoints),
        *("--exit-duration-in-mins", minutes, "--split", split),
    )
    run("pretrain_gpt", *flags, "--dry-run", "--world-size", processes)
    run(*torchrun, "pretrain_gpt", *flags)


def tokenizer_flags(workspace: Workspace) -> list[object]:
    """Returns the flags of the tokenizer."""
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", workspace.tokenizer]


def step(title: str) -> None:
    """Prints the next step."""
    print(f"\n== {title}", flush=True)


def run(*command: object) -> None:
    """Runs a Python module with its arguments. If it fails, exits with the same code."""
    path = os.pathsep.join(filter(None, (str(IMPORTED_FROM), os.environ.get("PYTHONPATH"))))
    # Safe path: the current folder may have modules of the same names, for example a clone of Megatron-LM.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen([sys.executable, "-m", *map(str, command)], env=environment)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        # The program received the signal too. It cleans up, and training saves.
        process.wait()
        raise SystemExit(INTERRUPTED) from None
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    main()
