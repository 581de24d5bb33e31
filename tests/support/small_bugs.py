"""Table of small bugs, each of which a test has to notice. tests/support/plant_small_bugs.py plants them one by one.

These are bugs of a single line; faults between ranks are in tests/support/planted_faults.py.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """Bug to plant, and the tests that should notice it."""

    tests: str
    """Arguments of pytest for the cheapest test that should notice the bug."""
    function: str
    """Qualified name, without its module, of the function or constant in titanmoe/ that gets the bug."""
    breaks: str
    old: str
    """Expression or statement that occurs once in the function, however it is formatted there."""
    new: str


PARITY, PAIRS = "tests/test_parity.py", "tests/test_parity.py::test_every_pair_of_choices_on_4_ranks"
NO_GROUP = f"{PARITY}::test_smaller_worlds[1]"

# By tests to run: the function, what the bug breaks, the code as it is, and the code with the bug.
TABLE: dict[str, list[tuple[str, str, str, str]]] = {
    "tests/moe/test_router.py": [
        (
            "Router._choose",
            "of equal scores the higher expert number wins",
            "scores_TE.sort(dim=-1, descending=True, stable=True).indices",
            "model.num_experts - 1 - scores_TE.flip(-1).sort(dim=-1, descending=True, stable=True).indices",
        ),
        (
            "Router._plain",
            "the selection bias leaks into the weights",
            "self.score_function.weights(logits_TE, scores_TE, chosen_TK)",
            "self.score_function.weights(logits_TE, scores_TE + self.expert_bias, chosen_TK)",
        ),
        (
            "Router._best_groups",
            "a group of sigmoid experts counts only its best score",
            "min(self.score_function.scores_per_group, scores_TPp.shape[-1])",
            "1",
        ),
        ("Router._plain", "no route_scale", "weights_TK * model.route_scale", "weights_TK"),
        (
            "Router._logits",
            "gating in the dtype of the activations",
            "torch.promote_types(x_TD.dtype, self.wide)",
            "x_TD.dtype",
        ),
        (
            "Router.begin_step",
            "the same jitter in every layer",
            'counter_rng.key("jitter", self.seed, step, self.layer)',
            'counter_rng.key("jitter", self.seed, step)',
        ),
    ],
    f"tests/moe/test_router.py {NO_GROUP}": [
        (
            "Router._plain",
            "no gradient through the sum that normalises the weights",
            "weights_TK.sum(-1, keepdim=True)",
            "weights_TK.sum(-1, keepdim=True).detach()",
        )
    ],
    "tests/moe/test_router.py tests/train/test_validation.py": [
        (
            "Router._logits",
            "jitter in validation too",
            "options.jitter > 0 and torch.is_grad_enabled()",
            "options.jitter > 0",
        )
    ],
    "tests/moe/test_router_product.py": [
        (
            "plain_bfloat16_terms",
            "the router's weights lose their last 8 bits",
            "(rest - second).bfloat16()",
            "torch.zeros_like(first)",
        ),
        (
            "uses_terms",
            "the router's product by parts takes any input",
            "x_TD.dtype == torch.bfloat16 and router_dtype == torch.float32",
            "router_dtype == torch.float32",
        ),
    ],
    "tests/models/test_product_and_input.py": [
        (
            "_ProductAndInput.backward",
            "of several products only the first gives the input a gradient",
            "torch.addmm(grad_x.flatten(0, -2), grad_RN, w)",
            "torch.mm(grad_RN, w)",
        )
    ],
    "tests/moe/test_balance.py": [
        (
            "RouterOutput.score_sums",
            "sigmoid scores are not normalised",
            "self.valid_T / self.scores_TE.sum(-1) if self.normalises else self.valid_T",
            "self.valid_T",
        ),
        (
            "AuxLossGlobal.forward",
            "the global term leaves its own microbatch out",
            "self.counts_PE.cumsum(0)",
            "(self.counts_PE.cumsum(0) - self.counts_PE)",
        ),
        (
            "ZLoss.forward",
            "padding has a z term",
            "routed.logits_TE.logsumexp(-1).square() * routed.valid_T",
            "routed.logits_TE.logsumexp(-1).square()",
        ),
        (
            "_Attach.backward",
            "balance losses have no gradient",
            "coefficients.unbind()",
            "torch.zeros_like(coefficients).unbind()",
        ),
        (
            "StepCounts.record",
            "a recomputed forward counts again",
            "self.counts_MX[:, columns].index_copy_",
            "self.counts_MX[:, columns].index_add_",
        ),
    ],
    f"{PARITY}::test_smaller_worlds {PAIRS} -k sequence+z": [
        (
            "RouterOutput.choice_counts",
            "a rank's own counts are used instead of its whole sample's",
            "all_reduce(self.count_BE.to(torch.float64), self.sequence)",
            "self.count_BE.to(torch.float64)",
        )
    ],
    f"{PAIRS} -k global+bias": [
        (
            "update_expert_bias",
            "selection biases move towards the busy experts",
            "load_E.mean() - load_E",
            "load_E - load_E.mean()",
        )
    ],
    "tests/moe/test_capacity.py": [
        ("Capacity.limit", "capacity rounds down", "math.ceil", "math.floor"),
        ("over_capacity", "an expert takes one token more than its capacity", "place >= capacity", "place > capacity"),
        (
            "Capacity.forward",
            "samples share one capacity",
            "tokens.sample_T if self.full else torch.zeros_like(tokens.sample_T)",
            "torch.zeros_like(tokens.sample_T)",
        ),
    ],
    "tests/moe/test_dispatch.py": [
        (
            "AllToAll.send_counts",
            "counts go to etp ranks of another expert rank",
            "count_E.view(self.ep, 1, e).expand(-1, self.etp, -1)",
            "count_E.view(1, self.ep, e).expand(self.etp, -1, -1)",
        ),
        (
            "AllGather.gather_and_sort_choices",
            "the all-gather takes etp ranks for ep ranks",
            "self.group.rank // self.etp",
            "self.group.rank",
        ),
        (
            "Hierarchical.dispatch",
            "bins inside a node have room for only one node's rows",
            "slots_per_expert * N",
            "slots_per_expert",
        ),
    ],
    f"tests/moe/test_permute.py {NO_GROUP}": [
        (
            "permute_with_weights",
            "routers have no gradient through their weights",
            "(permute_tokens(x_TD, choice_S // K, slot_TJ, kernels), weights_S1)",
            "(permute_tokens(x_TD, choice_S // K, slot_TJ, kernels), weights_S1.detach())",
        )
    ],
    "tests/moe/test_experts.py": [
        ("Experts.products", "an expert's last bias is not weighted", "member_Re * weight_R1", "member_Re"),
        (
            "Experts.add_down_bias",
            "every etp rank adds its bias to the first columns",
            "self.etp_rank * bias_ed.shape[1]",
            "0",
        ),
        (
            "clamped_swiglu",
            "gates are clamped from below as well",
            "gate.masked_fill(gate > 7.0, 7.0)",
            "gate.clamp(-7.0, 7.0)",
        ),
    ],
    "tests/models/test_rope.py": [
        (
            "rope_angles",
            "RoPE's angles in the dtype of the activations",
            "torch.promote_types(dtype, torch.float32)",
            "dtype",
        ),
        ("rope_frequencies", "YaRN rounds its pairs where it should not", "model.rope_truncate", "True"),
    ],
    "tests/models/test_rope.py tests/models/test_latent_attention.py": [
        (
            "rope_scale",
            "no factor on cos and sin if both mscales are given",
            "yarn_mscale(model, model.rope_mscale) / yarn_mscale(model, model.rope_mscale_all_dim)",
            "1.0",
        )
    ],
    "tests/test_precision.py tests/models/test_transformer.py": [
        ("plain_norm", "norms in the dtype of the activations", "promote(x)", "x")
    ],
    "tests/checkpoint_hf/test_fields.py -k rope": [
        (
            "_read_rope",
            "YaRN's original context is that of the rope dict if a config.json has two",
            'config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", context))',
            'rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings", context))',
        )
    ],
    "tests/checkpoint_hf/test_fields.py -k left_out": [
        (
            "HF",
            "another epsilon where config.json has none",
            '{"rms_norm_eps": 1e-5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01}',
            '{"rms_norm_eps": 1e-6, "norm_topk_prob": False, "router_aux_loss_coef": 0.01}',
        )
    ],
    f"{PAIRS} -k glm4_moe": [
        (
            "Attention.forward",
            "keys are normalised with the queries' norm",
            "q, k = self.q_norm(q), self.k_norm(k)",
            "q, k = self.q_norm(q), self.q_norm(k)",
        )
    ],
    "tests/models/test_latent_attention.py": [
        (
            "LatentAttention.__init__",
            "YaRN sharpens latent attention once, not twice",
            "yarn_mscale(model, model.rope_mscale_all_dim) ** 2",
            "yarn_mscale(model, model.rope_mscale_all_dim)",
        )
    ],
    f"{PAIRS} -k yes-full-mtp": [
        ("MultiToken.add_loss", "no weight on the loss of further tokens", "self.weight * mtp_loss_BS", "mtp_loss_BS")
    ],
    "tests/models/test_transformer.py": [
        (
            "_CrossEntropy.backward",
            "labels without loss have a gradient",
            "softmax_TV * has_label_T.unsqueeze(1)",
            "softmax_TV.clone()",
        )
    ],
    "tests/test_mask.py": [
        ("sees", "a window is one position longer", "apart < window", "apart <= window"),
        ("sees", "a document sees the last token of the one before", "q < until_BL[b, k]", "q <= until_BL[b, k]"),
        (
            "_key_ranges",
            "keys at a window's edge are skipped",
            "np.minimum.accumulate(depth_Q)[np.maximum(last_K, 0)] - depth_K < window",
            "np.minimum.accumulate(depth_Q)[np.maximum(last_K, 0)] - depth_K < window - 1",
        ),
        (
            "_key_ranges",
            "a document that ends within a block of queries is seen by all of them",
            "until_K >= end",
            "until_K > first",
        ),
    ],
    "tests/parallel/test_context.py": [
        (
            "Placement.chunks_of",
            "zigzag gives a rank evenly spaced chunks",
            "2 * self.size - 1 - rank",
            "self.size + rank",
        )
    ],
    f"{PARITY}::test_windows_and_sinks_across_the_pieces_of_a_sequence": [
        (
            "ulysses_attention",
            "under ulysses every rank has the first ranks' sinks",
            "sinks_H.chunk(group.size)[group.rank]",
            "sinks_H.chunk(group.size)[0]",
        )
    ],
    "tests/parallel/test_context.py -k ring_adds": [
        (
            "_Ring.backward",
            "the ring adds up the gradients of keys in bfloat16",
            "_wide_zeros(kv)",
            "torch.zeros_like(kv)",
        )
    ],
    "tests/parallel/test_recompute.py": [
        (
            "_UnsavedTensors.unpack",
            "of several tensors that were dropped, backward gets the first",
            "self.recomputed[i]",
            "self.recomputed[0]",
        )
    ],
    "tests/parallel/test_grad_norm.py": [
        ("grad_norm", "replicas count several times in the gradient's norm", "replicas(p)", "1"),
        (
            "clip",
            "short gradients are scaled up to the limit",
            "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
            "max_norm / (norm + 1e-6)",
        ),
    ],
    f"{PAIRS} -k jitter": [
        (
            "take_slice",
            "data ranks give their tokens the same numbers",
            "microbatch * meshes.data.size + meshes.data.rank",
            "microbatch * meshes.data.size",
        )
    ],
    "tests/parallel/test_pipeline.py -k stage": [
        (
            "split_layers.cost",
            "the cost of the head counts for the first stage",
            "behind if stage == stages - 1 else 0",
            "behind if stage == 0 else 0",
        )
    ],
    f"{PARITY}::test_nasty_cases -k three_copies": [
        (
            "TiedEmbeddings.add_gradients",
            "a stage's second copy of the embedding keeps its own gradient",
            "other.copy_(grads[0])",
            "None",
        )
    ],
    NO_GROUP: [
        (
            "materialize",
            "projections into the residual stream are not scaled down with depth",
            "std /= math.sqrt(2 * model.shape.num_layers)",
            "pass",
        ),
        (
            "CrossEntropy.count",
            "the loss is divided by tokens, with a label or not",
            "(batch.labels_BS != IGNORE).sum()",
            "batch.valid_BS.sum()",
        ),
        (
            "weight_decay",
            "weight decay on routers",
            '("router.weight", "gate.weight", "bias")',
            '("gate.weight", "bias")',
        ),
    ],
    "tests/checkpoint/test_resume.py": [
        (
            "AdamW.resume",
            "a resumed AdamW corrects its bias as at the first step",
            'state["step"].fill_(updates)',
            'state["step"].fill_(0)',
        ),
        (
            "shards_to_load",
            "both moments are the first",
            "TensorShard(tensor, offset, shape)",
            'TensorShard(moments[name]["exp_avg"], offset, shape)',
        ),
        (
            "shards_to_load",
            "selection biases are saved and never restored",
            "TensorShard(buffer, (0,) * buffer.dim(), tuple(buffer.shape))",
            "TensorShard(buffer.clone(), (0,) * buffer.dim(), tuple(buffer.shape))",
        ),
    ],
    "tests/train/test_learning_rate.py": [
        (
            "lr_factor",
            "warm-up counts as decay",
            "(step - options.warmup_steps) / max(1, steps - options.warmup_steps)",
            "step / max(1, steps)",
        )
    ],
    "tests/train/test_validation.py": [
        (
            "Validation.measure",
            "the loss of tp ranks is added up",
            "all_reduce(mine, meshes.world) / meshes.tp.size",
            "all_reduce(mine, meshes.world)",
        ),
        (
            "Evaluation.is_due",
            "no validation after the last step",
            "self.state.step % self.interval == 0 or self.state.step == self.last",
            "self.state.step % self.interval == 0",
        ),
    ],
    "tests/checkpoint/test_layout.py": [
        (
            "newest_first",
            "what `latest` names hides a checkpoint that was made after it",
            "(save_number(path), path.name == latest_name, path.name)",
            "(path.name == latest_name, save_number(path), path.name)",
        ),
        ("stream_crc32", "a checksum covers only a file's first block", "size - len(block)", "0"),
    ],
    "tests/data/test_shuffle.py": [
        ("permute", "a permutation reaches one number too far", "out_N[outside] >= size", "out_N[outside] > size")
    ],
    "tests/data/test_loader.py": [
        (
            "SourceMix._source_indices",
            "the rotation of sources restarts with every step",
            "torch.arange(first, first + count)",
            "torch.arange(count)",
        ),
        (
            "StreamPacker._starts",
            "every epoch cuts the row at the same places",
            "permute(order, number_N, self.per_epoch) * self.seq_len + order % (slack + 1)",
            "permute(order, number_N, self.per_epoch) * self.seq_len",
        ),
        (
            "StreamPacker.fill",
            "a document's end has the next one's first token as its label",
            "out.labels_NS[n, begins - 1] = IGNORE",
            "pass",
        ),
        (
            "StreamPacker.fill",
            "a window's last label may belong to the next document",
            "begins - 1",
            "begins[begins < self.seq_len] - 1",
        ),
        (
            "StreamPacker.fill",
            "positions run on through documents",
            "np.arange(self.seq_len) - begins[document_S]",
            "np.arange(self.seq_len)",
        ),
        (
            "StepPlans.samples_of_rank",
            "samples distributed by work are numbered in turn",
            "([samples[j] for j in which_N.tolist()], number_N)",
            "([samples[j] for j in which_N.tolist()], None)",
        ),
    ],
}

MUTANTS = [Mutant(tests, *change) for tests, changes in TABLE.items() for change in changes]
