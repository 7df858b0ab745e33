"""How sizes and addresses of a group's tensors reach a kernel; no kernel here.

[Note: numbers that kernels are not specialized on]
Triton compiles a kernel anew for each pattern of its integer arguments: the value 1 becomes a constant, multiples of 16
are marked, values from 2**31 on are wider. do_not_specialize turns that off for plain arguments, but not for members of
a tuple, and groups of tensors come as tuples. So each number v travels as 2 * v + SHIFTED, which is odd, never 1 and
always an int64: one compiled kernel serves all sizes and addresses. Kernels get v back as (number - SHIFTED) >> 1.
What stays a constant of the compilation: the number of tensors, rounded up to one of COUNTS, the size of a copied
block, which all groups of a pool share, and the direction of a copy.

In kernels, number 7 * i + f of `tensors` is field f of EncodedTensor for tensor i, and held + slot * 3 + c is column c
of Held.
"""

from collections.abc import Sequence

import triton.language as tl

from megatron.core.transformer.moe.paged_stash.page_layout import INTS_PER_TENSOR

SHIFTED = tl.constexpr(2**40 + 1)
COUNTS = (2, 4, 8, 16)
# The record of a tensor that is not there; its slot of -1 says so.
_ABSENT = (1, 1, 0, 1, 0, 0, -1)


def count_for(num_tensors: int) -> int:
    """The number of tensors that the kernel for this many takes. Raises ValueError above the largest."""
    if num_tensors > COUNTS[-1]:
        raise ValueError(f"{num_tensors} tensors: one launch takes at most {COUNTS[-1]}")
    return next(count for count in COUNTS if count >= num_tensors)


def shifted(numbers: Sequence[int]) -> tuple[int, ...]:
    """Numbers as kernels take them. See [Note: numbers that kernels are not specialized on]."""
    return tuple(2 * number + SHIFTED.value for number in numbers)


def shifted_tensors(tensors: Sequence[int]) -> tuple[int, ...]:
    """What encode_tensors gave, filled up with absent tensors, as kernels take it."""
    num_tensors = len(tensors) // INTS_PER_TENSOR
    return shifted([*tensors, *_ABSENT * (count_for(num_tensors) - num_tensors)])
