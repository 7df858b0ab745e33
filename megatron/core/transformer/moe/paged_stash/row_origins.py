"""Where a saved tensor comes from, as far as autograd's graph says: from parameters, from rows, or not clear.
What is done with each is in recording.py.

[Note: guessed rows] Autograd says which tensors it saves, not what they mean. A tensor whose outermost size is max_rows
may hold rows, or a weight whose size is max_rows by chance. Its graph decides: parameters alone make a weight, and
tensors that reach an embedding or a plain tensor that requires grad are activations. `weight * mask` and `x @ weight`
for an x without grad have the same kind of graph. Such a tensor is rows unless its size may be that of a weight: then
it is unclear, and nothing but the user can tell.
"""

import enum

import torch
from torch import Tensor, nn

# Nodes that pick rows of their input: what they make of a weight is an activation.
_EMBEDDINGS = {"EmbeddingBackward0", "EmbeddingBagBackward0"}
_PICKS = {"IndexBackward0", "IndexSelectBackward0", "GatherBackward0"}
# Nodes whose output may have a leading size that none of their inputs has.
_JOINS = {"StackBackward0", "CatBackward0", "RepeatBackward0", "ViewBackward0", "UnsafeViewBackward0"}
# A graph that has more than parameters is searched this deep: weights are made in fewer operations, and activations of
# a deep model would be searched down to its embedding.
_DEPTH = 64


class Origin(enum.Enum):
    """What a tensor was made of."""

    WEIGHTS = "parameters alone"
    ROWS = "activations, or tensors that are no weights by their size"
    UNCLEAR = "parameters and tensors without grad, of which either may have given it its size"


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor, of any shape and dtype, is a module's parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def origin_of(tensor: Tensor, max_rows: int) -> Origin:
    """The origin of a tensor, any shape and dtype, whose outermost size is max_rows. See [Note: guessed rows]."""
    if is_parameter(tensor):
        return Origin.WEIGHTS
    if tensor.grad_fn is None:
        return Origin.ROWS
    level: list[torch.autograd.graph.Node] = [tensor.grad_fn]
    seen, depth = set(level), 0
    has_constants = may_be_weight = False
    while level:
        if has_constants and depth == _DEPTH:
            return Origin.ROWS
        below: list[torch.autograd.graph.Node] = []
        for node in level:
            name = node.name()
            if name in _EMBEDDINGS:
                return Origin.ROWS
            if name == "torch::autograd::AccumulateGrad":
                leaf: Tensor = node.variable  # type: ignore[attr-defined]
                if not isinstance(leaf, nn.Parameter):
                    return Origin.ROWS
                may_be_weight = may_be_weight or leaf.shape[:1] == (max_rows,)
                continue
            earlier = [(one, index) for one, index in node.next_functions if one is not None]
            # A node without inputs hides them, as one of another framework may.
            has_constants = has_constants or name in _PICKS or len(earlier) < max(len(node.next_functions), 1)
            may_be_weight = may_be_weight or _makes(node, name, earlier, max_rows)
            below += [one for one, _ in earlier if one not in seen]
            seen.update(below)
        level, depth = list(dict.fromkeys(below)), depth + 1
    if not has_constants:
        return Origin.WEIGHTS
    return Origin.UNCLEAR if may_be_weight else Origin.ROWS


def _makes(
    node: torch.autograd.graph.Node,
    name: str,
    earlier: list[tuple[torch.autograd.graph.Node, int]],
    max_rows: int,
) -> bool:
    """Whether the node's output has a leading size of max_rows that comes from joining, cutting or turning others."""
    if name in ("TBackward0", "TransposeBackward0", "PermuteBackward0"):
        # A turned parameter: its leading size is another one of the parameter's.
        turned = [getattr(one, "variable", None) for one, _ in earlier]
        return any(isinstance(variable, nn.Parameter) and max_rows in variable.shape for variable in turned)
    if name not in _JOINS or len(earlier) < len(node.next_functions) or _leading_size(node, 0) != max_rows:
        return False
    return all(_leading_size(one, index) != max_rows for one, index in earlier)


def _leading_size(node: torch.autograd.graph.Node, index: int) -> int | None:
    """The leading size of a node's output, None where it is not known."""
    variable = getattr(node, "variable", None)
    if variable is not None:
        return int(variable.shape[0]) if variable.dim() else None
    metadata = node._input_metadata
    if index >= len(metadata) or not metadata[index].shape:
        return None
    return int(metadata[index].shape[0])
