"""Weight gradients that are still to be computed: added directly to the accumulation buffer, or computed later.

Layers pass the operands of the GEMM to `deliver`. They depend neither on the wrapper that accumulates gradients nor
on the schedule that computes them.

[Note: gradient accumulation fusion] A wrapper that accumulates gradients in separate memory (main_grad) registers as
the owner of a weight's gradients. The backward of a layer then passes the owner a WeightGrad, the operands of a GEMM
that is still to be computed, and passes nothing to autograd. This avoids allocating, writing and reading a tensor of
the weight's size. The autograd hook of the weight still runs after all uses of the weight in this backward, with the
gradient of its remaining uses.

On a GPU the result of a half-precision GEMM is added to an fp32 main_grad in fp32, whereas autograd would first round
it to half precision. main_grad therefore receives up to 16 more correct bits. If the dtypes are equal, only the order
of scaling and adding differs, which affects the last digits. Deterministic mode uses no owner.

[Note: held products] A WeightGradQueue serves parameters with and without an owner. While it holds, `deliver` appends
products, and `run` computes them, for example while an exchange is in flight. The result is bit-identical: in one
backward, autograd sums all uses of a weight in the order in which their gradients are computed, adds the sum to `.grad`
and calls the hooks of the parameter. For a weight with pending products,

- the queue takes the gradient of the other uses from the autograd node that would accumulate it,
- hooks of this package, which derive from DeferrableHook, return,
- and the queue appends an entry for both. `run` reaches it after the products, accumulates and calls the hooks.

Other hooks on the parameter would find an incomplete gradient and are refused. At the end of each backward everything
is computed before the wrappers end the backward, so they depend on no schedule.

[Note: split backward] A schedule may complete the gradients of a backward in a later pass of its own. The queue then
holds the gradients of all parameters that it serves, not only products, from the first to the last. The later pass is a
backward as well, for autograd and for the wrappers, but one without a graph: it computes and accumulates what was held,
and calls the hooks. So a wrapper receives all gradients of a microbatch in that pass, in which it may also reduce them,
release them, and update parameters, and nothing in the backward that was split.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from megatron.core.autograd import PlainFunction, complete_backward
from megatron.core.device.torch_internals import current_backward_id, is_in_backward
from megatron.core.tensor_parallel.param_attributes import set_grad_queue


class WeightGrad(Protocol):
    """The gradient of one use of a weight, computed on demand."""

    def compute(self) -> Tensor:
        """Returns the gradient: [*weight shape], the weight's dtype."""
        ...

    def fits(self, out: Tensor) -> bool:
        """Returns whether add_to supports the dtype and device of `out`: [*weight shape], any float dtype."""
        ...

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        """Adds scale times the gradient to `out`: [*weight shape], a float dtype for which `fits` is True.

        is_zero: whether `out` contains only zeros, so that it may be overwritten.
        """
        ...

    def detached(self) -> "WeightGrad | None":
        """Returns the product for use after the layer's backward, with operands that do not keep the graph alive.

        None if the memory of its operands will be reused, so that it must be computed immediately.
        """
        ...

    def kept(self) -> "WeightGrad":
        """Returns the product for use in a later backward, with operands whose memory nothing else will reuse."""
        ...


class GradOwner:
    """Accumulates the gradients of one weight.

    main_grad: accumulation buffer, [*weight shape]. take: called with each gradient; must add it before it returns.
    """

    def __init__(self, main_grad: Tensor, take: Callable[[WeightGrad], None]) -> None:
        self.main_grad, self.take = main_grad, take


def set_grad_owner(param: nn.Parameter, owner: GradOwner | None) -> None:
    """Sets the owner that accumulates a parameter's gradients. None leaves them to autograd."""
    vars(param).update(grad_owner=owner)


def takes_products(weight: Tensor) -> bool:
    """Returns whether backward passes the gradient of this use of a weight, any shape and dtype, to `deliver`.

    That is the case if the weight has an owner or a queue, unless no gradient is recorded.
    """
    marks = weight.__dict__
    is_taken = marks.get("grad_owner") is not None or "grad_queue" in marks
    return is_taken and weight.requires_grad and torch.is_grad_enabled()


def deliver(weight: Tensor, grad: WeightGrad, *, node: Any) -> Tensor | None:
    """Passes a gradient to the weight's queue or owner, or returns it for autograd. Called in backward.

    weight: the leaf itself, any shape and dtype. node: the autograd node that accumulates its gradient. The gradient is
    computed and returned if the weight has neither or has a hook, if the dtypes are incompatible, or if
    torch.autograd.grad or create_graph requests it. Otherwise returns None.
    """
    marks = weight.__dict__
    owner: GradOwner | None = marks.get("grad_owner")
    held: _HeldGrads | None = marks.get("grad_queue")
    if held is not None:
        held.count_delivered()
    if (
        (owner is None and held is None)
        or torch.is_grad_enabled()  # create_graph=True: the gradient itself must be differentiable
        or weight._backward_hooks
        or not _adds_up(node)
    ):
        return grad.compute()
    if held is not None and held.append_product(grad, node):
        return None
    if owner is None or not grad.fits(owner.main_grad):
        return grad.compute()
    owner.take(grad)
    return None


# Weight gradients that are computed later.


class DeferrableHook:
    """Base of post-accumulate-grad hooks that return while `is_deferred`, so that a queue may complete the gradient."""


def is_deferred(param: Tensor) -> bool:
    """Returns whether a queue will complete the gradient of a parameter, any shape and dtype, and call its hooks."""
    held: _HeldGrads | None = param.__dict__.get("grad_queue")
    return held is not None and held.is_deferred


def is_split(param: Tensor) -> bool:
    """Returns whether the running backward holds the gradient of a parameter, any shape and dtype, until another.

    See [Note: split backward].
    """
    held: _HeldGrads | None = param.__dict__.get("grad_queue")
    return held is not None and held.is_split


class WeightGradQueue:
    """Holds products that compute weight gradients of the parameters it serves, until `run`.

        queue = WeightGradQueue("--delay-wgrad-compute")
        queue.serve(model.named_parameters())
        with queue.holding():
            loss.backward()  # code in it may call queue.run(); at its end nothing is pending
        queue.release()

    flag: names the option that uses the queue, in errors. Gradients are bit-identical to those without a queue. Biases
    and other parameters whose gradients are no products are unaffected. See [Note: held products].
    """

    def __init__(self, flag: str) -> None:
        self._flag = flag
        self._served: dict[nn.Parameter, _HeldGrads] = {}
        self._entries: deque[_Entry] = deque()
        # The graph task that has a callback.
        self._task: int | None = None
        # Receives the entries of a split backward while it runs.
        self._split: SplitBackward | None = None
        self.is_holding = False
        # Products of served weights since the last `run`, pending or computed at once.
        self.num_delivered = 0

    def serve(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Serves parameters, such as those of named_parameters(), in addition to earlier ones; call between steps.

        Raises ValueError for a parameter that another queue serves, that FSDP2 has sharded, or that has a
        post-accumulate-grad hook of other code.
        """
        found = {param: _HeldGrads(self, name, param) for name, param in named if param not in self._served}
        for param, held in found.items():
            if isinstance(param, DTensor):
                raise ValueError(
                    f"{held.name} is a DTensor, as in TorchFullyShardedDataParallel, which reduces gradients in each "
                    f"module's backward, but {self._flag} computes some of them later: omit {self._flag}, or "
                    "--use-torch-fsdp2"
                )
            if "grad_queue" in vars(param):
                raise ValueError(f"{held.name} is served by another WeightGradQueue: call release() on that queue")
            held.check_hooks(self._flag)
        self._served |= found
        for param, held in found.items():
            set_grad_queue(param, held)

    def release(self) -> None:
        """Stops serving all parameters; call between steps, or after a backward that has failed."""
        self._drop()
        for param in self._served:
            set_grad_queue(param, None)
        self._served = {}

    @contextmanager
    def splitting(self) -> "Iterator[SplitBackward]":
        """Returns a context for a backward whose gradients are completed later, by `complete` of the returned object.

        Several backwards may be split before the first is completed. They must be completed in their order, between
        other backwards, and before `release`. See [Note: split backward]. Raises ValueError if a parameter has a
        post-accumulate-grad hook of other code.
        """
        for held in self._served.values():
            held.check_hooks(self._flag, is_split=True)
            held.arm()
        self._split = SplitBackward()
        try:
            with self.holding():
                yield self._split
        finally:
            self._split = None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Returns a context for a backward, in which products are held. An exception drops those that are pending.

        Raises ValueError if a parameter has a post-accumulate-grad hook of other code.
        """
        assert not self.is_holding, "the queue holds products already"
        for held in self._served.values():
            held.check_hooks(self._flag)
        if not (is_in_backward() or self.is_splitting):
            self._drop()  # left by a backward that failed after an earlier `holding` had ended
        has_failed = self.is_holding = True
        try:
            yield
            has_failed = False
        finally:
            self.is_holding = False
            if has_failed:
                self._drop()

    @property
    def is_splitting(self) -> bool:
        """Whether the backward that runs is split."""
        return self._split is not None

    @property
    def num_pending(self) -> int:
        """Number of products that are not computed yet."""
        return sum(entry.product is not None for entry in self._entries)

    @torch.no_grad()
    def run(self) -> None:
        """Computes the pending products in the order in which they were appended, and frees their operands.

        May be called by any thread while no other one runs passes of the model. Parameters become ready only in a
        backward: after a call outside of it, when the backward that appended the products continues or ends.
        """
        self.num_delivered = 0
        may_finish, later, waiting = is_in_backward(), list[_Entry](), set[int]()
        while self._entries:
            entry = self._entries.popleft()
            if id(entry.held) in waiting or not (may_finish or entry.product is not None):
                waiting.add(id(entry.held))
                later.append(entry)
            elif entry.product is not None:
                entry.held.compute(entry.product, entry.task)
            else:
                entry.held.finish(entry.rest, entry.task)
        self._entries.extendleft(reversed(later))

    def append(self, entry: "_Entry") -> None:
        """Appends an entry, in backward; called by the parameter's _HeldGrads."""
        if self._split is not None:
            self._split.entries.append(entry)
            return
        if entry.task != self._task:
            self._task = entry.task
            complete_backward(self.run)
        self._entries.append(entry)

    def _drop(self) -> None:
        self.num_delivered = 0
        self._entries.clear()
        for held in self._served.values():
            if held.is_active:
                held.drop()


class _Entry(NamedTuple):
    """A pending product; or if it is None, the end of autograd's accumulation, with the gradient of other uses.

    task: the graph task of its backward.
    """

    held: "_HeldGrads"
    task: int
    product: WeightGrad | None
    rest: Tensor | None = None


class SplitBackward:
    """A backward whose gradients are not accumulated yet. entries: pending gradients, in order of computation."""

    def __init__(self) -> None:
        self.entries: deque[_Entry] = deque()

    def complete(self) -> None:
        """Computes and accumulates all gradients, in a backward of its own. See [Note: split backward]."""
        # Autograd runs a backward of tensors on the CPU on the calling thread, with its current stream.
        root = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        root.register_hook(self._run)
        root.backward()

    @torch.no_grad()
    def _run(self, _: Tensor) -> None:
        while self.entries:
            entry = self.entries.popleft()
            if entry.product is not None:
                entry.held.compute(entry.product, entry.task)
            else:
                entry.held.finish(entry.rest, entry.task)


class _HeldGrads:
    """Pending gradients of one parameter. is_deferred: whether its hooks must return, see [Note: held products].

    is_split: whether the backward that runs holds its gradient for another one, see [Note: split backward].
    """

    def __init__(self, queue: WeightGradQueue, name: str, param: nn.Parameter) -> None:
        self.name, self.is_deferred, self.is_split = name, False, False
        self._queue, self._param = queue, param
        self._num_entries = 0
        # Computed products that have no owner, until autograd's accumulation in their backward, by its graph task.
        # Recomputation may run another backward inside it.
        self._sums: dict[int, Tensor] = {}
        # The autograd node that accumulates, and the hook before it, while there are products.
        self._node: Any = None
        self._handle: RemovableHandle | None = None

    @property
    def is_active(self) -> bool:
        """Whether there are products whose backward has not accumulated yet."""
        return self._handle is not None

    def count_delivered(self) -> None:
        """Records that a layer delivers a product, whether or not it is held."""
        self._queue.num_delivered += 1

    def check_hooks(self, flag: str, *, is_split: bool = False) -> None:
        """Raises ValueError for a post-accumulate-grad hook of other code, which would run too early."""
        if not self._param.requires_grad or (self._param.dim() < 2 and not is_split):
            # No product computes its gradient.
            return
        hooks = self._param._post_accumulate_grad_hooks
        for hook in hooks.values() if hooks else ():
            if not isinstance(hook, DeferrableHook):
                raise ValueError(
                    f"{self.name} has a post-accumulate-grad hook ({hook}), which would run before {flag} has computed "
                    "the gradient: register it with register_post_accumulate_grad_hook of DistributedDataParallel, or "
                    f"omit {flag}"
                )

    def arm(self) -> None:
        """Takes every gradient of the parameter, if it is trained, from the node that would accumulate it."""
        if self._param.requires_grad:
            self._watch(get_gradient_edge(self._param).node)

    def append_product(self, product: WeightGrad, node: Any) -> bool:
        """Appends a product; returns False if it must be computed immediately instead. node: as in deliver."""
        # The sum must keep the order in which the products would be computed without a queue.
        if not (self._queue.is_holding or self.is_active):
            return False
        if self._queue.is_splitting:
            self._append(product.kept())
            return True
        detached = product.detached()
        if detached is None and not self.is_active:
            return False
        self._watch(node)
        self._append(detached or product)
        if detached is None:
            self._queue.run()
        return True

    def compute(self, product: WeightGrad, task: int) -> None:
        """Computes a product, and passes it to the owner or adds it to the sum of its backward."""
        self._num_entries -= 1
        owner: GradOwner | None = vars(self._param).get("grad_owner")
        if owner is not None and product.fits(owner.main_grad):
            owner.take(product)
        elif task in self._sums:
            self._sums[task].add_(product.compute())
        else:
            self._sums[task] = product.compute()

    def finish(self, rest: Tensor | None, task: int) -> None:
        """Accumulates all gradients of a backward as autograd does, and calls the hooks. rest: of other uses."""
        self._num_entries -= 1
        self.is_deferred = self.is_split = False
        self._accumulate(rest, task)
        for hook in [*(self._param._post_accumulate_grad_hooks or {}).values()]:
            hook(self._param)

    def drop(self) -> None:
        """Forgets the gradients of a backward that has failed."""
        self._disarm()
        self._num_entries, self._sums, self.is_deferred, self.is_split = 0, {}, False, False

    def _append(self, product: WeightGrad | None, rest: Tensor | None = None) -> None:
        self._num_entries += 1
        self._queue.append(_Entry(self, current_backward_id(), product, rest))

    def _before_accumulation(self, grads: tuple[Tensor | None, ...]) -> tuple[None]:
        """Hook before autograd accumulates, which does nothing for None. grads: the gradient of other uses, or None."""
        (rest,) = grads
        self.is_split = self._queue.is_splitting
        self.is_deferred = self.is_split or self._num_entries > 0
        if self.is_deferred:
            # A later backward may reuse the memory of a gradient, which autograd would have copied by then.
            self._append(None, rest.clone() if self.is_split and rest is not None else rest)
        else:
            self._accumulate(rest, current_backward_id())
        return (None,)

    def _accumulate(self, rest: Tensor | None, task: int) -> None:
        """Adds the sum of a backward to `.grad` as autograd does. rest: the last gradient of the sum, or None."""
        param, new = self._param, self._sums.pop(task, None)
        if not (self._num_entries or self._sums):
            self._disarm()
        if rest is not None:
            # A copy, because others may read the memory.
            new = rest.clone() if new is None else new.add_(rest)
        if new is None:
            return
        if param.grad is not None:
            param.grad.add_(new)
        else:
            is_ready = new.layout is not torch.strided or new.stride() == param.stride()
            param.grad = new if is_ready else torch.empty_like(param).copy_(new)

    def _watch(self, node: Any) -> None:
        if node is not self._node:
            self._disarm()
            self._node, self._handle = node, node.register_prehook(self._before_accumulation)

    def _disarm(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        # The node would keep the parameter alive.
        self._node = self._handle = None


@dataclass(frozen=True)
class LinearGrad:
    """WeightGrad of y = x W^T, where W is [O, I].

    rows: [N, O], gradient of y; x: [N, I], the same dtype.
    """

    rows: Tensor
    x: Tensor

    def compute(self) -> Tensor:
        """Returns the weight's gradient: [O, I], the dtype of rows and x."""
        return self.rows.t().matmul(self.x)

    def fits(self, out: Tensor) -> bool:
        """Returns whether `out`, [O, I], has the dtype of x, or is fp32 on a GPU with x in half precision."""
        return out.dtype == self.x.dtype or (out.dtype == torch.float32 and is_half_on_gpu(self.x))

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        """Adds scale times the gradient to `out`: [O, I], a supported dtype. is_zero: overwrite `out`."""
        # With beta 0, `out` is not read.
        beta = 0 if is_zero else 1
        if out.dtype == self.x.dtype:
            torch.addmm(out, self.rows.t(), self.x, beta=beta, alpha=scale, out=out)
        else:
            torch.ops.aten.addmm.dtype_out(out, self.rows.t(), self.x, out.dtype, beta=beta, alpha=scale, out=out)

    def detached(self) -> "LinearGrad":
        """Returns the product with detached operands."""
        return LinearGrad(self.rows.detach(), self.x.detach())

    kept = detached


def is_half_on_gpu(tensor: Tensor) -> bool:
    """Returns whether GEMMs of a tensor, any shape and dtype, can add to fp32 without rounding to half precision."""
    return tensor.device.type == "cuda" and tensor.dtype in (torch.bfloat16, torch.float16)


def look_up(ids: Tensor, weight: Tensor) -> Tensor:
    """Looks up embeddings. ids: [*], int64; weight: [V, H], any float dtype -> [*, H], same dtype."""
    # On a GPU, owners do not support the product, and only a queue needs it.
    if (weight.device.type == "cpu" or "grad_queue" in weight.__dict__) and takes_products(weight):
        rows: Tensor = _LookUp.apply(ids, weight)
        return rows
    return nn.functional.embedding(ids, weight)


class _LookUp(PlainFunction):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        return None, deliver(ctx.weight, _LookUpGrad(grad, ids, ctx.weight.shape[0]), node=ctx.next_functions[1][0])


@dataclass(frozen=True)
class _LookUpGrad:
    """WeightGrad of an embedding table, [V, H].

    grad: [*, H], gradient of the looked-up rows; ids: [*], their indices.
    """

    grad: Tensor
    ids: Tensor
    num_rows: int

    def compute(self) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(self.grad, self.ids, self.num_rows, -1, False)

    def fits(self, out: Tensor) -> bool:
        # Rows are added token by token, which would round a narrow dtype each time.
        return out.dtype.itemsize >= 4 and out.device.type == "cpu"

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        rows = self.grad.reshape(-1, out.shape[1]).to(out.dtype)
        out.index_add_(0, self.ids.reshape(-1), rows, alpha=scale)

    def detached(self) -> "_LookUpGrad":
        # The caller may write the ids of the next batch to the same memory.
        return _LookUpGrad(self.grad.detach(), self.ids.clone(), self.num_rows)

    kept = detached


def _adds_up(node: Any) -> bool:
    """Returns whether this backward accumulates into `.grad` of the leaf with that node.

    torch.autograd.grad does not, nor does backward with `inputs` that exclude the leaf.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised by torch for a leaf whose gradient torch.autograd.grad returns
        return False
