"""Run TorchTitan 0.3.0 beside titanmoe: its Trainer, with the model, batch and mapping of titanmoe's options.

It is not a dependency. Install it from PyPI into a folder of its own, for Python 3.11:

    pip install --no-deps --target DIR torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser
    python scripts/bench/step.py --torchtitan DIR          full steps on CPUs, alternating with titanmoe
    PYTHONPATH=DIR python scripts/bench/layers.py --sides titanmoe torchtitan          layers of real models

All is TorchTitan's own but what `Side` and `_import` choose or change, without recomputation and resharding. On CPUs
its router computes in bf16. B samples, L positions, N heads, H width of a head, E experts, K top-k.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import json
import logging
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanmoe.config.schema import Config, Model

INSTALL = "pip install --no-deps --target {} torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser"


class NotCompared(Exception):
    """Error that says why TorchTitan does not run here."""


def reason(error: Exception) -> str:
    """Return the first line of an error's text, preceded by its type unless it is NotCompared."""
    name = "" if isinstance(error, NotCompared) else f"{type(error).__name__}: "
    return name + str(error).strip().partition("\n")[0]


def check(folder: Path) -> None:
    """Raise NotCompared unless TorchTitan, of any version, is installed in a folder."""
    if not (folder / "torchtitan" / "__init__.py").is_file():
        raise NotCompared(f"no torchtitan in {folder}: {INSTALL.format(folder)}")


def _stub_datasets() -> None:
    """Replace `datasets`, if missing, by a stub: it is imported for text loaders that are not used here."""
    if importlib.util.find_spec("datasets") is not None:
        return
    for name, wanted in (
        ("datasets", ["Dataset", "load_dataset"]),
        ("datasets.distributed", ["split_dataset_by_node"]),
    ):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(dict.fromkeys(wanted, object))
        sys.modules[name] = module


def _import(device: str) -> None:
    """Import TorchTitan for a device, "cuda" or "cpu", changed where it would not run.

    Attention only uses kernels that save no scores; without one, it refuses. torch's DataParallelMeshDims, newer than
    2.11, is only used by other backends. On CPUs no accelerator means "cpu", and the memory monitor returns zeros.
    Turns off this process's warnings, and its logging up to them. Raises NotCompared if it cannot be imported.
    """
    if sys.version_info < (3, 11):
        raise NotCompared("torchtitan needs Python 3.11")
    _stub_datasets()
    import torch.distributed.fsdp as fsdp

    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = object
    if device == "cpu":
        import torch._utils

        torch._utils._get_available_device_type = lambda: "cpu"
    try:
        import torchtitan.distributed.fsdp
        import torchtitan.trainer
        from torch.nn.attention import SDPBackend
        from torchtitan.components import metrics
        from torchtitan.models.common.attention import ScaledDotProductAttention
        from torchtitan.models.common.moe import TokenChoiceTopKRouter
    except ImportError as error:
        raise NotCompared(f"torchtitan does not import: {error}") from error
    if device == "cpu":
        zeros = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
        monitor = types.SimpleNamespace(device_name="cpu", get_peak_stats=lambda: zeros, reset_peak_stats=lambda: None)
        metrics.build_device_memory_monitor = lambda: monitor
        kernels = [SDPBackend.FLASH_ATTENTION]
        _pad_values(ScaledDotProductAttention)
    else:
        kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    ScaledDotProductAttention.sdpa_backends = kernels
    _balance_shards(TokenChoiceTopKRouter)
    if before_2_13():
        _shard_one_by_one(torchtitan.distributed.fsdp)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def before_2_13() -> bool:
    """Return whether this torch is older than 2.13."""
    import torch

    return tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def _shard_one_by_one(fsdp: types.ModuleType) -> None:
    """Replace `fsdp.fully_shard`, so that each module of a list is sharded by itself; TorchTitan shards them together.

    Together, the chunked loss frees the last norm's weight before its backward ("data is not allocated yet", on 2.11).
    """
    fully_shard = fsdp.fully_shard

    def wrapped(modules: Any, **settings: Any) -> Any:
        if isinstance(modules, list):
            return [fully_shard(module, **settings) for module in modules]
        return fully_shard(modules, **settings)

    fsdp.fully_shard = wrapped


def _pad_values(attention: Any) -> None:
    """Replace `attention.forward`, to pad values to the width of keys, as torch's flash kernel for CPUs needs.

    It is a tenth faster than the plain one.
    """
    import torch.nn.functional as F

    forward = attention.forward

    def padded(self: Any, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, **settings: Any) -> Any:
        width = v_BLNH.shape[-1]
        return forward(self, q_BLNH, k_BLNH, F.pad(v_BLNH, (0, q_BLNH.shape[-1] - width)), **settings)[..., :width]

    attention.forward = padded


def _balance_shards(router: Any) -> None:
    """Replace the balancing method of class `router`, to let each rank balance the tokens it has.

    Under tp TorchTitan's own would mix plain tensors with DTensors.
    """
    from torch.distributed.tensor import DTensor

    balanced = router._debug_force_load_balance_routing

    def wrapped(self: Any, scores_BLE: Any) -> tuple[Any, Any]:
        if not isinstance(scores_BLE, DTensor):
            return balanced(self, scores_BLE)
        mesh, placements = scores_BLE.device_mesh, scores_BLE.placements
        chosen = balanced(self, scores_BLE.to_local())
        return tuple(DTensor.from_local(x_BLK, mesh, placements) for x_BLK in chosen)

    router._debug_force_load_balance_routing = wrapped


def equivalent_model(model: Model) -> str:
    """Return TorchTitan's family with the same layers, "deepseek_v3" or "qwen3"; raise NotCompared if there is none.

    Looks only at latent attention, MTP, QK norm, normalization of top-k weights, and whether there are shared experts.
    """
    if model.kv_lora_rank and not model.mtp_depth:
        return "deepseek_v3"
    if model.qk_norm == "head" and model.num_experts and model.norm_topk and not model.shared_hidden:
        return "qwen3"
    raise NotCompared(f"it has no model like {model.family}")


def _spec(model: Model, seq_len: int) -> Any:
    """Return TorchTitan's spec of a model of titanmoe: its own debug flavour with its own layers, resized."""
    from torchtitan.models import deepseek_v3, qwen3
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE
    from torchtitan.models.common.attention import ScaledDotProductAttention

    sizes: dict[str, Any] = dict(n_layers=model.num_layers, dim=model.dim, n_heads=model.num_heads)
    sizes |= dict(num_experts=model.num_experts, moe_hidden_dim=model.expert_hidden)
    sizes |= dict(attn_backend="flex", moe_comm_backend="standard", non_blocking_capacity_factor=None)
    if equivalent_model(model) == "deepseek_v3":
        spec = deepseek_v3.model_registry("debugmodel")
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        layers = deepseek_v3._build_dsv3_layers(
            **sizes,
            **{name: getattr(model, name) for name in names},
            n_dense_layers=model.num_dense_layers,
            dense_hidden_dim=model.dense_hidden,
            num_shared_experts=model.shared_hidden // model.expert_hidden,
            mscale=1.0,
            router_top_k=model.top_k,
            router_score_func=model.score_function,
            router_num_expert_groups=model.num_groups if model.num_groups > 1 else None,
            router_num_limited_groups=model.top_groups if model.num_groups > 1 else None,
            router_route_scale=model.route_scale,
            router_route_norm=model.norm_topk,
            rope=ComplexRoPE.Config(dim=model.qk_rope_head_dim, max_seq_len=seq_len, theta=model.rope_theta),
        )
    else:
        spec = qwen3.model_registry("debugmodel_moe")
        layers = qwen3._build_qwen3_moe_layers(
            **sizes,
            n_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            top_k=model.top_k,
            rope=CosSinRoPE.Config(dim=model.head_dim, max_seq_len=seq_len, theta=model.rope_theta),
        )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    debug_model = spec.model
    spec.model = dataclasses.replace(
        debug_model,
        vocab_size=model.vocab_size,
        dim=model.dim,
        layers=layers,
        norm=dataclasses.replace(debug_model.norm, normalized_shape=model.dim),
        lm_head=dataclasses.replace(debug_model.lm_head, in_features=model.dim, out_features=model.vocab_size),
        tok_embeddings=dataclasses.replace(
            debug_model.tok_embeddings, num_embeddings=model.vocab_size, embedding_dim=model.dim
        ),
    )
    return spec


def _check_size(spec: Any, model: Model) -> None:
    import torch

    from titanmoe.models.count import parameters

    with torch.device("meta"):
        total = sum(weight.numel() for weight in spec.model.build().parameters())
    if total != parameters(model).total:
        raise NotCompared(f"its model has {total:,} parameters, titanmoe's {parameters(model).total:,}")


def _plain_sums(parallelize: Callable[..., Any]) -> Callable[..., Any]:
    """Return `parallelize`, changed to let FSDP sum gradients and scale them apart: only NCCL multiplies as it sums."""
    from torch.distributed.fsdp import FSDPModule

    def wrapped(model: Any, **settings: Any) -> Any:
        model = parallelize(model, **settings)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return wrapped


class Side:
    """TorchTitan's trainer, run step by step, with the methods that layers.TitanmoeSide has too.

    Attention is ScaledDotProductAttention: flex_attention has no backward on CPUs, and autotunes for long on GPUs. The
    backend is "partial_dtensor": the default shards plain tensors over several axes, which torch 2.13's FSDP refuses.
    Raises NotCompared if TorchTitan cannot be imported or has no such model.

    Args:
        config: titanmoe's config of the run.
        device: "cuda" or "cpu".
        graphs: whether it uses CUDA graphs.
    """

    def __init__(self, config: Config, device: str, graphs: bool = False):
        equivalent_model(config.model)
        _import(device)
        from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
        from torchtitan.components.optimizer import default_adamw
        from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.trainer import Trainer

        training, parallelism, optimizer = config.training, config.parallelism, config.optimizer
        spec = _spec(config.model, training.seq_len)
        _check_size(spec, config.model)
        if device == "cpu":
            spec.parallelize_fn = _plain_sums(spec.parallelize_fn)
        tokenizer, loader = _no_tokenizer(), _random_tokens(config.model.vocab_size)
        self.note = "norm and head are FSDP units of their own, for this torch" if before_2_13() else ""
        self.folder = tempfile.TemporaryDirectory()
        self.graphs = graphs
        self.trainer = Trainer.Config(
            model_spec=spec,
            dump_folder=self.folder.name,
            tokenizer=tokenizer,
            dataloader=loader,
            loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=config.model.vocab_size)),
            optimizer=default_adamw(
                lr=optimizer.lr,
                betas=(optimizer.beta1, optimizer.beta2),
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
            ),
            training=TrainingConfig(
                local_batch_size=training.local_batch_size,
                global_batch_size=training.global_batch_size,
                seq_len=training.seq_len,
                max_norm=optimizer.max_grad_norm,
                steps=training.steps,
                disable_cuda_graphs=not graphs,
                mixed_precision_param=training.mixed_precision_param,
            ),
            parallelism=ParallelismConfig(
                spmd_backend="partial_dtensor",
                fsdp_reshard_after_forward="never",
                tensor_parallel_degree=parallelism.tp,
                expert_parallel_degree=parallelism.experts.ep,
            ),
            compile=CompileConfig(enable=config.compile.enable),
            activation_checkpoint=None,
        ).build()
        self.batches = self.trainer.batch_generator(self.trainer.dataloader)

    def route(self, balanced: bool) -> None:
        """Route tokens evenly in the steps that follow if `balanced`, else as the router decides."""
        from torchtitan.distributed.cudagraph import cudagraph_teardown, wrap_with_cuda_graph
        from torchtitan.models.common.moe import TokenChoiceTopKRouter

        for module in self.trainer.model_parts[0].modules():
            if isinstance(module, TokenChoiceTopKRouter):
                module._debug_force_load_balance = balanced
        if self.graphs:  # the recorded graphs have the other routing
            cudagraph_teardown()
            self.trainer.fwd_bwd_fn = wrap_with_cuda_graph(self.trainer._forward_backward_body)

    def step(self) -> None:
        """Run one iteration of Trainer.train's loop, without checkpoints and profiler."""
        self.trainer.step += 1
        self.trainer.gc_handler.run(self.trainer.step)
        self.trainer.train_step(self.batches)


def _random_tokens(vocabulary: int) -> Any:
    import torch
    from torchtitan.components.dataloader import BaseDataLoader

    class RandomTokens(BaseDataLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **unused: Any):
            self.generator = torch.Generator().manual_seed(dp_rank)
            self.shape = (local_batch_size, seq_len)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            B, L = self.shape
            while True:
                tokens = torch.randint(vocabulary, (B, L + 1), generator=self.generator)
                positions = torch.arange(L).expand(B, L).contiguous()
                yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    return RandomTokens.Config()


def _no_tokenizer() -> Any:
    from torchtitan.config import Configurable

    class NoTokenizer(Configurable):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            pass

        def __init__(self, config: Config, *, tokenizer_path: str):
            pass

    return NoTokenizer.Config()


def serve(options: list[str], cpu_seconds: Callable[[], float]) -> None:
    """Run one rank: print the model's size as JSON; for each line of stdin run steps and print their seconds as JSON.

    A line is "STEPS ROUTING", such as "2 balanced", and its reply {"wall": ..., "cpu": ...}, of all these steps. An
    error is printed as {"not compared": reason} and ends it. `options` are titanmoe's; `cpu_seconds` returns the CPU
    time of this process.
    """
    from titanmoe.components import COMPONENTS
    from titanmoe.models.count import flops_per_token, parameters
    from titanmoe.train.launch import read_config
    from titanmoe.train.runtime import world_size

    replies, sys.stdout = sys.stdout, sys.stderr  # TorchTitan may print

    def reply(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=replies, flush=True)

    config = read_config(options, world_size(), COMPONENTS)
    count = parameters(config.model)
    try:
        side = Side(config, "cpu")
        shape = {"total": count.total, "active": count.active}
        reply(shape | {"flops": flops_per_token(config.model, config.training.seq_len)})
        for line in sys.stdin:
            number, routing = line.split()
            side.route(routing == "balanced")
            began, used = time.perf_counter(), cpu_seconds()
            for _ in range(int(number)):
                side.step()
            reply({"wall": time.perf_counter() - began, "cpu": cpu_seconds() - used})
    except Exception as error:
        reply({"not compared": reason(error)})
