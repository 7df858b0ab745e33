"""Which factors a run of static experts needs, from a routing trace: `python tools/stash_factors.py FILE
--expert-model-parallel-size 8 --pipeline-model-parallel-size 4`.

FILE is what another run wrote with --record-routing, in any layout. The micro-batch of a rank stays the recorded one:
ranks that share experts take neighbours' tokens, and those of later micro-batches if fewer ranks were recorded.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from megatron.core.pipeline_parallel.expansion import expand  # noqa: E402
from megatron.core.pipeline_parallel.schedule import Pipeline, stage_orders  # noqa: E402
from megatron.core.transformer.moe.paged_stash import EventKind  # noqa: E402
from megatron.core.transformer.moe.paged_stash.arithmetic import resident_groups  # noqa: E402
from megatron.core.transformer.moe.paged_stash.peak_factors import factor_at, rounded_up  # noqa: E402
from megatron.core.transformer.moe.paged_stash.stash_order import layer_of  # noqa: E402
from megatron.core.transformer.moe.paged_stash.step_needs import StepNeeds, step_needs  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.training.command_line.config_builder import with_flag_names  # noqa: E402
from megatron.training.command_line.registry import flag_table  # noqa: E402
from megatron.training.expert_schedule import stash_events  # noqa: E402
from megatron.training.routing_trace import RoutingHeader, RoutingStep, read_routing  # noqa: E402


@dataclass(frozen=True)
class Layout:
    """The run to be: num_stages x num_chunks parts of the model; expert_ranks, each of expert_shards, share experts.

    num_microbatches: of a step, at most; None: as many as were recorded. page_size: tokens of a page.
    """

    expert_ranks: int = 1
    expert_shards: int = 1
    num_stages: int = 1
    num_chunks: int = 1
    num_microbatches: int | None = None
    page_size: int = 64


@dataclass(frozen=True)
class Demand:
    """What one step needed, over the balanced case: rows of a rank, rows from one rank to another, pages.

    The balanced case of pages is the longest step of the trace, as pools are planned for the longest of a run.
    """

    rows: float
    pairs: float
    pages: float


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the factors; returns the exit status, 2 for a trace that cannot be read or does not fit the layout."""
    options = _parser().parse_args(argv)
    layout = Layout(
        expert_ranks=options.expert_model_parallel_size,
        expert_shards=options.expert_tensor_parallel_size,
        num_stages=options.pipeline_model_parallel_size,
        num_chunks=options.num_virtual_stages_per_pipeline_rank,
        num_microbatches=options.num_microbatches,
        page_size=options.moe_paged_stash_page_size,
    )
    try:
        wrong = [name for name, value in vars(options).items() if isinstance(value, int) and value < 1]
        if wrong:
            flag = f"--{wrong[0].replace('_', '-')}"
            raise ValueError(f"{flag} is {vars(options)[wrong[0]]}: must be at least 1")
        if not 0 < options.quantile <= 1:
            raise ValueError(f"--quantile is {options.quantile:g}: must be above 0 and at most 1")
        print(table(demands(read_routing(options.trace), layout), layout, quantile=options.quantile))
    except OSError as error:
        print(f"error: {options.trace}: {error.strerror or error}: give what --record-routing wrote", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def demands(steps: Iterable[RoutingStep], layout: Layout) -> list[Demand]:
    """What each step would have needed in that layout. Raises ValueError where the trace does not fit it."""
    planners: list[_Planner] = []
    counted = []
    for step in steps:
        planner = next((one for one in planners if one.header == step.header), None)
        if planner is None:
            planner = _planner(step.header, layout)
            planners.append(planner)
        counted.append((planner, planner.counted(step)))
    # Only now every length is known: batches may grow.
    return [planner.demand(counts) for planner, counts in counted]


def table(found: Sequence[Demand], layout: Layout, *, quantile: float) -> str:
    """The quantile, the median and the most of each factor, by the flag that it is for."""
    if not found:
        raise ValueError("the trace has no step yet")
    rows = [("--moe-expert-rank-capacity-factor", [one.rows for one in found])]
    if layout.expert_ranks * layout.expert_shards > 1:
        most = [max(one.rows, one.pairs) for one in found]
        rows = [(f"{rows[0][0]}, allgather", rows[0][1]), (f"{rows[0][0]}, alltoall", most)]
    rows.append(("--moe-paged-stash-buffer-size-factor-cuda", [one.pages for one in found]))
    width = max(len(name) for name, _ in rows)
    lines = [f"{f'of {len(found):,} steps':{width}}  {f'p{100 * quantile:g}':>7}  {'median':>7}  {'most':>7}"]
    for name, peaks in rows:
        figures = (rounded_up(factor_at(share, peaks)) for share in (quantile, 0.5, 1.0))
        lines.append("  ".join([f"{name:{width}}", *(f"{one:7.2f}" for one in figures)]))
    return "\n".join(lines)


class _Counts(NamedTuple):
    """Of one step: most rows of a rank, most from one rank to another, pages of each stage's neediest rank."""

    rows: int
    pairs: int
    pages: list[int]


def _planner(header: RoutingHeader, layout: Layout) -> "_Planner":
    try:
        return _Planner(header, layout)
    except ValueError as error:
        message = with_flag_names(str(error), flag_table())
        raise ValueError(f"the recorded model in that layout: {message}") from None


class _Planner:
    """Steps of one header in the layout to be."""

    def __init__(self, header: RoutingHeader, layout: Layout) -> None:
        self.header, self._layout = header, layout
        self._sharing = layout.expert_ranks * layout.expert_shards
        self._config = _config_of(header, layout)
        self._balanced_rows = header.tokens_of_microbatch * header.topk * layout.expert_shards
        self._needs: dict[int, list[StepNeeds]] = {}
        num_parts = layout.num_stages * layout.num_chunks
        size = header.num_layers // num_parts
        parts = [[layer for layer in header.layers if (layer - 1) // size == part] for part in range(num_parts)]
        self._layers = [parts[stage :: layout.num_stages] for stage in range(layout.num_stages)]

    def counted(self, step: RoutingStep) -> _Counts:
        pairs = {layer: self._rows_of_pairs(counts) for layer, counts in step.tokens.items()}
        rows = {layer: of_pairs.sum(axis=2) for layer, of_pairs in pairs.items()}
        num_microbatches = len(next(iter(rows.values())))
        return _Counts(
            rows=max(int(one.max()) for one in rows.values()),
            pairs=max(int(one.max()) for one in pairs.values()),
            pages=[peak_of_ranks(needs, rows) for needs in self.needs(num_microbatches)],
        )

    def demand(self, counts: _Counts) -> Demand:
        """Of a step once all have been counted."""
        balanced = [max(needs.balanced_pages for needs in of_stage) for of_stage in zip(*self._needs.values())]
        return Demand(
            rows=counts.rows / self._balanced_rows,
            pairs=counts.pairs * self._sharing / self._balanced_rows,
            pages=max(pages / max(1, of_stage) for pages, of_stage in zip(counts.pages, balanced)),
        )

    def needs(self, num_microbatches: int) -> list[StepNeeds]:
        """Of each stage, in a step of so many micro-batches."""
        if num_microbatches not in self._needs:
            orders = stage_orders(Pipeline(self._layout.num_stages, self._layout.num_chunks), num_microbatches)
            # No pass has more rows than all tokens bring.
            most = self._balanced_rows * self._sharing
            self._needs[num_microbatches] = [
                step_needs(
                    self._config,
                    stash_events(expand(order, layers)),
                    max_rows=most,
                    balanced_rows=self._balanced_rows,
                )
                for order, layers in zip(orders, self._layers)
            ]
        return self._needs[num_microbatches]

    def _rows_of_pairs(self, tokens: np.ndarray) -> np.ndarray:
        """tokens: [M, R, E], int64 -> rows of each pass [M', groups of ranks, from a rank, to a rank], int64."""
        num_ranks, sharing = tokens.shape[1], self._sharing
        if num_ranks % sharing and sharing % num_ranks:
            raise ValueError(
                f"{sharing} ranks are to share the experts and {num_ranks} of a stage were recorded: one must be a "
                "multiple of the other"
            )
        num_passes = len(tokens) * num_ranks // sharing if sharing > num_ranks else len(tokens)
        num_passes = min(num_passes, self._layout.num_microbatches or num_passes)
        if num_passes == 0:
            raise ValueError(
                f"{sharing} ranks are to share the experts and a step has {len(tokens)} micro-batches of {num_ranks} "
                "ranks: too few to fill one pass"
            )
        groups = max(1, num_ranks // sharing)
        shards = tokens.reshape(-1, tokens.shape[2])[: num_passes * groups * sharing]
        by_rank = shards.reshape(num_passes, groups, sharing, self._layout.expert_ranks, -1)
        summed: np.ndarray = by_rank.sum(axis=-1)
        return summed


def peak_of_ranks(needs: StepNeeds, rows: dict[int, np.ndarray]) -> int:
    """StepNeeds.pages of all ranks at once, of the one that needs the most; rows: layer -> [M, ...ranks], int64."""
    resident = resident_groups(needs.events)
    held = np.zeros_like(next(iter(rows.values()))[0])
    peak = 0
    for event in needs.events:
        if event.group in resident:
            continue
        live = rows[layer_of(event.name)][event.instance]
        pages = sum(-(-live * spec.row_bytes // needs.page_bytes) for spec in needs.specs)
        held = held + pages if event.kind is EventKind.FORWARD else held - pages
        peak = max(peak, int(held.max()))
    return peak


def _config_of(header: RoutingHeader, layout: Layout) -> TransformerConfig:
    """As much of a model's configuration as sizes follow from. Raises ValueError where it cannot be cut like that."""
    if layout.num_chunks > 1 and layout.num_stages == 1:
        raise ValueError(
            f"--pipeline-model-parallel-size is 1: --num-virtual-stages-per-pipeline-rank {layout.num_chunks} needs at "
            "least 2"
        )
    num_parts = layout.num_stages * layout.num_chunks
    if header.num_layers % num_parts:
        raise ValueError(
            f"it has {header.num_layers} layers: must be a multiple of --pipeline-model-parallel-size x "
            f"--num-virtual-stages-per-pipeline-rank ({num_parts})"
        )
    return TransformerConfig(
        num_layers=header.num_layers,
        hidden_size=header.hidden_size,
        num_attention_heads=1,
        num_moe_experts=header.num_experts,
        moe_router_topk=header.topk,
        moe_ffn_hidden_size=header.moe_ffn_hidden_size,
        moe_grouped_gemm=True,
        gated_linear_unit=header.gated_linear_unit,
        add_bias_linear=False,
        bf16=header.itemsize == 2,
        expert_model_parallel_size=layout.expert_ranks,
        expert_tensor_parallel_size=layout.expert_shards,
        pipeline_model_parallel_size=layout.num_stages,
        virtual_pipeline_model_parallel_size=layout.num_chunks if layout.num_chunks > 1 else None,
        moe_expert_rank_capacity_factor=1.0,
        moe_paged_stash=True,
        moe_paged_stash_page_size=layout.page_size,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", metavar="FILE", help="what --record-routing wrote")
    for name, what in (
        ("expert-model-parallel-size", "ranks that share the experts"),
        ("expert-tensor-parallel-size", "ranks that share each expert"),
        ("pipeline-model-parallel-size", "stages"),
        ("num-virtual-stages-per-pipeline-rank", "chunks of a stage"),
    ):
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{what} (default: 1)")
    parser.add_argument("--num-microbatches", type=int, metavar="N", help="of a step (default: all that were recorded)")
    parser.add_argument("--moe-paged-stash-page-size", type=int, default=64, metavar="N", help="as in the run (64)")
    parser.add_argument(
        "--quantile", type=float, default=0.999, metavar="Q", help="share of the steps that fit (default: 0.999)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
