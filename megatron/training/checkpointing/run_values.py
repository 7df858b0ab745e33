"""Validates the JSON values of a checkpoint, and compares its arguments with a run's arguments or adopts them.

folder.py finds the checkpoint. Tensors are handled in loading.py.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from megatron.core.datasets.data_order import DataOrder, SplitOrder
from megatron.core.datasets.utils import Split
from megatron.core.dist_checkpointing import load_common
from megatron.core.num_microbatches_calculator import build_batch_schedule
from megatron.core.transformer.moe_config import layers_with_experts
from megatron.training.checkpointing.folder import CheckpointFormat, find_checkpoint, format_of
from megatron.training.checkpointing.legacy import legacy_values
from megatron.training.checkpointing.megatron_core import megatron_core_values
from megatron.training.checkpointing.train_state import TrainState, is_count
from megatron.training.command_line.checkpoint_rules import DERIVED, OnLoad, names_with, on_load_rules
from megatron.training.command_line.errors import is_first_rank
from megatron.training.command_line.flags import Flag, flag_table
from megatron.training.command_line.parser import CHECKPOINT, given_arguments
from megatron.training.config import planned_samples

_KINDS: dict[str, type] = {"iteration": int, "args": dict, "train_state": dict, "contents": dict, "frozen": list}
# Derived arguments that determine the model.
_DERIVED = ("padded_vocab_size", "unpadded_vocab_size")
_NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}
_ADAPTERS = ("lora_rank", "lora_alpha", "lora_target_modules")
# A different value means different weights, or weights with a different meaning. Adapters are compared separately, and
# the vocabulary by its size without padding. Learned positions are weights.
_SAME_MODEL = (
    *(name for name in names_with(OnLoad.WEIGHTS) if name not in (*_ADAPTERS, "vocab_size")),
    "max_position_embeddings",
    "unpadded_vocab_size",
)
# Sinkhorn is not a loss: it selects and weights experts, also in evaluation. Its flag has a coefficient for each type.
_BALANCING = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
_WITHOUT_FLAG = {"unpadded_vocab_size": "the size of the tokenizer's vocabulary"}
# Arguments that fix the order of the data.
_ORDER = (
    "seed",
    "seq_length",
    "train_iters",
    "train_samples",
    "eval_iters",
    "eval_interval",
    "global_batch_size",
    "rampup_batch_size",
)
_DATA_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
# Optimizers whose states are interchangeable, because they differ only in where the state is stored.
_SAME_STATES = {"adam", "distributed_fused_adam"}


# Section: read and validate.

_READERS = {
    CheckpointFormat.OURS: load_common,
    CheckpointFormat.MEGATRON_CORE: megatron_core_values,
    CheckpointFormat.LEGACY: legacy_values,
}


def load_run_values(folder: Path) -> dict[str, Any]:
    """Reads the JSON values of a checkpoint in any format. Raises ValueError if no training run wrote it.

    Values of checkpoints in Megatron's formats are converted to native names.
    """
    return checked_run_values(folder, _READERS[format_of(folder)](folder))


def checked_run_values(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Validates and returns the JSON values of a native checkpoint. Raises ValueError if no training run wrote them."""
    if not values.keys() >= _KINDS.keys():
        raise ValueError(f"{folder} is a checkpoint, but not of a training run")
    try:
        _check(values)
    except ValueError as error:
        raise ValueError(f"{folder} holds a value that training runs do not write: {error}") from error
    return values


def _check(values: Mapping[str, Any]) -> None:
    for name, kind in _KINDS.items():
        _require(isinstance(values[name], kind), name, value=values[name], right=kind.__name__)
    for name in ("optimizer", "rng"):
        held = values["contents"].get(name)
        _require(isinstance(held, bool), f"contents.{name}", value=held, right="bool")
    for key in values["frozen"]:
        _require(isinstance(key, str), "frozen", value=key, right="names of parameters")
    if values["contents"]["optimizer"]:
        _check_optimizer(values.get("optimizer"), values.get("scheduler"))
    TrainState().load_state_dict(values["train_state"])
    check_arguments(values["args"])


def _check_optimizer(optimizer: Any, scheduler: Any) -> None:
    _require(isinstance(optimizer, dict), "optimizer", value=optimizer, right="dict")
    _require(is_count(optimizer.get("step")), "optimizer.step", value=optimizer.get("step"), right="int, 0 or more")
    scaler = optimizer.get("grad_scaler")
    is_right = scaler is None or _is_scaler(scaler)
    _require(is_right, "optimizer.grad_scaler", value=scaler, right="finite numbers by name, with a scale above 0")
    is_right = scheduler is None or (isinstance(scheduler, dict) and is_count(scheduler.get("num_steps")))
    _require(is_right, "scheduler", value=scheduler, right="dict with a num_steps of 0 or more")


def _is_scaler(scaler: Any) -> bool:
    """Returns whether a value is a valid loss-scaler state, whose trackers may be negative after many overflows."""
    return isinstance(scaler, dict) and all(map(_is_number, scaler.values())) and scaler.get("scale", 1) > 0


def check_arguments(args: Mapping[str, Any]) -> None:
    """Raises ValueError naming a stored argument whose type its flag cannot produce. Ignores unknown arguments."""
    for name, value in args.items():
        flag = flag_table().by_dest.get(name)
        if name in _DERIVED:
            is_right = value is None or (is_count(value) and value > 0)
            _require(is_right, f"args.{name}", value=value, right="int, above 0")
        elif flag is not None:
            _require(_can_produce(flag, value), f"args.{name}", value=value, right=_describe_values(flag))


def _can_produce(flag: Flag, value: Any) -> bool:
    """Returns whether a flag can produce a value of this type. Bounds are checked where the value is used."""
    if value is None:
        return True
    if flag.constant is not None:
        return isinstance(value, bool)
    # Other types have their own parsers, and the configuration that uses the value checks it.
    if flag.type_name not in (*_NUMBERS, "str"):
        return not isinstance(value, (dict, bool))
    items = value if flag.takes_list and isinstance(value, list) else [value]
    return all(_is_of(flag.type_name, item) for item in items)


def _describe_values(flag: Flag) -> str:
    """Describes the values that _can_produce accepts for a flag, except None."""
    if flag.constant is not None:
        return "bool"
    if flag.type_name not in (*_NUMBERS, "str"):
        return "neither dict nor bool"
    return f"{flag.type_name}, or a list of them" if flag.takes_list else flag.type_name


def _is_of(type_name: str, value: Any) -> bool:
    if type_name == "str":
        return isinstance(value, str)
    return isinstance(value, _NUMBERS[type_name]) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, name: str, *, value: Any, right: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r:.80}: must be {right}")


# Section: compare with the run, or adopt.


def args_to_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of arguments as JSON values. Values of other types become strings."""
    # A round trip, so that values compare equal to stored ones (tuples become lists).
    return json.loads(json.dumps(values, default=str))


def load_args_from_checkpoint(args: argparse.Namespace) -> argparse.Namespace:
    """Implements --use-checkpoint-args: overwrites model arguments in `args` with values of the checkpoint to load.

    Rank 0 prints a line for each given argument that differs from the checkpoint, with the value that is used. Call it
    between parse_args and validate_args, on every rank. Not collective. Raises ValueError if there is no checkpoint.
    """
    found = None if args.load is None else find_checkpoint(args.load, step=args.ckpt_step)
    if found is None and args.pretrained_checkpoint is not None:
        step = args.ckpt_step if args.load is None else None
        found = find_checkpoint(args.pretrained_checkpoint, step=step, flag="--pretrained-checkpoint")
    if found is None:
        where = f"--load {args.load}" if args.pretrained_checkpoint is None else args.pretrained_checkpoint
        raise ValueError(f"--use-checkpoint-args: no checkpoint found in {where}")
    stored = load_run_values(found.path)["args"]
    given = _given_for_model(args)
    here = args_to_json({**vars(args), **{name: value for name, (value, _) in given.items()}})
    adopted = model_arguments(stored, here=here, given=given.keys())
    lines = _lines_of_adoption(here, stored, adopted, sources={name: source for name, (_, source) in given.items()})
    vars(args).update(adopted)
    args.given = {**given_arguments(args), **dict.fromkeys(adopted, CHECKPOINT)}
    if "position_embedding_type" in adopted:
        # The older flag would replace the adopted type during validation.
        args.use_rotary_position_embeddings = False
    if lines and is_first_rank():
        print("\n".join(f"note: --use-checkpoint-args: {line}" for line in lines), file=sys.stderr, flush=True)
    return args


def _given_for_model(args: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """Returns (value, source) of each given argument by name. Other names of rotary positions become their meaning."""
    given = {name: (vars(args)[name], source) for name, source in given_arguments(args).items()}
    if "use_rotary_position_embeddings" in given and vars(args)["use_rotary_position_embeddings"]:
        given["position_embedding_type"] = ("rope", given["use_rotary_position_embeddings"][1])
    value, source = given.get("position_embedding_type", (None, ""))
    if value == "yarn":
        given |= {"position_embedding_type": ("rope", source), "rope_type": ("yarn", source)}
    return given


def _lines_of_adoption(
    here: Mapping[str, Any], stored: Mapping[str, Any], adopted: Mapping[str, Any], *, sources: Mapping[str, str]
) -> list[str]:
    """Describes each given argument of the model that differs from the checkpoint, and each replaced default.

    A default of the command line is named only if it could also have been meant (OnLoad.GIVEN).
    """
    names = dict.fromkeys((*names_with(OnLoad.WEIGHTS, OnLoad.MODEL, OnLoad.GIVEN), *adopted))
    lines = []
    for name in _different(here, stored, names=tuple(names)):
        flag, value, theirs = _in_words(name, here=here[name], stored=stored[name])
        if name in sources:
            used = "the checkpoint's value is used" if name in adopted else f"{value} is used"
            lines.append(f"{flag} is {value} ({sources[name]}), {theirs} in the checkpoint: {used}")
        elif on_load_rules().get(name) is OnLoad.GIVEN and here[name] is not None:
            lines.append(f"{flag} is not given: {theirs} is used, as in the checkpoint")
    return lines


def model_arguments(
    stored: Mapping[str, Any], *, here: Mapping[str, Any], given: Set[str] = frozenset()
) -> dict[str, Any]:
    """Returns the stored arguments with which a run with the arguments `here` computes the checkpoint's model.

    Includes the arguments with the rules WEIGHTS, MODEL and GIVEN, the vocabulary size of a model with more ids than
    its tokenizer, and the load-balancing type if only the run or only the checkpoint uses Sinkhorn. A run keeps
    arguments with the rule GIVEN that are in `given`, the adapter arguments if it starts with new adapters, and the
    expert arguments if it creates its experts from a dense model. Arguments newer than the checkpoint keep their
    defaults, with which it was trained.
    """
    names = tuple(name for name in names_with(OnLoad.WEIGHTS, OnLoad.MODEL) if name != "vocab_size")
    names = (*names, *(name for name in names_with(OnLoad.GIVEN) if name not in given))
    if _uses_sinkhorn(stored) != _uses_sinkhorn(here):
        names = (*names, *_BALANCING)
    # NullTokenizer has no file, so its vocabulary size is an argument of the run.
    if stored.get("tokenizer_type") != "NullTokenizer" and stored.get("vocab_size") is not None:
        names = (*names, "vocab_size")
    # Adopting the absence of adapters would disable --lora-rank, and the run would train all weights.
    if here.get("lora_rank") is not None and stored.get("lora_rank") is None:
        names = tuple(name for name in names if name not in _ADAPTERS)
    # Likewise, a dense checkpoint must not disable the experts that are initialized from its layers.
    if here.get("moe_use_upcycling") and stored.get("num_experts") is None:
        names = tuple(name for name in names if name != "num_experts" and not name.startswith("moe_"))
    return {name: stored[name] for name in names if name in stored}


def _uses_sinkhorn(values: Mapping[str, Any]) -> bool:
    return "sinkhorn" in (values.get("moe_router_load_balancing_type") or ())


def check_same_model(values: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raises ValueError if the checkpoint's model differs from the run's model, naming the arguments that differ."""
    here, theirs = _model_of(args_to_json(values)), _model_of(stored)
    # A width that one side derives from other arguments is compared through the tensor shapes.
    names = tuple(
        name for name in _SAME_MODEL if name != "kv_channels" or None not in (here.get(name), theirs.get(name))
    )
    differences = _differences(here, theirs, names=names)
    if differences:
        details = ", ".join(differences.values())
        raise ValueError(f"checkpoint of another model: {details}; {_advice(list(differences))}")


def _advice(names: list[str]) -> str:
    advice = [] if names == ["unpadded_vocab_size"] else ["--use-checkpoint-args adopts the checkpoint's values"]
    # --use-checkpoint-args does not include the tokenizer.
    if "unpadded_vocab_size" in names:
        advice.append("use the tokenizer of the checkpoint's run")
    return " and ".join(advice)


def check_adapters(values: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raises ValueError if the checkpoint contains adapters that differ from the run's adapters."""
    here = args_to_json(values)
    if stored.get("lora_rank") is None:
        return
    names = _ADAPTERS if here.get("lora_rank") is not None else ("lora_rank",)
    differences = _differences({"lora_rank": None, **here}, stored, names=names)
    if differences:
        raise ValueError(
            f"checkpoint with different adapters: {', '.join(differences.values())}; use the checkpoint's values, or "
            "merge its adapters into the weights with tools/checkpoint.py merge"
        )


def check_same_optimizer(values: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raises ValueError naming the arguments that make the checkpoint's optimizer state unusable in this run."""
    names = names_with(OnLoad.OPTIMIZER)
    if stored.get("optimizer") == "sgd" and stored.get("sgd_momentum") == 0:
        # SGD without momentum stores no state from which a run with momentum could continue.
        names = (*names, "sgd_momentum")
    here = args_to_json(values)
    differences = _differences(here, stored, names=names)
    if {here.get("optimizer"), stored.get("optimizer")} == _SAME_STATES:
        del differences["optimizer"]
    if differences:
        details = ", ".join(differences.values())
        raise ValueError(
            f"checkpoint of another optimizer: {details}; use --no-load-optim or --finetune to load and convert "
            "only its weights"
        )


def noted_differences(
    values: Mapping[str, Any], stored: Mapping[str, Any], *, trains: bool, optimizer: bool
) -> list[str]:
    """Describes the arguments that differ from the checkpoint's run and for which the command line decides.

    trains: whether the run trains; evaluation only compares the model. optimizer: whether the optimizer's state is
    loaded, which has already been compared. Includes arguments that a script added.
    """
    here, theirs = _model_of(args_to_json(values)), _model_of(stored)
    names = [name for name in names_with(OnLoad.MODEL, OnLoad.GIVEN) if name not in _SAME_MODEL]
    # A converted checkpoint stores the arguments of a model, but no run's.
    if trains and stored.get("micro_batch_size", 0) is not None:
        others = here.keys() - flag_table().by_dest.keys() - DERIVED
        names += [*names_with(OnLoad.RUN), *sorted(others)]
        names += [] if optimizer else names_with(OnLoad.OPTIMIZER)
    return list(_differences(here, theirs, names=tuple(names)).values())


def describe_schedule(here: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Describes the values of a run's schedule that differ from the checkpoint's. Both are states of a scheduler."""
    is_constant = here.get("wd_incr_style") == stored.get("wd_incr_style") == "constant"
    unused = {"num_steps", *(("wd_incr_steps",) if is_constant else ())}
    names = [name for name in here if name not in unused and stored.get(name, here[name]) != here[name]]
    return [f"{name} is {here[name]} here, {stored[name]} in the checkpoint" for name in names]


def order_of_arguments(here: Mapping[str, Any], stored: Mapping[str, Any]) -> DataOrder | None:
    """Returns the order in which the run with the stored arguments read its data, if its checkpoint has no order.

    Returns None if the arguments do not determine the order, or name other data than the arguments `here`. Checkpoints
    of Megatron have the same arguments and the same order.
    """
    if not stored.keys() >= set(_ORDER) or stored["seed"] is None or _data_of(here) != _data_of(stored):
        return None
    args = argparse.Namespace(**{"step_batch_size_schedule": None, "eval_global_batch_size": None, **stored})
    try:
        schedule = build_batch_schedule(
            args.global_batch_size,
            rampup_batch_size=args.rampup_batch_size,
            step_batch_size_schedule=args.step_batch_size_schedule,
            seq_length=args.seq_length,
        )
        numbers = planned_samples(args, schedule)
    except (ValueError, TypeError):
        # A schedule in a form of another program.
        return None
    is_cyclic = stored.get("dataloader_type") == "cyclic"
    return {
        split.name: (SplitOrder(args.seed, planned, args.seq_length, cyclic=is_cyclic),)
        for split, planned in zip(Split, numbers)
        if planned
    }


def _data_of(values: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments that select data, without the folders of files, which may have moved."""
    paths = [[Path(word).name for word in values.get(name) or ()] for name in _DATA_PATHS]
    return [*paths, values.get("split"), bool(values.get("mock_data"))]


def _model_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Normalizes arguments for comparison: fills in dependent defaults and removes arguments without effect."""
    model = dict(values)
    if not model.get("group_query_attention"):
        model["num_query_groups"] = model.get("num_attention_heads")
    elif model.get("num_query_groups") is None:
        model["num_query_groups"] = 1
    if model.get("num_experts") is None:
        # A dense model has neither experts nor routers. Its arguments for them are defaults, and contradict nothing.
        model = {name: value for name, value in model.items() if not name.startswith("moe_")}
    elif model.get("moe_ffn_hidden_size") is None:
        model["moe_ffn_hidden_size"] = model.get("ffn_hidden_size")
    # Implied by the number of groups.
    model.pop("group_query_attention", None)
    model["add_qkv_bias"] = bool(model.get("add_qkv_bias") or model.get("add_bias_linear"))
    if model.get("multi_latent_attention"):
        # MLA has its own head sizes.
        model["kv_channels"] = None
    # The maximum sequence length is a shape only with learned positions.
    learned = model.get("position_embedding_type") == "learned_absolute"
    positions = model.get("max_position_embeddings") or model.get("seq_length")
    model["max_position_embeddings"] = positions if learned else None
    return model


def _differences(here: Mapping[str, Any], stored: Mapping[str, Any], *, names: tuple[str, ...]) -> dict[str, str]:
    different = _different(here, stored, names=names)
    return {name: _describe(name, here=here[name], stored=stored[name]) for name in different}


def _different(here: Mapping[str, Any], stored: Mapping[str, Any], *, names: tuple[str, ...]) -> list[str]:
    # An argument that one side lacks comes from a different version. In this case only tensor shapes are compared.
    different = [n for n in names if n in here and n in stored and here[n] != stored[n]]
    # A pattern may be written as a number, a text or a list.
    return [n for n in different if n != "moe_layer_freq" or _expert_layers(here) != _expert_layers(stored)]


def _expert_layers(values: Mapping[str, Any]) -> Any:
    pattern, num_layers = values["moe_layer_freq"], values.get("num_layers")
    if values.get("num_experts") is None or num_layers is None or pattern == 0:
        return pattern
    return layers_with_experts(values["num_experts"], pattern, num_layers=num_layers)


def _describe(name: str, *, here: Any, stored: Any) -> str:
    option, here, stored = _in_words(name, here=here, stored=stored)
    return f"{option} is {here} here, {stored} in the checkpoint"


def _in_words(name: str, *, here: Any, stored: Any) -> tuple[str, str, str]:
    """Returns an argument's flag and both values, shortened, as in a message."""
    flag = flag_table().by_dest.get(name)
    # Derived arguments have no flag.
    option = _WITHOUT_FLAG.get(name, name) if flag is None else flag.flags[0]
    if flag is not None and flag.constant is not None:
        here, stored = ("on" if value == flag.constant else "off" for value in (here, stored))
    return option, f"{here!s:.80}", f"{stored!s:.80}"
