"""Finds the teacher of a run (distillation.teacher) and checks that it fits, without torch.

`titanmoe.train.refusals` calls this before ranks start, and `titanmoe.train.teacher` when it builds the teacher.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.config import ConfigError
from titanmoe.config.schema import ActivationCheckpoint, Config, Distillation, LoRA
from titanmoe.data.tokenizer import FILE, open_tokenizer
from titanmoe.fold.legality import violations

if TYPE_CHECKING:
    from titanmoe.checkpoint.full_model import FullModel


@functools.cache  # a run that is still training may have a newer checkpoint the next time
def find_teacher(folder: str) -> FullModel:
    """Return the teacher's full model from a run's folder, a checkpoint or a Hugging Face folder.

    The result is cached for this process.

    Raises:
        ConfigError: if the folder holds no model that can be read.
    """
    from titanmoe.checkpoint.full_model import find_full_model  # imports safetensors

    try:
        return find_full_model(Path(folder).expanduser())
    except (CheckpointError, ConfigError, OSError) as error:  # OSError: no name of a file, or nobody may read it
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        raise ConfigError([f"distillation.teacher: {problem}" for problem in problems]) from None


def teacher_config(config: Config, teacher: FullModel) -> Config:
    """Return the config under which the teacher runs: its own [model], with the run's mapping and batches.

    All weights are frozen, nothing is recomputed, and no tokens are dropped. Multi-token prediction and the run's
    adapters are left out, and so are the layers that the recipe gives each stage.
    """
    return replace(
        config,
        model=replace(teacher.config.model, mtp_depth=0),
        training=replace(config.training, objective="cross_entropy", freeze=["*"]),
        moe=replace(config.moe, capacity_factor=0.0, pad_to_capacity=False),
        pipeline=replace(config.pipeline, layers_per_stage=[]),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        distillation=Distillation(),
        lora=LoRA(),
    )


def teacher_problems(config: Config, world: int) -> Iterator[str]:
    """Yield a message for each reason why distillation.teacher, if set, cannot be used, except its tokenizer.

    These are that it cannot be read, a vocabulary of another size, and laws of the run's mapping that its model breaks
    and the run's own does not.
    """
    if not config.distillation.teacher:
        return
    try:
        teacher = find_teacher(config.distillation.teacher)
    except ConfigError as error:
        yield from error.problems
        return
    size, vocab_size = teacher.config.model.vocab_size, config.model.vocab_size
    if size != vocab_size:
        yield (
            f"distillation.teacher has a vocabulary of {size}, and model.vocab_size = {vocab_size}: they must be "
            "equal: name a teacher with this vocabulary, or set vocab_size to the teacher's"
        )
    own_problems = set(violations(config, world))
    for problem in violations(teacher_config(config, teacher), world):
        if problem not in own_problems:
            yield f"distillation.teacher, under the run's mapping: {problem}"


def check_tokenizer(teacher: FullModel, identity: str) -> None:
    """Raise a ConfigError if the teacher was trained with a tokenizer of another digest than `identity`, the data's.

    Nothing is raised if the teacher's is unknown.
    """
    its_own, file = teacher.identity, teacher.path / FILE
    if its_own is None and teacher.step is None:
        its_own = open_tokenizer(str(file)).identity if file.is_file() else None
    if its_own is not None and its_own != identity:
        raise ConfigError(
            f"distillation.teacher was trained with another tokenizer ({its_own}) than the data's ({identity}), in "
            "which ids mean other tokens: name a teacher with the data's tokenizer, or set data.tokenizer to the "
            "teacher's"
        )
