"""The runs of the fixtures as flags of this project. write_fixtures.py configures the same runs for megatron-core.

Imports neither project, so that programs of both can import it.
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
# Flags of each case in addition to FLAGS, without flags of the layout.
_CASES: dict[str, list[str]] = {"dense": [], "experts": _EXPERTS, "masters": ["--bf16"]}


def case_flags(case: str) -> list[str]:
    """Returns the flags of a case in addition to FLAGS."""
    return list(_CASES[case])
