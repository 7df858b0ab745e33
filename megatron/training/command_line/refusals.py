"""Lists the advice for each rejected flag, and the reason for each flag that is accepted without an effect.

Patterns are tried in order against the flag's first option string, and the first match counts. A flag that is neither
a configuration field nor in HARMLESS is rejected, unless its value is the default.

When a feature is added, edit megatron/core/absent_config.py (configuration fields), this file (flags),
tools/translations.yaml (flags in launch scripts) and tools/megatron_api_unsupported.yaml (all other names).
"""

from dataclasses import dataclass

_INFERENCE = (
    "serving is outside this framework: train here, export the checkpoint and serve it with an inference engine"
)
_RL = "RL training is outside this framework: train here, then use the checkpoint in your RL trainer"
_HYBRID = "only transformer layers are supported: Mamba, GDP and hybrid layer patterns are not"
_VISION = "only text models are supported: remove the vision flags"
_RETRIEVAL = "only GPT models are supported: BERT, ICT and retriever training are not"
_ENCODER = "only decoder models are supported: use --num-layers and --seq-length"
_TE_OVERLAP = "tensor-parallel communication is not overlapped inside Transformer Engine's kernels: remove these flags"
_NO_FP8 = "8- and 4-bit training is not supported: use --bf16"
_OTHER_MODEL = "models that require it cannot be trained here"
_VARIANT = f"no experimental attention variant is supported: {_OTHER_MODEL}"
_DSA = "sparse attention with an indexer is not supported: remove the --dsa flags"
_MTP = "multi-token prediction is configured only by --mtp-num-layers and --mtp-loss-scaling-factor"
_RESTART = (
    "the launcher restarts runs: use torchrun --max-restarts with --load, which resumes with bit-identical results"
)
_FLIGHT = "set PyTorch's environment variables TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_FR_BUFFER_SIZE instead"
_ONE_LOGGER = "this logging service is not supported: use --tensorboard-dir"
_MSC = "object stores are not supported: mount the store and pass a path"
_ASYNC_TUNING = "asynchronous saves have no further settings: use --async-save alone"
_CANONICAL = "checkpoints do not depend on the parallel layout (--ckpt-format torch_dist): remove this flag"
_FSDP = "Megatron-FSDP is not supported: use --use-torch-fsdp2 or --use-distributed-optimizer"
_GTP = "generalized tensor parallelism is not supported: use --tensor-model-parallel-size"
_DUMPS = "the training loop does not dump tensors: read them from the checkpoints written every --save-interval steps"
_NCCL = "configure NCCL through its environment variables (NCCL_*) instead"
_DISTILL = "distillation from stored logits is not supported: remove these flags"
_MHC = "hyper-connections are not supported: layers have a single residual stream"
_DATA_LISTS = "pass the paths directly: --data-path, or --train-data-path, --valid-data-path and --test-data-path"
_FIM_TOKENS = "fill-in-the-middle samples are not generated: prepare them before running tools/preprocess_data.py"
_TOKENIZER_FILE = "the tokenizer is used as its file defines it: change the setting in the --tokenizer-model file"
_CHATS = "tools/preprocess_data.py turns chats into tokens and loss masks (docs/chats.md), and --data-path reads them"
_ROUTING_TRACE = "use --record-routing, which writes the routing of a run to a file"
_FUSED_KERNELS = "the device determines the kernels: remove these flags"
_DEEPEP = "--moe-token-dispatcher-type selects the dispatcher, and its backends have no further settings"
_OFFLOAD_PINNED = "with a GPU, host copies are always in pinned memory: remove these flags"

REFUSALS: tuple[tuple[str, str], ...] = (
    # Old names of working flags.
    (r"--model-parallel-size$", "renamed: use --tensor-model-parallel-size"),
    (r"--batch-size$", "renamed: use --micro-batch-size"),
    (r"--warmup$", "renamed: use --lr-warmup-fraction"),
    (r"--checkpoint-activations$", "renamed: use --recompute-activations"),
    (r"--encoder-num-layers$|--decoder-num-layers$|--(en|de)coder-seq-length$", _ENCODER),
    (r"--use-dist-ckpt$", "checkpoints are always distributed: remove it"),
    (r"--dist-ckpt-format$", "renamed: use --ckpt-format"),
    (r"--enable-cuda-graph$", "use --cuda-graph-impl local"),
    (r"--external-cuda-graph$", "use --cuda-graph-impl local"),
    (r"--cuda-graph-scope$", "renamed: use --cuda-graph-modules"),
    (r"--moe-enable-deepep$", "use --moe-token-dispatcher-type flex with --moe-flex-dispatcher-backend deepep"),
    (r"--moe-router-padding-for-", _NO_FP8),
    (r"--record-shapes$", "use --use-pytorch-profiler"),
    (r"--disable-msc$", "the multi-storage client is not used: remove it"),
    (r"--enable-msc$", _MSC),
    (r"--local-rank$", "torchrun passes the local rank in the LOCAL_RANK environment variable: remove it"),
    (r"--exit-signal-handler-for-", "a single handler covers the whole run: use --exit-signal-handler"),
    (r"--use-mp-args-from-checkpoint-args$", _CANONICAL),
    (
        r"--no-use-tokenizer-model-from-checkpoint-args$",
        "--use-checkpoint-args never reads the tokenizer: remove it",
    ),
    (
        r"--no-weight-decay-cond-type$",
        "biases and vectors are never decayed, and all other parameters always are: remove it",
    ),
    # Families of flags that span several groups.
    (r"--(rl|grpo|langrl)-|--perform-rl-step|--refit-method", _RL),
    (r"--inference-rng-tracker|--inference-|--flash-decode|--batch-invariant-|--mamba-inference-", _INFERENCE),
    (r"--nccl-all-reduce-for-prefill|--symmetric-ar-type|--mlp-chunks-for-prefill|--cache-mla-latents", _INFERENCE),
    (r"--moe-pad-experts-for-cuda-graph-inference|--max-tokens-to-oom|--use-legacy-static-engine", _INFERENCE),
    (r"--decode-only-cuda-graphs|--enable-chunked-prefill|--num-speculative-tokens", _INFERENCE),
    (r"--use-same-sampling-seed-across-dp-ranks", _INFERENCE),
    (r"--(output-bert-embeddings|bert-)|--short-seq-prob|--mask-prob|--sample-rate", _RETRIEVAL),
    (r"--(is-hybrid-model|mamba-|gdp-|disable-mamba-|hybrid-layer-pattern|hybrid-override-pattern)", _HYBRID),
    (r"--mtp-", _MTP),
    (r"--dsa-|--no-dsa-", _DSA),
    (r"--(no-)?tp-comm-", _TE_OVERLAP),
    (r"--qk-l2-norm", "use --qk-layernorm, which limits the size of queries and keys"),
    (r"--(no-)?fp8-|--fp4-|--num-layers-at-|--te-precision|--moe-(dispatch-fwd|combine-bwd)-dtype", _NO_FP8),
    (r"--reuse-grad-buf-for-mxfp8|--keep-fp8-transpose-cache", _NO_FP8),
    (r"--(use-)?kitchen-attention|--flash-attention-version", "choose the attention kernel by --attention-backend"),
    (r"--(enable-)?mhc-", _MHC),
    (r"--gtp-|--(expert-)?tensor-parallel-num-weight-shards", _GTP),
    (
        r"--mrope-section|--no-rope-freq",
        "rotary embeddings are applied in every layer: use --position-embedding-type rope alone",
    ),
    (r"--relative-attention-", "relative positions are not supported: use --position-embedding-type rope"),
    (
        r"--(max-seqlen-per-dp-cp-rank|hybrid-context-parallel)",
        "all sequences use the same context-parallel size: use --context-parallel-size",
    ),
    (r"--heterogeneous-", "all layers have the same shape: use --num-layers and --moe-layer-freq"),
    (r"--moe-(deepep|hybridep|flex-dispatcher|permute-fusion-into|ncclep)", _DEEPEP),
    (r"--moe-routing-trace-", _ROUTING_TRACE),
    (r"--moe-upcycling-", "--moe-use-upcycling copies the whole dense layer to each expert: leave this flag at 1"),
    (r"--logits-", _DISTILL),
    (r"--fault-injector-", "faults are injected by the project's own tests, not by flags"),
    (r"--inprocess-|--adlr-|--enable-ft-package|--calc-ft-timeouts|--ft-num-", _RESTART),
    (r"--one-logger-|--no-one-logger|--app-tag-", _ONE_LOGGER),
    (r"--otel-", "metrics are written to --tensorboard-dir and the run's JSONL file: remove these flags"),
    (r"--straggler-|--disable-straggler-", "--log-straggler has no further settings: remove these flags"),
    (r"--run-workload-inspector-server", "inspect a run with --profile and --tensorboard-dir"),
    (r"--log-(device-memory-used|memory-interval)", "use --log-memory-to-tensorboard"),
    (r"--log-energy", "energy is not measured: read it from nvidia-smi or the cluster"),
    (r"--sft|--chat-template", _CHATS),
    (r"--(no-)?flight-recorder-", _FLIGHT),
    (r"--async-ckpt-", _ASYNC_TUNING),
    (r"--(no-)?ckpt-|--dist-ckpt-|--no-strict-fsdp-dtensor-load|--replication|--non-persistent-local-", _CANONICAL),
    (r"--no-save-tokenizer-assets", "checkpoints never contain tokenizer files: remove it"),
    (r"--save-", _DUMPS),
    (r"--(use-)?megatron-fsdp|--fsdp-|--enable-full-sharding-in-hsdp|--create-all-gather-group", _FSDP),
    (r"--(use-sharp|sharp-|nccl-communicator|disable-symmetric|high-priority-|pipeline-model-parallel-comm)", _NCCL),
    (r"--fim-", _FIM_TOKENS),
    (r"--(per-split-data-args|per-dataset-sequences|phase-transition)", _DATA_LISTS),
    (r"--dataloader-inter-document-masking", "use --reset-attention-mask and --reset-position-ids"),
    (r"--object-storage-cache-path", _MSC),
    (r"--null-tokenizer-pad-id", "padding is what the data's padding masks mark, never an id: remove it"),
    (r"--(tokenizer-|tiktoken-num-|no-tokenizer-)", _TOKENIZER_FILE),
    (
        r"--trust-remote-code",
        "code shipped with a tokenizer is never executed: pass its tokenizer.json as --tokenizer-model",
    ),
    (r"--use-gigatoken", "use --tokenizer-type HuggingFaceTokenizer with a tokenizer.json"),
    (r"--no-pad-vocab-size", "use --make-vocab-size-divisible-by 1"),
    (r"--(no-)?pin-cpu-", _OFFLOAD_PINNED),
    (r"--cpu-offloading-retain", _OFFLOAD_PINNED),
    # Single flags.
    (r"--no-initialization", "weights are always initialized: use --load to replace them"),
    (
        r"--overlap-dispatch-backward|--ep-overlap-early",
        "expert communication does not overlap with attention or weight gradients: remove these flags",
    ),
    (r"--use-ring-exchange-p2p", "pipeline transfers use ordinary sends and receives: remove it"),
    (r"--openai-gelu", "the supported activations are GELU (default), --swiglu, --quick-geglu and --squared-relu"),
    (r"--disable-bf16-reduced", "set torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction in your script"),
    (r"--(use-fused-weighted-squared-relu|fused-residual-rmsnorm|use-te-activation-func)", _FUSED_KERNELS),
    (r"--(mla-down-proj-fusion|disable-jit-fuser|muon-use-syrk|muon-fp32-matmul-prec)", _FUSED_KERNELS),
    (r"--use-grouped-gemm-for-", "grouped GEMMs are used only for routed experts: use --moe-grouped-gemm"),
    (
        r"--moe-(use-grouped-tensor|single-grouped)",
        "--moe-grouped-gemm always stores all experts in one weight: remove these flags",
    ),
    (
        r"--moe-(shared-expert-glu|mlp-glu)-interleave",
        "gate rows always precede up rows: convert the checkpoint and remove this flag",
    ),
    (r"--moe-router-quantile", "use --moe-router-enable-expert-bias with --moe-router-bias-update-rate"),
    (r"--moe-router-force-biased", "use --moe-router-force-load-balancing"),
    (r"--moe-apply-probs-on-input", "routing probabilities scale the experts' outputs, not their inputs: remove it"),
    (r"--moe-latent-size", "experts operate on the full hidden size: use --moe-ffn-hidden-size for smaller experts"),
    (r"--no-clone-scatter-output", "it only trades time for memory: remove it"),
    (r"--config-logger-dir", "use --print-config, which prints the whole configuration"),
    (r"--mlp-chunks-for-training", "use --recompute-granularity to reduce the MLP's activation memory"),
    (r"--onnx-safe", "ONNX export is not supported: export the checkpoint with a different tool"),
    (r"--pytorch-profiler-collect-chakra", "use --use-pytorch-profiler, whose trace can be converted to Chakra"),
    (r"--gpu-sniff-test-interval", "GPUs are not tested during a run: run the cluster's health check before it"),
    (r"--result-rejected-tracker-filename", "steps are never rejected and rerun for validation: remove it"),
    (r"--dump-param-to-param-group-map", "print the optimizer's param_groups in your script"),
    (r"--freeze-all-layers", "set requires_grad in your model_provider instead"),
    (r"--output-logit-dtype", "logits have the model's dtype, and the loss is computed in fp32: remove it"),
    (r"--lazy-mpu-init", "process groups are always created at startup: remove it"),
    (
        r"--distributed-timeout-seconds-after-init",
        "a single timeout applies to the whole run: use --distributed-timeout-minutes",
    ),
    (r"--mid-level-dataset-surplus", "dataset blends need no surplus samples: remove it"),
    (r"--allow-ambiguous-pad-tokens", "padding is what the data's padding masks mark, never an id: remove it"),
    (r"--no-barrier-with-level-1-timing", "timers are configured only by --timing-log-level: remove it"),
    (r"--check-for-spiky-loss", "use --loss-spike-rewind; steps with NaN or Inf stop the run by default"),
)

GROUP_REFUSALS = {"biencoder": _RETRIEVAL, "vision": _VISION, "rl": _RL, "inference": _INFERENCE}

# Values of Megatron-LM that are deliberately not supported, with advice.
VALUE_REFUSALS = {
    ("--tokenizer-type", "SFTTokenizer"): f"use the type of the base tokenizer; {_CHATS}",
    ("--optimizer", "dist_muon"): "use muon, with --use-distributed-optimizer to shard its state",
}

# Advice for flags without a configuration field, which are rejected unless given their default value.
MISSING: tuple[tuple[str, str], ...] = (
    (r"--fp8-|--first-last-layers-bf16$", f"{_NO_FP8} and remove this flag"),
    (r"--experimental-attention-variant$|--linear-", _VARIANT),
    (r"--dsa-", _DSA),
    (
        r"--apply-residual-connection-post-layernorm$",
        f"residual connections always start before the norm: {_OTHER_MODEL}",
    ),
    (
        r"--apply-query-key-layer-scaling$",
        "attention scores are not scaled by the layer number: remove it, and use --bf16 if fp16 overflows",
    ),
    (r"--fp16-lm-cross-entropy$", "the loss is always computed in fp32: remove it"),
    (r"--data-parallel-random-init$", "all replicas are initialized identically from --seed: remove it"),
    (r"--fim-", _FIM_TOKENS),
    (r"--vocab-extra-ids$", "include the extra tokens in --vocab-size, or in the --tokenizer-model"),
    (r"--eval-micro-batch-size$", "evaluation uses the training --micro-batch-size: use --eval-global-batch-size"),
    (r"--test-mode$", "use --skip-train to evaluate only"),
    (
        r"--load-main-params-from-ckpt$",
        "master weights are loaded with the optimizer state, or copied from the weights without it: remove it",
    ),
    (r"--non-persistent-", "all checkpoints are persistent: use --save-interval and --save-retain-interval"),
    (
        r"--ckpt-convert-",
        "convert the checkpoint before the run with tools/convert_megatron_core.py (docs/checkpoints.md)",
    ),
    (r"--override-ckpt-iteration$", "use --ckpt-step, which names the iteration to load"),
    (r"--muon-coefficient-type$", "Newton-Schulz steps use the coefficients of torch.optim.Muon: use simple"),
    (r"--muon-scalar-optimizer$", "AdamW updates the parameters that Muon does not update: remove it"),
    (r"--yaml-cfg$", "use --config, which reads flags from a file"),
    (r"--error-injection-rate$", "errors are never injected: remove it"),
)

# Accepted flags that another flag replaces.
NO_EFFECT_HINTS = {
    "--use-flash-attn": "use --attention-backend",
}


@dataclass(frozen=True)
class Harmless:
    """The reason why a flag is accepted without effect, as the end of a sentence that starts with the flag.

    changes_speed: whether the flag changes the speed or memory of a Megatron-LM run.
    """

    reason: str
    changes_speed: bool = False


_KERNELS = Harmless("selects a kernel, which the device determines here", changes_speed=True)
_SCHEDULE = Harmless(
    "selects an overlap that is not supported; results are the same, but a step may take longer", changes_speed=True
)
_MEMORY = Harmless("trades time for memory, with the same results", changes_speed=True)
_LOG = Harmless("only adds to the log: use --tensorboard-dir and the --log flags")
_SAVING = Harmless("changes how checkpoints are written, not their content")
_ALWAYS = Harmless("requests something that is always done")
_WITH_MEGATRON_FSDP = Harmless("is read only with --use-megatron-fsdp, which is not supported")
_RERUN = Harmless("configures the rerun of suspect steps; here steps with NaN or Inf stop the run")

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
        "--logging-level",
        "--nvtx-ranges",
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
    Harmless("changes how dataset indices are built, not their content"): ("--num-dataset-builder-threads",),
    Harmless("enables features that are always enabled here"): ("--enable-experimental",),
    Harmless("is read only by --optimizer lion, which is not supported"): ("--lion-beta1", "--lion-beta2"),
    _WITH_MEGATRON_FSDP: (
        "--megatron-fsdp-grad-comm-dtype",
        "--megatron-fsdp-main-grads-dtype",
        "--megatron-fsdp-main-params-dtype",
        "--outer-dp-sharding-strategy",
    ),
    _RERUN: ("--error-injection-type", "--rerun-mode"),
}

# Keyed by the first word of each flag.
HARMLESS = {word: reason for reason, words in _FLAGS_BY_REASON.items() for word in words}
