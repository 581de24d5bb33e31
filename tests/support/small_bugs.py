"""Small bugs, each of which some test has to notice. `tests/support/plant_small_bugs.py` plants them one by one.

Faults between ranks are in tests/support/planted_faults.py, for the oracle; this is what a single line can get wrong.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str
    """Below titanmoe/."""
    tests: str
    """What to run, as arguments of pytest: the cheapest test that should notice it."""
    breaks: str
    old: str
    """Occurs exactly once in the file."""
    new: str


PARITY, PAIRS = "tests/test_parity.py", "tests/test_parity.py::test_every_pair_of_choices_on_4_ranks"
NO_GROUP = f"{PARITY}::test_smaller_worlds[1]"

# By file and tests to run: what it breaks, the code as it is, and the code with the bug.
TABLE: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("moe/router.py", "tests/moe/test_router.py"): [
        (
            "of equal scores the higher expert number wins",
            "scores_TE.sort(dim=-1, descending=True, stable=True).indices",
            "(model.num_experts - 1 - scores_TE.flip(-1).sort(dim=-1, descending=True, stable=True).indices)",
        ),
        (
            "the selection bias leaks into the weights",
            "self.score_function.weights(logits_TE, scores_TE, chosen_TK)",
            "self.score_function.weights(logits_TE, scores_TE + self.expert_bias, chosen_TK)",
        ),
        (
            "a group of sigmoid experts counts only its best score",
            "best = min(self.score_function.scores_per_group, scores_TGe.shape[-1])",
            "best = 1",
        ),
        (
            "no route_scale",
            "return scores_TE, weights_TK * model.route_scale, chosen_TK, count_BE",
            "return scores_TE, weights_TK, chosen_TK, count_BE",
        ),
        (
            "gating in the dtype of the activations",
            "options, wide = self.options, torch.promote_types(x_TD.dtype, self.wide)",
            "options, wide = self.options, x_TD.dtype",
        ),
        (
            "the same jitter in every layer",
            'counter_rng.key("jitter", self.seed, step, self.layer)',
            'counter_rng.key("jitter", self.seed, step)',
        ),
    ],
    ("moe/router.py", f"tests/moe/test_router.py {NO_GROUP}"): [
        (
            "no gradient through the sum that normalises the weights",
            "(weights_TK.sum(-1, keepdim=True) + 1e-20)",
            "(weights_TK.sum(-1, keepdim=True).detach() + 1e-20)",
        ),
    ],
    ("moe/router.py", "tests/moe/test_router.py tests/train/test_validation.py"): [
        (
            "jitter in validation too",
            "noise = options.jitter > 0 and torch.is_grad_enabled()",
            "noise = options.jitter > 0",
        ),
    ],
    ("moe/router_product.py", "tests/moe/test_router_product.py"): [
        ("the router's weights lose their last 8 bits", "(rest - second).bfloat16()]", "torch.zeros_like(first)]"),
        (
            "the router's product by parts takes any input",
            "fits = x_TD.dtype == torch.bfloat16 and wide",
            "fits = wide",
        ),
    ],
    ("models/layers.py", "tests/models/test_product_and_input.py"): [
        (
            "of several products only the first gives the input a gradient",
            "torch.addmm(grad_x.flatten(0, -2), grad_RN, w)",
            "torch.mm(grad_RN, w)",
        ),
    ],
    ("moe/balance_losses/protocol.py", "tests/moe/test_balance.py"): [
        (
            "sigmoid scores are not normalised",
            "self.scores_TE.sum(-1) if self.normalises else self.valid_T",
            "self.scores_TE.sum(-1) if False else self.valid_T",
        ),
    ],
    ("moe/balance_losses/aux_loss_global.py", "tests/moe/test_balance.py"): [
        (
            "the global term leaves its own microbatch out",
            "self.count_ME.cumsum(0)",
            "(self.count_ME.cumsum(0) - self.count_ME)",
        ),
    ],
    ("moe/balance_losses/z_loss.py", "tests/moe/test_balance.py"): [
        (
            "padding has a z term",
            "logits_TE.logsumexp(-1).square() * routed.valid_T).sum()",
            "logits_TE.logsumexp(-1).square()).sum()",
        ),
    ],
    ("moe/balance.py", "tests/moe/test_balance.py"): [
        (
            "balance losses have no gradient",
            "*coefficients.unbind()",
            "*torch.zeros_like(coefficients).unbind()",
        ),
    ],
    ("moe/layer_statistics.py", "tests/moe/test_balance.py"): [
        (
            "a recomputed forward counts again",
            "self.counts_MX[:, columns].index_copy_(",
            "self.counts_MX[:, columns].index_add_(",
        ),
    ],
    (
        "moe/balance_losses/protocol.py",
        f"{PARITY}::test_smaller_worlds {PARITY}::test_every_pair_of_choices_on_4_ranks -k sequence+z",
    ): [
        (
            "a rank's own counts are used instead of its whole sample's",
            "all_reduce(self.count_BE.to(torch.float64), self.sequence)",
            "self.count_BE.to(torch.float64)",
        ),
    ],
    ("moe/balance.py", f"{PAIRS} -k global+bias"): [
        (
            "selection biases move towards the busy experts",
            "torch.sign(load_E.mean() - load_E)",
            "torch.sign(load_E - load_E.mean())",
        ),
    ],
    ("moe/capacity.py", "tests/moe/test_capacity.py"): [
        (
            "capacity rounds down",
            "return math.ceil(self.options.capacity_factor",
            "return math.floor(self.options.capacity_factor",
        ),
        (
            "an expert takes one token more than its capacity",
            "over[entry] = place >= capacity",
            "over[entry] = place > capacity",
        ),
        (
            "samples share one capacity",
            "scope_T = tokens.sample_T if self.full else torch.zeros_like(tokens.sample_T)",
            "scope_T = torch.zeros_like(tokens.sample_T)",
        ),
    ],
    ("moe/dispatchers/alltoall.py", "tests/moe/test_dispatch.py"): [
        ("chunks of padded bins are too short by a row", "bin_rows = -(-bin_rows // C)", "bin_rows = bin_rows // C"),
    ],
    ("moe/dispatchers/allgather.py", "tests/moe/test_dispatch.py"): [
        (
            "the all-gather takes etp ranks for ep ranks",
            "all_gather(chosen_TK, 0, self.group) - self.group.rank // self.etp * self.local_experts",
            "all_gather(chosen_TK, 0, self.group) - self.group.rank * self.local_experts",
        ),
    ],
    ("moe/dispatchers/hierarchical.py", "tests/moe/test_dispatch.py"): [
        (
            "bins inside a node have room for only one node's rows",
            "others, bin_rows * N, route",
            "others, bin_rows, route",
        ),
    ],
    ("moe/permute.py", f"tests/moe/test_permute.py {NO_GROUP}"): [
        (
            "routers have no gradient through their weights",
            "return to_rows(x_TD, entry_R // K, slot_TJ, kernels), weights_R1",
            "return to_rows(x_TD, entry_R // K, slot_TJ, kernels), weights_R1.detach()",
        ),
    ],
    ("moe/experts.py", "tests/moe/test_experts.py"): [
        (
            "an expert's last bias is not weighted",
            "return self.with_last_bias(self.down(products, hidden, weight_R1), member_Re * weight_R1)",
            "return self.with_last_bias(self.down(products, hidden, weight_R1), member_Re)",
        ),
        (
            "every etp rank adds its bias to the first columns",
            "before = self.etp_rank * bias_ed.shape[1]",
            "before = 0",
        ),
    ],
    ("moe/swiglu.py", "tests/moe/test_experts.py"): [
        (
            "gates are clamped from below as well",
            "gate, up = gate.masked_fill(gate > 7.0, 7.0)",
            "gate, up = gate.clamp(-7.0, 7.0)",
        ),
    ],
    ("models/layers.py", "tests/models/test_rope.py"): [
        (
            "RoPE's angles in the dtype of the activations",
            "wide = torch.promote_types(dtype, torch.float32)\n    angle",
            "wide = dtype\n    angle",
        ),
        ("YaRN rounds its pairs where it should not", "if model.rope_truncate:", "if True:"),
    ],
    ("models/layers.py", "tests/models/test_rope.py tests/models/test_latent_attention.py"): [
        (
            "no factor on cos and sin if both mscales are given",
            "return yarn_mscale(model, model.rope_mscale) / yarn_mscale(model, model.rope_mscale_all_dim)",
            "return 1.0",
        ),
    ],
    ("models/layers.py", "tests/test_precision.py tests/models/test_transformer.py"): [
        ("norms in the dtype of the activations", "wide = promote(x)\n    mean", "wide = x\n    mean"),
    ],
    ("models/families/huggingface.py", "tests/checkpoint_hf/test_fields.py -k rope"): [
        (
            "YaRN's original context is that of the rope dict if a config.json has two",
            'config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", context))',
            'rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings", context))',
        ),
    ],
    ("models/families/olmoe.py", "tests/checkpoint_hf/test_fields.py -k left_out"): [
        ("another epsilon where config.json has none", '"rms_norm_eps": 1e-5', '"rms_norm_eps": 1e-6'),
    ],
    ("models/attention.py", f"{PAIRS} -k qwen3_moe"): [
        (
            "keys are normalised with the queries' norm",
            'if self.qk_norm == "head":\n            q, k = self.q_norm(q), self.k_norm(k)',
            'if self.qk_norm == "head":\n            q, k = self.q_norm(q), self.q_norm(k)',
        ),
    ],
    ("models/latent_attention.py", "tests/models/test_latent_attention.py"): [
        (
            "YaRN sharpens latent attention once, not twice",
            "self.sharpen = yarn_mscale(model, model.rope_mscale_all_dim) ** 2",
            "self.sharpen = yarn_mscale(model, model.rope_mscale_all_dim)",
        ),
    ],
    ("models/transformer.py", f"{PAIRS} -k yes-whole-mtp"): [
        (
            "no weight on the loss of further tokens",
            "return _AddGradient.apply(scores_NBS, self.weight * mtp_loss_BS)",
            "return _AddGradient.apply(scores_NBS, mtp_loss_BS)",
        ),
    ],
    ("models/vocabulary.py", "tests/models/test_transformer.py"): [
        (
            "labels without loss have a gradient",
            "grad_TV = softmax_TV * has_label_T.unsqueeze(1)",
            "grad_TV = softmax_TV.clone()",
        ),
    ],
    ("mask.py", "tests/test_mask.py"): [
        ("a window is one position longer", "seen & (apart < window)", "seen & (apart <= window)"),
        ("a document sees the last token of the one before", "(q < until_BL[b, k])", "(q <= until_BL[b, k])"),
        (
            "keys at a window's edge are skipped",
            "[np.maximum(last_K, 0)] - depth_K < window",
            "[np.maximum(last_K, 0)] - depth_K < window - 1",
        ),
        (
            "a document that ends within a block of queries is seen by all of them",
            "last_K >= 0, until_K >= end",
            "last_K >= 0, until_K > first",
        ),
    ],
    ("parallel/context.py", "tests/parallel/test_context.py"): [
        (
            "zigzag gives a rank evenly spaced chunks",
            "return [rank, 2 * self.size - 1 - rank] if",
            "return [rank, self.size + rank] if",
        ),
    ],
    ("parallel/context.py", f"{PARITY}::test_windows_and_sinks_across_the_pieces_of_a_sequence"): [
        (
            "under ulysses every rank has the first ranks' sinks",
            "sinks_H = sinks_H.chunk(group.size)[group.rank]",
            "sinks_H = sinks_H.chunk(group.size)[0]",
        ),
    ],
    ("parallel/context.py", "tests/parallel/test_context.py -k ring_adds"): [
        ("the ring adds up the gradients of keys in bfloat16", "dkv = _wide_zeros(kv)", "dkv = torch.zeros_like(kv)"),
    ],
    ("parallel/recompute.py", "tests/parallel/test_recompute.py"): [
        (
            "of several tensors that were dropped, backward gets the first",
            "view = self.again[i].as_strided(*strided)",
            "view = self.again[0].as_strided(*strided)",
        ),
    ],
    ("parallel/norm.py", "tests/parallel/test_norm.py"): [
        (
            "replicas count several times in the gradient's norm",
            "share = [1 / (replicas(p) * (len(copies)",
            "share = [1 / ((len(copies)",
        ),
        ("short gradients are scaled up to the limit", ".clamp(max=1.0)", ""),
    ],
    ("parallel/batch_slice.py", f"{PAIRS} -k jitter"): [
        (
            "data ranks give their tokens the same numbers",
            "first = (microbatch * meshes.data.size + meshes.data.rank) * samples",
            "first = microbatch * meshes.data.size * samples",
        ),
    ],
    ("models/stages.py", "tests/parallel/test_pipeline.py -k stage"): [
        (
            "the cost of the head counts for the first stage",
            "(head if stage == stages - 1 else 0)",
            "(head if stage == 0 else 0)",
        ),
    ],
    ("parallel/tied.py", f"{PARITY}::test_nasty_cases -k three_copies"): [
        ("a stage's second copy of the embedding keeps its own gradient", "other.copy_(grads[0])", "pass"),
    ],
    ("parallel/materialize.py", NO_GROUP): [
        (
            "projections into the residual stream are not scaled down with depth",
            "std /= math.sqrt(2 * model.shape.num_layers)",
            "std *= 1",
        ),
    ],
    ("train/objectives/cross_entropy.py", NO_GROUP): [
        (
            "the loss is divided by tokens, with a label or not",
            "(batch.labels_BS != IGNORE).sum()",
            "batch.valid_BS.sum()",
        ),
    ],
    ("train/optimizers/adamw.py", NO_GROUP): [
        (
            "weight decay on routers",
            'name.endswith(("router.weight", "gate.weight", "bias"))',
            'name.endswith(("gate.weight", "bias"))',
        ),
    ],
    ("train/optimizers/adamw.py", "tests/checkpoint/test_resume.py"): [
        (
            "a resumed AdamW corrects its bias as at the first step",
            'state["step"].fill_(updates)',
            'state["step"].fill_(0)',
        ),
    ],
    ("train/learning_rate.py", "tests/train/test_learning_rate.py"): [
        (
            "warm-up counts as decay",
            "progress = (step - options.warmup_steps) / max(1, steps - options.warmup_steps)",
            "progress = step / max(1, steps)",
        ),
    ],
    ("train/evaluation.py", "tests/train/test_validation.py"): [
        (
            "the loss of tp ranks is added up",
            "(all_reduce(mine, meshes.world) / meshes.tp.size / count",
            "(all_reduce(mine, meshes.world) / count",
        ),
        (
            "no validation after the last step",
            "self.state.step % self.interval == 0 or self.state.step == self.last",
            "self.state.step % self.interval == 0",
        ),
    ],
    ("checkpoint/layout.py", "tests/checkpoint/test_layout.py"): [
        (
            "what `latest` names hides a checkpoint that was made after it",
            "return number(path), path.name == latest_name, path.name",
            "return path.name == latest_name, number(path), path.name",
        ),
        (
            "a checksum covers only a file's first block",
            "while size > 0 and (block := stream.read(min(size, _BLOCK))):",
            "if size > 0 and (block := stream.read(min(size, _BLOCK))):",
        ),
    ],
    ("checkpoint/state.py", "tests/checkpoint/test_resume.py"): [
        (
            "both moments are the first",
            'optimizer.{moment}.{stored}", Piece(tensor,',
            'optimizer.{moment}.{stored}", Piece(moments[name]["exp_avg"],',
        ),
        (
            "selection biases are saved and never restored",
            'f"model.{name}", Piece(buffer, (0,)',
            'f"model.{name}", Piece(buffer.clone(), (0,)',
        ),
    ],
    ("data/shuffle.py", "tests/data/test_shuffle.py"): [
        (
            "a permutation reaches one number too far",
            "outside = outside[out_N[outside] >= size]",
            "outside = outside[out_N[outside] > size]",
        ),
    ],
    ("data/mix.py", "tests/data/test_loader.py"): [
        (
            "the rotation of sources restarts with every step",
            "torch.arange(first, first + count)",
            "torch.arange(count)",
        ),
    ],
    ("data/pack.py", "tests/data/test_loader.py"): [
        ("every epoch cuts the row at the same places", "* self.seq_len + order % (slack + 1)", "* self.seq_len"),
        (
            "a document's end has the next one's first token as its label",
            "out.labels_NS[n, begins - 1] = IGNORE  #",
            "#",
        ),
        (
            "a window's last label may belong to the next document",
            "labels_NS[n, begins - 1]",
            "labels_NS[n, begins[begins < self.seq_len] - 1]",
        ),
        (
            "positions run on through documents",
            "np.arange(self.seq_len) - begins[document_S]",
            "np.arange(self.seq_len)",
        ),
    ],
    ("data/loader.py", "tests/data/test_loader.py"): [
        (
            "samples distributed by work are numbered in turn",
            "for j in which_N.tolist()], number_N",
            "for j in which_N.tolist()], None",
        ),
    ],
}

MUTANTS = [Mutant(*where, *change) for where, changes in TABLE.items() for change in changes]
