"""Interpret a pickle safely: the result says what it describes, and nothing that it names is imported or called.

saved_tensor and read_dcp read files of strangers with it. A pickle is a list of operations on a stack; the operations
that the caller allows are followed one by one, and calls become PickledCall values. The result has at most one value
for each byte of the pickle: at most a hundred times its size, about fifteen times if torch wrote it.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

VALUES = frozenset(("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"))
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
CALLS = frozenset(
    ("PROTO", "BINPUT", "LONG_BINPUT", "GLOBAL", "MARK", "TUPLE", *TUPLES, "EMPTY_TUPLE", "REDUCE", "STOP")
)
"""Operations that describe calls of functions or classes."""
OBJECTS = CALLS.union(
    ("FRAME", "MEMOIZE", "BINGET", "LONG_BINGET", "STACK_GLOBAL", "NEWOBJ", "BUILD", "NONE", "NEWTRUE", "NEWFALSE"),
    ("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
)
"""Operations that also describe objects, lists and dicts, any of which may be referred to twice."""


class GlobalName(NamedTuple):
    """A function or class that the pickle names, as "MODULE NAME"."""

    name: str


class StorageRef(NamedTuple):
    """A reference to a tensor storage outside the pickle (a persistent id)."""

    key: Any


@dataclass(slots=True)
class PickledCall:
    """A call or object that unpickling would make, with its arguments and the state it would set."""

    function: Any
    arguments: Any
    state: Any = None


class DictItems(list[tuple[Any, Any]]):
    """The items of a dict, as a list: hashing an untrusted key could recurse without end."""


def follow(pickled: bytes, operations: Collection[str], what: str, names: Collection[str] | None = None) -> Any:
    """Return what a pickle describes, without importing or calling anything; ValueError if it is damaged.

    Functions and classes become GlobalName, calls and objects PickledCall, dicts DictItems, persistent ids StorageRef.

    Args:
        pickled: the pickle.
        operations: names of the pickle operations that it may have; a ValueError names any other.
        what: what the pickle should describe, for the error's message.
        names: the functions and classes that it may name, as "MODULE NAME"; None for any.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    try:
        for operation, argument, _ in pickletools.genops(pickled):
            if operation.name not in operations:
                raise ValueError(f"the pickle is not {what}: that needs no {operation.name}")
            _apply(operation.name, argument, stack, marks, memo)
            if names is not None and "GLOBAL" in operation.name and stack[-1].name not in names:
                raise ValueError(f"the pickle is not {what}: that needs no {stack[-1].name!r:.100}")
    except (IndexError, AttributeError, TypeError):
        raise ValueError(f"the pickle is not {what}: the operations do not fit together") from None
    if len(stack) != 1:
        raise ValueError(f"the pickle is not {what}")
    return stack[0]


def _apply(name: str, argument: Any, stack: list[Any], marks: list[int], memo: list[Any]) -> None:
    if name == "MEMOIZE" or (name in ("BINPUT", "LONG_BINPUT") and argument == len(memo)):
        memo.append(stack[-1])
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in VALUES:
        stack.append(argument)
    elif name in CONSTANTS:
        stack.append(CONSTANTS[name])
    elif name == "MARK":
        marks.append(len(stack))
    elif name in TUPLES:
        stack[-TUPLES[name] :] = [_last(stack, TUPLES[name])]
    elif name == "TUPLE":
        mark = marks.pop()
        stack[mark:] = [tuple(stack[mark:])]
    elif name == "EMPTY_LIST":
        stack.append([])
    elif name == "EMPTY_DICT":
        stack.append(DictItems())
    elif name in ("APPENDS", "SETITEMS"):
        values = stack[(mark := marks.pop()) :]
        del stack[mark:]
        stack[-1].extend(values if name == "APPENDS" else zip(values[::2], values[1::2], strict=True))
    elif name == "APPEND":
        value = stack.pop()
        stack[-1].append(value)
    elif name == "SETITEM":
        value, key = stack.pop(), stack.pop()
        stack[-1].append((key, value))
    elif name == "GLOBAL":
        stack.append(GlobalName(argument))
    elif name == "STACK_GLOBAL":
        stack[-2:] = [GlobalName(" ".join(_last(stack, 2)))]
    elif name in ("REDUCE", "NEWOBJ"):
        stack[-2:] = [PickledCall(*_last(stack, 2))]
    elif name == "BUILD":
        state = stack.pop()
        stack[-1].state = state
    elif name == "BINPERSID":
        stack.append(StorageRef(stack.pop()))
    elif name not in ("PROTO", "FRAME", "STOP"):
        raise TypeError(name)


def _last(stack: list[Any], count: int) -> tuple[Any, ...]:
    """Return the last `count` values of the stack, which keeps them; IndexError if it has fewer."""
    if len(stack) < count:
        raise IndexError
    return tuple(stack[-count:])
