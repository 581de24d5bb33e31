"""Runs a frozen teacher beside the trained model (distillation.teacher), forward only, at the begin of each step.

The teacher has its own stages and engine under the run's mapping, so its last stage is on the ranks with the run's last
stage and its top-k ids and log-probabilities need no communication.

Shapes: N numbers of the head, B samples, S positions of the attention slice, K ids, C = K + 1 classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from titanmoe import observe
from titanmoe.checkpoint import state
from titanmoe.checkpoint.full_model import fill_shards
from titanmoe.checkpoint.on_all_ranks import on_all_ranks
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.batch import TEACHER_IDS, TEACHER_LOG_P, Batch
from titanmoe.data.loader import Loader
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary import HeadOptions
from titanmoe.parallel.apply import make_engine
from titanmoe.parallel.batch_slice import BatchSlice
from titanmoe.train.find_teacher import check_tokenizer, find_teacher, teacher_config
from titanmoe.train.gradients import Slicer
from titanmoe.train.run_state import RunState


def allocate_uninitialized(model: Transformer, seed: int, device: torch.device) -> None:
    """Allocate a model's weights without initial values, and its buffers as zeros, on the device.

    A stand-in for functions that initialize weights, for weights that will be loaded; `seed` is not used.
    """
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()


class SlicerWithTeacher(Slicer):
    """Slicer that runs the teacher on each microbatch and adds its distributions to the slices (distillation).

    Only ranks with the last pipeline stage get the distributions. Making one loads the teacher's weights, is collective
    over the world, and raises a ConfigError if the teacher cannot be used.
    """

    def __init__(
        self,
        config: Config,
        slicer: Slicer,
        loader: Loader,
        run_state: RunState,
        build: Callable[..., list[Transformer]],
    ):
        super().__init__(**vars(slicer))
        meshes, device, options = slicer.meshes, slicer.device, config.distillation
        self.teacher, self.state = find_teacher(config.distillation.teacher), run_state
        of_teacher = teacher_config(config, self.teacher)
        if loader.mix.tokenizer:
            check_tokenizer(self.teacher, loader.mix.tokenizer.identity)
        head_options = HeadOptions(top_k=options.top, temperature=options.temperature)
        self.stages = build(
            of_teacher,
            meshes,
            loader.microbatches,
            device,
            materialize=allocate_uninitialized,
            head_options=head_options,
        )
        self.engine = make_engine(self.stages, of_teacher, meshes, loader.microbatches, device)
        self.top, self.one = options.top, torch.ones((), dtype=torch.float64, device=device)
        self.note = f"{self.teacher.path}, top {options.top} ids of each position"
        self._load_weights()

    def _load_weights(self) -> None:
        """Fill the teacher's weights from its files. Collective over the world.

        Raises:
            ConfigError: on all ranks, if the files cannot be read.
        """
        model = self.stages[0].shape
        named = {name: weight for stage in self.stages for name, weight in stage.named_parameters()}
        buffers = {name: buffer for stage in self.stages for name, buffer in state.persistent_buffers(stage).items()}
        targets = state.shards_to_load(named, buffers, None, model.tie_embeddings)
        group = dist.group.WORLD if dist.get_world_size() > 1 else None
        try:
            with torch.no_grad():
                on_all_ranks(group, lambda: fill_shards(targets, self.teacher, model))
        except CheckpointError as error:
            raise ConfigError(f"distillation.teacher: {error}") from None

    def slices(self, batches: list[Batch]) -> list[BatchSlice]:
        """Run the teacher on this data rank's microbatches; return this rank's slices with its distributions.

        They are the extra fields TEACHER_IDS, ids (B, S, K), and TEACHER_LOG_P, log-probabilities (B, S, K + 1), the
        last that of all other ids. Collective over the world.
        """
        slices, of_slice = super().slices(batches), dict[int, dict[str, Tensor]]()

        def store(output_NBS: Tensor, batch_slice: BatchSlice) -> Tensor:
            ids_KBS, log_p_CBS = output_NBS.detach().split((self.top, self.top + 1))
            fields = {TEACHER_IDS: ids_KBS.long(), TEACHER_LOG_P: log_p_CBS}
            of_slice[id(batch_slice)] = {name: x.movedim(0, -1).contiguous() for name, x in fields.items()}
            return output_NBS.new_zeros(())

        for moe in (moe for stage in self.stages for moe in stage.moe_layers().values()):
            moe.begin_step(self.state.step, self.one, self.one)
        with observe.unheard():
            self.engine.run(slices, store, backward=False)
        # On ranks without the last stage nothing is stored.
        return [one._replace(extra_fields={**one.extra_fields, **of_slice.pop(id(one), {})}) for one in slices]
