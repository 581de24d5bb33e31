"""The configuration of a run: a dataclass per TOML table, its checks, and how recipes and command lines are read.

`schema` has the fields, `ranges` and `laws` what values are allowed, `load` turns a recipe and overrides into a Config.
This is the lowest room: it imports no other one. The components that a recipe can name are passed in by the caller.
"""

from titanmoe.config.fields import to_toml
from titanmoe.config.load import ConfigError, exit_with, load
from titanmoe.config.schema import Config

__all__ = ["Config", "ConfigError", "exit_with", "load", "to_toml"]
