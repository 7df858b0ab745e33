"""Layers and mappings split over three ranks agree with one process in fp64: values, gradients, shards and errors."""

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core import tensor_parallel as tp
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.logical_tensors import model_logical_pieces
from megatron.core.process_groups_config import ALONE, ProcessGroupCollection
from megatron.core.tensor_parallel import linear as linear_module
from megatron.core.tensor_parallel.linear import linear_with_frozen_weight
from megatron.core.tensor_parallel.mappings import part_of
from megatron.core.tensor_parallel.param_attributes import gradient_of, param_facts
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import small_batch, small_config, small_model

RANKS = 3
SEQ, BATCH, IN, OUT = 6, 2, 9, 12


def test_layers_agree_with_one_process() -> None:
    run_on_ranks(_compare_layers, RANKS)


def _compare_layers() -> None:
    group = dist.group.WORLD
    for sequence_parallel in (False, True):
        _compare_linears(group, sequence_parallel=sequence_parallel)
        _compare_embedding(group, reduce_scatter=sequence_parallel)
    _compare_whole_activations(group)
    with pytest.raises(ValueError, match=r"output_size is 4: must be divisible by the 3"):
        tp.ColumnParallelLinear(4, 4, config=small_config(), init_method=nn.init.normal_, tp_group=group)


def _compare_whole_activations(group: Any) -> None:
    """Compares layers with whole activations on every rank, and logits that a model gathers on demand."""
    config = small_config(params_dtype=torch.float64)
    shared: dict[str, Any] = {"config": config, "init_method": config.init_method, "tp_group": group}
    tp.model_parallel_cuda_manual_seed(7, tp_rank=dist.get_rank())
    column = tp.ColumnParallelLinear(IN, OUT, gather_output=True, skip_bias_add=True, **shared)
    row = tp.RowParallelLinear(OUT, IN, input_is_parallel=False, bias=False, **shared)
    x = torch.randn(SEQ, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    weights = [
        tp.gather_from_tensor_model_parallel_region(layer.weight.detach().t().contiguous(), group).t()
        if layer is column
        else tp.gather_from_tensor_model_parallel_region(layer.weight.detach(), group)
        for layer in (column, row)
    ]
    hidden, bias = column(x)
    torch.testing.assert_close(hidden, x @ weights[0].t())
    assert bias is column.bias
    output, none = row(hidden)
    assert none is None
    torch.testing.assert_close(output, x @ weights[0].t() @ weights[1].t())
    (grad,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(grad, (weights[1].sum(0) @ weights[0]).expand(SEQ, IN))

    config = small_config(num_attention_heads=6, hidden_size=24, ffn_hidden_size=48, tensor_model_parallel_size=RANKS)
    with pytest.raises(ValueError, match="tensor_model_parallel_size is 3, but pg_collection.tp has 1 ranks"):
        small_model(config)
    groups = ProcessGroupCollection(tp=group)
    split, whole = (small_model(config, pg_collection=groups, parallel_output=parallel) for parallel in (True, False))
    parts = [model(*small_batch()[:2], None) for model in (split, whole)]
    torch.testing.assert_close(parts[0], part_of(parts[1], group, dim=-1))


def _compare_linears(group: Any, *, sequence_parallel: bool) -> None:
    """Compares a column-parallel and a row-parallel layer, which adds its bias, with two unsplit layers."""
    config = small_config(params_dtype=torch.float64)
    config.sequence_parallel = sequence_parallel
    shared: dict[str, Any] = {"config": config, "init_method": config.init_method}
    torch.manual_seed(1)
    wholes = [nn.Linear(IN, OUT).double(), nn.Linear(OUT, IN).double()]
    config.perform_initialization = False
    layers = [
        tp.ColumnParallelLinear(IN, OUT, tp_group=group, **shared),
        tp.RowParallelLinear(OUT, IN, tp_group=group, **shared),
    ]
    _copy_pieces(layers, wholes)
    x = torch.randn(SEQ, BATCH, IN, dtype=torch.float64)
    expected_input = x.clone().requires_grad_()
    expected = wholes[1](wholes[0](expected_input).square())
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    own = _sequence_part if sequence_parallel else _whole
    input_ = own(x).clone().requires_grad_()
    output, skipped = layers[1](layers[0](input_)[0].square())
    assert skipped is None
    torch.testing.assert_close(output, own(expected.detach()), rtol=1e-12, atol=1e-12)
    # For a split sequence, only this rank's part is saved for backward.
    kept = [saved.shape for saved in layers[0](input_)[0].grad_fn.saved_tensors]
    assert kept == [input_.shape, layers[0].weight.shape]
    with _recorded_order() as order:
        (output * own(weights)).sum().backward()
    reduction = "reduce_scatter_rows" if sequence_parallel else "all_reduce_sum"
    assert order == (["all_gather_rows"] if sequence_parallel else []) + ["dgrad", reduction, "wgrad", "wait"]
    torch.testing.assert_close(input_.grad, own(expected_input.grad), rtol=1e-12, atol=1e-12)
    for layer, whole in zip(layers, wholes):
        for name, param in layer.named_parameters():
            grad = param.grad
            assert grad is not None
            if param_facts(param).sequence_parallel:
                dist.all_reduce(grad, group=group)
            torch.testing.assert_close(grad, _own_piece(layer, name, whole.get_parameter(name).grad))


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_layers_under_autocast_agree_with_torchs_linear_under_it(ranks: int) -> None:
    run_on_ranks(_compare_under_autocast, ranks)


def _compare_under_autocast() -> None:
    """Compares layers with fp32 weights, with and without a gradient buffer, under bf16 autocast.

    With several ranks, partial sums are rounded to bf16.
    """
    tolerance = {"rtol": 0.0, "atol": 0.0} if dist.get_world_size() == 1 else {"rtol": 0.05, "atol": 0.05}
    for sequence_parallel, is_wrapped in product((False, True), repeat=2):
        config = small_config(perform_initialization=False, gradient_accumulation_fusion=True)
        config.sequence_parallel = sequence_parallel and dist.get_world_size() > 1
        own = _sequence_part if config.sequence_parallel else _whole
        torch.manual_seed(1)
        wholes = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN))
        shared: dict[str, Any] = {"config": config, "init_method": config.init_method, "tp_group": dist.group.WORLD}
        layers = nn.ModuleList([tp.ColumnParallelLinear(IN, OUT, **shared), tp.RowParallelLinear(OUT, IN, **shared)])
        _copy_pieces(list(layers), list(wholes))
        if is_wrapped:
            groups = ProcessGroupCollection(tp=dist.group.WORLD, dp=ALONE, dp_cp=ALONE)
            wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), layers, pg_collection=groups)
            wrapped.zero_grad_buffer()
        x = torch.randn(SEQ, BATCH, IN)
        with torch.autocast("cpu", torch.bfloat16):
            expected = wholes(x)
            output = layers[1](layers[0](own(x))[0])[0]
        assert output.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(output, own(expected), **tolerance)
        expected.float().square().sum().backward()
        output.float().square().sum().backward()
        for layer, whole in zip(layers, wholes):
            for name, param in layer.named_parameters():
                grad = gradient_of(param)
                assert grad is not None and grad.dtype == torch.float32
                if param_facts(param).sequence_parallel:
                    dist.all_reduce(grad)
                expected_grad = _own_piece(layer, name, whole.get_parameter(name).grad)
                scaled = {**tolerance, "atol": tolerance["atol"] * float(expected_grad.abs().max())}
                torch.testing.assert_close(grad, expected_grad, **scaled)


class _recorded_order:
    """Records the order of operations in the backward of a split linear layer."""

    def __enter__(self) -> list[str]:
        self.order: list[str] = []
        names = ("all_gather_rows", "all_reduce_sum", "reduce_scatter_rows")
        self.patches = [
            patch.object(linear_module, name, self._noted(name, getattr(linear_module, name))) for name in names
        ]
        self.patches.append(patch.object(Tensor, "matmul", self._matmul(Tensor.matmul)))
        for one in self.patches:
            one.start()
        return self.order

    def __exit__(self, *error: Any) -> None:
        for one in self.patches:
            one.stop()

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any) -> Any:
            self.order.append(name)
            pending = function(*args)
            if name != "all_gather_rows":
                wait = pending.wait
                pending.wait = lambda: (self.order.append("wait"), wait())[1]
            return pending

        return start

    def _matmul(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def multiply(a: Tensor, b: Tensor) -> Any:
            self.order.append("wgrad" if a.dim() == 2 else "dgrad")
            return function(a, b)

        return multiply


def _compare_embedding(group: Any, *, reduce_scatter: bool) -> None:
    config = small_config(params_dtype=torch.float64)
    config.perform_initialization = False
    table = torch.randn(OUT, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    layer = tp.VocabParallelEmbedding(
        OUT,
        IN,
        init_method=nn.init.normal_,
        config=config,
        tp_group=group,
        reduce_scatter_embeddings=reduce_scatter,
    )
    layer.weight.data.copy_(_own_piece(layer, "weight", table.detach()))
    for ids in (torch.tensor([[0, OUT]]), torch.tensor([[-1, 3]])):
        with pytest.raises(
            ValueError, match=rf"ids from -?\d+ to \d+: must be from 0 to num_embeddings - 1 \({OUT - 1}\)"
        ):
            layer(ids)
    ids = torch.randint(0, OUT, (BATCH, SEQ), generator=torch.Generator().manual_seed(3))
    expected = F.embedding(ids, table)
    expected.square().sum().backward()
    output = layer(ids)
    own = _sequence_part(expected.transpose(0, 1)) if reduce_scatter else expected
    torch.testing.assert_close(output, own.detach())
    output.square().sum().backward()
    assert table.grad is not None
    torch.testing.assert_close(layer.weight.grad, _own_piece(layer, "weight", table.grad))


def test_mappings_are_each_others_gradients() -> None:
    run_on_ranks(_compare_mappings, RANKS)


def _compare_mappings() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    generator = torch.Generator().manual_seed(4)
    # Every rank knows all ranks' inputs and gradients, so it can compute the expected result of each function.
    x = torch.randn(RANKS, SEQ, BATCH, IN, dtype=torch.float64, generator=generator)
    g = torch.randn(RANKS, SEQ, BATCH, IN, dtype=torch.float64, generator=generator)
    first, last = (lambda t: part_of(t, group, dim=0)), (lambda t: part_of(t, group, dim=-1))
    short_x, short_g = x[:, : SEQ // RANKS], g[:, : SEQ // RANKS]
    thin_x, thin_g = x[..., : IN // RANKS], g[..., : IN // RANKS]
    cases: list[tuple[Callable[..., Tensor], Tensor, Tensor, Tensor, Tensor]] = [
        # function, inputs, gradients of the outputs, expected output, expected gradient
        (tp.copy_to_tensor_model_parallel_region, x, g, x[rank], g.sum(0)),
        (tp.reduce_from_tensor_model_parallel_region, x, g, x.sum(0), g[rank]),
        (tp.scatter_to_tensor_model_parallel_region, x, thin_g, last(x[rank]), torch.cat(list(thin_g), -1)),
        (tp.gather_from_tensor_model_parallel_region, thin_x, g, torch.cat(list(thin_x), -1), last(g[rank])),
        (tp.scatter_to_sequence_parallel_region, x, short_g, first(x[rank]), torch.cat(list(short_g))),
        (tp.gather_from_sequence_parallel_region, short_x, g, torch.cat(list(short_x)), first(g.sum(0))),
        (tp.reduce_scatter_to_sequence_parallel_region, x, short_g, first(x.sum(0)), torch.cat(list(short_g))),
        (tp.all_gather_last_dim_from_tensor_parallel_region, thin_x, g, torch.cat(list(thin_x), -1), last(g.sum(0))),
        (tp.reduce_scatter_last_dim_to_tensor_parallel_region, x, thin_g, last(x.sum(0)), torch.cat(list(thin_g), -1)),
    ]
    for function, inputs, grads, output, grad in cases:
        own = inputs[rank].clone().requires_grad_()
        # Without a group there is one rank, so the function returns the same tensor.
        assert function(own) is own
        result = function(own, group=group)
        result.backward(grads[rank])
        torch.testing.assert_close(result.detach(), output, msg=function.__name__)
        torch.testing.assert_close(own.grad, grad, msg=function.__name__)
    parallel_state.initialize_model_parallel(RANKS)
    for function, inputs, _, output, _ in cases:
        own = inputs[rank]
        torch.testing.assert_close(function(own), output, msg=function.__name__)
        assert function(own, group=ALONE) is own
    labels = torch.arange(SEQ * BATCH).view(SEQ, BATCH) % IN
    losses = tp.vocab_parallel_cross_entropy(thin_x[rank], labels)
    torch.testing.assert_close(
        losses, F.cross_entropy(torch.cat(list(thin_x), -1).movedim(-1, 1), labels, reduction="none")
    )
    tp.model_parallel_cuda_manual_seed(5)
    with tp.get_cuda_rng_tracker().fork():
        drawn = tp.gather_from_tensor_model_parallel_region(torch.rand(1))
    assert len(set(drawn.tolist())) == RANKS
    with pytest.raises(ValueError, match="must be divisible by the 3 tensor-parallel ranks"):
        tp.scatter_to_sequence_parallel_region(torch.zeros(4, 1), group)
    batch = {"tokens": torch.arange(6).view(2, 3), "labels": torch.arange(3)} if rank == 0 else None
    received = tp.broadcast_data(["labels", "tokens"], batch, torch.int64)
    assert received["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]] and received["labels"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="tokens is torch.int64: must be torch.float32"):
        tp.broadcast_data(["tokens"], batch, torch.float32, tp_group=group)
    with pytest.raises(ValueError, match="mask is None: must be a tensor; available keys are tokens, labels"):
        tp.broadcast_data(["tokens", "mask"], batch, torch.int64)
    with pytest.raises(ValueError, match="data is None"):
        tp.broadcast_data(["tokens"], None, torch.int64)
    parallel_state.destroy_model_parallel()


def test_rows_move_in_parts_of_any_size() -> None:
    run_on_ranks(_compare_uneven_rows, RANKS)


def _compare_uneven_rows() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    sizes, generator = [3, 0, 2], torch.Generator().manual_seed(6)
    x, g = (torch.randn(RANKS, 5, BATCH, dtype=torch.float64, generator=generator) for _ in range(2))
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for is_share in (True, False):
        part = x[0, rows].clone().requires_grad_()
        whole = tp.gather_from_sequence_parallel_region(part, is_share, group, sizes)
        whole.backward(g[rank])
        assert torch.equal(whole, x[0])
        torch.testing.assert_close(part.grad, (g.sum(0) if is_share else g[rank])[rows])
    own = x[rank].clone().requires_grad_()
    part = tp.reduce_scatter_to_sequence_parallel_region(own, group, sizes)
    part.backward(g[0, rows])
    torch.testing.assert_close(part.detach(), x.sum(0)[rows])
    assert torch.equal(own.grad, g[0])
    for wrong, message in (
        ({"output_split_sizes": [5]}, "must be one for each"),
        ({"use_global_buffer": True}, "False"),
    ):
        with pytest.raises(ValueError, match=message):
            tp.gather_from_sequence_parallel_region(own, group=group, **wrong)

    # Rank r sends r + s rows to rank s.
    send = [rank + other for other in range(RANKS)]
    mine = torch.randn(sum(send), 2, dtype=torch.float64).requires_grad_()
    received = tp.all_to_all(group, mine, send, send)
    back = tp.all_to_all(group, received, send, send)
    assert torch.equal(back, mine)
    received.sum().backward()
    assert torch.equal(mine.grad, torch.ones_like(mine)) and received.shape[0] == sum(send)
    with pytest.raises(ValueError, match="use_nccl_stream is True"):
        tp.all_to_all(group, mine, use_nccl_stream=True)

    tokens = torch.randn(SEQ, IN, generator=torch.Generator().manual_seed(7))
    hidden = tp.all_to_all_sp2hp(part_of(tokens, group, dim=0), group)
    assert torch.equal(hidden, part_of(tokens, group, dim=1))
    assert torch.equal(tp.all_to_all_hp2sp(hidden, group), part_of(tokens, group, dim=0))
    chunk = tp.split_tensor_into_1d_equal_chunks(tokens, new_buffer=True, tp_group=group)
    assert chunk.shape == (SEQ * IN // RANKS,)
    assert torch.equal(tp.gather_split_1d_tensor(chunk, group), tokens.flatten())


def test_layers_of_strided_parts_and_frozen_weights() -> None:
    run_on_ranks(_compare_special_layers, RANKS)


def _compare_special_layers() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    config = small_config(params_dtype=torch.float64)
    tp.model_parallel_cuda_manual_seed(7, tp_rank=rank)
    shared: dict[str, Any] = {"config": config, "init_method": config.init_method, "stride": 2}
    shared |= {"pg_collection": ProcessGroupCollection(tp=group), "keep_master_weight_for_test": True}
    column = tp.ColumnParallelLinear(IN, OUT, bias=False, disable_grad_reduce=True, **shared)
    row = tp.RowParallelLinear(OUT, IN, bias=False, **shared)
    for layer in (column, row):
        assert layer.tp_group is group and layer.master_weight.shape == (layer.output_size, layer.input_size)
        for piece in layer.logical_pieces("")["weight"]:
            box = tuple(slice(o, o + n) for o, n in zip(piece.global_offset, piece.shape, strict=True))
            assert torch.equal(piece.view_of(layer.weight.detach()), layer.master_weight[box])
    # As for gate and up projections: this rank holds rows of the upper and of the lower half.
    halves = column.master_weight.chunk(2)
    assert torch.equal(column.weight, torch.cat([part_of(half, group, dim=0) for half in halves]))
    x = torch.randn(SEQ, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    part, _ = column(x)
    whole, _ = column(x, runtime_gather_output=True)
    assert torch.equal(part_of(whole, group, dim=-1), part) and whole.shape == (SEQ, OUT)
    (grad,) = torch.autograd.grad(part.sum(), x)
    torch.testing.assert_close(grad, column.weight.sum(0).expand(SEQ, IN), msg="the caller sums it")

    weight = torch.randn(4, IN, dtype=torch.float64).requires_grad_()
    for sequence_parallel in (False, True):
        own = (part_of(x, group, dim=0) if sequence_parallel else x).detach().requires_grad_()
        output = linear_with_frozen_weight(own, weight, None, False, True, sequence_parallel, group)
        output.sum().backward()
        total = weight.detach().sum(0)
        dist.all_reduce(total)
        torch.testing.assert_close(own.grad, total.expand_as(own))
        assert weight.grad is None and output.shape == (SEQ, 4)
    split, whole_one = (column.weight, row.weight.detach().new_zeros(1))
    assert tp.param_is_not_tensor_parallel_duplicate(split, group)
    assert tp.param_is_not_tensor_parallel_duplicate(whole_one, group) == (rank == 0)


def _copy_pieces(layers: list[Any], wholes: list[nn.Linear]) -> None:
    for layer, whole in zip(layers, wholes):
        for name, param in layer.named_parameters():
            param.data.copy_(_own_piece(layer, name, whole.get_parameter(name).detach()))


def _own_piece(layer: nn.Module, name: str, whole: Tensor | None) -> Tensor:
    """Returns this rank's part of a whole tensor, as given by the layer's logical pieces."""
    assert whole is not None
    (piece,) = model_logical_pieces(layer)[name]
    assert piece.global_shape == tuple(whole.shape)
    return whole[tuple(slice(o, o + n) for o, n in zip(piece.global_offset, piece.shape, strict=True))]


def _sequence_part(x: Tensor) -> Tensor:
    return part_of(x, dist.group.WORLD, dim=0)


def _whole(x: Tensor) -> Tensor:
    return x
