"""Option names of Megatron-LM, TorchTitan, transformers, TRL, PEFT and Axolotl, and our options for them.

An unknown option is looked up here before similar names are suggested. `python -m titanmoe.config PAGE` writes tables
of MEGATRON and TORCHTITAN into docs/from_megatron.md and docs/from_torchtitan.md. Names of earlier versions are in
`titanmoe.config.old_names`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

RANKS = ("nproc", "nproc-per-node", "nprocs", "world", "world-size", "gpus", "num-gpus", "np")
MEGATRON = {
    "tensor-model-parallel-size": "parallelism.tp",
    "context-parallel-size": "parallelism.cp",
    "pipeline-model-parallel-size": "parallelism.pp",
    "expert-model-parallel-size": "parallelism.experts.ep",
    "expert-tensor-parallel-size": "parallelism.experts.etp",
    "num-distributed-optimizer-instances": "parallelism.dp_replicate",
    "num-layers": "model.num_layers",
    "hidden-size": "model.dim",
    "ffn-hidden-size": "model.dense_hidden",
    "num-attention-heads": "model.num_heads",
    "num-query-groups": "model.num_kv_heads",
    "rotary-base": "model.rope_theta",
    "init-method-std": "model.init_std",
    "num-experts": "model.num_experts",
    "moe-router-topk": "model.top_k",
    "moe-ffn-hidden-size": "model.expert_hidden",
    "moe-shared-expert-intermediate-size": "model.shared_hidden",
    "moe-router-num-groups": "model.num_groups",
    "moe-router-group-topk": "model.top_groups",
    "moe-router-topk-scaling-factor": "model.route_scale",
    "mtp-num-layers": "model.mtp_depth",
    "moe-z-loss-coeff": "moe.z_loss",
    "moe-router-bias-update-rate": "moe.bias_update_rate",
    "moe-input-jitter-eps": "moe.jitter",
    "moe-router-force-load-balancing": "moe.force_balance",
    "moe-expert-capacity-factor": "moe.capacity_factor",
    "moe-pad-expert-input-to-capacity": "moe.pad_to_capacity",
    "moe-token-dispatcher-type": "moe.dispatcher",
    "moe-token-drop-policy": "moe.drop_policy",
    "micro-batch-size": "training.local_batch_size",
    "global-batch-size": "training.global_batch_size",
    "seq-length": "training.seq_len",
    "train-iters": "training.steps",
    "seed": "training.seed",
    "deterministic-mode": "training.deterministic",
    "manual-gc-interval": "training.gc_every",
    "lr": "optimizer.lr",
    "clip-grad": "optimizer.max_grad_norm",
    "weight-decay": "optimizer.weight_decay",
    "adam-beta1": "optimizer.beta1",
    "adam-beta2": "optimizer.beta2",
    "adam-eps": "optimizer.eps",
    "optimizer": "optimizer.name",
    "muon-momentum": "optimizer.momentum",
    "muon-nesterov": "optimizer.nesterov",
    "muon-coefficient-type": "optimizer.ns_coefficients",
    "muon-num-ns-steps": "optimizer.ns_steps",
    "qk-clip-threshold": "optimizer.qk_clip",
    "optimizer-cpu-offload": "optimizer.offload",
    "lr-warmup-iters": "lr_schedule.warmup_steps",
    "lr-decay-style": "lr_schedule.decay",
    "eval-interval": "validation.interval",
    "eval-iters": "validation.steps",
    "save-interval": "checkpoint.interval",
    "log-interval": "metrics.log_every",
    "wandb-project": "metrics.wandb",
    "profile-ranks": "profile.ranks",
}
"""Our field for each flag of Megatron-LM that has one."""
TORCHTITAN = {
    "parallelism.data_parallel_replicate_degree": "parallelism.dp_replicate",
    "parallelism.data_parallel_shard_degree": "parallelism.dp_shard",
    "parallelism.tensor_parallel_degree": "parallelism.tp",
    "parallelism.context_parallel_degree": "parallelism.cp",
    "parallelism.pipeline_parallel_degree": "parallelism.pp",
    "parallelism.pipeline_parallel_schedule": "pipeline.schedule",
    "parallelism.pipeline_parallel_schedule_csv": "pipeline.schedule_csv",
    "parallelism.expert_parallel_degree": "parallelism.experts.ep",
    "parallelism.expert_tensor_parallel_degree": "parallelism.experts.etp",
    "parallelism.fsdp_reshard_after_forward": "parallelism.reshard_after_forward",
    "training.max_context_length": "training.seq_len",
    "training.sequence_length": "training.seq_len",
    "training.max_norm": "optimizer.max_grad_norm",
    "training.gc_freq": "training.gc_every",
    "adjust_lr_fn": "optimizer.adjust_lr",
    "load_balance_coeff": "moe.bias_update_rate",
    "lr_scheduler.warmup_steps": "lr_schedule.warmup_steps",
    "lr_scheduler.decay_type": "lr_schedule.decay",
    "lr_scheduler.min_lr_factor": "lr_schedule.min_ratio",
    "comm.init_timeout_seconds": "training.first_step_timeout_s",
    "comm.train_timeout_seconds": "training.timeout_s",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
    "debug.moe_force_load_balance": "moe.force_balance",
    "model.name": "model.family",
    "model.flavor": "model.size",
    "hf_assets_path": "data.tokenizer",
    "model.hf_assets_path": "data.tokenizer",
    "validator.freq": "validation.interval",
    "validation.freq": "validation.interval",
    "validator.steps": "validation.steps",
    "dump_folder": "job.dump_folder",
    "checkpoint.keep_latest_k": "checkpoint.keep_last",
    "checkpoint.load_step": "checkpoint.load",
    "checkpoint.initial_load_path": "checkpoint.load",
    "checkpoint.initial_load_model_only": "checkpoint.model_only",
    "metrics.log_freq": "metrics.log_every",
    "metrics.enable_tensorboard": "metrics.tensorboard",
}
"""Our field for each field of TorchTitan that has one; some are of releases up to 0.2."""
FINE_TUNING = {
    **dict.fromkeys(("model-name-or-path", "model.model_name_or_path", "base-model"), "model.hf"),
    **dict.fromkeys(("epochs", "num-epochs", "num-train-epochs", "training.num_epochs"), "training.epochs"),
    **dict.fromkeys(("max-seq-length", "max-length", "model-max-length", "sequence-len"), "training.seq_len"),
    "max-steps": "training.steps",
    "per-device-train-batch-size": "training.local_batch_size",
    "learning-rate": "optimizer.lr",
    "max-grad-norm": "optimizer.max_grad_norm",
    "warmup-steps": "lr_schedule.warmup_steps",
    **dict.fromkeys(("lr-scheduler-type", "lr-scheduler"), "lr_schedule.decay"),
    "logging-steps": "metrics.log_every",
    "save-steps": "checkpoint.interval",
    "save-total-limit": "checkpoint.keep_last",
    "eval-steps": "validation.interval",
    **dict.fromkeys(("load-best-model-at-end", "metric-for-best-model"), "checkpoint.keep_best"),
    "early-stopping-patience": "training.stop_after",
    "chat-template": "data.chat_template",
    **dict.fromkeys(("lora.r", "lora-r"), "lora.rank"),
    **dict.fromkeys(("lora.lora_alpha", "lora-alpha"), "lora.alpha"),
    **dict.fromkeys(("lora.lora_dropout", "lora-dropout"), "lora.dropout"),
    **dict.fromkeys(("lora.use_rslora", "use-rslora"), "lora.rslora"),
    "reward-funcs": "rl.reward",
    "num-generations": "rl.completions",
    "max-completion-length": "generation.max_tokens",
    **dict.fromkeys(("lora.target_modules", "lora-target-modules", "target-modules"), "lora.targets"),
}
"""Our field for each option of transformers, TRL, PEFT and Axolotl that has one."""

_WEIGHTS = "--checkpoint.load PATH with --checkpoint.model_only true"
_ALWAYS = "it is always on here, so leave it out"
_ADVICE = {
    "dry-run": "--print-config prints every field and starts nothing, titanmoe plan says what memory and time a run "
    "takes, and titanmoe rehearse runs a step of any rank without GPUs",
    "gradient-accumulation-steps": "--training.global_batch_size N counts the samples of all ranks and microbatches",
    **dict.fromkeys(
        ("gradient-checkpointing", "recompute-granularity", "recompute-modules"),
        "--activation_checkpoint.mode full, full_except_dispatch, selective or moe",
    ),
    "warmup-ratio": "--lr_schedule.warmup_steps N counts steps",
    "optim": "--optimizer.name adamw; --optimizer.moments_dtype bfloat16 and --optimizer.offload true save memory",
    "report-to": "--metrics.wandb PROJECT, or --metrics.tensorboard true",
    **dict.fromkeys(("packing", "sample-packing"), "--data.packing best_fit, the default for chats"),
    **dict.fromkeys(
        ("assistant-only-loss", "train-on-inputs"), "the loss of chats is always on the assistant's messages alone"
    ),
    "modules-to-save": "--training.freeze has patterns of what is not trained",
    "adapter": "--lora.rank 16 trains adapters, of weights that are not quantised",
    "beta": "--dpo.beta B for DPO, --rl.kl K for reinforcement learning",
    **dict.fromkeys(("val-set-size", "split"), "--validation.held_out 100 keeps every 100th document for validation"),
    **dict.fromkeys(("datasets", "dataset-name"), "--data.source files with --data.paths FILES or hf:OWNER/NAME:SPLIT"),
    "datasets.type": "--data.format auto for raw text (completion), chat or preference",
    **dict.fromkeys(("output-dir", "save"), "--job.dump_folder DIR: a run saves into its own folder below it"),
    **dict.fromkeys(("use-distributed-optimizer", "use-torch-fsdp2", "overlap-grad-reduce"), _ALWAYS),
    **dict.fromkeys(("overlap-param-gather", "moe-shared-expert-overlap", "manual-gc", "async-save"), _ALWAYS),
    **dict.fromkeys(("moe-grouped-gemm", "moe-permute-fusion", "moe-router-fusion"), _ALWAYS),
    **dict.fromkeys(("finetune", "no-load-optim", "no-load-rng"), _WEIGHTS),
    **dict.fromkeys(("reset-position-ids", "reset-attention-mask", "eod-mask-loss"), "--data.packing documents"),
    **dict.fromkeys(("dist-ckpt-optim-fully-reshardable", "calculate-per-token-loss"), _ALWAYS),
    "sequence-parallel": "it comes with --parallelism.tp, so leave it out",
    "cp-comm-type": "--parallelism.cp_kind ring is p2p, ulysses is a2a, allgather is all_gather",
    "num-layers-per-virtual-pipeline-stage": "--pipeline.virtual_stages N is the stages of a rank",
    **dict.fromkeys(
        ("muon-scale-mode", "muon-extra-scale-factor"),
        "--optimizer.adjust_lr match_rms is spectral times 0.2, and original is shape_scaling",
    ),
    "muon-fp32-matmul-prec": "--optimizer.ns_dtype bfloat16 or float32",
    "muon-tp-mode": "full matrices, or their exact Gram matrices, are always used: leave it out",
    "muon-no-split-qkv": "queries, keys and values are always separate matrices: leave it out",
    "decoupled-lr": "a table [[optimizer.groups]] of the recipe, with match and lr",
    "optimizer.param_groups": "a table [[optimizer.groups]] of the recipe, with match and lr or weight_decay",
    "qk-clip": "--optimizer.qk_clip 100 has the threshold",
    "qk-clip-alpha": "queries and keys are scaled alike, by the root: leave it out",
    "log-max-attention-logit": "--metrics.max_logit_every N",
    **dict.fromkeys(
        ("use-precision-aware-optimizer", "exp-avg-dtype", "exp-avg-sq-dtype"), "--optimizer.moments_dtype bfloat16"
    ),
    "moe-layer-freq": "--model.moe_every N gives every N-th block experts, after --model.num_dense_layers",
    "moe-aux-loss-coeff": "--moe.aux_loss, aux_loss_sequence or aux_loss_global, by the kind of loss",
    "moe-router-load-balancing-type": "--moe.aux_loss, aux_loss_sequence or aux_loss_global sets a coefficient",
    "moe-router-score-function": "--model.score_function softmax_after_topk, softmax (scores before top-k) or sigmoid",
    "moe-router-pre-softmax": "--model.score_function softmax with --model.norm_topk false",
    "moe-router-dtype": "--moe.router_dtype float32 or float64",
    "moe-router-enable-expert-bias": "--moe.bias_update_rate above 0",
    **dict.fromkeys(
        ("moe-use-upcycling", "moe-upcycling-granularity"),
        "titanmoe convert --upcycle makes a checkpoint to begin from",
    ),
    "overlap-moe-expert-parallel-comm": "--moe.overlap halves, or --pipeline.schedule DualPipeV with "
    "--moe.overlap pairs",
    "delay-wgrad-compute": "--pipeline.schedule ZBVZeroBubble, or another that splits backward",
    "pipeline-model-parallel-layout": "--pipeline.layers_per_stage 3 4 4 3",
    "bf16": "--training.mixed_precision_param bfloat16, the default",
    "fp8-format": "--moe.expert_dtype fp8 is for experts only",
    "min-lr": "--lr_schedule.min_ratio R is the floor as a fraction of optimizer.lr",
    "cross-entropy-loss-fusion": "--training.loss_chunks, which saves memory by default",
    "distributed-timeout-minutes": "--training.timeout_s and --training.first_step_timeout_s, in seconds",
    "data-path": "--data.source files with --data.paths A B and, for fractions, --data.weights 0.7 0.3",
    "mock-data": "--data.source synthetic",
    "load": "the same command resumes; --checkpoint.load PATH begins from another run",
    "moe-per-layer-logging": "--metrics.experts_every, on by default",
    **dict.fromkeys(
        ("profile", "profile-step-start", "profiler.enable_profiling", "profiler.profile_freq"),
        "--profile.steps 10 11 names the steps",
    ),
    **dict.fromkeys(("fake-init-process-group", "comm.mode"), "titanmoe rehearse needs no GPU"),
    "what-if": "run titanmoe plan once for each value, as in docs/planner.md",
    "picture": "--json has what titanmoe plan and rehearse print",
    "tensorboard-dir": "--metrics.tensorboard true writes into the run's folder",
    "training.num_tokens_per_microbatch_per_dp_rank": "--training.local_batch_size N counts samples: tokens / seq_len",
    "training.num_tokens_per_train_step": "--training.global_batch_size N counts samples: tokens / seq_len",
    **dict.fromkeys(("training.dataset", "training.dataset_path"), "--data.source files with --data.paths"),
    "lr_scheduler.decay_ratio": "--lr_schedule.decay wsd with --lr_schedule.decay_fraction",
    "parallelism.context_parallel_load_balancer": "--parallelism.cp_placement zigzag or contiguous",
    **dict.fromkeys(
        ("parallelism.pipeline_parallel_layers_per_stage", "parallelism.module_fqns_per_model_part"),
        "--pipeline.layers_per_stage 3 4 4 3, or --pipeline.virtual_stages N",
    ),
    "parallelism.num_pp_microbatches": "it follows from the batch sizes, so leave it out",
    "checkpoint.async_mode": "--checkpoint.save async or sync",
    "checkpoint.initial_load_in_hf": "--model.hf FOLDER",
    "checkpoint.last_save_in_hf": "titanmoe convert --to-hf does that afterwards",
    "metrics.enable_wandb": "--metrics.wandb PROJECT",
    **dict.fromkeys(
        ("top-p", "generation.top_p", "generation.top_k", "generation.min_p", "rl.top_p", "rl.top_k"),
        "completions are drawn from all ids, because the loss takes the probabilities among all of them: leave it out, "
        "or lower generation.temperature",
    ),
    **dict.fromkeys(("lora.use_dora", "lora.dora"), "DoRA is not implemented, only plain LoRA: leave it out"),
    **dict.fromkeys(
        ("lora.load_in_4bit", "lora.load_in_8bit", "lora.quantize"),
        "a quantised base is not implemented: weights are in training.mixed_precision_param",
    ),
    "profiler.enable_memory_snapshot": "--profile.memory oom or steps",
}
"""Advice for foreign names without an equivalent field."""


def _plain(name: str) -> str:
    return name.replace("-", "_")


FIELDS = {_plain(name): path for name, path in (MEGATRON | TORCHTITAN | FINE_TUNING).items()}
"""Our field for each foreign name; it takes the same values, or its refusal lists its own."""
ADVICE = {_plain(name): text for name, text in _ADVICE.items()}


def field_of(name: str) -> str:
    """Return the path of our field for an option's name in another trainer, under any table; "" if there is none.

    Args:
        name: the other trainer's name with _ in place of -, such as "train_iters" or "training.max_norm".
    """
    return FIELDS.get(name) or FIELDS.get(name.rpartition(".")[2], "")


def hint(name: str, texts: Sequence[str]) -> str:
    """Return what to write for an option of another trainer, as a message; "" if its name is not known here.

    Args:
        texts: the words that follow it on the command line.
    """
    name = _plain(name)
    if name in map(_plain, RANKS):
        return f"the number of ranks is given by --ranks {texts[0] if texts else 'N'}"
    if name in ADVICE:
        return ADVICE[name]
    if path := field_of(name):
        return f"it is {' '.join([f'--{path}', *texts])} here"
    return ""


TABLES = {"MEGATRON": (MEGATRON, "--"), "TORCHTITAN": (TORCHTITAN, "")}
"""Names that a page lists, by the name in the page's markers, each with what is written before a name."""
MARKED = re.compile(r"(<!-- (\w+) of other_names\.py[^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)


def update_page(page: str) -> str:
    """Return `page`, a docs page's text, with the tables of other trainers' option names between markers rewritten."""
    return MARKED.sub(lambda mark: f"{mark[1]}\n{_table(*TABLES[mark[2]])}\n{mark[3]}", page)


def _table(names: Mapping[str, str], prefix: str) -> str:
    """Return a Markdown table with a row for each field of ours, with all names that another trainer has for it.

    Args:
        names: paths of our fields by the other trainer's names.
        prefix: what the other trainer's names begin with on the page, such as "--".
    """
    theirs: dict[str, list[str]] = {}
    for name, path in names.items():
        theirs.setdefault(path, []).append(f"`{prefix}{name}`")
    rows = [f"| {', '.join(names)} | `{path}` |" for path, names in theirs.items()]
    return "\n".join(["| there | here |", "| --- | --- |", *rows]) + "\n"
