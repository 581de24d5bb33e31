"""Every kind of part that a recipe can name, with the table of its names; laws of the rooms; and how a model's own file
is read. No torch here."""

from collections.abc import Mapping
from typing import Any

from titanmoe.config.kinds import Parts
from titanmoe.config.model_file import ModelFile
from titanmoe.data import data_laws
from titanmoe.data.formats import FORMATS
from titanmoe.models import tensors
from titanmoe.models.families import FAMILIES
from titanmoe.moe.balance_losses import balance_spec
from titanmoe.moe.balance_losses.balance_spec import BALANCE_LOSSES
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.moe.score_functions import SCORE_FUNCTIONS
from titanmoe.train.objectives.objective_spec import OBJECTIVES
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS


def read_model_file(values: Mapping[str, Any]) -> ModelFile:
    # Imported only for a recipe with model.hf: what reads other recipes stays quick to load.
    from titanmoe.checkpoint.hf.read_model_file import read_model_file as read

    return read(values)


PARTS = Parts(
    (FORMATS, FAMILIES, SCORE_FUNCTIONS, DISPATCHERS, BALANCE_LOSSES, OBJECTIVES, OPTIMIZERS),
    (data_laws.contradictions, balance_spec.contradictions, tensors.contradictions),
    read_model_file,
)
