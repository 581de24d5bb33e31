"""Make what train_configs/sft_debug.toml fine-tunes, in the current folder: a small model and chats.

    python scripts/make_small_model.py

models/small    a Qwen3-MoE of 0.3 M parameters with random weights, its tokenizer and a chat template
chats.jsonl     what is the capital of which country, asked in several ways
pairs.jsonl     the same questions, each with a short completion that is preferred and a longer one that is not
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from titanmoe.cli import main as titanmoe  # noqa: E402

MODEL, CHATS, PAIRS = Path("models/small"), Path("chats.jsonl"), Path("pairs.jsonl")
CAPITALS = {
    "Norway": "Oslo", "France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi", "Cuba": "Havana",
    "Italy": "Rome", "Egypt": "Cairo", "Nepal": "Kathmandu", "Ghana": "Accra", "Chile": "Santiago", "Spain": "Madrid",
}  # fmt: skip
QUESTIONS = (
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "Name the capital of {}.",
    "{}: what is its capital?",
)
VOCABULARY = 400


def conversations() -> list[list[dict[str, str]]]:
    """Return the chats to train on, each a list of messages with "role" and "content".

    Each country is asked for in each way of QUESTIONS; further chats ask for two countries, one after the other.
    """
    texts = [
        [("user", question.format(country)), ("assistant", f"{capital}.")]
        for country, capital in CAPITALS.items()
        for question in QUESTIONS
    ]
    pairs = zip(CAPITALS.items(), [*CAPITALS.items()][1:], strict=False)
    texts += [
        [
            ("user", QUESTIONS[0].format(country)),
            ("assistant", f"{capital}."),
            ("user", f"And of {other}?"),
            ("assistant", f"{other_capital}."),
        ]
        for (country, capital), (other, other_capital) in pairs
    ]
    return [[{"role": role, "content": text} for role, text in messages] for messages in texts]


def preferences() -> list[dict[str, list[dict[str, str]]]]:
    """Return preference pairs as TRL stores them: "prompt", "chosen" and "rejected", each a list of messages."""
    return [
        {
            "prompt": [{"role": "user", "content": question.format(country)}],
            "chosen": [{"role": "assistant", "content": f"{capital}."}],
            "rejected": [{"role": "assistant", "content": f"{capital} is the capital of {country}."}],
        }
        for country, capital in CAPITALS.items()
        for question in QUESTIONS
    ]


def main() -> int:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    chats = conversations()
    CHATS.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats), encoding="utf-8")
    PAIRS.write_text("".join(json.dumps(pair) + "\n" for pair in preferences()), encoding="utf-8")
    MODEL.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        text.write_text("\n".join(message["content"] for chat in chats for message in chat), encoding="utf-8")
        words = ["tokenizer", "train", str(text), "--vocab-size", str(VOCABULARY), "--out", str(MODEL)]
        with contextlib.redirect_stdout(sys.stderr):
            if code := titanmoe(words):
                return code
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=256,
        rope_theta=10_000.0,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(MODEL)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{MODEL}: a model of {count:,} parameters; {CHATS}: {len(chats)} chats")
    return 0


if __name__ == "__main__":
    sys.exit(main())
