"""The mixture-of-experts layer: router, dispatch, experts, combine. MoELayer.forward lists the steps of a token.

The steps are in router.py, dispatch_*.py, experts.py and shared_experts.py.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.device import default_device
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, require_group_sizes
from megatron.core.transformer.cuda_graphs import GraphedPart
from megatron.core.transformer.module import MegatronModule, part
from megatron.core.transformer.moe.dispatch import DispatchedTokens, local_experts
from megatron.core.transformer.moe.expert_step import ExpertStep, GraphedExperts
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import build_token_dispatcher
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MoESubmodules:
    """Specs of the experts that the router chooses from, and of the shared expert."""

    experts: Any = None
    shared_experts: Any = None


class MoELayer(MegatronModule):
    """A feed-forward layer in which each token runs through K of E experts.

    1. `route`: the router chooses and weighs experts for the tokens [T, H]: weights and indices [T, K].
    2. The dispatcher copies each token into K rows, sorted by expert, on the ranks of its experts: [R, H].
    3. `routed_experts_compute`: the experts compute their rows, times the weights: [R, H].
    4. The dispatcher sends the rows back and sums the rows of each token: [T, H].
    5. `shared_experts_compute`: the shared expert, if there is one, adds its result for every token: [T, H]. With
       moe_shared_expert_overlap it runs while rows are sent; see [Note: overlapped exchanges] in dispatch_alltoall.py.

    R is T x K on a single rank without a capacity. Methods that are decorated with `part` may be recomputed, offloaded,
    or replayed from CUDA graphs.
    """

    has_experts = True

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        *,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """layer_number: from 1, under which the router records its losses; a model sets it when it builds its layers.

        pg_collection: the groups of this rank; None means the groups of parallel_state, if there are any.
        """
        super().__init__(config)
        if config.num_moe_experts is None:
            raise ValueError("num_moe_experts is None: a mixture-of-experts layer needs a number of experts")
        groups = pg_collection or existing_process_groups()
        _require_expert_ranks(config, groups)
        local = local_experts(config, groups.ep)
        self.num_local_experts, self.local_expert_indices = len(local), list(local)
        self.router = TopKRouter(config, groups)
        if layer_number is not None:
            self.router.set_layer_number(layer_number)
        self.token_dispatcher = build_token_dispatcher(local, config=config, groups=groups)
        is_static = config.moe_expert_rank_capacity_factor is not None
        self.expert_step = ExpertStep(default_device()) if is_static else None
        self.experts = build_module(submodules.experts, self.num_local_experts, config, pg_collection=groups)
        self.overlaps_shared_expert = config.moe_shared_expert_overlap
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = build_module(
                submodules.shared_experts,
                config=config,
                gate=config.moe_shared_expert_gate,
                pg_collection=groups,
            )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """hidden_states: [S, B, H], parameter dtype. Returns [S, B, H], same dtype, and no bias."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # [T, H]
        preprocessed = self.router_and_preprocess(hidden_states)
        sent = self.token_dispatcher.send(tokens, preprocessed)
        # Overlaps with the rows that are being sent, in backward too.
        shared = self.shared_experts_compute(tokens) if self.overlaps_shared_expert else None
        dispatched = self.token_dispatcher.finish_dispatch(sent)
        if self.expert_step is not None:
            assert dispatched.demand is not None, "static dispatchers return their demand"
            self.expert_step.record_demand(dispatched.demand)
        output = self.routed_experts_compute(dispatched.rows, dispatched.tokens_per_expert)  # [R, H]
        combined = self.token_dispatcher.combine(output, dispatched.metadata)  # [T, H]
        if self.shared_experts is not None:
            combined = combined + (self.shared_experts_compute(tokens) if shared is None else shared)
        return combined.view(hidden_states.shape), None

    @part("moe_preprocess")
    def router_and_preprocess(self, hidden_states: Tensor) -> Any:
        """Routes hidden_states: [S, B, H], parameter dtype, and orders rows; returns the argument of `send`."""
        probs, expert_indices = self.route(hidden_states)  # [T, K] each
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.token_dispatcher.preprocess(tokens, probs=probs, expert_indices=expert_indices)

    @part("moe_router")
    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the router; hidden_states: [S, B, H], parameter dtype.

        Returns weights [T, K], fp32 (fp64 in fp64 models), and expert indices [T, K], int64.
        """
        routed: tuple[Tensor, Tensor] = self.router(hidden_states)
        return routed

    @part("experts")
    def routed_experts_compute(self, rows: DispatchedTokens, tokens_per_expert: Tensor) -> Tensor:
        """Runs this rank's experts; rows: [R, H], parameter dtype; tokens_per_expert: [e], int64, on the device.

        Returns [R, H], parameter dtype, each row times its weight.
        """
        if self.expert_step is None:
            output: Tensor = self.experts(rows.hidden_states, tokens_per_expert, rows.probs)[0]
            return output
        number, num_rows = self.router.layer_number, tokens_per_expert.sum(0, keepdim=True)
        with self.expert_step.around_experts(number, num_rows, max_rows=len(rows.probs)) as group:
            output = self.experts(rows.hidden_states, tokens_per_expert, rows.probs, group=group)[0]
        return output

    @part("shared_experts")
    def shared_experts_compute(self, tokens: Tensor) -> Tensor:
        """Runs the shared expert; tokens: [T, H], parameter dtype. Returns [T, H], same dtype."""
        assert self.shared_experts is not None
        output, bias = self.shared_experts(tokens)
        return output if bias is None else output + bias

    def graphed_parts(self) -> dict[str, GraphedPart]:
        """Returns the parts that CUDA graphs can run, by the names of --cuda-graph-modules."""
        experts = () if self.expert_step is None else (GraphedExperts(lambda: self.expert_step),)
        return {
            "moe": GraphedPart("mlp", self, experts),
            "moe_router": GraphedPart("moe_router", self.router),
            "moe_preprocess": GraphedPart("moe_preprocess", self.router),
            "experts": GraphedPart("experts", self.experts, experts),
        }


def _require_expert_ranks(config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size or 1
    require_group_sizes(
        groups,
        {
            "ep": ("expert_model_parallel_size", ep),
            "expt_tp": ("expert_tensor_parallel_size", etp),
            "tp_ep": ("expert_tensor_parallel_size x expert_model_parallel_size", etp * ep),
        },
    )
