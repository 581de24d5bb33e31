"""The configuration of a run: typed tables (schema), what fits (ranges, laws), recipes and overrides (load)."""

from titanmoe.config.fields import to_toml
from titanmoe.config.load import ConfigError, exit_with, load
from titanmoe.config.schema import Config

__all__ = ["Config", "ConfigError", "exit_with", "load", "to_toml"]
