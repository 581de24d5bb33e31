"""A recipe beside what a model's own file says: what it says is taken, and what contradicts it is refused."""

import pytest

from titanmoe.config import ConfigError, load, to_toml
from titanmoe.config.component_kinds import ComponentKind, Components, Spec
from titanmoe.config.fields import build
from titanmoe.config.model_file import ModelFile
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS

FIXED = {
    "model.family": "mixtral",
    "model.rope_theta": 5e5,
    "model.top_k": 3,
    "model.norm_topk": False,
    "model.own.taps": 8,
    "moe.aux_loss": 0.01,
}
DEFAULTS = {"checkpoint.initial_hf": "there", "data.tokenizer": "there"}


class Family(Spec):
    def preset(self, values):
        return {"model.top_k": 7, "model.dim": 128, "model.own.taps": 4}


@pytest.fixture
def read():
    """Reads a command line; `read.asked` is what the file's reader was told."""

    def read_model_file(values):
        read.asked = values
        if values["model.hf"] == "gone":
            raise ConfigError(["gone is not there", "and nowhere else"])
        return ModelFile("there/config.json", FIXED, DEFAULTS)

    def read(*words):
        kinds = (ComponentKind("model.family", {"mixtral": Family()}, Spec), DISPATCHERS)
        return load(words, Components(kinds, read_model_file=read_model_file), lambda config: [])

    return read


def problems(read, *words):
    with pytest.raises(ConfigError) as caught:
        read(*words)
    return caught.value.problems


def test_a_file_gives_the_fields_that_are_not_set(read):
    config = read("--model.hf", "there", "--model.dim", "256")
    assert (config.model.rope_theta, config.model.top_k, config.model.norm_topk) == (5e5, 3, False)
    assert (config.model.dim, config.model.own["taps"], config.moe.aux_loss) == (256, 8, 0.01)
    assert (config.checkpoint.initial_hf, config.data.tokenizer) == ("there", "there")
    assert config.model.hf == ""  # a resolved config does not need the file


def test_without_a_file_nothing_is_asked(read):
    assert read().model.top_k == 7
    assert not hasattr(read, "asked")


def test_what_the_file_only_suggests_can_be_set(read):
    config = read("--model.hf", "there", "--checkpoint.initial_hf=", "--data.tokenizer", "bytes")
    assert (config.checkpoint.initial_hf, config.data.tokenizer) == ("", "bytes")


def test_what_agrees_may_be_repeated(read):
    assert read("--model.hf", "there", "--model.top_k", "3", "--model.own.taps", "8").model.top_k == 3


def test_all_disagreements_are_refused_at_once_with_both_values(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(
        '[model]\nhf = "there"\nrope_theta = 1e6\ntop_k = 2\n[model.own]\ntaps = 4\n[moe]\naux_loss = 0.5\n'
    )
    refusals = problems(read, "--config", "my.toml", "--model.norm_topk", "true", "--training.seed", "-1")
    assert [problem.split(": leave it out")[0] for problem in refusals] == [
        "my.toml:3: model.rope_theta = 1000000.0, but there/config.json says 500000.0",
        "my.toml:4: model.top_k = 2, but there/config.json says 3",
        "command line: model.norm_topk = true, but there/config.json says false",
        "my.toml:6: model.own.taps = 4, but there/config.json says 8",
        "my.toml:8: moe.aux_loss = 0.5, but there/config.json says 0.01",
        "command line: training.seed = -1 is out of range: it must be at least 0",
    ]
    assert refusals[0].endswith('list "rope_theta" in model.change')
    assert refusals[3].endswith('list "own.taps" in model.change')
    assert refusals[4].endswith('list "moe.aux_loss" in model.change')


def test_what_is_listed_wins_over_the_file(read):
    changed = ("--model.rope_theta", "1e6", "--model.own.taps", "4", "--moe.aux_loss", "0.5")
    listed = ("--model.change", "model.rope_theta", "own.taps", "moe.aux_loss")
    config = read("--model.hf", "there", *changed, *listed)
    assert (config.model.rope_theta, config.model.own["taps"], config.moe.aux_loss) == (1e6, 4, 0.5)
    assert config.model.top_k == 3
    assert len(problems(read, "--model.hf", "there", *changed, "--model.change", "rope_theta")) == 2


def test_a_name_in_change_that_is_no_field_is_refused(read):
    (problem,) = problems(read, "--model.hf", "there", "--model.change", "rope_teta", "top_k")
    assert problem.endswith('model.change has "rope_teta", which is not a field: did you mean rope_theta?')


def test_a_wrong_family_does_not_hide_the_rest(read):
    refusals = problems(read, "--model.hf", "there", "--model.family", "mixtrel", "--model.top_k", "1")
    assert len(refusals) == 2 and 'model.family = "mixtrel", but there/config.json says "mixtral"' in refusals[0]


def test_a_file_that_cannot_be_read_is_named_with_all_else(read):
    assert problems(read, "--model.hf", "gone", "--training.seed", "-1") == [
        "command line: gone is not there",
        "command line: and nowhere else",
        "command line: training.seed = -1 is out of range: it must be at least 0",
    ]


def test_the_reader_is_told_which_run_it_is(read, tmp_path):
    (tmp_path / "mine.toml").write_text('[model]\nhf = "there"\n')
    read("--config", str(tmp_path / "mine.toml"))
    assert build(read.asked).job.name == "mine"
    read("--config", str(tmp_path / "mine.toml"), "--job.name", "other")
    assert build(read.asked).job.name == "other"


def test_what_is_printed_loads_back_without_the_file(read, tmp_path):
    config = read("--model.hf", "there", "--model.rope_theta", "1e6", "--model.change", "rope_theta")
    (tmp_path / "printed.toml").write_text(to_toml(config))
    del read.asked
    assert read("--config", str(tmp_path / "printed.toml")) == config
    assert not hasattr(read, "asked")
