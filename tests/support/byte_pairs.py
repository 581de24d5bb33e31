"""A small tokenizer with a chat template, in a Hugging Face folder, for tests of tokenizing and chats."""

import json
from pathlib import Path

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MARKED = (
    "{%- for message in messages %}\n"
    "  {%- if message.role == 'assistant' %}\n"
    "<|im_start|>assistant\n{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "  {%- else %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
)


def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level BPE of 300 tokens and the template CHATML into an existing folder, and return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=marks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, said the fox"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": {"content": "<|endoftext|>"}, "bos_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
