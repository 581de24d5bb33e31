"""COMPONENTS: the tables of everything that a recipe can name, the laws of their rooms and the reader of model.hf.

Every command passes it to `titanmoe.config.load`, which knows no component itself. Imports no torch.
"""

from collections.abc import Mapping
from typing import Any

from titanmoe.config.component_kinds import Components
from titanmoe.config.model_file import ModelFile
from titanmoe.data import data_constraints
from titanmoe.data.formats import FORMATS
from titanmoe.generate import prompts
from titanmoe.models import tensors
from titanmoe.models.families import FAMILIES
from titanmoe.moe.balance_losses import balance_spec
from titanmoe.moe.balance_losses.balance_spec import BALANCE_LOSSES
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.moe.score_functions import SCORE_FUNCTIONS
from titanmoe.rl import prompt_records
from titanmoe.train.objectives.objective_spec import OBJECTIVES
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS


def read_model_file(values: Mapping[str, Any]) -> ModelFile:
    """Return the fields of a recipe that the model named by model.hf fixes, and defaults that follow from it.

    Args:
        values: values of all fields of the recipe, by path such as "model.hf", which is not empty.

    Raises:
        ConfigError: there is no such model, or [model] cannot express it.
    """
    # Imported only for a recipe with model.hf, so that reading other recipes stays fast.
    from titanmoe.checkpoint.hf.read_model_file import read_model_file as read

    return read(values)


COMPONENTS = Components(
    (FORMATS, FAMILIES, SCORE_FUNCTIONS, DISPATCHERS, BALANCE_LOSSES, OBJECTIVES, OPTIMIZERS),
    (
        data_constraints.contradictions,
        balance_spec.contradictions,
        tensors.contradictions,
        prompts.contradictions,
        prompt_records.contradictions,
    ),
    read_model_file,
    (prompts.check_samples, prompt_records.check_prompts),
)
