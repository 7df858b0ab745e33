"""Builds configuration objects from parsed arguments, with errors that name flags instead of fields.

validation.py checks arguments of several configurations against each other.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from megatron.core.config_field import field_problems, field_spec
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.torch_fsdp2_config import TorchFullyShardedDataParallelConfig
from megatron.core.models.gpt.gpt_config import transformer_fields
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import CONFIG_CLASSES, FlagState, FlagTable, field_dest, flag_table

ConfigT = TypeVar("ConfigT")


def config_from_args(config_class: type[ConfigT], args: argparse.Namespace) -> ConfigT:
    """Builds a configuration from the arguments named like its fields. Raises CommandLineError for invalid values.

    A field without a flag is also set from the argument of its name (such as `params_dtype`), unless it is None.
    """
    with flags_named_in_errors():
        return config_class(**_field_values(config_class, args))


def core_transformer_config_from_args(
    args: argparse.Namespace, config_class: type[TransformerConfig] = TransformerConfig
) -> TransformerConfig:
    """Builds the transformer's configuration, including fields implied by GPT flags such as --swiglu."""
    with flags_named_in_errors():
        # Translates --swiglu and head groups to fields of the transformer.
        derived = transformer_fields(
            args,
            hidden_size=args.hidden_size,
            ffn_hidden_size=args.ffn_hidden_size,
            num_query_groups=args.num_query_groups,
        )
        return config_class(**{**_field_values(config_class, args), **derived})


def problems_of_call(call: Callable[[], object]) -> list[str]:
    """Calls a function and returns the lines of its ValueError, with flags instead of fields; empty if it succeeds."""
    try:
        with flags_named_in_errors():
            call()
    except CommandLineError as error:
        return str(error).splitlines()
    return []


def build_configs(args: argparse.Namespace) -> dict[type, Any]:
    """Builds one object of each configuration class. Raises CommandLineError with the error lines of all classes."""
    builders: dict[type, Callable[[argparse.Namespace], Any]] = {TransformerConfig: core_transformer_config_from_args}
    if args.use_torch_fsdp2:
        builders[DistributedDataParallelConfig] = partial(config_from_args, TorchFullyShardedDataParallelConfig)
    configs: dict[type, Any] = {}
    problems: list[str] = []
    for config_class in CONFIG_CLASSES:
        build = builders.get(config_class, partial(config_from_args, config_class))
        try:
            configs[config_class] = build(args)
        except CommandLineError as error:
            problems += str(error).splitlines()
    if problems:
        raise CommandLineError("\n".join(dict.fromkeys(problems)))
    return configs


def invalid_values(args: argparse.Namespace) -> dict[str, str]:
    """Returns an error message, by argument name, for each value that is invalid regardless of other arguments."""
    wrong = {}
    for config_class in CONFIG_CLASSES:
        dests = {field.name: field_dest(field) for field in dataclasses.fields(config_class)}
        # None means not given. check_required reports missing values.
        values = {name: value for name, value in _field_values(config_class, args).items() if value is not None}
        problems = field_problems(config_class, values)
        wrong.update({dests[name]: with_flag_names(message, flag_table()) for name, message in problems.items()})
    return wrong


def _field_values(config_class: Any, args: argparse.Namespace) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(config_class):
        spec, dest = field_spec(field), field_dest(field)
        on_command_line = spec is not None and spec.flags != ()
        # None for a field without a flag means that it was not set, so the class default applies.
        if field.init and (on_command_line or vars(args).get(dest) is not None):
            values[field.name] = vars(args)[dest]
    return values


@contextmanager
def flags_named_in_errors() -> Iterator[None]:
    """Converts a ValueError raised in the body, which names fields, to a CommandLineError that names flags."""
    try:
        yield
    # A CommandLineError already names flags.
    except CommandLineError:
        raise
    except ValueError as error:
        raise CommandLineError(with_flag_names(str(error), flag_table())) from None


# Flags for fields that have no flag of the same name.
_DERIVED_FIELDS = {
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
}


def with_flag_names(message: str, table: FlagTable) -> str:
    """Replaces field names in a message with flags: `OptimizerConfig.min_lr is 2` becomes `--min-lr is 2`.

    Code and other words are unchanged.
    """
    flags = dict(_DERIVED_FIELDS)
    for flag in table.in_state(FlagState.WORKS):
        assert flag.field is not None
        # A flag that disables a field does not replace its name: `add_bias_linear is True` does not mean
        # `--disable-bias-linear is True`.
        config, _, name = flag.field.partition(".")
        flags[name] = flag.flags[0] if flag.constant is not False else name
    message = re.sub(r"\b[A-Z]\w*Config\.(\w+)", lambda match: flags.get(match[1], match[1]), message)
    # A one-word field is replaced at the start of a line only. Inside a sentence it is an ordinary word.
    message = re.sub(r"^([a-z]+)(?= is | has )", lambda match: flags.get(match[1], match[1]), message, flags=re.M)
    # Excludes paths, assignments and attributes, which are code or files.
    return re.sub(r"(?<![-\w/.])([a-z0-9]+_\w+)\b(?![=/]|\.\w)", lambda match: flags.get(match[1], match[1]), message)
