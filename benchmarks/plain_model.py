"""Implements the reference model of the benchmarks in plain PyTorch, without imports from this project.

Experts run one after another, or as one grouped GEMM. Grouped experts may be spread over ranks.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """Sizes of the model. The defaults are the sizes of the CPU benchmarks."""

    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 4
    num_experts: int = 8
    topk: int = 2
    ffn_hidden_size: int = 512
    vocab_size: int = 8192
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-5
    # Use grouped GEMMs instead of a loop over experts.
    grouped: bool = False
    # Shard the experts over the ranks of the default group. Requires `grouped`.
    expert_parallel: bool = False
    # Number of heads of keys and values, and width of a head. None: as many as queries, and hidden_size / num_heads.
    num_groups: int | None = None
    head_width: int | None = None
    # Normalize queries and keys.
    qk_norm: bool = False
    # Number of experts that the router scores, if it is not num_experts. Requires choices in PlainGroupedMoE.forced.
    num_scores: int | None = None

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.head_width or self.hidden_size // self.num_heads


class PlainAttention(nn.Module):
    """Causal self-attention with rotary positions.

    Rows of `qkv` are ordered by group of heads: the group's queries, its key, its value.
    """

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.num_heads, self.width = config.num_heads, config.width
        self.num_groups = config.num_groups or config.num_heads
        rows = (self.num_heads + 2 * self.num_groups) * self.width
        self.qkv = nn.Linear(config.hidden_size, rows, bias=False)
        self.proj = nn.Linear(self.num_heads * self.width, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.width, eps=config.norm_epsilon) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Applies attention to x, [B, S, H]. cos, sin: [S, D], float. Returns [B, S, H]."""
        batch, seq, _ = x.shape
        qkv = self.qkv(x).view(batch, seq, self.num_groups, -1, self.width)
        q, k, v = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))  # [B, N, S, D]
        q, k = rotate(q, cos=cos, sin=sin), rotate(k, cos=cos, sin=sin)
        is_grouped = self.num_groups != self.num_heads
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        return self.proj(context.transpose(1, 2).reshape(batch, seq, -1))


class PlainExpert(nn.Module):
    """SwiGLU feed-forward layer. The rows of fc1 are the gate's rows, then up's."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=False)
        self.fc2 = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the expert to x, [R, H], float. Returns [R, H]."""
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


class PlainMoE(nn.Module):
    """MoE layer in which each token uses its top-k experts, weighted by a softmax over their scores."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.topk = config.topk
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(PlainExpert(config) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to x, [B, S, H], float. Returns [B, S, H]."""
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = self.router(tokens).topk(self.topk, dim=-1)
        weights = scores.softmax(dim=-1)
        output = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == index)
            rows = expert(tokens[token]) * weights[token, choice, None]
            output = output.index_add(0, token, rows)
        return output.view(x.shape)


class PlainGroupedMoE(nn.Module):
    """PlainMoE with rows sorted by expert. fc1: [E, 2 * F, H] and fc2: [E, H, F], for this rank's experts.

    forced: experts that are used instead of the router's choices, [T, K], int64, below num_experts; or None.
    """

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        self.ranks = dist.get_world_size() if config.expert_parallel else 1
        experts = config.num_experts // self.ranks
        self.router = nn.Linear(config.hidden_size, config.num_scores or config.num_experts, bias=False)
        self.forced: Tensor | None = None
        self.fc1 = nn.Parameter(torch.empty(experts, 2 * config.ffn_hidden_size, config.hidden_size))
        self.fc2 = nn.Parameter(torch.empty(experts, config.hidden_size, config.ffn_hidden_size))
        for weight in (self.fc1, self.fc2):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to x, [B, S, H], float. Returns [B, S, H]."""
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = self.router(tokens).topk(self.config.topk, dim=-1)
        weights = scores.softmax(dim=-1).flatten()
        chosen = (chosen if self.forced is None else self.forced).flatten()
        order = chosen.argsort(stable=True)
        token = order.div(self.config.topk, rounding_mode="floor")
        # Unlike bincount, does not make the host wait for a GPU.
        counts = chosen.new_zeros(self.config.num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        if self.ranks == 1:
            rows = self.experts(tokens[token], counts)
        else:
            rows = self.experts_of_all_ranks(tokens[token], counts)
        return torch.zeros_like(tokens).index_add(0, token, rows * weights[order, None]).view(x.shape)

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Runs this rank's experts on rows sorted by expert and returns [R, H].

        rows: [R, H], float. counts: number of rows of each expert, [E], int64.
        """
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(rows, self.fc1.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.fc2.transpose(1, 2), offs=ends)

    def experts_of_all_ranks(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Exchanges rows so that each rank runs its experts, and returns [R, H].

        rows: [R, H], float, sorted by expert. counts: number of rows of each expert, [E], int64.
        """
        sent = counts.view(self.ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        splits = received.sum(1).tolist(), sent.sum(1).tolist()
        arrived = ExchangedRows.apply(rows, *splits)
        # Rows are received rank by rank, and sorted by expert for each rank.
        expert = torch.arange(sent.shape[1]).repeat(self.ranks).repeat_interleave(received.flatten())
        order = expert.argsort(stable=True)
        results = self.experts(arrived[order], received.sum(0))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return ExchangedRows.apply(results[back], *reversed(splits))


class ExchangedRows(torch.autograd.Function):
    """Exchanges rows between all ranks. Backward exchanges the gradients in the opposite direction."""

    @staticmethod
    def forward(ctx, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Exchanges rows, [sum(sent), H], float. Returns [sum(received), H].

        received, sent: numbers of rows from and to each rank.
        """
        ctx.received, ctx.sent = received, sent
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        """Exchanges grad, [sum(received), H], float. Returns [sum(sent), H]."""
        result = grad.new_empty(sum(ctx.sent), grad.shape[1])
        dist.all_to_all_single(result, grad.contiguous(), ctx.sent, ctx.received)
        return result, None, None


class PlainLayer(nn.Module):
    """Computes x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.attention = PlainAttention(config)
        self.moe_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.moe = PlainGroupedMoE(config) if config.grouped else PlainMoE(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Applies the layer to x, [B, S, H]. cos, sin: [S, D], float. Returns [B, S, H]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.moe(self.moe_norm(x))


class PlainModel(nn.Module):
    """Decoder model with untied embedding and output layer. Its forward returns the mean loss."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss, [], float. input_ids, labels: [B, S], int64."""
        x = self.embedding(input_ids)
        # Like x and not like a weight: while gathers are pending, weights may only be read in their module's forward.
        # Cached, because the copy of new tables would make the host wait for a GPU.
        if self._tables is None or self._tables[0].shape[0] != input_ids.shape[1] or self._tables[0].dtype != x.dtype:
            self._tables = rotary_tables(self.config, input_ids.shape[1], like=x)
        for layer in self.layers:
            x = layer(x, *self._tables)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def rotary_tables(config: PlainConfig, seq_length: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, each [S, D], with the dtype and device of `like`."""
    frequencies = config.rotary_base ** -(torch.arange(0, config.width, 2, dtype=torch.float64) / config.width)
    angles = torch.outer(torch.arange(seq_length, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos().to(like), angles.sin().to(like)


def rotate(x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head against each other and returns a tensor like x.

    x: [B, N, S, D], float. cos, sin: [S, D], float.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@torch.no_grad()
def copy_weights(plain: PlainModel, parameters: dict[str, Tensor]) -> None:
    """Copies the weights of a GPTModel with sequential experts to the plain model.

    parameters: by Megatron's names, [O, I] and [H], any float dtype.
    """
    plain.embedding.weight.copy_(parameters["embedding.word_embeddings.weight"])
    plain.norm.weight.copy_(parameters["decoder.final_layernorm.weight"])
    plain.output.weight.copy_(parameters["output_layer.weight"])
    for number, layer in enumerate(plain.layers):
        assert isinstance(layer, PlainLayer)
        source = {
            name.removeprefix(f"decoder.layers.{number}."): value
            for name, value in parameters.items()
            if name.startswith(f"decoder.layers.{number}.")
        }
        layer.attention_norm.weight.copy_(source["input_layernorm.weight"])
        layer.attention.qkv.weight.copy_(source["self_attention.linear_qkv.weight"])
        layer.attention.proj.weight.copy_(source["self_attention.linear_proj.weight"])
        for name, norm in (("q", layer.attention.q_norm), ("k", layer.attention.k_norm)):
            if isinstance(norm, nn.RMSNorm):
                norm.weight.copy_(source[f"self_attention.{name}_layernorm.weight"])
        layer.moe_norm.weight.copy_(source["pre_mlp_layernorm.weight"])
        layer.moe.router.weight.copy_(source["mlp.router.weight"])
        assert isinstance(layer.moe, PlainMoE)
        for index, expert in enumerate(layer.moe.experts):
            assert isinstance(expert, PlainExpert)
            expert.fc1.weight.copy_(source[f"mlp.experts.local_experts.{index}.linear_fc1.weight"])
            expert.fc2.weight.copy_(source[f"mlp.experts.local_experts.{index}.linear_fc2.weight"])
