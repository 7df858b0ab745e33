"""A mock of transformer_engine.pytorch with the published signatures, computed by torch.

A call with a keyword that the published classes do not accept fails here, too. See write_engine_signatures.py.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.context_parallel import join_sequence, split_sequence
from tests.unit_tests.core.extensions.write_engine_signatures import SIGNATURES_FILE

CLASSES: dict[str, Any] = json.loads(SIGNATURES_FILE.read_text())["classes"]


def bound(name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Binds arguments to names. Raises TypeError for arguments that the published method does not accept."""
    signature = CLASSES[name][method]
    given = dict(zip(signature["parameters"], args)) | kwargs
    unknown = sorted(given.keys() - set(signature["parameters"]))
    missing = sorted(set(signature["required"]) - given.keys())
    if unknown or missing or len(given) != len(args) + len(kwargs):
        raise TypeError(f"{name}.{method}: unknown {unknown}, missing {missing}, given {sorted(given)}")
    return given


class _Engine(nn.Module):
    """Base class whose state dict contains extra state in addition to the parameters, as in Transformer Engine."""

    def get_extra_state(self) -> Tensor:
        return torch.zeros(3, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass


class Linear(_Engine):
    """Splits the weight and exchanges activations according to parallel_mode and sequence_parallel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = bound("Linear", "__init__", args, kwargs)
        self.mode, self.split = given["parallel_mode"], given["sequence_parallel"]
        self.tp_group, self.ranks = given["tp_group"], given["tp_size"]
        assert (self.ranks == 1) == (self.tp_group is None) and not given["fuse_wgrad_accumulation"]
        sizes = {"out": given["out_features"], "in": given["in_features"]}
        sizes["out"] //= self.ranks if self.mode == "column" else 1
        sizes["in"] //= self.ranks if self.mode == "row" else 1
        place = {"dtype": given["params_dtype"], "device": given["device"]}
        self.weight = nn.Parameter(torch.empty(sizes["out"], sizes["in"], **place))
        given["init_method"](self.weight)
        # As in Transformer Engine: without a bias, the attribute is an empty tensor.
        self.bias: Any = nn.Parameter(torch.empty(sizes["out"], **place)) if given["bias"] else torch.Tensor()
        self.adds, self.returns = given["bias"] and not given["return_bias"], given["return_bias"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x: Tensor = bound("Linear", "forward", args, kwargs)["inp"]
        if self.mode == "column" and self.ranks > 1:
            into = gather_from_sequence_parallel_region if self.split else copy_to_tensor_model_parallel_region
            x = into(x, group=self.tp_group)
        y = F.linear(x, self.weight)
        if self.mode == "row" and self.ranks > 1:
            out = reduce_scatter_to_sequence_parallel_region if self.split else reduce_from_tensor_model_parallel_region
            y = out(y, group=self.tp_group)
        y = y + self.bias if self.adds else y
        return (y, self.bias) if self.returns else y


class _Norm(_Engine):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = bound("LayerNorm" if isinstance(self, LayerNorm) else "RMSNorm", "__init__", args, kwargs)
        place = {"dtype": given["params_dtype"], "device": given["device"]}
        self.eps = given["eps"]
        assert given["zero_centered_gamma"] is False
        self.weight = nn.Parameter(torch.ones(given["normalized_shape"], **place))
        if isinstance(self, LayerNorm):
            self.bias = nn.Parameter(torch.zeros(given["normalized_shape"], **place))


class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class DotProductAttention(_Engine):
    """Attention over [S, B, N, D] queries, causal or with a mask that is True where attention is forbidden.

    As in Transformer Engine, packed inputs are [T, N, D], and keys and values may have different widths. Under context
    parallelism, each rank of one group or of two levels of groups has two chunks of each sequence.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = bound("DotProductAttention", "__init__", args, kwargs)
        assert given["qkv_format"] == "sbhd" and given["tp_size"] >= 1
        widths = given["kv_channels"]
        self.widths = widths if isinstance(widths, tuple) else (widths, widths)
        self.scale = given["softmax_scale"] or self.widths[0] ** -0.5
        self.cp_group = given.get("cp_group")
        if self.cp_group is not None:
            # From the innermost: first the group that exchanges heads, then the group of the ring.
            self.levels = self.cp_group if isinstance(self.cp_group, list) else [self.cp_group]
            size = math.prod(group.size() for group in self.levels)
            assert len(given["cp_global_ranks"]) == size and dist.get_rank() in given["cp_global_ranks"]
            kinds = ("p2p", "all_gather", "a2a") if len(self.levels) == 1 else ("a2a+p2p",)
            assert given["cp_comm_type"] in kinds and "cp_stream" in given
        self.heads = given["num_attention_heads"] // given["tp_size"], given["num_gqa_groups"] // given["tp_size"]
        self.window, self.dropout = given["window_size"], given["attention_dropout"]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = bound("DotProductAttention", "forward", args, kwargs)
        if given.get("qkv_format") == "thd":
            return self._packed(given)
        if self.cp_group is not None:
            return self._exchanged(given)
        return self._attend(given)

    def _packed(self, given: dict[str, Any]) -> Tensor:
        assert given["attn_mask_type"] == "padding_causal" and self.cp_group is None
        assert torch.equal(given["cu_seqlens_q"], given["cu_seqlens_kv"])
        lengths = given["cu_seqlens_q"].diff().tolist()
        assert given["max_seqlen_q"] == given["max_seqlen_kv"] == max(lengths)
        names = ("query_layer", "key_layer", "value_layer")
        segments = zip(*(given[name].split(lengths) for name in names))
        results = [
            self._attend({**{name: one.unsqueeze(1) for name, one in zip(names, each)}, "attn_mask_type": "causal"})
            for each in segments
        ]
        return torch.cat(results).squeeze(1)

    def _exchanged(self, given: dict[str, Any]) -> Tensor:
        whole = {name: given[name] for name in ("query_layer", "key_layer", "value_layer")}
        for group in self.levels:
            for name, part in whole.items():
                parts = gather_from_sequence_parallel_region(part, group=group).chunk(group.size())
                whole[name] = join_sequence(list(parts), 0)
        context = self._attend({**given, **whole})
        for group in reversed(self.levels):
            context = split_sequence(context, 0, size=group.size(), rank=group.rank())
        return context

    def _attend(self, given: dict[str, Any]) -> Tensor:
        assert (given["key_layer"].shape[-1], given["value_layer"].shape[-1]) == self.widths
        query, key, value = (given[name].permute(1, 2, 0, 3) for name in ("query_layer", "key_layer", "value_layer"))
        assert (query.shape[1], key.shape[1]) == self.heads and self.dropout == 0
        rows, columns = torch.arange(query.shape[2])[:, None], torch.arange(query.shape[2])
        forbidden = columns > rows if "causal" in given["attn_mask_type"] else given["attention_mask"]
        if self.window is not None and self.window[0] >= 0:
            forbidden = forbidden | (columns < rows - self.window[0])
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
        scores = (query @ key.transpose(2, 3) * self.scale).float().masked_fill(forbidden, float("-inf"))
        context = scores.softmax(dim=-1).to(value.dtype) @ value
        return context.permute(2, 0, 1, 3).flatten(2)


@contextmanager
def fake_engine() -> Iterator[None]:
    """Makes `import transformer_engine.pytorch` find the classes of this module."""
    package, inner = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    classes: list[Callable[..., Any]] = [Linear, LayerNorm, RMSNorm, DotProductAttention]
    vars(inner).update({one.__name__: one for one in classes})
    vars(package)["pytorch"] = inner
    with patch.dict(sys.modules, {"transformer_engine": package, "transformer_engine.pytorch": inner}):
        yield
