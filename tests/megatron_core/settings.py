"""The runs of the fixtures, as flags of this project; write_fixtures.py has the same runs in the other one's terms.

Imports nothing of either project, so that both can read it.
"""

STEPS, FURTHER = 3, 5
STEPS_IN_ALL = STEPS + FURTHER

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 24 --seq-length 16 --max-position-embeddings 16 --position-embedding-type rope "
    "--normalization RMSNorm --disable-bias-linear --swiglu --untie-embeddings-and-output-weights "
    "--hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 64 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 0.01 --min-lr 0.001 --lr-decay-style cosine --lr-decay-iters 10 "
    "--lr-warmup-iters 2 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 64 --log-interval 1"
).split()
_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-router-dtype fp64"
).split()
# By case: flags in addition to FLAGS, without a layout.
_CASES: dict[str, list[str]] = {"dense": [], "experts": _EXPERTS, "masters": ["--bf16"]}


def case_flags(case: str) -> list[str]:
    """Returns the flags of a case that FLAGS lacks."""
    return list(_CASES[case])
