"""Configuration fields: values that validate_fields accepts, and error messages for other values."""

import abc
import copy
import dataclasses
import pickle
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
import torch

from megatron.core.config_field import config_field, require_defaults, validate_fields
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


@dataclass(kw_only=True)
class Sample:
    """Has a field of each type."""

    count: int | None = config_field(None, help="h", at_least=1, at_most=9)
    rate: float = config_field(0.5, help="h", more_than=0, less_than=1)
    style: str = config_field("a", help="h", choices=("a", "b"))
    label: str | None = config_field(None, help="h")
    names: list[str] = config_field(help="h", choices=("x", "y"), default_factory=list)

    def __post_init__(self) -> None:
        validate_fields(self)


@pytest.mark.parametrize("values", [{}, {"count": 9}, {"rate": 0.9}, {"style": "b"}, {"names": ["x", "y"]}])
def test_right_values_pass(values: dict[str, Any]) -> None:
    Sample(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"count": 0}, "Sample.count is 0: must be at least 1"),
        ({"count": 10}, "Sample.count is 10: must be at most 9"),
        ({"count": True}, "Sample.count is True: must be an integer or none"),
        ({"rate": 0}, "Sample.rate is 0: must be more than 0"),
        ({"rate": 1.0}, "Sample.rate is 1.0: must be less than 1"),
        ({"rate": float("nan")}, "Sample.rate is nan"),
        ({"rate": float("inf")}, "Sample.rate is inf: must be finite"),
        ({"names": [""]}, "Sample.names is '': must be one of x, y"),
        ({"label": ""}, "Sample.label is empty: must have a value, or be omitted"),
        ({"rate": None}, "Sample.rate is None: must be a number"),
        ({"style": "c"}, "Sample.style is 'c': must be one of a, b"),
        ({"names": ["x", "z"]}, "Sample.names is 'z': must be one of x, y"),
        ({"names": "x"}, "Sample.names is 'x': must be a list"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        Sample(**values)
    assert words in str(caught.value)


SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


@dataclass
class OfUser(TransformerConfig):
    """A user's configuration, whose constructor @dataclass generates. Declares one of Megatron's fields itself."""

    window: int = 3
    qk_l2_norm: bool = False


class WithInit(TransformerConfig):
    """A user's configuration with a constructor of its own."""

    def __init__(self, width: int, **fields: Any) -> None:
        super().__init__(num_layers=2, num_attention_heads=2, hidden_size=width, persist_layer_norm=True, **fields)


class Abstract(abc.ABC):
    """A user's interface."""

    @abc.abstractmethod
    def name(self) -> str:
        """Names the configuration."""


class HasName(Protocol):
    """A user's protocol."""

    def name(self) -> str:
        """Names the configuration."""


@dataclass
class OfProtocol(TransformerConfig, HasName):
    """A configuration that inherits from a protocol."""

    def name(self) -> str:
        return "mine"


@dataclass
class OfInterface(TransformerConfig, Abstract):
    """A configuration that implements an interface."""

    def name(self) -> str:
        return "mine"


def test_absent_fields_accept_their_defaults() -> None:
    config = TransformerConfig(**SIZES, fp4=None, gtp_remat_opt_in_modules=[])
    assert config == TransformerConfig(**SIZES)
    assert config.fp4 is None and config.gtp_remat_opt_in_modules == [] and config.fp4_recipe == "nvfp4"
    assert DistributedDataParallelConfig(megatron_fsdp_main_params_dtype=torch.float32) == (
        DistributedDataParallelConfig()
    )
    # A caller may change the list that it reads.
    config.gtp_remat_opt_in_modules.append("mlp")
    assert config.gtp_remat_opt_in_modules == []


def test_absent_fields_refuse_other_values_by_name_with_problems_of_other_fields() -> None:
    with pytest.raises(ValueError) as caught:
        TransformerConfig(**SIZES, fp4="e2m1", moe_latent_size=3, layernorm_epsilon=-1.0)
    assert str(caught.value).splitlines() == [
        "TransformerConfig.fp4 is 'e2m1': 4-bit training is not supported: use --bf16, or --fp8-format e4m3 for "
        "experts in 8 bits; keep the default None",
        "TransformerConfig.moe_latent_size is 3: experts operate on the full hidden size: use --moe-ffn-hidden-size "
        "for smaller experts; keep the default None",
        "TransformerConfig.layernorm_epsilon is -1.0: must be more than 0",
    ]


@pytest.mark.parametrize("config_class", [TransformerConfig, MLATransformerConfig, OfUser, OfInterface])
def test_absent_fields_are_accepted_and_refused_by_subclasses(config_class: type[TransformerConfig]) -> None:
    config = config_class(**SIZES, fp4=None, bias_dropout_fusion=True)
    assert config.bias_dropout_fusion is True and config.persist_layer_norm is False
    with pytest.raises(ValueError, match=rf"^{config_class.__name__}\.fp4 is 'e2m1': .*; keep the default None$"):
        config_class(**SIZES, fp4="e2m1")
    with pytest.raises(TypeError, match=rf"{config_class.__name__}\..*unexpected keyword argument 'no_such_field'"):
        config_class(**SIZES, no_such_field=1)
    with pytest.raises(AttributeError, match=rf"'{config_class.__name__}' object has no attribute 'no_such_field'"):
        _ = config.no_such_field
    with pytest.raises(AttributeError, match="rotary_scaling"):
        _ = config.rotary_scaling


def test_absent_fields_reach_constructors_of_users() -> None:
    config = WithInit(16, apply_rope_fusion=True, fp4=None)
    assert (config.hidden_size, config.persist_layer_norm, config.apply_rope_fusion) == (16, True, True)
    with pytest.raises(ValueError, match=r"^WithInit\.fp4 is 'e2m1'"):
        WithInit(16, fp4="e2m1")


def test_a_subclass_may_have_a_field_that_is_absent_otherwise() -> None:
    assert OfUser(**SIZES, qk_l2_norm=True).qk_l2_norm
    with pytest.raises(ValueError, match=r"TransformerConfig\.qk_l2_norm is True"):
        TransformerConfig(**SIZES, qk_l2_norm=True)
    assert MLATransformerConfig(**SIZES, rotary_base=10000).rotary_base == 10000
    with pytest.raises(TypeError, match="rotary_base"):
        TransformerConfig(**SIZES, rotary_base=10000)


@pytest.mark.parametrize("config_class", [TransformerConfig, OfUser, OfInterface, OfProtocol])
def test_values_without_effect_survive_copies(config_class: type[TransformerConfig]) -> None:
    config = config_class(**SIZES, bias_dropout_fusion=True, batch_p2p_comm=False)
    larger = dataclasses.replace(config, num_layers=4, fp4=None, persist_layer_norm=True)
    assert larger.num_layers == 4 and larger.persist_layer_norm and not config.persist_layer_norm
    for copied in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), larger):
        assert copied.bias_dropout_fusion is True and copied.batch_p2p_comm is False
        assert copied.tp_comm_overlap is False
    assert config != dataclasses.replace(config, bias_dropout_fusion=False)
    with pytest.raises(ValueError, match="keep the default None"):
        dataclasses.replace(config, fp4="e2m1")


def test_absent_values_contain_only_absent_fields() -> None:
    with pytest.raises(ValueError, match=r"^TransformerConfig\.hidden_size is 8: is not a field of this class"):
        TransformerConfig(**SIZES, absent_values={"hidden_size": 8})
    with pytest.raises(ValueError, match=r"^TransformerConfig\.absent_values is \['fp4'\]: must be a dict"):
        TransformerConfig(**SIZES, absent_values=["fp4"])


def test_absent_fields_can_be_assigned() -> None:
    config = TransformerConfig(**SIZES)
    config.tp_comm_overlap = True
    assert config.tp_comm_overlap is True and config != TransformerConfig(**SIZES)
    assert dataclasses.replace(config, num_layers=4).tp_comm_overlap is True
    config.fp4 = "e2m1"
    with pytest.raises(ValueError, match=r"^TransformerConfig\.fp4 is 'e2m1'"):
        dataclasses.replace(config, num_layers=4)


def test_unsupported_arguments_are_refused_by_name() -> None:
    require_defaults("build", "sharp does not exist here", use_sharp=(False, False), name=(None, None))
    with pytest.raises(
        ValueError, match=r"^build: use_sharp is True: sharp does not exist here; keep the default False$"
    ):
        require_defaults("build", "sharp does not exist here", use_sharp=(True, False), name=(None, None))


@dataclass(kw_only=True)
class Named:
    """Has fields that accept several forms."""

    dtype: torch.dtype = config_field(
        torch.float32, help="x", cli_default="fp32", choices=("fp32",), named={"fp32": torch.float32, "u8": torch.uint8}
    )
    parts: list[str] | None = config_field(None, help="x")
    window: tuple[int, int] | None = config_field(None, help="x")
    either: list[int] | tuple[int, ...] = config_field((), help="x")

    def __post_init__(self) -> None:
        validate_fields(self)


def test_fields_hold_values_whether_they_or_their_names_are_given() -> None:
    assert Named(dtype="fp32").dtype is Named(dtype=torch.float32).dtype is Named().dtype is torch.float32
    for wrong in ("u8", torch.uint8, "fp64"):
        with pytest.raises(ValueError, match=r"Named\.dtype is .*: must be one of fp32"):
            Named(dtype=wrong)


def test_lists_and_tuples_replace_each_other() -> None:
    named = Named(parts=("a", "b"), window=[4, 0], either=[1])
    assert (named.parts, named.window, named.either) == (["a", "b"], (4, 0), [1])


def test_fields_without_effect_accept_their_type_alone() -> None:
    assert TransformerConfig(**SIZES, bias_dropout_fusion=True).bias_dropout_fusion
    for wrong in ("yes", 0):
        message = rf"TransformerConfig\.bias_dropout_fusion is {wrong!r}: must be true or false"
        with pytest.raises(ValueError, match=message):
            TransformerConfig(**SIZES, bias_dropout_fusion=wrong)
    with pytest.raises(ValueError, match=r"wgrad_deferral_limit is None: must be an integer"):
        TransformerConfig(**SIZES, wgrad_deferral_limit=None)
