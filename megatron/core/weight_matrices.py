"""Matrices inside parameters: which rows and columns an optimizer that works on matrices must see as one.

A module whose parameters hold several matrices describes them through `weight_matrices`.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


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

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The window as a view of `tensor`: contiguous, any shape of the parameter's size, any dtype -> [*shape]."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@runtime_checkable
class HasWeightMatrices(Protocol):
    """A module with a parameter that holds several matrices, or one that lies transposed."""

    def weight_matrices(self) -> dict[str, list[MatrixWindow]]:
        """The matrices of those parameters that are not one [outputs, inputs] as they are, by name in the module."""
        ...
