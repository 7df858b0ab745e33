"""A pretraining script in the style of Megatron-LM, in which every part passed to pretrain() is user code.

    torchrun --nproc-per-node 2 examples/megatron_plugins/pretrain_plugins.py --tensor-model-parallel-size 2 \\
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 \\
        --micro-batch-size 4 --global-batch-size 16 --train-iters 20 --lr 3e-3 --mock-data \\
        --tokenizer-type NullTokenizer --vocab-size 255

It imports only Megatron's names, like a script written for Megatron-LM. docs/migration.md lists the lines of such
scripts that have to change. This script needs no changes.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import (
    average_losses_across_data_parallel_group,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
)

stimer = StragglerDetector()


def add_plugin_args(parser):
    """Adds the flags of this script."""
    group = parser.add_argument_group(title="plug-ins")
    group.add_argument("--loss-convention", choices=["tokens", "pair", "mean"], default="tokens")
    group.add_argument(
        "--reverse-documents", action="store_true", help="Train on documents in reverse order of tokens."
    )
    return parser


def model_provider(pre_process=True, post_process=True, vp_stage: int | None = None) -> GPTModel:
    """Builds this rank's part of the model."""
    args = get_args()
    print_rank_0("building the plug-in's GPT model ...")
    config = core_transformer_config_from_args(args)
    if args.spec is not None:
        layer_spec = import_module(args.spec)
        if callable(layer_spec):
            layer_spec = layer_spec(config)
    elif args.num_experts:
        use_te = args.transformer_impl == "transformer_engine"
        layer_spec = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=use_te,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=vp_stage,
        )
    else:
        layer_spec = get_gpt_layer_local_spec(
            args.num_experts,
            args.moe_grouped_gemm,
            args.qk_layernorm,
            args.multi_latent_attention,
            normalization=args.normalization,
        )
    mtp_block_spec = None
    if args.mtp_num_layers is not None:
        mtp_block_spec = get_gpt_mtp_block_spec(config, layer_spec, use_transformer_engine=False, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=mtp_block_spec,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator, vp_stage=None):
    """Reads a microbatch and returns the part of it that this rank computes."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return None, None, None, None, None, None
    batch = get_batch_on_this_tp_rank(data_iterator)
    batch = get_batch_on_this_cp_rank(batch)
    masks = batch["loss_mask"], batch["attention_mask"], batch.get("padding_mask")
    return batch["tokens"], batch["labels"], *masks, batch["position_ids"]


def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor, **flags: Any):
    """Returns the loss in the form selected by --loss-convention, or the data of an evaluation.

    loss_mask, output_tensor: [B, S], fp32. The loss is [], fp32, and the number of tokens [], int32.
    """
    args = get_args()
    if flags.get("non_loss_data"):
        return {"largest loss of a token": output_tensor.detach().max()}
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    if args.check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=torch.isnan,
            message="found NaN in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    if args.loss_convention == "mean":
        mean = loss / num_tokens
        averaged = average_losses_across_data_parallel_group([mean])
        # With two return values, the loss is this rank's part of the mean over whole sequences.
        return mean / args.context_parallel_size, {"lm loss": averaged[0]}
    reporting = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    if args.loss_convention == "pair":
        return loss, num_tokens, {"lm loss": (reporting[0], reporting[1])}
    return loss, num_tokens, {"lm loss": reporting}


def forward_step(data_iterator: Iterator | None, model: GPTModel):
    """Runs the forward pass of one microbatch."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        tokens, labels, loss_mask, attention_mask, padding_mask, position_ids = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    with stimer:
        output_tensor = model(
            tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, padding_mask=padding_mask
        )
    return output_tensor, partial(loss_func, loss_mask)


class ReversedDocuments(GPTDataset):
    """A GPTDataset whose samples have their tokens in reverse order."""

    def __getitem__(self, idx):
        sample = super().__getitem__(idx)
        text = torch.cat([sample["tokens"], sample["labels"][-1:]]).flip(0)
        return {**sample, "tokens": text[:-1].contiguous(), "labels": text[1:].contiguous()}


class ReversedMockDocuments(ReversedDocuments, MockGPTDataset):
    """A MockGPTDataset whose samples have their tokens in reverse order, for --mock-data."""


def is_dataset_built_on_rank(vp_stage=None):
    """Returns whether this rank reads data: the first tensor-parallel rank of the first and the last stage."""
    return is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0


def core_gpt_dataset_config_from_args(args):
    """Returns the configuration of the datasets."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
    )


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    """Builds the datasets of the run. train_val_test_num_samples: number of samples of each."""
    args = get_args()
    config = core_gpt_dataset_config_from_args(args)
    dataset_type: type[GPTDataset]
    if args.reverse_documents:
        dataset_type = ReversedMockDocuments if args.mock_data else ReversedDocuments
    else:
        dataset_type = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building train, validation, and test datasets for the plug-in ...")
    train_ds, valid_ds, test_ds = BlendedMegatronDatasetBuilder(
        dataset_type, train_val_test_num_samples, partial(is_dataset_built_on_rank, vp_stage=vp_stage), config
    ).build()
    print_rank_0("> finished creating the plug-in's datasets ...")
    return train_ds, valid_ds, test_ds


def log_largest_losses(data, iteration, writer):
    """Logs the largest per-token loss of an evaluation. data: results of loss_func for each microbatch."""
    largest = max(float(part["largest loss of a token"]) for part in data)
    print(f"largest per-token loss at iteration {iteration}: {largest:.4f}", flush=True)
    if writer is not None:
        writer.add_scalar("largest per-token loss", largest, iteration)


if __name__ == "__main__":
    # Every rank calls the provider, not only ranks that read data.
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]

    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        process_non_loss_data_func=log_largest_losses,
        extra_args_provider=add_plugin_args,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
