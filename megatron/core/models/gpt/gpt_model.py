"""GPTModel: embedding, transformer block, output layer and loss per token. Specs describe the layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config_field import require_defaults
from megatron.core.device import default_device
from megatron.core.group_collectives import all_reduce_sum
from megatron.core.logical_tensors import LogicalPiece
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_config import POSITION_EMBEDDINGS
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size, or_alone
from megatron.core.tensor_parallel.cross_entropy import consuming_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, device_for_buffers
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.param_attributes import mark_shared, mark_width
from megatron.core.transformer.future_tokens import FutureTokens
from megatron.core.transformer.initialization import InitialValues, deferred_initialization, initialize_parameters
from megatron.core.transformer.module import GraphableMegatronModule, to_residual
from megatron.core.transformer.moe.aux_losses import MTP_LOSS, AuxLossRecorder
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.rope import RotaryEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    block_submodules,
    require_layout,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import require_unset


class GPTModel(GraphableMegatronModule):
    """A decoder-only language model, or the part of it on one pipeline stage or chunk.

    aux_losses: records the losses of all routers, and stores the scale of their gradients.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        logit_dtype: torch.dtype | None = None,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: MultiTokenPredictionBlockSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        unpadded_vocab_size: int | None = None,
    ) -> None:
        """Builds this part of the model and initializes its parameters.

        transformer_layer_spec: one spec for all layers, or a block spec with one spec per layer. vocab_size: vocabulary
        size including padding; rows from unpadded_vocab_size on are padding, which is initialized to zero and stays
        zero. parallel_output: return logits split over the tensor-parallel ranks; losses do not depend on it.
        mtp_block_spec: layers that predict tokens beyond the next one, built together with the output layer; None means
        no such layers. pre_process: whether this part contains the embedding. post_process: whether it contains the
        final norm, the output layer and the loss. vp_stage: index of the chunk in its stage; None means the only chunk.
        pg_collection: this rank's groups; None means the groups of parallel_state, if they exist. logit_dtype: must be
        None. scatter_embedding_sequence_parallel: must be True.

        Raises ValueError if fp16_lm_cross_entropy is True, if group sizes differ from config, if two stages share a
        weight without pg_collection.embd, or if mtp_block_spec does not match config.mtp_num_layers.
        """
        super().__init__(config, vp_stage)
        _require_fp32_loss(fp16_lm_cross_entropy)
        require_defaults(
            "GPTModel",
            "logits have the dtype of parameters, and sequence parallelism splits the embedded tokens",
            logit_dtype=(logit_dtype, None),
            scatter_embedding_sequence_parallel=(scatter_embedding_sequence_parallel, True),
        )
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.unpadded_vocab_size = _checked_vocab_size(unpadded_vocab_size, vocab_size)
        self.position_embedding_type = _checked_position_embedding(position_embedding_type, config)
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.pre_process, self.post_process = pre_process, post_process
        self.logits_factor = config.logits_factor
        self._input: Tensor | None = None
        groups = existing_process_groups() if pg_collection is None else pg_collection
        # Ranks over which sequences are split.
        self.cp_group, self.num_parts = or_alone(groups.cp), group_size(groups.cp)
        self.tp_group, self.parallel_output = or_alone(groups.tp), parallel_output
        require_layout(config, groups)
        # Weights are initialized at the end, by name, because a layer does not know its name in the model.
        with deferred_initialization(config):
            self._build_layers(block_submodules(transformer_layer_spec, config), mtp_block_spec, pg_collection=groups)
        self.rotary_pos_emb = None
        if position_embedding_type in ("rope", "yarn"):
            self.rotary_pos_emb = RotaryEmbedding(
                rotary_channels(config, rotary_percent),
                max_sequence_length,
                rotary_percent=rotary_percent,
                rotary_base=rotary_base,
                rotary_interleaved=config.rotary_interleaved or config.multi_latent_attention,
                seq_len_interpolation_factor=seq_len_interpolation_factor,
                rope_scaling_factor=rope_scaling_factor if rope_scaling else None,
                yarn=config if config.rope_type == "yarn" else None,
                cp_group=groups.cp,
                dtype=torch.promote_types(config.params_dtype, torch.float32),
            )
        self._share_recorder(groups)
        self._initialize()

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: Any = None,
        loss_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        output_processor: Any = None,
        output_processor_context: Any = None,
    ) -> Tensor:
        """Computes the loss per token, the logits, or the hidden states of this part of the model.

        input_ids, position_ids: [B, S], int64. attention_mask: bool, broadcastable to [B, 1, S, S], True where
        attention is forbidden; None means causal attention. labels: [B, S], int64, below the unpadded vocabulary size;
        the loss of negative labels (-100) is 0.

        With labels, returns the loss per token, [B, S], fp32 (fp64). Without labels, returns logits over the padded
        vocabulary, [B, S, V], or [B, S, V / ranks] with parallel_output, parameter dtype. runtime_gather_output:
        whether to gather logits; None means not parallel_output.

        decoder_input: replaces the embedded tokens, [S / ranks under sequence parallelism, B, H], parameter dtype.
        extra_block_kwargs: further arguments of the transformer block. padding_mask: [B, S], bool, True for tokens that
        router losses and loads ignore; they are computed like other tokens. It must be passed to every part of the
        model. loss_mask: [B, S], float, used only for the losses of multi-token prediction; the loss function masks the
        loss of the next token. packed_seq_params: segments to which attention is restricted, instead of a mask. All
        other arguments must be None. Raises ValueError for masks and segments that are inconsistent with input_ids.

        Under context parallelism, S is this rank's part of the sequences, but mask and segments describe whole
        sequences. A part without the embedding receives its input by set_input_tensor, and uses tokens and positions
        only for multi-token prediction. A part without the output layer returns hidden states,
        [S / ranks under sequence parallelism, B, H].
        """
        others = inference_context, inference_params, output_processor, output_processor_context
        if others.count(None) != len(others):
            require_unset(
                "GPTModel.forward",
                inference_context=inference_context,
                inference_params=inference_params,
                output_processor=output_processor,
                output_processor_context=output_processor_context,
            )
        hidden_states = self._first_hidden_states(input_ids, position_ids, decoder_input)
        own_length, batch = hidden_states.shape[0] * self._sequence_ranks, hidden_states.shape[1]
        if attention_mask is not None:
            _require_mask(attention_mask, batch=batch, seq_length=own_length * self.num_parts)
        if packed_seq_params is not None:
            packed_seq_params.require_samples(batch, own_length * self.num_parts)
        rotary = None if self.rotary_pos_emb is None else self.rotary_pos_emb(own_length)
        padding = {}
        if padding_mask is not None:
            _require_padding(padding_mask, batch=batch, seq_length=own_length)
            padding = self._padding_of_rank(padding_mask)
        hidden_states = self.decoder(
            hidden_states,
            attention_mask,
            rotary_pos_emb=rotary,
            packed_seq_params=packed_seq_params,
            **padding,
            **(extra_block_kwargs or {}),
        )
        if not self.post_process:
            return hidden_states
        # Tokens further ahead are predicted only to compute their losses.
        if self.mtp is not None and labels is not None and self.training and torch.is_grad_enabled():
            assert input_ids is not None and position_ids is not None, "multi-token prediction requires tokens"
            future = FutureTokens(
                input_ids,
                position_ids,
                labels,
                loss_mask,
                num_ahead=len(self.mtp.layers),
                packed_seq_params=packed_seq_params,
                attention_mask=attention_mask,
                cp_group=self.cp_group,
                padding_mask=padding_mask,
            )
            run = partial(self.mtp, attention_mask=attention_mask, packed_seq_params=packed_seq_params)
            hidden_states = self._with_mtp_losses(hidden_states, future, run=partial(run, rotary_pos_emb=rotary))
        logits = self._logits(hidden_states)
        if labels is None:
            if not self.parallel_output if runtime_gather_output is None else runtime_gather_output:
                logits = gather_from_tensor_model_parallel_region(logits, self.tp_group)
            return logits.transpose(0, 1).contiguous()
        # Contiguous, because loss functions of existing scripts flatten it with view(-1).
        return self._token_losses(logits, labels.clamp(min=0)).contiguous().masked_fill(labels < 0, 0)

    def _with_mtp_losses(self, hidden_states: Tensor, future: FutureTokens, *, run: Callable[..., Tensor]) -> Tensor:
        """Computes the losses of multi-token prediction and attaches them to hidden_states: [S, B, H], parameter dtype.

        Returns hidden states with the same values, whose backward also runs the backward of the losses. run: (hidden
        states, embedded tokens, depth) -> the hidden states of that depth; all [S, B, H].
        """
        assert self.embedding is not None and self.mtp is not None, "both are on the stage of the loss"
        coeff = self.config.mtp_loss_scaling_factor / len(self.mtp.layers)
        deeper = hidden_states
        for depth in range(1, len(self.mtp.layers) + 1):
            next_token = future.ahead(depth)
            padding = {} if next_token.padding is None else self._padding_of_rank(next_token.padding)
            deeper = run(deeper, self.embedding(next_token.tokens, next_token.positions), depth=depth, **padding)
            losses = self._token_losses(self._logits(deeper), next_token.labels)
            loss, count = (losses * next_token.weights).sum(), next_token.weights.sum()
            number = self.config.num_layers + depth
            self.aux_losses.record(MTP_LOSS.format(depth), loss, layer_number=number, count=count)
            hidden_states = self.aux_losses.attach(hidden_states, coeff * self._share(loss, count))
        return hidden_states

    def _share(self, loss: Tensor, count: Tensor) -> Tensor:
        """Scales a loss that is summed over `count` tokens in the same way as the loss of the next token, for backward.

        loss, count: [], fp32 or fp64. Returns [], the dtype of the loss.
        """
        if self.config.calculate_per_token_loss:
            # The end of the step divides gradients by the number of tokens on all ranks.
            return loss
        # The mean over whole sequences. Context-parallel ranks contribute shares, which are averaged afterwards.
        return loss * self.num_parts / all_reduce_sum(count, self.cp_group).wait().clamp(min=1)

    def _logits(self, hidden_states: Tensor) -> Tensor:
        """Computes logits: [S / ranks under sequence parallelism, B, H] -> [S, B, V / ranks], both parameter dtype."""
        assert self.output_layer is not None, "post_process"
        logits: Tensor
        if self.logits_factor != 1:
            # Scales the hidden states, because they are narrower than the logits.
            hidden_states = hidden_states * self.logits_factor
        logits, _ = self.output_layer(hidden_states, weight=self.shared_embedding_or_output_weight())
        return logits

    def _token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Computes the loss per token: [B, S], fp32 (fp64).

        logits: [S, B, V / ranks], parameter dtype, overwritten. labels: [B, S], int64, not negative.
        """
        classes = self.unpadded_vocab_size
        return consuming_cross_entropy(logits, labels.t(), num_classes=classes, tp_group=self.tp_group).t()

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Sets the input of the next forward for a part without the embedding.

        input_tensor: hidden states, [S / ranks under sequence parallelism, B, H], dtype config.hidden_dtype.
        """
        self._input = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def _first_hidden_states(
        self, input_ids: Tensor | None, position_ids: Tensor | None, decoder_input: Tensor | None
    ) -> Tensor:
        if decoder_input is not None:
            if not self.pre_process:
                raise ValueError("decoder_input is given but pre_process is False: call set_input_tensor instead")
            return to_residual(decoder_input, self.config)
        if self.pre_process:
            assert self.embedding is not None, "pre_process"
            assert input_ids is not None and position_ids is not None, "the part with the embedding requires tokens"
            return self.embedding(input_ids, position_ids)
        # The reference is dropped now. Otherwise the tensor would live until the next microbatch.
        given, self._input = self._input, None
        if given is None:
            raise ValueError("this part of the model has no embedding: call set_input_tensor before each forward")
        return given

    def _padding_of_rank(self, padding_mask: Tensor) -> dict[str, Tensor]:
        """Returns padding_mask as a keyword argument for layers, under sequence parallelism this rank's part of it."""
        if self.config.sequence_parallel:
            padding_mask = padding_mask.chunk(group_size(self.tp_group), dim=1)[group_rank(self.tp_group)]
        return {"padding_mask": padding_mask}

    @property
    def _sequence_ranks(self) -> int:
        """Number of tensor-parallel ranks over which hidden states are split along the sequence."""
        return group_size(self.tp_group) if self.config.sequence_parallel else 1

    def note_update(self, optimizer: object) -> None:
        """Records that an optimizer has updated the parameters, to notice loops that never call finalize_step."""
        self.aux_losses.note_update(optimizer)

    def finalize_step(self, group: ProcessGroup | None) -> None:
        """Updates the expert biases of routers. Called once per step, after gradients are reduced.

        group: all ranks that process different tokens.
        """
        self.aux_losses.finalize_step(group)

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Returns the weight of the output layer, which may be the word embeddings: [V / ranks, H], parameter dtype."""
        if self.share_embeddings_and_output_weights and self.embedding is not None:
            return self.embedding.word_embeddings.weight
        assert self.output_layer is not None and self.output_layer.weight is not None, (
            "this part of the model has no vocabulary"
        )
        return self.output_layer.weight

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Describes word embeddings and output weight as stored tensors without padding: [unpadded_vocab_size, H]."""
        # A tied weight is stored once, as the embedding, even if the last stage has a copy.
        has_table = self.embedding is not None
        keys = {"embedding.word_embeddings.weight": "embedding.word_embeddings.weight"} if has_table else {}
        if self.output_layer is not None and self.output_layer.weight is not None:
            tied = self.share_embeddings_and_output_weights
            keys["output_layer.weight"] = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
        hidden, first = self.config.hidden_size, group_rank(self.tp_group) * self._vocab_rows()
        whole, own = (self.unpadded_vocab_size, hidden), (self._used_vocab_rows(), hidden)
        # A rank may hold only padding, which becomes an empty piece at the end.
        offset = (min(first, self.unpadded_vocab_size), 0)
        return {name: [LogicalPiece(prefix + key, own, (hidden, 1), 0, whole, offset)] for name, key in keys.items()}

    def _vocab_rows(self) -> int:
        return self.vocab_size // group_size(self.tp_group)

    def _used_vocab_rows(self) -> int:
        """Returns the number of vocabulary rows on this rank that are not padding."""
        left = self.unpadded_vocab_size - group_rank(self.tp_group) * self._vocab_rows()
        return min(max(left, 0), self._vocab_rows())

    def _build_layers(
        self,
        spec: TransformerBlockSubmodules,
        mtp_spec: MultiTokenPredictionBlockSubmodules | None,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        config = self.config
        assert config.unscaled_init_method is not None and config.embedding_init_method is not None
        self.embedding: LanguageModelEmbedding | None = None
        self.output_layer: ColumnParallelLinear | None = None
        self.mtp: MultiTokenPredictionBlock | None = None
        predicts_further = self.post_process and mtp_spec is not None
        if self.pre_process or predicts_further:
            self.embedding = LanguageModelEmbedding(
                config,
                self.vocab_size,
                max_sequence_length=self.max_sequence_length,
                position_embedding_type=self.position_embedding_type,
                pg_collection=pg_collection,
            )
        self.decoder = TransformerBlock(
            config, spec, post_process=self.post_process, vp_stage=self.vp_stage, pg_collection=pg_collection
        )
        if mtp_spec is not None and predicts_further:
            self.mtp = MultiTokenPredictionBlock(
                config, mtp_spec, layers_before=len(self.decoder.layers), pg_collection=pg_collection
            )
        if self.post_process:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                self.vocab_size,
                config=config,
                # A tied output layer is a copy of the embedding on the first stage.
                init_method=(
                    config.embedding_init_method
                    if self.share_embeddings_and_output_weights
                    else config.unscaled_init_method
                ),
                bias=False,
                skip_weight_param_allocation=self.share_embeddings_and_output_weights and self.embedding is not None,
                tp_group=self.tp_group,
            )
        self._mark_copies(pg_collection, predicts_further=mtp_spec is not None)

    def _mark_copies(self, groups: ProcessGroupCollection, *, predicts_further: bool) -> None:
        """Marks parameters that exist on both the first and the last stage, which share initial values and gradients.

        With multi-token prediction these are all embeddings, otherwise a tied output layer. predicts_further: whether
        the model uses multi-token prediction, on any stage.
        """
        if self.pre_process == self.post_process or not (predicts_further or self.share_embeddings_and_output_weights):
            return
        if groups.embd is None:
            raise ValueError(
                "pg_collection.embd is None, and share_embeddings_and_output_weights is True or "
                "config.mtp_num_layers is set: the first and the last stage require this group to keep their copies of "
                "the embeddings identical"
            )
        tables = {} if self.embedding is None else dict(self.embedding.named_parameters())
        if self.embedding is None and self.output_layer is not None and self.output_layer.weight is not None:
            tables = {"word_embeddings.weight": self.output_layer.weight}
        for name, table in tables.items():
            if predicts_further or name == "word_embeddings.weight":
                mark_shared(table, is_copy=self.post_process)

    def _mark_widths(self) -> None:
        """Stores mup_width_mult on the matrices that sum over a width, for optimizers.

        These are all matrices except embeddings and output layer.
        """
        if not self.config.use_mup or self.config.mup_width_mult == 1:
            return
        for part in (self.decoder, self.mtp):
            for name, param in () if part is None else part.named_parameters():
                # Biases of experts have two dimensions.
                if param.dim() > 1 and not name.rpartition(".")[2].startswith("bias"):
                    mark_width(param, self.config.mup_width_mult)

    def initial_values(self) -> InitialValues:
        """Returns the initial values of all parameters, for callers that materialize meta-device parameters."""
        return InitialValues(self, seed=self._init_seed, dtype=self.config.params_dtype)

    def set_aux_loss_scale(self, scale: Tensor) -> None:
        """Sets the scale of the router losses in backward. scale: [], fp64, computed by the schedule."""
        self.aux_losses.set_backward_scale(scale)

    def _share_recorder(self, groups: ProcessGroupCollection) -> None:
        """Creates the recorder of auxiliary losses and assigns it to all routers."""
        # A stage may have no parameters.
        own = next(self.parameters(), None)
        device = default_device() if own is None else device_for_buffers(own)
        # One row for each layer of all stages, because the rows are summed over stages.
        mtp_layers = self.config.mtp_num_layers or 0
        self.aux_losses = AuxLossRecorder(
            self.config.num_layers + mtp_layers,
            device,
            num_experts=self.config.num_moe_experts or 0,
            dtype=torch.promote_types(self.config.params_dtype, torch.float32),
            groups=groups,
            more_names=[MTP_LOSS.format(depth) for depth in range(1, mtp_layers + 1)],
        )
        layers = self.decoder.layers
        # A user-defined layer may not contain an `mlp`.
        parts = [dict(layer.named_children()).get("mlp") for layer in layers]
        for number, mlp in enumerate(parts, start=layers.offset + 1):
            if isinstance(mlp, MoELayer):
                mlp.router.report_to(self.aux_losses, layer_number=number)
        for layer in () if self.mtp is None else self.mtp.transformer_layers():
            if isinstance(layer.mlp, MoELayer):
                layer.mlp.router.report_to(self.aux_losses, layer_number=layer.layer_number)

    def _initialize(self) -> None:
        with torch.no_grad():
            # The loss gives padding rows zero gradients, so they stay zero and are not stored in checkpoints.
            tables: list[Tensor] = [] if self.embedding is None else [self.embedding.word_embeddings.weight]
            tables += [self.shared_embedding_or_output_weight()] if self.post_process else []
            for table in tables:
                table[self._used_vocab_rows() :] = 0
        self._mark_widths()
        self._init_seed = torch.initial_seed() if self.config.init_seed is None else self.config.init_seed
        if self.config.perform_initialization:
            initialize_parameters(self, seed=self._init_seed)


def _checked_vocab_size(unpadded: int | None, padded: int) -> int:
    if unpadded is None:
        return padded
    if not 0 < unpadded <= padded:
        raise ValueError(f"unpadded_vocab_size is {unpadded}: must be from 1 to vocab_size ({padded})")
    return unpadded


def rotary_channels(config: TransformerConfig, rotary_percent: float) -> int:
    """Returns the width to which rotary_percent applies: the head width, or qk_pos_emb_head_dim for latent attention.

    Raises ValueError if rotary_percent is not 1 with latent attention.
    """
    if not config.multi_latent_attention:
        return config.kv_channels
    if rotary_percent != 1:
        raise ValueError(
            f"rotary_percent is {rotary_percent} and multi_latent_attention is True: all of "
            f"qk_pos_emb_head_dim ({config.qk_pos_emb_head_dim}) is rotated, so rotary_percent must be 1"
        )
    return config.qk_pos_emb_head_dim


def _checked_position_embedding(kind: str, config: TransformerConfig) -> str:
    if kind not in POSITION_EMBEDDINGS:
        raise ValueError(f"position_embedding_type is {kind!r}: must be one of {', '.join(POSITION_EMBEDDINGS)}")
    if kind == "yarn" and config.rope_type != "yarn":
        raise ValueError(f"position_embedding_type is yarn and rope_type is {config.rope_type}: both must be yarn")
    if kind not in ("rope", "yarn") and config.multi_latent_attention:
        raise ValueError(f"multi_latent_attention is True and position_embedding_type is {kind}: must be rope")
    if kind not in ("rope", "yarn") and config.rope_type == "yarn":
        raise ValueError(f"rope_type is yarn and position_embedding_type is {kind}: must be rope")
    return kind


def _require_padding(padding_mask: Tensor, *, batch: int, seq_length: int) -> None:
    if padding_mask.shape != (batch, seq_length) or padding_mask.dtype is not torch.bool:
        raise ValueError(
            f"padding_mask has shape {list(padding_mask.shape)} and dtype {padding_mask.dtype}: must be bool "
            f"[{batch}, {seq_length}], True for padding"
        )


def _require_mask(mask: Tensor, *, batch: int, seq_length: int) -> None:
    # Kernels broadcast to [B, N, S, S]. In a mask of three dimensions, B would be interpreted as N.
    full = (batch, 1, seq_length, seq_length)
    fits = mask.dim() <= 4 and all(size in (1, wanted) for size, wanted in zip(mask.shape[::-1], full[::-1]))
    if mask.dtype is not torch.bool or not fits:
        raise ValueError(
            f"attention_mask is {mask.dtype} of shape {list(mask.shape)}: must be torch.bool, True where attention is "
            f"forbidden, of shape [micro-batch, 1, sequence, sequence] = {list(full)} or with 1 in place of a size"
        )


def _require_fp32_loss(fp16_lm_cross_entropy: bool) -> None:
    if fp16_lm_cross_entropy:
        raise ValueError("fp16_lm_cross_entropy is True: must be False, because the loss is computed in fp32")
