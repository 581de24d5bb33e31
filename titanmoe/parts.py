"""Every kind of part that a recipe can name, with the table of its names. No torch here."""

from titanmoe.config.parts import Parts
from titanmoe.data.formats import FORMATS
from titanmoe.models.families import FAMILIES
from titanmoe.moe.balance_losses.rules import BALANCE_LOSSES
from titanmoe.moe.dispatchers.rules import DISPATCHERS
from titanmoe.train.objectives.rules import OBJECTIVES
from titanmoe.train.optimizers.rules import OPTIMIZERS

PARTS = Parts((FORMATS, FAMILIES, DISPATCHERS, BALANCE_LOSSES, OBJECTIVES, OPTIMIZERS))
