"""docs/fine-tuning.md: its files are written and its commands run; `titanmoe finetune`; the recipes sft_debug and
dpo_debug run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import make_small_model
from tests.test_get_started import BLOCK, ROOT, Newcomer
from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config import load
from titanmoe.config.recipe import parse_toml
from titanmoe.config.schema import Config
from titanmoe.fold.legality import violations
from titanmoe.launcher import finetune_command
from titanmoe.launcher.fit_ranks import Machine
from titanmoe.plan.communicators import usable_bytes
from titanmoe.plan.devices import read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.search import evaluate, search

ANSWER = "Oslo."
DATA = "chats.jsonl", "pairs.jsonl"


class FineTuner(Newcomer):
    def types(self, line: str) -> None:
        said, pipe, command = line.partition(" | ")
        if not pipe:
            return super().types(line)
        words = shlex.split(command)
        text = subprocess.run(said, shell=True, check=True, capture_output=True, text=True).stdout
        self.said.setdefault(" ".join(words[:2]), []).append(self.has(["-m", *words], said=text))

    def trains(self, words: list[str]) -> str:
        return self.has(["-m", "titanmoe", *words])


def blocks() -> list[tuple[str, str, str]]:
    """File, language and text of each block up to the adapters, whose sections have no recipes of their own."""
    page = (ROOT / "docs/fine-tuning.md").read_text(encoding="utf-8")
    return BLOCK.findall(page.partition("\n## Adapters (LoRA)")[0])


def prints(said: str, text: str) -> bool:
    """Whether a command prints what the page shows, with anything in place of a line of three dots."""
    return re.search(".*".join(map(re.escape, text.split("...\n"))), said, re.DOTALL) is not None


TOKEN = re.compile(r"^ {2,}\d+  [<\[].*$", re.MULTILINE)
"""A line of tokens as a run's first sample and `titanmoe data show` print it."""


def test_the_page_works_from_top_to_bottom_and_so_does_the_recipe(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for folder in ("scripts", "train_configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    user = FineTuner(tmp_path)
    for file, language, text in blocks():
        if language == "console":
            for command in text.splitlines():
                user.types(command.removeprefix("$ "))
        elif language == "text":
            assert prints(user.said["titanmoe data"][-1], text), user.said["titanmoe data"][-1]
        elif file:
            (tmp_path / file).write_text(text, encoding="utf-8")
        elif language == "toml":
            assert text == (tmp_path / "capitals.toml").read_text(encoding="utf-8")
        else:
            assert language == "json" and any(text in (tmp_path / name).read_text() for name in DATA)

    said = user.said
    (trained,), (preferred,) = said["titanmoe finetune"], said["titanmoe train"]
    assert re.search(r"^begins from +weights of models/small *$", trained, re.MULTILINE)
    assert re.search(r"^epochs +15 of every source: [\d,]+ sequences in (\d+) steps", trained, re.MULTILINE)
    assert re.search(r"^packing +best_fit *$", trained, re.MULTILINE)
    for header, name in ((trained, "capitals"), (preferred, "dpo_debug")):
        (file,) = re.findall(r"^first sample +(\S+) *$", header, re.MULTILINE)
        assert file == f"runs/{name}/first_sample.txt" and (tmp_path / file).is_file()
    sample = (tmp_path / "runs/capitals/first_sample.txt").read_text(encoding="utf-8")
    assert TOKEN.findall(sample) == TOKEN.findall(said["titanmoe data"][0]) and len(TOKEN.findall(sample)) == 9
    assert re.search(r"^experts +ep 2 *$", trained, re.MULTILINE)
    assert said["titanmoe generate"] == [f"{ANSWER}\n"] and said["python ask.py"] == [f"{ANSWER}\n"]

    (counted,) = re.findall(r"^reference +(\w{16}), computed now$", said["titanmoe score"][0], re.MULTILINE)
    assert re.search(rf"^reference +{counted}, stored before *$", preferred, re.MULTILINE)
    assert "loss 0.6931" in preferred and re.search(r"^step 11/11 .* accuracy 100.0% .* val accuracy", preferred, re.M)

    recipe = ["-m", "titanmoe", "train", "train_configs/sft_debug.toml", "--training.epochs", "1"]
    debug, again = user.has(recipe), user.has(recipe)
    assert re.search(r"^epochs +1 of every source: [\d,]+ sequences in 2 steps", debug, re.MULTILINE)
    assert "val loss" in debug and "\ndone       step 2 of 2 " in debug
    assert "has made 2 steps, and training.epochs = 1\n" in again and "--training.epochs 2\n" in again


def test_the_script_ends_with_the_same_completions_in_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, f"{ROOT}/scripts/fine_tune.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("sft_debug", "sft_lora"):
        same = f"runs/{name}: 12 completions, 12 of them right, the same in transformers with exported/{name}\n"
        assert same in done.stdout
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2 and "is not empty" in again.stderr


# ---- titanmoe finetune


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models/small, chats.jsonl and pairs.jsonl."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert make_small_model.main() == 0
    return folder


@pytest.fixture
def here(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with links to these; nothing is trained."""
    for name in ("models", *DATA):
        (tmp_path / name).symlink_to(small / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetune_command, "prepare", lambda request: SimpleNamespace(config=Config()))
    monkeypatch.setattr(finetune_command, "start", lambda request: 0)
    return tmp_path


def recipe_of(words: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The tables that finetune writes on a machine of so many GPUs, which is a legal recipe."""
    monkeypatch.setattr(finetune_command, "this_machine", lambda device: Machine(gpus, 2))
    assert main(["finetune", *shlex.split(words)]) == 0
    (file,) = Path().glob("*.toml")
    config = load([str(file)], COMPONENTS, lambda config: violations(config, gpus or 2))
    recipe = parse_toml(file.read_text(encoding="utf-8"))
    assert recipe["job"] == {"ranks": gpus or 2} and config.checkpoint.initial_hf == words.split()[0]
    file.rename("recipe.txt")
    return recipe


def test_the_pages_recipe_is_written_shown_and_trained(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one epoch instead of the page's 15."""
    (words,) = re.findall(r"^\$ titanmoe finetune (.*)$", "".join(text for _, _, text in blocks()), re.MULTILINE)
    recipe_of(words, 0, monkeypatch)
    written = Path("recipe.txt").rename("capitals.toml").read_text(encoding="utf-8")
    assert [text for _, language, text in blocks() if language == "toml"] == [written]
    capsys.readouterr()
    assert main(["data", "show", "capitals.toml"]) == 0
    shown = capsys.readouterr().out
    assert all(prints(shown, text) for _, language, text in blocks() if language == "text"), shown
    data = "".join(Path(name).read_text(encoding="utf-8") for name in DATA)
    assert all(text in data for _, language, text in blocks() if language == "json")

    short = words.replace("capitals", "short").replace("epochs 15", "epochs 1")
    trained = FineTuner(here).has(["-m", "titanmoe", "finetune", *shlex.split(short)])
    assert re.search(r"^begins from +weights of models/small *$", trained, re.MULTILINE) and "\ndone " in trained
    assert re.search(r"^epochs +1 of every source: [\d,]+ sequences in \d+ steps", trained, re.MULTILINE)
    sample = Path("runs/short/first_sample.txt").read_text(encoding="utf-8")
    assert TOKEN.findall(sample) == TOKEN.findall(shown) and len(TOKEN.findall(sample)) == 9


def test_the_recipe_follows_from_machine_model_and_lengths(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "capital " * 20
    lines = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": words * (30 if n < 30 else 1)},
            ]
        }
        for n in range(4000)
    ]
    Path("long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    recipe = recipe_of("models/small long.jsonl", 8, monkeypatch)
    training = recipe["training"]
    assert training["seq_len"] % 64 == 0 and 40 < training["seq_len"] <= 512, "all but 30 of 4,000 fit"
    assert recipe["data"]["long_chats"] == "cut"
    per_step, local = training["global_batch_size"], training["local_batch_size"]
    assert per_step % 8 == per_step % local == 0 and 8 <= per_step <= 64
    assert "mixed_precision_param" not in training
    assert recipe["validation"]["held_out"] == 20 and training["epochs"] == 3
    own = recipe_of("models/small long.jsonl --parallelism.tp 2", 8, monkeypatch)
    assert own["parallelism"] == {"tp": 2, "experts": {"ep": 8}} and own["activation_checkpoint"] == {"mode": "full"}


QWEN3_30B = dict(
    hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    moe_intermediate_size=768, num_experts=128, num_local_experts=128, num_experts_per_tok=8, vocab_size=151936,
    max_position_embeddings=40960,
)  # fmt: skip
"""Sizes of Qwen3-30B-A3B."""


@pytest.fixture
def published(here: Path) -> str:
    """The folder of a model of a published size, without weights."""
    folder = here / "published"
    shutil.copytree("models/small", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | QWEN3_30B), encoding="utf-8")
    return folder.name


def test_on_gpus_the_mapping_is_the_planners_fastest(published: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe_of(f"{published} chats.jsonl --training.seq_len 4096", 8, monkeypatch)
    text = Path("recipe.txt").rename("recipe.toml").read_text(encoding="utf-8")
    assert f"{finetune_command.PLANNED} (H100 by memory, as the planner does not know" in text
    config, device = load(["recipe.toml"], COMPONENTS, lambda config: []), read_device("h100")
    planned, (fastest,) = evaluate(config, 8, device, Factors()), search(config, 8, device, Factors(), count=1).best
    assert planned.price.step == fastest.price.step
    assert planned.peak == fastest.peak <= usable_bytes(planned.config, planned.fold, device)


def test_what_no_mapping_fits_is_refused_with_a_number_of_gpus_or_adapters(
    published: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(finetune_command, "this_machine", lambda device: Machine(1, 2))
    assert main(["finetune", published, "chats.jsonl"]) == 2
    message = f"no mapping of 1 GPU fits {published} into memory: 8 GPUs like these are enough, and --lora needs less"
    assert message in capsys.readouterr().err
    assert "lora" in recipe_of(f"{published} chats.jsonl --lora", 1, monkeypatch)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("chats.jsonl", {"optimizer.lr": 1e-5, "training.epochs": 3, "moe.aux_loss": 0.001}),
        ("chats.jsonl --lora", {"optimizer.lr": 2e-4, "lora.rank": 16}),
        ("pairs.jsonl --dpo", {"optimizer.lr": 1e-6, "training.objective": "dpo", "dpo.beta": 0.1}),
        ("pairs.jsonl --dpo --lora --lora.rank 4", {"optimizer.lr": 5e-6, "lora.rank": 4, "data.format": "preference"}),
        ("chats.jsonl --job.ranks=2 --validation.interval 7", {"validation.interval": 7}),
    ],
)
def test_what_is_usual_and_what_the_user_sets(
    options: str, expected: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(f"models/small {options}", 0, monkeypatch)
    got = {f"{table}.{name}": value for table, values in recipe.items() for name, value in values.items()}
    assert got | expected == got and got["training.mixed_precision_param"] == "float32"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("models/small", "there is only 'models/small': titanmoe finetune models/small chats.jsonl"),
        ("models/small chats.jsonl --lora --full", "give one of them"),
        ("models/small chats.jsonl --name a/b", "without a folder"),
        ("models/small absent.jsonl", "'absent.jsonl' does not exist"),
        ("models/absent chats.jsonl", "models/absent"),
        ("models/small chats.jsonl --training.sequence 7", "unknown option --training.sequence"),
        ("models/small chats.jsonl --name mine", "mine.toml exists and is another recipe"),
        ("models/small pairs.jsonl", "pairs.jsonl"),
    ],
)
def test_mistakes_end_in_one_message_and_no_recipe(
    words: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text("[job]\n", encoding="utf-8")
    assert main(["finetune", *shlex.split(words)]) == 2
    assert message in capsys.readouterr().err
    assert [file.name for file in Path().glob("*.toml")] == ["mine.toml"]
