"""Chat templates, rendered in a process of their own. A template comes with a downloaded model, and a line of Jinja can
ask for 10^10 of anything: so each rendering has a limit of time and one of memory.

The process is started when a template is opened, and anew in a fork or after its end. Its first request is the
template. It ends with its stdin, so also when its parent dies. Its time is processor time: a busy machine changes
nothing, and the kernel ends it whatever it is doing.
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
from typing import Any, BinaryIO

SECONDS, SECONDS_PER_MB = 10.0, 1.0
"""The second for each MB of the conversation. A published template takes less than a millisecond for a message."""
MEMORY, MEMORY_PER_BYTE = 256 << 20, 32
"""Beyond what the process has when the rendering begins."""
HEAD = struct.Struct("<Qdq")
"""Before each message: its length, and for a request its seconds and bytes of memory."""


class OverBudget(Exception):
    """Its message says what the template does."""


class NotText(Exception):
    """Says what was to be written as text."""


class ChatTemplate:
    def __init__(self, text: str, opening: str, closing: str):
        """opening, closing: what {% generation %} and {% endgeneration %} write. Raises what Jinja raises."""
        self._template = text, opening, closing
        self.has_generation_tags = False
        self._idle = [self._begin()]

    def render(self, *variables: dict[str, Any]) -> list[str]:
        """One text for each. given: what the template's names stand for. The limits are for all of them together."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = None
        if worker is None or worker.parent != os.getpid():
            worker = self._begin()
        answer = _ask_worker(worker, variables, "this conversation")
        self._idle.append(worker)  # not before: after an interruption, what it says would answer another request
        return _result_or_raise(answer)

    def _begin(self) -> _RenderProcess:
        worker = _RenderProcess()
        self.has_generation_tags = _result_or_raise(_ask_worker(worker, self._template, "a template"))
        return worker


def _ask_worker(worker: _RenderProcess, arguments: tuple[Any, ...], what: str) -> dict[str, Any]:
    """What it made, or why it could not. what: what the limits are for."""
    request = json.dumps(arguments).encode()
    seconds = SECONDS + SECONDS_PER_MB * len(request) / 1e6
    memory = MEMORY + MEMORY_PER_BYTE * len(request)
    answer = worker.ask(request, seconds, memory)
    if answer is None:
        code = worker.end()
        if code == -signal.SIGPROF:
            raise OverBudget(f"takes more than {seconds:.3g} s, the limit for {what}")
        raise OverBudget(f"ends the process that renders it (code {code})")
    if "MemoryError" in answer.get("error", ()):
        raise OverBudget(f"takes more than {memory >> 20:,} MiB of memory, the limit for {what}")
    return answer


def _result_or_raise(answer: dict[str, Any]) -> Any:
    if "error" not in answer:
        return answer["made"]
    import jinja2

    text = answer["text"]
    if "TemplateSyntaxError" in answer["error"]:
        raise jinja2.TemplateSyntaxError(text, answer["line"])
    for name in answer["error"]:  # some cannot be made from a text: then the next more general one
        kind = NotText if name == "NotText" else getattr(jinja2, name, None) or getattr(builtins, name, None)
        with contextlib.suppress(TypeError):
            error = kind(text)
            break
    raise error


class _RenderProcess:
    """The process, as its parent sees it."""

    def __init__(self) -> None:
        import titanmoe

        home = str(Path(titanmoe.__file__).parent.parent)
        paths = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        self.parent = os.getpid()
        # Not multiprocessing: whoever reads data may be a daemon, which may have no such children.
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from titanmoe.data.chat_template import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self.end = weakref.finalize(self, _end_process, self._process, self.parent)

    def ask(self, request: bytes, seconds: float, memory: int) -> Any:
        """None if it has ended."""
        try:
            _send(self._process.stdin, request, seconds, memory)
            answer = _receive(self._process.stdout)
        except BrokenPipeError:
            return None
        return answer and json.loads(answer[0])


def _end_process(process: subprocess.Popen[bytes], parent: int) -> int | None:
    if os.getpid() != parent:  # in a fork
        return None
    if process.poll() is None:
        process.kill()
    with contextlib.suppress(BrokenPipeError):  # what it did not read
        process.stdin.close()
    process.stdout.close()
    return process.wait()


def _send(stream: BinaryIO, data: bytes, seconds: float = 0.0, memory: int = 0) -> None:
    stream.write(HEAD.pack(len(data), seconds, memory) + data)
    stream.flush()


def _receive(stream: BinaryIO) -> tuple[bytes, float, int] | None:
    """None at the end, which may come in the middle of something."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    size, seconds, memory = HEAD.unpack(head)
    data = stream.read(size)
    return (data, seconds, memory) if len(data) == size else None


# ---- in the process


def serve() -> None:
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
                answer = {"made": has_generation_tags}
            else:
                answer = {"made": [template.render(_guard_messages(each)) for each in arguments]}
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            text, line = getattr(error, "message", None) or str(error), getattr(error, "lineno", 0)
            answer = {"error": kinds, "text": text, "line": line}
        if size is not None:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(sys.stdout.buffer, json.dumps(answer).encode())


class _Objects(dict):
    """An object in a message. Templates may look into it and write it as JSON."""

    where = ""

    def __str__(self) -> str:
        raise NotText(self.where)

    __repr__ = __str__


class _Parts(list):
    where = ""

    def __str__(self) -> str:
        raise NotText(self.where)

    __repr__ = __str__


def _guard(value: Any, where: str) -> Any:
    """A copy in which lists and objects cannot become text."""
    if isinstance(value, dict):
        joint = "." if "'s " in where else "'s "
        guarded = _Objects((key, _guard(item, f"{where}{joint}{key}")) for key, item in value.items())
        guarded.where = f"{where}, an object,"
    elif isinstance(value, list):
        guarded = _Parts(_guard(item, f"{where}[{n}]") for n, item in enumerate(value))
        guarded.where = f"{where}, a list,"
    else:
        return value
    return guarded


def _guard_messages(variables: dict[str, Any]) -> dict[str, Any]:
    messages = [_guard(message, f"message {n}") for n, message in enumerate(variables.get("messages", ()), 1)]
    return variables | {"messages": messages}


def _compile(text: str, opening: str, closing: str) -> tuple[Any, bool]:
    """As the templates of published models expect it, without today's date (strftime_now) and random text: tokens must
    depend on neither, and templates that ask for the date have a default of their own."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %}...{% endgeneration %}"""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            parser.environment.has_generation_tags = True
            mark = [jinja2.nodes.Output([jinja2.nodes.TemplateData(x)], lineno=line) for x in (opening, closing)]
            return [mark[0], *body, mark[1]]

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
    """Without the escapes for HTML of Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
