"""Table of torch's private names that titanmoe uses, which any release may change. Each is used in one file or folder.

`missing_names` lists those that this version of torch no longer has.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, NamedTuple

import torch


class Private(NamedTuple):
    """Private names of one module or class of torch that one place uses."""

    owner: str
    """Module of torch, or class in it."""
    names: tuple[str, ...]
    where: str
    """File or folder of titanmoe that uses them."""
    need: str
    """What they are used for."""
    optional: bool = False
    """Whether that place checks for the names and works without them."""
    until: tuple[int, int] = (9, 0)
    """First version of torch that does not need them."""


_C10D, _SCHEDULES = "torch.distributed.distributed_c10d", "torch.distributed.pipelining.schedules"
_RING = "torch.distributed.tensor.experimental._context_parallel._attention"

PRIVATE = (
    Private(
        _C10D, ("_resolve_process_group",), "comm/collectives.py", "the group of a name, as functional collectives use"
    ),
    Private(_C10D, ("_world",), "train/runtime.py", "shorter time-outs for all groups after the first step"),
    Private(_C10D, ("_set_pg_timeout",), "train/runtime.py", "the same", until=(2, 14)),
    Private(_C10D, ("_get_default_store",), "watch/machines.py", "a connection to the store for another thread"),
    Private(
        "torch._C._distributed_c10d",
        ("_dump_fr_trace", "_dump_fr_trace_json"),
        "watch/flight_recorder.py",
        "what the flight recorder has; NCCL's own has other names",
        optional=True,
    ),
    Private(f"{_C10D}._World", ("pg_map",), "train/runtime.py", "all groups of this process, as keys"),
    Private(
        "torch._C._distributed_c10d.ProcessGroup", ("_get_backend",), "ops/cpu/fsdp.py", "gloo, of a group on CPUs"
    ),
    Private(
        "torch._C._distributed_c10d.ProcessGroup", ("_get_backend",), "fold/meshes.py", "NCCL, whose options are copied"
    ),
    Private("torch._C._distributed_c10d.Backend.Options", ("_timeout",), "ops/cpu/fsdp.py", "its current time-out"),
    Private(
        "torch.ops", ("_c10d_functional",), "comm/collectives.py", "collectives that autograd and compile can follow"
    ),
    Private("torch.ops", ("_c10d_functional",), "comm/all_to_all.py", "the same"),
    Private(
        "torch.testing._internal.distributed.fake_pg", ("FakeStore",), "fold/meshes.py", "registers the backend `fake`"
    ),
    Private(
        "torch.distributed.checkpoint.filesystem",
        ("_StorageInfo",),
        "checkpoint/dcp_metadata.py",
        "where a block is, in .metadata",
    ),
    Private("torch.cuda.memory", ("_snapshot",), "train/runtime.py", "whether GPU memory segments grow", optional=True),
    Private(
        "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent",
        ("_pcontext",),
        "launcher/agent.py",
        "the ranks' processes, to stop them",
    ),
    Private(
        "torch.distributed.elastic.agent.server.api.SimpleElasticAgent",
        ("_worker_group",),
        "launcher/agent.py",
        "which ranks this machine has",
    ),
    Private(
        "torch.distributed.device_mesh.DeviceMesh",
        ("_dim_group_names",),
        "fold/meshes.py",
        "the name of an axis's group, which an error repeats",
    ),
    Private(
        "torch.distributed.tensor.DTensor",
        ("_local_tensor", "_spec"),
        "comm/collectives.py",
        "a rank's piece of a parameter, and a gradient of it, without working out its placement each time",
    ),
    Private(
        "torch.distributed.tensor._utils",
        ("compute_local_shape_and_global_offset",),
        "parallel/materialize.py",
        "where a shard starts in the whole",
    ),
    Private(
        "torch.distributed.pipelining.stage.PipelineStage",
        ("_prepare_forward_infra",),
        "parallel/pipeline_stage.py",
        "receive buffers, repaired",
    ),
    Private(
        "torch.distributed.pipelining.stage.PipelineStage",
        ("_get_init_p2p_neighbors_ops",),
        "parallel/pipeline_stage.py",
        "what torch 2.11 sends before the first step, repaired",
        until=(2, 15),
    ),
    Private(
        _SCHEDULES,
        ("_Action", "_ComputationType", "_PipelineContext", "_PipelineScheduleRuntime", "_wait_batch_p2p"),
        "parallel",
        "tables of actions, and pairs of them that take turns",
    ),
    Private(
        f"{_SCHEDULES}._PipelineScheduleRuntime",
        (
            *("_step_microbatches", "_has_backward", "_stages", "_n_microbatches"),
            *("_assert_unsharded", "_maybe_compute_loss", "_maybe_get_loss", "_prepare_schedule_with_comms"),
            "_comp_type_to_function_map",
        ),
        "parallel",
        "a step on microbatches that are already split, with or without backward; our own rows; the two halves of "
        "a pair; actions of our own kinds",
    ),
    Private(
        f"{_SCHEDULES}._PipelineScheduleRuntime",
        ("_stages", "_n_microbatches", "_num_stages"),
        "plan/schedule_cost.py",
        "a schedule's table without a pipeline",
    ),
    Private(
        f"{_SCHEDULES}.ScheduleInterleaved1F1B",
        ("_calculate_single_rank_operations",),
        "plan/schedule_cost.py",
        "a rank's row of that table",
    ),
    Private(
        _RING,
        ("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options", "_RotateMethod"),
        "parallel/torch_ring.py",
        "the ring's template; without it our own ring is used",
        optional=True,
    ),
    Private(
        "torch.ops.aten",
        tuple(
            f"_scaled_dot_product_{kernel}{direction}"
            for kernel in ("flash_attention", "efficient_attention", "cudnn_attention")
            for direction in ("", "_backward")
        ),
        "parallel/attention_block.py",
        "attention of one block, with its log-sum-exp",
    ),
    Private(
        "torch.ops.aten",
        ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
        "ops/cpu/flash_attention.py",
        "the same on CPUs",
    ),
    Private(
        "torch.ops.aten",
        (
            *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
            "_fused_rms_norm_backward",
        ),
        "rehearse/stand_ins.py",
        "the kernels that a GPU would run",
    ),
    Private("torch.Tensor", ("_version",), "parallel/flex.py", "whether a mask's documents have changed"),
    Private("torch.UntypedStorage", ("_cdata",), "parallel/recompute.py", "whether two tensors share a storage"),
    Private("torch.UntypedStorage", ("_cdata",), "generate/live_generator.py", "the same"),
    Private("torch.UntypedStorage", ("_cdata",), "rehearse", "the same"),
    Private(
        "torch._functorch.config", ("donated_buffer",), "parallel/compiled.py", "off where backward runs in two parts"
    ),
    Private("torch", ("_check",), "parallel/compiled.py", "two sizes that a graph may treat as equal"),
    Private(
        "torch",
        ("_foreach_norm", "_foreach_mul", "_foreach_mul_"),
        "parallel/grad_norm.py",
        "the norm and clipping, in few kernels",
    ),
    Private(
        "torch", ("_foreach_norm",), "checkpoint/write_tensors.py", "whether all numbers of a checkpoint are finite"
    ),
    Private("torch", ("_foreach_copy_",), "parallel/unsharded.py", "a step's copies of experts' weights in one call"),
    Private("torch", ("_grouped_mm",), "moe/grouped_mm.py", "the products of all experts"),
    Private("torch", ("_scaled_grouped_mm",), "moe/fp8.py", "the same in 8 bits; without it fp8 is refused", True),
    Private(
        "torch.distributed._symmetric_memory",
        ("empty", "rendezvous", "get_backend", "set_backend"),
        "moe/dispatchers/symmetric_buffers.py",
        "buffers that peers write to",
    ),
    Private("torch.ops", ("_c10d_functional",), "launcher/check_cluster.py", "to time them"),
    Private(
        "torch._C",
        ("_will_engine_execute_node",),
        "ops/autograd_functions.py",
        "which gradients a backward pass computes",
    ),
    Private("torch.profiler", ("_ExperimentalConfig",), "train/timing.py", "names of operations in a trace"),
    Private(
        "torch.cuda.memory",
        ("_record_memory_history", "_dump_snapshot"),
        "train/timing.py",
        "what memory was allocated for",
    ),
    Private("torch.nn.Module", ("_modules",), "parallel/compiled.py", "a module without two of its parts"),
    Private("torch.nn.Module", ("_non_persistent_buffers_set",), "checkpoint/state.py", "the buffers that are saved"),
    Private(
        "torch.utils._python_dispatch",
        ("is_in_torch_dispatch_mode",),
        "ops/kernels/kernel_launch.py",
        "whether a mode watches operations, so that a kernel has to be one",
    ),
    Private(
        "torch.utils._python_dispatch",
        ("is_in_torch_dispatch_mode",),
        "moe/dispatchers/symmetric_buffers.py",
        "the same",
    ),
    Private(
        "torch._higher_order_ops.effects",
        ("_EffectType",),
        "moe/dispatchers/symmetric_buffers.py",
        "an operation that compilers leave where it is",
    ),
    Private(
        "torch.utils._python_dispatch",
        ("_get_current_dispatch_mode_stack", "_pop_mode", "_push_mode"),
        "parallel/pairs.py",
        "the same modes in a second thread",
    ),
    # The rehearsal runs a step on fake tensors and records what torch does there.
    Private(
        "torch._subclasses.fake_tensor",
        ("FakeTensor", "FakeTensorMode", "in_kernel_invocation_manager"),
        "rehearse",
        "tensors without numbers",
    ),
    Private(
        "torch.testing._internal.distributed.fake_pg", ("FakeStore",), "rehearse/rehearsal.py", "a world in one process"
    ),
    Private(
        "torch.utils._python_dispatch",
        ("TorchDispatchMode", "_disable_current_modes"),
        "rehearse",
        "to see every operation",
    ),
    Private("torch.utils._mode_utils", ("no_dispatch",), "rehearse", "real numbers inside a rehearsal"),
    Private("torch.utils._pytree", ("tree_leaves", "tree_map_only"), "rehearse", "tensors among arguments"),
    Private("torch.utils._pytree", ("tree_leaves",), "watch/first_nonfinite.py", "tensors among a module's results"),
    Private("torch._ops.OpOverload", ("_schema", "_overloadpacket"), "rehearse", "an operation's name and arguments"),
    Private("torch.Tensor", ("_make_subclass",), "rehearse/shape_cache.py", "parameters without numbers"),
    Private(
        "torch.distributed.tensor.debug",
        ("_clear_sharding_prop_cache",),
        "rehearse/rehearsal.py",
        "to forget the shards of another rank",
    ),
    Private("torch._C", ("_current_autograd_node",), "rehearse/code_site.py", "the node that backward has come to"),
    Private(
        "torch._C._distributed_c10d",
        ("FakeProcessGroup", "FakeWork", "ProcessGroup", "Work"),
        "rehearse",
        "a group that only records its messages",
    ),
    Private("torch.cpu", ("_default_cpu_stream",), "rehearse/message_recorder.py", "the stream that FSDP starts from"),
    Private(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
        ("post_backward", "unshard", "wait_for_unshard", "finalize_backward", "_module_fqn"),
        "rehearse",
        "what FSDP gathers and sums, and for which layer",
    ),
    Private(
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
        ("unsharded_accumulated_grad", "_unsharded_param"),
        "rehearse/memory_over_step.py",
        "gradients of whole weights",
    ),
    Private("torch.autograd.graph", ("_engine_run_backward",), "rehearse", "the frame below which backward runs"),
    Private(
        "torch.distributed.pipelining.stage", ("_make_tensor_from_meta",), "rehearse/code_site.py", "receive buffers"
    ),
)


def missing_names() -> dict[Private, list[str]]:
    """Return the needed names that this version of torch does not have, optional ones included; {} if it has all."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    needed = [one for one in PRIVATE if version < one.until]
    missing = {one: [name for name in one.names if not _has(one.owner, name)] for one in needed}
    return {one: names for one, names in missing.items() if names}


def _has(owner_name: str, name: str) -> bool:
    owner = _find(owner_name)
    if owner is None or hasattr(owner, name):
        return owner is not None
    # What instances have is named in the class's code.
    return inspect.isclass(owner) and any(_names(base, name) for base in owner.__mro__[:-1])


def _names(cls: type, name: str) -> bool:
    methods = (inspect.unwrap(one).__code__ for one in vars(cls).values() if inspect.isfunction(one))
    return name in vars(cls).get("__annotations__", ()) or any(name in code.co_names for code in methods)


def _find(path: str) -> Any:
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            owner: Any = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            owner = getattr(owner, part, None)
        return owner
    return None
