"""Computes the number of layers of each pipeline stage and chunk from the settings.

Parts are numbered as in pipeline_placement.py. transformer_block.py builds them.
"""

import re
from itertools import accumulate

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_placement import configured_placement

_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)|([A-Za-z|])\*(\d+)|\(([^()]*)\)(?!\*)")


def layers_per_part(config: ModelParallelConfig, *, num_layers: int) -> list[int]:
    """Returns the number of layers of each part: [stages x chunks]. Raises ValueError if no valid split exists."""
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    accounted = config.account_for_embedding_in_pipeline_split or config.account_for_loss_in_pipeline_split
    if config.pipeline_model_parallel_layout is not None:
        if first or last or accounted:
            raise ValueError(
                f"pipeline_model_parallel_layout is {config.pipeline_model_parallel_layout!r}: it already "
                "determines the layers of every stage, so remove the other settings of the split"
            )
        return _from_layout(config.pipeline_model_parallel_layout, stages * chunks, num_layers=num_layers)
    if first or last:
        if accounted:
            raise ValueError(
                "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage already determine the "
                "ends of the pipeline: remove account_for_embedding_in_pipeline_split and "
                "account_for_loss_in_pipeline_split"
            )
        return _with_given_ends(config, num_layers=num_layers)
    return _evenly(config, num_layers=num_layers)


def validate_pipeline_split(config: ModelParallelConfig, *, num_layers: int) -> None:
    """Raises ValueError if no valid split exists, or if microbatch_group_size_per_vp_stage is too small."""
    layers_per_part(config, num_layers=num_layers)
    group_size, stages = config.microbatch_group_size_per_vp_stage, config.pipeline_model_parallel_size
    if group_size is not None and group_size < stages:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage is {group_size}: must be at least pipeline_model_parallel_size "
            f"({stages})"
        )


def layer_offset(counts: list[int], part: int) -> int:
    """Returns the number of layers in the parts that precede `part`."""
    return [0, *accumulate(counts)][part]


def mtp_layers_in_layout(layout: str) -> int:
    """Returns the number of multi-token prediction layers (m) in a layout. Raises ValueError for an invalid layout."""
    return _parts_of_layout(layout)[-1].count("m")


def num_parts_in_layout(layout: str) -> int:
    """Returns the number of parts, stages x chunks, of a layout. Raises ValueError for an invalid layout."""
    return len(_parts_of_layout(layout))


def _evenly(config: ModelParallelConfig, *, num_layers: int) -> list[int]:
    parts = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    embedding, loss = config.account_for_embedding_in_pipeline_split, config.account_for_loss_in_pipeline_split
    counted = num_layers + embedding + loss
    if counted % parts:
        also = "".join(
            f" + 1 ({name})"
            for name, counts in (
                ("account_for_embedding_in_pipeline_split", embedding),
                ("account_for_loss_in_pipeline_split", loss),
            )
            if counts
        )
        raise ValueError(
            f"num_layers is {num_layers}{also}: must be a multiple of pipeline_model_parallel_size"
            f"{' x virtual stages' if config.virtual_pipeline_model_parallel_size else ''} ({parts}), or set "
            "num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage or pipeline_model_parallel_layout"
        )
    counts = [counted // parts] * parts
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _with_given_ends(config: ModelParallelConfig, *, num_layers: int) -> list[int]:
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    given = {0: config.num_layers_in_first_pipeline_stage, stages - 1: config.num_layers_in_last_pipeline_stage}
    if stages == 1:
        raise ValueError(
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage require a "
            "pipeline_model_parallel_size of at least 2"
        )
    known = {stage: count for stage, count in given.items() if count is not None}
    rest, others = num_layers - sum(known.values()), stages - len(known)
    if rest < 0 or (rest if others == 0 else rest % others):
        raise ValueError(
            f"num_layers is {num_layers}: with {', '.join((f'{n} in stage {s}' for s, n in known.items()))} "
            f"(num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage) {rest} are left for {others} "
            "other stages: must be divisible evenly"
        )
    per_stage = [known.get(stage, rest // max(1, others)) for stage in range(stages)]
    uneven = [count for count in per_stage if count % chunks]
    if uneven:
        raise ValueError(
            f"a stage has {uneven[0]} layers: must be a multiple of the number of virtual stages ({chunks})"
        )
    placement = configured_placement(config)
    return [per_stage[placement.place_of(part).stage] // chunks for part in range(placement.num_parts)]


def _from_layout(layout: str, num_parts: int, *, num_layers: int) -> list[int]:
    parts = _parts_of_layout(layout)
    if len(parts) != num_parts:
        raise ValueError(
            f"pipeline_model_parallel_layout is {layout!r} with {len(parts)} stages: must have "
            f"pipeline_model_parallel_size x virtual stages ({num_parts})"
        )
    counts = [part.count("t") for part in parts]
    if sum(counts) != num_layers:
        raise ValueError(
            f"pipeline_model_parallel_layout is {layout!r} with {sum(counts)} layers (t): must be num_layers "
            f"({num_layers})"
        )
    return counts


def _parts_of_layout(layout: str) -> list[str]:
    """Expands a layout to the letters of each part: "Et*2|tL" -> ["Ett", "tL"]."""
    text = layout.replace(",", "").replace(" ", "")
    while (match := _GROUP.search(text)) is not None:
        group, times, letter, letter_times, alone = match.groups()
        body = alone if alone is not None else group if group is not None else letter
        count = int(times or letter_times or 1)
        if len(text) + len(body) * count > 100_000:
            raise ValueError(f"pipeline_model_parallel_layout is {layout!r}: too many repetitions")
        text = text[: match.start()] + body * count + text[match.end() :]
    parts = text.split("|")
    unknown = sorted(set(text) - set("EtmL|"))
    where = f"pipeline_model_parallel_layout is {layout!r}"
    if "[" in unknown:
        raise ValueError(f"{where}: lists are not supported; write a string such as Et*3|(tt|)*2,L")
    if {"(", ")"} & set(unknown):
        raise ValueError(f"{where}: unbalanced parentheses")
    if unknown:
        raise ValueError(
            f"{where}: {unknown[0]!r} is not allowed; use only E, t, m, L, | and (...), each optionally followed by *N"
        )
    if not re.fullmatch(r"E[t|]*m*L", text):
        raise ValueError(
            f"{where}: must begin with the embedding (E) and end with the loss (L), each once, with all layers of "
            "multi-token prediction (m) directly before the loss, in the same stage"
        )
    return parts
