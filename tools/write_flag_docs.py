"""Writes docs/flags.md and the tests' frozen flag surface from the flag table: `python -m tools.write_flag_docs`.

megatron/training/command_line/ defines the flags.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from megatron.training.command_line.checkpoint_rules import on_load_rules
from megatron.training.command_line.flags import Flag, FlagState, FlagTable, flag_table, refusal, text_of_value

ROOT = Path(__file__).resolve().parents[1]
DOCS_FILE = ROOT / "docs" / "flags.md"
SURFACE_FILE = ROOT / "tests" / "structure" / "flag_surface.txt"

INTRODUCTION = """\
# Flags

Written by `python -m tools.write_flag_docs`; do not edit.

Every flag may be given on the command line (`--flag value` or `--flag=value`, never abbreviated) or in the YAML file of
`--config`, under its *name in files*. The command line takes precedence over the file, the file over the preset of
`--model`, and the preset over defaults. The column *on load* names the rule that decides between the command line and
a checkpoint; [checkpoints.md](checkpoints.md#which-arguments-come-from-the-checkpoint) describes the rules.
`--print-config` prints the result as such a file. Of {total} known flags, {works} work, {no_effect} are accepted and
change nothing, {default_only} are rejected unless they are set to their defaults, and {refused} are rejected.
"""

# Kinds of Megatron-LM training configurations that are unsupported, with the flags that identify them.
CONFIGURATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gated delta net and other linear attention", ("--experimental-attention-variant", "--linear-attention-freq")),
    ("sparse attention with an indexer (DSA)", ("--dsa-indexer-topk",)),
    ("Mamba and hybrid models", ("--is-hybrid-model", "--hybrid-layer-pattern", "--hybrid-override-pattern")),
    ("FP4", ("--fp4-format",)),
    ("experts in a latent space", ("--moe-latent-size",)),
    ("hyper-connections", ("--enable-mhc-connections",)),
    ("layers of different shapes", ("--heterogeneous-layers-config-path",)),
    ("weights from another checkpoint format", ("--ckpt-convert-format",)),
    ("Megatron-FSDP", ("--use-megatron-fsdp",)),
    ("reinforcement learning", ("--perform-rl-step",)),
    ("inference", ("--inference-dynamic-batching",)),
)


def flags_page(table: FlagTable) -> str:
    """Returns the text of docs/flags.md."""
    counts = {state.name.lower(): len(table.in_state(state)) for state in FlagState}
    lines = [INTRODUCTION.format(total=len(table.flags), **counts), "## Working flags", ""]
    for title, flags in table.working_groups().items():
        lines += [f"### {title}", "", "| flag | name in files | value | default | on load | meaning |"]
        lines.append("|---|---|---|---|---|---|")
        lines += [_working_row(flag) for flag in flags]
        lines.append("")
    lines += _configurations_section(table)
    lines += _no_effect_section(table)
    lines += _refused_section(
        table, FlagState.DEFAULT_ONLY, title="Flags that are rejected unless given their defaults"
    )
    lines += _refused_section(table, FlagState.REFUSED, title="Rejected flags")
    return "\n".join(lines)


def surface(table: FlagTable) -> str:
    """Returns one line per flag, sorted: name, type, default and state. Guards against accidental changes."""
    return "".join(sorted(_surface_line(flag) for flag in table.flags))


def _surface_line(flag: Flag) -> str:
    kind = flag.type_name if flag.nargs is None else f"{flag.type_name}[{flag.nargs}]"
    choices = ",".join(flag.choice_names()) if flag.state is FlagState.WORKS else ""
    values = f"{kind} {{{choices}}}" if choices else kind
    names = " ".join(flag.flags)
    return f"{names} | {values} | {text_of_value(flag.default)!r} | {flag.state.value}\n"


def _working_row(flag: Flag) -> str:
    names = ", ".join(f"`{word}`" for word in flag.flags)
    values = ", ".join(f"`{name}`" for name in flag.choice_names()) or (
        "" if flag.constant is not None else flag.type_name
    )
    default = "" if flag.default is None or flag.constant is not None else f"`{text_of_value(flag.default)}`"
    help_text = flag.help.replace("|", "\\|").replace("*", "\\*")
    rule = on_load_rules()[flag.dest].value
    return f"| {names} | `{flag.dest}` | {values} | {default} | {rule} | {help_text} |"


def _configurations_section(table: FlagTable) -> list[str]:
    by_name = {name: flag for flag in table.flags for name in flag.flags}
    lines = [
        "## Configurations that cannot be trained",
        "",
        "Megatron-LM's repository contains configurations of training runs for its tests. BERT, T5, retrieval and",
        "vision configurations require programs other than `pretrain_gpt.py`. GPT configurations with these flags fail",
        "with an error that names the flags. Earlier versions accepted flags marked \\* and trained a different model.",
        "",
        "| configurations with | flags | why, and what to do |",
        "|---|---|---|",
    ]
    for title, names in CONFIGURATIONS:
        flags = [by_name[name] for name in names]
        shown = ", ".join(
            f"`{flag.flags[0]}`" + ("\\*" if flag.state is FlagState.DEFAULT_ONLY else "") for flag in flags
        )
        found = dict.fromkeys(refusal(flag) for flag in flags)
        reasons = [one for one in found if not any(one != other and other.startswith(one) for other in found)]
        lines.append(f"| {title} | {shown} | {'; '.join(reasons)} |")
    return [*lines, ""]


def _no_effect_section(table: FlagTable) -> list[str]:
    lines = ["## Flags that are accepted without an effect", ""]
    lines += ["They cannot change any result of a run. One notice names the flags that were given. Each flag", ""]
    by_reason: dict[str, list[Flag]] = defaultdict(list)
    for flag in table.in_state(FlagState.NO_EFFECT):
        by_reason[refusal(flag)].append(flag)
    lines += [f"- {reason}: {_names(flags)}" for reason, flags in by_reason.items()]
    return [*lines, ""]


def _refused_section(table: FlagTable, state: FlagState, *, title: str) -> list[str]:
    by_reason: dict[str, list[Flag]] = defaultdict(list)
    for flag in table.in_state(state):
        by_reason[refusal(flag)].append(flag)
    lines = [f"## {title}", ""]
    lines += [f"- {_names(flags)}: {reason}" for reason, flags in by_reason.items()]
    return [*lines, ""]


def _names(flags: Iterable[Flag]) -> str:
    return ", ".join(f"`{flag.flags[0]}`" for flag in flags)


def main() -> None:
    DOCS_FILE.parent.mkdir(exist_ok=True)
    DOCS_FILE.write_text(flags_page(flag_table()), encoding="ascii")
    SURFACE_FILE.write_text(surface(flag_table()), encoding="ascii")


if __name__ == "__main__":
    main()
