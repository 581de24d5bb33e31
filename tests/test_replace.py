"""An attribute has another value inside the context, and none of its own afterwards if it had none before."""

import pytest

from titanmoe.replace import replaced


class Base:
    @staticmethod
    def own() -> str:
        return "own"

    def inherited(self) -> str:
        return "inherited"


class Derived(Base):
    pass


def test_a_static_method_stays_one() -> None:
    with replaced(Base, "own", lambda: "other"):
        assert Base.own() == "other"
    assert isinstance(vars(Base)["own"], staticmethod) and Base().own() == "own"


def test_what_was_inherited_is_inherited_again_even_after_an_error() -> None:
    derived = Derived()
    with pytest.raises(KeyError), replaced(derived, "inherited", lambda: "other"):
        assert derived.inherited() == "other" and Derived().inherited() == "inherited"
        raise KeyError
    assert vars(derived) == {} and derived.inherited() == "inherited"


def test_a_name_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(AttributeError), replaced(Derived, "inherit", None):
        pass
    assert not hasattr(Derived, "inherit")
