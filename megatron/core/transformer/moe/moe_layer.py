"""The mixture-of-experts layer: router, dispatch, experts, combine; each step is its own file."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.device import default_device
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, require_group_sizes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.dispatch import Dispatched, DispatchedTokens, local_experts
from megatron.core.transformer.moe.expert_step import ExpertStep
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import build_token_dispatcher
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MoESubmodules:
    """Specs of the experts that the router chooses from, and of the one that every token sees."""

    experts: Any = None
    shared_experts: Any = None


class MoELayer(MegatronModule):
    """A feed-forward layer of which each token sees K experts.

    1. The router weighs experts: [T, K] weights and indices.
    2. The dispatcher sorts K copies of each token by expert: [R, H].
    3. The experts compute, each row times its weight: [R, H].
    4. The dispatcher sums each token's rows: [T, H].
    5. The shared expert, if there is one, adds its result for every token: [T, H]; with moe_shared_expert_overlap it
       computes while rows are sent.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        *,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """layer_number: of the router's losses outside a model, which tells it anew. pg_collection: the groups of this
        rank; None: those of parallel_state, if there are any.
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
        preprocessed = self.parts.moe_preprocess(self._preprocess, hidden_states)
        sent = self.token_dispatcher.send(tokens, preprocessed)
        # Beside the rows that are on their way, in backward too.
        shared = self._shared_output(tokens) if self.overlaps_shared_expert else None
        dispatched = self.token_dispatcher.finish_dispatch(sent)
        output = self._expert_output(dispatched)  # [R, H]
        combined = self.token_dispatcher.combine(output, dispatched.metadata)  # [T, H]
        if self.shared_experts is not None:
            combined = combined + (self._shared_output(tokens) if shared is None else shared)
        return combined.view(hidden_states.shape), None

    def _preprocess(self, hidden_states: Tensor) -> Any:
        probs, expert_indices = self.parts.moe_router(self.router, hidden_states)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.token_dispatcher.preprocess(tokens, probs=probs, expert_indices=expert_indices)

    def _expert_output(self, dispatched: Dispatched) -> Tensor:
        rows, counts = dispatched.rows, dispatched.tokens_per_expert
        if self.expert_step is not None:
            assert dispatched.demand is not None, "static dispatchers say what they needed"
            self.expert_step.note(dispatched.demand)
        output: Tensor = self.parts.experts(self._run_experts, rows, counts)
        return output

    def _run_experts(self, rows: DispatchedTokens, tokens_per_expert: Tensor) -> Tensor:
        if self.expert_step is None:
            output: Tensor = self.experts(rows.hidden_states, tokens_per_expert, rows.probs)[0]
            return output
        number, num_rows = self.router.layer_number, tokens_per_expert.sum(0, keepdim=True)
        with self.expert_step.around_experts(number, num_rows, max_rows=len(rows.probs)) as group:
            output = self.experts(rows.hidden_states, tokens_per_expert, rows.probs, group=group)[0]
        return output

    def _shared_output(self, tokens: Tensor) -> Tensor:
        assert self.shared_experts is not None
        output, bias = self.parts.shared_experts(self.shared_experts, tokens)
        return output if bias is None else output + bias


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
