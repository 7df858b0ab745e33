"""Known flags that are accepted though nothing here reads them, each with the reason why no number of a run can change.

A flag that is in neither this table nor a configuration is refused, unless it is given the value that it has anyway.
"""

_KERNELS = "chooses a kernel: kernels are chosen by the device here"
_SCHEDULE = "chooses what overlaps with what: results are the same, and other flags overlap here"
_MEMORY = "trades time for memory, with the same results"
_LOG = "adds to the log alone; --tensorboard-dir and --log-... write what there is here"
_SAVING = "tunes how checkpoints are written, not what is in them"
_ALWAYS = "asks for what is always done here"
_FSDP = "is read with --use-megatron-fsdp alone, which is refused"
_RERUN = "chooses how suspect results are looked into: steps with NaN or Inf stop the run here"

_FLAGS_BY_REASON = {
    _KERNELS: (
        "--cross-entropy-fusion-impl",
        "--moe-router-fusion",
        "--no-bias-dropout-fusion",
        "--no-bias-gelu-fusion",
        "--no-bias-swiglu-fusion",
        "--no-gradient-reduce-div-fusion",
        "--no-masked-softmax-fusion",
        "--no-persist-layer-norm",
        "--no-rope-fusion",
        "--use-flash-attn",
        "--use-torch-optimizer-for-cpu-offload",
        "--use-transformer-engine-op-fuser",
    ),
    _SCHEDULE: (
        "--defer-embedding-wgrad-compute",
        "--delay-wgrad-compute",
        "--overlap-moe-expert-parallel-comm",
        "--overlap-p2p-communication-warmup-flush",
        "--suggested-communication-unit-size",
        "--tp-comm-overlap",
        "--tp-comm-overlap-cfg",
        "--train-sync-interval",
        "--use-nccl-ub",
        "--wgrad-deferral-limit",
    ),
    _MEMORY: (
        "--delay-offload-until-cuda-graph",
        "--delta-offload-bytes-across-pp-ranks",
        "--distribute-saved-activations",
        "--empty-unused-memory-level",
        "--fine-grained-offloading-max-inflight-offloads",
        "--no-use-layer-wise-param-layout",
    ),
    _LOG: (
        "--log-max-attention-logit",
        "--logging-level",
        "--nvtx-ranges",
        "--wandb-entity",
        "--wandb-exp-name",
        "--wandb-project",
        "--wandb-save-dir",
    ),
    _SAVING: (
        "--async-ckpt-use-cpu-shm",
        "--async-strategy",
        "--ckpt-assume-constant-structure",
        "--dist-ckpt-workers",
        "--distrib-optim-fully-reshardable-mem-efficient",
        "--use-persistent-ckpt-worker",
    ),
    _ALWAYS: (
        "--auto-detect-ckpt-format",
        "--ckpt-fully-parallel-save",
        "--te-rng-tracker",
        "--verify-integrity",
    ),
    "tunes how the index of a corpus is built, not what is in it": ("--num-dataset-builder-threads",),
    "allows what needs no permission here": ("--enable-experimental",),
    "is read by --optimizer lion alone, which is refused": ("--lion-beta1", "--lion-beta2"),
    _FSDP: (
        "--megatron-fsdp-grad-comm-dtype",
        "--megatron-fsdp-main-grads-dtype",
        "--megatron-fsdp-main-params-dtype",
        "--outer-dp-sharding-strategy",
    ),
    _RERUN: ("--error-injection-type", "--rerun-mode"),
}

# By the first word of each flag.
HARMLESS = {word: reason for reason, words in _FLAGS_BY_REASON.items() for word in words}
