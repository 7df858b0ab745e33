"""The stored runs as flags. write_fixtures.py runs them with an earlier commit, and tests load what it wrote."""

STEPS, FURTHER = 2, 2

_MODEL = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --group-query-attention --num-query-groups 1 "
    "--ffn-hidden-size 12 --max-position-embeddings 16 --position-embedding-type rope --rotary-base 500 "
    "--normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --swiglu "
    "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 32 --attention-backend unfused"
)
_EXPERTS = (
    "--num-experts 4 --moe-layer-freq [0,1] --moe-router-topk 2 --moe-ffn-hidden-size 8 --moe-grouped-gemm "
    "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 --moe-shared-expert-intermediate-size 8"
)
_LATENT = (
    "--multi-latent-attention --q-lora-rank 4 --kv-lora-rank 4 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4 "
    "--qk-layernorm"
)
# Flags of the model, which --use-checkpoint-args replaces, by the name of a run.
MODELS = {
    "dense": f"{_MODEL} --hidden-dropout 0.125 --attention-dropout 0",
    "experts": f"{_MODEL} {_EXPERTS} --hidden-dropout 0 --attention-dropout 0 --bf16",
    "latent": f"{_MODEL.replace('--group-query-attention --num-query-groups 1 ', '')} {_LATENT} --hidden-dropout 0 "
    "--attention-dropout 0",
}
# Flags of a run that are no property of its model.
RUN = (
    "--seq-length 8 --micro-batch-size 1 --global-batch-size 2 --lr 0.01 --min-lr 0.001 --lr-decay-style cosine "
    "--lr-decay-iters 8 --weight-decay 0.1 --clip-grad 1.0 --eval-iters 0 --num-workers 0 --deterministic-mode "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 32 --log-interval 1"
)
# Flags with which a run starts that takes its model from a stored checkpoint; some contradict it.
ADOPTING = f"{RUN} --train-iters 4 --use-checkpoint-args --num-layers 3 --norm-epsilon 1e-5 --hidden-dropout 0.25"
# Megatron-LM's older format: one file, whose arguments are a pickled argparse.Namespace.
LEGACY = "legacy"


def run_words(name: str, *, steps: int) -> list[str]:
    """Returns the command line of a stored run."""
    return f"{MODELS[name]} {RUN} --train-iters {steps}".split()


def adopting_words(name: str, *, load: str) -> list[str]:
    """Returns the command line of a run that takes its model from a stored checkpoint in the folder `load`."""
    file_format = ["--ckpt-format", "torch"] if name == LEGACY else []
    return [*ADOPTING.split(), "--load", load, *file_format]
