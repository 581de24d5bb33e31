"""The recipes that come with titanmoe, by name. They are the checkout's train_configs/, of which a wheel has a copy."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[1] / "train_configs"
"""In a checkout a link to the folder at the top, from which the wheel's copy is made."""


def names() -> list[str]:
    return sorted(file.stem for file in SHIPPED.glob("*.toml"))


def find_recipe(name_or_path: str | Path) -> Path:
    """The file that is meant: a file of that path if there is one, else the shipped recipe of that name.

    What is neither comes back as it is: `read_recipe` refuses it and says what is near.
    """
    path = Path(name_or_path)
    if not path.is_file() and str(path) in names():
        return SHIPPED / f"{path}.toml"
    return path
