"""Errors of DistributedFusedAdam name the rejected argument, its value and a valid value."""

import gc
import math

import pytest
import torch
from torch import nn

from megatron.core.optimizer import DistributedFusedAdam

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REMAINDERS = {"store_param_remainders": True, "store_params": False}
SCALED = {"with_scaled_states": True, "dtype": FP16}


def weight(dtype=FP32):
    return nn.Parameter(torch.zeros(8, 4, dtype=dtype))


# Settings, dtype of the parameter, and the error message, which states the given and a valid value.
REFUSED = [
    ({"lr": -1.0}, FP32, "lr.*-1.0"),
    ({"lr": math.nan}, FP32, "lr.*nan"),
    ({"eps": -1e-8}, FP32, "eps.*-1e-08"),
    ({"betas": (1.0, 0.999)}, FP32, "betas.*1.0"),
    ({"betas": (0.9, -0.1)}, FP32, "betas.*-0.1"),
    ({"betas": (0.9,)}, FP32, "betas.*0.9"),
    ({"weight_decay": -0.1}, FP32, "weight_decay.*-0.1"),
    ({"amsgrad": True}, FP32, "amsgrad.*True.*False"),
    ({"bucket_cap_mb": 0}, FP32, "bucket_cap_mb.*0"),
    ({"bucket_cap_mb": -1.0}, FP32, "bucket_cap_mb.*-1.0"),
    ({"bucket_cap_mb": float("inf")}, FP32, "bucket_cap_mb is inf: must be a finite number"),
    ({"pipeline_size": 0}, FP32, "pipeline_size.*0.*1"),
    ({"dtype": torch.int32}, FP32, "dtype.*int32.*float32"),
    ({"dtype": "fp32"}, FP32, "dtype.*fp32.*torch.float32"),
    ({"grad_sync_dtype": torch.int8}, FP32, "grad_sync_dtype.*int8"),
    ({"param_sync_dtype": torch.complex64}, FP32, "param_sync_dtype.*complex64"),
    ({**REMAINDERS, "store_params": True}, BF16, "store_params and store_param_remainders are both True"),
    ({**REMAINDERS, "dtype": BF16}, BF16, "store_param_remainders.*bfloat16.*float32"),
    (REMAINDERS, FP16, "float16 with store_param_remainders.*bfloat16"),
    (REMAINDERS, FP32, "float32 with store_param_remainders.*bfloat16"),
    ({**REMAINDERS, "param_sync_dtype": FP16}, BF16, "store_param_remainders.*float16.*bfloat16"),
    ({**SCALED, "dtype": FP32}, FP16, "with_scaled_states.*dtype.*float32.*float16"),
    ({**SCALED, "store_params": False}, FP16, "with_scaled_states.*store_params"),
    ({"store_params": False, "param_sync_dtype": BF16}, FP16, "float16, but param_sync_dtype is torch.bfloat16"),
    ({**SCALED, "capturable": True}, FP16, "capturable.*with_scaled_states|with_scaled_states.*capturable"),
    ({**REMAINDERS, "capturable": True}, BF16, "capturable.*store_param_remainders|store_param_remainders.*capturable"),
]


@pytest.mark.parametrize("settings, dtype, message", REFUSED, ids=str)
def test_settings_that_cannot_be_honoured_are_refused_with_their_value(settings, dtype, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        DistributedFusedAdam([weight(dtype)], **settings)


def overlapping():
    return nn.Parameter(torch.zeros(1).expand(4, 3))


def with_gaps():
    return nn.Parameter(torch.zeros(4, 6)[:, ::2])


def integers():
    return nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)


PARAMETERS = [
    (overlapping, r"\(4, 3\)|\[4, 3\].*dense"),
    (with_gaps, r"\(4, 3\)|\[4, 3\].*dense"),
    (lambda: nn.Parameter(torch.zeros(3, dtype=torch.complex64)), "complex64"),
    (integers, "int64"),
    (lambda: nn.Parameter(torch.zeros(3).to_sparse()), "must be dense"),
]


@pytest.mark.parametrize("make, message", PARAMETERS)
def test_parameters_that_are_no_dense_floats_are_refused_at_once_and_when_added(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DistributedFusedAdam([weight(), make()])
    optimizer = DistributedFusedAdam([weight()])
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.add_param_group({"params": [make()]})
    assert len(optimizer.param_groups) == 1


def test_what_torchs_optimizers_refuse_is_refused():
    one = weight()
    with pytest.raises(ValueError, match="params is empty: must contain"):
        DistributedFusedAdam([])
    with pytest.raises(ValueError, match="more than one parameter group"):
        DistributedFusedAdam([{"params": [one]}, {"params": [one]}])
    with pytest.raises(ValueError, match="lr.*-0.5"):
        DistributedFusedAdam([{"params": [one], "lr": -0.5}])
    with pytest.raises(TypeError):
        DistributedFusedAdam(one)


def test_sparse_gradients_are_stepped_by_as_dense_ones():
    weights = []
    for is_sparse in (False, True):
        torch.manual_seed(0)
        embedding = nn.Embedding(5, 3, sparse=is_sparse)
        optimizer = DistributedFusedAdam(embedding.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            embedding(torch.tensor([1, 2, 1])).square().sum().backward()
            optimizer.step()
        weights.append(embedding.weight.detach())
    assert torch.equal(*weights)


@pytest.mark.slow
def test_a_parameter_has_one_optimizer_at_a_time():
    one = weight()
    first = DistributedFusedAdam([one])
    with pytest.raises(ValueError, match="another"):
        DistributedFusedAdam([one])
    first.release()
    second = DistributedFusedAdam([one])
    del first, second
    gc.collect()
    optimizer = DistributedFusedAdam([one], lr=0.5)
    one.sum().backward()
    optimizer.step()
    torch.testing.assert_close(one.detach(), torch.full_like(one, -0.5))
