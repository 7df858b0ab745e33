"""Writes the table of docs/plan_accuracy.md, with plans next to published numbers: `python -m tools.write_plan_checks`.

Takes about a minute. Each row names its source. Nothing was measured on these machines.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pretrain_gpt
from megatron.planner.plan import Plan, plan_run
from megatron.planner.work import EXPERTS
from megatron.training.arguments import parse_args, validate_args
from megatron.training.command_line.config_builder import run_config_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "plan_accuracy.md"
BEGIN, END = "<!-- published figures -->\n", "<!-- end of published figures -->\n"
_HEAD = "| what | source | published | planned | error |\n|---|---|---|---|---|\n"
_ALWAYS = "--dry-run --mock-data --train-iters 1 --lr 1e-4 --bf16 --tokenizer-type NullTokenizer"

# Exact numbers of the tensors in the hub's files, which the model cards round.
PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
# Router biases, which have no gradient. They are counted in hub files but not in plans.
_ROUTER_BIASES = {"deepseek-v3": 58 * 256}

# A GPT with 7.50e9 parameters, like the paper's example, in few layers, because model states depend only on their sum.
_ZERO_MODEL = (
    "--num-layers 4 --hidden-size 12288 --num-attention-heads 96 --vocab-size 19449 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 1024"
)
_ZERO = "Rajbhandari et al. 2020 (ZeRO), table 1"
# Gigabytes of parameters, gradients and states by number of ranks: stages 1, 2 and 3.
_ZERO_GIGABYTES = {4: (52.5, 41.3, 30.0), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88), 256: (30.4, 15.4, 0.47)}
_ZERO_FLAGS = (
    "--use-distributed-optimizer --grad-reduce-in-bf16",
    "--optimizer distributed_fused_adam --grad-reduce-in-bf16",
    "--use-torch-fsdp2",
)

_RECOMPUTING = "Korthikanti et al. 2022, table 2"
_WITHOUT_ACT = ", without the output of GELU"
# Heads, hidden size and microbatch of the paper's models; sequence 2048, tensor parallel 8.
_GPTS = {"22B": (64, 6144, 4), "175B": (96, 12288, 1), "530B": (128, 20480, 1), "1T": (160, 25600, 1)}
_SEQUENCE, _TENSOR = 2048, 8
# Bytes per element of a layer that saves no attention scores: the paper's 34, without its 8 for the output of GELU.
_LAYER_BYTES = 34 - 8
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True)
class Row:
    """One published number and its plan. unit: unit of both; 'parameters' are exact. digits: decimals, as published."""

    what: str
    source: str
    published: float
    planned: float
    unit: str
    digits: int = 0

    @property
    def error(self) -> float:
        """Planned value divided by the published value, minus 1."""
        return self.planned / self.published - 1


def rows() -> Iterator[Row]:
    """Yields all comparisons, with new plans."""
    yield from parameter_rows()
    yield from zero_rows()
    yield from activation_rows()
    yield from expert_rows()


def parameter_rows() -> Iterator[Row]:
    """Yields the numbers of parameters of published models, without multi-token prediction layers."""
    for name, published in PARAMETERS.items():
        # Activations are not needed.
        words = "--mtp-num-layers 0 --seq-length 64 --micro-batch-size 1 --global-batch-size 1 --skip-train --load none"
        plan = _plan(f"--model {name} {words}")
        counted = plan.num_parameters + _ROUTER_BIASES.get(name, 0)
        yield Row(name, "model card", published, counted, "parameters")


def zero_rows() -> Iterator[Row]:
    """Yields a rank's model states for the three stages of ZeRO."""
    for ranks, published in _ZERO_GIGABYTES.items():
        for stage, (gigabytes, flags) in enumerate(zip(published, _ZERO_FLAGS, strict=True), start=1):
            states = _plan(f"{_ZERO_MODEL} {flags}", ranks=ranks).stages[0].memory.states.total
            what = f"model states of 7.5e9 parameters, ZeRO-{stage}, {ranks} ranks"
            yield Row(what, _ZERO, gigabytes, states / 1e9, "GB", 1 if gigabytes > 2 else 2)


def activation_rows() -> Iterator[Row]:
    """Yields the activations that a GPT layer saves for backward, in the paper's symbols.

    With sequence parallelism the paper counts 34 s b h / t. 8 of them are the output of GELU, which is not saved here.
    Under full recomputation without sequence parallelism it counts 2 s b h.
    """
    for name, (heads, hidden, batch) in _GPTS.items():
        whole = _SEQUENCE * batch * hidden
        for how, source, published, flags in (
            (
                "sequence parallel, attention recomputed or fused",
                _RECOMPUTING + _WITHOUT_ACT,
                _LAYER_BYTES * whole / _TENSOR,
                "--sequence-parallel",
            ),
            ("all recomputed", _RECOMPUTING, 2 * whole, _FULL),
        ):
            words = _gpt_words(heads, hidden, batch=batch)
            one, two = (
                _plan(f"{words} --num-layers {n} {flags}", ranks=_TENSOR).stages[0].memory.activations.by_kind.total()
                for n in (1, 2)
            )
            what = f"activations of a layer of GPT {name}, tensor parallel 8, {how}"
            yield Row(what, source, published / 1e6, (two - one) / 1e6, "MB", 1)
    yield _interleaved_row()


def _gpt_words(heads: int, hidden: int, *, batch: int) -> str:
    return (
        f"--hidden-size {hidden} --num-attention-heads {heads} --seq-length {_SEQUENCE} --max-position-embeddings "
        f"{_SEQUENCE} --micro-batch-size {batch} --global-batch-size 64 --vocab-size 51200 "
        f"--tensor-model-parallel-size {_TENSOR}"
    )


def _interleaved_row() -> Row:
    """Returns the activations of the first of 8 stages with 3 chunks each.

    It saves 1 + 7 / 24 times a microbatch's activations of all layers.
    """
    heads, hidden, batch = _GPTS["175B"]
    layout = (
        "--sequence-parallel --num-layers 96 --pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 3"
    )
    stage = _plan(f"{_gpt_words(heads, hidden, batch=batch)} {layout}", ranks=8 * _TENSOR).stages[0]
    published = _LAYER_BYTES * _SEQUENCE * batch * hidden / _TENSOR * 96 * (1 + 7 / 24)
    kinds = stage.memory.activations.by_kind
    planned = kinds.total() - kinds["embedding"]
    what = "activations of the first stage of GPT 175B, tensor 8, pipeline 8, virtual 3"
    source = "Korthikanti et al. 2022, section 4.2.3" + _WITHOUT_ACT
    return Row(what, source, published / 1e9, planned / 1e9, "GB", 2)


def expert_rows() -> Iterator[Row]:
    """Yields the activations of DeepSeek-V3's routed experts.

    Megatron-Core's paged stash stores the input of each routed row, gate and up, and the output of the activation:
    2 h + 6 f bytes in bf16. The last, 2 f bytes, is not saved here.
    """
    tokens, experts_of_token, hidden, ffn, layers = 4096, 8, 7168, 2048, 58
    words = f"--model deepseek-v3 --mtp-num-layers 0 --seq-length {tokens} --micro-batch-size 1 --global-batch-size 1"
    kept = _plan(words).stages[0].memory.activations.by_kind[EXPERTS]
    published = tokens * experts_of_token * (2 * hidden + 4 * ffn) * layers
    what = "activations of DeepSeek-V3's experts, 4096 tokens, 58 layers"
    source = "Megatron-Core, tensors in its paged stash, without the output of the activation"
    yield Row(what, source, published / 1e9, kept / 1e9, "GB", 2)


def table(found: list[Row]) -> str:
    """Formats the rows as a Markdown table."""
    return _HEAD + "".join(map(_line, found))


def _line(row: Row) -> str:
    published, planned = (f"{value:,.{row.digits}f} {row.unit}" for value in (row.published, row.planned))
    error = "0" if row.planned == row.published else f"{100 * row.error:+.2f} %"
    return f"| {row.what} | {row.source} | {published} | {planned} | {error} |\n"


def documented() -> str:
    """Returns the table that is currently in the page."""
    found = re.search(f"{BEGIN}(.*){END}", PAGE.read_text(), re.DOTALL)
    if found is None:
        raise ValueError(f"{PAGE} has no lines {BEGIN.strip()} and {END.strip()}")
    return found[1]


def _plan(words: str, *, ranks: int = 1) -> Plan:
    run_config = run_config_of(
        validate_args(parse_args(argv=[*words.split(), *_ALWAYS.split(), "--world-size", str(ranks)]))
    )
    return plan_run(run_config, pretrain_gpt.model_provider, forward_step_func=pretrain_gpt.forward_step)


def main() -> None:
    """Writes the table to the page."""
    new = table(list(rows()))
    PAGE.write_text(PAGE.read_text().replace(BEGIN + documented() + END, BEGIN + new + END))
    print(new, end="")


if __name__ == "__main__":
    main()
