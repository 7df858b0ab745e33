"""WeightGradQueue: weight gradients that are computed later have the bits of those computed immediately."""

import copy
import io
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.grad_intake import ParamHooks
from megatron.core.tensor_parallel.linear import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.tensor_parallel.random import CheckpointFunction, checkpoint
from megatron.core.tensor_parallel.weight_grads import (
    GradOwner,
    LinearGrad,
    SplitBackward,
    WeightGradQueue,
    deliver,
    look_up,
    set_grad_owner,
)
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, gradients, loss_of, small_config, small_model

FLAG = "--delay-wgrad-compute"
MOE: dict[str, Any] = {
    **LLAMA_LIKE,
    "num_moe_experts": 4,
    "moe_router_load_balancing_type": "none",
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_shared_expert_intermediate_size": 24,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm", "core_attn"]}
BF16 = {"params_dtype": torch.bfloat16, "bf16": True}


class Lagging(WeightGradQueue):
    """Computes everything as soon as more than `lag` products are pending, and records the highest number."""

    def __init__(self, lag: int | None) -> None:
        super().__init__(FLAG)
        self.lag, self.most = lag, 0

    def append(self, entry: Any) -> None:
        super().append(entry)
        self.most = max(self.most, self.num_pending)
        if entry.product is not None and self.lag is not None and self.num_pending > self.lag:
            self.run()


def queue_of(module: nn.Module, lag: int | None = None) -> Lagging:
    queue = Lagging(lag)
    queue.serve(module.named_parameters())
    return queue


def wrapped(model: Any, **fields: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(**fields), model)


def accumulated(model: Any, ddp: DistributedDataParallel | None) -> dict[str, Tensor]:
    """Returns the gradients of a model, by name, from its wrapper if there is one."""
    if ddp is None:
        return gradients(model)
    ddp.finish_grad_sync()
    assert not gradients(model)
    return {name: grad.clone() for name, grad in ddp.named_main_grads()}


@pytest.mark.parametrize(
    ("fields", "owner", "lag"),
    [
        ({}, "", None),
        ({}, "persistent", 1),
        ({"deterministic_mode": True}, "persistent", 3),
        (MOE, "", 1),
        (MOE, "persistent", None),
        ({**MOE, **BF16}, "", 3),
        ({**MOE, **BF16}, "persistent", 0),
        ({**MOE, "gradient_accumulation_fusion": False}, "persistent", None),
        ({**MOE, **FULL}, "", None),
        ({**MOE, **FULL}, "persistent", 3),
        ({**MOE, **PARTS, **BF16}, "persistent", None),
        ({**MOE, **PARTS}, "", 3),
        ({**MOE, "moe_expert_rank_capacity_factor": 4.0}, "persistent", None),
        ({**MOE, "moe_expert_rank_capacity_factor": 4.0, "mtp_num_layers": 1}, "", None),
        ({"mtp_num_layers": 2, **FULL}, "persistent", None),
        ({"mtp_num_layers": 2, **BF16}, "", 3),
        ({"add_bias_linear": True, "lora_rank": 4}, "persistent", None),
    ],
)
def test_gradients_of_microbatches_have_the_same_bits(fields: dict[str, Any], owner: str, lag: int | None) -> None:
    found = []
    for holds in (False, True):
        model = small_model(small_config(**fields), share_embeddings_and_output_weights=True)
        ddp = wrapped(model, overlap_grad_reduce=True) if owner else None
        queue = Lagging(lag)
        if holds:
            queue.serve(model.named_parameters())
        for number in range(3):
            if ddp is not None and number == 0:
                ddp.zero_grad_buffer()
            loss = loss_of(model) * (1 + number)
            with queue.holding():
                loss.backward()
        assert queue.num_pending == 0 and queue.most > (6 if lag is None else lag) * holds - 1
        found.append(accumulated(model, ddp))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())
    assert all(grad.any() for name, grad in found[0].items() if "lora_a" not in name)


@pytest.mark.parametrize("fields", [{}, MOE, {**MOE, **BF16}, {"add_bias_linear": True, **BF16}])
def test_a_served_model_has_the_same_bits_outside_of_holding(fields: dict[str, Any]) -> None:
    plain, served = (small_model(small_config(**fields)) for _ in range(2))
    queue = queue_of(served)
    for _ in range(2):
        loss_of(plain).backward()
        loss_of(served).backward()
    assert queue.most == 0
    assert all(torch.equal(grad, gradients(served)[name]) for name, grad in gradients(plain).items())


# Backwards that a schedule completes later.


def run_split(queue: WeightGradQueue, losses: Iterable[Tensor], *, lag: int) -> None:
    """Runs backwards of losses, each of which is completed `lag` backwards later."""
    waiting: deque[SplitBackward] = deque()
    for loss in losses:
        with queue.splitting() as split:
            loss.backward()
        waiting.append(split)
        if len(waiting) > lag:
            waiting.popleft().complete()
    for split in waiting:
        split.complete()


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize(
    ("fields", "owner"),
    [
        ({"add_bias_linear": True, **BF16}, ""),
        ({**MOE, "mtp_num_layers": 1}, "persistent"),
        ({**MOE, **FULL}, "persistent"),
        ({**MOE, **PARTS, "moe_expert_rank_capacity_factor": 4.0, "lora_rank": 4}, "persistent"),
    ],
)
def test_split_backwards_deliver_the_same_bits_when_they_are_completed(
    fields: dict[str, Any], owner: str, lag: int
) -> None:
    found = []
    for is_split in (False, True):
        model = small_model(small_config(**fields), share_embeddings_and_output_weights=True)
        ddp = wrapped(model, overlap_grad_reduce=True) if owner else None
        if ddp is not None:
            ddp.zero_grad_buffer()
        losses = (loss_of(model) * (1 + number) for number in range(4))
        queue = WeightGradQueue(FLAG)
        if is_split:
            queue.serve(model.named_parameters())
            run_split(queue, losses, lag=lag)
            queue.release()
        else:
            for loss in losses:
                loss.backward()
        found.append(accumulated(model, ddp))
    assert found[0] and found[0].keys() == found[1].keys()
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


def test_no_gradient_arrives_before_a_split_backward_is_completed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    intake = Intake(consumes=False)
    intake.hooks.watch(model.parameters())
    queue = WeightGradQueue(FLAG)
    queue.serve(model.named_parameters())
    with queue.splitting() as split:
        model(torch.ones(2, 3)).square().sum().backward()
    assert not intake.seen and all(param.grad is None for param in model.parameters())
    split.complete()
    assert len(intake.seen) == 4 and all(param.grad is not None for param in model.parameters())
    # A hook of other code would see no gradient in the backward, also on a bias.
    model[1].bias.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(ValueError, match=rf"1.bias has a post-accumulate-grad hook .* omit {FLAG}"), queue.splitting():
        pass


class Reusing(torch.autograd.Function):
    """Returns the same memory as the gradient of each backward."""

    memory = torch.empty(2)

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return weight.sum() * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Reusing.memory.fill_(ctx.factor), None


def test_gradients_that_are_no_products_outlive_their_backward() -> None:
    weight, table = nn.Parameter(torch.ones(2)), nn.Embedding(4, 2, sparse=True)
    queue = WeightGradQueue(FLAG)
    queue.serve([("weight", weight), *table.named_parameters()])
    losses = (Reusing.apply(weight, factor) + table(torch.tensor([1, 1])).sum() for factor in (1.0, 2.0, 4.0))
    run_split(queue, losses, lag=2)
    assert weight.grad is not None and weight.grad.tolist() == [7, 7]
    assert table.weight.grad is not None and table.weight.grad.to_dense().sum(dim=1).tolist() == [0, 12, 0, 0]


def test_a_failed_split_backward_leaves_nothing_behind() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    queue = queue_of(nn.ParameterDict({"weight": weight}))

    def fail() -> None:
        raise ArithmeticError

    with queue.splitting():
        linear(torch.ones(1, 2), weight).sum().backward()
    first = Watching.apply(torch.ones(1, 2, requires_grad=True), fail)
    with pytest.raises(ArithmeticError), queue.splitting():
        linear(linear(first, weight), weight).sum().backward()
    queue.release()
    linear(torch.ones(1, 2), weight).sum().backward()
    assert weight.grad is not None and (weight.grad == 1).all()


# A weight with several uses, some of which are no products.


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return linear_with_grad_accumulation_and_async_allreduce(x, weight, None, True, False, False)


def in_inner_backwards(x: Tensor, weight: Tensor) -> Tensor:
    """Uses the weight in two recomputed parts with a backward of their own, one of them not only in products."""
    hidden: Tensor = CheckpointFunction.apply(lambda x: linear(x, weight).relu() + weight.sum(), False, x)
    hidden = linear(linear(hidden, weight), weight)
    hidden = CheckpointFunction.apply(lambda x: linear(x, weight).relu(), False, hidden)
    return linear(hidden, weight)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "once": linear,
    "twice": lambda x, weight: linear(linear(x, weight), weight),
    "table and product": lambda x, weight: linear(look_up(torch.tensor([3, 1, 3]), weight), weight),
    "in a norm": lambda x, weight: linear(x, weight) * weight.square().sum(),
    "recomputed": lambda x, weight: linear(checkpoint(lambda x: linear(x, weight).exp(), False, x), weight),
    "in inner backwards": in_inner_backwards,
}


class Intake:
    """Records the gradients with which a parameter becomes ready, and optionally consumes them."""

    def __init__(self, consumes: bool) -> None:
        self.seen: list[Tensor] = []
        self.consumes = consumes
        self.hooks = ParamHooks(self.on_grad, kept=self)

    def on_grad(self, param: nn.Parameter) -> None:
        assert param.grad is not None
        self.seen.append(param.grad.clone())
        if self.consumes:
            param.grad = None


@pytest.mark.parametrize("consumes", [False, True])
@pytest.mark.parametrize("lag", [0, 1, None, "split"])
@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_a_weight_is_ready_after_its_last_product(
    uses: Callable[[Tensor, Tensor], Tensor], lag: int | str | None, consumes: bool
) -> None:
    found = []
    for holds in (False, True):
        generator = torch.Generator().manual_seed(3)
        weight = nn.Parameter(torch.randn(7, 7, generator=generator))
        x = torch.randn(5, 7, generator=generator).requires_grad_()
        intake, queue = Intake(consumes), Lagging(lag if isinstance(lag, int) else None)
        intake.hooks.watch([weight])
        if holds:
            queue.serve([("weight", weight)])
        if holds and lag == "split":
            run_split(queue, (uses(x, weight).sin().sum() for _ in range(3)), lag=1)
        for _ in range(0 if holds and lag == "split" else 3):
            with queue.holding():
                uses(x, weight).sin().sum().backward()
        assert queue.num_pending == 0
        found.append(intake.seen)
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


# What is kept, and for how long.


class Watching(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return grad, None


def test_operands_keep_no_graph_alive_and_are_freed_one_by_one() -> None:
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(3, 4, requires_grad=True)
    queue = queue_of(nn.ParameterDict({"weight": weight}))
    refs: list[weakref.ref[Tensor]] = []
    pending: list[int] = []

    def check() -> None:
        pending.append(queue.num_pending)
        assert all(ref() is None for ref in refs)

    def forward() -> Tensor:
        hidden = Watching.apply(x, check)
        for _ in range(2):
            hidden = hidden.exp()
            refs.append(weakref.ref(hidden))
            hidden = linear(hidden, weight)
        return hidden.sum()

    with queue.holding():
        forward().backward()
    assert pending == [2] and len(refs) == 2

    class Counted:
        """A product that records which products are alive when it is computed."""

        alive: "weakref.WeakSet[Counted]" = weakref.WeakSet()
        num_alive: list[int] = []

        def __init__(self) -> None:
            self.alive.add(self)

        def compute(self) -> Tensor:
            self.num_alive.append(len(self.alive))
            return torch.ones(4, 4)

        def fits(self, out: Tensor) -> bool:
            return False

        def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
            raise AssertionError("there is no owner")

        def detached(self) -> "Counted":
            return self

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            ctx.weight = weight
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor | None:
            return deliver(ctx.weight, Counted(), node=ctx.next_functions[0][0])

    with queue.holding():
        sum(Product.apply(weight) for _ in range(3)).backward()
    assert Counted.num_alive == [3, 2, 1] and not Counted.alive


def test_operands_are_unaffected_by_later_writes_to_the_memory_of_others() -> None:
    table, ids, x = nn.Parameter(torch.zeros(4, 2)), torch.tensor([1, 3]), torch.ones(2, 2, requires_grad=True)
    queue = queue_of(nn.ParameterDict({"table": table}))
    # Created first, and therefore visited last: the next batch overwrites the ids.
    last = Watching.apply(x, ids.zero_)
    with queue.holding():
        (look_up(ids, table) * last).sum().backward()
    assert table.grad is not None and table.grad.sum(dim=1).tolist() == [0, 2, 0, 2]

    # The gradient of a use that is no product may be memory that others read.
    weight, other = nn.Parameter(torch.ones(2, 3)), torch.ones(2, 3)
    queue, shared = queue_of(nn.ParameterDict({"weight": weight})), list[Tensor]()
    set_grad_owner(weight, GradOwner(torch.zeros(2, 3), lambda product: None))
    for _ in range(2):
        plain = weight.view_as(weight)
        plain.register_hook(lambda grad: shared.append(grad))
        with queue.holding():
            (linear(torch.ones(1, 3), weight).sum() + (plain * other).sum()).backward()
    assert weight.grad is not None and (weight.grad == 2).all()
    assert [grad.tolist() for grad in shared] == 2 * [other.tolist()]


def test_gradients_have_the_strides_of_their_parameters() -> None:
    weight, x = nn.Parameter(torch.ones(3, 2).t()), torch.ones(1, 3)
    queue = queue_of(nn.ParameterDict({"weight": weight}))
    with queue.holding():
        linear(x, weight).sum().backward()
    assert weight.grad is not None and weight.grad.stride() == weight.stride() and (weight.grad == 1).all()


def test_a_product_whose_operands_will_be_overwritten_is_computed_at_once() -> None:
    weight, rows = nn.Parameter(torch.ones(2, 2)), torch.ones(3, 2)
    queue = queue_of(nn.ParameterDict({"weight": weight}))

    class Borrowing(LinearGrad):
        def detached(self) -> None:
            """Its rows are memory that will be reused."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            ctx.weight = weight
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor | None:
            given = deliver(ctx.weight, Borrowing(rows, torch.ones(3, 2)), node=ctx.next_functions[0][0])
            rows.zero_()
            return given

    with queue.holding():
        # The linear layer's product is held when the other one arrives.
        (Product.apply(weight) + linear(torch.ones(3, 2), weight).sum()).backward()
    assert weight.grad is not None and (weight.grad == 6).all()


def test_everything_is_computed_at_the_end_of_the_outermost_backward() -> None:
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(3, 4, requires_grad=True)
    queue, pending = queue_of(nn.ParameterDict({"weight": weight})), []
    # An inner backward ends before this function of the outer one runs.
    hidden = Watching.apply(x, lambda: pending.append(queue.num_pending))
    hidden = CheckpointFunction.apply(lambda hidden: linear(hidden, weight), False, hidden)
    held = ExitStack()
    held.enter_context(queue.holding())
    hidden.register_hook(lambda _: held.close())
    linear(hidden, weight).sum().backward()
    # The second use is appended, although the queue no longer holds, because the first is pending.
    assert pending == [2] and queue.num_pending == 0 and weight.grad is not None and not queue.is_holding


def test_a_run_outside_of_the_backward_computes_and_parameters_become_ready_in_it() -> None:
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(3, 4, requires_grad=True)
    queue, intake, events = queue_of(nn.ParameterDict({"weight": weight})), Intake(True), []
    intake.hooks.watch([weight])

    def in_thread() -> None:
        thread = threading.Thread(target=queue.run)
        thread.start()
        thread.join()
        events.append((queue.num_pending, len(intake.seen)))

    with queue.holding():
        linear(Watching.apply(x, in_thread), weight).sum().backward()
    assert events == [(0, 0)] and len(intake.seen) == 1


@pytest.mark.parametrize("is_computed", [False, True])
def test_a_backward_that_fails_leaves_nothing(is_computed: bool) -> None:
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(3, 4, requires_grad=True)
    queue, intake = queue_of(nn.ParameterDict({"weight": weight})), Intake(True)
    intake.hooks.watch([weight])

    def fail() -> None:
        if is_computed:
            queue.run()
        raise ArithmeticError

    with pytest.raises(ArithmeticError), queue.holding():
        linear(Watching.apply(linear(x, weight), fail), weight).sum().backward()
    assert queue.num_pending == 0 and not queue.is_holding and weight.grad is None and not intake.seen
    linear(x, weight).sum().backward()
    assert [grad.tolist() for grad in intake.seen] == [[[3.0] * 4] * 4]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_what_is_asked_of_autograd_is_computed_immediately() -> None:
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(3, 4, requires_grad=True)
    queue = queue_of(nn.ParameterDict({"weight": weight}))
    expected = LinearGrad(torch.ones(3, 4), x.detach()).compute()
    with queue.holding():
        (asked,) = torch.autograd.grad(linear(x, weight).sum(), weight, create_graph=True)
        assert torch.equal(asked, expected) and asked.requires_grad
        linear(x, weight).sum().backward(inputs=[x])
        assert weight.grad is None
        linear(x, weight).sum().backward(create_graph=True)
        assert weight.grad is not None and torch.equal(weight.grad, expected)
        weight.grad = None
        seen: list[Tensor] = []
        handle = weight.register_hook(seen.append)
        linear(x, weight).sum().backward()
        handle.remove()
    assert queue.most == 0 and torch.equal(seen[0], expected) and weight.grad is not None
    assert torch.equal(weight.grad, expected)


# Who may use it.


def test_hooks_of_other_code_are_refused_by_name() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    handle = weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match=f"layer.weight has a post-accumulate-grad hook .*before {FLAG} has"):
        WeightGradQueue(FLAG).serve([("layer.weight", weight)])
    handle.remove()
    queue = WeightGradQueue(FLAG)
    queue.serve([("layer.weight", weight)])
    with pytest.raises(ValueError, match="layer.weight is served by another WeightGradQueue: call release"):
        WeightGradQueue(FLAG).serve([("layer.weight", weight)])
    weight.register_post_accumulate_grad_hook(lambda _: None)
    with (
        pytest.raises(ValueError, match=f"layer.weight has a post-accumulate-grad hook .*or omit {FLAG}"),
        queue.holding(),
    ):
        raise AssertionError("refused before")


def test_hooks_of_parameters_without_products_are_allowed() -> None:
    norm, frozen, seen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4)), list[Tensor]()
    for param in (norm, frozen):
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    frozen.requires_grad_(False)
    queue = queue_of(nn.ParameterDict({"norm": norm, "frozen": frozen}))
    with queue.holding():
        linear(norm.unsqueeze(0), frozen).sum().backward()
    assert [grad.tolist() for grad in seen] == [[4.0] * 4]


def test_hooks_on_reduced_gradients_run_with_the_whole_gradient() -> None:
    model = small_model(small_config())
    name = "output_layer.weight"
    seen: dict[str, Tensor] = {}
    model.get_parameter(name).register_post_accumulate_grad_hook(lambda owned: seen.update(own=owned.grad.clone()))
    ddp = wrapped(model, overlap_grad_reduce=True)
    queue = queue_of(model)
    with queue.holding():
        loss_of(model).backward()
    ddp.finish_grad_sync()
    assert torch.equal(seen["own"], dict(ddp.named_main_grads())[name])


def test_copies_and_released_parameters_are_not_served() -> None:
    for is_wrapped in (False, True):
        model = small_model(small_config())
        ddp = wrapped(model) if is_wrapped else None
        queue = queue_of(model)
        if ddp is not None:
            ddp.release()
        weight = model.get_parameter("output_layer.weight")
        file = io.BytesIO()
        torch.save(weight, file)
        file.seek(0)
        assert "grad_queue" in vars(weight)
        assert not any(
            "grad_queue" in vars(one) for one in (copy.deepcopy(weight), torch.load(file, weights_only=False))
        )
        queue.release()
        assert not any("grad_queue" in vars(param) for param in model.parameters())
