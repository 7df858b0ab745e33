"""Generates a continuation of a prompt with a trained model: `python tools/generate.py --load DIR --prompt "..."`.

With --chat the prompt is a user's message, and the answer of the assistant is generated. Reads the model's shape and
tokenizer from the checkpoint. Writes no files.
"""

import argparse
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.device import default_device
from megatron.core.dist_checkpointing import load_items, model_sharded_tensors
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.chat_template import ChatTemplate, find_templates
from megatron.core.tokenizers.tokenizer import BaseTokenizer
from megatron.tools.stored_checkpoints import checkpoint_of_load
from megatron.training.arguments import parse_args
from megatron.training.checkpointing.run_values import load_run_values, model_arguments
from megatron.training.command_line.config_builder import config_from_args
from megatron.training.command_line.flags import flags_of_class
from megatron.training.errors import exit_on_user_error
from megatron.training.gpt_builder import build_gpt
from megatron.version_flag import PrintVersions

TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
TOKENIZER_DESTS = tuple(flag.dest for flag in flags_of_class(TokenizerConfig))


def main(argv: list[str] | None = None) -> None:
    """Prints the prompt followed by its continuation, or the answer in a chat."""
    options = parse_options(argv)
    with exit_on_user_error():
        check_options(options)
        moved = {name: vars(options)[name] for name in ("tokenizer_type", *TOKENIZER_FILES)}
        model, tokenizer = load_model(options.load, step=options.ckpt_step, moved=moved)
        prompt, ends = read_prompt(options, tokenizer)
        generator = torch.Generator().manual_seed(options.seed)
        # The vocabulary may be padded. Ids outside the tokenizer's vocabulary have no text.
        num_ids = min(model.unpadded_vocab_size, tokenizer.vocab_size)
        new_tokens = continue_tokens(
            model, prompt, num_ids=num_ids, options=options, eod=tokenizer.eod, ends=ends, generator=generator
        )
        tokens = list(new_tokens)
        # Decodes all tokens together, because a token's text, for example a space, can depend on the previous token.
        continuation = tokenizer.detokenize(prompt + tokens)[len(tokenizer.detokenize(prompt)) :]
        print(continuation if options.chat else options.prompt + continuation)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action=PrintVersions)
    parser.add_argument("--load", required=True, help="folder of checkpoints, as given to --save")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load; default: the latest")
    parser.add_argument("--prompt", default="", help="text to continue; empty: start a new document")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message, formatted with the tokenizer's chat template",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja template of --chat (default: the tokenizer's)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=100, help="maximum number of tokens to add (default: 100)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="sampling temperature; 0 always selects the most likely token (default: 0.8)",
    )
    parser.add_argument("--top-k", type=int, help="sample only from the k most likely tokens")
    parser.add_argument(
        "--top-p", type=float, help="sample only from the most likely tokens with this total probability"
    )
    parser.add_argument("--seed", type=int, default=1234, help="random seed of the text (default: 1234)")
    parser.add_argument(
        "--tokenizer-type", help="type of the tokenizer, if the checkpoint contains none (default: the checkpoint's)"
    )
    for name in TOKENIZER_FILES:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, help="new path of this tokenizer file, if it has moved since training")
    return parser.parse_args(argv)


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError naming an invalid option, its value and the valid values."""
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {options.max_new_tokens}: must be at least 1")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed is {options.seed}: must be 0 to {2**63 - 1}")
    # Bytes on the command line that are not UTF-8 become lone surrogates.
    if any("\ud800" <= character <= "\udfff" for character in options.prompt):
        raise ValueError("--prompt is not UTF-8 text")
    if options.chat_template is not None and not options.chat:
        raise ValueError("--chat-template applies only to chats: add --chat")
    if not 0 <= options.temperature < float("inf"):
        raise ValueError(f"--temperature is {options.temperature}: must be 0 or more")
    if options.top_k is not None and options.top_k < 1:
        raise ValueError(f"--top-k is {options.top_k}: must be at least 1")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ValueError(f"--top-p is {options.top_p}: must be above 0 and at most 1")


def read_prompt(options: argparse.Namespace, tokenizer: BaseTokenizer) -> tuple[list[int], frozenset[int]]:
    """Returns the prompt's tokens and, for a chat, the special token with which its template ends an answer, if any.

    The tokens of a chat are those of training data. Raises ValueError or OSError for an unusable template.
    """
    if not options.chat:
        return tokenizer.tokenize(options.prompt) or [tokenizer.eod], frozenset()
    template = ChatTemplate(find_templates(tokenizer, options.chat_template).default, tokenizer.special_names)
    messages = [{"role": "user", "content": options.prompt}]
    prompt = tokenizer.tokenize_marked(template.prompt(messages), []).ids
    after = tokenizer.tokenize_marked(template.after_answer(messages), []).ids
    ends = [token for token in after if token in tokenizer.special_ids]
    return prompt, frozenset(ends[:1])


def load_model(folder: str, *, step: int | None, moved: dict[str, str | None]) -> tuple[GPTModel, BaseTokenizer]:
    """Returns the checkpoint's model in fp32 and evaluation mode, and its tokenizer.

    moved: new paths of tokenizer files by flag, and the tokenizer's type, None for the checkpoint's. Raises ValueError
    if there is no checkpoint or no tokenizer.
    """
    found = checkpoint_of_load(Path(folder), step)
    stored = load_run_values(found.path)["args"]
    args = parse_args(argv=[])
    vars(args).update(model_arguments(stored, here=vars(args)))
    for name in ("padded_vocab_size", "unpadded_vocab_size"):
        if name in stored:
            vars(args)[name] = stored[name]
    for name in TOKENIZER_DESTS:
        # Old checkpoints do not contain newer tokenizer flags.
        vars(args)[name] = moved.get(name) or stored.get(name)
    if args.tokenizer_type is None:
        raise ValueError(
            f"{found.path} contains no tokenizer: give --tokenizer-type and its files, such as --tokenizer-type "
            "HuggingFaceTokenizer --tokenizer-model FOLDER"
        )
    args.params_dtype = torch.float32
    tokenizer = build_tokenizer(config_from_args(TokenizerConfig, args))
    # build_tokenizer has checked --vocab-size, which may be larger than the tokenizer's vocabulary.
    if args.vocab_size is None and tokenizer.vocab_size != args.unpadded_vocab_size:
        raise ValueError(
            f"{tokenizer.name} has {tokenizer.vocab_size} tokens, but the checkpoint's model has "
            f"{args.unpadded_vocab_size}: give the tokenizer of the training run with --tokenizer-model"
        )
    model = build_gpt(args)
    load_items(model_sharded_tensors(model, allow_cast=True), found.path)
    return model.to(default_device()).eval(), tokenizer


@torch.no_grad()
def continue_tokens(
    model: GPTModel,
    prompt: list[int],
    *,
    num_ids: int,
    options: argparse.Namespace,
    eod: int,
    generator: torch.Generator,
    ends: Collection[int] = (),
) -> Iterator[int]:
    """Yields new token ids below num_ids until the end of the document, one of `ends`, or --max-new-tokens."""
    device = next(model.parameters()).device
    tokens = list(prompt)
    for _ in range(options.max_new_tokens):
        window = torch.tensor([tokens[-model.max_sequence_length :]], device=device)  # [1, S]
        positions = torch.arange(window.shape[1], device=device).unsqueeze(0)
        logits = model(window, positions, None)[0, -1, :num_ids]
        token = sample(logits.float().cpu(), options=options, generator=generator)
        if token == eod or token in ends:
            return
        tokens.append(token)
        yield token


def sample(logits: torch.Tensor, *, options: argparse.Namespace, generator: torch.Generator) -> int:
    """Samples one token id, applying temperature, then top-k, then top-p. logits: [V], fp32, on the CPU."""
    if options.temperature == 0:
        return int(logits.argmax())
    probs, order = torch.softmax(logits / options.temperature, dim=-1).sort(descending=True, stable=True)
    if options.top_k is not None:
        probs[options.top_k :] = 0
    if options.top_p is not None:
        # Keeps a token if the more likely tokens do not reach top_p, so that the most likely token is always kept.
        probs[(probs / probs.sum()).cumsum(dim=-1) - probs / probs.sum() >= options.top_p] = 0
    return int(order[torch.multinomial(probs, 1, generator=generator)])


if __name__ == "__main__":
    main()
