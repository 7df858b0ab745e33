"""What Megatron's users find written on a parameter: how it is split, over which ranks its gradient is summed, where
that gradient stands.

Only these functions know the attributes' names; everything else asks `param_facts`.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

# What wrappers write, which is not stored or copied with a parameter: nobody wraps the other one.
_OF_WRAPPERS = frozenset({"main_grad", "grad_added_to_main_grad", "gradients_pass", "grad_owner", "__getstate__"})


@dataclass(frozen=True)
class ParamFacts:
    """tensor_model_parallel: each rank of the tensor-parallel group holds other elements, cut along partition_dim in
    partition_stride pieces; otherwise all hold the same. sequence_parallel: a rank's gradient covers a part of the
    tokens or heads, and the ranks' are to be summed. is_expert: the groups are those of expert layers.
    shared_embedding: another pipeline stage has this weight too, their gradients are to be summed. shared: the other
    stage owns it, this one has a copy.
    """

    tensor_model_parallel: bool = False
    partition_dim: int = -1
    partition_stride: int = 1
    sequence_parallel: bool = False
    is_expert: bool = False
    shared_embedding: bool = False
    shared: bool = False


def param_facts(param: Tensor) -> ParamFacts:
    """The facts of a parameter: any shape and dtype; of one that nobody marked, the defaults."""
    marks = vars(param)
    return ParamFacts(
        tensor_model_parallel=marks.get("tensor_model_parallel", False),
        partition_dim=marks.get("partition_dim", -1),
        partition_stride=marks.get("partition_stride", 1),
        sequence_parallel=marks.get("sequence_parallel", False),
        is_expert=not marks.get("allreduce", True),
        shared_embedding=marks.get("shared_embedding", False),
        shared=marks.get("shared", False),
    )


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Writes how a parameter is split; tensor: any shape and dtype. A later call replaces an earlier one's."""
    vars(tensor).update(tensor_model_parallel=is_parallel, partition_dim=dim, partition_stride=stride)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Writes on one tensor how another is split; both: any shape and dtype."""
    facts = param_facts(source_tensor)
    set_tensor_model_parallel_attributes(
        destination_tensor, facts.tensor_model_parallel, facts.partition_dim, facts.partition_stride
    )


def copy_marks(destination: nn.Parameter, source: nn.Parameter) -> None:
    """Writes on a parameter what is written on another, by layers and users; both: any shape and dtype."""
    vars(destination).update(_marks_in(vars(source)))


def mark_partial_gradient(param: nn.Parameter | None, *, partial: bool = True) -> None:
    """Writes `sequence_parallel` on a parameter, if there is one: any shape and dtype."""
    if param is not None:
        vars(param).update(sequence_parallel=partial)


def mark_expert(param: nn.Parameter) -> None:
    """Writes on a parameter, any shape and dtype, that its gradient is reduced over the expert-data-parallel group."""
    vars(param).update(allreduce=False)


def mark_shared(param: nn.Parameter, *, is_copy: bool) -> None:
    """Writes on a tied weight, any shape and dtype, that two pipeline stages have it; is_copy: the other owns it."""
    vars(param).update(shared=is_copy, shared_embedding=True)


def set_main_grad(param: nn.Parameter, grad: Tensor) -> None:
    """Writes where a parameter's gradients add up; grad: [*parameter shape], floating point."""
    vars(param).update(main_grad=grad)
    _store_marks_alone(param)


def clear_main_grad(param: nn.Parameter) -> None:
    """Takes that back from a parameter, any shape and dtype, with what kernels wrote of it."""
    # set_grad_owner takes that one back.
    for name in _OF_WRAPPERS - {"grad_owner"}:
        vars(param).pop(name, None)


def has_main_grad(param: nn.Parameter) -> bool:
    """Whether a data-parallel wrapper keeps the gradients of a parameter, any shape and dtype."""
    return "main_grad" in vars(param)


def mark_gradients_pass(param: nn.Parameter) -> None:
    """Writes on a parameter, any shape and dtype, that a wrapper has it and keeps none of its gradients."""
    vars(param).update(gradients_pass=True)
    _store_marks_alone(param)


def gradients_pass(param: Tensor) -> bool:
    """Whether a data-parallel wrapper has a parameter, any shape and dtype, and keeps none of its gradients."""
    return bool(vars(param).get("gradients_pass", False))


def is_wrapped(param: nn.Parameter) -> bool:
    """Whether a data-parallel wrapper has taken a parameter, any shape and dtype."""
    return has_main_grad(param) or gradients_pass(param)


def gradient_of(param: Tensor) -> Tensor | None:
    """A parameter's gradient, any shape and dtype: main_grad where a data-parallel wrapper gave it one, else grad."""
    main_grad: Tensor | None = vars(param).get("main_grad")
    return param.grad if main_grad is None else main_grad


def added_to_main_grad(param: nn.Parameter) -> bool:
    """Whether a kernel added this step's gradient of a parameter, any shape and dtype, to its main_grad itself."""
    return bool(vars(param).get("grad_added_to_main_grad", False))


def clear_added_to_main_grad(param: nn.Parameter) -> None:
    """Takes that mark back from a parameter, any shape and dtype, before the next step."""
    vars(param).update(grad_added_to_main_grad=False)


def has_grad_beside_main_grad(param: nn.Parameter) -> bool:
    """Whether `grad` of such a parameter, any shape and dtype, holds what its other uses gave, and not rubbish."""
    return bool(vars(param).get("zero_out_wgrad", False))


def _store_marks_alone(param: nn.Parameter) -> None:
    # torch.save and pickle read this attribute (torch._utils._get_obj_state). Bound to the dictionary, which then lives
    # until it is collected: bound to the parameter it would keep that alive, and torch.utils.swap_tensors, of
    # Module.to, refuses tensors with weak references.
    vars(param)["__getstate__"] = partial(_marks_in, vars(param))


def _marks_in(written: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in written.items() if name not in _OF_WRAPPERS}


@dataclass(frozen=True)
class MatrixWindow:
    """A strided window [*rows, columns] of a contiguous parameter: outputs are rows, inputs are columns.

    shape, stride, offset (elements from the parameter's first): as for torch.as_strided. Several dimensions of rows
    stand for the rows of all of them together.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    def view_of(self, tensor: Tensor) -> Tensor:
        """The window as a view of `tensor`: contiguous, any shape of the parameter's size, any dtype -> [*shape]."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@runtime_checkable
class HasWeightMatrices(Protocol):
    """A module with a parameter that holds several matrices, or one that lies transposed."""

    def weight_matrices(self) -> dict[str, list[MatrixWindow]]:
        """The matrices of those parameters that are not one [outputs, inputs] as they are, by name in the module."""
        ...
