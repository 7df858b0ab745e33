"""Word and learned position embeddings of a language model. Rotary positions are applied inside attention."""

from torch import Tensor, nn

from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ALONE, ProcessGroupCollection, group_size, or_alone
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import part_of
from megatron.core.tensor_parallel.param_attributes import mark_partial_gradient, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import numbers_of_each_rank
from megatron.core.transformer.module import MegatronModule, to_residual
from megatron.core.transformer.transformer_config import TransformerConfig


class LanguageModelEmbedding(MegatronModule):
    """Looks up word embeddings, adds learned position embeddings if configured, and applies dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        assert config.embedding_init_method is not None
        self.max_sequence_length, self.factor = max_sequence_length, config.embedding_factor
        # Number of ranks over which a sequence is split.
        groups = pg_collection or existing_process_groups()
        self.num_parts = group_size(groups.cp)
        tp_group = or_alone(groups.tp)
        # Tensor-parallel ranks over which the sequence is split; None without sequence parallelism.
        self.sequence_group = tp_group if config.sequence_parallel else None
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=tp_group,
        )
        self.position_embeddings = None
        if position_embedding_type == "learned_absolute":
            self.position_embeddings = VocabParallelEmbedding(
                max_sequence_length,
                config.hidden_size,
                init_method=config.embedding_init_method,
                config=config,
                tp_group=ALONE,
            )
            # Every rank holds the whole table and reads the rows for its part of the sequence.
            set_tensor_model_parallel_attributes(self.position_embeddings.weight, False, -1, 1)
            mark_partial_gradient(self.position_embeddings.weight, partial=config.sequence_parallel)
        self.dropout_numbers = numbers_of_each_rank(self.sequence_group, dropout=config.hidden_dropout)
        self.embedding_dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embeds tokens. input_ids, position_ids: [B, S], int64.

        Returns [S, B, H], config.hidden_dtype, contiguous; under sequence parallelism this rank's part,
        [S / ranks, B, H]. Raises ValueError if a sequence is longer than the table of learned positions.
        """
        # Transposes the small ids instead of wide embeddings. A layer that scatters the sequence does so itself.
        scatters = self.config.sequence_parallel
        embeddings = self.word_embeddings(input_ids if scatters else input_ids.t())
        if self.position_embeddings is not None:
            num_positions, limit = input_ids.shape[1] * self.num_parts, self.max_sequence_length
            if num_positions > limit:
                raise ValueError(f"the sequence has {num_positions} positions: the model was built for at most {limit}")
            embeddings = embeddings + self.position_embeddings(part_of(position_ids.t(), self.sequence_group, dim=0))
        if self.factor != 1:
            embeddings = embeddings * self.factor
        with self.dropout_numbers():
            return self.embedding_dropout(to_residual(embeddings, self.config))
