"""Writes the table of docs/cuda_graphs.md, from the results of the linter: `python -m tools.write_capture_table`.

The table shows the configurations that CUDA graphs can capture. The program starts the required processes and takes
about a minute. capture_configurations.py lists the configurations, and check_capture.py checks a command line.
"""

import json
import os
import re
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from megatron.tools.asked_graphs import asked_of, refusals_of_flags
from megatron.tools.capture_configurations import CONFIGURATIONS, Configuration, Flags, words_of
from megatron.tools.check_capture import breaks_of
from megatron.tools.ports import free_port
from megatron.training.arguments import parse_args

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cuda_graphs.md"
BEGIN, END = "<!-- capture table -->\n", "<!-- end of capture table -->\n"
_HEAD = """\
| configuration | flags | `full_iteration` | `local` | why not, and what instead |
|---|---|---|---|---|
"""
# Parts after attention, larger ones first, because if one can be captured, smaller ones are skipped.
_FEED_FORWARD = {False: (("mlp",),), True: (("moe",), ("moe_router", "moe_preprocess"), ("moe_router",))}
_OF_FLAGS = re.compile(r"--[\w-]+ is .* and --cuda-graph-impl is \w+: (.*)")
_OF_LINE = re.compile(r"(.+?) at \S*?(\w+\.py):\d+ \(.*\)(?: in [\w ]+)?: (.*)")


@dataclass(frozen=True)
class Verdict:
    """The linter's and the flag checks' results for one configuration.

    whole: reasons against a graph of the whole iteration. modules: parts of a layer that `local` can capture. parts:
    reasons against the other parts.
    """

    whole: list[str]
    modules: list[str]
    parts: list[str]


def measure(names: Collection[str]) -> dict[str, Verdict]:
    """Checks the named configurations, with this process's group as ranks. Collective."""
    return {name: _verdict(CONFIGURATIONS[name]) for name in names}


def names_of(ranks: int) -> list[str]:
    """Returns the names of the configurations with this number of ranks."""
    return [name for name, one in CONFIGURATIONS.items() if one.ranks == ranks]


def _verdict(configuration: Configuration) -> Verdict:
    whole = _breaks(configuration, {})
    modules: list[str] = []
    parts: list[str] = []
    if "optimizer-cuda-graph" in configuration.flags or configuration.needs_gpu:
        # Supports only whole-iteration graphs, or cannot run on the CPU.
        return Verdict(whole, modules, parts)
    for alternatives in ((("attn",),), _FEED_FORWARD["num-experts" in configuration.base]):
        for alternative in alternatives:
            refused = _refused(configuration, _local(*alternative))
            if not refused:
                modules += alternative
                break
            parts += refused
    if modules and _breaks(configuration, _local(*modules)):
        found = {module: _breaks(configuration, _local(module)) for module in modules}
        modules = [module for module, breaks in found.items() if not breaks]
        parts += [one for breaks in found.values() for one in breaks]
    return Verdict(whole, modules, list(dict.fromkeys(parts)))


def _local(*modules: str) -> Flags:
    return {"cuda-graph-impl": "local", "cuda-graph-modules": list(modules)}


def _breaks(configuration: Configuration, graph: Flags) -> list[str]:
    if configuration.needs_gpu:
        return _refused(configuration, graph)
    try:
        return breaks_of(configuration.argv + words_of(graph))
    except ValueError as error:
        # The flags contradict each other, which every rank detects.
        return _refused(configuration, graph) or [str(error)]


def _refused(configuration: Configuration, graph: Flags) -> list[str]:
    asked, rest = asked_of(configuration.argv + words_of(graph))
    return refusals_of_flags(parse_args(argv=rest), asked)


def table(verdicts: dict[str, Verdict]) -> str:
    """Returns the part of the page between the two marks."""
    return BEGIN + _HEAD + "".join(row(name, verdicts[name]) for name in CONFIGURATIONS) + END


def _shown(flag: str, value: Any) -> str:
    """Formats a flag of a configuration. A value of None removes the flag of its base."""
    return f"without `--{flag}`" if value is None else f"`{' '.join(words_of({flag: value}))}`"


def row(name: str, verdict: Verdict) -> str:
    """Returns the table row of a configuration."""
    configuration = CONFIGURATIONS[name]
    flags = " ".join(_shown(flag, value) for flag, value in configuration.flags.items())
    whole = "no" if verdict.whole else "?" if configuration.needs_gpu else "yes"
    modules = "?" if configuration.needs_gpu else " ".join(f"`{module}`" for module in verdict.modules) or "no"
    why = re.sub(r"--[a-z][\w-]*", r"`\g<0>`", _reasons(verdict))
    return f"| {name} | {flags} | {whole} | {modules} | {why} |\n"


def _reasons(verdict: Verdict) -> str:
    whole, parts = _shortened(verdict.whole), _shortened(verdict.parts)
    if not parts or parts.partition(";")[0] == whole.partition(";")[0]:
        return whole
    return f"{whole}<br>" * bool(whole) + f"`local`: {parts}"


def _shortened(found: Sequence[str]) -> str:
    """Shortens a flag rejection to the first operation that the linter found, or to the flag and its reason."""
    if not found:
        return ""
    lines = [match for match in map(_OF_LINE.fullmatch, found) if match is not None]
    where = f"`{lines[0][1]}` in {lines[0][2]}" if lines else ""
    refused = _OF_FLAGS.fullmatch(found[0])
    if refused is not None:
        return refused[1] + f" ({where})" * bool(where)
    return f"{where}: {lines[0][3]}" if lines else found[0]


def documented(page: str) -> str:
    """Returns the part of the page that this tool writes."""
    return BEGIN + page.partition(BEGIN)[2].partition(END)[0] + END


def main() -> None:
    verdicts: dict[str, Verdict] = {}
    for ranks in sorted({one.ranks for one in CONFIGURATIONS.values()}):
        verdicts |= _measured_by_ranks(ranks)
    page = PAGE.read_text(encoding="ascii")
    PAGE.write_text(page.replace(documented(page), table(verdicts)), encoding="ascii")


def _measured_by_ranks(ranks: int) -> dict[str, Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verdicts.json"
        multiprocessing.spawn(_measure_on_rank, args=((ranks, free_port(), path),), nprocs=ranks)
        found = json.loads(path.read_text(encoding="utf-8"))
    return {name: Verdict(**verdict) for name, verdict in found.items()}


def _measure_on_rank(rank: int, job: tuple[int, int, Path]) -> None:
    ranks, port, path = job
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    verdicts = measure(names_of(ranks))
    if rank == 0:
        path.write_text(json.dumps({name: asdict(verdict) for name, verdict in verdicts.items()}), encoding="utf-8")


if __name__ == "__main__":
    main()
