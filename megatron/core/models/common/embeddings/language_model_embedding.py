"""Word and learned position embeddings of a language model; rotary positions act inside attention."""

from torch import Tensor, nn

from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class LanguageModelEmbedding(MegatronModule):
    """Rows of the word table, plus rows of the position table where positions are learned, then dropout."""

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
        assert config.init_method is not None
        self.max_sequence_length = max_sequence_length
        # Of a sequence, each of which is another rank's.
        self.num_parts = group_size(pg_collection.cp if pg_collection else None)
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=config.init_method,
            config=config,
            tp_group=pg_collection.tp if pg_collection else None,
        )
        self.position_embeddings = None
        if position_embedding_type == "learned_absolute":
            self.position_embeddings = VocabParallelEmbedding(
                max_sequence_length, config.hidden_size, init_method=config.init_method, config=config
            )
        self.embedding_dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """input_ids, position_ids: [B, S], int64. Returns [S, B, H], parameter dtype, contiguous.

        Raises ValueError where a sequence is longer than the table of learned positions.
        """
        # Small integers are transposed instead of wide rows.
        embeddings = self.word_embeddings(input_ids.t())
        if self.position_embeddings is not None:
            num_positions, limit = input_ids.shape[1] * self.num_parts, self.max_sequence_length
            if num_positions > limit:
                raise ValueError(f"the sequence has {num_positions} positions: the model was built for {limit}")
            embeddings = embeddings + self.position_embeddings(position_ids.t())
        return self.embedding_dropout(embeddings)
