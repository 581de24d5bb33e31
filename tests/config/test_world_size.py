"""The number of ranks and the recipe mean the same to train, plan, rehearse and fold."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.load import read_draft
from titanmoe.config.recipe import toml_module
from titanmoe.config.world_size import recipe_ranks, world_of
from titanmoe.train import launch

BODY = '[model]\nfamily = "mixtral"\nsize = "debug"\n'
TP2 = BODY + "[parallelism]\ntp = 2\n"


@pytest.fixture
def recipe(tmp_path: Path):
    def write(text: str) -> str:
        file = tmp_path / "r.toml"
        file.write_text(text)
        return str(file)

    return write


def own_ranks(*words: str) -> int:
    return recipe_ranks(read_draft(words, COMPONENTS))


def test_the_recipes_own_number_and_whatever_overrides_it(recipe):
    file = recipe("[job]\nranks = 8\n" + BODY)
    assert own_ranks(file) == own_ranks("--config", file) == 8
    assert own_ranks("debug", "--job.ranks", "16") == world_of(None, ["debug", "--job.ranks=16"], COMPONENTS) == 16
    assert own_ranks("--training.steps", "5", file, "--data.paths", "a") == 8
    assert own_ranks(recipe(BODY)) == 0
    assert world_of(3, [file], COMPONENTS) == 3


def test_a_comment_that_said_it_is_told_what_to_write(recipe):
    with pytest.raises(ConfigError) as refusal:
        own_ranks(file := recipe("# world = 4\n#\n" + TP2))
    assert refusal.value.problems == [
        f"{file}:1: the comment # world = 4 does not say the number of ranks any more: "
        "write ranks = 4 below a line [job], or give --ranks N"
    ]
    with pytest.raises(ConfigError, match=r"write ranks = 4 below \[job\] in line 2, or"):
        own_ranks(recipe('# world = 4\n[job]\nname = "x"\n'))
    file = recipe("# world = 4\n[job]\nranks = 8\n")
    assert own_ranks(file) == 8, "the key decides, the comment is only a comment"
    assert world_of(2, [recipe("# world = 4\n" + TP2)], COMPONENTS) == 2


def test_no_number_at_all_is_one_message_with_what_else_is_wrong(recipe):
    for argv in ([], [recipe(BODY)]):
        with pytest.raises(
            ConfigError, match=r"on how many ranks. Give --ranks N, or write it into the recipe: ranks = N"
        ):
            world_of(None, argv, COMPONENTS)
    with pytest.raises(ConfigError) as refusal:
        world_of(None, ["--job.ranks", "four"], COMPONENTS)
    assert "job.ranks = four is not an integer" in refusal.value.problems[0] and "how many" in refusal.value.problems[1]
    with pytest.raises(ConfigError, match="--ranks = 0 is not a number of ranks: use 1 or more"):
        world_of(0, [], COMPONENTS)


COMMANDS = ("plan", "rehearse", "fold", "train")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_recipe_by_name_path_and_option(command, monkeypatch, capsys, recipe):
    """Seen at the laws: each finds the same tp = 3 wrong for the recipe's 4 ranks, or for --ranks."""
    more = ["--explain"] if command == "plan" else []
    for words in (["debug"], ["train_configs/debug.toml"], ["--config", "debug"], ["--ranks", "4", "debug"]):
        assert main([command, *words, *more, "--parallelism.tp", "3"]) == 2
        assert "stage of 4 ranks" in capsys.readouterr().err
    assert main([command, *more, "--parallelism.tp", "3", "debug", "--ranks", "8"]) == 2
    assert "stage of 8 ranks" in capsys.readouterr().err
    assert main([command, recipe("# world = 4\n" + BODY), *more]) == 2
    assert "write ranks = 4 below a line [job]" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("old", ["--world", "--gpus", "--nproc"])
def test_old_words_name_the_new_one(command, old, capsys):
    assert main([command, "debug", old, "4"]) == 2
    assert "--ranks 4" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_print_config_asks_for_no_world(command, capsys, recipe):
    def printed(*words: str) -> dict:
        with pytest.raises(SystemExit) as end:
            main([command, *words, "--print-config"])
        assert end.value.code == 0
        return toml_module().loads(capsys.readouterr().out)

    assert printed(recipe(TP2))["parallelism"]["dp_shard"] == -1
    assert printed("deepseek_671b")["job"]["ranks"] == 512
    assert printed("debug", "--ranks", "8")["job"]["ranks"] == 8
    if command == "train":
        assert printed("deepseek_671b")["parallelism"]["dp_shard"] == 4


def test_print_config_of_the_plain_door(monkeypatch, capsys, recipe):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for file, shard in ((recipe(TP2), -1), ("train_configs/deepseek_671b.toml", 4)):
        with pytest.raises(SystemExit) as end:
            launch.read_config([file, "--print-config"], 1, COMPONENTS)
        assert end.value.code == 0 and toml_module().loads(capsys.readouterr().out)["parallelism"]["dp_shard"] == shard
