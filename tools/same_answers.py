"""Checks that a change keeps flags, configurations and scripts as they are: `python tools/same_answers.py BASE_COMMIT`.

Asks two versions the same questions. The base is that commit, and the head is this working tree or the commit of
--head. The questions are those of tools/gate/questions.py: values and errors of every flag and configuration field,
complete command lines, and scripts that change arguments. Exit status: 0 if all answers are equal, 1 if not, 2 if a
commit cannot be read.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(ROOT))

from megatron.tools.gate.jobs import ends_on_signals, export  # noqa: E402
from megatron.tools.gate.questions import KINDS, questions_of  # noqa: E402

DRIVER = ROOT / "tools" / "gate" / "answers.py"
MEGATRON_FLAGS = ROOT.parent / "shared" / "flags.json"
ABSENT = "(no answer)"
Answers = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Asks both versions, prints the differences and returns the exit status."""
    options = parse_options(argv)
    started_at = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(ends_on_signals())
        folder = options.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="same_answers_")))
        try:
            base = export(options.base, folder / "trees" / "base")
            head = export(options.head, folder / "trees" / "head") if options.head else ROOT
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        catalog = ask(base, folder / "catalog")
        num_different = 0
        for kind in options.kinds or KINDS:
            questions = questions_of(kind, catalog, tree=base, megatron_flags=options.megatron_flags)
            (folder / f"{kind}.questions").write_text(
                json.dumps({"catalog": catalog, "questions": questions}), encoding="utf-8"
            )
            stored = options.cache / f"{key_of(options.base, folder / f'{kind}.questions')}.{kind}.json"
            answers = ask_both(base, head, folder, kind=kind, stored=stored)
            num_different += report(kind, questions, *answers, limit=options.limit)
    print(f"{num_different} answers differ from {options.base} ({(time.monotonic() - started_at) / 60:.1f} minutes)")
    return int(num_different > 0)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", metavar="BASE_COMMIT", help="reference version")
    parser.add_argument("--head", metavar="COMMIT", help="version to check; default: the files of this working tree")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="kinds of questions to ask; default: all")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="differences to print of each kind")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FOLDER",
        default=Path(tempfile.gettempdir(), "same_answers"),
        help="folder in which answers of base commits are stored for the next call; default: %(default)s",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="new folder for the answers, kept afterwards")
    parser.add_argument(
        "--megatron-flags",
        type=Path,
        metavar="FILE",
        default=MEGATRON_FLAGS if MEGATRON_FLAGS.exists() else None,
        help="JSON file of Megatron-LM's flags, whose choices are tried too; default: ../shared/flags.json, if any",
    )
    options = parser.parse_args(argv)
    if options.keep is not None:
        options.keep = options.keep.resolve()
        if options.keep.exists():
            parser.error(f"--keep is {options.keep}: the folder already exists")
        options.keep.mkdir(parents=True)
    return options


def key_of(commit: str, questions: Path) -> str:
    """Returns a name for the answers of a commit: they follow from the commit, the questions and the driver."""
    command = ["git", "rev-parse", f"{commit}^{{commit}}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    content = b"".join([found, questions.read_bytes(), DRIVER.read_bytes(), sys.version.encode()])
    return hashlib.sha256(content).hexdigest()[:16]


def ask_both(base: Path, head: Path, folder: Path, *, kind: str, stored: Path) -> tuple[Answers, Answers]:
    """Asks both trees the questions of a kind at the same time. Reads or writes the base's answers in `stored`."""
    questions = folder / f"{kind}.questions"
    is_known = stored.exists()
    started = start(head, folder / f"{kind}.head", questions=questions)
    if not is_known:
        answers = ask(base, folder / f"{kind}.base", questions=questions)
        stored.parent.mkdir(parents=True, exist_ok=True)
        unfinished = stored.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(answers), encoding="utf-8")
        unfinished.rename(stored)  # atomic: another call may read the file
    return json.loads(stored.read_text(encoding="utf-8")), result_of(started, folder / f"{kind}.head")


def ask(tree: Path, place: Path, *, questions: Path | None = None) -> Any:
    """Returns the answers of one tree, or its catalog if there are no questions. place: path of files to write."""
    return result_of(start(tree, place, questions=questions), place)


def start(tree: Path, place: Path, *, questions: Path | None) -> "subprocess.Popen[bytes]":
    """Starts the driver with the code of one tree. It writes `place`.json and prints to `place`.txt."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    # -P keeps the driver's folder off the path.
    command = [sys.executable, "-P", str(DRIVER), str(tree), f"{place}.json", *([str(questions)] if questions else [])]
    with Path(f"{place}.txt").open("wb") as output:
        return subprocess.Popen(command, cwd=place.parent, env=environment, stdout=output, stderr=output)


def result_of(process: "subprocess.Popen[bytes]", place: Path) -> Any:
    """Waits for a driver and returns what it has written. Raises RuntimeError with its output if it failed."""
    if process.wait():
        written = Path(f"{place}.txt").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{place.name} ended with status {process.returncode}:\n{written[-3000:]}")
    return json.loads(Path(f"{place}.json").read_text(encoding="utf-8"))


def report(kind: str, questions: Mapping[str, Any], base: Answers, head: Answers, *, limit: int) -> int:
    """Prints the differences of a kind, at most `limit` of them, and returns how many there are."""
    different = {name: list(differences(base[name], head[name])) for name in questions if base[name] != head[name]}
    advice = {
        name for name in different if kind == "fields" and is_same_refusal(questions[name], base[name], head[name])
    }
    num_different = len(different) - len(advice)
    print(f"{kind}: {len(questions)} questions, {num_different} answers differ")
    for name in [name for name in different if name not in advice][:limit]:
        print(f"  {name}")
        for line in different[name][:8]:
            print(f"    {line}")
    if advice:
        print(f"  {len(advice)} fields are refused with another advice, for example:")
        for name in sorted(advice)[:3]:
            print("".join(f"    {line}\n" for line in different[name]), end="")
    return num_different


def is_same_refusal(question: Mapping[str, Any], base: Answers, head: Answers) -> bool:
    """Returns whether both refuse a field with messages that name the field and its value."""
    named = [question["name"], repr(question["value"])]
    return all("error" in answer and all(word in answer["error"] for word in named) for answer in (base, head))


def differences(base: Any, head: Any, path: str = "") -> Iterator[str]:
    """Describes each part in which two answers differ: where it is, and its texts."""
    if isinstance(base, dict) and isinstance(head, dict):
        for name in [*base, *(name for name in head if name not in base)]:
            yield from differences(base.get(name, ABSENT), head.get(name, ABSENT), f"{path}/{name}")
    elif isinstance(base, list) and isinstance(head, list) and len(base) == len(head):
        for index, (one, other) in enumerate(zip(base, head, strict=True)):
            yield from differences(one, other, f"{path}/{index}")
    elif isinstance(base, str) and isinstance(head, str) and "\n" in base and "\n" in head:
        ours, theirs = base.splitlines(), head.splitlines()
        yield from (f"{path}: only in base: {line}" for line in ours if line not in theirs)
        yield from (f"{path}: only in head: {line}" for line in theirs if line not in ours)
        if sorted(ours) == sorted(theirs):
            yield f"{path}: lines in another order"
    elif base != head or type(base) is not type(head):
        yield f"{path}: {base!r} -> {head!r}"


if __name__ == "__main__":
    sys.exit(main())
