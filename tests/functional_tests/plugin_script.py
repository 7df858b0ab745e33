"""Runs the example of a script in Megatron-LM's form as `python SCRIPT` does. Contains no tests."""

import runpy
import sys
from functools import partial

import pretrain_gpt
from gpt_builders import gpt_builder
from megatron.core.enums import ModelType
from megatron.training import inprocess_restart, pretrain
from model_provider import model_provider
from tests.functional_tests.launch import ROOT

SCRIPT = ROOT / "examples" / "megatron_plugins" / "pretrain_plugins.py"


def main(argv: list[str]) -> None:
    """Runs the script with these command line arguments."""
    sys.argv = [str(SCRIPT), *argv]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def main_with_builder(argv: list[str]) -> None:
    """Trains with pretrain_gpt's functions and a builder bound to the model provider, a form used by Megatron-LM."""
    wrapped, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    wrapped(
        pretrain_gpt.train_valid_test_datasets_provider,
        partial(model_provider, gpt_builder),
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        store=store,
        argv=argv,
    )
