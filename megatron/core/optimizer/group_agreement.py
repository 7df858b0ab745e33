"""What ranks that hold parts of one model agree on before its optimizer is built: the group of each parameter.

What the group is, as far as one rank can tell, is param_groups.py's answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch

from torch import nn

from megatron.core.agreement import all_ranks_agree
from megatron.core.group_collectives import gather_objects, is_fake, union_over_model
from megatron.core.optimizer.param_groups import GroupKey, ParamGrouping
from megatron.core.optimizer.param_runs import PlacedParam
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.param_attributes import param_facts


def agree_on_groups(
    entries: Sequence[PlacedParam], grouping: ParamGrouping, *, groups: ProcessGroupCollection
) -> dict[nn.Parameter, GroupKey]:
    """The group of each parameter of this rank. Collective over all ranks that hold parts of the model.

    The copy of a tied weight has the group of its owner, whatever the overrides say of the copy's own name. For
    rates that contradict each other, and an override without a parameter in any part of the model, raises ValueError
    where this rank is wrong and RemoteRankError where another one is.
    """
    with _all_parts_agree(groups):
        copies = [entry.name for entry in entries if param_facts(entry.param).shared]
        if copies and group_size(groups.embd) == 1:
            raise ValueError(f"pg_collection.embd is {groups.embd}: {copies[0]} is the copy of another stage's weight")
        keys = {e.param: grouping.key_of(e.name, e.param) for e in entries if not param_facts(e.param).shared}
    keys |= _owners_keys(entries, keys, grouping=grouping, groups=groups)
    grouping.check_all_used(union_over_model(grouping.used, groups))
    return keys


def check_patterns_match(patterns: Sequence[str], names: Sequence[str], *, groups: ProcessGroupCollection) -> None:
    """Raises ValueError on every rank for a pattern of param_name_patterns_for_fp32_local_accumulation that matches no
    name in any part of the model. Collective where there are patterns, the same on all ranks.
    """
    if not patterns:
        return
    used = {pattern for pattern in patterns if pattern == "all" or any(fnmatch(name, pattern) for name in names)}
    known = union_over_model(used, groups)
    # A misspelt name would change nothing, silently.
    unknown = [pattern for pattern in patterns if pattern not in known]
    if unknown:
        raise ValueError(
            f"DistributedDataParallelConfig.param_name_patterns_for_fp32_local_accumulation has {unknown[0]}: must "
            "match the name of a parameter that requires grad"
        )


def _owners_keys(
    entries: Sequence[PlacedParam],
    keys: dict[nn.Parameter, GroupKey],
    *,
    grouping: ParamGrouping,
    groups: ProcessGroupCollection,
) -> dict[nn.Parameter, GroupKey]:
    """The groups of the tied weights that this rank has a copy of, as their owner sees them; in a plan, where no owner
    answers, as the copies' own names say.
    """
    copies = [entry.param for entry in entries if param_facts(entry.param).shared]
    if is_fake(groups.embd):
        return {e.param: grouping.key_of(e.name, e.param) for e in entries if param_facts(e.param).shared}
    owned = [keys[e.param] for e in entries if param_facts(e.param).shared_embedding and e.param in keys]
    # Asked of the owner and not found by its name: attributes and predicates see a parameter that only it has.
    of_first_stage = gather_objects(owned, groups.embd)[0]
    return dict(zip(copies, of_first_stage, strict=True)) if copies else {}


@contextmanager
def _all_parts_agree(groups: ProcessGroupCollection) -> Iterator[None]:
    """all_ranks_agree over the ranks of dense layers, and then of expert layers: together all parts of the model."""
    with ExitStack() as stack:
        for group in (groups.mp, groups.tp_ep_pp):
            # None would be every rank there is.
            if group_size(group) > 1:
                stack.enter_context(all_ranks_agree(group))
        yield
