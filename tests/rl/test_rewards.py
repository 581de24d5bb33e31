"""Rewards of completions: what functions and programs return, and that a failing worker costs one completion alone."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT
from titanmoe.config import ConfigError
from titanmoe.config.schema import RL
from titanmoe.rl.rewards import Reward, Rewards, check_reward

FUNCTIONS = """
import os, sys, time
print("imported")
CHOICE = 3

def length(completion, record):
    print("printed", flush=True)
    os.write(1, b"written\\n")
    return len(completion) * record.get("factor", 1)

def process(completion, record):
    return os.getpid()

def awkward(completion, record):
    if completion == "raises":
        raise ValueError("no such thing\\n" + "x" * 10**6)
    if completion == "hangs":
        time.sleep(60)
    if completion == "exits":
        os._exit(3)
    if completion == "is killed":
        os.kill(os.getpid(), 9)
    if completion == "grows":
        return len(bytearray(10**9))
    if completion == "starts a process":
        import subprocess
        subprocess.Popen(["sleep", "60"])
        time.sleep(60)
    return {"NaN": float("nan"), "inf": float("inf"), "text": "good", "digit": "5", "none": None, "list": [1.0],
            "true": True, "huge": 10**400}.get(completion, 1.0)
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a module of reward functions."""
    (tmp_path / "given.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def program(folder: Path, code: str) -> str:
    """A reward of a program that runs this code for each `line` that it reads."""
    body = "\n".join(f"    {line}" for line in code.splitlines())
    (folder / "program.py").write_text(f"import json, os, sys, time\nfor line in sys.stdin:\n{body}\n")
    return f"run {sys.executable} -u program.py"


@contextmanager
def opened(reward: str, **options: Any) -> Iterator[Rewards]:
    rewards = Rewards(RL(reward=reward, **options))
    try:
        yield rewards
    finally:
        rewards.close()


def compute(rewards: Rewards, completions: list[str], record: dict[str, Any] | None = None) -> list[Reward]:
    futures = [rewards.submit("?", [completion], record or {}) for completion in completions]
    return [future.result(30) for future in futures]


def values(rewards: list[Reward]) -> list[float | None]:
    """The rewards; None for one that is missing, which then has a reason."""
    assert all(math.isnan(reward.value) == bool(reward.problem) for reward in rewards)
    return [None if reward.problem else reward.value for reward in rewards]


def alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Any, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(done)


@pytest.mark.parametrize(
    ("reward", "solution", "expected"),
    [
        ("exact", "5", [1, 1, 0, 0, 0]),
        ("exact", 5, [1, 1, 0, 0, 0]),
        ("exact", " zwölf\n", [0, 0, 0, 1, 0]),
        ("regex", r"\b5\b", [1, 1, 0, 0, 0]),
        ("regex", "^$", [0, 0, 0, 0, 1]),
        ("regex", "(", [None] * 5),
    ],
)
def test_built_in_rewards(reward: str, solution: Any, expected: list[float | None]) -> None:
    with opened(reward, reward_workers=1) as rewards:
        assert values(compute(rewards, ["5", " 5\n", "55", "zwölf", ""], {"solution": solution})) == expected


@pytest.mark.parametrize("workers", [1, 8])
def test_a_function_gets_completion_and_record_and_any_number_of_workers_gives_the_same(workers: int, functions: Path):
    completions = ["", "x", "日本語\u2028\n\0", "\ud800", "a" * 10**6, *map(str, range(20))]
    with opened("given:length", reward_workers=workers) as rewards:
        assert values(compute(rewards, completions, {"factor": 2})) == [
            2 * len(completion) for completion in completions
        ]


def test_what_is_no_reward_is_said_and_costs_its_completion_alone(functions: Path):
    says = {
        "raises": "ValueError: no such thing xxx",
        "NaN": "the reward is nan",
        "inf": "the reward is inf",
        "text": "TypeError: a reward is a number, and this is the text 'good'",
        "digit": "TypeError: a reward is a number, and this is the text '5'",
        "none": "TypeError: float() argument",
        "list": "TypeError: float() argument",
        "huge": "OverflowError: int too large",
        "exits": "the reward's process ended with exit code 3",
        "is killed": "the reward's process ended with exit code -9",
        "grows": "the reward's process ended with exit code 1",
    }
    completions = [completion for bad in says for completion in (bad, "good")] + ["true"]
    with opened("given:awkward", reward_workers=1, reward_memory_gb=0.5) as rewards:
        found = compute(rewards, completions)
    assert values(found) == [None, 1.0] * len(says) + [1.0]
    for completion, reward in zip(completions, found, strict=True):
        assert reward.problem.startswith(says.get(completion, "")) and len(reward.problem) <= 300, completion


def test_what_hangs_costs_its_completion_alone(functions: Path):
    with opened("given:awkward", reward_workers=1, reward_timeout_s=0.5) as rewards:
        found = compute(rewards, ["starts a process", "good"])
        assert values(found) == [None, 1.0]
    assert found[0].problem == "the reward took more than rl.reward_timeout_s = 0.5 seconds"


def test_a_failed_process_is_replaced_and_one_that_only_raises_is_not(functions: Path):
    (functions / "both.py").write_text(FUNCTIONS + "def reward(a, r): return awkward(a, r) and os.getpid()")
    with opened("both:reward", reward_workers=1, reward_timeout_s=0.5) as rewards:
        first, _, second, _, third = values(compute(rewards, ["", "raises", "", "hangs", ""]))
        assert first == second != third and alive(int(third)) and not alive(int(first))
        os.kill(int(third), signal.SIGKILL)  # while it computes nothing
        assert wait_until(lambda: not alive(int(third)))
        (fourth,) = values(compute(rewards, [""]))
        assert alive(int(fourth))
    assert not alive(int(fourth))


def test_a_worker_that_is_killed_while_it_computes_costs_its_completion(functions: Path):
    with opened("given:awkward", reward_workers=1, reward_timeout_s=30) as rewards:
        futures = [rewards.submit("?", [completion], {}) for completion in ("", "hangs", "")]
        assert futures[0].result(30) == Reward(1.0)
        os.kill(rewards.workers[0].process.pid, signal.SIGKILL)
        assert futures[1].result(30).problem == "the reward's process ended with exit code -9"
        assert futures[2].result(30) == Reward(1.0)


def test_closing_ends_what_computes_and_what_waits(functions: Path):
    rewards = Rewards(RL(reward="given:awkward", reward_workers=2, reward_timeout_s=300))
    futures = [
        rewards.submit("?", [completion], {}) for completion in ("starts a process", "", "hangs", "", "hangs", "")
    ]
    assert wait_until(lambda: all(worker.process for worker in rewards.workers) and futures[1].done())
    groups = [worker.process.pid for worker in rewards.workers]
    begin = time.monotonic()
    rewards.close()
    assert time.monotonic() - begin < 5
    assert all(future.done() for future in futures)
    for group in groups:
        assert wait_until(lambda group=group: not group_alive(group))


def group_alive(group: int) -> bool:
    """Whether a process of a process group is alive."""
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    words = [stat.rpartition(")")[2].split() for stat in stats]
    return any(int(word[2]) == group and word[0] != "Z" for word in words)


@pytest.mark.parametrize("how", ["function", "program"])
def test_no_worker_outlives_a_killed_run(how: str, functions: Path):
    reward = "given:awkward" if how == "function" else program(functions, "time.sleep(60)")
    code = f"""
import time
from titanmoe.config.schema import RL
from titanmoe.rl.rewards import Rewards
rewards = Rewards(RL(reward={reward!r}, reward_workers=1, reward_timeout_s=60))
rewards.submit("?", ["hangs"], {{}})
while not rewards.workers[0].process:
    time.sleep(0.01)
time.sleep(0.3)
print(rewards.workers[0].process.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    assert alive(worker)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not alive(worker), 1)


def test_a_program_reads_and_writes_lines(functions: Path):
    code = """x = json.loads(line)
print(json.dumps({"reward": len(x["prompt"] + x["completion"]) + x["record"]["more"], "why": "ü", "error": None}))"""
    with opened(program(functions, code), reward_workers=2) as rewards:
        assert values(compute(rewards, ["", "é\n", "x" * 10**6], {"more": 1})) == [2, 4, 10**6 + 2]


@pytest.mark.parametrize(
    ("code", "seconds", "problem"),
    [
        ("print('garbage')", 10, "the program wrote 'garbage', which is not like {\"reward\": 1.0}"),
        ("print()", 10, "the program wrote '', which is not"),
        ("os.write(1, b'\\xff\\xfe\\n')", 10, "the program wrote '\ufffd\ufffd', which is not"),
        ("print('{}')", 10, "the program wrote '{}', which is not"),
        ("print('[' * 100000)", 10, "the program wrote '[[[["),
        ("print('{\"reward\": null}')", 10, "the program wrote '{\"reward\": null}', which is not"),
        ('print(\'{"reward": "1"}\')', 10, 'the program wrote \'{"reward": "1"}\', which is not like'),
        ("print('\"1\"')", 10, "the program wrote '\"1\"', which is not like"),
        ('print(\'{"error": "no idea"}\')', 10, "no idea"),
        ('print(\'{"error": ""}\')', 10, "the program wrote"),
        ("print('1e300')", 10, "the reward is 1e+300"),
        ("print('{\"message\": 3}')", 10, "the program wrote '{\"message\": 3}', which is not"),
        ('print(\'{"message": "\\\\ud800"}\')', 10, "the program wrote"),
        ('print(\'{"message": "on", "role": null}\')', 10, "the program wrote"),
        ('print(\'{"message": "on", "reward": NaN}\')', 10, "the reward is nan"),
        ('print(\'{"message": "on"}\')', 10, "the environment's message has no place in rl.max_turns turns"),
        ("print('NaN')", 10, "the reward is nan"),
        ("print('1' + '0' * 400)", 10, "the reward is inf"),
        ("print('1\\n2')", 10, "the program wrote more than one line for a completion"),
        ("os.write(1, b'x' * 2**21)", 10, "the program wrote a line of more than 1,048,576 bytes"),
        ("pass", 0.3, "the reward took more than rl.reward_timeout_s = 0.3 seconds"),
        ("os.close(1); time.sleep(9)", 0.3, "the reward's process closed its output"),
        ("sys.exit(4)", 10, "the reward's process ended with exit code 4"),
    ],
)
def test_what_a_program_must_not_write(code: str, seconds: float, problem: str, functions: Path):
    with opened(program(functions, code), reward_workers=1, reward_timeout_s=seconds) as rewards:
        (reward,) = compute(rewards, [""])
    assert values([reward]) == [None] and reward.problem.startswith(problem)


def write_from_page(name: str, folder: Path) -> None:
    """Write a module that docs/reinforcement.md has."""
    page = (ROOT / "docs/reinforcement.md").read_text(encoding="utf-8")
    (code,) = re.findall(rf"^```python\n(# {name}.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (folder / name).write_text(code)


def test_a_function_of_the_page(functions: Path):
    write_from_page("capitals.py", functions)
    with opened("capitals:score", reward_workers=1) as rewards:
        assert values(compute(rewards, ["It is Lima", "I forgot", "?"], {"capital": "Lima"})) == [1, -0.1, 0]


def test_completions_in_latex_are_compared_as_the_page_does_it(functions: Path):
    pytest.importorskip("math_verify")
    write_from_page("equal.py", functions)
    with opened("equal:score", reward_workers=1) as rewards:
        completions = ["so $x$ is $\\frac{1}{2}$", "0.5", "\\boxed{2}", "no idea"]
        assert values(compute(rewards, completions, {"solution": "1/2"})) == [1, 1, 0, 0]


def test_an_environment_of_the_page(functions: Path):
    """Check that docs/reinforcement.md's game goes on until the guess is right, as a function and in a program."""
    write_from_page("guess.py", functions)
    as_program = """x = json.loads(line)
from guess import play
print(json.dumps(play(x["completion"], x["record"])))"""
    for reward in ("guess:play", program(functions, as_program)):
        with opened(reward, reward_workers=1, max_turns=5) as rewards:
            turns, hints = [], ["not a digit", "more", "less"]
            for guess, hint in zip(("?", "4", "it is 9"), hints, strict=True):
                turns.append(guess)
                found = rewards.submit("Guess a digit: ", list(turns), {"number": 7}).result(30)
                assert found == Reward(0.0, "", f" {hint}. Guess: ", "user")
                turns.append(found.message)
            found = rewards.submit("Guess a digit: ", [*turns, "7"], {"number": 7}).result(30)
            assert found == Reward(pytest.approx(1 / 7))


def test_a_second_line_is_never_the_next_completion_s_reward(functions: Path):
    code = """print(1 if "first" in line else 2)
time.sleep(0.2)
print(7)"""
    with opened(program(functions, code), reward_workers=1) as rewards:
        assert values(compute(rewards, ["first"])) == [1]
        time.sleep(0.6)
        (reward,) = compute(rewards, ["second"])
        assert reward.problem == "the program wrote more than one line for a completion"
        assert values(compute(rewards, ["third"])) == [2]


def test_a_program_that_does_not_read_costs_its_time_alone(functions: Path):
    (functions / "deaf.py").write_text("import time\ntime.sleep(60)")
    with opened(f"run {sys.executable} deaf.py", reward_workers=1, reward_timeout_s=0.3) as rewards:
        (reward,) = compute(rewards, ["x" * 10**6])
    assert reward.problem == "the reward took more than rl.reward_timeout_s = 0.3 seconds"


def test_a_process_that_cannot_be_started_costs_its_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with opened("exact", reward_workers=1) as rewards:
        assert "No such file" in compute(rewards, ["5"])[0].problem


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ("exat", "'exat' cannot be used: ModuleNotFoundError: No module named 'exat'; give exact, regex, \"module:"),
        ("given", "AttributeError: module 'given' has no attribute ''"),
        ("given:lenght", "AttributeError: module 'given' has no attribute 'lenght'"),
        ("given:CHOICE", "TypeError: given:CHOICE is no function"),
        ("broken:f", "SyntaxError"),
        ("quits:f", "exit code 5"),
        ("run ", "'run ' names no program"),
        ("run 'x", "cannot be read as a command: No closing quotation"),
        ("run no-such-program -v", "there is no program 'no-such-program' here"),
    ],
)
def test_a_reward_that_cannot_be_computed_is_refused(reward: str, problem: str, functions: Path):
    (functions / "broken.py").write_text("def f(:")
    (functions / "quits.py").write_text("import os; os._exit(5)")
    with pytest.raises(ConfigError) as error:
        check_reward(RL(reward=reward))
    (text,) = error.value.problems
    assert problem in text


@pytest.mark.parametrize("reward", ["exact", "given:length", f"run {sys.executable} -c pass"])
def test_a_reward_that_can_be_computed_is_not_refused(reward: str, functions: Path):
    check_reward(RL(reward=reward))


def test_a_memory_limit_in_which_nothing_starts_is_refused(functions: Path):
    with pytest.raises(ConfigError, match="cannot be used"):
        check_reward(RL(reward="given:length", reward_memory_gb=0.001))
