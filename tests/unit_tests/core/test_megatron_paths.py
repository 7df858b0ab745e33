"""Names that plug-ins written for Megatron-LM import from its paths, compared with torch's functions."""

import pytest
import torch

from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.utils import attention_mask_func
from megatron.training.arguments import parse_args, validate_args
from tests.unit_tests.training.flag_models import DENSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masked_scores_get_no_probability_and_a_fully_masked_row_stays_finite(dtype: torch.dtype) -> None:
    scores = torch.randn(2, 3, 5, 5, dtype=dtype)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(later, -torch.inf).softmax(-1)
    masked = attention_mask_func(scores, later)
    assert masked is scores and torch.equal(masked.softmax(-1), expected)
    assert attention_mask_func(scores, torch.ones_like(later)).softmax(-1).isfinite().all()


def test_arguments_build_a_tokenizer() -> None:
    args = validate_args(parse_args(argv=f"{DENSE} --tokenizer-type NullTokenizer".split()))
    assert build_tokenizer(args).vocab_size == 100
