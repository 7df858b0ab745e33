"""Draws modules of random layers, dtypes, ties, hooks and uses whose gradients are integers. Holds no tests."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS, SEQUENCE = 6, 11, 4
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
# Largest gradient of a parameter in one backward pass. The sums over all uses, micro-batches and ranks fit into the 8
# significant bits of bf16, so they are exact regardless of the order of a sum and of where a mean is taken.
LARGEST = 3


def rounded_gradient(grad: Tensor, factor: int) -> Tensor:
    """Scales a gradient to integers from -LARGEST to LARGEST, times a factor, in the same shape and dtype."""
    if grad.numel() == 0:
        return grad
    wide = grad.double()
    largest = wide.abs().max().clamp(min=torch.finfo(FP64).tiny)
    return ((wide / largest * LARGEST).round() * factor).to(grad)


class _Rounded(torch.autograd.Function):
    """Returns a parameter unchanged in forward, and rounds its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return rounded_gradient(grads[0], ctx.factor), None


# Layers that map [B, S, H] to [B, S, H].


class _Conv(nn.Module):
    """Two convolutions over an image of S x H / 2 pixels and 2 channels."""

    def __init__(self, *, channels_last: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 2, (1, 3), padding=(0, 1)))
        if channels_last:
            self.layers.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unflatten(2, (2, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)


class _Groups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class _Collections(nn.Module):
    """Parameters in a list and a dictionary. dtypes: of these three, and of a scalar if has_scalar."""

    def __init__(self, dtypes: Sequence[torch.dtype], *, has_scalar: bool) -> None:
        super().__init__()
        self.factors = nn.ParameterList([torch.rand(WIDTH, dtype=FP32).to(dtype) + 0.5 for dtype in dtypes[:2]])
        self.named = nn.ParameterDict({"shift": torch.randn(SEQUENCE, WIDTH, dtype=FP32).to(dtypes[2])})
        self.gain = nn.Parameter(torch.tensor(0.75, dtype=dtypes[0])) if has_scalar else None

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.factors
        out = x * first + (x * second).tanh() + self.named["shift"]
        return out if self.gain is None else out * self.gain


class _Empty(nn.Module):
    """A layer and parameters without elements, which contribute to the output if they are used."""

    def __init__(self, *, is_used: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.empty = nn.ParameterList([torch.empty(0, 4), torch.empty(2, 0), torch.empty(0)])
        self.is_used = is_used

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return out + sum(param.sum() for param in self.empty) if self.is_used else out


class _Buffered(nn.Module):
    """A layer with buffers: factors, and a non-persistent count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("factor", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x * self.factor)


def _collections(rng: random.Random) -> nn.Module:
    same = [rng.choice([FP32, BF16])] * 3
    mixed = [rng.choice([FP32, BF16, FP64]) for _ in range(3)]
    return _Collections(mixed if rng.random() < 0.2 else same, has_scalar=rng.random() < 0.25)


KINDS: dict[str, Callable[[random.Random], nn.Module]] = {
    "linear": lambda rng: nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7),
    "mlp": lambda rng: nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)),
    "conv": lambda rng: _Conv(channels_last=rng.random() < 0.3),
    "layer norm": lambda rng: nn.LayerNorm(WIDTH),
    "group norm": lambda rng: _Groups(),
    "attention": lambda rng: _Attention(),
    "gru": lambda rng: _Recurrent(nn.GRU),
    "lstm": lambda rng: _Recurrent(nn.LSTM),
    "collections": _collections,
    "weight norm": lambda rng: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda rng: orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley"),
    "empty": lambda rng: _Empty(is_used=rng.random() < 0.5),
    "buffered": lambda rng: _Buffered(),
}
# Kinds that some modes do not support, or that resemble others, are drawn less often.
WEIGHTS = {"linear": 2.0, "empty": 0.35, "lstm": 0.5, "orthogonal": 0.4}
# Modules with an LU factorization or with several dtypes are not converted.
KEEPS_DTYPE = ("orthogonal", "collections")


class Part(nn.Module):
    """A layer that computes in its parameters' dtype, with or without recomputation in backward.

    recompute: use_reentrant of the checkpoint; None: no recomputation. rounds: factor of rounded_gradient, if the layer
    rounds gradients where it reads its parameters; None: it does not.
    """

    def __init__(self, inner: nn.Module, *, kind: str, recompute: bool | None = None) -> None:
        super().__init__()
        self.inner, self.kind, self.recompute = inner, kind, recompute
        self.rounds: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return self._computed(x)
        return checkpoint(self._computed, x, use_reentrant=self.recompute)

    def _computed(self, x: Tensor) -> Tensor:
        if x.is_floating_point() and (dtype := self._dtype()) is not None:
            x = x.to(dtype)
        if self.rounds is None:
            return self.inner(x).to(FP32)
        named = self.inner.named_parameters()
        return functional_call(self.inner, {name: _Rounded.apply(p, self.rounds) for name, p in named}, (x,)).to(FP32)

    def _dtype(self) -> torch.dtype | None:
        """Returns the common dtype of all parameters, or None if they differ."""
        dtypes = {param.dtype for param in self.inner.parameters()}
        return dtypes.pop() if len(dtypes) == 1 else None


class Net(nn.Module):
    """Computes the loss of an embedding, residual parts in a given order with repetitions, and an output layer."""

    def __init__(self, parts: Sequence[Part], order: Sequence[int]) -> None:
        super().__init__()
        self.table = Part(nn.Embedding(WORDS, WIDTH), kind="embedding")
        self.parts = nn.ModuleList(parts)
        self.head = Part(nn.Linear(WIDTH, WORDS, bias=False), kind="head")
        self.order = list(order)

    def forward(self, words: Tensor, left_out: frozenset[int] = frozenset()) -> Tensor:
        """Computes the loss: [], fp32.

        words: [B, S], int64. left_out: positions in the order that this forward does not run.
        """
        x = self.table(words)
        for place, index in enumerate(self.order):
            if place not in left_out:
                x = x + torch.tanh(self.parts[index](x))
        return F.cross_entropy(self.head(x).flatten(0, 1).to(FP32), words.roll(1, 1).flatten())

    def all_parts(self) -> Iterator[Part]:
        """Yields the embedding, the parts and the output layer."""
        yield from (self.table, *self.parts, self.head)


@dataclass
class Draw:
    """A module and the settings of its training.

    apart: whether some parameters use a different learning rate and weight decay. scales: factors of tensor hooks, by
    parameter name. counted: names of parameters whose post-accumulate hooks are counted. optional: positions in the
    order that some ranks leave out in some steps.
    """

    seed: int
    net: Net
    default_dtype: torch.dtype
    autocast: bool
    clips: bool
    microbatches: int
    sends_each: bool
    apart: bool
    grad_reduce_in_fp32: bool
    rounds_inside: bool
    scales: dict[str, float] = field(default_factory=dict)
    counted: list[str] = field(default_factory=list)
    watched: bool = False
    optional: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = [f"{part.kind} {part._dtype()}".replace("torch.", "") for part in self.net.parts]
        settings = {name: value for name, value in vars(self).items() if name != "net"}
        return f"{settings}, order {self.net.order} of {kinds}"

    def words(self, step: int, microbatch: int, rank: int) -> Tensor:
        """Returns the batch of a rank: [3, S], int64."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 100 * step + 10 * microbatch + rank)
        return torch.randint(0, WORDS, (3, SEQUENCE), generator=generator)

    def left_out(self, step: int, rank: int) -> frozenset[int]:
        """Returns the positions in the order that a rank does not run in a step."""
        return frozenset(place for place in self.optional if (step + rank + place) % 3 == 0)

    def adds_up(self) -> bool:
        """Returns whether a parameter may accumulate several gradients in a step."""
        return self.microbatches > 1 or any(part.recompute for part in self.net.all_parts())

    def spare_units(self) -> None:
        """Removes positions that only some ranks run and repeated reentrant checkpoints, which sharded units reject."""
        self.optional = []
        for index, part in enumerate(self.net.parts):
            if part.recompute and self.net.order.count(index) > 1:
                part.recompute = False

    def settle_counts(self) -> None:
        """Removes optional uses that are rejected where gradients are released.

        A part with reentrant recomputation produces a gradient for each use, and must not be used more often in a step
        than in the previous one.
        """
        if any(self.net.parts[part].recompute and self.net.order.count(part) > 1 for part in self.net.order):
            self.optional = []

    def loss(self, module: nn.Module, step: int, microbatch: int, rank: int) -> Tensor:
        """Runs a forward of the net or its wrapper and returns the loss: [], fp32."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return module(self.words(step, microbatch, rank), self.left_out(step, rank))

    def add_hooks(self, net: Net, *, factor: int, inside: bool) -> None:
        """Rounds all gradients of a copy of the net, and registers the hooks that were drawn.

        factor: multiplies the integers. inside: rounds where parameters are read instead of in tensor hooks, and
        registers only module hooks.
        """
        for part in net.all_parts():
            part.rounds = factor if inside else None
        if self.watched:
            for part in net.all_parts():
                part.register_forward_hook(lambda module, args, out: out * 2)
                part.register_forward_pre_hook(lambda module, args: None)
                part.register_full_backward_hook(lambda module, given, grads: None)
        if inside:
            return
        for name, param in net.named_parameters():
            if param.requires_grad:
                param.register_hook(lambda grad: rounded_gradient(grad, factor))
                if name in self.scales:
                    param.register_hook(lambda grad, scale=self.scales[name]: grad * scale)


def draw(seed: int) -> Draw:
    """Draws the module and the training settings of a seed, the same on every rank."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    usual = rng.choice(["fp32", "fp32", "bf16", "fp64", "mixed"])
    reentrant = rng.random() < 0.4
    parts = [_draw_part(rng, usual, reentrant=reentrant) for _ in range(rng.randint(2, 5))]
    order = list(range(len(parts)))
    rng.shuffle(order)
    if rng.random() < 0.4:
        order.insert(rng.randrange(len(order)), rng.choice(order))
    if rng.random() < 0.25:
        order.remove(rng.choice(order))  # never used, unless it occurs twice
    net = Net(parts, order)
    if usual in ("bf16", "fp64"):
        for part in (net.table, net.head):
            part.to(BF16 if usual == "bf16" else FP64)
    _tie(rng, net)
    trained = [name for name, _ in net.named_parameters()]
    for param in net.parameters():
        param.requires_grad_(rng.random() > 0.1)
    net.head.inner.weight.requires_grad_(True)  # this may be the embedding's weight too
    return Draw(
        seed,
        net,
        default_dtype=rng.choice([FP32, FP32, BF16, FP64]),
        autocast=usual in ("fp32", "mixed") and rng.random() < 0.4,
        clips=rng.random() < 0.5,
        microbatches=rng.randint(1, 2),
        sends_each=rng.random() < 0.3,
        apart=rng.random() < 0.5,
        grad_reduce_in_fp32=rng.random() < 0.5,
        rounds_inside=rng.random() < 0.4,
        scales={name: rng.choice([0.5, 2.0, -1.0]) for name in trained if rng.random() < 0.15},
        counted=[name for name in trained if rng.random() < 0.15],
        watched=rng.random() < 0.4,
        optional=[place for place in range(len(order)) if rng.random() < 0.3] if rng.random() < 0.3 else [],
    )


def _draw_part(rng: random.Random, usual: str, *, reentrant: bool) -> Part:
    kind = rng.choices(list(KINDS), [WEIGHTS.get(kind, 1.0) for kind in KINDS])[0]
    inner = KINDS[kind](rng)
    if kind not in KEEPS_DTYPE:
        inner.to({"fp32": FP32, "bf16": BF16, "fp64": FP64}.get(usual) or rng.choice([FP32, BF16, FP64]))
    recompute = reentrant if rng.random() < 0.3 else None
    return Part(inner, kind=kind, recompute=recompute)


def _tie(rng: random.Random, net: Net) -> None:
    """Randomly ties the output layer's weight to the embedding, and one linear layer's weight to another's."""
    if rng.random() < 0.3:
        net.head.inner.weight = net.table.inner.weight
    linear = [part.inner for part in net.parts if part.kind == "linear"]
    same = [other for other in linear[1:] if other.weight.dtype == linear[0].weight.dtype]
    if same and rng.random() < 0.5:
        same[0].weight = linear[0].weight
