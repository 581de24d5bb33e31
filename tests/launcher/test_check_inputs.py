"""Checks before a start: the files that a run reads and the disk space that it needs, before any rank is started, and
by rank 0 under torchrun."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.folders import make, rewrite
from tests.checkpoint_hf import adapted, models
from titanmoe.checkpoint.hf.peft_write import CONFIG as ADAPTER_CONFIG
from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.fields import to_tables
from titanmoe.config.schema import Config
from titanmoe.data.loader import Loader
from titanmoe.launcher import agent, fit_ranks
from titanmoe.launcher.fit_ranks import Machine
from titanmoe.launcher.train_command import parse_words, prepare
from titanmoe.train import host_resources, launch, refusals

FIELDS = {"parallelism.tp": 1, "parallelism.experts.ep": 1, "model.vocab_size": 320, "training.seq_len": 8}
WORDS = ["debug", *(f"--{name}={value}" for name, value in FIELDS.items())]
TEXTS = [{"text": "one and two and three"}] * 40
CHATS = [{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]}] * 40
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit_ranks, "this_machine", lambda device: Machine(0, 2))
    monkeypatch.setattr(agent, "launch", lambda *_: pytest.fail("ranks were started"))


def jsonl(name: str, records: list[Any]) -> str:
    Path(name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return name


def files(*paths: str, **fields: Any) -> list[str]:
    options = {"source": "files"} | fields
    return ["--data.paths", *paths, *(f"--data.{name}={value}" for name, value in options.items())]


def refused(capsys: pytest.CaptureFixture[str], *words: str, command: str = "train") -> str:
    """Return the message of a start that is refused before any rank exists; check that it leaves no file behind."""
    before = sorted(Path().rglob("*"))
    assert main([command, *WORDS, "--ranks=2", *words]) == 2
    assert sorted(Path().rglob("*")) == before, "no logs, no cache, no run"
    return capsys.readouterr().err


def config_of(*words: str) -> Config:
    return prepare(parse_words([*WORDS, "--ranks=2", *words])).config


# ---- data

Case = tuple[Callable[[], list[str]], str]
DATA: dict[str, Case] = {
    "no file": (lambda: files("nowhere.jsonl"), "'nowhere.jsonl' does not exist (looked for "),
    "no such field": (lambda: files(jsonl("a.jsonl", [{"prose": "x"}])), "a.jsonl:1: has no field 'text', it has"),
    "not text": (lambda: files(jsonl("a.jsonl", [*TEXTS[:7], {"text": 5}])), "a.jsonl:8: 'text' is a number, not text"),
    "no template": (lambda: files(jsonl("a.jsonl", CHATS), format="chat"), "has no chat template of its own"),
    "no messages": (
        lambda: files(jsonl("a.jsonl", [{"messages": "x"}]), format="chat", chat_template=template()),
        "a.jsonl:1: ",
    ),
    "no tokenizer": (lambda: files(jsonl("a.jsonl", TEXTS), tokenizer="none"), "tokenizer 'none': there is no file "),
    "vocabulary": (
        lambda: [*files(jsonl("a.jsonl", TEXTS)), "--model.vocab_size=128"],
        "model.vocab_size = 128 is below 259",
    ),
    "validation": (
        lambda: [*files(jsonl("a.jsonl", TEXTS)), "--validation.paths=none.jsonl", "--validation.held_out=0"],
        "'none.jsonl' does not exist",
    ),
    "questions": (
        lambda: ["--validation.quiz.interval=1", f"--validation.quiz.paths={jsonl('q.jsonl', [{}])}"],
        'q.jsonl:1: has no "question", or none that is a text: write',
    ),
}


def template() -> str:
    Path("chat.jinja").write_text(TEMPLATE)
    return "chat.jinja"


@pytest.mark.parametrize("case", DATA)
def test_bad_data_is_refused_before_there_are_ranks(capsys: pytest.CaptureFixture[str], case: str) -> None:
    make_words, says = DATA[case]
    words = make_words()
    assert says in refused(capsys, *words)


def test_everything_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    bad = jsonl("bad.jsonl", [{"prose": "x"}])
    words = [*files("nowhere.jsonl", bad), "--checkpoint.load=elsewhere", "--checkpoint.initial_hf=nothing"]
    printed = refused(capsys, *words)
    assert "error: 3 problems" in printed
    assert "'nowhere.jsonl' does not exist" in printed and "bad.jsonl:1: has no field 'text'" in printed
    assert "elsewhere: no such folder" in printed


def test_bad_lines_that_are_left_out_are_not_looked_for() -> None:
    bad = jsonl("bad.jsonl", [{"prose": "x"}, *TEXTS])
    assert config_of(*files(bad, bad_lines="skip")).data.paths == ["bad.jsonl"]
    assert not Path("runs").exists(), "nothing is tokenized yet"


def test_token_shards_are_opened_as_by_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", jsonl("a.jsonl", TEXTS), "--tokenizer=bytes", "--out=shards"]) == 0
    assert config_of(*files("shards")).data.paths == ["shards"]
    assert "needs 100001 tokens per sample, but shards (" in refused(
        capsys, *files("shards"), "--training.seq_len=100000"
    )
    next(Path("shards").glob("*.tokens")).write_bytes(b"")
    assert "shards/00000-000.tokens" in refused(capsys, *files("shards"))


@pytest.mark.parametrize(
    ("format", "record", "says"),
    [
        ("chat", {"prompt": "a" * 20, "completion": "b"}, "of 40 chats none fits training.seq_len = 8, so there is"),
        (
            "preference",
            {"prompt": "a" * 20, "chosen": "b", "rejected": "c"},
            "has no pair that fits training.seq_len = 8",
        ),
    ],
)
def test_prompts_longer_than_seq_len_are_refused(
    capsys: pytest.CaptureFixture[str], format: str, record: dict[str, str], says: str
) -> None:
    words = ["--tokenizer=bytes", f"--format={format}", f"--chat-template={template()}", "--out=shards"]
    assert main(["tokenize", jsonl("a.jsonl", [record] * 40), *words]) == 0
    more = ["--validation.held_out=0", "--validation.interval=0"]
    more += ["--training.objective=dpo"] if format == "preference" else []
    assert says in refused(capsys, *files("shards"), *more)


# ---- checkpoints, models, adapters


def saved(*words: str, **entries: Any) -> Path:
    """A checkpoint of the run that these words start, without its tensors."""
    config = config_of(*words)
    path = make(Path("runs/debug/checkpoints"), 2, 1)
    state = Loader(config, 0, 1).state_dict()
    rewrite(path, record={"step": 2, "tokens": 1, "loader": state, "config": to_tables(config)} | entries)
    return path


SYNTHETIC = ["--data.source=synthetic"]
RESUMED = {
    "--optimizer.name=muon": 'optimizer.name = "muon" cannot go on from the moments of "adamw"',
    "--model.dim=128": "model.dim is 128 and was 64 when the checkpoint was made",
    "--training.seed=5": "training.seed was ",
    "--checkpoint.load=7": "checkpoint.load = 7: runs/debug/checkpoints has no such step: choose from 2",
    "--checkpoint.initial_hf=other": 'checkpoint.initial_hf is "other", and the run began from random weights',
}


@pytest.mark.parametrize("option", RESUMED)
def test_a_resume_that_cannot_be_is_refused_before_there_are_ranks(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    saved(*SYNTHETIC)
    assert RESUMED[option] in refused(capsys, *SYNTHETIC, option)
    assert config_of(*SYNTHETIC, "--training.local_batch_size=2").training.local_batch_size == 2


def test_a_damaged_checkpoint_is_refused_before_there_are_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    next(saved(*SYNTHETIC).glob("*.distcp")).write_bytes(b"")
    assert "no checkpoint in runs/debug/checkpoints can be used" in refused(capsys, *SYNTHETIC)


def test_scores_need_no_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """`titanmoe score` takes only the weights of a checkpoint."""
    path = saved(*SYNTHETIC)
    started: list[Any] = []
    monkeypatch.setattr("titanmoe.launcher.score_command.start", lambda prepared: started.append(prepared) or 0)
    words = ["--data", jsonl("a.jsonl", TEXTS), f"--checkpoint.load={path}", "--optimizer.name=muon"]
    assert main(["score", *WORDS, "--ranks=2", *words]) == 0 and started[0].checked.scores == "labels"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(models.make("qwen3_moe"), tmp_path_factory.mktemp("qwen") / "model")


def test_a_model_that_lacks_tensors_is_refused_before_there_are_ranks(
    capsys: pytest.CaptureFixture[str], qwen: Path
) -> None:
    words = [*SYNTHETIC, "--model.family=mixtral", f"--checkpoint.initial_hf={qwen}"]
    assert f"{qwen}/config.json has model_type 'qwen3_moe'" in refused(capsys, *words)
    shutil.copytree(qwen, "model", ignore=shutil.ignore_patterns("*.safetensors"))
    assert "has neither model.safetensors nor " in refused(capsys, *SYNTHETIC, "--checkpoint.initial_hf=model")


def test_adapters_that_do_not_fit_are_refused_before_there_are_ranks(
    capsys: pytest.CaptureFixture[str], qwen: Path
) -> None:
    from titanmoe.config.load import load

    words = ["train.toml", *SYNTHETIC, "--training.seq_len=8", "--lora.rank=4", "--checkpoint.initial_adapter=peft"]
    Path("train.toml").write_text(f'[model]\nhf = "{qwen}"\n[job]\nranks = 1\n')
    assert load(words[:1], COMPONENTS, lambda config: []).model.family == "qwen3_moe"
    adapted.write(Path("lora/step-00000001"), qwen)
    assert main(["convert", "lora/step-00000001", "peft", "--to-peft"]) == 0
    assert main(["train", *words]) == 2
    assert "lora.rank" in capsys.readouterr().err
    rank = ["--lora.rank=6", "--lora.experts_rank=3", "--lora.alpha=7"]
    prepare(parse_words([*words, *rank]))
    settings = json.loads(Path("peft", ADAPTER_CONFIG).read_text())
    Path("peft", ADAPTER_CONFIG).write_text(json.dumps(settings | {"base_model_name_or_path": "owner/another"}))
    assert main(["train", *words, *rank]) == 2
    assert "the adapters are for owner/another" in capsys.readouterr().err


# ---- room


def free(monkeypatch: pytest.MonkeyPatch, count: float, total: float = 1e12) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=int(count), total=int(total)))


def test_a_disk_without_room_is_refused_before_there_are_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free(monkeypatch, 22e6)
    room = f"in {tmp_path}/runs/debug/checkpoints, and only 22 MB are free there: make room, "
    lower = f"{room}lower checkpoint.keep_last, name another checkpoint.folder or job.dump_folder, or save nothing with"
    printed = refused(capsys, *SYNTHETIC)
    assert f"error: 3 checkpoints of about 10.7 MB have to fit {lower} --checkpoint.enable false" in printed
    limit = "(checkpoint.keep_last = 3, and the one being written)"
    assert f" 4 checkpoints of about 10.7 MB have to fit {limit} {room}" in refused(
        capsys, *SYNTHETIC, "--checkpoint.interval=10"
    )
    for fits in ("--checkpoint.enable=false", "--checkpoint.interval=30", "--checkpoint.keep_last=1"):
        assert config_of(*SYNTHETIC, fits)
    free(monkeypatch, 0)
    assert "a checkpoint of about 10.7 MB has to fit in " in refused(capsys, *SYNTHETIC, "--checkpoint.keep_last=0")
    free(monkeypatch, 0, total=0)
    assert config_of(*SYNTHETIC), "a file system that does not say how much it has"


def test_what_is_there_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    config, each = config_of(*SYNTHETIC, "--checkpoint.keep_last=1"), 0
    each = host_resources.checkpoint_bytes(config)
    free(monkeypatch, each)
    assert host_resources.disk_shortage(config).startswith("2 checkpoints")
    assert host_resources.disk_shortage(config, step=40) == "", "one more, at the end"
    left = Path("runs/debug/checkpoints/step-00000009.writing")
    left.mkdir(parents=True)
    (left / "a").write_bytes(b"x" * each)
    assert host_resources.disk_shortage(config) == "", "the start removes what an interrupted save has left"
    make(left.parent, 20, 1)
    free(monkeypatch, 0)
    assert host_resources.disk_shortage(config, step=20) == "", "the old one is there, and one is written"
    shutil.rmtree(left)
    assert host_resources.disk_shortage(config, step=20).startswith("a checkpoint of about")
    assert host_resources.disk_shortage(config, step=60) == "", "nothing is left to save"


# ---- torchrun


@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_rank_0_checks_before_the_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    class Met(Exception):
        pass

    def meet(config: Config) -> None:
        raise Met

    monkeypatch.setattr(launch, "start", meet)
    monkeypatch.setattr(launch, "die_with_launcher", lambda: None)
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in (environment | {"MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, str(value))
    words = ["--config", *WORDS, *files("nowhere.jsonl")]
    if rank:
        with pytest.raises(Met):
            launch.main(words, COMPONENTS)
        return
    with pytest.raises(SystemExit) as end:
        launch.main(words, COMPONENTS)
    assert end.value.code == 2 and "'nowhere.jsonl' does not exist" in capsys.readouterr().err


def test_a_config_is_printed_without_what_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", *WORDS, "--ranks=2", *files("nowhere.jsonl"), "--print-config"])
    assert end.value.code == 0 and 'paths = ["nowhere.jsonl"]' in capsys.readouterr().out


def test_one_error_is_raised_as_it_is() -> None:
    collected = refusals.CollectedErrors()
    collected.raise_together()

    def refuse() -> None:
        raise ConfigError(["no"], "a.toml")

    assert collected.collect(lambda: 5) == 5 and collected.collect(refuse) is None
    with pytest.raises(ConfigError, match=r"error: 1 problem in a\.toml"):
        collected.raise_together()
    collected.collect(refuse)
    with pytest.raises(ConfigError) as both:
        collected.raise_together()
    assert both.value.problems == ["a.toml: no", "a.toml: no"]
