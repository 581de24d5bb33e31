"""Every option of a run: one dataclass per TOML table, one docstring per field.

A docstring says when to choose what; `titanmoe.config.fields` puts the names and lines of components where it says {components}.
The laws that tie fields together are in `titanmoe.config.laws` (what holds on any machine) and `titanmoe.fold` (the
mapping). `train.py --help` prints this page with the recipe's values.
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
"""No float16: its small range needs loss scaling, which is not implemented."""


FAR_BELOW_ONE = "a step of AdamW moves every weight by about lr, and weights are far below 1"
NO_STEPS = "-1 takes what training.epochs needs; --print-config, titanmoe plan and titanmoe rehearse start no run"
OWN = "model.own"


class Own(dict[str, int | float | bool | str]):
    """What only the layers of one family need: each family says which fields there are (docs/extending.md)."""


@dataclass
class Job:
    """Where the run is stored."""

    dump_folder: str = "runs"
    """Folder that holds one sub-folder per run."""
    name: str = ""
    """Name of the run's folder. Empty: the recipe's file name, or family_size without a recipe."""
    ranks: Annotated[int, Range(0, RANKS)] = 0
    """Ranks on all machines together that the recipe is written for: those of its mapping. train, plan, rehearse and fold take as many unless --ranks N says otherwise; torchrun's own number always wins, also when a run resumes on more or fewer. 0: not stated; train then takes one per GPU, or per core without GPUs."""


@dataclass
class Model:
    """The model. A family and a size give every other field its value, and any of them can be overridden; or `hf` names a model whose own file gives them all."""

    hf: str = ""
    """A model in Hugging Face's format whose config.json says what the model is: a folder, a name on the hub such as "Qwen/Qwen3-30B-A3B" (with @REVISION for another than is cached, else main), or a URL (docs/huggingface.md). Every other field of this table but mtp_depth and mtp_after_norm, and moe.aux_loss if transformers would add its loss, then come from there: one that is set besides has to agree or be listed in `change`. Sets checkpoint.initial_hf, and data.tokenizer if the model has a tokenizer. A resolved recipe (--print-config) has its sizes and no hf."""
    change: list[str] = field(default_factory=list)
    """With hf or checkpoint.initial_hf: fields whose values here win over the model's own file, such as ["rope_theta", "rope_scaling", "rope_factor"] for a longer context; those of other tables by their path, "moe.aux_loss"."""
    family: str = "mixtral"
    """The architecture. {components} Sets switches such as qk_norm and norm_topk."""
    size: str = "debug"
    """A size of that family, e.g. debug, 8x7b, 30b_a3b. Sets the shapes."""
    vocab_size: Annotated[int, Range(2, 2**24)] = 320
    """Rows of the embedding. At least the tokenizer's vocabulary; a multiple of tp."""
    media_tokens: Annotated[list[int], NOT_NEGATIVE] = field(default_factory=list)
    """Ids that stand for images or video in models that also take these (Qwen3.5). Only text is trained here, so data with such a token is refused; empty: none is."""
    dim: Annotated[int, Range(1, WIDTH)] = 64
    """Width of the residual stream."""
    num_layers: Annotated[int, Range(1, LAYERS)] = 4
    """Transformer blocks."""
    num_heads: Annotated[int, Range(1, WIDTH)] = 8
    """Query heads; a multiple of tp."""
    num_kv_heads: Annotated[int, Range(1, WIDTH)] = 8
    """Key and value heads (grouped-query attention); a divisor of num_heads, and a multiple or a divisor of tp: with fewer than tp, each is on several ranks."""
    head_dim: Annotated[int, Range(2, WIDTH)] = 8
    """Width of one head; num_heads * head_dim need not equal dim."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen2)."""
    out_bias: bool = False
    """Bias on attention's output projection (gpt-oss)."""
    attention_sinks: bool = False
    """One learned logit per head next to the keys' in the softmax, so that a head may attend to nothing (gpt-oss)."""
    sliding_window: Annotated[int, Range(0, TOKENS)] = 0
    """Positions that a block with a window sees, including its own (gpt-oss: 128); 0: no block has a window. full_attention_every says which blocks have one."""
    full_attention_every: Annotated[int, Range(0, LAYERS)] = 1
    """Every n-th block attends to the whole sequence. The others before it have a window with sliding_window (gpt-oss: 2), or linear attention in families that have that (Qwen3-Next: 4). 0: no block attends to all of it."""
    attention_gate: bool = False
    """Multiply what attention gives by a sigmoid of another projection of its input, as wide as the queries (Qwen3-Next)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm on queries and keys before RoPE, which stabilises their products. head: each head by itself (Qwen3). full: over all heads together (OLMoE), which under tp takes two more small messages."""
    kv_lora_rank: Annotated[int, Range(0, WIDTH)] = 0
    """Above 0: latent attention (MLA, arXiv 2405.04434). Keys and values of all heads come from one latent vector of this width (DeepSeek-V3: 512). Set num_kv_heads to num_heads, and head_dim to the sum of qk_nope_head_dim and qk_rope_head_dim."""
    q_lora_rank: Annotated[int, Range(0, WIDTH)] = 0
    """Latent attention: queries come from a latent vector of this width too (DeepSeek-V3: 1536). 0: straight from the residual stream (Moonlight)."""
    qk_nope_head_dim: Annotated[int, Range(0, WIDTH)] = 0
    """Latent attention: width of the part of a head's query and key that RoPE leaves alone."""
    qk_rope_head_dim: Annotated[int, Range(0, WIDTH)] = 0
    """Latent attention: width of the part that RoPE turns; all heads share its key."""
    v_head_dim: Annotated[int, Range(0, WIDTH)] = 0
    """Latent attention: width of a head's value."""
    rotary_dim: Annotated[int, Range(0, WIDTH)] = 0
    """RoPE turns so many dims of each head, the first, and leaves the others alone (GLM-4.5: 64 of 128). 0: all of them."""
    rope_theta: Annotated[float, POSITIVE] = 1e6
    """RoPE base. Larger for longer contexts."""
    rope_scaling: Literal["none", "yarn"] = "none"
    """yarn (arXiv 2309.00071) stretches the slow frequencies: to extend the context of a checkpoint, or for a checkpoint that was published stretched."""
    rope_factor: Annotated[float, COUNT] = 1.0
    """yarn: how many times longer the context becomes (DeepSeek-V3: 40). Above 1 with yarn, else 1."""
    rope_original_len: Annotated[int, Range(1, TOKENS)] = 4096
    """yarn: the context the unstretched frequencies were trained for."""
    rope_beta_fast: Annotated[float, POSITIVE] = 32.0
    """yarn: a pair that turns more often than this in the original context keeps its frequency."""
    rope_beta_slow: Annotated[float, POSITIVE] = 1.0
    """yarn: a pair that turns less often than this is slowed by the whole factor; those in between, by a part of it."""
    rope_truncate: bool = True
    """yarn: round the ends of that ramp outward to whole pairs. false only for checkpoints that were made that way (gpt-oss)."""
    rope_mscale: Annotated[float, NOT_NEGATIVE] = 0.0
    """yarn: queries and keys are each scaled by m(rope_mscale) / m(rope_mscale_all_dim), m(s) = 1 + 0.1 * s * ln(rope_factor). 0 for both: by m(1). DeepSeek-V3: 1 for both."""
    rope_mscale_all_dim: Annotated[float, NOT_NEGATIVE] = 0.0
    """yarn: the divisor above. Latent attention multiplies its scores by m(rope_mscale_all_dim)^2."""
    norm_eps: Annotated[float, POSITIVE] = 1e-5
    """Epsilon of every RMSNorm except those of latent attention's latents, which is 1e-6 in all published models."""
    norm_adds_one: bool = False
    """RMSNorms multiply by one plus their weight, which begins at 0 (Qwen3-Next). Not the gated one inside linear attention."""
    tie_embeddings: bool = False
    """One matrix for embedding and head. Saves vocab_size * dim weights; usual below about 2B parameters."""
    num_dense_layers: Annotated[int, Range(0, LAYERS)] = 0
    """Leading blocks with a dense FFN instead of experts."""
    dense_hidden: Annotated[int, Range(0, 2**24)] = 0
    """Hidden width of the dense FFN blocks; needed when num_dense_layers or moe_every lead to any."""
    moe_every: Annotated[int, Range(1, LAYERS)] = 1
    """Of the blocks after the dense ones, every n-th has experts; 1 means all."""
    num_experts: Annotated[int, Range(1, EXPERTS)] = 8
    """Routed experts per MoE block; a multiple of ep."""
    top_k: Annotated[int, Range(1, EXPERTS)] = 2
    """Experts a token visits."""
    expert_hidden: Annotated[int, Range(1, 2**24)] = 128
    """Hidden width of one expert; a multiple of etp."""
    expert_biases: bool = False
    """Biases on the three projections of every routed expert (gpt-oss). Then dim must be a multiple of etp too."""
    expert_activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """Activation of routed experts. swiglu: silu(gate) * up. clamped_swiglu: gate * sigmoid(1.702 gate) * (up + 1), gate at most 7 and up within 7 of 0 (gpt-oss)."""
    shared_hidden: Annotated[int, Range(0, 2**24)] = 0
    """Hidden width of the shared expert that every token visits; 0 for none."""
    shared_gate: bool = False
    """Scale the shared expert by a learned sigmoid gate (Qwen2-MoE)."""
    score_function: str = "softmax"
    """How the router's logits become routing weights. {components}"""
    router_bias: bool = False
    """A learned bias on the router's logits (gpt-oss). Unlike bias_update_rate's, it has a gradient and affects the weights."""
    norm_topk: bool = True
    """Scale the chosen weights of a token to sum to one."""
    route_scale: Annotated[float, POSITIVE] = 1.0
    """Factor on the routing weights, after normalisation (DeepSeek-V3: 2.5)."""
    num_groups: Annotated[int, Range(1, EXPERTS)] = 1
    """Expert groups for group-limited routing; 1 for none."""
    top_groups: Annotated[int, Range(1, EXPERTS)] = 1
    """Groups a token may choose its experts from."""
    mtp_depth: Annotated[int, Range(0, 1)] = 0
    """1: an extra block predicts the token after next (multi-token prediction, DeepSeek-V3), for a denser training signal and to draft from when decoding. It costs about a block and a head. 0 for none."""
    mtp_after_norm: bool = False
    """That block sees hidden states after the final norm, as vLLM and Megatron feed it, instead of before it. True to draft with their servers, and with model.hf unless set."""
    init_std: Annotated[float, POSITIVE] = 0.02
    """Standard deviation of the initial weights; projections back into the residual stream use init_std / sqrt(2 * num_layers)."""
    own: Own = field(default_factory=Own)


@dataclass
class Data:
    """What to train on."""

    source: Literal["stdlib", "files", "synthetic"] = "stdlib"
    """stdlib: the Python standard library's own source, found on this machine. files: what `paths` names. synthetic: counted random tokens, for benchmarks."""
    paths: list[str] = field(default_factory=list)
    """For source = "files": files, folders, globs, or folders of token shards (`titanmoe tokenize`, for real runs). Each entry is one source of the mix."""
    weights: Annotated[list[float], NOT_NEGATIVE] = field(default_factory=list)
    """Share of the samples that each entry of `paths` gives, in any unit. Empty: by number of tokens, so that all end an epoch together."""
    format: str = "auto"
    """Format of the files in `paths`. auto goes by their extensions: name one where these mislead, and for chats. Token shards are recognised by their manifest. {components}"""
    tokenizer: str = "bytes"
    """bytes needs no file. Otherwise a Hugging Face tokenizer.json or its folder. Not set: that of model.hf, if it has one. Token shards bring their own."""
    chat_template: str = ""
    """For chats and preferences, a Jinja file. Empty: the tokenizer folder's own. Checkpoints and exports have the one that was used."""
    label_weights: bool = False
    """Read how much each label counts, for training.objective = "weighted_cross_entropy": in a chat, each message's `weight` (1 unless given). Without it a weight must be 0, for an answer that is not to be learned, or 1."""
    bad_lines: Literal["error", "skip"] = "error"
    """What to do with a line that is not UTF-8, not JSON or lacks the field. error: stop, and name the line. skip: leave it out, and report how many there were."""
    max_document_mb: Annotated[int, Range(1, 2**20)] = 128
    """Maximum size in MiB, uncompressed, of a text file, a line of JSONL or a value of Parquet; anything longer is an error, whatever bad_lines says. It keeps a small compressed file from filling the memory. Raise it for longer documents: reading one takes several times its size."""
    cache: str = "cache"
    """Folder for the token shards that a run makes of text, JSONL and Parquet at its first start; below job.dump_folder unless absolute. For large sets run `titanmoe tokenize` beforehand."""
    packing: Literal["stream", "documents", "best_fit"] = "stream"
    """How documents fill seq_len positions. stream: cut anywhere, and tokens see the documents before their own: fastest, usual in pre-training. documents: the same cuts, but each document attends, counts positions and predicts within itself. best_fit: the same, but whole documents are packed into few sequences and only longer ones are cut, at the price of some padding: for fine-tuning and where cut documents hurt, and the default for chats and preferences (format = "chat" or "preference", and token shards of them)."""
    long_chats: Literal["drop", "cut", "refuse"] = "drop"
    """What becomes of chats longer than training.seq_len under packing = "best_fit". drop: they are left out. cut: each is cut after its last answer that fits, so that it keeps its system prompt and first turns, and is left out if its first answer does not fit. refuse: the run does not start. The header and the report say how many there are and how much is lost."""
    share_prefixes: bool = False
    """Compute the prompt of a pair of answers once, and let both go on from it. Loss and gradients are the same; a prompt of 3/4 of the length saves 3/8 of the tokens, and pairs of that much more length fit into seq_len. For format = "preference" (docs/fine-tuning.md). What counts tokens counts the prompt once, too: balance losses, capacities and biases of experts (docs/moe.md)."""
    balance_work: bool = False
    """Distribute a step's samples so that attention's work, which grows with the squares of documents' lengths, is even over data ranks and microbatches. For packing = "documents" or "best_fit" with few long documents among many short ones."""
    workers: Annotated[int, Range(0, 1024)] = 0
    """Processes per rank that read samples. 0: a thread of the rank does it, which is enough while data_wait_s (docs/metrics.md) is near 0."""
    prefetch: Annotated[int, Range(1, 2**16)] = 2
    """Steps to read ahead, for each worker if there are any. More where reading is uneven, at the price of memory."""
    skip_steps: list[str] = field(default_factory=list)
    """Steps whose batches are passed over, such as ["120", "130-140"]: they make no update, and the run goes on with the next step. For batches that spoiled a run: resume it from before them; `events.jsonl` names the steps that `optimizer.skip_spikes` skipped. A run that passes over a step equals one that skipped it. Empty: none."""
    fields: list[str] = field(default_factory=list)
    """Where the entries of `paths` name their text differently: one such field for each entry, in place of `field`. Empty: `field` for all."""
    field: str = "text"
    """The field of each JSONL or Parquet record that holds the text; chats have theirs in "messages" unless this says otherwise."""


@dataclass
class Answers:
    """Questions with choices, answered while training goes on, under the run's own mapping, as lm-evaluation-harness would (docs/evaluate.md). It does not affect training."""

    paths: list[str] = field(default_factory=list)
    """JSONL files, each a task by the file's name: {"question": "The capital of Norway is", "choices": ["Paris", "Oslo"], "answer": 1} with `answer` counted from 0."""
    interval: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between two scorings; the last step has one too. 0: none."""
    delimiter: str = " "
    """What stands between a question and a choice; the harness calls it target_delimiter."""


@dataclass
class Validation:
    """Loss on data that is not trained on, under the run's own mapping. It does not affect training."""

    interval: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between validations; the last step has one too. 0: none."""
    steps: Annotated[int, NOT_NEGATIVE] = 10
    """Batches of global_batch_size samples per validation, the same ones each time. 0: the whole set."""
    paths: list[str] = field(default_factory=list)
    """What to validate on, as in data.paths; each entry has an equal share of `steps`."""
    held_out: Annotated[int, NOT_NEGATIVE] = 0
    """Keep every n-th document of the training data, such as every 100th, out of training and validate on it, even while interval = 0; of a source with fewer documents, such as a single file of text, the last n-th of its tokens. 0: keep none; give paths."""
    answers: Answers = field(default_factory=Answers)


@dataclass
class Training:
    """How long, how much at a time, in which precision."""

    steps: Annotated[int, Range(1, derived=True, instead=NO_STEPS)] = 100
    """Optimizer steps of the whole run. The schedule ends with them. -1: as many as `epochs` take, which is the default where those are set."""
    epochs: Annotated[int, Range(0, EPOCHS)] = 0
    """In place of `steps`: how often every sequence of every source is trained on, for fine-tuning (docs/data.md). A run says how many steps that is, and --print-config too. 0: `steps` says how long, and sources that end start over."""
    seq_len: Annotated[int, Range(1, TOKENS)] = 256
    """Tokens per sample; a multiple of tp * cp."""
    local_batch_size: Annotated[int, Range(1, TOKENS)] = 1
    """Samples per microbatch on one data rank. As large as memory allows; grouping-dependent terms (see docs/moe.md) see it."""
    global_batch_size: Annotated[int, Range(1, TOKENS, derived=True)] = -1
    """Samples per optimizer step over all data ranks; the number of microbatches follows. -1: one microbatch per data rank."""
    dtype: Dtype = "float32"
    """Dtype that parameters are stored and updated in. float32 for training, float64 to compare mappings."""
    mixed_precision_param: Dtype = "bfloat16"
    """Dtype that parameters are computed with, never wider than dtype. bfloat16 for speed; equal to dtype to switch mixed precision off."""
    mixed_precision_reduce: Dtype = "float32"
    """Dtype that gradients are reduced in over data ranks. bfloat16 halves the traffic and loses bits."""
    freeze: list[str] = field(default_factory=list)
    """Parameters that are not trained, by name, such as ["embed.*", "layers.*.attention.*"]: * stands for anything. They have no gradient and no moments, do not count in the gradient norm, and are stored in mixed_precision_param (a router in float32 at least). A frozen router keeps its selection bias too, and balance losses then only act on what comes before it. docs/adapters.md. Empty: everything is trained."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses a GPU if there is one."""
    objective: str = "cross_entropy"
    """What the run minimises, as a sum over the step that is divided once by what it counts. {components}"""
    mtp_weight: Annotated[float, NOT_NEGATIVE] = 0.3
    """Factor on the loss of multi-token prediction, where model.mtp_depth is 1 (DeepSeek-V3: 0.3, late in training 0.1)."""
    loss_chunks: Annotated[int, Range(0, 2**24, derived=True)] = -1
    """Slices of the vocabulary that the loss goes through, so that the logits are never whole. -1: as many as keep a slice's logits within 32 MiB on CPUs, 1 GiB on GPUs. More to save memory; 0 keeps the logits, which saves backward one product with the head."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Weights, data order and router noise are functions of it, the same under every mapping."""
    deterministic: bool = False
    """Two runs of one mapping give the same bits. Slower on GPUs."""
    gc_every: Annotated[int, COUNT] = 50
    """Steps between garbage collections, which all ranks make together so that none stalls the others."""
    first_step_timeout_s: Annotated[int, Range(1, SECONDS)] = 600
    """How long a collective may take until the first step is done (start-up, compilation)."""
    timeout_s: Annotated[int, Range(1, SECONDS)] = 120
    """How long a collective may take after that, before the run is considered hung."""
    watch: bool = True
    """Report which rank is late when a run hangs, and end all ranks (docs/reliability.md). false if you want to stop a rank in a debugger."""
    stragglers: bool = True
    """With watch: measure how long every rank computes, reads data and waits, and name a rank, or a link between two, that the others wait for (docs/reliability.md). It sends one small message every 16 steps, and on suspicion small messages between pairs of ranks."""


@dataclass
class Distillation:
    """Learning from another model's distributions, with training.objective = "distillation" (docs/distillation.md)."""

    teacher: str = ""
    """The model to learn from: a folder in Hugging Face's format, a run or a checkpoint, with the vocabulary of this model and the tokenizer of the data. It is computed in each step, under the run's own mapping, and is not trained."""
    scores: str = ""
    """In place of `teacher`: what it says, counted once and kept beside the token shards, by the name that `titanmoe score --top` gives it. Such a run has no second model in memory."""
    top: Annotated[int, COUNT] = 64
    """How many ids of each position are kept of the teacher's distribution, the likeliest; all others are one more class. model.vocab_size keeps everything. More costs memory: a number for each, per token."""
    temperature: Annotated[float, Range(0, without_low=True)] = 1.0
    """What the logits of both are divided by. Above 1 unlikely tokens count for more."""
    weight: Annotated[float, Range(0, 1, without_low=True)] = 1.0
    """Share of the divergence from the teacher in the loss; the rest is cross-entropy."""


@dataclass
class DPO:
    """For training.objective = "dpo" (arXiv 2305.18290): pairs of answers, and the model that the run begins from as the reference (docs/fine-tuning.md)."""

    beta: Annotated[float, POSITIVE] = 0.1
    """How much a gain over the reference counts, in nats. Larger keeps the model closer to the reference. 0.1 is usual, 0.01 to 0.5 are tried."""


@dataclass
class LoRA:
    """Low-rank adapters (arXiv 2106.09685) on frozen weights: y = W x + alpha / rank * B A x (docs/adapters.md)."""

    rank: Annotated[int, Range(0, 2**16)] = 0
    """Rows of A. Above 0 only the adapters are trained. 8 to 64 is usual, with ten times the learning rate of full fine-tuning. 0: none."""
    experts_rank: Annotated[int, Range(1, 2**16, derived=True)] = -1
    """The same for routed experts, of which each has adapters of its own. -1: rank // model.top_k, at least 1, so that a token meets as many adapter weights in experts as elsewhere."""
    alpha: Annotated[float, POSITIVE] = 32.0
    """Each adapter's product is multiplied by alpha divided by its own rank."""
    targets: list[str] = field(default_factory=list)
    """Matrices that have adapters, by pattern, such as ["*.attention.*", "*.experts.*"]: among attention's projections, dense and shared feed-forward networks and routed experts. Empty: all of them."""


@dataclass
class Optimizer:
    """How gradients change the weights."""

    name: str = "adamw"
    """Which optimizer. {components}"""
    lr: Annotated[float, Range(0, 1, without_low=True, reason=FAR_BELOW_ONE)] = 3e-4
    """Peak learning rate. Smaller for larger models. The header warns above 2e-2, and for muon's matrices above 2e-1."""
    beta1: Annotated[float, BELOW_ONE] = 0.9
    """Decay of the first moment, AdamW's running mean of gradients. Nearly always 0.9."""
    beta2: Annotated[float, BELOW_ONE] = 0.95
    """Decay of the second moment. 0.95 for large batches, 0.999 for small ones."""
    eps: Annotated[float, POSITIVE] = 1e-8
    """Added to the root of the second moment. A larger one stabilises steps where gradients are tiny."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decoupled weight decay. 0.1 is usual; 0 for none."""
    decay_all: bool = False
    """Also decay norms, biases and router weights. By default they are not decayed, as is usual."""
    max_grad_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Clip the global gradient norm to this; 0 measures the norm without clipping."""
    skip_spikes: Annotated[float, NOT_NEGATIVE] = 0.0
    """Skip the update of a step whose loss or gradient norm is not finite, or more than this many standard deviations above the mean of the steps before: 6 is usual. Weights, moments and biases stay as they are, the learning rate schedule goes on, and `events.jsonl` names the samples. For long runs on data that nobody has read. 0: every step is trained on, and only a number that is not finite ends the run."""
    skip_window: Annotated[int, Range(4, 2**16)] = 128
    """With skip_spikes: over how many steps the mean and the deviation are taken, not counting skipped ones. Until there are half as many, only steps that are not finite are skipped."""
    skip_limit: Annotated[int, COUNT] = 10
    """With skip_spikes: this many skips in a row end the run, because bad batches do not come in such numbers."""
    momentum: Annotated[float, BELOW_ONE] = 0.95
    """muon only: decay of the running mean of gradients. 0.95 is usual."""
    nesterov: bool = True
    """muon only: a matrix moves by its momentum as it would be after one more such gradient. Nearly always."""
    ns_coefficients: Literal["classic", "polar_express"] = "classic"
    """muon only: classic steps leave singular values between 0.68 and 1.13, whatever their number; polar_express steps come closer to 1 with each, and amplify rounding more: 6 of them are within 0.3 %."""
    ns_steps: Annotated[int, Range(1, 20)] = 5
    """muon only: Newton-Schulz steps. 5 is usual."""
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """muon only: what Newton-Schulz steps compute in, and matrices are sent in. They are in float64 where gradients are."""
    ns_eps: Annotated[float, NOT_NEGATIVE] = 1e-7
    """muon only: this times the norm of the whole model's gradient is added to the norm that a matrix is divided by. A gradient that is only rounding then stays small."""
    adjust_lr: Literal["original", "match_rms"] = "match_rms"
    """muon only: by what to multiply the rate of a matrix. match_rms: 0.2 sqrt(larger dim), with which weights move as far as with AdamW, so that rates of AdamW fit; original: sqrt(rows / columns), at least 1."""
    by_head: bool = False
    """muon only: every head's queries, keys and values are matrices of their own. By default those of all heads are one."""
    router_matrix: bool = False
    """muon only: take routers for matrices too. By default AdamW trains them: their rows are experts, and Muon would move those that are seldom chosen, whose gradients are mostly noise, as far as all others."""
    adamw_lr: Annotated[float, Range(0, 1, without_low=True, reason=FAR_BELOW_ONE, derived=True)] = -1.0
    """muon only: peak rate of what AdamW trains: embeddings, head, norms, biases, routers. -1: lr. Needed with adjust_lr = "original", whose rates are some 50 times those of AdamW."""
    moments_dtype: Literal["as_weights", "bfloat16"] = "as_weights"
    """bfloat16 halves the memory of moments and momentum, which are then updated in float32 and rounded."""
    stochastic_rounding: bool = False
    """Round what is kept in bfloat16 (weights with training.dtype = "bfloat16", moments with moments_dtype) up or down at random, so that the mean is right. To the nearest, updates below 1/512 of a weight are lost. Every mapping and a resumed run round alike."""
    qk_clip: Annotated[float, NOT_NEGATIVE] = 0.0
    """QK-Clip: after a step in which an attention logit was above this, the weights that make the head's queries and keys are scaled down so far that it would not have been. Kimi-K2 used 100, with Muon, whose logits can grow without end. 0: none. Refused with model.qk_norm, which undoes the scaling."""
    qk_clip_every: Annotated[int, COUNT] = 1
    """With qk_clip: only in every so many steps are logits measured and clipped. Measuring costs about half a forward pass of attention's scores, and with cp a message of the keys."""
    qk_clip_measure: Literal["exact", "bound"] = "exact"
    """How the largest logits are measured, for metrics.max_logit_every too. bound: by the log-sum-exp that attention's kernels have anyway, which costs next to nothing; it is above the largest by at most the ln of how many keys a query sees, so that heads are clipped up to that much earlier, and `max_logit` is the bound."""
    groups: list[dict] = field(default_factory=list)
    """Parameters with a peak rate or a weight decay of their own: a table `[[optimizer.groups]]` for each group, with `match`, a list of patterns of names as in training.freeze, and `lr` or `weight_decay` or both. Two groups may not match the same name."""
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"
    """fused is fastest; for_loop needs the least extra memory."""
    offload: bool = False
    """Keep both moments in the host's memory (twice training.dtype for each parameter of the rank), page-locked for a GPU. They visit the device for the update, 64 MiB or one larger parameter at a time, and the device holds three of these; copies overlap with the update. It changes no number, and checkpoints are the same. For runs short of memory whose steps are long; not run on GPUs yet."""


@dataclass
class LRSchedule:
    """Learning rate over the steps."""

    warmup_steps: Annotated[int, NOT_NEGATIVE] = 10
    """Steps of linear warm-up from 0. More for larger rates."""
    decay: Literal["cosine", "linear", "wsd", "none"] = "cosine"
    """cosine or linear: over all steps after warm-up; wsd: stay at the peak and decay linearly at the end; none: stay at the peak."""
    decay_fraction: Annotated[float, FRACTION] = 0.2
    """wsd only: the last part of the steps, in which the rate decays."""
    min_ratio: Annotated[float, FRACTION] = 0.1
    """Floor, as a fraction of the peak."""


@dataclass
class Experts:
    """How the experts are mapped onto the ranks of a pipeline stage. edp = stage ranks / (ep * etp) data ranks hold the same experts."""

    ep: Annotated[int, Range(1, RANKS)] = 1
    """Expert parallel: ranks that divide up the experts. May span tp, cp and dp. Raise it first when expert weights do not fit."""
    etp: Annotated[int, Range(1, RANKS)] = 1
    """Expert tensor parallel: ranks that split each expert's hidden dim. Only for few, large experts; need not divide tp."""
    edp: Annotated[int, Range(1, RANKS, derived=True)] = -1
    """Ranks that shard the state of the same experts. -1: derived. A value set here is checked, and adjusted as dp_shard is."""
    edp_replicate: Annotated[int, Range(1, RANKS, derived=True)] = -1
    """Groups of those that replicate it (HSDP). -1: the greatest common divisor of dp_replicate and what ep * etp leaves."""


@dataclass
class Parallelism:
    """How attention, dense layers and the vocabulary are mapped onto the ranks: pp x dp_replicate x dp_shard x cp x tp = world size."""

    dp_replicate: Annotated[int, Range(1, RANKS)] = 1
    """Groups of ranks that replicate the sharded state (HSDP). Use it when one replica fits a node or a few. A run that is restarted on another number of ranks lowers it if it has to (docs/multi_node.md)."""
    dp_shard: Annotated[int, Range(1, RANKS, derived=True)] = -1
    """Ranks that shard parameters, gradients and optimizer state (FSDP2). -1: derived. A value set here is checked, and adjusted when a run is restarted on another number of ranks."""
    cp: Annotated[int, Range(1, RANKS)] = 1
    """Context parallel: ranks that split each sequence. For long sequences."""
    tp: Annotated[int, Range(1, RANKS)] = 1
    """Tensor parallel with sequence parallel. Keep it inside a node."""
    pp: Annotated[int, Range(1, RANKS)] = 1
    """Pipeline parallel: ranks that each run some of the layers. For models that do not fit otherwise."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Free gathered weights between forward and backward: always for the least memory, never to save an all-gather. auto: always without a pipeline, never with one (each microbatch would gather again; all of a rank's stages then stay gathered). Experts with edp = 1 have nothing to gather: unless always is set, one copy of them in mixed_precision_param lives from a step's first forward to its last backward, 2 bytes for each parameter in bfloat16, none where training.dtype is the same."""
    reduce_once: bool = False
    """Without a pipeline, with several microbatches per step: sum gradients over the microbatches on each rank and send them once, after the last, not once per microbatch (a pipeline always does that). It needs memory for gradients that are not sharded, in mixed_precision_reduce: 4 bytes for each parameter of attention, dense layers and vocabulary over tp, and for each parameter of the rank's experts (all experts over ep and etp). Off by default, because sharding is usually chosen where that does not fit, and the messages of one unit overlap with the backward of the next: turn it on if they take longer than that and the memory is there."""
    cp_kind: Literal["ring", "ulysses", "allgather"] = "ring"
    """How context parallel attention works. ring: least memory, any number of heads. ulysses: fewest bytes while cp <= heads / tp. allgather: simplest, keys and values whole on every rank."""
    cp_placement: Literal["zigzag", "contiguous"] = "zigzag"
    """zigzag gives each cp rank an early and a late piece of the sequence, so that the work of causal attention is even."""
    attention_backend: Literal["auto", "torch", "plain"] = "auto"
    """Whose implementation of attention runs, with or without cp. auto: on GPUs torch's wherever it supports what is asked for (its ring, flex_attention for documents, windows and sinks), ours elsewhere. torch: torch's or a refusal; on CPUs only the ring. plain: always ours, to compare or where torch's fails."""
    attention_kernel: Literal["auto", "fa2", "fa3", "fa4", "cudnn"] = "auto"
    """Which kernel computes causal attention in 16 bits on GPUs, whole or in pieces (ring, blocks between windows). auto: on Hopper FlashAttention-3 and on B200 FlashAttention-4 where its package is installed and torch is 2.13 or newer, else cuDNN's where it takes the widths of heads and training.deterministic is off, else FlashAttention-2, which other GPUs always get. Any other value: that kernel or a refusal."""
    node: Annotated[int, Range(1, RANKS, derived=True)] = -1
    """Ranks per node, in rank order; used by moe.dispatcher = "hierarchical", and to refuse symm_mem and deepep on groups that they do not serve. Fewer than a machine has if some of its ranks are closer to each other. -1: as many as torchrun started on this machine."""
    experts: Experts = field(default_factory=Experts)


@dataclass
class Pipeline:
    """How microbatches run through the stages; used when parallelism.pp > 1."""

    schedule: Literal[
        "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """1F1B: the usual choice. Interleaved1F1B: smaller bubble for more messages. The zero-bubble kinds and DualPipeV split backward and fill the bubble, for more memory. The bubble is printed at start."""
    schedule_csv: str = ""
    """A file with one row of actions per pipeline rank (0F0, 0B0, ...), instead of `schedule`."""
    virtual_stages: Annotated[int, Range(1, 1024, derived=True)] = -1
    """Stages per rank. -1: 1 for GPipe and 1F1B, 2 for the others."""
    layers_per_stage: Annotated[list[int], Range(0, LAYERS)] = field(default_factory=list)
    """Layers of each stage, first to last. Empty: split by cost, including embedding and head."""


@dataclass
class MoE:
    """Router, balance and dispatch. What belongs to the architecture (top_k, score_function, ...) is in [model]."""

    dispatcher: str = "alltoall"
    """How rows get to their experts and back. {components}"""
    symm_mem_factor: Annotated[float, COUNT] = 2.0
    """symm_mem only: rows that a rank has room for, as a multiple of what arrives under even routing. A step in which a rank would receive more is rerun exactly, by alltoall (metric overflow_reruns): raise it if that happens often, lower it to save memory. From ep on it never happens."""
    overlap: Literal["none", "halves", "pairs", "auto"] = "none"
    """What else is computed while routed tokens are on their way to experts and back; no number changes. none: the shared expert alone. halves: each block takes its microbatch's samples in two halves, and attention or experts of one are computed while the other's tokens are in flight. For experts whose tokens take long beside attention and products, with 2 samples or more in a microbatch; products are half as large, gradients of a block's weights are summed twice, and there can be no capacity. pairs: with DualPipeV, or a file with pairs such as (0F4;3B1)OVERLAP_F_B, the forward of one microbatch and the backward of another take turns. For experts connected by a network that is slow compared with their products; needs ep x etp > 1. Both need the dispatcher alltoall or hierarchical. auto: on GPUs whatever the planner finds fastest for them and the run's mapping, by times that no run on GPUs has confirmed, and the header says what it chose and why; none on CPUs."""
    capacity_factor: Annotated[float, NOT_NEGATIVE] = 0.0
    """0 never drops. Above 0 each expert takes at most ceil(capacity_factor * top_k * tokens / num_experts) per scope."""
    drop_policy: Literal["probability", "position"] = "probability"
    """Over capacity, drop the least probable tokens (weights compared in bfloat16, the last of equals first) or simply the last ones."""
    capacity_scope: Literal["sub_sequence", "full_sequence"] = "sub_sequence"
    """sub_sequence: each rank drops among its own tokens, without extra communication. full_sequence: per sample, the same under every mapping."""
    pad_to_capacity: bool = False
    """Fill every expert's bin up to capacity: static shapes, even splits, no host sync."""
    router_dtype: Literal["float32", "float64"] = "float32"
    """Precision of the gating product and scores; it can only widen them."""
    router_product: Literal["auto", "float32"] = "auto"
    """How the gating product is computed where its input is bfloat16. auto: on GPUs in bfloat16 parts of the weights, with float32 sums, several times as fast and as exact as float32 (docs/moe.md). float32: a float32 product, to compare with it."""
    jitter: Annotated[float, BELOW_ONE] = 0.0
    """Multiply the router's input by uniform noise of 1 +- jitter (exploration; 0.01 is usual)."""
    force_balance: bool = False
    """Benchmarks only: send tokens round-robin, whatever the router says."""
    aux_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Load-balance loss per microbatch (Switch). 0.01 to 0.001 is usual."""
    aux_loss_sequence: Annotated[float, NOT_NEGATIVE] = 0.0
    """Load-balance loss per sample (DeepSeek-V3: 0.0001)."""
    aux_loss_global: Annotated[float, NOT_NEGATIVE] = 0.0
    """Load-balance loss over the whole step's tokens so far: lets experts specialise by domain."""
    z_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Squared log-sum-exp of the router's logits: keeps them small. 0.001 is usual."""
    balance_losses: list[str] = field(default_factory=list)
    """Further balance losses, each with its coefficient, such as ["my_package.my_losses:Mine 0.001"]; those with a key above are refused here. All there are: {components}"""
    bias_update_rate: Annotated[float, NOT_NEGATIVE] = 0.0
    """Aux-loss-free balance: after each step an expert's selection bias moves by this much against its load (DeepSeek-V3: 0.001)."""
    grouped_mm: Literal["auto", "grouped", "loop"] = "auto"
    """How experts multiply. auto uses torch's grouped product where dtype and sizes allow, else the plain loop."""
    expert_dtype: Literal["compute", "fp8", "fp8_emulated"] = "compute"
    """Precision that experts multiply in. compute: training.mixed_precision_param. fp8: in 8 bits with a scale per row, on Hopper GPUs, for large experts; gradients of the weights, router and everything else are unchanged. fp8_emulated: the same roundings on any device, slowly, to see what they do to a loss."""
    accumulate_weight_gradients: bool = False
    """Add the gradients of the experts' weights to their sum over microbatches inside the products that compute them, instead of one by one in a pass of its own; they are then not rounded in between. For experts that no other data rank shares (edp = 1). On an H200 its kernel is slower with one microbatch a step (docs/kernels.md)."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """How routing, rows and activations are computed. auto uses Triton kernels on GPUs if Triton is installed, else torch's operations. Linear attention in 16 bits uses those of fla-core, if that is installed (pip install "titanmoe[fla]"). torch to compare with them or to rule them out."""


@dataclass
class ActivationCheckpoint:
    """What backward recomputes instead of saving. It never changes a number."""

    mode: Literal["none", "full", "full_except_dispatch", "selective", "moe"] = "none"
    """none: recomputes nothing, fastest. full: recomputes full blocks, least memory. full_except_dispatch: as full, but saves the routed tokens that experts received from other ranks, so that none is sent twice. selective: saves matrix products (except those that expand latent attention's latents), attention and what came over the network, recomputes the cheap rest. moe: recomputes only the MoE half of a block, where most activations are."""
    every: Annotated[int, COUNT] = 1
    """Apply to every n-th block."""


@dataclass
class Compile:
    """torch.compile, per part of a block: attention, dense layer, head, and a MoE layer from router to combine, its messages included. The dispatcher deepep, 8-bit experts, moe.overlap, activation_checkpoint.mode moe and full, and schedules that split backward leave the MoE layer but its shared expert uncompiled."""

    enable: bool = False
    """Worth its start-up (a minute or more) on long runs. The header says how the MoE layers are compiled."""
    backend: str = "inductor"
    """inductor for speed; aot_eager to look for graph breaks."""


@dataclass
class Metrics:
    """What a run reports. The console line and metrics.jsonl have the same numbers."""

    log_every: Annotated[int, COUNT] = 1
    """Steps between console lines."""
    console: Literal["auto", "live", "lines"] = "auto"
    """live: one panel that stays in place. lines: one line per report, for files and log collectors. auto: live on a terminal."""
    experts_every: Annotated[int, Range(0, derived=True)] = -1
    """Steps between lines of experts.jsonl, which hold the load of every expert of every layer. -1: about 500 lines in a whole run. 0: none, if even that is too much."""
    max_logit_every: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between reports of the largest attention logit of each layer, as `max_logit`: a logit that keeps growing is an early sign of divergence. It costs a product of queries and keys for itself, unless optimizer.qk_clip_measure says otherwise. 0: none. With optimizer.qk_clip it is reported whenever it is measured."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run's folder."""
    wandb: str = ""
    """Project of Weights & Biases to report to as well; needs its package (pip install "titanmoe[wandb]"). Empty: none."""
    peak_tflops: Annotated[float, NOT_NEGATIVE] = 0.0
    """Peak TFLOP/s of one device at the compute dtype, for MFU. 0: known GPUs are looked up, else no MFU is shown."""


@dataclass
class Profile:
    """A closer look at single steps (docs/watching.md). Files go to profile/ in the run's folder."""

    steps: Annotated[list[int], COUNT] = field(default_factory=list)
    """Steps to trace with torch's profiler, such as [10, 11]; one file each. Skip the first few, which are not typical. Empty: none."""
    ranks: Annotated[list[int], Range(0, RANKS)] = field(default_factory=lambda: [0])
    """Ranks that trace. One of each pipeline stage shows a pipeline; all of them make a lot of files."""
    memory: Literal["none", "oom", "steps"] = "none"
    """GPUs only: every allocation with its stack, as a snapshot when memory runs out (oom), or then and after each of `steps`. Costs a few percent of speed while it is on."""


@dataclass
class Debug:
    """What to do about numbers that go wrong: which rank, which layer, which samples (docs/reliability.md)."""

    replicas_every: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between comparisons of the bits of everything that several ranks hold (replicas of weights and moments, routers, balance biases, counts), so that a bit that flips in one replica is found and its rank is named. They are also compared before each checkpoint. 100 has no noticeable cost. 0: never."""
    on_difference: Literal["stop", "restore"] = "stop"
    """When these bits differ. stop: end the run; a restart by the launcher then resumes from the last checkpoint, which was compared before it was saved. restore: go back to that checkpoint at once, up to three times."""
    rerun: bool = False
    """When a step's loss or gradient norm is not finite or far above those before (optimizer.skip_spikes, else 6 deviations), or replicas differ: repeat its forward and backward, and report whether the bits are the same or on which rank they are not. The second pass counts. Needs training.deterministic."""
    culprit: Literal["none", "name"] = "none"
    """When a step's loss or gradients are not finite: repeat it and report which layer's output or gradient was the first, on which rank and in which samples."""


@dataclass
class Checkpoint:
    """Saving and resuming a run, under the same mapping or any other (docs/checkpoint.md)."""

    enable: bool = True
    """Save into the run's folder: every `interval` steps, at the end, and on SIGTERM or SIGINT. A run of the same name then resumes where it stopped. false: save nothing and begin anew each time, for benchmarks and trials."""
    folder: str = "checkpoints"
    """Where checkpoints go: a folder within the run's own, or an absolute path in which every run gets a folder of its own name."""
    interval: Annotated[int, NOT_NEGATIVE] = 500
    """Steps between checkpoints; 0 saves only at the end and on a signal. As many as you can afford to repeat."""
    save: Literal["async", "sync"] = "async"
    """async copies the state to CPU memory and writes it while training continues. sync waits for the disk and needs no copy."""
    keep_last: Annotated[int, NOT_NEGATIVE] = 3
    """How many of the latest to keep; 0 keeps all."""
    keep_every: Annotated[int, NOT_NEGATIVE] = 0
    """Also keep those of every n-th step, e.g. 10000, for evaluation later; 0 for none."""
    load: str = "auto"
    """auto: the last complete checkpoint of this run, if it has any; if it has some and none can be used, the run is refused. none: start from scratch, in a folder of its own. A step such as 1200: that one of this run. A path: that checkpoint, or the latest of that run, unless this run has one of its own."""
    model_only: bool = False
    """Take only the weights from a checkpoint that `load` names by path; optimizer, step and data start from scratch."""
    initial_hf: str = ""
    """A model in Hugging Face's format (a folder, a name on the hub or a URL, as model.hf) to take the first weights from, while the run has no checkpoint of its own. Not set: model.hf. "" with model.hf: random weights of its shape."""
    initial_adapter: str = ""
    """A folder of PEFT (adapter_config.json, adapter_model.safetensors) to take the first adapters from, while the run has no checkpoint of its own; lora.rank, experts_rank, alpha and targets have to be what it has (docs/adapters.md). Empty: new adapters, which change nothing yet."""
    verify: bool = True
    """Compare every file's checksum before loading. false only where reading twice costs too much."""
    timeout_s: Annotated[int, COUNT] = 1800
    """How long a save may take, on the slowest rank. After that the run ends, naming the rank and the file that it is still writing. Set it to several times what a save usually takes."""


@dataclass
class Config:
    """A run."""

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
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profile: Profile = field(default_factory=Profile)
    debug: Debug = field(default_factory=Debug)
    components: Components = field(default_factory=Components, repr=False, compare=False)
    """No table of a recipe: what the names of components in it stand for."""
