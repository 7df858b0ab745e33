"""Builds the settings of a run from parsed arguments, with errors that name flags instead of fields.

validation.py checks arguments of several configurations against each other.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from megatron.core.config_field import field_dest, field_problems, field_spec
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_config import GPTModelConfig, transformer_fields
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import FlagState, FlagTable, flag_table
from megatron.training.command_line.parser import RunArguments
from megatron.training.config import RunConfig, areas_with_flags

ConfigT = TypeVar("ConfigT")


def run_config_of(args: argparse.Namespace | RunConfig) -> RunConfig:
    """Returns the settings that parsed arguments describe, which follow changes of the arguments."""
    if isinstance(args, RunConfig):
        return args
    cached = args._run_config if isinstance(args, RunArguments) else None
    # The values differ for a copy of the arguments, which has settings of its own.
    if cached is None or cached.values is not vars(args):
        cached = RunConfig(vars(args), build=build_config)
    if isinstance(args, RunArguments):
        args._run_config = cached
    return cached


def build_config(config_class: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Builds a configuration from the values of arguments, by name. Raises CommandLineError for invalid values.

    Includes the fields implied by flags of other classes, such as --swiglu. A field without a flag is set from the
    argument of its name (such as `params_dtype`), unless it is None.
    """
    with flags_named_in_errors():
        fields = _field_values(config_class, values)
        if issubclass(config_class, TransformerConfig):
            fields |= transformer_fields(values)
        if issubclass(config_class, DistributedDataParallelConfig):
            fields["grad_reduce_in_fp32"] = not values["grad_reduce_in_bf16"]
            # Under fp16, the loss scaler handles overflows.
            fields["check_for_nan_in_grad"] = values["check_for_nan_in_loss_and_grad"] and not values["fp16"]
        return config_class(**fields)


def config_from_args(config_class: type[ConfigT], args: argparse.Namespace) -> ConfigT:
    """Builds a configuration from the arguments of a script; see build_config."""
    return build_config(config_class, vars(args))


def core_transformer_config_from_args(
    args: argparse.Namespace, config_class: type[TransformerConfig] = TransformerConfig
) -> TransformerConfig:
    """Builds the transformer's configuration, including fields implied by GPT flags such as --swiglu."""
    # A script may have changed GPT flags since they were validated.
    wrong = _value_problems(GPTModelConfig, vars(args))
    if wrong:
        raise CommandLineError("\n".join(wrong.values()))
    return build_config(config_class, vars(args))


def problems_of_call(call: Callable[[], object]) -> list[str]:
    """Calls a function and returns the lines of its ValueError, with flags instead of fields; empty if it succeeds."""
    try:
        with flags_named_in_errors():
            call()
    except CommandLineError as error:
        return str(error).splitlines()
    return []


def build_areas(args: argparse.Namespace) -> RunConfig:
    """Builds the settings of every area. Raises CommandLineError with the error lines of all areas."""
    run_config = run_config_of(args)
    areas = list(areas_with_flags())
    if args.use_torch_fsdp2:
        areas[areas.index("ddp")] = "torch_fsdp2"
    problems = [problem for area in areas for problem in problems_of_call(partial(getattr, run_config, area))]
    if problems:
        raise CommandLineError("\n".join(dict.fromkeys(problems)))
    return run_config


def invalid_values(args: argparse.Namespace) -> dict[str, str]:
    """Returns an error message, by argument name, for each value that is invalid regardless of other arguments."""
    classes = areas_with_flags().values()
    return {name: problem for one in classes for name, problem in _value_problems(one, vars(args)).items()}


def _value_problems(config_class: type[Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Returns an error message, by argument name, for each value that a field of the class does not accept."""
    dests = {field.name: field_dest(field) for field in dataclasses.fields(config_class)}
    # None means not given. check_required reports missing values.
    given = {name: value for name, value in _field_values(config_class, values).items() if value is not None}
    problems = field_problems(config_class, given)
    return {dests[name]: with_flag_names(message, flag_table()) for name, message in problems.items()}


def _field_values(config_class: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(config_class):
        spec, dest = field_spec(field), field_dest(field)
        on_command_line = spec is not None and spec.flags != ()
        # None for a field without a flag means that it was not set, so the class default applies.
        # Nor an argument that is missing, because a script has made the namespace itself.
        if field.init and dest in values and (on_command_line or values[dest] is not None):
            found[field.name] = values[dest]
    return found


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
    message = re.sub(r"^([a-z]+[0-9]*)(?= is | has )", lambda match: flags.get(match[1], match[1]), message, flags=re.M)
    # Excludes paths, assignments and attributes, which are code or files.
    return re.sub(r"(?<![-\w/.])([a-z0-9]+_\w+)\b(?![=/]|\.\w)", lambda match: flags.get(match[1], match[1]), message)
