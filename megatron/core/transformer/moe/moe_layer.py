"""The mixture-of-experts layer: router, dispatch, experts, combine. MoELayer.forward lists the steps of a token.

The steps are in router.py, dispatch_*.py, experts.py and shared_experts.py.
"""

import inspect
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.config_field import require_defaults
from megatron.core.device import default_device
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, require_group_sizes
from megatron.core.transformer.cuda_graphs import GraphedPart
from megatron.core.transformer.module import MegatronModule, part
from megatron.core.transformer.moe.dispatch import ExchangeCover, as_rows, in_shape, local_experts
from megatron.core.transformer.moe.dispatch_static import MoEStaticAlltoAllTokenDispatcher
from megatron.core.transformer.moe.expert_step import ExpertStep, GraphedExperts
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.permutation import Routing
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.static_rows import StaticOrder
from megatron.core.transformer.moe.token_dispatcher import build_token_dispatcher
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MoESubmodules:
    """Classes or specs of the routed experts, the shared expert, and the router.

    experts: forward(rows [R, H] sorted by expert, tokens_per_expert [e], weights [R]) returns the weighted outputs
    [R, H] and None, because any bias is already added. shared_experts: forward(tokens [T, H]) returns [T, H], or a
    tuple of [T, H] and a bias to add or None. router: forward(tokens [S, B, H]), followed by padding_mask if the layer
    receives one, returns a Routing, or two tables [T, E]: the weights, float, 0 where not chosen, and the choice, bool.
    set_layer_number sets the router's layer, from 1.
    """

    experts: Any = None
    shared_experts: Any = None
    router: Any = TopKRouter


class BaseMoELayer(MegatronModule, ABC):
    """Base class of MoE layers. Determines this rank's experts; subclasses build router, experts and dispatcher."""

    has_experts = True

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
    ) -> None:
        """Determines this rank's experts.

        layer_number: from 1, the number under which the router records its losses; a model sets it when it builds its
        layers. pg_collection: the groups of this rank; None means the groups of parallel_state, if they exist.
        is_mtp_layer: whether the layer belongs to multi-token prediction; passed on to the router.
        """
        super().__init__(config)
        if config.num_moe_experts is None:
            raise ValueError("num_moe_experts is None: must be set for a mixture-of-experts layer")
        self.layer_number, self.is_mtp_layer = layer_number, is_mtp_layer
        groups = pg_collection or existing_process_groups()
        require_expert_ranks(config, groups)
        self.ep_group = groups.ep
        local = local_experts(config, groups.ep)
        self.num_local_experts, self.local_expert_indices = len(local), list(local)
        self.router: Any = None
        self.experts: Any = None
        self.shared_experts: Any = None
        self.token_dispatcher: Any = None

    @abstractmethod
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Runs the layer; hidden_states: [S, B, H], parameter dtype.

        Returns [S, B, H], same dtype, and a bias to add, or None.
        """

    def set_layer_number(self, layer_number: int) -> None:
        """Sets the number of this layer, also in its router. Layers are numbered from 1."""
        self.layer_number = layer_number
        self.router.set_layer_number(layer_number)


class MoELayer(BaseMoELayer):
    """Feed-forward layer in which each token is processed by K of E experts.

    1. `route`: the router chooses and weighs experts for the tokens [T, H].
    2. `preprocess`: the dispatcher orders the tokens' rows, or copies each token into its rows.
    3. `dispatch` sends them to the ranks of their experts.
    4. `routed_experts_compute`: the experts process their rows, sorted by expert, and apply the weights: [R, H].
    5. `combine` sends the rows back.
    6. `postprocess` sums the rows of each token. If there is a shared expert, it adds the shared expert's output for
       every token, which `shared_experts_compute` computes: [T, H]. With moe_shared_expert_overlap the dispatcher runs
       the shared expert in step 3, while rows are sent; see [Note: overlapped exchanges] in dispatch_alltoall.py.

    R is T x K on a single rank without a capacity. Methods decorated with `part` may be recomputed, offloaded, or
    replayed from CUDA graphs. Between steps 2 and 6 the dispatcher stores the order of the rows.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        """Builds the router, dispatcher, experts and shared expert.

        submodules: must contain the experts; otherwise ValueError is raised. name: stored for the caller. The other
        arguments are as in BaseMoELayer.
        """
        if submodules is None or submodules.experts is None:
            raise ValueError(
                "submodules has no experts: pass MoESubmodules(experts=GroupedMLP), or a layer spec from "
                "megatron.core.models.gpt.gpt_layer_specs"
            )
        super().__init__(config, layer_number, pg_collection, is_mtp_layer)
        self.name, self.submodules = name, submodules
        groups = pg_collection or existing_process_groups()
        self.router = build_module(submodules.router, config, pg_collection=groups, is_mtp_layer=is_mtp_layer)
        if layer_number is not None:
            self.router.set_layer_number(layer_number)
        local = range(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.token_dispatcher = build_token_dispatcher(local, config=config, groups=groups)
        is_static = config.moe_expert_rank_capacity_factor is not None
        self.expert_step = ExpertStep(default_device()) if is_static else None
        self.experts = build_module(submodules.experts, self.num_local_experts, config, pg_collection=groups)
        self._choose_precision()
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = build_module(
                submodules.shared_experts,
                config=config,
                gate=config.moe_shared_expert_gate,
                pg_collection=groups,
            )
        self.shared_expert_overlap = config.moe_shared_expert_overlap
        if self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self._run_shared_experts)

    @property
    def exchanges_dropless_rows(self) -> bool:
        """Whether the ranks of experts exchange row counts before the rows."""
        return self.config.exchanges_dropless_rows

    def set_exchange_cover(self, cover: ExchangeCover | None) -> None:
        """Sets the computation that overlaps with the exchanges of rows; None waits for them."""
        self.token_dispatcher.cover = cover

    def set_layer_number(self, layer_number: int) -> None:
        """Sets the number of this layer, on which the precision of its experts depends, also in its router."""
        super().set_layer_number(layer_number)
        self._choose_precision()

    def _choose_precision(self) -> None:
        """Lets the experts of this layer compute in 8 bits, and receive rows in 8 bits, if the configuration does.

        Raises ValueError for experts that cannot.
        """
        form = self.config.block_format_of(self.layer_number)
        if form is not None and not takes_order(self.experts):
            raise ValueError(
                f"fp8 is {self.config.fp8!r}, but the experts of layer {self.layer_number} are "
                f"{type(self.experts).__name__}: must be GroupedMLP, or a subclass whose forward accepts `order`"
            )
        if isinstance(self.experts, GroupedMLP):
            self.experts.set_format(form)
        if isinstance(self.token_dispatcher, MoEStaticAlltoAllTokenDispatcher):
            self.token_dispatcher.sent_format = None if self.config.moe_dispatch_fwd_dtype == "bf16" else form

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer; hidden_states: [S, B, H], parameter dtype.

        padding_mask: [B, S], bool, or None: True for tokens that losses and loads ignore. They are still routed, unless
        experts have a capacity (moe_expert_capacity_factor), of which padding must not take a part.
        intermediate_tensors: must be None. Returns [S, B, H], same dtype, and a bias to add, or None. Raises ValueError
        if padding_mask has a different shape.
        """
        if intermediate_tensors is not None:
            require_defaults(
                "MoELayer.forward",
                "a CUDA graph runs parts of the layer inside its forward, so the forward never resumes in the middle",
                intermediate_tensors=(intermediate_tensors, None),
            )
        if padding_mask is not None:
            padding_mask = _by_position(padding_mask, hidden_states)
        tokens = as_rows(hidden_states)  # [T, H]
        rows, probs = self.router_and_preprocess(hidden_states, padding_mask, tokens=tokens)
        rows, probs = self.dispatch(rows, probs)
        output, bias = self.routed_experts_compute(rows, probs)  # [R, H]
        output = self.combine(output)
        output = self.postprocess(output, self.shared_experts_compute(tokens))  # [T, H]
        return in_shape(output, hidden_states.shape), bias

    def router_and_preprocess(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, *, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs `route` and `preprocess` as one part; hidden_states: [S, B, H], parameter dtype.

        padding_mask: see `route`. tokens: hidden_states viewed as [T, H]; None creates the view. Returns the result of
        `preprocess`.
        """
        ordered = self._route_and_order(hidden_states, padding_mask)
        begun: tuple[Tensor, Tensor] = self.token_dispatcher.begin(hidden_states if tokens is None else tokens, ordered)
        return begun

    @part("moe_preprocess")
    def _route_and_order(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Any:
        routing = self.route(hidden_states, padding_mask)
        return self.token_dispatcher.order_rows(as_rows(hidden_states), routing)

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Routing:
        """Runs the router; hidden_states: [S, B, H], parameter dtype; padding_mask: [S, B], bool, see forward.

        Returns a Routing, which unpacks as weights [T, E], fp32 (fp64 in fp64 models), and the choice [T, E], bool.
        """
        weights, indices, has_absent = self._run_router(hidden_states, padding_mask)
        routing = Routing(weights, indices, self.config.num_moe_experts or 0, has_absent)
        if padding_mask is None or self.config.moe_expert_capacity_factor is None:
            return routing
        return routing.without(padding_mask.reshape(-1))

    @part("moe_router")
    def _run_router(self, hidden_states: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor, bool]:
        masks = () if padding_mask is None else (padding_mask,)
        routed = self.router(hidden_states, *masks)
        if not isinstance(routed, Routing):
            # A custom router.
            routed = Routing.of(*routed, num_experts=self.config.num_moe_experts)
        return routed.weights, routed.indices, routed.has_absent

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Orders the tokens' rows and returns the input of `dispatch`: rows or tokens, and their weights.

        hidden_states: [S, B, H] or [T, H], parameter dtype; probs, routing_map: the result of `route`. See
        MoETokenDispatcher.dispatch_preprocess, also for the cost of tables.
        """
        ordered: tuple[Tensor, Tensor] = self.token_dispatcher.dispatch_preprocess(hidden_states, routing_map, probs)
        return ordered

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sends the result of `preprocess` to the ranks of the experts; returns the received rows. Collective.

        hidden_states: [*, H], parameter dtype; probs: float.
        """
        sent: tuple[Tensor, Tensor] = self.token_dispatcher.token_dispatch(hidden_states, probs)
        return sent

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sorts the result of `dispatch` by expert and runs this rank's experts.

        hidden_states: [*, H], parameter dtype; probs: float. Returns the rows to send back, [*, H], parameter dtype,
        each multiplied by its weight, and a bias to add, or None.
        """
        if self.expert_step is not None and takes_order(self.experts):
            order = self.token_dispatcher.order_received(hidden_states)
            self.expert_step.record_demand(self.token_dispatcher.take_demand())
            is_packed = self.token_dispatcher.sent_format is not None
            packed_x = self.token_dispatcher.take_packed() if is_packed else None
            return self._run_static_experts(hidden_states, probs, order, packed_x)
        rows, tokens_per_expert, probs = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
        if self.expert_step is not None:
            self.expert_step.record_demand(self.token_dispatcher.take_demand())
        output, bias = self._run_experts(rows, tokens_per_expert, probs)
        return self.token_dispatcher.combine_preprocess(output), bias

    @part("experts")
    def _run_static_experts(
        self, hidden_states: Tensor, probs: Tensor, order: StaticOrder, packed_x: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the experts on received tokens and sums the rows of each token, as one function with the stash.

        packed_x: the tokens in 8 bits, if they were sent as such.
        """
        assert self.expert_step is not None, "only layers with static buffers have orders"
        num_rows, max_rows = order.num_rows, order.slot_of_row.shape[0]
        stashed = self.expert_step.begin_experts(self.router.layer_number, num_rows, max_rows=max_rows)
        experts = self.experts
        if experts.quantized is not None:
            experts.quantized.step = self.expert_step.number
        with nullcontext() if stashed is None else stashed:
            # Subclasses may have a forward without this argument.
            more = {} if packed_x is None else {"packed_x": packed_x}
            result: tuple[Tensor, Tensor | None] = experts(
                hidden_states, order.rows_per_group, probs, order=order, stashed=stashed, **more
            )
        return result

    def _quantize_experts(self) -> None:
        if isinstance(self.experts, GroupedMLP) and self.experts.quantized is not None and self.expert_step is not None:
            self.experts.quantized.step = self.expert_step.number
            self.experts.quantized_weights()

    @part("experts")
    def _run_experts(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor | None]
        if self.expert_step is None:
            result = self.experts(rows, tokens_per_expert, probs)
            return result
        number, num_rows = self.router.layer_number, tokens_per_expert.sum(0, keepdim=True)
        with self.expert_step.around_experts(number, num_rows, max_rows=len(probs)) as group:
            if group is not None:
                group.rows(rows, probs)
            result = self.experts(rows, tokens_per_expert, probs)
        return result

    def combine(self, output: Tensor) -> Tensor:
        """Sends results back to the ranks of their tokens. Collective.

        output: [*, H], parameter dtype, the result of routed_experts_compute. Returns the received rows.
        """
        combined: Tensor = self.token_dispatcher.token_combine(output)
        return combined

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Sums the rows of each token and adds the shared expert's result.

        output: [*, H], parameter dtype, the result of `combine`. shared_expert_output: the result of
        shared_experts_compute, or None. Returns the tokens in the shape of the input to `preprocess`.
        """
        tokens: Tensor = self.token_dispatcher.combine_postprocess(output)
        return tokens if shared_expert_output is None else tokens + in_shape(shared_expert_output, tokens.shape)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """Runs the shared expert; hidden_states: [*, H], parameter dtype. Returns the same shape and dtype.

        Returns None without a shared expert, or if moe_shared_expert_overlap lets the dispatcher run it.
        """
        if self.shared_experts is None or self.shared_expert_overlap:
            return None
        return in_shape(self._run_shared_experts(as_rows(hidden_states)), hidden_states.shape)

    @part("shared_experts")
    def _run_shared_experts(self, tokens: Tensor) -> Tensor:
        output = self.shared_experts(tokens)
        if isinstance(output, tuple):
            output, bias = output
            return output if bias is None else output + bias
        return output

    def graphed_parts(self) -> dict[str, GraphedPart]:
        """Returns the parts that CUDA graphs can run, keyed by their names in --cuda-graph-modules."""
        experts: tuple[GraphedExperts, ...] = ()
        if self.expert_step is not None:
            experts = (GraphedExperts(lambda: self.expert_step, quantize=self._quantize_experts),)
        return {
            "moe": GraphedPart("mlp", self, experts),
            "moe_router": GraphedPart("moe_router", self.router),
            "moe_preprocess": GraphedPart("moe_preprocess", self.router),
            "experts": GraphedPart("experts", self.experts, experts),
        }


def takes_order(experts: nn.Module) -> bool:
    """Returns whether experts accept tokens and an order: GroupedMLP, unless a forward of its own takes only rows.

    Only such experts can compute in the pages of a stash.
    """
    if getattr(experts.forward, "__func__", None) is GroupedMLP.forward:
        return True
    if not isinstance(experts, GroupedMLP):
        return False
    parameters = inspect.signature(experts.forward).parameters.values()
    return any(one.name == "order" or one.kind is one.VAR_KEYWORD for one in parameters)


def _by_position(padding_mask: Tensor, hidden_states: Tensor) -> Tensor:
    """Transposes padding_mask, [B, S], bool, to match the order of the tokens; hidden_states: [S, B, H]."""
    num_positions, num_sequences = hidden_states.shape[:2]
    if padding_mask.shape != (num_sequences, num_positions):
        raise ValueError(
            f"padding_mask has shape {list(padding_mask.shape)}: must have one entry for each sequence and "
            f"position, [{num_sequences}, {num_positions}]"
        )
    return padding_mask.t()


def require_expert_ranks(config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    """Raises ValueError if the sizes of the expert groups differ from the configuration."""
    ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size
    require_group_sizes(
        groups,
        {
            "ep": ("expert_model_parallel_size", ep),
            "expt_tp": ("expert_tensor_parallel_size", etp),
            "tp_ep": ("expert_tensor_parallel_size x expert_model_parallel_size", etp * ep),
        },
    )
