"""titanmoe trains Mixture-of-Experts language models with separate mappings of attention and experts onto ranks."""

import sys

# This check comes before the first file that an older Python cannot parse. Ruff assumes 3.10.
if sys.version_info < (3, 10):  # noqa: UP036
    raise SystemExit(
        "titanmoe needs Python 3.10 or newer, and this is "
        + ".".join(map(str, sys.version_info[:3]))
        + " ("
        + sys.executable
        + "): make setup PYTHON=python3.12, then source .venv/bin/activate"
    )

__version__ = "0.1.0"


def open(recipe, changes=None, trains=True, ids=0):
    """Build the run of a recipe on this rank, load its weights and return its `titanmoe.session.Session`.

    Your code feeds it: the recipe's data is not opened, and its validation and checkpoints are off. Collective over the
    world. Raises a ConfigError with every problem of the recipe.

    Args:
        recipe: a TOML file, or the name of a shipped recipe.
        changes: dict of options to set in place of the recipe's, such as {"training.steps": 100}.
        trains: False for a run that only computes log-probabilities: no gradients, no optimizer state.
        ids: number of ids that exist, if model.vocab_size is padded beyond them: others get no probability. 0 for all.
    """
    from titanmoe.open_session import open_session  # imports torch

    return open_session(recipe, changes, trains, ids)
