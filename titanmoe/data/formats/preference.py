"""Preferences in JSONL or Parquet, as TRL has them: two answers to a prompt, of which one is better."""

from titanmoe.data.formats.chat import Conversations


class Preferences(Conversations):
    help = "preference: JSONL or Parquet with a prompt, a chosen and a rejected answer, text or messages, for dpo."
    field = "chosen"
    conversations = False
    beside = ()
    answers = 2


FORMAT = Preferences()
