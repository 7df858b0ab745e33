"""The shared expert, which every token uses in addition to its routed experts (DeepSeekMoE, arXiv 2401.06066).

With moe_shared_expert_overlap it overlaps with the all-to-all. The overlap is not implemented here: MoELayer.forward
calls the shared expert between `send` and `finish_dispatch` of the dispatcher, on the main stream. See [Note:
overlapped exchanges] in dispatch_alltoall.py.
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
    """A dense feed-forward layer of width moe_shared_expert_intermediate_size, the sum of all shared experts' widths.

    gate_weight: [1, H]; each token's result is multiplied by sigmoid(gate_weight x), as in Qwen2-MoE. It is None
    without `gate`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        gate: bool = False,
        *,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        if config.moe_shared_expert_intermediate_size is None:
            raise ValueError("moe_shared_expert_intermediate_size is None: a shared expert needs a width")
        super().__init__(
            config,
            submodules,
            ffn_hidden_size=config.moe_shared_expert_intermediate_size,
            pg_collection=pg_collection,
        )
        groups = pg_collection or existing_process_groups()
        self.sequence_group = or_alone(groups.tp if config.sequence_parallel else None)
        self.gate_weight = None
        if gate:
            assert config.init_method is not None
            self.gate_weight = empty_parameter(1, config.hidden_size, config=config)
            mark_partial_gradient(self.gate_weight, partial=config.sequence_parallel)
            initialize_weight(self.gate_weight, config.init_method, config=config)

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init methods of this module's own parameters, by name, without those of the projections."""
        assert self.config.init_method is not None
        return {} if self.gate_weight is None else {"gate_weight": self.config.init_method}

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [*, H], parameter dtype; per_token_scale: [*] or None, multiplied with the gate.

        Returns [*, H], same dtype, and the bias that is still to be added: [H], with a gate [*, H], or None.
        """
        if self.gate_weight is None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        gate = F.linear(hidden_states, self.gate_weight).sigmoid().squeeze(-1)
        # The gate scales activations, which under sequence parallelism have all positions and this rank's columns.
        gate = gather_from_sequence_parallel_region(gate, group=self.sequence_group)
        return super().forward(hidden_states, gate if per_token_scale is None else gate * per_token_scale, **kwargs)
