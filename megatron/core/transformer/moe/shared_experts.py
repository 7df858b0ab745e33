"""The shared expert, which every token uses in addition to its routed experts (DeepSeekMoE, arXiv 2401.06066).

With moe_shared_expert_overlap it overlaps with the all-to-all. The overlap is not implemented here: token_dispatch of
the dispatcher calls the shared expert while rows are sent, on the main stream. See [Note: overlapped exchanges] in
dispatch_alltoall.py.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.core.model_parallel_config import InitMethod
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, or_alone
from megatron.core.tensor_parallel.layers import empty_parameter, initialize_weight
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.param_attributes import mark_partial_gradient
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class SharedExpertMLP(MLP):
    """Dense feed-forward layer of width moe_shared_expert_intermediate_size, the total width of all shared experts.

    gate_weight: [1, H]; each token's result is multiplied by sigmoid(gate_weight x), as in Qwen2-MoE. It is None
    without `gate`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        gate: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        """Builds the projections and the gate.

        gate: whether each token's result is multiplied by a gate. pg_collection: the groups of this rank; None means
        the groups of parallel_state, if they exist. name: stored for the caller.
        """
        if config.moe_shared_expert_intermediate_size is None:
            raise ValueError("moe_shared_expert_intermediate_size is None: must be set for a shared expert")
        super().__init__(
            config,
            submodules,
            ffn_hidden_size=config.moe_shared_expert_intermediate_size,
            pg_collection=pg_collection,
        )
        self.name = name
        groups = pg_collection or existing_process_groups()
        self.sequence_group = or_alone(groups.tp if config.sequence_parallel else None)
        self.gate_weight = None
        if gate:
            assert config.init_method is not None
            self.gate_weight = empty_parameter(1, config.hidden_size, config=config)
            mark_partial_gradient(self.gate_weight, partial=config.sequence_parallel)
            initialize_weight(self.gate_weight, config.init_method, config=config)

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init method of each parameter by name, excluding the projections."""
        assert self.config.init_method is not None
        return {} if self.gate_weight is None else {"gate_weight": self.config.init_method}

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the shared expert.

        hidden_states: [*, H], parameter dtype. per_token_scale: [*] or None, multiplied with the gate. Returns [*, H],
        same dtype, and the bias that the caller must add: [H], with a gate [*, H], or None.
        """
        gate = self._gate_of(hidden_states)
        if gate is None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        return super().forward(hidden_states, gate if per_token_scale is None else gate * per_token_scale, **kwargs)

    def _gate_of(self, hidden_states: Tensor) -> Tensor | None:
        if self.gate_weight is None:
            return None
        gate = F.linear(hidden_states, self.gate_weight).sigmoid().squeeze(-1)
        # The gate scales activations, which under sequence parallelism hold all positions and this rank's columns.
        return gather_from_sequence_parallel_region(gate, group=self.sequence_group)
