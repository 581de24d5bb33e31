"""Fine-tune a small model from an empty folder and compare its completions with those of transformers.

    mkdir new && cd new && python ../scripts/fine_tune.py [--table.field value ...]

It takes a minute or two on 2 CPU cores: makes a small model with transformers, and chats (scripts/make_small_model.py);
trains train_configs/sft_debug.toml with these options; asks the result questions with `titanmoe generate --chat`;
exports it with `titanmoe convert --to-hf`; and asks transformers the same. Then it trains adapters (LoRA) on the
export, which learn to end completions with "!". It fails unless both produce the same tokens. docs/fine-tuning.md
explains each command.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import make_small_model
from make_small_model import CAPITALS, CHATS, QUESTIONS, ROOT

ASKED, OTHER_CHATS = Path("questions.txt"), Path("other_chats.jsonl")
MOST = 20
"""Tokens of a completion."""


def titanmoe(*words: str, shows: bool = True) -> str:
    """Run a titanmoe command with these words; return what it printed, or None if `shows`, which shows that instead.

    Exits this process with the command's exit code if it fails.
    """
    print(f"\n$ titanmoe {shlex.join(words)}", flush=True)
    command = [sys.executable, "-m", "titanmoe", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, stdout=None if shows else subprocess.PIPE, env=environment, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


def ask_titanmoe(*model: str) -> list[dict[str, Any]]:
    """Return what `titanmoe generate` prints for each question in ASKED: prompt, prompt_tokens, tokens and text.

    `model` are the options that name the model, such as "--checkpoint", "runs/NAME".
    """
    words = ["--chat", "--prompts", str(ASKED), "--temperature", "0", "--max-tokens", str(MOST), "--json"]
    return [json.loads(line) for line in titanmoe("generate", *model, *words, shows=False).splitlines()]


def ask_transformers(folder: str) -> list[dict[str, Any]]:
    """Let transformers complete each question in ASKED, greedily, with the model exported to a folder.

    Returns a dict for each: prompt_tokens and tokens, both lists of ids, and text, without the end of the completion.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ends, completions = model.generation_config.eos_token_id, []
    for question in ASKED.read_text(encoding="utf-8").splitlines():
        chat = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        prompt = asked["input_ids"][0].tolist()
        made = model.generate(**asked, max_new_tokens=MOST, do_sample=False)[0, len(prompt) :].tolist()
        tokens = [token for token in made if token not in (ends if isinstance(ends, list) else [ends])]
        completions.append({"prompt_tokens": prompt, "tokens": tokens, "text": tokenizer.decode(tokens)})
    return completions


def compare(option: str, run: str, expected: str) -> None:
    """Export a run to exported/ with any adapters merged; exit with an error if transformers completes ASKED otherwise.

    It lets titanmoe complete ASKED too, and prints how many completions are right; wrong ones are no error.

    Args:
        option: option of `titanmoe generate` that names the run: "--checkpoint" or "--adapter".
        run: the run's folder.
        expected: the right completion with {} for the capital, such as "{}.".
    """
    exported = f"exported/{Path(run).name}"
    titanmoe("convert", "--to-hf", run, exported)
    ours, theirs = ask_titanmoe(option, run), ask_transformers(exported)
    right = 0
    for one, reference, capital in zip(ours, theirs, CAPITALS.values(), strict=True):
        if any(one[key] != value for key, value in reference.items()):
            raise SystemExit(f"{one['prompt']} titanmoe: {one['text']!r}, transformers: {reference['text']!r}")
        right += one["text"] == expected.format(capital)
        print(f"{one['prompt']} {one['text']}")
    same = f"the same in transformers with {exported}"
    print(f"{run}: {len(ours)} completions, {right} of them right, {same}", flush=True)


def main() -> int:
    if any(Path().iterdir()):
        print(f"fine_tune.py: {Path().absolute()} is not empty: run it in a new folder", file=sys.stderr)
        return 2
    started = time.monotonic()
    if code := make_small_model.main():
        return code
    ASKED.write_text("".join(f"{QUESTIONS[0].format(country)}\n" for country in CAPITALS), encoding="utf-8")
    Path("exported").mkdir()
    recipe = f"{ROOT}/train_configs/sft_debug.toml"
    titanmoe("train", recipe, *sys.argv[1:])
    compare("--checkpoint", "runs/sft_debug", "{}.")
    OTHER_CHATS.write_text(CHATS.read_text(encoding="utf-8").replace('."', '!"'), encoding="utf-8")
    words = ["--job.name", "sft_lora", "--model.hf", "exported/sft_debug", "--data.paths", str(OTHER_CHATS)]
    titanmoe("train", recipe, *words, "--lora.rank", "16", *sys.argv[1:])
    compare("--adapter", "runs/sft_lora", "{}!")
    print(f"{time.monotonic() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
