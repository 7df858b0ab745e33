"""Lists the cases of the gate: command lines of small runs, by subject.

jobs.py runs the cases, and verdict.py judges the results. To add a case, add a line to its group. In flags, {data} is
the folder of the corpora `a` and `b`, and {folder} is the case's own folder. If the base does not know the flags of a
case yet, add its name to NEW_CASES.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKPOINTS = "ckpt"  # folder to which a run saves, in its own folder
RESULT = "result.json"  # exit codes and seconds of a case's runs, written by worker.py after they have ended
PRETRAIN = "pretrain_gpt.py"
TAPES = "tapes.py"  # pretrain_gpt.py with tapes instead of CUDA graphs


@dataclass(frozen=True)
class Case:
    """A small run.

    program: PRETRAIN, or a script of tools/gate/scripts. restart_at: the run stops after this step and a second run
    continues it. resume_at: both trees additionally resume from the base's checkpoint of this step.
    """

    name: str
    flags: str
    ranks: int = 1
    resume_at: int | None = None
    restart_at: int | None = None
    program: str = PRETRAIN

    @property
    def is_new(self) -> bool:
        """Whether the base cannot run the case. Only the head runs it, and nothing is compared."""
        return self.name in NEW_CASES

    def command_lines(self) -> list[str]:
        """Returns the command lines of the consecutive runs in the case's folder."""
        if self.program not in (PRETRAIN, TAPES):
            return [self.flags]
        line = f"{self._own_flags()} --save {CHECKPOINTS}"
        if self.resume_at is not None:
            line += f" --save-interval {self.resume_at}"
        if self.restart_at is None:
            return [line]
        return [f"{line} --exit-interval {self.restart_at}", f"{line} --load {CHECKPOINTS}"]

    def resumed_command_line(self, checkpoints: Path) -> str:
        """Returns the command line that resumes from the base's checkpoint of step `resume_at`.

        checkpoints: folder of the base's checkpoints.
        """
        if self.program not in (PRETRAIN, TAPES):
            return f"{self.flags} --load {checkpoints}/iter_{self.resume_at:07d}"
        return f"{self._own_flags()} --save {CHECKPOINTS} --load {checkpoints} --ckpt-step {self.resume_at}"

    def _own_flags(self) -> str:
        return f"{RUN} {self.flags} --tensorboard-dir {{folder}}"


# Cases that the base cannot run. They must run with the head, and nothing is compared. It describes the difference
# from the current base branch. Remove an entry once the base contains the change.
NEW_CASES: frozenset[str] = frozenset()

# Section: flags. The last occurrence of a flag counts.

RUN = """
--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 6
--lr 0.01 --min-lr 0.001 --lr-decay-style cosine --lr-warmup-iters 2 --eval-iters 1 --eval-interval 3 --log-interval 1
--num-workers 0 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --tokenizer-type NullTokenizer --vocab-size 127
"""
MOCK = "--mock-data"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
# Short runs for cases that do not test the schedule; they also log the parameter norm.
BRIEF = "--train-iters 4 --lr-warmup-iters 0 --global-batch-size 4 --eval-interval 4 --log-params-norm"
SHORT = f"{MOCK} {BRIEF}"
LLAMA_LAYERS = f"""
{NO_DROPOUT} --group-query-attention --num-query-groups 2 --normalization RMSNorm --position-embedding-type rope
--swiglu --disable-bias-linear --untie-embeddings-and-output-weights
"""
ROUTED = """
--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001
"""
SEQUENTIAL = f"{LLAMA_LAYERS} {ROUTED}"
GROUPED = f"{SEQUENTIAL} --moe-grouped-gemm"
DENSE = f"{SHORT} {NO_DROPOUT}"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
LLAMA = f"{SHORT} {LLAMA_LAYERS}"
EXPERTS = f"{SHORT} {GROUPED} --moe-per-layer-logging"
LATENT_WIDTHS = """
--multi-latent-attention --qk-layernorm --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 4
--v-head-dim 7
"""
LATENT = f"""
{SHORT} {NO_DROPOUT} --normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights {LATENT_WIDTHS}
"""
EXACT = "--deterministic-mode"
FP16 = "--fp16 --initial-loss-scale 65536 --loss-scale-window 2"
FOUR_LAYERS = "--num-layers 4"
CORPUS = "--data-path {data}/a --split 80,10,10 --data-cache-path {folder}/cache"
BLEND = "--data-path 0.3 {data}/a 0.7 {data}/b --split 80,10,10 --data-cache-path {folder}/cache"
BORDERS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
PACKED = f"{BORDERS} --no-create-attention-mask-in-dataloader"
ALLTOALL = "--moe-token-dispatcher-type alltoall"
EP = "--expert-model-parallel-size 2"
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
PP = f"{FOUR_LAYERS} --pipeline-model-parallel-size 2 --global-batch-size 8"
VPP = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
CP = "--context-parallel-size 2"
CP_LEVELS = "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"

SECOND_LAYERS = "--moe-layer-freq 2 --deterministic-mode --global-batch-size 12"
EACH_LAYER = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PARTS = "--recompute-granularity selective --recompute-modules core_attn layernorm moe_act"
ONE_RATE = "--optimizer sgd --lr-decay-style constant --clip-grad 0"

MODEL_TYPES = (
    Case("dense, learned positions, dropout", MOCK),
    Case("dense, learned positions, dropout, two ranks", MOCK, ranks=2),
    Case("llama-like", f"{MOCK} {LLAMA_LAYERS}", resume_at=3),
    Case("llama-like, bf16", f"{MOCK} {LLAMA_LAYERS} --bf16", ranks=2),
    Case("llama-like, parts of sequences", f"{MOCK} {LLAMA_LAYERS} --bf16 {CP} --cp-comm-type p2p all_gather", ranks=2),
    Case("llama-like, fp16", f"{MOCK} {LLAMA_LAYERS} {FP16}"),
    Case("llama-like, unfused attention", f"{MOCK} {LLAMA_LAYERS} --attention-backend unfused"),
    Case("experts, grouped", f"{MOCK} {GROUPED}", ranks=2),
    Case("experts, grouped, bf16", f"{MOCK} {GROUPED} --bf16", resume_at=4),
    Case("experts, sequential", f"{MOCK} {SEQUENTIAL}"),
    Case("experts in every second layer, deterministic", f"{MOCK} {GROUPED} {SECOND_LAYERS}", ranks=3),
    Case("SGD, constant rate, no clipping", f"{MOCK} {ONE_RATE}"),
    Case("recompute of layers, dropout", f"{MOCK} {EACH_LAYER}"),
    Case("recompute of layers, experts", f"{MOCK} {GROUPED} {EACH_LAYER}"),
    Case("recompute of parts, experts", f"{MOCK} {GROUPED} {PARTS}"),
    Case("one corpus", CORPUS),
    Case("blend of two corpora", BLEND, ranks=2),
    Case("restart", BLEND, restart_at=3),
    Case("restart, experts, bf16", f"{MOCK} {GROUPED} --bf16", ranks=2, restart_at=2),
)

LAYOUTS = (
    Case("layout: tp", f"{DENSE} {DROPOUT} --bf16 {TP}", ranks=2),
    Case("layout: tp sp", f"{LLAMA} {SP}", ranks=2, resume_at=2),
    Case("layout: pp", f"{LLAMA} {PP}", ranks=2, resume_at=2),
    Case("layout: pp zb-h1", f"{DENSE} {DROPOUT} {PP} --pipeline-schedule zb-h1", ranks=2),
    Case("layout: pp vpp", f"{DENSE} {DROPOUT} {VPP}", ranks=2, resume_at=2),
    Case("layout: pp by a string", f"{LLAMA} {PP} --pipeline-model-parallel-layout 'Et|tt|t|L'", ranks=2),
    Case("layout: pp uneven, bf16", f"{DENSE} --bf16 {PP} --decoder-first-pipeline-num-layers 1", ranks=2),
    Case("layout: cp a2a, dropout", f"{LLAMA} {DROPOUT} {CP} --cp-comm-type a2a", ranks=2),
    Case("layout: cp p2p, documents", f"{LLAMA} {CP} {PACKED}", ranks=2, resume_at=2),
    Case("layout: cp two levels, documents", f"{LLAMA} {CP_LEVELS} {PACKED} {EXACT}", ranks=4),
    Case("layout: ep allgather", f"{EXPERTS} {EP}", ranks=2),
    Case("layout: ep alltoall", f"{EXPERTS} {EP} {ALLTOALL} --bf16", ranks=2, resume_at=2),
    Case("layout: tp sp etp", f"{EXPERTS} {SP} {ALLTOALL} --expert-tensor-parallel-size 2", ranks=2),
    Case("layout: tp sp ep", f"{EXPERTS} {SP} {EP} --expert-tensor-parallel-size 1 {ALLTOALL}", ranks=2),
    Case("layout: tp cp", f"{LLAMA} {SP} {CP} {EXACT}", ranks=4),
    Case("layout: cp ep", f"{EXPERTS} {CP} {EP} {ALLTOALL}", ranks=2, resume_at=2),
    Case("layout: pp ep dp", f"{EXPERTS} {PP} {EP} {DROPOUT} {EXACT}", ranks=4),
    Case(
        "layout: tp sp pp vpp ep",
        f"{EXPERTS} {VPP} {SP} {EP} --expert-tensor-parallel-size 1 {ALLTOALL} {DROPOUT}",
        ranks=4,
        resume_at=2,
    ),
    Case("layout: three replicas, dropout", f"{DENSE} {DROPOUT} --global-batch-size 6 {EXACT}", ranks=3),
)

SHARED_EXPERT = "--moe-shared-expert-intermediate-size 24"
SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
GROUP_LIMITED = "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2"
TWO_LOSSES = "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.01 0.02"

ROUTERS = (
    Case("experts: dropped by weight", f"{EXPERTS} --moe-expert-capacity-factor 0.8", ranks=2),
    Case(
        "experts: dropped by position, padded",
        f"{EXPERTS} --moe-expert-capacity-factor 0.5 --moe-token-drop-policy position "
        "--moe-pad-expert-input-to-capacity",
    ),
    Case("experts: shared", f"{EXPERTS} {SHARED_EXPERT} --moe-shared-expert-gate", ranks=2, resume_at=2),
    Case("experts: shared, overlapped", f"{EXPERTS} {EP} {ALLTOALL} {SHARED_EXPERT} --moe-shared-expert-overlap", 2),
    Case("experts: bias of sigmoid scores", f"{EXPERTS} {SIGMOID} --moe-input-jitter-eps 0.1", ranks=2, resume_at=2),
    Case("experts: limited to groups", f"{EXPERTS} {GROUP_LIMITED} --moe-router-dtype fp64"),
    Case("experts: two balancing losses", f"{EXPERTS} {TWO_LOSSES}", ranks=2),
    Case(
        "experts: sinkhorn",
        f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 --moe-router-topk 1",
    ),
)

STATIC = f"{EXPERTS} --init-method-std 0.1 --seq-length 16 --micro-batch-size 1 --clip-grad 0.3"
SMALL_PAGES = f"{STATIC} {FOUR_LAYERS} --moe-expert-rank-capacity-factor 4 --moe-paged-stash"
SMALL_PAGES += " --moe-paged-stash-page-size 2"
DEVICE, HOST = "--moe-paged-stash-buffer-size-factor-cuda", "--moe-paged-stash-buffer-size-factor-cpu"
RERUN = "--moe-paged-stash-overflow-policy rerun"
ROUTER = f"{SIGMOID} --moe-input-jitter-eps 0.1"
EXPERT_PARTS = "--recompute-granularity selective --recompute-modules core_attn layernorm"

STASHES = (
    Case("static: allgather", f"{STATIC} {EP} --moe-expert-rank-capacity-factor 4", ranks=2),
    Case("static: alltoall", f"{STATIC} {EP} {ALLTOALL} --moe-expert-rank-capacity-factor 4 --bf16", ranks=2),
    Case(
        "static: expert overflow and retry",
        f"{STATIC} {EP} {DROPOUT} --moe-expert-rank-capacity-factor 1 --lr 0.03",
        ranks=2,
        resume_at=2,
    ),
    Case("stash: device pages", f"{SMALL_PAGES} {DEVICE} 3", resume_at=2),
    Case("stash: spills to the host", f"{SMALL_PAGES} {DEVICE} 0.3 {HOST} 3 {ROUTER}"),
    Case("stash: host pages alone, bf16", f"{SMALL_PAGES} {DEVICE} 0 {HOST} 3 --bf16 --moe-paged-stash-page-size 16"),
    Case("stash: recomputes activations", f"{SMALL_PAGES} {DEVICE} 0.8"),
    Case("stash: recomputes down to inputs", f"{SMALL_PAGES} {DEVICE} 0.45 {DROPOUT}"),
    Case("stash: overflow of inputs and retry", f"{SMALL_PAGES} {DEVICE} 0.1 {ROUTER}"),
    Case("stash: rerun with more pages", f"{SMALL_PAGES} {EP} {DEVICE} 0.6 {RERUN}", ranks=2, resume_at=2),
    Case("stash: rows and pages overflow", f"{SMALL_PAGES} {EP} {DEVICE} 0.6 --moe-expert-rank-capacity-factor 1", 2),
    Case("stash: sized by the first step, pp", f"{SMALL_PAGES} {PP} {DEVICE} -1.5", ranks=2),
    Case("stash: pp vpp, prefetch", f"{SMALL_PAGES} {VPP} {DEVICE} 2 --moe-paged-stash-prefetch-layers 2", ranks=2),
    Case("stash: pp ep", f"{SMALL_PAGES} {PP} {EP} {ALLTOALL} {DEVICE} 0.7 {HOST} 0.2 {DROPOUT}", ranks=4, resume_at=2),
    Case("stash: beside recompute", f"{SMALL_PAGES} {DEVICE} 0.6 {SHARED_EXPERT} {EXPERT_PARTS}"),
    Case("stash: ZeRO-2, bf16", f"{SMALL_PAGES} {EP} {DEVICE} 1.5 --optimizer distributed_fused_adam --bf16", 2),
)

BUCKETS = "--ddp-bucket-size 2000"
OVERLAP = f"--overlap-grad-reduce --overlap-param-gather {BUCKETS}"
ZERO1 = "--use-distributed-optimizer"
ZERO2 = "--optimizer distributed_fused_adam"
FSDP2 = "--use-torch-fsdp2"
FEW_BITS = "--use-precision-aware-optimizer"
OFFLOADED_STATES = "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"
CHUNKS = f"{EXPERTS} {VPP} {EP} {ALLTOALL}"
FEW_BITS_OF_STATES = f"{FEW_BITS} --main-params-dtype fp16 --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16"

SHARDED = (
    Case("ddp: overlapped", f"{LLAMA} --bf16 --overlap-grad-reduce {BUCKETS}", ranks=2),
    Case("ddp: reduced in bf16", f"{LLAMA} --bf16 --grad-reduce-in-bf16", ranks=2),
    Case("ZeRO-1: bf16", f"{EXPERTS} --bf16 {ZERO1}", ranks=2, resume_at=2),
    Case("ZeRO-1: overlapped, three ranks", f"{LLAMA} {DROPOUT} {ZERO1} {OVERLAP} {EXACT} --global-batch-size 6", 3),
    Case("ZeRO-1: gathered in the step, fp16", f"{LLAMA} {FP16} {ZERO1} {OVERLAP}", ranks=2),
    Case("ZeRO-1: pp vpp ep", f"{CHUNKS} {ZERO1} {OVERLAP}", ranks=4),
    Case("ZeRO-1: states in 16 bits", f"{LLAMA} --bf16 {ZERO1} {FEW_BITS_OF_STATES}", ranks=2, resume_at=2),
    Case("ZeRO-1: states on the host", f"{LLAMA} --bf16 {ZERO1} {OFFLOADED_STATES}", ranks=2),
    Case(
        "ZeRO-1: two instances",
        f"{LLAMA} {ZERO1} --num-distributed-optimizer-instances 2 --global-batch-size 8",
        ranks=4,
    ),
    Case("ZeRO-1: muon", f"{EXPERTS} {ZERO1} {BUCKETS} --optimizer muon", ranks=2),
    Case("ZeRO-1: tp sp", f"{LLAMA} {SP} {ZERO1} --bf16", ranks=4, resume_at=2),
    Case("ZeRO-2: bf16", f"{EXPERTS} --bf16 {ZERO2} --global-batch-size 8", ranks=2, resume_at=2),
    Case("ZeRO-2: overlapped, fp16", f"{LLAMA} {FP16} {ZERO2} {OVERLAP} --global-batch-size 12 {EXACT}", ranks=3),
    Case("ZeRO-2: pp vpp ep", f"{CHUNKS} {ZERO2} {OVERLAP}", ranks=4, resume_at=2),
    Case(
        "ZeRO-2: gradients in bf16",
        f"{LLAMA} --bf16 {ZERO2} {FEW_BITS} --main-grads-dtype bf16 --grad-reduce-in-bf16",
        2,
    ),
    Case("FSDP2: bf16, meta device", f"{EXPERTS} --bf16 {FSDP2} --init-model-with-meta-device", ranks=2, resume_at=2),
    Case(
        "FSDP2: kept gathered", f"{LLAMA} {FSDP2} --torch-fsdp2-no-reshard-after-forward --global-batch-size 8", ranks=2
    ),
    Case("FSDP2: ep", f"{EXPERTS} {EP} {ALLTOALL} {FSDP2} {EXACT} --global-batch-size 8", ranks=4, resume_at=2),
    Case("FSDP2: tp sp, fp16", f"{LLAMA} {SP} {FP16} {FSDP2}", ranks=4),
)

MODES = {"ddp": BUCKETS, "ZeRO-1": f"{ZERO1} {BUCKETS}", "ZeRO-2": f"{ZERO2} {BUCKETS}", "FSDP2": FSDP2}
POLICIES = {
    "off": "--clip-grad 0",
    "exact": "--clip-grad 0.3 --optimizer-in-backward-clip exact",
    "previous norm": "--clip-grad 0.3 --optimizer-in-backward-clip previous-norm",
    "per bucket": "--clip-grad 0.3 --optimizer-in-backward-clip per-bucket",
}
UPDATED_IN_BACKWARD = f"{LLAMA} --bf16 --global-batch-size 8 --optimizer-in-backward"

IN_BACKWARD = (
    *(
        Case(
            f"in backward: {mode}, {policy}",
            f"{UPDATED_IN_BACKWARD} {mode_flags} {policy_flags}",
            ranks=2,
            resume_at=2 if policy == "previous norm" else None,
        )
        for mode, mode_flags in MODES.items()
        for policy, policy_flags in POLICIES.items()
    ),
    Case(
        "in backward: pp vpp ep, ZeRO-2", f"{CHUNKS} {ZERO2} {OVERLAP} --optimizer-in-backward --clip-grad 0", ranks=4
    ),
)

ATTENTION_AGAIN = "--recompute-activations --attention-backend unfused"
OFFLOADED = "--fine-grained-activation-offloading --min-offloaded-tensor-size 256"
OFFLOADED_PARTS = f"{OFFLOADED} --offload-modules attn_norm core_attn attn_proj expert_fc1 moe_act"
YARN = "--rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64 --mscale-all-dim 1"
WINDOW = "--window-size 4,0 --window-attn-skip-freq 2 --softmax-type learnable"
ADAPTERS = "--lora-rank 8 --lora-alpha 16"
SCHEDULES = "--decoupled-lr 0.05 --start-weight-decay 0 --end-weight-decay 2 --weight-decay-incr-style cosine"
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-style linear"
OVERFLOWS = "--fp16 --initial-loss-scale 16777216 --hysteresis 1 --loss-scale-window 2 --train-iters 8"

PARTS_OF_MODELS = (
    Case("MLA: yarn, dropout", f"{LATENT} {DROPOUT} {YARN}", resume_at=2),
    Case(
        "MLA: experts, tp sp, bf16",
        f"{LATENT} {ROUTED} --moe-grouped-gemm {SP} {ALLTOALL} --bf16",
        ranks=2,
        resume_at=2,
    ),
    Case(
        "MLA: stash, projected again",
        f"{LATENT} {ROUTED} --moe-grouped-gemm --num-layers 3 {EP} {ZERO2} "
        "--moe-expert-rank-capacity-factor 2 --moe-paged-stash "
        "--recompute-granularity selective --recompute-modules mla_up_proj core_attn",
        ranks=2,
    ),
    Case("MTP: two tokens", f"{LLAMA} --mtp-num-layers 2"),
    Case("MTP: pp, experts, dropout", f"{EXPERTS} {PP} {DROPOUT} --mtp-num-layers 1", ranks=2, resume_at=2),
    Case("LoRA: ZeRO-1, bf16", f"{LLAMA} --bf16 {ZERO1} --lora-rank 2 --lora-alpha 8", ranks=2, resume_at=2),
    Case("LoRA: experts, ep", f"{EXPERTS} --bf16 {EP} {ADAPTERS}", ranks=2, resume_at=2),
    Case("LoRA: stash", f"{SMALL_PAGES} {DEVICE} 0.45 --bf16 {ADAPTERS}"),
    Case("LoRA: FSDP2", f"{LLAMA} --bf16 --lora-rank 2 {FSDP2}", ranks=2),
    Case("documents: masks", f"{BRIEF} {LLAMA_LAYERS} {CORPUS} {BORDERS}"),
    Case(
        "documents: borders, experts",
        f"{BRIEF} {GROUPED} {CORPUS} {PACKED} --moe-router-load-balancing-type seq_aux_loss",
        2,
        resume_at=2,
    ),
    Case(
        "documents: loss per token",
        f"{BRIEF} {LLAMA_LAYERS} {CORPUS} {PACKED} --calculate-per-token-loss --global-batch-size 8",
        ranks=2,
    ),
    Case("attention: windows and sinks", f"{LLAMA} {WINDOW} --qk-layernorm --add-qkv-bias"),
    Case("activations: squared relu, tied", f"{DENSE} --squared-relu --position-embedding-type none"),
    Case(
        "recompute: blocks, fp16",
        f"{DENSE} {DROPOUT} {FP16} --recompute-granularity full --recompute-method block --recompute-num-layers 1",
        ranks=2,
    ),
    Case("recompute: attention", f"{DENSE} {DROPOUT} {ATTENTION_AGAIN}"),
    Case("recompute: expert layers", f"{EXPERTS} {DROPOUT} --moe-layer-recompute"),
    Case("offload: parts, bf16", f"{EXPERTS} {DROPOUT} --bf16 --num-layers 3 {OFFLOADED_PARTS}", ranks=2),
    Case(
        "offload: layers",
        f"{DENSE} {DROPOUT} --num-layers 3 --cpu-offloading-num-layers 2 --min-offloaded-tensor-size 256",
    ),
    Case("fp16: overflows", f"{LLAMA} {OVERFLOWS}", ranks=2, resume_at=4),
    Case("fp16: overflows, experts, pp", f"{EXPERTS} {PP} {OVERFLOWS}", ranks=2),
    Case("optimizer: muon, bf16", f"{LLAMA} --bf16 --optimizer muon --muon-nesterov", resume_at=2),
    Case(
        "optimizer: SGD, growing batch",
        f"{DENSE} --optimizer sgd --rampup-batch-size 2 2 14 --global-batch-size 8 --micro-batch-size 1",
    ),
    Case("optimizer: decoupled rates and decay", f"{LLAMA} {SCHEDULES} {WSD}", resume_at=2),
)

TAPE = f"--cuda-graph-warmup-steps 2 --micro-batch-size 1 --train-iters 5 {EXACT}"
STEP = f"{TAPE} --cuda-graph-impl full_iteration"
LAYERS = f"{TAPE} --cuda-graph-impl local --cuda-graph-modules"
UPDATE = "--optimizer-cuda-graph"

GRAPHS = (
    Case("step graph: dropout, bf16", f"{DENSE} {DROPOUT} --bf16 {STEP}", program=TAPES),
    Case(
        "step graph: ZeRO-1 with the update",
        f"{DENSE} {ZERO1} {OVERLAP} {STEP} {UPDATE} --train-iters 6",
        ranks=2,
        resume_at=2,
        program=TAPES,
    ),
    Case("step graph: scaled update", f"{LLAMA} {FP16} {STEP} {UPDATE}", program=TAPES),
    Case("step graph: tp pp vpp", f"{LLAMA} {VPP} {TP} {STEP} {EACH_LAYER}", ranks=4, program=TAPES),
    Case("step graph: pages, ep", f"{SMALL_PAGES} {EP} {DEVICE} 1.5 {ROUTER} {STEP}", ranks=2, program=TAPES),
    Case("step graph: few pages", f"{SMALL_PAGES} {DEVICE} 0.3 {HOST} 0.4 {ROUTER} {STEP}", program=TAPES),
    Case(
        "step graph: overflow and retry",
        f"{SMALL_PAGES} {EP} {DEVICE} 0.1 {ROUTER} --moe-expert-rank-capacity-factor 1.05 --lr 0.03 {STEP} "
        "--cuda-graph-warmup-steps 1",
        ranks=2,
        program=TAPES,
    ),
    Case("layer graphs: dropout, bf16", f"{DENSE} {DROPOUT} --bf16 {LAYERS} attn mlp", program=TAPES),
    Case(
        "layer graphs: ZeRO-1",
        f"{DENSE} {ZERO1} {OVERLAP} {LAYERS} attn mlp --train-iters 6",
        ranks=2,
        resume_at=2,
        program=TAPES,
    ),
    Case("layer graphs: pp vpp", f"{DENSE} {VPP} {LAYERS} attn mlp", ranks=2, program=TAPES),
    Case(
        "layer graphs: router and experts",
        f"{STATIC} --moe-expert-rank-capacity-factor 4 {LAYERS} moe_router experts",
        program=TAPES,
    ),
    Case(
        "layer graphs: pages",
        f"{SMALL_PAGES} {DEVICE} 0.3 {HOST} 0.4 --moe-paged-stash-prefetch-layers 0 {LAYERS} attn moe",
        program=TAPES,
    ),
)

ADAM = "fused_adam.py"
SCRIPTS = (
    Case("script: fused Adam", "plain", ranks=2, resume_at=3, program=ADAM),
    Case("script: fused Adam, one rank", "plain", resume_at=3, program=ADAM),
    Case("script: fused Adam, microbatches", "microbatches", ranks=3, program=ADAM),
    Case("script: fused Adam, reduced later", "not_overlapped", ranks=2, program=ADAM),
    Case("script: fused Adam, gathered in forward", "gathered_in_forward", ranks=2, resume_at=3, program=ADAM),
    Case("script: fused Adam, loss scale", "scaled", ranks=2, program=ADAM),
    Case("script: fused Adam, loss scale, fp16", "scaled_fp16", ranks=2, program=ADAM),
    Case("script: fused Adam, unscaled by itself", "unscaled", ranks=2, program=ADAM),
    Case("script: fused Adam, NHWC, bf16", "channels_last", ranks=2, resume_at=3, program=ADAM),
    Case("script: fused Adam, remainders", "remainders", ranks=2, resume_at=3, program=ADAM),
    Case("script: fused Adam, scaled states", "scaled_states", ranks=2, resume_at=3, program=ADAM),
    Case("script: fused Adam, grid of ranks", "grid", ranks=4, program=ADAM),
    Case("script: fused Adam, groups", "groups", ranks=2, program=ADAM),
    Case("script: DDP of any module", "ddp", ranks=3, program="any_module.py"),
    Case("script: ZeRO-1 of any module", "zero1", ranks=2, program="any_module.py"),
    Case("script: ZeRO-2 of any module", "zero2", ranks=2, program="any_module.py"),
    Case("script: FSDP2 of any module", "fsdp2", ranks=2, program="any_module.py"),
    Case("script: FSDP2, on the host", "fsdp2_offload", ranks=2, program="any_module.py"),
)

GROUPS: tuple[tuple[Case, ...], ...] = (
    MODEL_TYPES,
    LAYOUTS,
    ROUTERS,
    STASHES,
    SHARDED,
    IN_BACKWARD,
    PARTS_OF_MODELS,
    GRAPHS,
    SCRIPTS,
)
CASES: tuple[Case, ...] = tuple(case for group in GROUPS for case in group)


def cases_named(text: str) -> Iterator[Case]:
    """Returns the case of that name, or otherwise all cases whose name contains `text`, in order."""
    exact = [case for case in CASES if case.name == text]
    return iter(exact or [case for case in CASES if text in case.name])
