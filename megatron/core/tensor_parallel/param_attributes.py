"""Attributes of parameters under Megatron's names, and the matrices that a parameter contains.

The attributes describe how a parameter is split, over which ranks its gradient is summed, and where its gradient is
stored. Only the functions in this file use the attribute names.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.block_scaled.format import SquareBlocks
from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import group_rank

# Attributes set by optimizers or wrappers. They are neither pickled nor copied with a parameter, because the copy is
# not wrapped.
_OF_OPTIMIZERS = frozenset({"main_param", "main_param_sharded"})
_OF_WRAPPERS = frozenset({"main_grad", "grad_added_to_main_grad", "gradients_pass", "grad_owner", "__getstate__"})
_OF_QUEUES = frozenset({"grad_queue"})


@dataclass(frozen=True)
class ParamFacts:
    """Describes how a parameter is distributed over ranks.

    tensor_model_parallel: whether the parameter is split over the tensor-parallel group, along partition_dim in
    partition_stride pieces; otherwise it is replicated. sequence_parallel: whether the gradient of each rank covers
    only a part of the tokens or heads, so that it must be summed over the ranks. is_expert: whether the groups of
    expert layers apply. shared_embedding: whether another pipeline stage also stores this weight, so that the gradients
    of both are summed. shared: whether this stage stores a copy, and the other stage owns the weight. width_mult: with
    use_mup, the fan-in of a matrix relative to the base model.
    """

    tensor_model_parallel: bool = False
    partition_dim: int = -1
    partition_stride: int = 1
    sequence_parallel: bool = False
    is_expert: bool = False
    shared_embedding: bool = False
    shared: bool = False
    width_mult: float = 1.0


def param_facts(param: Tensor) -> ParamFacts:
    """Returns the attributes of a parameter, with defaults for attributes that are not set."""
    marks = vars(param)
    return ParamFacts(
        tensor_model_parallel=marks.get("tensor_model_parallel", False),
        partition_dim=marks.get("partition_dim", -1),
        partition_stride=marks.get("partition_stride", 1),
        sequence_parallel=marks.get("sequence_parallel", False),
        is_expert=not marks.get("allreduce", True),
        shared_embedding=marks.get("shared_embedding", False),
        shared=marks.get("shared", False),
        width_mult=marks.get("width_mult", 1.0),
    )


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Sets the attributes that describe how a parameter is split. tensor: any shape and dtype."""
    vars(tensor).update(tensor_model_parallel=is_parallel, partition_dim=dim, partition_stride=stride)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copies the attributes that describe the split from source to destination. Both: any shape and dtype."""
    facts = param_facts(source_tensor)
    set_tensor_model_parallel_attributes(
        destination_tensor, facts.tensor_model_parallel, facts.partition_dim, facts.partition_stride
    )


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Marks a tensor as not split if its split attributes are not set. tensor: any shape and dtype."""
    facts = param_facts(tensor)
    set_tensor_model_parallel_attributes(
        tensor, facts.tensor_model_parallel, facts.partition_dim, facts.partition_stride
    )


def param_is_not_tensor_parallel_duplicate(
    param: Tensor, tp_group: ProcessGroup | None = None, expert_tp_group: ProcessGroup | None = None
) -> bool:
    """Returns whether this rank counts the parameter in sums that must count each element once, such as norms.

    Each rank counts its part of a split parameter. Only the first rank counts a replicated parameter. tp_group,
    expert_tp_group: groups of dense and of expert layers; None means the groups of parallel_state.
    """
    facts = param_facts(param)
    if facts.tensor_model_parallel:
        return True
    group = group_or_existing(expert_tp_group, "expt_tp") if facts.is_expert else group_or_existing(tp_group)
    return group_rank(group) == 0


def copy_marks(destination: nn.Parameter, source: nn.Parameter) -> None:
    """Copies the attributes that layers and users have set, but not those of wrappers and optimizers."""
    vars(destination).update(_marks_in(vars(source)))


def mark_partial_gradient(param: nn.Parameter | None, *, partial: bool = True) -> None:
    """Sets the `sequence_parallel` attribute of a parameter. Does nothing for None."""
    if param is not None:
        vars(param).update(sequence_parallel=partial)


def mark_expert(param: nn.Parameter) -> None:
    """Marks a parameter of an expert, whose gradient is reduced over the expert-data-parallel group."""
    vars(param).update(allreduce=False)


def mark_shared(param: nn.Parameter, *, is_copy: bool) -> None:
    """Marks a weight as tied between two pipeline stages. is_copy: whether the other stage owns it."""
    vars(param).update(shared=is_copy, shared_embedding=True)


def mark_followed(param: nn.Parameter) -> None:
    """Marks a copy of a tied weight that has received the values of its owner on the same stage."""
    vars(param).update(has_followed=True)


def has_followed(param: nn.Parameter) -> bool:
    """Returns whether mark_followed was called for a parameter."""
    return "has_followed" in vars(param)


def mark_width(param: nn.Parameter, width_mult: float) -> None:
    """Sets the `width_mult` attribute of a matrix, by which optimizers divide its learning rate."""
    vars(param).update(width_mult=width_mult)


def set_square_blocks(param: nn.Parameter, blocks: SquareBlocks | None) -> None:
    """Records how a weight is quantized; None means that modules compute with the weight itself."""
    vars(param).update(square_blocks=blocks)


def is_quantized(param: nn.Parameter) -> bool:
    """Returns whether modules compute with a weight in 8 bits."""
    return vars(param).get("square_blocks") is not None


def square_blocks_of(param: nn.Parameter) -> SquareBlocks:
    """Returns how a weight is quantized, for which `is_quantized` is True."""
    blocks: SquareBlocks = vars(param)["square_blocks"]
    return blocks


def set_main_grad(param: nn.Parameter, grad: Tensor) -> None:
    """Sets main_grad, the tensor that accumulates a parameter's gradients. grad: [*parameter shape], float dtype."""
    vars(param).update(main_grad=grad)
    _store_marks_alone(param)


def clear_main_grad(param: nn.Parameter) -> None:
    """Removes main_grad and all other attributes that wrappers, optimizers and kernels set, except grad_owner."""
    # set_grad_owner removes grad_owner.
    for name in (_OF_WRAPPERS | _OF_OPTIMIZERS) - {"grad_owner"}:
        vars(param).pop(name, None)
    if is_served(param):
        _store_marks_alone(param)


def set_grad_queue(param: nn.Parameter, held: object) -> None:
    """Sets what a WeightGradQueue holds for a parameter. None means that no queue serves it."""
    if held is None:
        vars(param).pop("grad_queue", None)
    else:
        vars(param).update(grad_queue=held)
        _store_marks_alone(param)


def is_served(param: nn.Parameter) -> bool:
    """Returns whether a WeightGradQueue serves the parameter."""
    return "grad_queue" in vars(param)


def set_main_param(param: nn.Parameter, main: Tensor | None, *, is_sharded: bool) -> None:
    """Sets the fp32 master weights of a 16-bit parameter, which the optimizer updates.

    main: [*parameter shape], or if is_sharded [n], the part that this rank owns; None if this rank owns no part.
    """
    vars(param).update(main_param=main, main_param_sharded=is_sharded)
    _store_marks_alone(param)


def has_main_grad(param: nn.Parameter) -> bool:
    """Returns whether a data-parallel wrapper accumulates the gradients of a parameter in main_grad."""
    return "main_grad" in vars(param)


def mark_gradients_pass(param: nn.Parameter) -> None:
    """Marks a parameter as wrapped without a persistent gradient buffer."""
    vars(param).update(gradients_pass=True)
    _store_marks_alone(param)


def gradients_pass(param: Tensor) -> bool:
    """Returns whether a parameter is wrapped without a persistent gradient buffer."""
    return bool(vars(param).get("gradients_pass", False))


def is_wrapped(param: nn.Parameter) -> bool:
    """Returns whether a data-parallel wrapper manages the parameter."""
    return has_main_grad(param) or gradients_pass(param)


def gradient_of(param: Tensor) -> Tensor | None:
    """Returns the gradient of a parameter, any shape and dtype: main_grad if the parameter has one, otherwise grad."""
    main_grad: Tensor | None = vars(param).get("main_grad")
    return param.grad if main_grad is None else main_grad


def added_to_main_grad(param: nn.Parameter) -> bool:
    """Returns whether a kernel has already added this step's gradient to the parameter's main_grad."""
    # Usually absent, which is found without a call.
    return "grad_added_to_main_grad" in param.__dict__ and bool(param.__dict__["grad_added_to_main_grad"])


def clear_added_to_main_grad(param: nn.Parameter) -> None:
    """Resets added_to_main_grad of a parameter for the next step."""
    vars(param).update(grad_added_to_main_grad=False)


def has_grad_beside_main_grad(param: nn.Parameter) -> bool:
    """Returns whether `grad` contains the gradient of uses that a kernel did not add to main_grad."""
    return bool(vars(param).get("zero_out_wgrad", False))


def _store_marks_alone(param: nn.Parameter) -> None:
    # torch.save and pickle call this attribute (torch._utils._get_obj_state). It is bound to the dictionary, which
    # then lives until the garbage collector runs. Bound to the parameter, it would keep the parameter alive. A weak
    # reference would make torch.utils.swap_tensors raise, which Module.to uses.
    vars(param)["__getstate__"] = partial(_marks_in, vars(param))


def _marks_in(written: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in written.items() if name not in _OF_WRAPPERS | _OF_OPTIMIZERS | _OF_QUEUES}


@dataclass(frozen=True)
class MatrixWindow:
    """A matrix within a contiguous parameter, as a strided window [*rows, columns]. Rows are outputs, columns inputs.

    Matrix optimizers such as Muon treat each window as one matrix. shape, stride, offset (in elements): as in
    torch.as_strided. All dimensions but the last together form the rows.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Number of rows, and number of columns."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    def view_of(self, tensor: Tensor) -> Tensor:
        """Returns the window as a view, [*shape], of a contiguous tensor with the parameter's shape and any dtype."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@runtime_checkable
class HasWeightMatrices(Protocol):
    """A module with a parameter that contains several matrices or a transposed matrix."""

    def weight_matrices(self) -> dict[str, list[MatrixWindow]]:
        """Returns, by parameter name, the matrices of parameters that are not a single [outputs, inputs] matrix."""
        ...
