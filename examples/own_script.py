"""A custom training script: a different model, a different loss, a flag and a callback around pretrain().

    python examples/own_script.py --mock-data                  (all other flags have defaults below)
    torchrun --nproc-per-node 2 examples/own_script.py --mock-data --label-smoothing 0.2
    torchrun --nproc-per-node 4 examples/own_script.py --mock-data --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2

Most runs only need pretrain_gpt.py. This script shows which parts of it can be replaced.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.planner import print_plan  # noqa: E402
from megatron.training import get_args, get_tokenizer, pretrain, print_rank_0  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args  # noqa: E402
from megatron.training.callbacks import Callback, StepReport  # noqa: E402
from megatron.training.errors import exit_on_user_error  # noqa: E402
from pretrain_gpt import get_batch, train_valid_test_datasets_provider  # noqa: E402

# Used for flags that the command line and --config leave at None. Flags with a different default keep it.
DEFAULTS = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 4,
    "train_iters": 60,
    "lr": 3e-3,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 256,
}


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of this script, which then also work in --help, --config and get_args()."""
    group = parser.add_argument_group("own script")
    group.add_argument("--label-smoothing", type=float, default=0.1, help="Target probability spread over all tokens.")
    return parser


def model_provider(pre_process: bool = True, post_process: bool = True, *, vp_stage: int | None = None) -> GPTModel:
    """Builds a GPT whose feed-forward layers use the squared ReLU and are not preceded by a norm.

    The arguments determine which part of it belongs to this rank. Raises ValueError for experts, which its layers do
    not support.
    """
    args = get_args()
    if args.num_experts is not None:
        raise ValueError(f"--num-experts is {args.num_experts}: the layers of this script are dense; omit it")
    config = core_transformer_config_from_args(args)
    config.activation_func = squared_relu
    layer = get_gpt_layer_local_spec()
    layer.submodules.pre_mlp_layernorm = IdentityOp
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=args.padded_vocab_size,
        unpadded_vocab_size=args.unpadded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        # The loss below reads all columns of the vocabulary, not only one tensor-parallel rank's columns.
        parallel_output=False,
        position_embedding_type="rope",
    )


def forward_step(data_iterator: Iterator[dict[str, Tensor]] | None, model: nn.Module) -> tuple[Tensor, Any]:
    """Runs forward for one microbatch. Returns logits, [B, S, V], in the parameters' dtype, and the loss function.

    Pipeline stages before the last return hidden states instead. Stages that read no tokens have an empty batch.
    """
    batch = get_batch(data_iterator, next(model.parameters()).device)
    logits = model(batch.get("tokens"), batch.get("position_ids"), None)
    return logits, partial(smoothed_loss, batch.get("labels", torch.empty(0)), batch.get("loss_mask", torch.empty(0)))


def smoothed_loss(labels: Tensor, loss_mask: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the sum of the losses, [], fp32, the number of tokens in it, [], fp32, and (sum, count) pairs to log.

    labels: [B, S], int64. loss_mask: [B, S], fp32, 0 for tokens without a loss, such as prompts and padding. logits:
    [B, S, V], any float dtype.
    """
    vocabulary = get_tokenizer().vocab_size  # without the padding columns
    flat, labels, mask = logits[..., :vocabulary].flatten(0, 1).float(), labels.flatten(), loss_mask.flatten()
    num_tokens = mask.sum()
    losses = F.cross_entropy(flat, labels, label_smoothing=get_args().label_smoothing, reduction="none")
    with torch.no_grad():
        plain = F.cross_entropy(flat, labels, reduction="none")
        is_right = (flat.argmax(dim=-1) == labels).float()
        logged = {"lm loss": plain, "accuracy": is_right}
        report = {name: torch.stack([(values * mask).sum(), num_tokens]) for name, values in logged.items()}
    return (losses * mask).sum(), num_tokens, report


class BestAccuracy(Callback):
    """Remembers the step with the most correctly predicted tokens, as an example of a callback."""

    def __init__(self) -> None:
        self.best: StepReport | None = None

    def on_step_end(self, report: StepReport) -> None:
        """Compares the step with the best step so far."""
        if self.best is None or report.losses["accuracy"] > self.best.losses["accuracy"]:
            self.best = report

    def on_train_end(self) -> None:
        """Prints the best step."""
        if self.best is not None:
            share = self.best.losses["accuracy"]
            print_rank_0(f"best step: {self.best.iteration}, which predicted {share:.1%} of the tokens")


def main(argv: list[str] | None = None) -> None:
    """Trains with the flags of `argv`. None means the process's command line."""
    with exit_on_user_error():
        pretrain(
            train_valid_test_datasets_provider,
            model_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            extra_args_provider=add_flags,
            args_defaults=DEFAULTS,
            callbacks=[BestAccuracy()],
            argv=argv,
            print_plan=print_plan,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
