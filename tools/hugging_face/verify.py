"""Compares the fp32 logits of a converted model and of transformers on random tokens.

Unlike the conversion, it loads both whole models into memory.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import load_items, model_sharded_tensors
from megatron.core.models.gpt import GPTModel
from megatron.training.arguments import parse_args
from megatron.training.checkpointing.folder import find_checkpoint
from megatron.training.checkpointing.run_values import load_run_values, model_arguments
from megatron.training.gpt_builder import build_gpt

# Tolerance relative to the largest logit.
TOLERANCE = 1e-4
# Tolerance if one side was rounded to half precision.
_HALF_TOLERANCE = 5e-2
_TOKENS = (2, 64)


@dataclass(frozen=True)
class LogitsReport:
    """The largest difference divided by the largest logit, and its tolerance."""

    relative: float
    tolerance: float
    num_tokens: int

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the tolerance. NaN is not."""
        return self.relative <= self.tolerance

    @property
    def text(self) -> str:
        """The result as one line for the user."""
        verdict = "agree" if self.agrees else "DIFFER"
        return (
            f"logits of {self.num_tokens} random tokens {verdict}: the largest difference is {self.relative:.2e} of "
            f"the largest logit, tolerance {self.tolerance:g}"
        )


def compare_logits(run: Path, hub: Path, *, step: int | None = None, dtype: torch.dtype | None = None) -> LogitsReport:
    """Compares the logits of a checkpoint in `run` with the logits of the hub model in the folder `hub`.

    dtype: dtype to which the weights of one side were rounded, if any.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ValueError("--verify requires transformers: pip install 'megatron-stash[transformers]'") from error
    ours = stored_model(run, step=step)
    theirs = AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    length = min(_TOKENS[1], ours.max_sequence_length)
    tokens = torch.randint(0, ours.unpadded_vocab_size, (_TOKENS[0], length), generator=generator)
    with torch.no_grad():
        expected = theirs(tokens).logits.float()
        found = logits_of(ours, tokens)
    relative = ((found - expected).abs().max() / expected.abs().max()).item()
    rounded = dtype not in (None, torch.float32)
    return LogitsReport(relative, _HALF_TOLERANCE if rounded else TOLERANCE, tokens.numel())


def stored_model(run: Path, *, step: int | None = None) -> GPTModel:
    """Returns the model of a checkpoint in a --save folder, in fp32 and evaluation mode, on this process only."""
    found = find_checkpoint(str(run), step=step)
    if found is None:
        raise ValueError(f"{run} contains no checkpoint")
    stored = load_run_values(found.path)["args"]
    args: argparse.Namespace = parse_args(argv=[])
    vars(args).update(model_arguments(stored, here=vars(args)))
    args.unpadded_vocab_size, args.padded_vocab_size = stored["unpadded_vocab_size"], stored["padded_vocab_size"]
    args.params_dtype, args.virtual_pipeline_model_parallel_size = torch.float32, None
    # The router is always in fp32 here, and one grouped GEMM is faster than many GEMMs.
    args.moe_grouped_gemm = bool(stored.get("moe_grouped_gemm"))
    model = build_gpt(args)
    load_items(model_sharded_tensors(model, allow_cast=True), found.path)
    return model.eval()


def logits_of(model: GPTModel, tokens: Tensor) -> Tensor:
    """Returns logits without the vocabulary padding, [B, S, V], in the model's dtype. tokens: [B, S], int64."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits: Tensor = model(tokens, positions, None)
    return logits[..., : model.unpadded_vocab_size]
