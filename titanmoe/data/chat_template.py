"""Sandboxed rendering of chat templates in a process of their own.

A template comes with a downloaded model, and one line of Jinja can ask for 10^10 of anything: so each rendering has a
limit of time and of memory.

The process is started when a template is opened, and again in a fork or after the process has ended. Its first request
is the template. It ends with its stdin, so also when its parent dies. The limit of time is CPU time, so a busy machine
does not matter, and the kernel enforces it.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:  # jinja2 may be missing
    import jinja2

SECONDS, SECONDS_PER_MB = 10.0, 1.0
"""Limit of a rendering in CPU seconds, and seconds added per MB of the conversation. Published templates take less than
a millisecond per message."""
MEMORY, MEMORY_PER_BYTE = 256 << 20, 32
"""Limit of the memory that a rendering may add to the process, in bytes, and bytes added per byte of the
conversation."""
HEAD = struct.Struct("<Qdq")
"""Header of each message: its length, and for a request its limits in seconds and in bytes of memory."""


class OverBudget(Exception):
    """Error about a template that exceeds a limit. Its message says which."""


class NotText(Exception):
    """Error about a value that a template would write as Python's repr. Its message names the value."""


class ChatTemplate:
    """A compiled chat template, rendered in a process of its own with limits of time and memory.

    Args:
        text: the template.
        opening: what {% generation %} writes.
        closing: what {% endgeneration %} writes.

    Raises:
        OverBudget: compiling exceeds a limit.
        jinja2.TemplateError: the template is malformed.
        RecursionError, SyntaxError, ValueError, OverflowError: Python cannot compile what Jinja makes of it.
    """

    def __init__(self, text: str, opening: str, closing: str):
        self._template = text, opening, closing
        self.has_generation_tags = False
        self._idle = [self._start_process()]

    def render(self, *variables: dict[str, Any]) -> list[str]:
        """Return the rendered text for each dict of template variables, whose values JSON can hold.

        The limits are for all of them together.

        Raises:
            OverBudget: rendering exceeds a limit.
            NotText: a list or object would be written as Python writes it.
            Exception: any error that Jinja raises.
        """
        try:  # in one operation: several threads may render
            worker = self._idle.pop()
        except IndexError:
            worker = None
        if worker is None or worker.parent != os.getpid():
            worker = self._start_process()
        response = worker.ask(variables, "this conversation")
        self._idle.append(worker)  # not before: after an interruption its response would belong to another request
        return _result_or_raise(response)

    def _start_process(self) -> _RenderProcess:
        worker = _RenderProcess()
        self.has_generation_tags = _result_or_raise(worker.ask(self._template, "a template"))
        return worker


def _result_or_raise(response: dict[str, Any]) -> Any:
    """Return the result in a rendering process's response, or raise the error in it.

    An error whose class cannot be made from a text is raised as the nearest base class that can.
    """
    if "error" not in response:
        return response["made"]
    import jinja2

    text = response["text"]
    if "TemplateSyntaxError" in response["error"]:
        raise jinja2.TemplateSyntaxError(text, response["line"])
    for name in response["error"]:  # if it cannot be made from a text, its base class
        kind = NotText if name == "NotText" else getattr(jinja2, name, None) or getattr(builtins, name, None)
        with contextlib.suppress(TypeError):
            error = kind(text)
            break
    raise error


class _RenderProcess:
    """The parent's handle of a rendering process; creating it starts the process, `end` kills it."""

    def __init__(self) -> None:
        import titanmoe

        home = str(Path(titanmoe.__file__).parent.parent)
        paths = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        self.parent = os.getpid()
        # Not multiprocessing: a data worker may be a daemon, which may not have children.
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from titanmoe.data.chat_template import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self.end = weakref.finalize(self, _end_process, self._process, self.parent)

    def ask(self, arguments: tuple[Any, ...], subject: str) -> dict[str, Any]:
        """Send a request to the process, and return its response, for `_result_or_raise`.

        That is {"made": RESULT}, or {"error": [class names], "text": TEXT, "line": NUMBER}.

        Args:
            arguments: the template with its marks, or the variables of each text to render.
            subject: name of what is rendered, for the message of an exceeded limit.

        Raises:
            OverBudget: the request exceeds a limit, or the process ends.
        """
        request = json.dumps(arguments).encode()
        seconds = SECONDS + SECONDS_PER_MB * len(request) / 1e6
        memory = MEMORY + MEMORY_PER_BYTE * len(request)
        message = None
        with contextlib.suppress(BrokenPipeError):
            _send(self._process.stdin, request, seconds, memory)
            message = _receive(self._process.stdout)
        if message is None:
            code = self.end()
            if code == -signal.SIGPROF:
                raise OverBudget(f"takes more than {seconds:.3g} s, the limit for {subject}")
            raise OverBudget(f"ends the process that renders it (code {code})")
        response = json.loads(message[0])
        if "MemoryError" in response.get("error", ()):
            raise OverBudget(f"takes more than {memory >> 20:,} MiB of memory, the limit for {subject}")
        return response


def _end_process(process: subprocess.Popen[bytes], parent: int) -> int | None:
    """Kill the process if it still runs and return its exit code; None in a fork, which does not own it."""
    if os.getpid() != parent:  # in a fork
        return None
    if process.poll() is None:
        process.kill()
    with contextlib.suppress(BrokenPipeError):  # it has unread input
        process.stdin.close()
    process.stdout.close()
    return process.wait()


def _send(stream: BinaryIO, data: bytes, seconds: float = 0.0, memory: int = 0) -> None:
    """Write a message: a request with its limits in CPU seconds and bytes of memory, or a response without.

    `data` is JSON text.
    """
    stream.write(HEAD.pack(len(data), seconds, memory) + data)
    stream.flush()


def _receive(stream: BinaryIO) -> tuple[bytes, float, int] | None:
    """Read a message of `_send`: (JSON text, CPU seconds, bytes of memory), with 0 for both limits in a response.

    None if the stream ends before the message does.
    """
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    size, seconds, memory = HEAD.unpack(head)
    data = stream.read(size)
    return (data, seconds, memory) if len(data) == size else None


# ---- inside the rendering process


def serve() -> None:
    """Compile the template of the first request, then render requests until stdin ends: the process's main function.

    An error is sent back as the response. A request over its CPU time kills the process; only Linux limits memory.
    """
    import resource

    import jinja2.ext
    import jinja2.sandbox  # noqa: F401 (now, so that it does not count as the template's memory)

    page, hard = resource.getpagesize(), resource.getrlimit(resource.RLIMIT_AS)[1]
    try:
        size = os.open("/proc/self/statm", os.O_RDONLY)
    except FileNotFoundError:  # not Linux: then only time is limited
        size = None
    template = None
    while (message := _receive(sys.stdin.buffer)) is not None:
        request, seconds, memory = message
        arguments = json.loads(request)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # nobody handles its signal, so the kernel ends the process
        if size is not None:
            most = int(os.pread(size, 64, 0).split()[0]) * page + memory
            resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        try:
            if template is None:
                template, has_generation_tags = _compile(*arguments)
                response = {"made": has_generation_tags}
            else:
                response = {"made": [template.render(_guard_messages(each)) for each in arguments]}
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            text, line = getattr(error, "message", None) or str(error), getattr(error, "lineno", 0)
            response = {"error": kinds, "text": text, "line": line}
        if size is not None:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(sys.stdout.buffer, json.dumps(response).encode())


class _Guarded:
    """Base of a dict or list in a message that templates may index or write as JSON, but not write as text."""

    where = ""

    def __str__(self) -> str:
        raise NotText(self.where)

    __repr__ = __str__


class _GuardedDict(_Guarded, dict):
    pass


class _GuardedList(_Guarded, list):
    pass


def _guard(value: Any, name: str) -> Any:
    """Return a copy of a message, or of a value in it, whose dicts and lists raise NotText when written as text.

    The error names them after `name`, the value's name.
    """
    if isinstance(value, dict):
        joint = "." if "'s " in name else "'s "
        guarded = _GuardedDict((key, _guard(item, f"{name}{joint}{key}")) for key, item in value.items())
        guarded.where = f"{name}, an object,"
    elif isinstance(value, list):
        guarded = _GuardedList(_guard(item, f"{name}[{n}]") for n, item in enumerate(value))
        guarded.where = f"{name}, a list,"
    else:
        return value
    return guarded


def _guard_messages(variables: dict[str, Any]) -> dict[str, Any]:
    messages = [_guard(message, f"message {n}") for n, message in enumerate(variables.get("messages", ()), 1)]
    return variables | {"messages": messages}


def _compile(text: str, opening: str, closing: str) -> tuple[jinja2.Template, bool]:
    """Return the compiled template, and whether it has {% generation %}, for which it writes `opening` and `closing`.

    The environment is the one that templates of published models expect, but without today's date (strftime_now) and
    random text: tokens must depend on neither, and templates that ask for the date have a default of their own.
    """
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The template block {% generation %} ... {% endgeneration %}."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            parser.environment.has_generation_tags = True
            begin, end = [jinja2.nodes.Output([jinja2.nodes.TemplateData(x)], lineno=line) for x in (opening, closing)]
            return [begin, *body, end]

    def refuse(text: str) -> None:
        raise jinja2.TemplateError(text)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    del environment.globals["lipsum"], environment.filters["random"]
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = refuse
    environment.has_generation_tags = False
    return environment.from_string(text), environment.has_generation_tags


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    """Return a value as JSON: the filter `tojson` without the HTML escapes of Jinja's."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
