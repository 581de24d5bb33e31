"""The project as a whole: what a newcomer reads and runs exists and is true."""

import ast
import functools
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import titanmoe
from titanmoe.components import COMPONENTS
from titanmoe.config import load
from titanmoe.train.header import TESTED_VERSIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "train_configs").glob("*.toml"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_version_is_in_the_changelog():
    assert re.search(rf"^## {re.escape(titanmoe.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_license_is_the_standard_text():
    text = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_is_on_its_page(recipe):
    with recipe.open("rb") as file:
        stated = tomllib.load(file)
    without_model = ["--model.hf="] * ("hf" in stated["model"])  # its folder is not here
    load(["--config", str(recipe), *without_model], COMPONENTS, lambda config: [])
    assert f"train_configs/{recipe.name}" in (ROOT / "docs" / "get_started.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    gone = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not gone


def test_declared_python_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.10"
    assert "torch>=2.11,<2.16" in project["dependencies"] and {"2.11", "2.15"} <= set(TESTED_VERSIONS)
    assert sys.version_info >= (3, 10)
    listed = [text.rpartition(" ")[2] for text in project["classifiers"] if ":: Python :: 3." in text]
    assert listed == ["3.10", "3.11", "3.12", "3.13"]
    for name in ("README.md", "Makefile"):
        assert "Python 3.10 to 3.13" in (ROOT / name).read_text()
    assert f"python: {json.dumps(listed)}" in (ROOT / ".github/workflows/tests.yml").read_text()


def test_a_machine_without_a_gpu_gets_the_torch_that_all_tests_run_with(tmp_path, monkeypatch):
    def installs():
        done = subprocess.run(
            ["make", "-nB", "docs", "PIP_ARGS="], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return [
            line.split("install ")[1].split("-e ")[0].strip() for line in done.stdout.splitlines() if " -e " in line
        ]

    bare, gpu = tmp_path / "bare", tmp_path / "gpu"
    for folder, tools in ((bare, ("make", "sh")), (gpu, ("make", "sh", "nvidia-smi"))):
        folder.mkdir()
        for tool in tools:
            (folder / tool).symlink_to(shutil.which(tool) or shutil.which("true"))
    monkeypatch.setenv("PATH", str(bare))
    assert installs() == ["-c scripts/constraints_cpu.txt"] * 2
    monkeypatch.setenv("PATH", str(gpu))
    assert installs() == [""] * 2
    (version,) = re.findall(
        r"^torch==(\d+\.\d+)\.\*$", (ROOT / "scripts/constraints_cpu.txt").read_text(), re.MULTILINE
    )
    assert version in TESTED_VERSIONS and "-c scripts/constraints_cpu.txt" in (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("words", [["train.py"], ["-m", "titanmoe.rank"], ["setup.py"]], ids=" ".join)
def test_an_older_python_gets_one_line(words):
    run = (
        f"run_module({words[1]!r}, None, '__main__')"
        if words[0] == "-m"
        else f"run_path({words[0]!r}, None, '__main__')"
    )
    code = f"import runpy, sys; sys.version_info = (3, 9, 2); runpy.{run}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"titanmoe needs Python 3\.10 or newer, and this is 3\.9\.2.*\n", done.stderr)


# ---- rooms, and who imports whom

ROWS = {
    "titanmoe": "",
    "this_process": "",
    "config": "this_process",
    "files": "",
    "load_colours": "",
    "mask": "",
    "observe": "",
    "replace": "",
    "comm": "observe",
    "ops": "observe this_process",
    "text_report": "config",
    "tokens": "mask",
    "fold": "comm config",
    "moe": "comm config fold observe ops tokens",
    "experiments": "comm config moe observe ops",
    "models": "comm config mask moe observe ops tokens",
    "data": "config files mask models ops this_process titanmoe tokens",
    "parallel": "comm config data files fold mask models moe observe ops tokens",
    "policy": "config data tokens",
    "checkpoint": "comm config data files fold models moe ops parallel this_process titanmoe",
    "train": "checkpoint comm config data files fold load_colours models moe observe ops parallel this_process tokens",
    "watch": "checkpoint comm config data files fold observe ops parallel titanmoe train",
    "generate": "checkpoint comm config data files fold mask models moe ops parallel this_process tokens train",
    "session": "checkpoint config data models parallel tokens train",
    "rl": "config data generate observe ops policy session tokens train",
    "components": "checkpoint config data generate models moe rl train",
    "report": "checkpoint components config fold load_colours titanmoe train",
    "plan": "checkpoint components config files fold generate models moe text_report train",
    "open_session": "components config moe plan session train",
    "rank": "components config data generate plan rl train watch",
    "launcher": "checkpoint comm components config data files fold models moe parallel plan rank rl text_report "
    "this_process titanmoe train",
    "rehearse": "checkpoint comm components config data files fold generate models moe observe ops parallel plan "
    "replace text_report this_process titanmoe train",
    "cli": "checkpoint components config data files fold generate launcher models parallel plan rehearse report "
    "text_report titanmoe train",
    "__main__": "cli",
}
ARROWS = {room: set(names.split()) for room, names in ROWS.items()}
"""Rooms and files that each room, or file beside the rooms, imports or names in strings; all stand in rows above it."""
OPEN = ("titanmoe", "titanmoe.open_session")
"""The one import from below: titanmoe.open, for users' code, when it is called; titanmoe itself is only a version."""


@functools.cache
def arrows() -> dict[str, list[tuple[str, str]]]:
    """Modules and what they use, anywhere in the file: as "imports", "for types" alone, or "by name" in strings.

    A string "titanmoe.room.module:NAME" is an import of a later hour. The module of a package is its `__init__`.
    """
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.glob("titanmoe/**/*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found: dict[str, list[tuple[str, str]]] = {"imports": [], "for types": [], "by name": []}
    for name, path in files.items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        guards = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
        for_types = {inner for guard in guards for part in guard.body for inner in ast.walk(part)}
        prose, strings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}, []
        for node in nodes:
            kind = "for types" if node in for_types else "imports"
            if isinstance(node, ast.Import):
                found[kind] += [(name, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.module and not node.level, f"{path} imports by a relative name"
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                found[kind] += [(name, full if full in files else node.module) for full in inner]
            elif isinstance(node, ast.Constant) and id(node) not in prose:
                strings.append(str(node.value))
        named = re.findall(r"\btitanmoe\.[a-z]\w*(?:\.\w+)*", " ".join(strings))
        found["by name"] += [(name, to) for to in named]
    return found


def imports() -> list[tuple[str, str]]:
    """Modules and what they import, also for type checkers alone."""
    return arrows()["imports"] + arrows()["for types"]


def room(module: str) -> str:
    return module.removeprefix("titanmoe.").split(".")[0]


def test_arrows_go_down() -> None:
    rows = list(ARROWS)
    assert {name: to for name, to in ARROWS.items() if not to <= set(rows[: rows.index(name)])} == {}, "from above"
    ours = [(name, to) for name, to in imports() if to.split(".")[0] == "titanmoe" and (name, to) != OPEN]
    ours += [(name, to) for name, to in arrows()["by name"] if room(to) != "experiments"]
    up = [f"{name} imports {to}" for name, to in ours if room(to) not in ARROWS.get(room(name), set()) | {room(name)}]
    assert up == []
    used = {(room(name), room(to)) for name, to in ours}
    assert [f"{name} -> {to}" for name in rows for to in sorted(ARROWS[name]) if (name, to) not in used] == [], "unused"


def test_no_module_imports_itself_through_others() -> None:
    """Imports in functions count; those for type checkers alone do not, because annotations need none."""
    graph: dict[str, set[str]] = {}
    for name, to in arrows()["imports"]:
        if (name, to) != OPEN:
            graph.setdefault(name, set()).add(to)
    TopologicalSorter(graph).prepare()  # or it raises CycleError, with the circle


def test_experiments_are_named_by_the_tables_of_their_kinds_alone() -> None:
    """An entry is the component's spec, without torch: all that the planner and the rehearsal know of it."""
    assert [name for name, to in imports() if to.startswith("titanmoe.experiments") and room(name) != room(to)] == []
    named = [to for name, to in arrows()["by name"] if room(to) == "experiments" and room(name) != "experiments"]
    entries = [str(entry) for kind in COMPONENTS.kinds for entry in kind.table.values()]
    entries = [entry.partition(":")[0] for entry in entries if entry.startswith("titanmoe.experiments.")]
    assert entries and sorted(entries) == sorted(named)
    code = f"import sys, {', '.join(entries)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_map_says_of_every_room_what_it_is() -> None:
    drawing = re.search(r"```text\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)[1]
    lines = [re.split(r" {2,}", line.strip()) for line in drawing.splitlines()]
    place = {name: (i, x[0]) for i, x in enumerate(lines) for cell in x[1:-1] for name in cell.split(", ")}
    assert place.keys() == {path.parent.name for path in (ROOT / "titanmoe").glob("*/*.py")}
    for name in place:
        for to in ARROWS[name] & place.keys():
            assert place[name] < place[to] or place[name] == place[to] == (0, "tools"), f"{name} imports {to}"


def test_the_map_leads_to_functions_that_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    lines = [line for line in page.partition("| question |")[2].partition("\n\n")[0].splitlines() if "`" in line]
    named = [re.findall(r"`([\w/]+\.py)`: (`[\w.]+`(?:, `[\w.]+`)*)", line) for line in lines]
    assert len(lines) > 10 and all(named)
    for file, names in [pair for found in named for pair in found]:
        for name in re.findall(r"[\w.]+", names):
            assert name in defined(ast.parse((ROOT / "titanmoe" / file).read_text())), f"{file}: {name}"


def defined(tree: ast.Module) -> set[str]:
    """The functions, classes, methods and constants of a module."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_only_the_meshes_of_fold_know_torch() -> None:
    torch_ones = {name for name, to in imports() if room(name) in ("fold", "config") and to.split(".")[0] == "torch"}
    assert torch_ones == {"titanmoe.fold.meshes"}
    reaches = {name for name, to in imports() if room(name) == "fold" and to.startswith("titanmoe.comm")}
    assert reaches == {"titanmoe.fold.meshes"}


def test_names_of_files_stand_once() -> None:
    names = Counter(path.name for path in (ROOT / "titanmoe").rglob("[!_]*.py"))
    assert {name for name, count in names.items() if count > 1} == set()


# ---- what docstrings and comments name

NOT_OURS = {"finally", "_add_unshard_reshard", "_dump_fr_trace_json", "needs_input_grad"}
"""Words of Python and torch that prose names and our code does not use."""


def used(tree: ast.AST) -> set[str]:
    """The words of the code: names, attributes, arguments, imports, and words in strings, docstrings aside."""
    nodes = list(ast.walk(tree))
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    named = [str(getattr(node, field, "")) for node in nodes for field in ("name", "id", "attr", "arg", "module")]
    strings = [str(node.value) for node in nodes if isinstance(node, ast.Constant) and id(node) not in prose]
    return set(re.findall(r"\w+", " ".join(named + strings)))


def test_what_docstrings_and_comments_name_exists() -> None:
    sources = {path: path.read_text() for room in ("titanmoe", "scripts") for path in (ROOT / room).rglob("*.py")}
    words = {path: used(ast.parse(text)) for path, text in sources.items()}
    all_words = NOT_OURS.union(*words.values(), *(path.with_suffix("").parts for path in sources))

    def exists(name: str) -> bool:
        """Module, or package, and what follows it."""
        at, parts = ROOT / "titanmoe", name.split(".")[1:]
        while parts and (at / parts[0]).is_dir():
            at /= parts.pop(0)
        module = (at / parts[0]).with_suffix(".py") if parts else at
        inner = words.get(module) or words.get(at / "__init__.py") or set()
        return not parts or inner.issuperset(parts[module in words :])

    stale = []
    for path, text in sources.items():
        quoted = re.findall(r"`([A-Za-z_][\w.]*)(?:\(.*?\))?`", text)
        files = re.findall(r"(?<![\w/])(?:titanmoe|tests|scripts|docs|train_configs)/[\w./-]*\w", text)
        dotted = re.findall(r"(?<![\w/.-])titanmoe(?:\.(?!__)\w+)+", text)
        stale += [f"{path}: {name}" for name in quoted if not all_words.issuperset(name.split("."))]
        stale += [f"{path}: {file}" for file in files if not (ROOT / file).exists()]
        stale += [f"{path}: {name}" for name in dotted if not exists(name)]
    assert not stale, "\n".join(stale)


def test_no_two_classes_have_one_name():
    """But a table of the config and what is made from it."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "titanmoe").rglob("*.py")):
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.MULTILINE):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert {n: f for n, f in shared.items() if len(f) > 2 or "titanmoe/config/schema.py" not in f} == {}


# ---- calls

MOST_BY_PLACE = 6
"""Arguments that a call of ours may pass without their names."""


def takes_any_number(node: ast.FunctionDef) -> bool:
    """Return whether a function has *args, or only takes arguments by place, as kernels and torch's operators do."""
    return node.args.vararg is not None or any(
        word in ast.unparse(decorator) for decorator in node.decorator_list for word in ("triton.jit", "custom_op")
    )


def test_long_calls_name_their_arguments() -> None:
    sources = [path for room in ("titanmoe", "scripts") for path in sorted((ROOT / room).rglob("*.py"))]
    nodes = {path.relative_to(ROOT): list(ast.walk(ast.parse(path.read_text()))) for path in sources}
    everything = [node for found in nodes.values() for node in found]
    functions = [node for node in everything if isinstance(node, ast.FunctionDef)]
    ours = {node.name for node in everything if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours -= {node.name for node in functions if takes_any_number(node)}
    long = []
    for path, found in nodes.items():
        for call in (node for node in found if isinstance(node, ast.Call) and len(node.args) > MOST_BY_PLACE):
            function, *args = (call.func, *call.args)
            if ast.unparse(function).endswith("partial"):
                function, *args = args
            if len(args) > MOST_BY_PLACE and ast.unparse(function).rpartition(".")[2] in ours:
                long.append(f"{path}:{call.lineno} passes {len(args)} arguments by place")
    assert not long, "\n".join(long)
