"""How much a chat template may spend. A template comes with a downloaded model, and a page of Jinja can ask for
10^10 of anything: so its loops, its calls and the text it makes are counted, and one that exceeds the limits below is
stopped.

    steps       nodes of the template executed, and items of lists and objects visited
    characters  of text made or read

Python's own stack bounds recursion. What makes much out of little in one operation (`*`, `**`, `%`, `replace`, `join`,
`indent`) is estimated before it is done; what only pads or wraps text is left out: no published template needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

STEPS, STEPS_PER_MESSAGE, STEPS_PER_CHARACTER = 1_000_000, 10_000, 1
"""A published template takes a few hundred steps per message."""
CHARACTERS, CHARACTERS_PER_CHARACTER = 16_000_000, 100
"""How many times the conversation's own characters may be read."""
BITS = 10_000
"""Of an integer."""
INDENT = 16

_UNUSED_FILTERS = ("batch", "center", "filesizeformat", "format", "pprint", "random", "slice", "striptags")
_UNUSED_FILTERS += ("urlize", "wordwrap", "xmlattr")
_SHALLOW = {"attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr"}
_SHALLOW |= {"reverse", "select", "selectattr"}
_LETTERS = {"groupby", "join", "list", "map", "max", "min", "reject", "select", "sort", "sum", "unique"}
"""Filters that treat a text as a list of its characters."""
_PLAIN_TESTS = {"boolean", "callable", "defined", "escaped", "even", "false", "filter", "float", "integer", "iterable"}
_PLAIN_TESTS |= {"mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true", "undefined"}
_OF_TEXT = {"capitalize", "casefold", "count", "endswith", "find", "format", "index", "join", "lower", "lstrip"}
_OF_TEXT |= {"partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit"}
_OF_TEXT |= {"rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"}
_MANY = (list, tuple, dict, set, range, KeysView, ValuesView, ItemsView)
_WIDE = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)|\{[^{}]*:[^{}]*(\d{4}|\{)")
"""A format field that is 1,000 characters wide or more, or as wide as an argument says."""


class OverBudget(Exception):
    """Not an exception that Jinja's own filters swallow."""


class _Counting(CodeGenerator):
    """Makes the template's code report what it spends."""

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        self.writeline(f"environment.spend({1 + sum(map(_own, nodes))}, {sum(map(_text, nodes))})")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # rejected items never get to the body
            node.test = nodes.And(nodes.EnvironmentAttribute(f"spend({_own(node.test)})"), node.test)
        node.iter = _through("iterated", node.iter)
        super().visit_For(node, frame)

    def macro_body(self, node: Any, frame: Frame) -> Any:
        if node.defaults:  # they are evaluated at each call
            spent = nodes.EnvironmentAttribute(f"spend({sum(map(_own, node.defaults))})")
            node.body = [nodes.ExprStmt(spent, lineno=node.lineno), *node.body]
        return super().macro_body(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        node.nodes = [_through("sized", part) for part in node.nodes]
        super().visit_Concat(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        node.expr = _through("sized", node.expr)
        for operand in node.ops:
            operand.expr = _through("sized", operand.expr)
        super().visit_Compare(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        for pair in node.items:
            pair.key = _through("sized", pair.key)
        super().visit_Dict(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            node.node = _through("sliced", node.node)
        super().visit_Getitem(node, frame)


def _through(name: str, node: Any) -> Any:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Call(nodes.EnvironmentAttribute(name), [node], [], None, None, lineno=node.lineno)


def _own(node: nodes.Node) -> int:
    """Nodes, without those of inner blocks, which count themselves."""
    return 1 + sum(map(_own, node.iter_child_nodes(exclude=("body", "else_"))))


def _text(node: nodes.Node) -> int:
    """Characters of its own that the template writes."""
    if not isinstance(node, nodes.Output):
        return 0
    return sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))


class Counted(ImmutableSandboxedEnvironment):
    """An environment that stops its templates after a number of steps."""

    code_generator_class = _Counting
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any):
        self.begin([])
        super().__init__(finalize=self.sized, **options)
        del self.globals["lipsum"]
        for name in _UNUSED_FILTERS:
            del self.filters[name]
        self.filters |= {name: self._filter(name, do) for name, do in self.filters.items()}
        self.tests |= {name: self._reckoned(do) for name, do in self.tests.items() if name not in _PLAIN_TESTS}

    def set_filter(self, name: str, do: Callable[..., Any]) -> None:
        self.filters[name] = self._filter(name, do)

    # ---- the account

    def begin(self, messages: list[Any]) -> None:
        """Start rendering these messages."""
        self.steps = self.characters = 1 << 62
        self._walk(messages)
        items, read = (1 << 62) - self.steps, (1 << 62) - self.characters
        self.steps = STEPS + STEPS_PER_MESSAGE * len(messages) + STEPS_PER_CHARACTER * (items + read)
        self.characters = CHARACTERS + CHARACTERS_PER_CHARACTER * read
        self.most = self.steps, self.characters

    def spend(self, steps: int, characters: int = 0) -> bool:
        self.steps -= steps
        self.characters -= characters
        if self.steps < 0 or self.characters < 0:
            self._over()
        return True

    def _over(self) -> None:
        steps, characters = self.most
        if self.steps < 0:
            raise OverBudget(f"takes more than {steps:,} steps, the limit for this conversation")
        raise OverBudget(f"makes or reads more than {characters:,} characters, the limit for this conversation")

    def _walk(self, value: Any, indent: int = 0) -> None:
        """Charges for everything in the value, as often as it occurs."""
        stack = [(value, 0)]
        while stack:
            value, depth = stack.pop()
            if isinstance(value, str):
                self.spend(1, len(value) + depth * indent)
                continue
            if isinstance(value, Namespace):
                value = value._Namespace__attrs
            if isinstance(value, Mapping):
                held = [*value.keys(), *value.values()]
            elif isinstance(value, list | tuple | KeysView | ValuesView | ItemsView | set):
                held = list(value)
            else:
                self.spend(1, 8 + depth * indent)
                continue
            self.spend(1 + len(held), depth * indent)
            stack += [(it, depth + 1) for it in held]

    def _shallow(self, value: Any, letters: bool = False) -> None:
        if isinstance(value, str):
            self.spend(len(value) if letters else 0, len(value))
        elif isinstance(value, _MANY):
            self.spend(len(value))

    # ---- what the code of a template calls

    def sized(self, value: Any) -> Any:
        self._walk(value)
        return value

    def sliced(self, value: Any) -> Any:
        self._shallow(value)
        return value

    def iterated(self, value: Any) -> Any:
        self._shallow(value, letters=True)
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):  # it is hashed
            self._walk(argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in _OF_TEXT and not attr.startswith("is"):
            return False
        return not isinstance(obj, int | float | bytes) and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        of = getattr(__obj, "__self__", None)
        if of is __self:
            return __obj(args[0])
        if isinstance(__obj, Macro):  # its body is counted
            return super().call(__context, __obj, *args, **kwargs)
        named = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars", "caller")}
        __self._walk([*args, *named.values()])
        name = getattr(__obj, "__name__", "")
        text = of if isinstance(of, str) else getattr(getattr(__obj, "__wrapped__", None), "__self__", None)
        if isinstance(text, str):
            __self._of_text(text, name, args, named)
        elif of is not None:
            __self._shallow(of)
        found = super().call(__context, __obj, *args, **kwargs)
        __self._shallow(found)
        return found

    def _of_text(self, text: str, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.spend(0, len(text))
        if name == "replace":
            self._replaced(text, *args[:2])
        elif name == "join":
            self._joined(text, args[0])
        elif name in ("format", "format_map"):
            self._formatted(text, [*args, *named.values()], "{")
        elif name in ("split", "rsplit", "splitlines"):
            by = args[0] if args else named.get("sep")
            self.spend(text.count(by) if name != "splitlines" and isinstance(by, str) and by else len(text))

    def _replaced(self, text: str, old: Any, new: Any) -> None:
        self.spend(0, str(text).count(str(old)) * len(str(new)))

    def _joined(self, between: str, parts: Any) -> None:
        self._walk(parts)
        if isinstance(parts, (str, *_MANY)):
            self.spend(0, len(parts) * len(between))

    def _formatted(self, text: str, given: Any, mark: str) -> None:
        if _WIDE.search(text):
            raise OverBudget("formats a field of 1,000 characters or more")
        before = self.steps, self.characters
        self._walk(given)
        times = text.count(mark)
        self.spend((before[0] - self.steps) * times, (before[1] - self.characters) * times + len(text))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self._formatted(left, right, "%")
        elif operator == "*" and not (isinstance(left, int | float) and isinstance(right, int | float)):
            many, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int) and isinstance(many, (str, *_MANY)):
                size = len(many) * max(0, times)
                self.spend(*((1, size) if isinstance(many, str) else (size, 0)))
        elif isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * max(0, right)
            if bits > BITS:
                raise OverBudget(f"makes a number of more than {BITS:,} bits")
        else:
            self._shallow(left)
            self._shallow(right)
        return super().call_binop(context, operator, left, right)

    # ---- filters and tests

    def _filter(self, name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(do, "jinja_pass_arg") else 0  # the context or the like comes before it

        @wraps(do)
        def counted(*args: Any, **named: Any) -> Any:
            value, rest = args[first], args[first + 1 :]
            self._shallow(value, letters=name in _LETTERS)
            self._walk([*rest, *named.values()])
            if isinstance(value, _MANY) or (isinstance(value, str) and name in _LETTERS):
                texts = [text for text in (*rest, *named.values()) if isinstance(text, str)]
                self.spend(len(value) * sum(text.count(".") + text.count(",") for text in texts))  # a.b,c of each
            if name == "tojson" or name == "indent":
                self._indented(name, value, rest, named)
            elif name not in _SHALLOW:
                self._walk(value)
            if name == "replace":
                self._replaced(value, *[*rest, *named.values()][:2])
            elif name == "join":
                self._joined(str(rest[0] if rest else named.get("d", "")), value)
            elif name == "round":
                digits = named.get("precision", rest[0] if rest else 0)
                if not isinstance(digits, int) or abs(digits) > 300:
                    raise OverBudget("rounds to more than 300 digits")
            found = do(*args, **named)
            if isinstance(found, Iterator):
                found = list(found)
            self._shallow(found)
            return found

        return counted

    def _indented(self, name: str, value: Any, rest: tuple[Any, ...], named: dict[str, Any]) -> None:
        if name == "indent":
            width = named.get("width", rest[0] if rest else 4)
            lines = str(value).count("\n") + 1 if isinstance(value, str) else 1
        else:
            width, lines = named.get("indent", rest[1] if len(rest) > 1 else None), 0
            between = named.get("separators", rest[2] if len(rest) > 2 else None) or ()
            if any(len(str(part)) > INDENT for part in between):
                raise OverBudget(f"separates by more than {INDENT} characters")
        size = len(width) if isinstance(width, str) else width or 0
        if not isinstance(size, int | float) or size > INDENT:
            raise OverBudget(f"indents by more than {INDENT} characters")
        self._walk(value, max(0, int(size)))
        self.spend(0, lines * max(0, int(size)))

    def _reckoned(self, do: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(do)
        def counted(*args: Any, **named: Any) -> Any:
            self._walk([*args, *named.values()])
            return do(*args, **named)

        return counted
