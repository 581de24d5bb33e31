"""What a recipe may name: components of the package and of one's own, and what is said of those that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanmoe.config import ConfigError, load
from titanmoe.config.component_kinds import ComponentError, ComponentKind, Components, Spec
from titanmoe.config.schema import Config

OWN = """
from abc import abstractmethod

from titanmoe.config.component_kinds import Spec
from titanmoe.config.ranges import Violation


class OwnSpec(Spec):
    help = "whole sends everything."

    def contradictions(self, config):
        if config.training.seed == 13:
            yield Violation(("training.seed",), "training.seed = 13 brings bad luck to whole: use another")

    def violations(self, config, degrees):
        if degrees["ep"] > 1:
            yield f"whole has no ep = {degrees['ep']}: use 1"


class Whole:
    spec = OwnSpec()

    def dispatch(self): ...


class Half:
    spec = OwnSpec()


class Declared(Half):
    @abstractmethod
    def dispatch(self): ...


class Base:
    @abstractmethod
    def also(self): ...


class Undone(Base, OwnSpec):
    pass


undone = Undone()


class NoSpec:
    def dispatch(self): ...
"""


class Usual(Spec):
    help = "usual is usual."
    implementation = "builtins:dict"


@pytest.fixture
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ComponentKind:
    (tmp_path / "own_components.py").write_text(OWN)
    (tmp_path / "broken_component.py").write_text("import nothing_of_this_name\n")
    monkeypatch.chdir(tmp_path)
    return ComponentKind(
        "moe.dispatcher", {"alltoall": Usual(), "whole": "own_components:Whole"}, Spec, members=("dispatch",)
    )


def test_a_component_is_found_by_its_name_and_by_where_it_lies(kind: ComponentKind) -> None:
    assert kind.look_up("whole") is kind.look_up("own_components:Whole")
    assert kind.implementation("whole").__name__ == kind.implementation("own_components:Whole").__name__ == "Whole"
    assert kind.summary() == "usual is usual. whole sends everything."


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hole", '"hole" is not one of alltoall, whole: did you mean whole?'),
        ("zzz", '"zzz" is not one of alltoall, whole: one of your own is called "module:NAME"'),
        ("no_such_module:X", '"no_such_module:X" cannot be used: no_such_module cannot be imported: ModuleNotFound'),
        (
            "broken_component:X",
            "broken_component cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this",
        ),
        ("own_components:Hole", '"own_components:Hole" cannot be used: own_components has no Hole'),
        ("own_components:NoSpec", "own_components:NoSpec has no `spec`, an instance of Spec"),
        ("own_components:Half", "own_components:Half lacks dispatch"),
        ("own_components:Declared", "own_components:Declared lacks dispatch"),
        ("own_components:undone", "own_components:undone lacks dispatch, also"),
    ],
)
def test_a_component_that_cannot_be_used_is_refused(kind: ComponentKind, name: str, says: str) -> None:
    with pytest.raises(ComponentError) as caught:
        kind.look_up(name)
    assert f"moe.dispatcher = {says}" in str(caught.value) or says in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        load(["--moe.dispatcher", name, "--training.steps", "0"], Components((kind,)), lambda config: [])
    assert says in refused.value.problems[0] and "training.steps = 0" in refused.value.problems[1]


def test_a_component_that_lacks_a_member_is_refused_where_it_is_used(kind: ComponentKind) -> None:
    with pytest.raises(ComponentError, match="builtins:dict lacks dispatch"):
        kind.implementation("alltoall")


def test_its_spec_is_asked(kind: ComponentKind) -> None:
    argv = ["--moe.dispatcher", "whole", "--training.seed", "13"]
    with pytest.raises(ConfigError, match=r"training.seed = 13 brings bad luck to whole"):
        load(argv, Components((kind,)), lambda config: [])
    config = load(argv[:2], Components((kind,)), lambda config: [])
    (spec,) = config.components.specs(config)
    assert list(spec.violations(config, {"ep": 2})) == ["whole has no ep = 2: use 1"]


def test_a_config_that_no_recipe_was_read_for_has_no_components() -> None:
    assert list(Config().components.specs(Config())) == []
