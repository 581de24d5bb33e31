"""The command `titanmoe generate`: options, checks of them, and output of prompts and conversations.

Called by titanmoe.cli, also under torchrun: all ranks compute, rank 0 reads and prints.

Shapes: T tokens of a text.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanmoe.config.allowed_code import add_allow_code
from titanmoe.config.load import ConfigError
from titanmoe.generate.prompts import continuation, with_begin
from titanmoe.this_process import is_rank_0
from titanmoe.train.launch_messages import exit_code_of

if TYPE_CHECKING:
    from titanmoe.data.chat import ChatEncoder
    from titanmoe.data.tokenizer import Tokenizer
    from titanmoe.generate.conversation import Conversation
    from titanmoe.generate.loop import Generated, Prompt
    from titanmoe.generate.model import TrainedModel

EPILOG = """\
Under torchrun (torchrun --no-python --nproc-per-node 4 titanmoe generate ...) --tp, --ep and --etp split the model,
whatever mapping it was trained under, and data ranks divide up the prompts. docs/generate.md says more.
"""
DEGREES = {
    "tp": "ranks that every matrix and the cache are sharded over",
    "ep": "ranks that the experts are divided among",
    "etp": "ranks that every expert is sharded over",
}


def add_generate(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand `generate` and its options to the parser of `titanmoe`."""
    generate = commands.add_parser(
        "generate",
        help="generate text from a checkpoint",
        description="Continues prompts with the model of a checkpoint.",
        epilog=EPILOG,
    )
    generate.set_defaults(run=lambda args: exit_code_of(lambda: _run(args)))
    generate.add_argument(
        "--checkpoint", type=Path, metavar="RUN",
        help="a run's folder (its latest checkpoint), a checkpoint, or the folder of a Hugging Face model",
    )  # fmt: skip
    generate.add_argument(
        "--adapter", type=Path, metavar="RUN",
        help="adapters on the weights of --checkpoint (default: the weights that they were trained on): a run with "
        "lora.rank, one of its checkpoints, or a folder of PEFT",
    )  # fmt: skip
    add_allow_code(generate)
    generate.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; can be given several times"
    )
    generate.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt per line")
    generate.add_argument(
        "--chat", action="store_true",
        help="a prompt is what a user says, written by the chat template. Without prompts: a conversation, in which "
        "each line of standard input is answered as it comes",
    )  # fmt: skip
    generate.add_argument("--system", metavar="TEXT", help="with --chat: the system's message, before all others")
    generate.add_argument(
        "--special-tokens", action="store_true",
        help="what looks like a special token in a prompt, such as <|im_end|>, is that token. Without this it is text, "
        "as in documents that are trained on; in a chat it always is the token, as in chats that are trained on",
    )  # fmt: skip
    generate.add_argument(
        "--tokenizer", metavar="T", help="tokenizer.json or its folder, or bytes (default: the run's)"
    )
    generate.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="tokens after each prompt (default 128)"
    )
    generate.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end a text after TEXT; may be given several times"
    )
    generate.add_argument("--completions", type=int, default=1, metavar="N", help="texts for each prompt (default 1)")
    generate.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="texts at a time on a data rank (default 16)"
    )
    choice = generate.add_argument_group("choice of the next token")
    choice.add_argument(
        "--temperature", type=float, default=0.8, metavar="X",
        help="1: the model's own distribution; lower: sharper; 0: always the most probable (default 0.8)",
    )  # fmt: skip
    choice.add_argument("--top-k", type=int, metavar="N", help="choose among the N most probable tokens")
    choice.add_argument(
        "--top-p", type=float, metavar="X", help="choose among the most probable tokens whose probabilities add up to X"
    )
    choice.add_argument("--seed", type=int, metavar="N", help="seed of the sampling (default 0)")
    output = generate.add_argument_group("output").add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="a line of JSON for each prompt")
    output.add_argument("--stream", action="store_true", help="for a single prompt, show each token as it comes")
    add_placement(generate)


def add_placement(parser: argparse.ArgumentParser) -> None:
    """Add options for mapping, device and dtype of a model that generates, which `titanmoe eval` has too."""
    where = parser.add_argument_group("where and how it is computed")
    for name, text in DEGREES.items():
        path = "experts." * (name != "tp") + name
        where.add_argument(f"--{name}", f"--parallelism.{path}", dest=name, type=int, default=1, metavar="N", help=text)
    for name in ("pp", "cp"):
        where.add_argument(f"--parallelism.{name}", dest=name, type=int, default=1, help=argparse.SUPPRESS)
    where.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    where.add_argument(
        "--dtype", choices=["float64", "float32", "bfloat16"], help="dtype to compute in (default: as in training)"
    )


def _run(args: argparse.Namespace) -> int:
    from titanmoe.data.chat import open_chat_encoder
    from titanmoe.generate.conversation import Conversation
    from titanmoe.generate.model import chat_template_of, config_to_run, find_model, tokenizer_of
    from titanmoe.train.runtime import start, stop, world_size

    texts = _prompts(args)
    trained = find_model(args.checkpoint, args.adapter)
    tokenizer = tokenizer_of(trained, args.tokenizer)
    if trained.identity not in (None, tokenizer.identity) and is_rank_0():
        print(f"note: the model was trained on tokens of another tokenizer ({trained.identity})", file=sys.stderr)
    degrees = {name: getattr(args, name) for name in ("pp", "cp", *DEGREES)}
    config = config_to_run(trained.config, world_size(), degrees, args.dtype, args.device)
    check_vocab_size(tokenizer, trained)
    chat = open_chat_encoder(chat_template_of(trained, tokenizer), tokenizer) if args.chat else None
    ids = _encode(args, texts, tokenizer, chat)
    if chat and not args.json:
        texts = [f"{text}\n" for text in texts]  # the completion gets a line of its own
    runtime = start(config)
    try:
        speaker = _Speaker(args, tokenizer, chat, trained, config, runtime)
        if texts:
            speaker.continue_prompts(texts, ids)
        else:
            speaker.converse(Conversation(chat, args.system))
        return 0
    finally:
        stop()


def _prompts(args: argparse.Namespace) -> list[str]:
    """Return the texts of the prompts that the command line gives; ConfigError with every problem of its options.

    Lines of the file of --prompts come last. [] stands for a conversation (--chat alone).
    """
    problems, texts = [], list(args.prompt)
    if args.checkpoint is None and args.adapter is None:
        problems.append("no model: give --checkpoint RUN, or --adapter RUN for adapters on the weights under them")
    if args.prompts is not None:
        try:
            texts += args.prompts.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            problems.append(f"--prompts {args.prompts} cannot be read: {reason}")
    if not texts and not problems and (args.prompts is not None or not args.chat):
        problems.append(
            "no prompt: give --prompt TEXT, or --prompts FILE with one per line, or --chat, which reads what you say"
        )
    if args.system is not None and not args.chat:
        problems.append("--system is a message of a chat: give --chat too, or leave it out")
    if args.special_tokens and args.chat:
        problems.append("--special-tokens has no effect with --chat, where they are always taken as such: leave it out")
    for name in ("max_tokens", "completions", "batch_size", "top_k"):
        value = getattr(args, name)
        if value is not None and value < 1:
            problems.append(f"--{name.replace('_', '-')} = {value} is below 1: use 1 or more, or leave it out")
    if not 0 <= args.temperature < math.inf:
        problems.append(
            f"--temperature = {args.temperature} is not a temperature: use 0 for the most probable token, or more"
        )
    if args.top_p is not None and not 0 < args.top_p <= 1:
        problems.append(
            f"--top-p = {args.top_p} is not a probability above 0 and up to 1: use 0.9, for example, or leave it out"
        )
    unused = [name for name in ("top_k", "top_p", "seed") if getattr(args, name) is not None]
    if args.temperature == 0 and unused:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        problems.append(f"--temperature 0 samples nothing, and {options} would have no effect: leave one of them out")
    if args.completions > 1 and args.temperature == 0:
        problems.append(f"--completions {args.completions} with --temperature 0 would be equal: leave one of them out")
    if args.completions > 1 and (args.stream or not texts):
        problems.append(f"--completions {args.completions} is for prompts without --stream: leave it out")
    if "" in args.stop:
        problems.append('--stop "" would end every text at once: leave it out')
    if args.stream and len(texts) > 1:
        problems.append(f"--stream shows one prompt as its text is made, and there are {len(texts)}: give one")
    if problems:
        raise ConfigError(problems)
    return texts


def check_vocab_size(tokenizer: Tokenizer, trained: TrainedModel) -> None:
    """Raise a ConfigError if a tokenizer has more tokens than the model."""
    vocab_size = trained.config.model.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model of {trained.path} only {vocab_size}: "
            "name the one it was trained with, as --tokenizer"
        )


def _encode(
    args: argparse.Namespace, texts: Sequence[str], tokenizer: Tokenizer, chat: ChatEncoder | None
) -> list[Prompt]:
    """Encode prompts as token ids, each beginning with the tokenizer's begin token if it has one.

    Text that looks like a special token is text, except in chats, as in training, and with --special-tokens. With
    `chat` each text is the user's message of a new conversation, after args.system.

    Raises:
        ConfigError: a prompt is empty and the tokenizer has no begin token, or the chat template refuses a message.
    """
    from titanmoe.generate.conversation import Conversation
    from titanmoe.generate.loop import Prompt

    if chat:
        ids = [Conversation(chat, args.system).ask(text) for text in texts]
    elif args.special_tokens:
        ids = [tokenizer.encode_with_offsets(text).tokens_T.tolist() for text in texts]
    else:
        ids = [row.tolist() for row in tokenizer.encode_all(list(texts))]
    prompts = [Prompt(i, with_begin(row, tokenizer), args.completions) for i, row in enumerate(ids)]
    if empty := [prompt.number + 1 for prompt in prompts if not prompt.ids]:
        raise ConfigError(f"prompt {empty[0]} is empty, and the tokenizer has no begin mark: give it some text")
    return prompts


class _Speaker:
    """The loaded model of the command: all ranks generate, rank 0 prints. Building it is collective over the world.

    So are `continue_prompts`, and `converse`, which returns when rank 0's standard input ends.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        tokenizer: Tokenizer,
        chat: ChatEncoder | None,
        trained: TrainedModel,
        config: Any,
        runtime: Any,
    ):
        from titanmoe.generate.build_model import open_generator
        from titanmoe.generate.loop import Stop
        from titanmoe.generate.sampling import Sampling

        self.args, self.tokenizer, self.trained, self.config = args, tokenizer, trained, config
        self.runtime, self.first = runtime, runtime.rank == 0
        ends = {tokenizer.eos, chat.end_of_turn_token()} if chat else {tokenizer.eos}
        self.generator = open_generator(config, trained, runtime, tokenizer, ends)
        self.stop = Stop(args.max_tokens, tuple(args.stop), tokenizer.decode)
        self.sampling = Sampling(args.temperature, args.top_k or 0, args.top_p or 1.0, args.seed or 0)
        self.longest = 0

    def continue_prompts(self, texts: list[str], prompts: list[Prompt]) -> None:
        self._note_length(max(len(prompt.ids) for prompt in prompts))
        stream = _Stream(texts[0], prompts[0], self.tokenizer) if self.args.stream and self.first else None
        start, count = time.monotonic(), 0
        for generated in self._generated(prompts, stream):
            count += len(generated.content)
            if self.first and stream:
                stream.finish(generated)
            elif self.first:
                text, ids = texts[generated.number], prompts[generated.number].ids
                print(self._line(text, len(texts) * self.args.completions > 1, ids, generated), flush=True)
        self._summarise(count, f"{len(texts)} prompt{'s' * (len(texts) > 1)}", time.monotonic() - start)

    def converse(self, conversation: Conversation) -> None:
        from titanmoe.generate.conversation import turns

        count, number, seconds = 0, 0, 0.0
        for text, prompt in turns(conversation, self.first, self._broadcast):
            self._note_length(len(prompt.ids))
            stream = _Stream("", prompt, self.tokenizer) if self.first and not self.args.json else None
            start = time.monotonic()
            (generated,) = self._generated([prompt], stream)
            seconds, count, number = seconds + time.monotonic() - start, count + len(generated.content), number + 1
            if not self.first:
                continue
            reply = continuation(self.tokenizer, prompt.ids, generated.content)
            conversation.messages.append({"role": "assistant", "content": reply})
            if stream:
                stream.finish(generated)
            else:
                print(self._line(text, False, prompt.ids, generated), flush=True)
        self._summarise(count, f"{number} question{'s' * (number != 1)}", seconds)

    def _generated(self, prompts: list[Prompt], stream: _Stream | None) -> Iterator[Generated]:
        size, on_token = max(self.args.batch_size, self.args.completions), stream and stream.update
        for batch in self.generator.batches(prompts, size, self.stop, self.sampling, on_token):
            yield from batch

    def _broadcast(self, value: Any) -> Any:
        """Broadcast a value of rank 0 to all ranks and return it. Collective over the world."""
        import torch.distributed as dist

        if self.runtime.world > 1:
            values = [value]
            dist.broadcast_object_list(values, src=0)
            (value,) = values
        return value

    def _note_length(self, prompt: int) -> None:
        longest, trained_len = prompt + self.args.max_tokens, self.trained.config.training.seq_len
        if self.first and longest > trained_len >= self.longest:
            print(
                f"note: sequences get up to {longest} tokens; the model was trained on {trained_len}", file=sys.stderr
            )
        self.longest = max(self.longest, longest)

    def _line(self, prompt: str, with_title: bool, ids: list[int], generated: Generated) -> str:
        number, text = generated.number, continuation(self.tokenizer, ids, generated.content)
        if self.args.json:
            line = {"number": number}
            if self.args.completions > 1:
                line["completion_number"] = generated.completion_number
            line |= {"prompt": prompt, "text": text, "end": generated.end}
            return json.dumps(line | {"prompt_tokens": ids, "tokens": generated.content})
        title = f"--- {number + 1}, {len(generated.content)} tokens, ended by {generated.end}\n" if with_title else ""
        return f"{title}{prompt}{text}"

    def _summarise(self, count: int, of_what: str, seconds: float) -> None:
        from titanmoe.generate.cache import cache_cost

        if not self.first:
            return
        step, speed = f" (step {self.trained.step})" if self.trained.step else "", count / max(seconds, 1e-9)
        under = self.args.checkpoint or self.trained.path
        model = f"{self.args.adapter} on {under}" if self.args.adapter else under
        shape, tp, dtype = self.config.model, self.config.parallelism.tp, self.generator.model.dtype
        print(
            f"{model}{step}: {count} tokens after {of_what} in {seconds:.1f} s, including the prompts "
            f"({speed:,.0f} tokens/s), {self.config.training.dtype} on {self.runtime.world} x "
            f"{self.runtime.device.type}; cache on a rank: {cache_cost(shape, tp, dtype.itemsize)}",
            file=sys.stderr,
        )


class _Stream:
    """Printer of a text while it is generated, without incomplete characters, which decode to U+FFFD."""

    def __init__(self, text: str, prompt: Prompt, tokenizer: Tokenizer):
        self.prompt, self.tokenizer, self.shown = prompt, tokenizer, 0
        print(text, end="", flush=True)

    def update(self, generated: Generated) -> None:
        self._show(continuation(self.tokenizer, self.prompt.ids, generated.content).rstrip("\ufffd"))

    def finish(self, generated: Generated) -> None:
        self._show(continuation(self.tokenizer, self.prompt.ids, generated.content))
        print(flush=True)

    def _show(self, text: str) -> None:
        print(text[self.shown :], end="", flush=True)
        self.shown = max(self.shown, len(text))
