"""Names that plug-ins written for Megatron-LM import from its paths, compared with torch's functions."""

import pytest
import torch

from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.jit import jit_fuser
from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import attention_mask_func
from megatron.training.arguments import parse_args, validate_args
from tests.unit_tests.training.flag_models import DENSE

CAUSAL, PADDING = AttnMaskType.causal, AttnMaskType.padding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_masked_softmax_is_torchs(dtype: torch.dtype) -> None:
    scores = torch.randn(2, 3, 5, 5, dtype=dtype)
    before = scores.clone()
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    softmax = FusedScaleMaskSoftmax(False, dtype is torch.bfloat16, CAUSAL, True, attention_mask_func, True, 0.5)
    expected = (scores.float() * 0.5).masked_fill(later, -torch.inf).softmax(-1).to(dtype)
    for mask in (None, later):
        assert torch.equal(softmax(scores, mask), expected)
    assert torch.equal(scores, before)
    plain = FusedScaleMaskSoftmax(False, False, PADDING, True, None, False, None)
    assert torch.equal(plain(scores, None), scores.softmax(-1))
    sink = torch.randn(3)
    with_sink = softmax(scores, None, sink).float().sum(-1)
    assert (with_sink < 1).all()
    column = sink.view(1, 3, 1, 1).expand(2, 3, 5, 1)
    masked = (scores.float() * 0.5).masked_fill(later, -torch.inf)
    torch.testing.assert_close(
        with_sink, torch.cat((masked, column), -1).softmax(-1)[..., :-1].sum(-1), rtol=2e-2, atol=1e-3
    )


def test_a_softmax_that_could_overflow_or_has_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale is 2.0 and softmax_in_fp32 is False"):
        FusedScaleMaskSoftmax(True, False, CAUSAL, True, None, False, 2.0)
    with pytest.raises(ValueError, match="input_in_fp16 and input_in_bf16 are both True"):
        FusedScaleMaskSoftmax(True, True, CAUSAL, True, None, True, None)
    with pytest.raises(ValueError, match="window_size is"):
        FusedScaleMaskSoftmax(False, False, CAUSAL, True, None, True, None, (1, 0))


def test_a_marked_function_stays_itself_and_arguments_build_a_tokenizer() -> None:
    assert jit_fuser(torch.relu) is torch.relu
    args = validate_args(parse_args(argv=f"{DENSE} --tokenizer-type NullTokenizer".split()))
    assert build_tokenizer(args).vocab_size == 100
