"""Every option of a run: one dataclass per TOML table, one docstring per field.

A field's docstring says what it is and when to choose what. `--help` prints these docstrings with the recipe's values,
and docs/config.md is generated from them; `titanmoe.config.fields` replaces {components} by the list of components.
Constraints between fields are in `titanmoe.config.laws` (on any machine) and `titanmoe.fold` (of the mapping).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from titanmoe.config.component_kinds import Components
from titanmoe.config.ranges import (
    BELOW_ONE,
    COUNT,
    EPOCHS,
    EXPERTS,
    FRACTION,
    LAYERS,
    NOT_NEGATIVE,
    POSITIVE,
    RANKS,
    SECONDS,
    TOKENS,
    WIDTH,
    Range,
)

Dtype = Literal["float32", "bfloat16", "float64"]
"""The dtypes of weights, compute and reductions. No float16: it would need loss scaling, which is not implemented."""


FAR_BELOW_ONE = "a step of AdamW moves every weight by about lr, and weights are far below 1"
NO_STEPS = "-1 takes what training.epochs needs; --print-config, titanmoe plan and titanmoe rehearse start no run"
OWN = "model.own"


class Own(dict[str, int | float | bool | str]):
    """Fields that only the layers of one family need. Each family declares its own (docs/extending_families.md)."""


@dataclass
class Job:
    """Name, place and number of ranks of the run."""

    dump_folder: str = "runs"
    """Folder that holds one subfolder per run."""
    name: str = ""
    """Name of the run's folder. Empty: the recipe's file name, or family_size without a recipe."""
    ranks: Annotated[int, Range(0, RANKS)] = 0
    """Number of ranks, on all machines together, that the recipe is written for. train, plan, rehearse and fold use it unless --ranks N is given; the number that torchrun starts always wins, also when a run resumes on more or fewer ranks. 0: not stated; train then starts one rank per GPU, or per core without GPUs."""


@dataclass
class Model:
    """The model. `family` and `size` set the default of every other field, and any of them can be overridden. Or `hf` names a published model, whose config.json sets them all."""

    hf: str = ""
    """A model in Hugging Face's format: a folder, a name on the hub such as "Qwen/Qwen3-30B-A3B" (@REVISION selects a revision; without it the cached one, else main), or a URL (docs/huggingface.md). Its config.json sets every other field of this table except mtp_depth and mtp_after_norm, and moe.aux_loss if transformers would add that loss. A field that is set here as well must agree with it or be listed in `change`. Also sets checkpoint.initial_hf and data.tokenizer. A resolved recipe (--print-config) contains the sizes and no hf."""
    change: list[str] = field(default_factory=list)
    """Fields whose values in the recipe override config.json, with hf or checkpoint.initial_hf, such as ["rope_theta", "rope_scaling", "rope_factor"] for a longer context. Fields of other tables are named by their path: "moe.aux_loss"."""
    family: str = "mixtral"
    """The architecture. {components} Sets switches such as qk_norm and norm_topk."""
    size: str = "debug"
    """A size of the family, such as debug, 8x7b or 30b_a3b. Sets the shapes."""
    vocab_size: Annotated[int, Range(2, 2**24)] = 320
    """Rows of the embedding. At least the tokenizer's vocabulary; a multiple of tp."""
    media_tokens: Annotated[list[int], NOT_NEGATIVE] = field(default_factory=list)
    """Token ids that stand for images or video in multimodal models (Qwen3.5). Only text can be trained on, so data with such an id is refused. Empty: no id is refused."""
    dim: Annotated[int, Range(1, WIDTH)] = 64
    """Width of the residual stream."""
    num_layers: Annotated[int, Range(1, LAYERS)] = 4
    """Number of transformer blocks."""
    num_heads: Annotated[int, Range(1, WIDTH)] = 8
    """Number of query heads; a multiple of tp."""
    num_kv_heads: Annotated[int, Range(1, WIDTH)] = 8
    """Number of key and value heads (grouped-query attention): a divisor of num_heads, and a multiple or a divisor of tp. If it is smaller than tp, each head is on several ranks."""
    head_dim: Annotated[int, Range(2, WIDTH)] = 8
    """Width of one head; num_heads * head_dim need not equal dim."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have a bias (Qwen2)."""
    out_bias: bool = False
    """Whether attention's output projection has a bias (gpt-oss)."""
    attention_sinks: bool = False
    """Whether each head has a learned logit in the softmax besides those of the keys, so that it can attend to nothing (gpt-oss)."""
    sliding_window: Annotated[int, Range(0, TOKENS)] = 0
    """Positions that a block with a window sees, including its own (gpt-oss: 128). full_attention_every says which blocks have one. 0: no block has a window."""
    full_attention_every: Annotated[int, Range(0, LAYERS)] = 1
    """Every n-th block attends to the full sequence. The others have a window of sliding_window positions (gpt-oss: 2), or linear attention in families that have it (Qwen3-Next: 4). 0: no block attends to the full sequence."""
    attention_gate: bool = False
    """Whether attention's output is multiplied by a sigmoid gate, another projection of its input as wide as the queries (Qwen3-Next)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm on queries and keys before RoPE, which stabilises the attention logits. head: over each head separately (Qwen3). full: over all heads together (OLMoE), which needs two more small messages under tp."""
    kv_lora_rank: Annotated[int, Range(0, WIDTH)] = 0
    """Above 0: latent attention (MLA, arXiv 2405.04434). Keys and values of all heads come from one latent vector of this width (DeepSeek-V3: 512). Set num_kv_heads to num_heads, and head_dim to the sum of qk_nope_head_dim and qk_rope_head_dim."""
    q_lora_rank: Annotated[int, Range(0, WIDTH)] = 0
    """Latent attention: queries come from a latent vector of this width too (DeepSeek-V3: 1536). 0: straight from the residual stream (Moonlight)."""
    qk_nope_head_dim: Annotated[int, Range(0, WIDTH)] = 0
    """Latent attention: dims of a head's query and key without RoPE."""
    qk_rope_head_dim: Annotated[int, Range(0, WIDTH)] = 0
    """Latent attention: dims of a head's query and key with RoPE. All heads share these dims of the key."""
    v_head_dim: Annotated[int, Range(0, WIDTH)] = 0
    """Latent attention: width of a head's value."""
    rotary_dim: Annotated[int, Range(0, WIDTH)] = 0
    """Number of dims of each head that RoPE rotates, from the first (GLM-4.5: 64 of 128). 0: all of them."""
    rope_theta: Annotated[float, POSITIVE] = 1e6
    """Base of RoPE. Larger for longer contexts."""
    rope_scaling: Literal["none", "yarn"] = "none"
    """Scaling of RoPE's frequencies. yarn (arXiv 2309.00071) stretches the low frequencies: to extend the context of a checkpoint, or for a checkpoint that was published with it."""
    rope_factor: Annotated[float, COUNT] = 1.0
    """yarn: how many times longer the context becomes (DeepSeek-V3: 40). Above 1 with yarn, else 1."""
    rope_original_len: Annotated[int, Range(1, TOKENS)] = 4096
    """yarn: the context length that the unscaled frequencies were trained for."""
    rope_beta_fast: Annotated[float, POSITIVE] = 32.0
    """yarn: a pair of dims that rotates more often than this within the original context keeps its frequency."""
    rope_beta_slow: Annotated[float, POSITIVE] = 1.0
    """yarn: the frequency of a pair that rotates less often than this is divided by rope_factor. Pairs in between are interpolated."""
    rope_truncate: bool = True
    """yarn: whether the ends of that interpolation are rounded outward to whole pairs. false only for checkpoints that were trained without it (gpt-oss)."""
    rope_mscale: Annotated[float, NOT_NEGATIVE] = 0.0
    """yarn: queries and keys are each multiplied by m(rope_mscale) / m(rope_mscale_all_dim), where m(s) = 1 + 0.1 * s * ln(rope_factor). With 0 for both, by m(1). DeepSeek-V3: 1 for both."""
    rope_mscale_all_dim: Annotated[float, NOT_NEGATIVE] = 0.0
    """yarn: see rope_mscale. Latent attention also multiplies its logits by m(rope_mscale_all_dim)^2."""
    norm_eps: Annotated[float, POSITIVE] = 1e-5
    """Epsilon of every RMSNorm, except those on latent attention's latent vectors, which use 1e-6 as all published models do."""
    norm_adds_one: bool = False
    """Whether RMSNorms multiply by 1 + weight, with weights initialised to 0 (Qwen3-Next). The gated norm inside linear attention does not."""
    tie_embeddings: bool = False
    """Whether embedding and output head are one matrix. Saves vocab_size * dim weights; usual below about 2B parameters."""
    num_dense_layers: Annotated[int, Range(0, LAYERS)] = 0
    """Number of leading blocks with a dense FFN instead of experts."""
    dense_hidden: Annotated[int, Range(0, 2**24)] = 0
    """Hidden width of the dense FFN. Needed if num_dense_layers or moe_every make any block dense."""
    moe_every: Annotated[int, Range(1, LAYERS)] = 1
    """Every n-th block after the leading dense ones has experts. 1: all of them."""
    num_experts: Annotated[int, Range(1, EXPERTS)] = 8
    """Number of routed experts per MoE block; a multiple of ep."""
    top_k: Annotated[int, Range(1, EXPERTS)] = 2
    """Number of experts that each token is routed to."""
    expert_hidden: Annotated[int, Range(1, 2**24)] = 128
    """Hidden width of one expert; a multiple of etp."""
    expert_linear_bias: bool = False
    """Whether the three projections of every routed expert have biases (gpt-oss). dim must then be a multiple of etp too."""
    expert_activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """Activation of routed experts. swiglu: silu(gate) * up. clamped_swiglu: gate * sigmoid(1.702 gate) * (up + 1), with gate clamped to at most 7 and up to [-7, 7] (gpt-oss)."""
    shared_hidden: Annotated[int, Range(0, 2**24)] = 0
    """Hidden width of the shared expert, which processes every token. 0: none."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by a learned sigmoid gate (Qwen2-MoE)."""
    score_function: str = "softmax"
    """Function from the router's logits to routing weights. {components}"""
    router_bias: bool = False
    """Whether the router's logits have a learned bias (gpt-oss). Unlike the selection bias of moe.bias_update_rate, it has a gradient and affects the routing weights."""
    norm_topk: bool = True
    """Whether the routing weights of a token's top_k experts are normalised to sum to 1."""
    route_scale: Annotated[float, POSITIVE] = 1.0
    """Factor on the routing weights, after normalisation (DeepSeek-V3: 2.5)."""
    num_groups: Annotated[int, Range(1, EXPERTS)] = 1
    """Number of expert groups for group-limited routing. 1: none."""
    top_groups: Annotated[int, Range(1, EXPERTS)] = 1
    """Number of groups that a token may choose its experts from."""
    mtp_depth: Annotated[int, Range(0, 1)] = 0
    """Number of multi-token prediction blocks (DeepSeek-V3). 1: an extra block predicts the token after the next, for a denser training signal and for speculative decoding. It costs about as much as a block and the head. 0: none."""
    mtp_after_norm: bool = False
    """Whether the multi-token prediction block receives hidden states after the final norm, as in vLLM and Megatron, instead of before it. Set it to use the block for speculative decoding there. Default with model.hf: true."""
    init_std: Annotated[float, POSITIVE] = 0.02
    """Standard deviation of the initial weights; output projections into the residual stream use init_std / sqrt(2 * num_layers)."""
    own: Own = field(default_factory=Own)


@dataclass
class Data:
    """The training data."""

    source: Literal["stdlib", "files", "synthetic"] = "stdlib"
    """Source of the training text. stdlib: the source code of this machine's Python standard library. files: the entries of `paths`. synthetic: random tokens, for benchmarks."""
    paths: list[str] = field(default_factory=list)
    """Files, folders, globs, folders of token shards (made by `titanmoe tokenize`, recommended for large runs), or data sets on the hub ("hf:OWNER/NAME:SPLIT"), for source = "files". Each entry is one source of the mix."""
    weights: Annotated[list[float], NOT_NEGATIVE] = field(default_factory=list)
    """Relative number of samples drawn from each entry of `paths`. Empty: in proportion to their tokens, so that all sources finish an epoch together."""
    format: str = "auto"
    """Format of the files in `paths`. auto decides by file extension: name the format where the extension misleads, and for chats. Token shards are recognised by their manifest. {components}"""
    tokenizer: str = "bytes"
    """Tokenizer: "bytes", which needs no file, or the path of a Hugging Face tokenizer.json or its folder. Default with model.hf: that model's tokenizer; text is refused if the model has none. Token shards contain theirs."""
    chat_template: str = ""
    """Jinja file with the template for chats and preference pairs. Empty: the template in the tokenizer's folder. Checkpoints and exports include the template that was used."""
    label_weights: bool = False
    """Whether to read a loss weight for each label, for training.objective = "weighted_cross_entropy": in a chat, the `weight` of each message (default 1). If false, a message's weight must be 0 (no loss on that assistant message) or 1."""
    bad_lines: Literal["error", "skip"] = "error"
    """Handling of a line that is not UTF-8, not JSON or lacks the field. error: stop and name the line. skip: omit it and report how many were omitted."""
    max_document_mb: Annotated[int, Range(1, 2**20)] = 128
    """Maximum size in MiB, uncompressed, of a text file, a line of JSONL or a value of Parquet; anything larger is an error, whatever bad_lines is. It prevents a small compressed file from exhausting memory. Raise it for larger documents; reading one takes several times its size in memory."""
    cache: str = "cache"
    """Folder for the token shards that a run writes at its first start when `paths` are text, JSONL or Parquet; relative to job.dump_folder unless absolute. For large data run `titanmoe tokenize` beforehand."""
    packing: Literal["stream", "documents", "best_fit"] = "stream"
    """Packing of documents into sequences of seq_len tokens. stream: documents are concatenated and split anywhere, and tokens attend to earlier documents: fastest, usual in pre-training. documents: split the same way, but attention, positions and labels stay within each document. best_fit: like documents, but only documents longer than seq_len are split and the others are packed as units, at the price of some padding: for fine-tuning, and the default for chats and preference pairs (format = "chat" or "preference", and token shards made from them)."""
    long_chats: Literal["drop", "cut", "refuse"] = "drop"
    """Handling of chats longer than training.seq_len under packing = "best_fit". drop: they are omitted. cut: each is truncated after the last assistant message that fits, so that it keeps its system prompt and first turns, and is omitted if the first one does not fit. refuse: the run does not start. The header and the report give their number and the tokens lost."""
    share_prefixes: bool = False
    """Whether the prompt of a preference pair is computed once for both completions, for format = "preference" (docs/fine-tuning.md). Loss and gradients are unchanged. A prompt that is 3/4 of each sequence saves 3/8 of the tokens, and correspondingly longer pairs fit into seq_len. Everything that counts tokens counts the prompt once as well: balance losses, expert capacities and selection biases (docs/moe.md)."""
    balance_work: bool = False
    """Whether a step's samples are distributed over data ranks and microbatches so that attention's work, which grows with the square of document length, is even. For packing = "documents" or "best_fit" with a few long documents among many short ones."""
    workers: Annotated[int, Range(0, 1024)] = 0
    """Number of processes per rank that read samples. 0: a thread of the rank reads them, which is enough while data_wait_s (docs/watching.md) is near 0."""
    prefetch: Annotated[int, Range(1, 2**16)] = 2
    """Number of steps to read ahead, for each worker if there are any. More if reading speed varies, at the price of memory."""
    skip_steps: list[str] = field(default_factory=list)
    """Steps whose batches are not trained on, such as ["120", "130-140"]: they make no update, and the run continues with the next step. For batches that spoiled a run: resume from a checkpoint before them. The result equals that of a run in which optimizer.skip_spikes skipped the same steps (`events.jsonl` lists these). Empty: none."""
    fields: list[str] = field(default_factory=list)
    """The text field of each entry of `paths`, if they differ; replaces `field`. Empty: `field` for all."""
    field: str = "text"
    """The field of each JSONL or Parquet record that contains the text. Default for chats: "messages"."""


QUIZ_METRICS = "bits_per_byte", "margin", "accuracy", "accuracy_norm"
"""Names of the metrics of a quiz."""


@dataclass
class Quiz:
    """Multiple-choice quizzes, scored during training under the run's own mapping, as lm-evaluation-harness scores them (docs/generate.md). They do not affect training."""

    paths: list[str] = field(default_factory=list)
    """JSONL files, one per task, named after it. A line is {"question": "The capital of Norway is", "choices": ["Paris", "Oslo"], "answer": 1}, with `answer` counted from 0."""
    interval: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between scorings; the last step is followed by one as well. 0: none."""
    delimiter: str = " "
    """Text between a question and a choice; lm-evaluation-harness calls it target_delimiter."""


@dataclass
class Samples:
    """Prompts completed during training, for inspection (docs/generate.md). They do not affect training."""

    prompts: list[str] = field(default_factory=list)
    """Texts to complete, such as ["What is the capital of Norway?"]."""
    path: str = ""
    """JSONL file with more prompts. A line is a string, {"prompt": "..."}, or a chat: {"messages": [...]}, or a list of messages as "prompt", up to the last message that is not the assistant's. Empty: none."""
    format: Literal["auto", "text", "chat"] = "auto"
    """Format of a prompt that is a string. text: the model continues it. chat: it is what a user says, and the chat template writes it. auto: chat if the training data are chats or preference pairs, else text."""
    every: Annotated[int, COUNT] = 1
    """Prompts are completed after every n-th validation, and after the last step."""
    max_tokens: Annotated[int, Range(1, TOKENS)] = 64
    """Largest number of tokens of a completion. The end token ends it earlier."""
    temperature: Annotated[float, NOT_NEGATIVE] = 0.0
    """Temperature that logits are divided by, as in `titanmoe generate`. 0: always the most probable token."""
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    """Number of most probable tokens to draw from, with a temperature. 0: all."""
    top_p: Annotated[float, Range(0, 1, without_low=True)] = 1.0
    """Sum of probabilities of the most probable tokens to draw from, with a temperature."""


@dataclass
class Validation:
    """Loss on held-out data, computed under the run's own mapping. It does not affect training."""

    interval: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between validations; the last step is followed by one as well. 0: none."""
    steps: Annotated[int, NOT_NEGATIVE] = 10
    """Number of batches of global_batch_size samples per validation, the same ones each time. 0: the full set."""
    paths: list[str] = field(default_factory=list)
    """Validation data, in the form of data.paths. `steps` are divided evenly among the entries."""
    held_out: Annotated[int, NOT_NEGATIVE] = 0
    """Every n-th document of the training data, such as every 100th, is held out of training and validated on. It is held out even while interval = 0. Of a source with fewer than n documents, such as a single text file, the last 1/n of its tokens is held out. 0: none; give `paths`."""
    quiz: Quiz = field(default_factory=Quiz)
    samples: Samples = field(default_factory=Samples)


@dataclass
class Training:
    """Length of the run, batch sizes, precision and objective."""

    steps: Annotated[int, Range(1, derived=True, instead=NO_STEPS)] = 100
    """Number of optimizer steps of the run; the learning rate schedule ends with them. -1: as many as `epochs` need, the default if `epochs` is set."""
    epochs: Annotated[int, Range(0, EPOCHS)] = 0
    """Number of times that every sequence of every source is trained on, instead of `steps`; for fine-tuning (docs/data.md). The header and --print-config give the resulting number of steps. 0: `steps` sets the length, and a source that ends starts over."""
    stop_after: Annotated[int, NOT_NEGATIVE] = 0
    """The run ends after this many validations in a row without a better checkpoint.keep_best, or val_loss if that is empty. 0: it goes on."""
    seq_len: Annotated[int, Range(1, TOKENS)] = 256
    """Tokens per sample; a multiple of tp * cp."""
    local_batch_size: Annotated[int, Range(1, TOKENS)] = 1
    """Samples per microbatch on one data rank. As large as memory allows. Balance losses per microbatch depend on it (docs/moe.md)."""
    global_batch_size: Annotated[int, Range(1, TOKENS, derived=True)] = -1
    """Samples per optimizer step over all data ranks, from which the number of microbatches follows. -1: one microbatch per data rank."""
    dtype: Dtype = "float32"
    """Dtype in which parameters are stored and updated. float32 for training, float64 to compare mappings."""
    mixed_precision_param: Dtype = "bfloat16"
    """Dtype in which forward and backward compute; never wider than dtype. bfloat16 for speed, equal to dtype for no mixed precision."""
    mixed_precision_reduce: Dtype = "float32"
    """Dtype in which gradients are reduced over data ranks. bfloat16 halves the traffic and loses precision."""
    freeze: list[str] = field(default_factory=list)
    """Name patterns of parameters that are not trained, such as ["embed.*", "layers.*.attention.*"], where * matches anything (docs/fine-tuning.md). They have no gradients and no moments, do not count in the gradient norm, and are stored in mixed_precision_param (routers in float32 at least). The selection bias of a frozen router is frozen too, and balance losses then act only on the layers before it. Empty: all parameters are trained."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto: a GPU if there is one."""
    objective: str = "cross_entropy"
    """The loss that is minimised: a sum over the step's samples, divided once by the number of tokens or pairs. {components}"""
    mtp_weight: Annotated[float, NOT_NEGATIVE] = 0.3
    """Factor on the loss of multi-token prediction, with model.mtp_depth = 1 (DeepSeek-V3: 0.3, late in training 0.1)."""
    loss_chunks: Annotated[int, Range(0, 2**24, derived=True)] = -1
    """Number of vocabulary slices that the loss is computed in, so that the full logits are never in memory. More slices save memory. -1: as many as keep the logits of a slice within 32 MiB on CPUs and 1 GiB on GPUs. 0: the full logits are saved for backward, which saves one product with the head."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of initial weights, data order and router noise. They are the same under every mapping."""
    deterministic: bool = False
    """Whether two runs under the same mapping are bitwise identical. Slower on GPUs."""
    gc_every: Annotated[int, COUNT] = 50
    """Steps between Python garbage collections. All ranks collect in the same step, so that none delays the others."""
    first_step_timeout_s: Annotated[int, Range(1, SECONDS)] = 600
    """Seconds that a collective may take until the first step has finished (start-up and compilation)."""
    timeout_s: Annotated[int, Range(1, SECONDS)] = 120
    """Seconds that a collective may take after the first step before the run is considered hung."""
    watch: bool = True
    """Whether a hanging run is reported, with the rank that is late, and all ranks are ended (docs/reliability.md). false to stop a rank in a debugger."""
    stragglers: bool = True
    """Whether slow ranks and slow links between ranks are detected and named, with watch (docs/reliability.md). It measures how long every rank computes, reads data and waits. It costs one small message every 16 steps, and small messages between pairs of ranks when one is suspected."""


@dataclass
class Distillation:
    """Knowledge distillation from a teacher model, with training.objective = "distillation" (docs/fine-tuning.md)."""

    teacher: str = ""
    """The teacher: a folder in Hugging Face's format, a run or a checkpoint, with the same vocabulary as the model and the same tokenizer as the data. Its forward pass runs in each step, under the run's own mapping. It is not trained."""
    scores: str = ""
    """Name of stored teacher log-probabilities, instead of `teacher`: those that `titanmoe score --top` computed once and wrote beside the token shards. Such a run has no second model in memory."""
    top: Annotated[int, COUNT] = 64
    """k of the teacher's top-k distribution: the k most probable ids of each position are separate classes, and all other ids together are one more class. model.vocab_size uses the full distribution. Costs memory for k numbers per token."""
    temperature: Annotated[float, Range(0, without_low=True)] = 1.0
    """Temperature that the logits of student and teacher are divided by. Above 1, improbable tokens count for more."""
    weight: Annotated[float, Range(0, 1, without_low=True)] = 1.0
    """Fraction of the loss that is the divergence from the teacher; the rest is cross-entropy."""


@dataclass
class DPO:
    """Direct preference optimization (arXiv 2305.18290), with training.objective = "dpo": pairs of completions, with the initial model as the reference (docs/fine-tuning.md)."""

    beta: Annotated[float, POSITIVE] = 0.1
    """Factor on the log-probability ratios to the reference, in nats. Larger values keep the model closer to the reference. 0.1 is usual, 0.01 to 0.5 have been used."""


@dataclass
class RL:
    """Reinforcement learning on rewards of the model's own completions (docs/reinforcement.md)."""

    reward: str = ""
    """Reward of a completion; setting it makes the run one of reinforcement learning. exact: 1 if the completion is the record's "solution", else 0. regex: 1 if that regular expression is found in it. "module:function": a Python function of the completion and the record. "run PROGRAM ...": a program that reads and writes lines of JSON."""
    max_turns: Annotated[int, COUNT] = 1
    """Largest number of turns of a completion. Above 1 the reward may be an environment, which replies to a turn with a message and lets the model go on (docs/reinforcement.md)."""
    prompts: list[str] = field(default_factory=list)
    """JSONL files of prompts. A record has "prompt", a text or a list of messages, or "messages"; the reward gets all of its fields."""
    prompts_per_step: Annotated[int, COUNT] = 8
    """Prompts per optimizer step."""
    completions: Annotated[int, COUNT] = 8
    """Completions of each prompt, whose rewards are compared with each other. At least 2."""
    updates: Annotated[int, COUNT] = 1
    """Optimizer steps per rollout; each rollout has updates * prompts_per_step prompts. 1: always on policy."""
    held_out: Annotated[int, NOT_NEGATIVE] = 0
    """Every n-th prompt is not trained on; their mean reward is the metric val_reward. 0: none."""
    eval_interval: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between evaluations on the held-out prompts by greedy decoding; also after the last step. 0: none."""
    reward_workers: Annotated[int, COUNT] = 2
    """Processes that compute rewards, on the host of rank 0."""
    reward_timeout_s: Annotated[float, POSITIVE] = 10.0
    """Time limit of a reward in seconds. Its process is then killed, and the completion left out."""
    reward_memory_gb: Annotated[float, NOT_NEGATIVE] = 4.0
    """Memory limit of a reward's process in gigabytes. 0: no limit."""
    divide_by_std: bool = True
    """Whether advantages are divided by the standard deviation of their prompt's rewards (GRPO). false: Dr. GRPO (arXiv 2503.20783)."""
    normalisation: Literal["token", "sample", "constant"] = "token"
    """Terms of the loss's mean. token: all tokens (DAPO). sample: completions, each the mean over its tokens (GRPO, GSPO). constant: completions, each the sum over its tokens / generation.max_tokens (Dr. GRPO)."""
    clip_low: Annotated[float, NOT_NEGATIVE] = 0.2
    """Lower clip of the ratio to the old policy: no gradient below 1 - clip_low. Has an effect with updates above 1."""
    clip_high: Annotated[float, NOT_NEGATIVE] = 0.2
    """Upper clip of the ratio to the old policy: no gradient above 1 + clip_high. Has an effect with updates above 1. DAPO: 0.28."""
    ratio: Literal["token", "sequence"] = "token"
    """Level of the ratio to the old policy. token: one per token. sequence: one per completion, the geometric mean of its tokens' (GSPO)."""
    truncation: Annotated[float, NOT_NEGATIVE] = 2.0
    """Importance weight p_trainer / p_generator of each token, truncated at this value; with ratio = "sequence" the product over the completion. 0: no weights."""
    kl: Annotated[float, NOT_NEGATIVE] = 0.0
    """Coefficient of the KL divergence (estimator k3) from the frozen base weights, which needs [lora]. 0: none."""
    cut: Literal["keep", "mask"] = "keep"
    """Loss of truncated completions (at generation.max_tokens or rl.max_turns). keep: as usual. mask: none; their rewards still count in the mean."""
    cut_penalty: Annotated[float, NOT_NEGATIVE] = 0.0
    """Subtracted from the reward of a truncated completion."""
    replay: Literal["off", "old", "rollout"] = "rollout"
    """Experts that training sends the completions' tokens to. rollout: those that the generator chose (R3, arXiv 2510.11370), so that both have the same probabilities. old: those that the trainer chose when it computed the old log-probabilities (R2), with updates above 1. off: those that the routers choose at each step."""


@dataclass
class GenerationParallelism:
    """Mapping of the model while it generates; all other ranks are data parallel."""

    tp: Annotated[int, COUNT] = 1
    """Tensor parallel ranks of attention."""
    ep: Annotated[int, COUNT] = 1
    """Expert parallel ranks."""
    etp: Annotated[int, COUNT] = 1
    """Tensor parallel ranks of experts."""


@dataclass
class Generation:
    """Generation of completions during reinforcement learning ([rl])."""

    max_tokens: Annotated[int, Range(1, TOKENS)] = 256
    """Largest number of tokens of a completion, with all of its turns and the messages between them. training.seq_len is prompt and completion together."""
    temperature: Annotated[float, POSITIVE] = 1.0
    """Temperature of sampling; training divides its logits by it too."""
    stop: list[str] = field(default_factory=list)
    """Stop strings of a completion or turn; the string stays in the text."""
    batch_size: Annotated[int, COUNT] = 32
    """Completions that a data rank generates at a time. At least rl.completions."""
    offload_training: bool = False
    """Whether weights and optimizer state of training are moved to host memory while completions are generated, at the cost of two copies. Results do not change. It saves memory on GPUs only."""
    parallelism: GenerationParallelism = field(default_factory=GenerationParallelism)


@dataclass
class LoRA:
    """Low-rank adapters (arXiv 2106.09685) on frozen weights: y = W x + alpha / rank * B A x (docs/fine-tuning.md)."""

    rank: Annotated[int, Range(0, 2**16)] = 0
    """Rank of the adapters. Above 0 only the adapters are trained. 8 to 64 is usual, with ten times the learning rate of full fine-tuning. 0: no adapters."""
    experts_rank: Annotated[int, Range(1, 2**16, derived=True)] = -1
    """Rank of the adapters of routed experts, each of which has its own. -1: rank // model.top_k, at least 1, so that a token passes through as many adapter weights in experts as in other layers."""
    alpha: Annotated[float, POSITIVE] = 32.0
    """Numerator of the scaling: each adapter's product is multiplied by alpha / its rank."""
    rslora: bool = False
    """Whether to scale by alpha / sqrt(rank), which keeps gradients from shrinking as the rank grows (rsLoRA, arXiv 2312.03732)."""
    targets: list[str] = field(default_factory=list)
    """Name patterns of the matrices that have adapters, such as ["*.attention.*", "*.experts.*"], among attention's projections, dense and shared feed-forward networks and routed experts. Empty: all of these."""
    dropout: Annotated[float, BELOW_ONE] = 0.0
    """Probability with which an element of an adapter's input is dropped in training; the others are divided by 1 - dropout. The mask is a function of seed, step, matrix, token and element, so every mapping drops the same. 0.05 to 0.1 for small data sets."""


@dataclass
class Optimizer:
    """The optimizer, gradient clipping and skipped updates."""

    name: str = "adamw"
    """The optimizer. {components}"""
    lr: Annotated[float, Range(0, 1, without_low=True, reason=FAR_BELOW_ONE)] = 3e-4
    """Peak learning rate. Smaller for larger models. The header warns above 2e-2, and above 2e-1 for muon's matrices."""
    beta1: Annotated[float, BELOW_ONE] = 0.9
    """Decay of the first moment, AdamW's running mean of gradients. 0.9 is usual."""
    beta2: Annotated[float, BELOW_ONE] = 0.95
    """Decay of the second moment. 0.95 for large batches, 0.999 for small ones."""
    eps: Annotated[float, POSITIVE] = 1e-8
    """Number added to the root of the second moment. A larger one stabilises steps with tiny gradients."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decoupled weight decay. 0.1 is usual; 0 for none."""
    decay_all: bool = False
    """Whether norms, biases and router weights are decayed as well. Usually they are not."""
    max_grad_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Global gradient norm above which gradients are clipped. 0: the norm is measured without clipping."""
    skip_spikes: Annotated[float, NOT_NEGATIVE] = 0.0
    """Standard deviations above the mean of earlier steps from which a loss or gradient norm is a spike; 6 is usual. The update of a step with a spike or a number that is not finite is skipped: weights, moments and selection biases do not change, the learning rate schedule continues, and `events.jsonl` names the samples. For long runs on unchecked data. 0: no step is skipped, and a number that is not finite ends the run."""
    skip_window: Annotated[int, Range(4, 2**16)] = 128
    """Number of steps over which skip_spikes computes mean and deviation, without skipped ones. Until half as many have been seen, only steps with numbers that are not finite are skipped."""
    skip_limit: Annotated[int, COUNT] = 10
    """Number of consecutive steps skipped by skip_spikes that end the run, because bad batches alone do not explain so many."""
    momentum: Annotated[float, BELOW_ONE] = 0.95
    """muon only: decay of the running mean of gradients. 0.95 is usual."""
    nesterov: bool = True
    """muon only: whether to use Nesterov momentum. Usual."""
    ns_coefficients: Literal["classic", "polar_express"] = "classic"
    """muon only: coefficients of the Newton-Schulz steps. classic: singular values end between 0.68 and 1.13, whatever ns_steps is. polar_express: each step brings them closer to 1, within 0.3 % after 6, and amplifies rounding errors more."""
    ns_steps: Annotated[int, Range(1, 20)] = 5
    """muon only: number of Newton-Schulz steps. 5 is usual."""
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """muon only: dtype in which Newton-Schulz steps compute and matrices are sent. float64 gradients stay in float64."""
    ns_eps: Annotated[float, NOT_NEGATIVE] = 1e-7
    """muon only: each matrix is divided by its own gradient norm + ns_eps * the global gradient norm, so that a gradient that is only rounding error stays small."""
    adjust_lr: Literal["original", "match_rms"] = "match_rms"
    """muon only: factor on a matrix's learning rate. match_rms: 0.2 sqrt(larger dim), which makes updates as large as AdamW's, so that AdamW's learning rates fit. original: sqrt(rows / columns), at least 1."""
    by_head: bool = False
    """muon only: whether each head's query, key and value weights are separate matrices. If false, those of all heads form one matrix."""
    router_matrix: bool = False
    """muon only: whether routers are updated as matrices. If false, AdamW updates them: their rows are experts, and Muon would move the rows of rarely chosen experts, whose gradients are mostly noise, as far as all others."""
    adamw_lr: Annotated[float, Range(0, 1, without_low=True, reason=FAR_BELOW_ONE, derived=True)] = -1.0
    """muon only: peak learning rate of the parameters that AdamW updates: embeddings, head, norms, biases, routers. -1: lr. Needed with adjust_lr = "original", whose learning rates are about 50 times those of AdamW."""
    moments_dtype: Literal["as_weights", "bfloat16"] = "as_weights"
    """Dtype in which moments and momentum are stored. bfloat16 halves their memory; they are then updated in float32 and rounded."""
    stochastic_rounding: bool = False
    """Whether bfloat16 weights (training.dtype = "bfloat16") and moments (moments_dtype) are rounded up or down at random so that they are right on average. With rounding to nearest, updates below 1/512 of a weight are lost. The rounding is the same under every mapping and after a resume."""
    qk_clip: Annotated[float, NOT_NEGATIVE] = 0.0
    """QK-Clip: largest attention logit allowed. After a step in which a head exceeded it, the head's query and key weights are scaled down so that its largest logit would have been this. Kimi-K2 used 100 with Muon, under which logits can grow without bound. Refused with model.qk_norm, which undoes the scaling. 0: none."""
    qk_clip_every: Annotated[int, COUNT] = 1
    """Steps between measuring and clipping, with qk_clip. A measurement costs about half of attention's forward pass, and with cp a message with the keys."""
    qk_clip_measure: Literal["exact", "bound"] = "exact"
    """Measurement of the largest attention logits, also for metrics.max_logit_every. exact: by a product of queries and keys. bound: by the log-sum-exp that attention kernels return anyway, which costs almost nothing. It exceeds the largest logit by at most ln(number of keys that a query sees), so heads are clipped up to that much earlier, and `max_logit` reports the bound."""
    groups: list[dict] = field(default_factory=list)
    """Groups of parameters with another peak learning rate or weight decay: one table `[[optimizer.groups]]` per group, with `match`, a list of name patterns as in training.freeze, and `lr` or `weight_decay` or both. Two groups may not match the same name."""
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"
    """torch's implementation of AdamW. fused is fastest; for_loop needs the least extra memory."""
    offload: bool = False
    """Whether both moments stay in host memory, page-locked for a GPU (2 numbers of training.dtype per parameter of the rank). For the update they are copied to the device in buffers of 64 MiB or of one larger parameter; three buffers overlap copies with the update. Results and checkpoints are unchanged. For runs short of memory with long steps. Its speed on GPUs has not been measured."""


@dataclass
class LRSchedule:
    """The learning rate schedule."""

    warmup_steps: Annotated[int, NOT_NEGATIVE] = 10
    """Number of steps of linear warm-up from 0. More for larger learning rates."""
    decay: Literal["cosine", "linear", "wsd", "none"] = "cosine"
    """Shape of the decay. cosine, linear: over all steps after warm-up. wsd: constant at the peak, then a linear decay at the end. none: constant at the peak."""
    decay_fraction: Annotated[float, FRACTION] = 0.2
    """wsd only: fraction of the steps, at the end, in which the learning rate decays."""
    min_ratio: Annotated[float, FRACTION] = 0.1
    """Smallest learning rate, as a fraction of the peak."""


@dataclass
class Experts:
    """The mapping of the experts onto the ranks of a pipeline stage: edp_replicate x edp x ep x etp = ranks of a stage. edp_replicate x edp data ranks have the same experts."""

    ep: Annotated[int, Range(1, RANKS)] = 1
    """Expert parallel: number of ranks that the experts are divided among. May span tp, cp and dp. Raise it first if expert weights do not fit."""
    etp: Annotated[int, Range(1, RANKS)] = 1
    """Expert tensor parallel: number of ranks that each expert's hidden dim is sharded over. Only for few, large experts; need not divide tp."""
    edp: Annotated[int, Range(1, RANKS, derived=True)] = -1
    """Expert data parallel: number of ranks that the state of the same experts is sharded over (FSDP2). -1: derived. A value set here is checked, and adjusted as dp_shard is."""
    edp_replicate: Annotated[int, Range(1, RANKS, derived=True)] = -1
    """Number of replicas of the sharded expert state (HSDP). -1: gcd(dp_replicate, ranks of a stage / (ep * etp))."""


@dataclass
class Parallelism:
    """The mapping of attention, dense layers and the vocabulary onto the ranks: pp x dp_replicate x dp_shard x cp x tp = world size."""

    dp_replicate: Annotated[int, Range(1, RANKS)] = 1
    """Number of replicas of the sharded state (HSDP). Use it when one replica fits a node or a few. A run that is restarted on another number of ranks lowers it if necessary (docs/launch.md)."""
    dp_shard: Annotated[int, Range(1, RANKS, derived=True)] = -1
    """Number of ranks that parameters, gradients and optimizer state are sharded over (FSDP2). -1: derived. A value set here is checked, and adjusted when a run is restarted on another number of ranks."""
    cp: Annotated[int, Range(1, RANKS)] = 1
    """Context parallel: number of ranks that each sequence is sharded over. For long sequences."""
    tp: Annotated[int, Range(1, RANKS)] = 1
    """Tensor parallel, with sequence parallel: number of ranks that matrices are sharded over. Keep it inside a node."""
    pp: Annotated[int, Range(1, RANKS)] = 1
    """Pipeline parallel: number of ranks that the layers are divided among. For models that do not fit otherwise."""
    vocab: Literal["tensor", "pipeline"] = "tensor"
    """Ranks that the embedding and the head are sharded over. tensor: over tp, the embedding in the first pipeline stage and the head in the last. pipeline: both over pp and tp together (Vocabulary Parallelism, arXiv 2411.05288), so that no stage has more weights or work than the others; up to two more microbatches are then in flight. For many stages and a large vocabulary, where the last stage without any layer would still be the slowest (docs/parallelism.md). With schedules GPipe, 1F1B and Interleaved1F1B."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Whether FSDP frees gathered weights between forward and backward. always: least memory. never: saves an all-gather. auto: always without a pipeline, never with one (otherwise every microbatch would repeat the all-gather; all stages of the rank then stay gathered). Experts with edp = 1 need no gathering: unless this is "always", a copy of them in mixed_precision_param exists from the step's first forward to its last backward (2 bytes per parameter in bfloat16; no copy if training.dtype is the same)."""
    reduce_once: bool = False
    """Whether gradients are reduced over data ranks once per step, after the last microbatch, instead of once per microbatch. For runs without a pipeline and with several microbatches; a pipeline always does this. It needs memory for unsharded gradients in mixed_precision_reduce: 4 bytes for each parameter of attention, dense layers and vocabulary divided by tp, and for each parameter of the experts divided by ep * etp. Turn it on if that memory is available and the reductions take longer than the backward that they overlap with."""
    cp_kind: Literal["ring", "ulysses", "allgather"] = "ring"
    """Algorithm of context parallel attention. ring: least memory, any number of heads. ulysses: fewest bytes while cp <= heads / tp. allgather: simplest, every rank gathers the full keys and values."""
    cp_placement: Literal["zigzag", "contiguous"] = "zigzag"
    """Chunks of the sequence that a cp rank has. zigzag: an early and a late one, so that the work of causal attention is even. contiguous: one."""
    attention_backend: Literal["auto", "torch", "plain"] = "auto"
    """Implementation of attention, with or without cp. auto: on GPUs torch's where it supports the run (its ring attention; flex_attention for documents, windows and sinks), else titanmoe's. torch: torch's, or the run is refused; on CPUs only the ring. plain: always titanmoe's, to compare or where torch's fails."""
    attention_kernel: Literal["auto", "fa2", "fa3", "fa4", "cudnn"] = "auto"
    """Kernel of causal attention in 16 bits on GPUs, for full attention and for the blocks of ring attention and windows. auto: FlashAttention-3 on Hopper and FlashAttention-4 on B200 if its package is installed and torch is 2.13 or newer; else, on these GPUs, cuDNN's if it supports the head widths and training.deterministic is off; else FlashAttention-2. Any other value: that kernel, or the run is refused."""
    node: Annotated[int, Range(1, RANKS, derived=True)] = -1
    """Number of consecutive ranks per node. moe.dispatcher = "hierarchical" and "auto" use it, and symm_mem and deepep are refused on groups of nodes that they do not support. Smaller than a machine if some of its ranks are closer to each other. -1: the number that torchrun started on this machine."""
    experts: Experts = field(default_factory=Experts)


@dataclass
class Pipeline:
    """The pipeline schedule and its stages, used with parallelism.pp > 1."""

    schedule: Literal[
        "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """The pipeline schedule. 1F1B: the usual choice. Interleaved1F1B: smaller bubble, more messages. The zero-bubble schedules and DualPipeV split backward to fill the bubble, and need more memory. The header prints the bubble."""
    schedule_csv: str = ""
    """File with a schedule of your own, instead of `schedule`: one row of actions per pipeline rank (0F0, 0B0, ...)."""
    virtual_stages: Annotated[int, Range(1, 1024, derived=True)] = -1
    """Number of stages per rank. -1: 1 for GPipe and 1F1B, 2 for the others."""
    layers_per_stage: Annotated[list[int], Range(0, LAYERS)] = field(default_factory=list)
    """Number of layers of each stage, first to last. Empty: split by cost, including embedding and head."""


@dataclass
class MoE:
    """Router, load balance, dispatch and expert computation. The architecture (top_k, score_function, ...) is in [model]."""

    dispatcher: str = "alltoall"
    """Transport of routed tokens to their experts and back. {components}"""
    symm_mem_factor: Annotated[float, COUNT] = 2.0
    """Capacity of a rank's receive buffer for routed tokens in symm_mem, also if "auto" chooses it, as a multiple of what arrives under even routing. If a rank would receive more, the step is rerun with alltoall, with exact results (metric overflow_reruns). Raise it if that happens often, lower it to save memory. With values of ep or more it never happens."""
    overlap: Literal["none", "halves", "pairs", "auto"] = "none"
    """Computation while the dispatcher's all-to-all is in flight. Results do not change. none: the shared expert only. halves: each block processes its microbatch in two halves, and attention or experts of one half are computed while the routed tokens of the other are in flight. For slow dispatch and microbatches of 2 samples or more; matrix products are half as large, and there can be no capacity. pairs: the forward of one microbatch overlaps with the backward of another, with the schedule DualPipeV or a schedule_csv with pairs such as (0F4;3B1)OVERLAP_F_B. For networks that are slow compared with the experts' products; needs ep x etp > 1. halves and pairs need the dispatcher alltoall or hierarchical. auto: on GPUs what the planner estimates to be fastest for the run's mapping (no run on GPUs has confirmed its times), with the choice and the reason in the header; none on CPUs."""
    capacity_factor: Annotated[float, NOT_NEGATIVE] = 0.0
    """Capacity of an expert, as a multiple of its routed tokens under even routing: at most ceil(capacity_factor * top_k * tokens / num_experts) per scope are processed, the others dropped. 0: dropless."""
    drop_policy: Literal["probability", "position"] = "probability"
    """Routed tokens that are dropped above the capacity. probability: those with the lowest routing weights (compared in bfloat16; of equal ones the last). position: the last ones."""
    capacity_scope: Literal["sub_sequence", "full_sequence"] = "sub_sequence"
    """Tokens among which the capacity applies. sub_sequence: those of one rank, without extra communication. full_sequence: those of one sample, with the same result under every mapping."""
    pad_to_capacity: bool = False
    """Whether every expert's buffer is padded to its capacity: static shapes, even splits, no host sync."""
    router_dtype: Literal["float32", "float64"] = "float32"
    """Smallest precision of the router's product and scores."""
    router_product: Literal["auto", "float32"] = "auto"
    """Computation of the router's product for a bfloat16 input. auto: on GPUs the weights are split into three bfloat16 terms and the products summed in float32, several times as fast as a float32 product and as exact (docs/moe.md). float32: a float32 product, to compare."""
    jitter: Annotated[float, BELOW_ONE] = 0.0
    """Router jitter: its input is multiplied by uniform noise of 1 +- jitter, for exploration. 0.01 is usual."""
    force_balance: bool = False
    """Whether tokens are routed round-robin, whatever the router computes. For benchmarks only."""
    aux_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Coefficient of the load-balance loss per microbatch (Switch). 0.01 to 0.001 is usual."""
    aux_loss_sequence: Annotated[float, NOT_NEGATIVE] = 0.0
    """Coefficient of the load-balance loss per sample (DeepSeek-V3: 0.0001)."""
    aux_loss_global: Annotated[float, NOT_NEGATIVE] = 0.0
    """Coefficient of the load-balance loss over all tokens of the step so far, which lets experts specialise by domain."""
    z_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Coefficient of the z-loss, the squared log-sum-exp of the router's logits, which keeps them small. 0.001 is usual."""
    balance_losses: list[str] = field(default_factory=list)
    """Further balance losses, each with its coefficient, such as ["my_package.my_losses:Mine 0.001"]; those with a key of their own above are refused here. All balance losses: {components}"""
    bias_update_rate: Annotated[float, NOT_NEGATIVE] = 0.0
    """Auxiliary-loss-free balance: after each step, the selection bias of an expert with more load than average is lowered by this much, and that of one with less is raised (DeepSeek-V3: 0.001)."""
    grouped_mm: Literal["auto", "grouped", "loop"] = "auto"
    """Computation of the experts' matrix products. grouped: torch's grouped_mm. loop: one product per expert. auto: grouped where dtype and sizes allow it, else loop."""
    expert_dtype: Literal["compute", "fp8", "fp8_emulated"] = "compute"
    """Precision of the experts' products. compute: training.mixed_precision_param. fp8: 8 bits with a scale per row, on Hopper GPUs, for large experts; gradients of weights, the router and everything else are computed as before. fp8_emulated: the same rounding on any device, slowly, to see its effect on the loss."""
    accumulate_weight_gradients: bool = False
    """Whether the products that compute the gradients of expert weights add them to their sum over microbatches directly, instead of in a separate pass; they are then not rounded in between. For edp = 1. On an H200 this is slower with one microbatch per step (docs/kernels.md)."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Kernels of routing, permutation of routed tokens, and activations. auto: Triton kernels on GPUs if Triton is installed, else torch operations; linear attention in 16 bits uses fla-core's kernels if it is installed (pip install "titanmoe[fla]"). torch: torch operations, to compare. triton: Triton kernels, or the run is refused."""


@dataclass
class ActivationCheckpoint:
    """Activation recomputation: what backward recomputes instead of saving it in forward. Results do not change."""

    mode: Literal["none", "full", "full_except_dispatch", "selective", "moe"] = "none"
    """Activations that are recomputed. none: nothing but the experts' activation, fastest. full: full blocks, least memory. full_except_dispatch: as full, but saves the routed tokens that experts received from other ranks, so that none is sent twice. selective: saves matrix products (except those that expand latent attention's latents), attention and what came over the network, recomputes the cheap rest. moe: only the MoE half of a block, where most activations are."""
    every: Annotated[int, COUNT] = 1
    """Every n-th block is recomputed."""


@dataclass
class Compile:
    """torch.compile, of attention, of the dense layer, of the head, and of the MoE layer from router to combine, with its communication. The dispatcher deepep, 8-bit experts, moe.overlap, activation_checkpoint.mode moe and full, and schedules that split backward leave the MoE layer uncompiled, except its shared expert."""

    enable: bool = False
    """Whether to compile. It adds a minute or more to the start, which long runs regain. The header says how the MoE layers are compiled."""
    backend: str = "inductor"
    """Backend of torch.compile. inductor for speed, aot_eager to look for graph breaks."""


@dataclass
class Metrics:
    """Reported numbers. The console and metrics.jsonl have the same ones."""

    log_every: Annotated[int, COUNT] = 1
    """Steps between console lines."""
    console: Literal["auto", "live", "lines"] = "auto"
    """Form of the console output. live: one panel that is updated in place. lines: one line per report, for files and log collectors. auto: live on a terminal, else lines."""
    experts_every: Annotated[int, Range(0, derived=True)] = -1
    """Steps between lines of experts.jsonl, each with the load of every expert of every layer. -1: about 500 lines per run. 0: none."""
    max_logit_every: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between reports of the largest attention logit of each layer, as `max_logit`: a logit that keeps growing is an early sign of divergence. It costs an extra product of queries and keys, unless optimizer.qk_clip_measure = "bound". With optimizer.qk_clip it is reported whenever it is measured. 0: none."""
    tensorboard: bool = True
    """Whether TensorBoard event files are written into the run's folder."""
    wandb: str = ""
    """Weights & Biases project to report to; needs its package (pip install "titanmoe[wandb]"). Empty: none."""
    peak_tflops: Annotated[float, NOT_NEGATIVE] = 0.0
    """Peak TFLOP/s of one device in mixed_precision_param, for MFU. 0: the known value of the GPU; no MFU for other devices."""


@dataclass
class Profile:
    """Traces and memory snapshots of single steps (docs/watching.md), written to profile/ in the run's folder."""

    steps: Annotated[list[int], COUNT] = field(default_factory=list)
    """Steps to trace with torch's profiler, such as [10, 11], one file each. The first few steps are not typical. Empty: none."""
    ranks: Annotated[list[int], Range(0, RANKS)] = field(default_factory=lambda: [0])
    """Ranks that trace. One of each pipeline stage shows the pipeline; all ranks write many files."""
    memory: Literal["none", "oom", "steps"] = "none"
    """Snapshots of all GPU allocations with their stack traces. oom: when memory runs out. steps: then, and after each of `steps`. Costs a few percent of speed while it is on."""


@dataclass
class Debug:
    """Search for the rank, layer and samples of wrong numbers (docs/reliability.md)."""

    replicas_every: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between bitwise comparisons of all state that several ranks have copies of (weights, moments, routers, selection biases, counts), which find a flipped bit and name its rank. The copies are also compared before each checkpoint. 100 has no noticeable cost. 0: never."""
    on_difference: Literal["stop", "restore"] = "stop"
    """Action when replicas differ. stop: end the run; the launcher's restart then resumes from the last checkpoint, whose replicas were equal. restore: reload that checkpoint at once, up to three times."""
    rerun: bool = False
    """Whether a suspicious step is repeated: forward and backward run a second time, and the report says whether the results are bitwise equal or on which rank they differ. The second pass counts. Suspicious are a loss or gradient norm that is not finite or far above earlier ones (optimizer.skip_spikes, else 6 deviations), and replicas that differ. Needs training.deterministic."""
    culprit: Literal["none", "name"] = "none"
    """Action when a step's loss or gradients are not finite. name: repeat it and report the first layer whose output or gradient is not finite, its rank and its samples. none: nothing more."""


@dataclass
class Checkpoint:
    """Checkpoints, which can be resumed under the same mapping or any other (docs/checkpoint.md)."""

    enable: bool = True
    """Whether checkpoints are saved: every `interval` steps, at the end, and on SIGTERM or SIGINT. A run of the same name resumes from the last one. false: nothing is saved and each start is a new run, for benchmarks and trials."""
    folder: str = "checkpoints"
    """Folder for checkpoints: relative to the run's folder, or an absolute path in which every run has a folder of its name."""
    interval: Annotated[int, NOT_NEGATIVE] = 500
    """Steps between checkpoints: as many as you can afford to repeat. 0: only at the end and on a signal."""
    save: Literal["async", "sync"] = "async"
    """Mode of writing checkpoints. async: the state is copied to CPU memory and written while training continues. sync: training waits for the disk; no copy is needed."""
    keep_last: Annotated[int, NOT_NEGATIVE] = 3
    """Number of latest checkpoints to keep. 0: all."""
    keep_every: Annotated[int, NOT_NEGATIVE] = 0
    """Checkpoints of every n-th step, such as 10000, are kept as well, for later evaluation. 0: none."""
    keep_best: str = ""
    """A metric of validation or quiz, such as "val_loss" or "quiz.TASK.accuracy": the step with the best value so far is saved as well and kept until a better one is (docs/checkpoint.md). RUN:best names it in other commands. Accuracies and margins are better the higher, all else the lower. Empty: none."""
    load: str = "auto"
    """Checkpoint to start from. auto: the last complete one of this run, if there is one; the run is refused if there are some and none can be used. none: start from scratch, in a new folder. A step such as 1200: that one of this run. A path: that checkpoint, or the latest of that run, unless this run already has its own."""
    model_only: bool = False
    """Whether only the weights are loaded from a checkpoint that `load` names by path; optimizer, step and data start from scratch."""
    initial_hf: str = ""
    """Model in Hugging Face's format (a folder, a name on the hub or a URL, as model.hf) with the initial weights, used while the run has no checkpoint. Default: model.hf. "" with model.hf: random weights of its shapes."""
    initial_adapter: str = ""
    """PEFT folder (adapter_config.json, adapter_model.safetensors) with the initial adapters, used while the run has no checkpoint. lora.rank, experts_rank, alpha and targets must agree with it (docs/fine-tuning.md). Empty: new adapters with B = 0."""
    verify: bool = True
    """Whether every file's checksum is verified before loading. false only where reading files twice costs too much."""
    timeout_s: Annotated[int, COUNT] = 1800
    """Seconds that a save may take on the slowest rank. After that the run ends with a message that names the rank and the file it is writing. Set it to several times what a save usually takes."""


@dataclass
class Config:
    """All tables of a run's recipe."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    validation: Validation = field(default_factory=Validation)
    distillation: Distillation = field(default_factory=Distillation)
    lora: LoRA = field(default_factory=LoRA)
    dpo: DPO = field(default_factory=DPO)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    parallelism: Parallelism = field(default_factory=Parallelism)
    pipeline: Pipeline = field(default_factory=Pipeline)
    moe: MoE = field(default_factory=MoE)
    rl: RL = field(default_factory=RL)
    generation: Generation = field(default_factory=Generation)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profile: Profile = field(default_factory=Profile)
    debug: Debug = field(default_factory=Debug)
    components: Components = field(default_factory=Components, repr=False, compare=False)
    """The components that the recipe can name. Not a table of the recipe."""
