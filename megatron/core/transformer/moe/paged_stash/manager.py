"""PagedStashManager and related functions: a process-wide stash under Megatron's names.

They are a thin layer over PagedStash. In its first step, a manager without a pool stashes nothing and records the sizes
and the order of expert groups; the next reset allocates a pool for them. Functions called without a manager use the
process-wide manager, PagedStashManager.get_instance().

    paged_stash_reset()                                   # before each step
    hidden = paged_stash_group_start(hidden)
    with get_paged_stash_context("experts", C, num_rows): # rows beyond num_rows are not saved
        hidden = experts(hidden)                          # [C, H]
    hidden = paged_stash_group_commit(hidden, "experts")
    loss.backward()
    overflow = check_paged_stash_overflow()               # above 0: these gradients are wrong, repeat the step
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.autograd import PlainFunction
from megatron.core.transformer.moe.paged_stash.arithmetic import peak_pages, resident_groups
from megatron.core.transformer.moe.paged_stash.group_memory import (
    NOTHING,
    GroupMemory,
    Phase,
    RestoredBlock,
    StoredRows,
)
from megatron.core.transformer.moe.paged_stash.page_layout import (
    ALIGNMENT,
    DEFAULT_PAGE_SIZE,
    Counter,
    PagesByPriority,
    PoolLayout,
    Priority,
    TensorSpec,
    live_rows,
)
from megatron.core.transformer.moe.paged_stash.page_pool import PageGroup, PagePool
from megatron.core.transformer.moe.paged_stash.saved_tensors import StashGroup
from megatron.core.transformer.moe.paged_stash.stash import PagedStash
from megatron.core.transformer.moe.paged_stash.stash_order import GroupKey

# Defaults of Megatron-LM's settings.
_PAGE_SIZE, _FACTOR_CUDA, _FACTOR_CPU = DEFAULT_PAGE_SIZE, 1.1, 0.0


class LearningStash(PagedStash):
    """Stash that keeps all rows in memory and records the sizes of the tensors that it would have stashed.

    sizes: for each group, its tensor specs and expected number of live rows. expected: expected live rows of the next
    context; None means all.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(PagePool(device, PoolLayout(page_bytes=ALIGNMENT, device_pages=1)))
        self.sizes: dict[GroupKey, tuple[list[TensorSpec], int]] = {}
        self.expected: int | None = None

    def _commit(
        self, group: GroupMemory, stored: StoredRows, *, num_rows: Tensor | int, max_rows: int, may_change: bool = True
    ) -> list[RestoredBlock]:
        if group.phase is Phase.RECORDING:
            self.sizes[group.event.group] = stored.specs, max_rows if self.expected is None else self.expected
            group.phase = Phase.KEPT
        return super()._commit(group, NOTHING, num_rows=num_rows, max_rows=max_rows, may_change=may_change)

    def layout(self, *, page_size: int, factor_cuda: float, factor_cpu: float) -> PoolLayout:
        """Returns the layout of a pool for the recorded step: its peak page count times each tier's factor.

        page_size: number of input rows per page.
        """
        widths = [spec.row_bytes for specs, _ in self.sizes.values() for spec in specs]
        page_bytes = -(-page_size * max(widths, default=1) // ALIGNMENT) * ALIGNMENT
        unit, resident = PoolLayout(page_bytes, device_pages=1), resident_groups(self.order.events)

        def pages(group: GroupKey) -> PagesByPriority:
            specs, rows = ([], 0) if group in resident else self.sizes.get(group, ([], 0))
            needed = [0] * len(Priority)
            for spec in specs:
                needed[spec.priority] += unit.pages_for(live_rows(spec, min(rows, spec.max_tokens)) * spec.row_bytes)
            return PagesByPriority(*needed)

        peak = peak_pages(self.order.events, pages)
        return PoolLayout(page_bytes, max(1, math.ceil(peak * factor_cuda)), math.ceil(peak * factor_cpu))


class PagedStashManager:
    """Manages the stash of a training loop. All groups of a step use one pool of pages.

    stash: the PagedStash that contexts use. pool: passed to the constructor, or allocated by the reset after the first
    step.
    """

    def __init__(self, pool: PagePool | None = None, *, prefetch_groups: int = 1) -> None:
        """Creates a stash that uses the pool, if a pool is passed.

        pool: a pool sized by the caller; None learns the sizes in the first step. prefetch_groups: number of groups
        whose rows are restored ahead of their backward.
        """
        self._prefetch_groups, self._chunk = prefetch_groups, ""
        self._page_size, self._factors = _PAGE_SIZE, (_FACTOR_CUDA, _FACTOR_CPU)
        self._stash = None if pool is None else PagedStash(pool, prefetch_groups=prefetch_groups)
        self._is_enabled = True

    @staticmethod
    def get_instance() -> "PagedStashManager":
        """Returns the manager of this process."""
        return _default_manager()

    @property
    def stash(self) -> PagedStash:
        """Stash that contexts use. A manager without a pool creates a LearningStash on the default device."""
        return self._stash_on(torch.get_default_device())

    @property
    def pool(self) -> PagePool:
        """Pool of the stash; it has a single page while sizes are learned."""
        return self.stash.pool

    @property
    def is_learning(self) -> bool:
        """Whether this step keeps all rows in memory, because the sizes of its groups are not known yet."""
        return self._stash is None or isinstance(self._stash, LearningStash)

    def _stash_on(self, device: torch.device) -> PagedStash:
        present = self._stash
        is_unused = isinstance(present, LearningStash) and not present.sizes and present.pool.device != device
        if present is None or is_unused:
            self._stash = present = LearningStash(device)
            present.reset(enabled=self._is_enabled)
        return present

    def reset(self, *, enabled: bool = True, config: Any = None) -> None:
        """Ends a step and prepares the next one. Allocates the pool after the first complete step.

        enabled: False for a step that stashes nothing. config: provides moe_paged_stash_page_size and
        moe_paged_stash_buffer_size_factor_cuda and _cpu for the allocation; None keeps the current values.
        """
        if config is not None:
            self._page_size = config.moe_paged_stash_page_size
            self._factors = (
                config.moe_paged_stash_buffer_size_factor_cuda,
                config.moe_paged_stash_buffer_size_factor_cpu,
            )
        self._is_enabled = enabled
        if self._stash is None:
            return
        self._stash.reset(enabled=enabled)
        if isinstance(self._stash, LearningStash) and self._stash.order.events:
            self.allocate_stash_buffers(*self._factors)

    def allocate_stash_buffers(
        self,
        moe_paged_stash_buffer_size_factor_cuda: float = _FACTOR_CUDA,
        moe_paged_stash_buffer_size_factor_cpu: float = _FACTOR_CPU,
    ) -> None:
        """Allocates the pool. Each tier's size is the recorded step's peak page count times the tier's factor.

        Call it between steps. Raises RuntimeError if no complete step was recorded, as with a pool passed to the
        constructor.
        """
        learned = self._stash
        if not isinstance(learned, LearningStash) or not learned.order.events:
            raise RuntimeError(
                "no complete step was recorded: run one step including its backward, then call paged_stash_reset()"
            )
        layout = learned.layout(
            page_size=self._page_size,
            factor_cuda=moe_paged_stash_buffer_size_factor_cuda,
            factor_cpu=moe_paged_stash_buffer_size_factor_cpu,
        )
        pool = PagePool(learned.pool.device, layout)
        stash = PagedStash(pool, prefetch_groups=self._prefetch_groups)
        # The pool has no pages for resident groups, which the order identifies. The order is still learned.
        stash.order = learned.order
        stash.reset(enabled=self._is_enabled)
        self._stash = stash

    def release_stash_buffers(self) -> None:
        """Frees the pool. Call it between steps. The next complete step records sizes from scratch."""
        if self._stash is not None:
            self._stash.reset()
            self._stash.pool.close_sync()
        self._stash = None

    def context(
        self, name: str | None, num_rows: Tensor | int, *, max_rows: int, expected: int | None = None
    ) -> AbstractContextManager[StashGroup]:
        """Returns a context manager for the forward of an expert group; see PagedStash.context.

        num_rows: [1] or scalar, int64 or int32, on the pool's device, or an int. expected: live rows for which the pool
        is sized; None means max_rows. name: None means "experts".
        """
        device = num_rows.device if isinstance(num_rows, Tensor) else torch.get_default_device()
        stash = self._stash_on(device)
        if isinstance(stash, LearningStash):
            stash.expected = expected
        return stash.context(self._chunk + (name or "experts"), num_rows, max_rows=max_rows)

    def update_model_chunk(self, vp_stage_index: int | None) -> None:
        """Assigns later groups to a model chunk of the pipeline stage; None if the stage has a single chunk."""
        self._chunk = "" if vp_stage_index is None else f"chunk {vp_stage_index} "

    def wait_for_stash_to_complete(self) -> None:
        """Makes the main stream wait for all copies."""
        if self._stash is not None:
            self._stash.join()


@cache
def _default_manager() -> PagedStashManager:
    return PagedStashManager()


AnyManager = PagedStash | PagedStashManager


def _manager_or_default(manager: AnyManager | None) -> AnyManager:
    return PagedStashManager.get_instance() if manager is None else manager


def _join(manager: AnyManager) -> None:
    if isinstance(manager, PagedStash):
        manager.join()
    else:
        manager.wait_for_stash_to_complete()


def _stash_of(manager: AnyManager | None) -> PagedStash:
    found = _manager_or_default(manager)
    return found if isinstance(found, PagedStash) else found.stash


# --- Calls made by a layer ---


class PipelinePreScheduleFunction(PlainFunction):
    """Waits for copies before a group's forward and after its backward, which write to memory that copies read."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stash_manager: AnyManager) -> Tensor:
        """Waits for copies; returns a view of the tensor, which may have any shape and dtype."""
        ctx.manager = stash_manager
        _join(stash_manager)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor, None]:
        """Waits for copies; returns the gradient unchanged, which may have any shape and dtype."""
        _join(ctx.manager)
        return grad_output[0], None


class PipelinePostScheduleFunction(PlainFunction):
    """Marks the end of a group's forward, after its context stashed the rows. Backward waits for copies here."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stash_manager: AnyManager) -> Tensor:
        """Returns a view of the tensor, which may have any shape and dtype."""
        ctx.manager = stash_manager
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor, None]:
        """Waits for copies; returns the gradient unchanged, which may have any shape and dtype."""
        _join(ctx.manager)
        return grad_output[0], None


class PagedStashContext:
    """Context manager for a group's forward. Entering it returns a StashGroup, whose methods declare tensors."""

    def __init__(
        self,
        stash_manager: AnyManager,
        *,
        name: str | None = None,
        max_num_tokens: int | None = None,
        num_tokens_tensor: Tensor | int | None = None,
        avg_num_tokens: int | None = None,
    ) -> None:
        """Creates the context from the arguments of get_paged_stash_context.

        Raises ValueError if max_num_tokens or num_tokens_tensor is missing.
        """
        if max_num_tokens is None or num_tokens_tensor is None:
            raise ValueError(
                f"max_num_tokens ({max_num_tokens}) and num_tokens_tensor ({num_tokens_tensor}) are both required"
            )
        self.stash_manager = stash_manager
        self._context: AbstractContextManager[StashGroup]
        if isinstance(stash_manager, PagedStash):
            self._context = stash_manager.context(name or "experts", num_tokens_tensor, max_rows=max_num_tokens)
        else:
            self._context = stash_manager.context(
                name, num_tokens_tensor, max_rows=max_num_tokens, expected=avg_num_tokens
            )

    def __enter__(self) -> StashGroup:
        return self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._context.__exit__(kind, error, trace)


def paged_stash_init_chunk_handler(vp_size: int | None, vp_stage: int | None) -> None:
    """Informs the manager of this process which model chunk runs the next forwards.

    vp_size: number of chunks of the pipeline stage; None or 1 means one. vp_stage: index of the chunk, from 0. Raises
    ValueError for an index out of range.
    """
    chunks = vp_size or 1
    if not 0 <= (vp_stage or 0) < chunks:
        raise ValueError(f"vp_stage is {vp_stage}: must be at least 0 and below vp_size ({chunks})")
    PagedStashManager.get_instance().update_model_chunk(None if chunks == 1 else vp_stage)


def paged_stash_reset(enabled: bool = True, config: Any = None, *, manager: AnyManager | None = None) -> None:
    """Ends a step and prepares the next one. enabled: False for a step that stashes nothing, such as an evaluation.

    config: see PagedStashManager.reset. manager: None means the manager of this process, as in the other functions.
    """
    found = _manager_or_default(manager)
    if isinstance(found, PagedStash):
        found.reset(enabled=enabled)
    else:
        found.reset(enabled=enabled, config=config)


def get_paged_stash_context(
    name: str | None = None,
    max_num_tokens: int | None = None,
    num_tokens_tensor: Tensor | int | None = None,
    avg_num_tokens: int | None = None,
    *,
    manager: AnyManager | None = None,
) -> PagedStashContext:
    """Returns a context manager for an expert group's forward that stores the rows saved by autograd in pages.

    max_num_tokens: number of rows of the group's tensors. num_tokens_tensor: number of live rows, [1] or scalar, int64
    or int32, on the device, or an int. avg_num_tokens: live rows for which a pool is sized; None means all. name: must
    be the same in each step. Restored rows beyond the live ones are undefined, so backward must not read them. Raises
    ValueError if max_num_tokens or num_tokens_tensor is missing.
    """
    return PagedStashContext(
        _manager_or_default(manager),
        name=name,
        max_num_tokens=max_num_tokens,
        num_tokens_tensor=num_tokens_tensor,
        avg_num_tokens=avg_num_tokens,
    )


def paged_stash_group_start(tensor: Tensor, *, manager: AnyManager | None = None) -> Tensor:
    """Makes the main stream wait for the copies of earlier groups. Call it before a group's context.

    tensor: any shape and dtype. Returns a view of it.
    """
    return PipelinePreScheduleFunction.apply(tensor, _manager_or_default(manager))


def paged_stash_group_commit(tensor: Tensor, name: str | None = None, *, manager: AnyManager | None = None) -> Tensor:
    """Marks the end of a group's forward. Call it after the group's context, which stashes the rows.

    tensor: any shape and dtype. Returns a view of it.
    """
    return PipelinePostScheduleFunction.apply(tensor, _manager_or_default(manager))


def check_paged_stash_overflow(*, manager: AnyManager | None = None) -> Tensor:
    """Returns PagedStash.void: above 0 if the step's gradients are wrong; scalar, int64, on the device."""
    return _stash_of(manager).void


def check_paged_stash_host_spill(*, manager: AnyManager | None = None) -> Tensor:
    """Returns the number of host pages allocated since the last reset: scalar, int64, on the device."""
    stash = _stash_of(manager)
    stash.join()
    return stash.pool.counters[Counter.SPILLED_PAGES]


# --- Single tensors ---


class PagedStashBuffer:
    """Pool of pages for rows of one width and dtype.

    overflow, host_spill: flags that PagedTensor sets; [1], int or bool.
    """

    def __init__(
        self,
        num_tokens: int,
        hidden_size: int,
        page_size: int,
        device: torch.device | str,
        overflow: Tensor,
        host_spill: Tensor,
        dtype: torch.dtype,
        num_tokens_host: int = 0,
    ) -> None:
        """Allocates the pool.

        num_tokens, num_tokens_host: numbers of rows of hidden_size elements on each tier; page_size: rows per page.
        Raises ValueError if the size of a page is not a multiple of 16 bytes.
        """
        layout = PoolLayout(
            page_size * hidden_size * dtype.itemsize, -(-num_tokens // page_size), -(-num_tokens_host // page_size)
        )
        self.pool = PagePool(device, layout)
        self.hidden_size, self.page_size, self.dtype = hidden_size, page_size, dtype
        self.overflow, self.host_spill = overflow, host_spill

    def reset(self) -> None:
        """Frees all pages. Tensors in them are lost."""
        self.pool.reset()


class PagedTensor:
    """A tensor of rows that is moved into a PagedStashBuffer and back by explicit calls."""

    def __init__(
        self,
        tensor: Tensor,
        num_tokens_tensor: Tensor | None = None,
        avg_num_tokens: int | None = None,
        vp_stage: int | None = None,
        original_shape: Sequence[int] | None = None,
        schedule_layer_no: int | None = None,
        is_columnwise_scale_inv: bool | None = None,
        max_num_tokens: int | None = None,
        hidden_size: int | None = None,
        page_size: int = _PAGE_SIZE,
    ) -> None:
        """Describes the rows of a tensor.

        tensor: contiguous, any shape and dtype, with max_num_tokens rows; None means its outermost size.
        num_tokens_tensor: live rows, [1] or scalar, int64 or int32; None means all. original_shape: shape of the
        restored tensor; None means the tensor's shape. hidden_size: elements of a row, must match the tensor.
        avg_num_tokens, vp_stage, schedule_layer_no, page_size: stored for the caller. is_columnwise_scale_inv: must not
        be True. Raises ValueError for other values.
        """
        rows = tensor.shape[0] if max_num_tokens is None else max_num_tokens
        width = tensor.numel() // rows if rows else 1
        if not tensor.is_contiguous() or rows * width != tensor.numel() or hidden_size not in (None, width):
            raise ValueError(
                f"tensor has shape {list(tensor.shape)} and strides {tensor.stride()}: must be contiguous, with "
                f"max_num_tokens ({max_num_tokens}) rows of hidden_size ({hidden_size}) elements"
            )
        if is_columnwise_scale_inv:
            raise ValueError("is_columnwise_scale_inv is True: must be False, because rows must be in token order")
        self.num_tokens_tensor, self.avg_num_tokens, self.vp_stage = num_tokens_tensor, avg_num_tokens, vp_stage
        self.schedule_layer_no, self.page_size = schedule_layer_no, page_size
        self.original_shape = torch.Size(tensor.shape if original_shape is None else original_shape)
        self._tensor: Tensor | None = tensor.detach()
        self._rows, self._row_bytes, self._dtype = rows, width * tensor.element_size(), tensor.dtype
        self._group: PageGroup | None = None

    def offload_to_stash(self, paged_stash_buffer: PagedStashBuffer, max_blocks: int = 2048) -> None:
        """Copies the live rows into pages and drops the tensor; sets the buffer's flags.

        max_blocks: maximum number of programs of the copy on a GPU. If pages run out, all rows are lost and `overflow`
        is set.
        """
        if self._tensor is None:
            raise RuntimeError("the tensor is already in pages: call reload_from_stash first")
        pool, source = paged_stash_buffer.pool, self._tensor
        count = self.num_tokens_tensor
        num_rows = torch.full((1,), self._rows, device=source.device, dtype=torch.int64)
        if count is not None:
            num_rows = count.detach().reshape(1).to(source.device, torch.int64)
        self._group = pool.open_group([TensorSpec(self._row_bytes, self._row_bytes, self._rows)])
        spilled = pool.counters[Counter.SPILLED_PAGES].clone()
        pool.plan(self._group, num_rows)
        pool.stash(self._group, [source.reshape(-1).view(torch.uint8)], num_programs=max_blocks)
        dropped = self._group.dropped(0)
        buffer = paged_stash_buffer
        buffer.overflow.copy_(torch.maximum(buffer.overflow.reshape(1).long(), dropped).reshape(buffer.overflow.shape))
        spill = (pool.counters[Counter.SPILLED_PAGES] > spilled).reshape(1).long()
        buffer.host_spill.copy_(
            torch.maximum(buffer.host_spill.reshape(1).long(), spill).reshape(buffer.host_spill.shape)
        )
        self._tensor = None

    def reload_from_stash(self, paged_stash_buffer: PagedStashBuffer, max_blocks: int = 2048) -> Tensor:
        """Restores the tensor and frees its pages. Returns [*original_shape], the original dtype.

        Live rows are bit-identical. Other rows are undefined.
        """
        if self._group is None:
            raise RuntimeError("the tensor is not in pages: call offload_to_stash first")
        pool = paged_stash_buffer.pool
        memory = torch.empty(self._rows * self._row_bytes, dtype=torch.uint8, device=pool.device)
        pool.restore(self._group, [memory], num_programs=max_blocks)
        pool.release(self._group)
        pool.close_group(self._group)
        self._group, self._tensor = None, memory.view(self._dtype).view(self.original_shape)
        return self._tensor


# --- Steps that overflow ---


class PagedStashRunner:
    """Runs the passes of a step, and reruns them without the stash after a stash or expert overflow.

    Replaces the function that get_forward_backward_func returns, with the same keywords. Gradients of the discarded
    passes are cleared.
    """

    def __init__(
        self,
        config: Any,
        copy_main_params: bool,
        model: Any,
        optimizer: Any,
        forward_backward_func: Callable[..., Any],
        *,
        manager: AnyManager | None = None,
    ) -> None:
        """Finds the layers with fixed-size buffers.

        config: passed to paged_stash_reset. copy_main_params: must be False; only 8-bit parameters need a copy. model:
        a module, or a list of model chunks, optionally wrapped for data parallelism. optimizer: or None.
        """
        if copy_main_params:
            raise ValueError("copy_main_params is True: must be False, because 8-bit parameters are not supported")
        self.config, self.optimizer, self.forward_backward_func = config, optimizer, forward_backward_func
        self.model = list(model) if isinstance(model, (list, tuple)) else [model]
        self.manager = _manager_or_default(manager)
        # Layers with fixed-size buffers; the layers of a stage share one record.
        modules = [module for chunk in self.model for module in chunk.modules()]
        self._expert_steps = list(dict.fromkeys(one for one in modules if "rows_missing" in vars(one)))
        self.num_reruns = 0

    def __call__(
        self, *, data_iterator: Any, num_microbatches: int, forward_only: bool = False, **keywords: Any
    ) -> Any:
        """Runs the passes, at most twice, and returns their result. Collective.

        Raises RuntimeError if the rerun also overflows, which requires a larger moe_expert_rank_capacity_factor.
        """
        model = keywords.pop("model", self.model)
        batches = self.data_read(data_iterator, model, not forward_only, num_microbatches)

        def run() -> Any:
            for step in self._expert_steps:
                step.begin()
            return self.forward_backward_func(
                data_iterator=_iterators(batches),
                model=model,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                **keywords,
            )

        paged_stash_reset(not forward_only, self.config, manager=self.manager)
        result = run()
        if forward_only or not self.check_moe_overflow():
            return result
        self.prepare_for_rerun(is_training=True)
        result = run()
        if self.check_moe_overflow():
            raise RuntimeError(
                "the experts received more rows than fit in their buffers: increase moe_expert_rank_capacity_factor "
                "with token_dispatcher.set_capacity_factor()"
            )
        return result

    def data_read(self, data_iterator: Any, model: Any, training: bool, num_microbatches: int) -> Any:
        """Reads all batches of a step, so that the step can be rerun. Returns a list, or a tuple of one list per chunk.

        data_iterator: an iterator or None, or a list with one entry per chunk. model, training: unused.
        """
        if isinstance(data_iterator, (list, tuple)):
            return tuple(self.data_read(one, model, training, num_microbatches) for one in data_iterator)
        return None if data_iterator is None else [next(data_iterator) for _ in range(num_microbatches)]

    def check_moe_overflow(self) -> bool:
        """Returns whether a stash overflow or an expert overflow occurred on any rank. Collective."""
        return self._any_missing_sync()

    def prepare_for_rerun(self, is_training: bool = True) -> None:
        """Clears the gradients of the discarded passes, and disables the stash for the rerun."""
        self.num_reruns += 1
        if is_training:
            for chunk in self.model:
                # A data-parallel wrapper stores gradients in separate buffers.
                clear = chunk.zero_grad_buffer if "zero_grad_buffer" in dir(type(chunk)) else chunk.zero_grad
                clear()
            if self.optimizer is not None:
                self.optimizer.zero_grad()
        paged_stash_reset(False, manager=self.manager)

    def _any_missing_sync(self) -> bool:
        flags = [check_paged_stash_overflow(manager=self.manager).reshape(1)]
        flags += [step.rows_missing.reshape(1) for step in self._expert_steps]
        missing = torch.stack([flag.to(flags[0].device) for flag in flags]).amax(dim=0)
        if dist.is_initialized():
            # Gloo requires host memory and NCCL device memory, so the flag is on the model's device.
            dist.all_reduce(missing, dist.ReduceOp.MAX)
        return bool(missing.item() > 0)


def _iterators(batches: Any) -> Any:
    if isinstance(batches, tuple):
        return [_iterators(one) for one in batches]
    return None if batches is None else iter(batches)
