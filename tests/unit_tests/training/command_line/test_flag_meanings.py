"""Units and list syntaxes of flags have Megatron-LM's meaning, or are refused.

REVIEWED states the unit of each flag that has a value. Reference functions repeat Megatron-LM's rules in plain Python.
"""

import itertools
import re
from typing import Any

import pytest

from megatron.core.datasets.utils import get_blend_from_list, parse_split
from megatron.core.models.gpt.gpt_config import default_ffn_hidden_size
from megatron.core.num_microbatches_calculator import build_batch_schedule, ramp_up
from megatron.core.tokenizers.tokenizer import vocab_size_with_padding
from megatron.core.transformer.moe_config import layers_with_experts
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import parse_args
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import FlagState, flag_table

# Unit, a pattern that the help must contain, and the flags.
REVIEWED: dict[str, tuple[str, str]] = {
    "samples": (
        "[Ss]ample|batch size",
        """micro_batch_size global_batch_size train_samples eval_global_batch_size rampup_batch_size lr_decay_samples
        lr_wsd_decay_samples lr_warmup_samples""",
    ),
    "tokens": (
        "[Tt]oken|positions",
        "seq_length max_position_embeddings yarn_original_max_position_embeddings step_batch_size_schedule window_size",
    ),
    "iterations": (
        "[Ss]tep|[Ii]teration",
        """train_iters exit_interval eval_interval start_eval_at_iter iterations_to_skip manual_gc_interval
        lr_decay_iters lr_wsd_decay_iters lr_warmup_iters save_interval save_retain_interval ckpt_step log_interval
        tensorboard_log_interval profile_step_start profile_step_end check_weight_hash_across_dp_replicas_interval
        loss_scale_window cuda_graph_warmup_steps""",
    ),
    "batches": ("[Bb]atch", "eval_iters microbatch_group_size_per_vp_stage"),
    "minutes": ("[Mm]inute", "exit_duration_in_mins distributed_timeout_minutes"),
    "elements": ("element", "ddp_bucket_size min_offloaded_tensor_size"),
    "bytes": ("[0-9]+(MB|MiB|GiB)", "moe_paged_stash_buffer_bytes"),
    "token ids": (
        "[Tt]oken id|id|[Vv]ocab",
        "vocab_size padded_vocab_size null_tokenizer_eod_id make_vocab_size_divisible_by",
    ),
    "layers": (
        "[Ll]ayer",
        """num_layers recompute_num_layers cpu_offloading_num_layers num_layers_per_virtual_pipeline_stage
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers mtp_num_layers moe_layer_freq
        window_attn_skip_freq moe_paged_stash_prefetch_layers pipeline_model_parallel_layout cp_comm_type
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16""",
    ),
    "processes": (
        "[Rr]ank|replica|process|stage|instance",
        """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
        expert_tensor_parallel_size hierarchical_context_parallel_sizes num_virtual_stages_per_pipeline_rank
        num_distributed_optimizer_instances num_workers world_size profile_ranks""",
    ),
    "numbers": (
        "",
        """seed exit_signal hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels q_lora_rank
        kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim num_experts moe_ffn_hidden_size
        moe_shared_expert_intermediate_size moe_router_topk moe_router_num_groups moe_router_group_topk
        moe_paged_stash_page_size moe_paged_stash_copy_sms mup_base_hidden_size lora_rank rotary_base
        rotary_seq_len_interpolation_factor hysteresis muon_num_ns_steps timing_log_level tensorboard_queue_size
        max_rewinds ddp_num_buckets attention_backend""",
    ),
    "factors": (
        "",
        """hidden_dropout layernorm_epsilon init_method_std embedding_init_method_std activation_func_clamp_value
        glu_linear_offset attention_dropout qk_clip_alpha qk_clip_threshold rotary_scaling_factor yarn_beta_fast
        yarn_beta_slow mscale mscale_all_dim moe_router_topk_scaling_factor moe_router_bias_update_rate
        moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_expert_capacity_factor
        moe_expert_rank_capacity_factor moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu
        mtp_loss_scaling_factor mup_width_mult mup_embedding_mult mup_output_mult mup_base_head_dim
        mup_attn_scale_power lora_alpha activation_offload_fraction rotary_percent rope_scaling_factor lr min_lr
        decoupled_lr decoupled_min_lr weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum clip_grad loss_scale
        initial_loss_scale min_loss_scale optimizer_offload_fraction muon_momentum muon_extra_scale_factor
        lr_warmup_fraction lr_warmup_init start_weight_decay end_weight_decay loss_spike_rewind""",
    ),
    "words": (
        "",
        """config model data_path train_data_path valid_data_path test_data_path data_args_path split data_cache_path
        validation_set_names tokenizer_model vocab_file merge_file offload_modules recompute_modules cuda_graph_modules
        moe_router_load_balancing_type spec lora_target_modules
        ddp_param_name_patterns_for_fp32_local_accumulation save load pretrained_checkpoint tensorboard_dir
        wandb_project wandb_exp_name wandb_save_dir wandb_entity record_routing memory_snapshot_path""",
    ),
}


def test_the_unit_of_every_value_is_reviewed() -> None:
    """Fails for a new flag with a value whose unit nobody has compared, and for help that hides the unit."""
    flags = {flag.dest: flag for flag in flag_table().in_state(FlagState.WORKS)}
    valued = {name for name, flag in flags.items() if flag.constant is None}
    reviewed = [name for _, names in REVIEWED.values() for name in names.split()]
    assert len(set(reviewed)) == len(reviewed)
    # A single word out of a list of choices has neither a unit nor a syntax.
    choices = {name for name in valued if flags[name].choice_names() and not flags[name].takes_list}
    assert valued - choices <= set(reviewed) <= valued
    for unit, (pattern, names) in REVIEWED.items():
        for name in names.split():
            assert re.search(pattern, flags[name].help), f"--{name} counts {unit}: {flags[name].help}"


def _upstream_pattern(word: str) -> Any:
    """Megatron-LM's moe_freq_type."""
    return eval(word, {"__builtins__": {}}) if "[" in word else int(word)


@pytest.mark.parametrize("flag", ["--moe-layer-freq", "--window-attn-skip-freq"])
@pytest.mark.parametrize(
    "word",
    [
        "([0]*3+[1]*45)",
        "[0]*3+[1]*45",
        " [0] * 3 + [1] * 45",
        "([1]*2+[0])*16",
        "3*[1]+[0]*45",
        "[1,0]*24",
        "[0,1,1,]",
        "4",
    ],
)
def test_patterns_of_layers_are_evaluated_as_in_python(flag: str, word: str) -> None:
    args = parse_args(argv=[f"{flag}={word}"])
    assert vars(args)[flag.strip("-").replace("-", "_")] == _upstream_pattern(word)


@pytest.mark.parametrize("word", ["[i%2 for i in range(4)]", "[1]*-1", "[-1,0]", "[1.0]", "(2)", "1,0,1", "[[0]]"])
def test_other_patterns_are_refused(word: str) -> None:
    with pytest.raises(CommandLineError, match="--moe-layer-freq"):
        parse_args(argv=[f"--moe-layer-freq={word}"])


@pytest.mark.parametrize("freq", [1, 2, 3, 7])
def test_numbers_in_place_of_patterns_count_layers(freq: int) -> None:
    assert layers_with_experts(4, freq, num_layers=12) == [1 if layer % freq == 0 else 0 for layer in range(12)]
    config = TransformerConfig(
        num_layers=12, hidden_size=8, num_attention_heads=2, window_size=(3, 0), window_attn_skip_freq=freq
    )
    windows = [config.window_of_layer(number) is not None for number in range(1, 13)]
    assert windows == [number % freq != 0 for number in range(1, 13)]


@pytest.mark.parametrize(
    ("words", "dest", "value"),
    [
        (["--window-size", "128,0"], "window_size", (128, 0)),
        (["--window-size", "(128, 0)"], "window_size", (128, 0)),
        (["--window-size=-1,-1"], "window_size", (-1, -1)),
        (["--rampup-batch-size", "2", "2", "14"], "rampup_batch_size", [2, 2, 14]),
        (["--cp-comm-type", "p2p", "a2a"], "cp_comm_type", ["p2p", "a2a"]),
        (["--cp-comm-type", "a2a"], "cp_comm_type", "a2a"),
        (["--moe-aux-loss-coeff", "0.1", "0.2"], "moe_aux_loss_coeff", [0.1, 0.2]),
        (["--moe-aux-loss-coeff", "1e-2"], "moe_aux_loss_coeff", 0.01),
        (["--iterations-to-skip", "3", "4"], "iterations_to_skip", [3, 4]),
        (["--profile-ranks", "0", "1"], "profile_ranks", [0, 1]),
        (["--hierarchical-context-parallel-sizes", "2", "4"], "hierarchical_context_parallel_sizes", [2, 4]),
        (["--recompute-modules", "core_attn", "mlp"], "recompute_modules", ["core_attn", "mlp"]),
        (["--data-path", "0.3", "a", "0.7", "b"], "data_path", ["0.3", "a", "0.7", "b"]),
        (["--loss-scale-window", "500"], "loss_scale_window", 500.0),
        (["--exit-signal", "SIGUSR1"], "exit_signal", 10),
        (["--moe-router-load-balancing-type", "aux_loss"], "moe_router_load_balancing_type", "aux_loss"),
    ],
)  # fmt: skip
def test_lists_have_megatrons_syntax(words: list[str], dest: str, value: Any) -> None:
    assert vars(parse_args(argv=words))[dest] == value


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ("--iterations-to-skip 3,4", "'3,4' is not an integer"),
        ("--profile-ranks 0,1", "'0,1' is not an integer"),
        ("--rampup-batch-size 2,2,14", "--rampup-batch-size"),
        ("--recompute-modules core_attn,mlp", "'core_attn,mlp' is not one of"),
        ("--moe-router-load-balancing-type aux_loss,sinkhorn", "is not one of"),
        ("--cp-comm-type p2p,a2a", "is not one of"),
        ("--moe-aux-loss-coeff 0.1,0.2", "'0.1,0.2' is not a number"),
        ("--window-size 128", "two integers LEFT,RIGHT"),
        ("--train-iters 1e3", "'1e3' is not an integer"),
        ("--train-samples 10M", "'10M' is not an integer"),
        ("--seq-length 4K", "'4K' is not an integer"),
        ("--ddp-bucket-size 40MB", "'40MB' is not an integer"),
        ("--min-offloaded-tensor-size 1MiB", "'1MiB' is not an integer"),
        ("--distributed-timeout-minutes 0.5", "'0.5' is not an integer"),
        ("--exit-duration-in-mins 1:30", "'1:30' is not an integer"),
    ],
)  # fmt: skip
def test_other_syntaxes_are_refused(words: str, fragment: str) -> None:
    with pytest.raises(CommandLineError, match=re.escape(fragment)):
        parse_args(argv=words.split())


def _upstream_starts(schedule: str, seq_length: int) -> list[tuple[int, int]]:
    """Megatron-LM's rule: thresholds are tokens with an optional suffix, floored to samples."""
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    pairs = [entry.split(":") for entry in schedule.replace(",", " ").split()]
    counts = [int(float(word[:-1]) * units[word[-1]]) if word[-1] in units else int(word) for word, _ in pairs]
    return [(count // seq_length, int(size)) for count, (_, size) in zip(counts, pairs, strict=True)]


@pytest.mark.parametrize("seq_length", [1, 32, 100, 4096])
@pytest.mark.parametrize(
    "schedule", ["0:2", "0:2 8192:4", "0:2,8192:4,100K:8", "0:256, 0.5M:512", "0:8 1.25B:16 2T:4", "0:4,9999:6"]
)
def test_a_step_schedule_counts_tokens(schedule: str, seq_length: int) -> None:
    found = build_batch_schedule(None, step_batch_size_schedule=schedule, seq_length=seq_length)
    assert list(zip(found.starts, found.sizes, strict=True)) == _upstream_starts(schedule, seq_length)


@pytest.mark.parametrize("ramp", [(2, 2, 14), (4, 4, 100), (8, 8, 7), (1, 3, 1000)])
def test_a_ramp_counts_samples(ramp: tuple[int, int, int]) -> None:
    start, increment, samples = ramp
    goal = start + 5 * increment
    schedule = ramp_up(ramp, goal)
    for consumed in range(2 * samples + 2):
        # Megatron-LM: the number of completed increments of samples / (number of increments).
        steps = int(consumed * 5 / samples)
        assert schedule.size_at(consumed) == (goal if consumed > samples else min(goal, start + steps * increment))


@pytest.mark.parametrize(
    "split",
    ["969,30,1", "969, 30, 1", "969 30 1", "[99,1,0]", "(8,1,1)", "99/1/0", "99:1", "7", "0.9,0.1", "'1,1,2'"],
)
def test_a_split_is_three_shares(split: str) -> None:
    # Megatron-LM's parse_and_normalize_split.
    numbers = [float(word) for word in re.findall(r"[.0-9]+", split)]
    numbers += [0.0] * (3 - len(numbers))
    assert parse_split(split) == pytest.approx([number / sum(numbers) for number in numbers], abs=0)


@pytest.mark.parametrize("split", ["-1,1,1", "1e-1,1,1", "1,2,3,4", "50%,50%", "a,b"])
def test_a_split_that_megatron_lm_misreads_is_refused_or_read_as_written(split: str) -> None:
    if split == "1e-1,1,1":
        assert parse_split(split) == pytest.approx([0.1 / 2.1, 1 / 2.1, 1 / 2.1])
        return
    with pytest.raises(ValueError, match="--split is"):
        parse_split(split)


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        (["a"], ["a"], None),
        (["1"], ["1"], None),
        (["a", "b"], ["a", "b"], None),
        (["a", "b", "c"], ["a", "b", "c"], None),
        (["0.3", "a", "0.7", "b"], ["a", "b"], [0.3, 0.7]),
        (["30", "a", "70", "b"], ["a", "b"], [30.0, 70.0]),
        (["1e-1", " a ", ".9", "b"], ["a", "b"], [0.1, 0.9]),
        ([" a", "b "], ["a", "b"], None),
    ],
)
def test_data_paths_are_prefixes_or_pairs(words: list[str], prefixes: list[str], weights: list[float] | None) -> None:
    assert get_blend_from_list(words) == (prefixes, weights)


def test_sizes_that_follow_from_others() -> None:
    for vocab, divisible_by, ranks in itertools.product((1, 50257, 128256), (1, 128), (1, 2, 8)):
        padded = vocab
        while padded % (divisible_by * ranks):
            padded += 1
        found = vocab_size_with_padding(vocab, divisible_by=divisible_by, tensor_parallel_size=ranks)
        assert found == padded
    for hidden in (64, 768, 2048, 5120):
        assert default_ffn_hidden_size(hidden, swiglu=False) == 4 * hidden
        assert default_ffn_hidden_size(hidden, swiglu=True) == int((4 * hidden * 2 / 3) / 64) * 64
