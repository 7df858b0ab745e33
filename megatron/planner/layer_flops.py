"""The arithmetic of each kind of layer, as the log of a run counts it, for cutting pipelines evenly; pure.

How long layers take is counted kernel by kernel; see model_work.py.
"""

import argparse
import copy
from collections.abc import Sequence

from megatron.planner.layer_facts import LayerKind
from megatron.training.compute.flops import num_floating_point_operations

# Forward, and a backward of two products for each of its own.
_PASSES = 3


def layer_flops(args: argparse.Namespace, kinds: Sequence[LayerKind]) -> tuple[dict[LayerKind, float], float]:
    """Returns forward operations for one sample: of each kind of layer, and of what follows the layers.

    The latter includes multi-token prediction.
    """
    found = {kind: _count(args, [kind, kind]) - _count(args, [kind]) for kind in dict.fromkeys(kinds)}
    with_end = _count(args, [kinds[-1]], mtp_num_layers=args.mtp_num_layers)
    return found, with_end - found[kinds[-1]]


def _count(args: argparse.Namespace, kinds: Sequence[LayerKind], **changed: int | None) -> float:
    args = copy.copy(args)
    # Forward is a third of what trains all weights.
    args.num_layers, args.mtp_num_layers, args.lora_rank = len(kinds), None, None
    if args.num_experts is not None:
        args.moe_layer_freq = [int(kind.has_experts) for kind in kinds]
    vars(args).update(changed)
    return num_floating_point_operations(args, 1) / _PASSES
