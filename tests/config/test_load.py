"""Recipes, overrides and the message when they are wrong: everything at once, with place, constraint and fix."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanmoe.config import Config, ConfigError, exit_with, load, to_toml
from titanmoe.config.component_kinds import ComponentError, ComponentKind, Components, Spec
from titanmoe.config.fields import build, fields, flatten, tables, toml_value
from titanmoe.config.load import format_problems
from titanmoe.config.recipe import toml_module
from titanmoe.config.schema import Model
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS

ROOT = Path(__file__).parents[2]
SHAPES = {"small": {"num_layers": 2, "top_k": 3}, "large": {"num_layers": 60, "num_experts": 64, "qk_norm": "head"}}


OWN = {"taps": 4, "scale": 1.0, "gate": False, "kind": "a"}


class ThreeSizes(Spec):
    def preset(self, values):
        if (size := values["model.size"]) == "own":
            return {f"model.own.{name}": value for name, value in OWN.items()}
        if size not in SHAPES | {"debug": {}}:
            text = f"model.size = {size!r} is not a size of mixtral: known are debug, small"
            raise ComponentError(("model.family", "model.size"), text)
        return {f"model.{name}": value for name, value in SHAPES.get(size, {}).items()}


COMPONENTS = Components((ComponentKind("model.family", {"mixtral": ThreeSizes()}, Spec), DISPATCHERS))


def read(*argv, check=lambda config: [], resolve=None):
    return load(argv, COMPONENTS, check, resolve)


def problems(*argv, check=lambda config: []):
    with pytest.raises(ConfigError) as caught:
        read(*argv, check=check)
    return caught.value.problems


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes my.toml into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        Path("my.toml").write_text(text, encoding="utf-8")
        return "--config", "my.toml"

    return write


# ---- values


def test_nothing_given_is_all_defaults():
    config = read()
    assert config.job.name == "mixtral_debug"
    assert replace(config, job=Config().job) == Config()


def test_recipe_sets_fields_and_names_the_run(recipe):
    config = read(*recipe("[training]\nsteps = 7\n[optimizer]\nlr = 1\n[parallelism.experts]\nep = 4\n"))
    assert (config.training.steps, config.parallelism.experts.ep, config.job.name) == (7, 4, "my")
    assert config.optimizer.lr == 1.0 and type(config.optimizer.lr) is float
    assert read(*recipe('[job]\nname = "mine"\n')).job.name == "mine"


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--training.steps", "7"], "training.steps", 7),
        (["--training.steps=7"], "training.steps", 7),
        (["--training.steps", "7", "--training.steps", "8"], "training.steps", 8),
        (["--training.steps", "1_000"], "training.steps", 1000),
        (["--training.global-batch-size", "-1"], "training.global_batch_size", -1),
        (["--parallelism.experts.ep", "4"], "parallelism.experts.ep", 4),
        (["--moe.aux_loss", "1"], "moe.aux_loss", 1.0),
        (["--moe.aux_loss", "1e-2"], "moe.aux_loss", 0.01),
        (["--compile.enable"], "compile.enable", True),
        (["--compile.enable", "--training.steps", "3"], "compile.enable", True),
        (["--compile.enable", "true"], "compile.enable", True),
        (["--model.norm-topk", "False"], "model.norm_topk", False),
        (["--metrics.tensorboard=false"], "metrics.tensorboard", False),
        (["--moe.dispatcher", "allgather"], "moe.dispatcher", "allgather"),
        (["--job.name=--odd=name"], "job.name", "--odd=name"),
        (["--job.name", "7"], "job.name", "7"),
        (["--data.source", "files", "--data.paths", "a", "b"], "data.paths", ["a", "b"]),
        (["--data.source", "files", '--data.paths=["a", "b"]'], "data.paths", ["a", "b"]),
        (["--data.source", "files", "--data.paths=a b"], "data.paths", ["a b"]),
        (["--data.paths="], "data.paths", []),
    ],
)
def test_override(argv, path, value):
    found = flatten(read(*argv))[path]
    assert found == value and type(found) is type(value)


def test_overrides_beat_the_recipe_which_beats_family_and_size(recipe):
    assert read("--model.size", "large").model == Model(size="large", num_layers=60, num_experts=64, qk_norm="head")
    argv = recipe('[model]\nsize = "large"\nnum_layers = 8\nnum_experts = 16\n')
    model = read(*argv, "--model.num_experts", "32").model
    assert (model.num_layers, model.num_experts, model.qk_norm) == (8, 32, "head")
    model = read(*argv, "--model.size", "small").model
    assert (model.num_layers, model.num_experts, model.top_k, model.qk_norm) == (8, 16, 3, "none")


def test_resolve_comes_last_and_only_if_nothing_is_wrong():
    def resolve(config):
        return replace(config, training=replace(config.training, global_batch_size=12))

    assert read(resolve=resolve).training.global_batch_size == 12
    with pytest.raises(ConfigError):
        read(check=lambda config: ["no"], resolve=lambda config: pytest.fail("resolved what is refused"))


# ---- problems


def test_three_mistakes_are_three_problems(recipe):
    argv = recipe("# first\n[training]\nstepz = 3\nseq_len = true\n\n[parallelism]\ntp = 3\n")
    found = problems(*argv, check=lambda config: [f"tp = {config.parallelism.tp} does not fit"])
    assert found == [
        "my.toml:3: unknown key training.stepz: did you mean training.steps?",
        "my.toml:4: training.seq_len = true is not an integer, such as 256",
        "tp = 3 does not fit",
    ]


def test_problems_of_every_source_come_together(recipe):
    argv = recipe('[model]\nsize = "tiny"\n[moe]\njitter = 1.0\n[training]\nsteps = 0\n')
    found = problems(*argv, "--nonsense", "--moe.z_loss", "much", check=lambda config: ["the mapping does not fit"])
    assert [text.partition(" ")[0] for text in found[:2]] == ["command", "command"]
    assert [text.partition(": ")[0] for text in found[2:]] == [
        "my.toml:2",
        "my.toml:6",
        "my.toml:4",
        "the mapping does not fit",
    ]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("[trainning]\nsteps = 3\nseq_len = 4\n", 1, "unknown table trainning: did you mean training?"),
        ("[nonsense]\n", 1, "unknown table nonsense: the tables are job, model, model.own, data"),
        ("[training]\nxyzzy = 3\n", 2, "unknown key training.xyzzy: [training] has steps, epochs, stop_after, seq_len"),
        ("[training]\nlr = 3\n", 2, "unknown key training.lr: did you mean optimizer.lr?"),
        ("[training]\nseq-len = 3\n", 2, "unknown key training.seq-len: did you mean training.seq_len?"),
        ("[parallelism.expert]\nep = 3\n", 1, "unknown table parallelism.expert: did you mean parallelism.experts?"),
        ("[metrics]\nlog_freq = 3\n", 2, "unknown key metrics.log_freq: did you mean metrics.log_every?"),
        ("[training]\nnum_epochs = 3\n", 2, "unknown key training.num_epochs: did you mean training.epochs?"),
        ("steps = 3\n", 1, "unknown key steps: did you mean training.steps?"),
        ("[generation]\ntop_p = 0.9\n", 2, "unknown key generation.top_p: completions are drawn from all ids"),
        ("[rl]\ntop_k = 20\n", 2, "unknown key rl.top_k: completions are drawn from all ids"),
        ("[checkpoint]\nlocal = 0\n", 2, "unknown key checkpoint.local: a run no longer keeps copies in the"),
        ('[checkpoint]\nlocal_folder = "/a"\n', 2, "unknown key checkpoint.local_folder: a run no longer keeps copies"),
        ("\ntraining = 3\n", 2, "training = 3 is not a table: write [training] and its fields below"),
        ("[[training]]\nsteps = 3\n", 1, "training = [{steps = 3}] is not a table"),
        ('[training]\nsteps = "10"\n', 2, 'training.steps = "10" is not an integer: write 10, without quotes'),
        ("[training]\nsteps = 10.0\n", 2, "training.steps = 10.0 is not an integer: write 10"),
        ("[training]\nsteps = 1.5\n", 2, "training.steps = 1.5 is not an integer, such as 100"),
        ("[training]\nsteps = [1]\n", 2, "training.steps = [1] is not an integer"),
        ("[training.steps]\na = 1\n", 1, "training.steps = {a = 1} is not an integer"),
        ("[training]\nsteps = 2026-01-01\n", 2, "training.steps = 2026-01-01 is not an integer"),
        ("[optimizer]\nlr = false\n", 2, "optimizer.lr = false is not a number, such as 0.0003"),
        ('[optimizer]\nlr = "3e-4"\n', 2, 'optimizer.lr = "3e-4" is not a number: write 0.0003, without quotes'),
        ("[compile]\nenable = 1\n", 2, "compile.enable = 1 is not true or false"),
        ('[compile]\nenable = "true"\n', 2, 'compile.enable = "true" is not true or false: write true, without quotes'),
        ("[job]\nname = 5\n", 2, 'job.name = 5 is not a string: write "5", in quotes'),
        ('[data]\npaths = "a"\n', 2, 'data.paths = "a" is not a list of strings: write it as ["a"]'),
        ('[data]\npaths = [\n  "a",\n  3,\n]\n', 2, 'data.paths = ["a", 3] is not a list of strings'),
        (
            '[moe]\ndispatcher = "all2all"\n',
            2,
            f'moe.dispatcher = "all2all" is not one of {", ".join(DISPATCHERS.table)}: did you mean allto',
        ),
        ("[model]\nqk_norm = true\n", 2, "model.qk_norm = true is not one of none, head, full"),
        ("[moe]\ndispatcher = 2\n", 2, 'moe.dispatcher = 2 is not a string: write "2", in quotes'),
        ('[training]\ndtype = "float16"\n', 2, 'training.dtype = "float16" is not one of float32, bfloat16, float64'),
        ('a = """\n[training]\nsteps = 3"""\n[training]\nsteps = 0\n', 5, "training.steps = 0 is out of range"),
        ("[optimizer]\nlr = nan\n", 2, "optimizer.lr = nan is not a finite number: it must be in (0, 1]"),
        (f"[optimizer]\nlr = 1{'0' * 400}\n", 2, "optimizer.lr = inf is not a finite number"),
        (
            f"[training]\nseed = {2**63}\n",
            2,
            f"training.seed = {2**63} is out of range: it must be at least 0 and below 2**63",
        ),
        (
            "[optimizer]\nlr = 1e30\n",
            2,
            "optimizer.lr = 1e+30 is out of range: it must be in (0, 1], because a step of AdamW",
        ),
        ('[model]\nsize = "tiny"\n', 2, "model.size = 'tiny' is not a size of mixtral: known are debug, small"),
        ("learning_rate = 1e-4\n", 1, "unknown key learning_rate: did you mean optimizer.lr?"),
        ("[training]\nlearning_rate = 1e-4\n", 2, "unknown key training.learning_rate: did you mean optimizer.lr?"),
        ("[data]\nmax_seq_length = 64\n", 2, "unknown key data.max_seq_length: did you mean training.seq_len?"),
        ("[optimizer]\nlora_rank = 8\n", 2, "unknown key optimizer.lora_rank: did you mean lora.rank?"),
        ("dry-run = true\n", 1, "unknown key dry-run: --print-config prints every field"),
    ],
)
def test_problem_in_a_recipe(recipe, text, line, says):
    found = problems(*recipe(text))
    assert found[-1].startswith(f"my.toml:{line}: {says}")
    assert len(found) == 1 or "unknown key a:" in found[0]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--training.stepz", "3"], "unknown option --training.stepz: did you mean --training.steps?"),
        (["--tp", "3"], "unknown option --tp: did you mean --parallelism.tp?"),
        (
            ["--checkpoint.local", "10"],
            "unknown option --checkpoint.local: a run no longer keeps copies in the memory of its hosts: leave it out, "
            "and set checkpoint.interval to as many steps as you can afford to repeat",
        ),
        (["--xyzzy", "a", "b"], "unknown option --xyzzy: --help lists them all"),
        (["--tensor-model-parallel-size", "2"], "unknown option --tensor-model-parallel-size: it is --parallelism.tp"),
        (["--micro_batch_size=4"], "unknown option --micro_batch_size: it is --training.local_batch_size 4 here"),
        (["--parallelism.tensor_parallel_degree", "2"], "unknown option --parallelism.tensor_parallel_degree: it is "),
        (["--num_train_epochs", "3"], "unknown option --num_train_epochs: it is --training.epochs 3 here"),
        (["--nproc_per_node", "8"], "unknown option --nproc_per_node: the number of ranks is given by --ranks 8"),
        (["--parallelism.experts", "4"], "--parallelism.experts is a table, not a field: its fields are --para"),
        (["--training.steps", "10", "20"], "'20' does not belong to an option"),
        (["--training.steps"], "--training.steps needs a value, an integer"),
        (["--data.paths"], "--data.paths needs a value, a list of strings"),
        (["--training.steps="], 'training.steps = "" is not an integer, such as 100'),
        (["--training.steps", "ten"], "training.steps = ten is not an integer, such as 100"),
        (["--training.steps", "1e4"], "training.steps = 1e4 is not an integer: write 10000"),
        (["--optimizer.lr", "high"], "optimizer.lr = high is not a number, such as 0.0003"),
        (["--compile.enable", "yes"], "compile.enable = yes is not true or false"),
        (
            ["--moe.dispatcher", "gather"],
            f'moe.dispatcher = "gather" is not one of {", ".join(DISPATCHERS.table)}: did you mean allg',
        ),
        (["--data.paths=[1]"], "data.paths = [1] is not a list of strings"),
        (["--data.paths=[a"], "data.paths = [a is not a list of strings"),
        (
            ["--training.steps", "0"],
            "training.steps = 0 is out of range: it must be at least 1, or -1: -1 takes what training.epochs needs; "
            "--print-config, titanmoe plan and titanmoe rehearse start no run",
        ),
        (["--learning_rate", "1e-4"], "unknown option --learning_rate: it is --optimizer.lr 1e-4 here"),
        (["--max_seq_length=512"], "unknown option --max_seq_length: it is --training.seq_len 512 here"),
        (["--optimizer.lora_rank", "8"], "unknown option --optimizer.lora_rank: did you mean --lora.rank?"),
        (["--lora-alpha", "8"], "unknown option --lora-alpha: it is --lora.alpha 8 here"),
        (["--reward_funcs", "f"], "unknown option --reward_funcs: it is --rl.reward f here"),
        (["--beta", "0.1"], "unknown option --beta: --dpo.beta B for DPO, --rl.kl K for"),
        (["--val_set_size", "0.1"], "unknown option --val_set_size: --validation.held_out 100"),
        (["--adapter", "lora"], "unknown option --adapter: --lora.rank 16"),
        (["--datasets.type", "completion"], "unknown option --datasets.type: --data.format auto for raw text (com"),
        (
            ["--dry-run"],
            "unknown option --dry-run: --print-config prints every field and starts nothing, titanmoe plan",
        ),
        (["--config"], "--config needs a file"),
        (["--config="], "--config needs a file"),
    ],
)
def test_problem_on_the_command_line(argv, says):
    (found,) = problems(*argv)
    assert found.startswith(f"command line: {says}")


def test_a_run_has_one_recipe(recipe):
    (found,) = problems(*recipe(""), "--config", "other.toml")
    assert "two recipes are given, my.toml and other.toml" in found


def test_an_override_replaces_a_value_that_is_out_of_range_but_not_a_wrong_type(recipe):
    argv = recipe("[training]\nsteps = 0\n")
    assert read(*argv, "--training.steps", "5").training.steps == 5
    argv = recipe("[training]\nsteps = 0.5\n")
    assert [text.partition(": ")[0] for text in problems(*argv, "--training.steps", "5")] == ["my.toml:2"]


def test_a_violated_law_names_every_place_it_comes_from(recipe):
    (found,) = problems(*recipe("[model]\nnum_experts = 4\n"), "--model.top_k", "5")
    assert found.startswith("command line, my.toml:2: model.top_k = 5 exceeds model.num_experts = 4")
    (found,) = problems(*recipe("[model]\nnum_experts = 1\n"))
    assert found.startswith("my.toml:2: model.top_k = 2 exceeds")


def test_checks_run_on_stand_ins_and_say_so(recipe):
    seen = []

    def check(config):
        seen.append(config)
        return [f"seq_len {config.training.seq_len} % tp {config.parallelism.tp}", "an ep of another kind"]

    argv = recipe('[training]\nseq_len = "long"\n[parallelism]\ntp = 3\n[parallelism.experts]\nep = 0\n')
    found = problems(*argv, check=check)
    assert seen[0].training.seq_len == Config().training.seq_len
    assert found[2:] == [
        "seq_len 256 % tp 3 (taking training.seq_len = 256, because what was given is refused above)",
        "an ep of another kind (taking parallelism.experts.ep = 1, because what was given is refused above)",
    ]


def test_laws_do_not_check_the_default_model_if_the_size_is_unknown(recipe):
    argv = recipe('[model]\nsize = "tiny"\nnum_dense_layers = 9\ndense_hidden = 8\ntop_k = 9\n')
    assert len(problems(*argv)) == 1
    assert len(problems(*argv, "--model.num_layers", "8")) == 2


# ---- a family's own fields


def test_own_fields_have_their_familys_defaults_and_can_be_set(recipe):
    assert read().model.own == {}
    assert read("--model.size", "own").model.own == OWN
    argv = recipe('[model]\nsize = "own"\n[model.own]\ntaps = 5\nscale = 2\n')
    assert read(*argv).model.own == {"taps": 5, "scale": 2.0, "gate": False, "kind": "a"}
    words = ["--model.own.taps", "6", "--model.own.gate", "--model.own.kind=b"]
    assert read(*argv, *words).model.own == {"taps": 6, "scale": 2.0, "gate": True, "kind": "b"}


def test_own_fields_are_printed_and_read_again(recipe, capsys):
    argv = ("--model.size", "own", "--model.own.kind", "b")
    printed = output(capsys, *argv, "--print-config")
    assert '\n[model.own]\ntaps = 4\nscale = 1.0\ngate = false\nkind = "b"\n' in printed
    assert read(*recipe(printed)) == read(*argv, "--job.name", "mixtral_own")
    assert '  --model.own.kind STR = "b"   (command line)\n' in output(capsys, *argv, "--help")
    assert "[model.own]\n" not in output(capsys, "--print-config")


@pytest.mark.parametrize(
    ("size", "text", "says"),
    [
        ("own", "tops = 5", "my.toml:4: unknown key model.own.tops: did you mean model.own.taps?"),
        ("own", "x = 5", "my.toml:4: unknown key model.own.x: the family's are model.own.taps, model.own.scale, "),
        ("own", 'taps = "5"', 'my.toml:4: model.own.taps = "5" is not an integer: write 5, without quotes'),
        ("own", "taps = {a = 1}", "my.toml:4: model.own.taps = {a = 1} is not an integer, such as 4"),
        ("small", "taps = 5", "my.toml:4: unknown key model.own.taps: the family has none of its own"),
        ("tiny", "taps = 5", "my.toml:2: model.size = 'tiny' is not a size of mixtral"),
    ],
)
def test_problem_of_an_own_field(recipe, size, text, says):
    (problem,) = problems(*recipe(f'[model]\nsize = "{size}"\n[model.own]\n{text}\n'))
    assert problem.startswith(says)


def test_problem_of_an_own_field_on_the_command_line():
    (problem,) = problems("--model.size", "own", "--model.own.taps", "many")
    assert problem == "command line: model.own.taps = many is not an integer, such as 4"
    (problem,) = problems("--model.size", "own", "--model.own.tabs", "4")
    assert problem == "command line: unknown key model.own.tabs: did you mean model.own.taps?"


# ---- files


def test_missing_recipe(recipe):
    recipe("")
    assert problems("--config", "mi.toml") == ["mi.toml: there is no such file: did you mean my.toml?"]
    assert problems("--config", "gone/else.toml") == ["gone/else.toml: there is no such file"]
    assert problems("--config", ".") == [
        ".: cannot be read: Is a directory: name a TOML file, and check its permissions"
    ]
    assert len(problems("--config", "mi.toml", "--nonsense")) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[training]\nsteps = ten\n", "my.toml:2:9: is not TOML: Invalid value (strings need double quotes; "),
        ("[training]\nsteps = 1\nsteps = 2\n", "my.toml:3:10: is not TOML: Cannot overwrite a value"),
        ("[training\n", "my.toml:1:10: is not TOML: "),
        ('a = "', "my.toml: is not TOML: "),
    ],
)
def test_broken_recipe(recipe, text, says):
    (found,) = problems(*recipe(text))
    assert found.startswith(says)


def test_recipe_that_is_not_utf8(recipe):
    argv = recipe("")
    Path("my.toml").write_bytes(b"[job]\nname = '\xff'\n")
    assert problems(*argv) == ["my.toml:2: byte 0xff is not UTF-8: save the file as UTF-8"]


def test_recipe_from_windows(recipe):
    argv = recipe("")
    Path("my.toml").write_bytes("\ufeff[training]\r\nsteps = 3\r\nlong = 1\r\n".encode())
    (found,) = problems(*argv)
    assert found.startswith("my.toml:3: unknown key training.long")


# ---- what is printed


def output(capsys, *argv, **options):
    with pytest.raises(SystemExit) as exited:
        read(*argv, **options)
    assert exited.value.code == 0
    return capsys.readouterr().out


def test_printed_config_loads_back_to_the_same(recipe, capsys):
    argv = [*recipe('[model]\nsize = "large"\n[optimizer]\nlr = 1e-5\n'), "--parallelism.experts.ep", "4"]
    config = read(*argv)
    printed = output(capsys, *argv, "--print-config")
    assert printed == to_toml(config)
    Path("printed.toml").write_text(printed)
    assert read("--config", "printed.toml") == config


def test_printed_config_is_resolved(capsys):
    def resolve(config):
        return replace(config, parallelism=replace(config.parallelism, dp_shard=8))

    assert "\ndp_shard = 8\n" in output(capsys, "--print_config", resolve=resolve)


def test_a_wrong_config_is_not_printed(capsys):
    assert problems("--print-config", "--training.steps", "0")
    assert capsys.readouterr().out == ""


ANY = {
    "job.name": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    "training.seed": st.integers(-(2**60), 2**60),
    "optimizer.lr": st.floats(allow_nan=False),
    "compile.enable": st.booleans(),
    "moe.dispatcher": st.sampled_from(list(DISPATCHERS.table)),
    "data.paths": st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=3),
    "pipeline.layers_per_stage": st.lists(st.integers(0, 99), max_size=3),
    "data.weights": st.lists(st.floats(allow_nan=False), max_size=3),
}


@settings(max_examples=20)
@given(st.fixed_dictionaries(ANY))
def test_any_config_survives_toml(values):
    data = toml_module().loads(to_toml(build(values)))
    found = {path: reduce(getitem, path.split("."), data) for path in fields()}
    assert found == flatten(build(values)) == flatten(Config()) | values


def test_toml_value():
    assert toml_value('a"\\\n\x00\x7f\U0001f600') == '"a\\"\\\\\\n\\u0000\\u007f\U0001f600"'


def test_help_shows_every_field_with_its_value_and_where_it_comes_from(recipe, capsys):
    page = output(capsys, *recipe('[model]\nsize = "small"\n[training]\nsteps = 7\n'), "--moe.z_loss=0.5", "--help")
    for path in fields():
        assert f"  --{path} " in page
    for table, cls in tables().items():
        assert f"[{table}] {cls.__doc__[:20]}" in page
    assert "  --training.steps INT = 7   (my.toml:4)\n      Number of optimizer steps" in page
    assert "  --moe.z_loss FLOAT = 0.5   (command line)\n" in page
    assert "  --model.num_layers INT = 2\n" in page
    assert f"  --moe.dispatcher {{{','.join(DISPATCHERS.table)},MODULE:NAME}} = " in page
    assert "  --compile.enable {true,false} = false\n" in page
    assert all(len(line) <= 120 or line.startswith("  --") for line in page.splitlines())


def test_help_comes_whatever_is_wrong(recipe, capsys):
    page = output(capsys, *recipe("[training]\nsteps = 0.5\nstepz = 1\n"), "-h", check=lambda config: ["no"])
    assert "  --training.steps INT = 100\n" in page


def test_format_problems():
    assert format_problems(["one"]) == "error: one"
    assert format_problems(["one"], "my.toml") == "error: 1 problem in my.toml\n\n  1. one"
    text = format_problems([f"p{i}" for i in range(9)] + ["two\nlines"], "my.toml and the command line")
    assert text.startswith("error: 10 problems in my.toml and the command line\n\n   1. p0\n")
    assert text.endswith("\n  10. two\n      lines")
    text = format_problems([*"abc", "and 1,039 more soon after them"])
    assert text.startswith("error: 1,042 problems\n\n  1. a\n")
    with pytest.raises(ConfigError, match=r"^error: 1 problem in the command line\n\n  1\. command line: unknown"):
        read("--nonsense")


# ---- processes


def test_exit_code_2_and_one_message(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for rank, says in ((None, "error: no\n"), ("0", "error: no\n"), ("3", "rank 3: error: no\n")):
        monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as exited:
                exit_with(["no"])
        finally:
            signal.signal(signal.SIGTERM, handler)
        assert exited.value.code == 2
        assert capsys.readouterr().err == says
    assert len(waited) == 1


def test_other_ranks_print_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert output(capsys, "--help") == output(capsys, "--print-config") == ""


def test_rank_that_waits_for_rank_0_ends_with_code_2_too():
    code = (
        "import time; from titanmoe.config import exit_with; wait = time.sleep; "
        "time.sleep = lambda seconds: print('waits', flush=True) or wait(60); exit_with(['no'])"
    )
    environment = os.environ | {"RANK": "1", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=pipe, stderr=pipe) as process:
        assert process.stdout.readline() == b"waits\n"
        process.terminate()
        assert process.wait() == 2
        assert process.stderr.read() == b""


def test_help_into_a_closed_pipe_is_quiet():
    imports = "from titanmoe.config import load; from titanmoe.components import COMPONENTS"
    code = f"{imports}; load(['--help'], COMPONENTS, lambda config: [])"
    command = f'"{sys.executable}" -c "{code}" | head -1'
    done = subprocess.run(command, shell=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.stdout.startswith(b"usage:") and done.stderr == b""


def test_import_is_alone():
    code = "import sys; before = set(sys.modules); import titanmoe.config; print(*set(sys.modules) - before)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    modules = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).stdout.decode().split()
    assert modules
    ours = {name for name in modules if name.startswith("titanmoe.") and not name.startswith("titanmoe.config")}
    assert ours <= {"titanmoe.this_process"} and not {"torch", "rich", "numpy"} & set(modules)
