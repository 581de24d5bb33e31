"""Which prompts share a batch or a rank, and which have ended, changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import world
from tests.generate import saved
from tests.generate.saved import MODELS
from titanmoe.generate.cached_texts import PAGE, CachedTexts
from titanmoe.generate.loop import Interrupted, Prompt, Stop
from titanmoe.generate.sampling import Sampling, choose_tokens
from titanmoe.ops import counter_rng

MOST = 6
FOLDS: dict[str, dict[str, int]] = {
    "tp2-ep4": dict(tp=2, ep=4),
    "tp2-ep2-etp2": dict(tp=2, ep=2, etp=2),
    "dp4-etp4": dict(etp=4),
}
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}


def prompts(vocab_size: int) -> list[list[int]]:
    lengths = [3, 1, 9, 2, 14, 5, 7]
    return [
        (counter_rng.bits(counter_rng.key("prompt", i), torch.arange(n)) % vocab_size).tolist()
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("gpt_oss") / "saved"
    return path, saved.write(path, MODELS["gpt_oss"])


def ask(ranks: int, path: Path, degrees: dict[str, int], size: int, eos: int | None, **sampling: Any) -> list:
    results = world.run(ranks, saved.tokens, path, degrees, prompts(48), size, MOST, eos, sampling)
    assert all(result == results[0] for result in results)
    return results[0]


def test_greedy_tokens_are_the_plain_models(checkpoint) -> None:
    path, model = checkpoint
    for (number, tokens, end), prompt in zip(ask(1, path, {}, 3, None, temperature=0), prompts(48), strict=True):
        row = list(prompt)
        for _ in range(MOST):
            row.append(int(saved.plain_logits(*model, row)[-1].argmax()))
        assert (prompt + tokens, end) == (row, "length"), number


def with_an_end(endless: list) -> tuple[int, list]:
    """A token that ends some rows, at different times; and what is then made."""
    ends = {token: {row.index(token) for _, row, _ in endless if token in row} for token in range(48)}
    eos = max(ends, key=lambda token: len(ends[token]))
    assert len(ends[eos]) >= 2 and any(eos not in row for _, row, _ in endless)
    return eos, [
        (number, row[: row.index(eos)], "eos") if eos in row else (number, row, "length") for number, row, _ in endless
    ]


@pytest.mark.parametrize(
    "sampling, folds", [({"temperature": 0.0}, list(FOLDS)), (SAMPLED, ["tp2-ep2-etp2"])], ids=["greedy", "drawn"]
)
def test_batches_and_mappings_change_no_token(checkpoint, sampling: dict[str, Any], folds: list[str]) -> None:
    path, _ = checkpoint
    endless = ask(1, path, {}, 1, None, **sampling)
    assert [number for number, _, _ in endless] == list(range(7))
    eos, want = with_an_end(endless)
    assert ask(1, path, {}, 1, eos, **sampling) == want
    assert ask(1, path, {}, 16, eos, **sampling) == want
    for fold in folds:
        assert ask(4, path, FOLDS[fold], 2, eos, **sampling) == want


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen3_next"])
def test_prompts_that_enter_and_rows_that_go_on_keep_what_is_theirs(tmp_path: Path, name: str) -> None:
    saved.write(tmp_path / "saved", MODELS[name])
    eos, want = with_an_end(ask(1, tmp_path / "saved", {}, 1, None, temperature=0.0))
    for size in (2, 3, 16):
        assert ask(1, tmp_path / "saved", {}, size, eos, temperature=0.0) == want


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen3_next"])
def test_completions_of_a_prompt_are_draws_from_the_plain_model(tmp_path: Path, name: str) -> None:
    """Prompts that fill a page, a part of one and more than two; their completions share what is cached of them."""
    model = saved.write(tmp_path / "saved", MODELS[name])
    sampling = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "step": 2}
    long_prompts = [[(3 * i + 1) % 48 for i in range(length)] for length in (16, 5, 37)]
    texts, counts, is_empty = world.run(1, completions, tmp_path / "saved", long_prompts, 4, sampling)[0]
    assert [(number, completion) for number, completion, *_ in texts] == [(i, j) for i in range(3) for j in range(4)]
    assert counts[0] == 16 + 5 and counts[1] <= 8 and 37 in counts and is_empty
    for number, completion, tokens, log_probs, routes, end in texts:
        assert len(tokens) == len(log_probs) and len(routes) == len(long_prompts[number]) + len(tokens) - 1
        assert (end == "eos") == (tokens[-1] == 7) and 7 not in tokens[:-1], "the end mark is part of the text"
        first = len(long_prompts[number])
        logits_SV = saved.plain_logits(*model, long_prompts[number] + tokens)[first - 1 : -1]
        places = list(range(first, first + len(tokens)))
        drawn, _ = choose_tokens(logits_SV, Sampling(**sampling), [(number, completion)] * len(tokens), places)
        assert drawn == tokens
        want = (logits_SV / 0.7).log_softmax(-1)[range(len(tokens)), tokens]
        torch.testing.assert_close(torch.tensor(log_probs, dtype=torch.float64), want, rtol=0, atol=1e-12)
    assert len({tuple(text[2]) for text in texts}) > 6


def completions(
    path: Path, prompts: list[list[int]], count: int, sampling: dict[str, Any]
) -> tuple[list, list[int], bool]:
    """Texts of a generator with room for those of two prompts, tokens of each forward, and whether no page is used."""
    generator, counts = saved.generator(path, {}, eos=7, records=True), []
    forward = generator.forward
    generator.forward = lambda ids: counts.append(len(ids)) or forward(ids)
    todo = [Prompt(number, ids, count) for number, ids in enumerate(prompts)]
    texts = [text for batch in generator.batches(todo, 2 * count, Stop(9), Sampling(**sampling)) for text in batch]
    out = [(t.number, t.completion_number, t.tokens, t.log_probs, torch.cat(t.routes), t.end) for t in texts]
    return out, counts, sorted(generator.cached_texts.free) == list(range(len(generator.cached_texts.num_users)))


def test_a_generator_that_records_reads_an_equal_prompt_again(tmp_path: Path) -> None:
    """Check that all of the prompt's experts are recorded, as weights may have changed since."""
    saved.write(tmp_path / "saved", MODELS["deepseek_v3"])
    assert world.run(1, recorded_twice, tmp_path / "saved")[0] == [4 + MOST - 1] * 2


def recorded_twice(path: Path) -> list[int]:
    generator = saved.generator(path, {}, records=True)
    texts = [saved.complete(generator, [1, 2, 3, 4], MOST) for _ in range(2)]
    return [len(torch.cat(text.routes)) for text in texts]


def test_a_stop_word_ends_a_text() -> None:
    stop = Stop(5, ("lo", "x y"), lambda tokens: "".join("hel o xy"[token] for token in tokens))
    ends = {"0 1": "", "2 4": "stop", "2 3 0": "", "6": "eos", "0 6 5 7": "stop", "0 1 0 1 0": "length"}
    assert {tokens: stop.end([int(x) for x in tokens.split()], {6}) for tokens in ends} == ends


def test_more_completions_than_room_are_refused(checkpoint) -> None:
    path, _ = checkpoint
    with pytest.raises(Exception, match="a prompt has 4 completions, and 3 texts are generated at a time: let it be 4"):
        world.run(1, refused, path)


def refused(path: Path) -> None:
    list(saved.generator(path, {}).batches([Prompt(0, [1], 4)], 3, Stop(2), Sampling()))


def test_a_prompt_that_has_its_first_tokens_already_goes_on_with_the_same(checkpoint) -> None:
    """A draw depends on where its token is in the row, not on where the prompt ended."""
    path, _ = checkpoint
    whole, rest = world.run(1, in_two, path)[0]
    assert len({*map(tuple, whole)}) == 3 and [tokens[2:] for tokens in whole] == rest


def in_two(path: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of three completions, and of turns that go on after two tokens of each, in another order."""
    generator, stop, sampling = saved.generator(path, {}), Stop(MOST), Sampling(1.0, seed=5)
    (whole,) = generator.batches([Prompt(0, [1, 2, 3], 3)], 3, stop, sampling)
    turns = [Prompt(0, [1, 2, 3, *text.tokens[:2]], 1, text.completion_number, 2) for text in whole[::-1]]
    rest = [text for batch in generator.batches(turns, 2, stop, sampling) for text in batch]
    return [text.tokens for text in whole], [text.tokens for text in rest[::-1]]


@pytest.mark.parametrize("fold", [{}, {"tp": 2, "etp": 2}, {"etp": 4}])
def test_texts_that_need_not_be_in_order_come_as_they_end(checkpoint, fold: dict[str, int]) -> None:
    path, _ = checkpoint
    for numbers, is_same in world.run(4 if fold else 1, as_they_end, path, fold):
        assert numbers == [[number] for number in range(7, -1, -1)] and is_same


@pytest.mark.parametrize("fold", [{}, {"tp": 2, "etp": 2}])
def test_any_rank_interrupts_all_and_the_next_call_is_as_ever(checkpoint, fold: dict[str, int]) -> None:
    path, _ = checkpoint
    assert all(world.run(4 if fold else 1, interrupted, path, fold))


def interrupted(path: Path, degrees: dict[str, int]) -> bool:
    """Stop on the last rank after the second of nine forwards; return whether all ranks end with the third."""
    generator, sampling = saved.generator(path, degrees), Sampling(1.0, seed=5)
    prompts = [Prompt(number, [1, number], 1) for number in range(8)]
    (whole,) = generator.batches(prompts, 8, Stop(9), sampling)
    world, calls = generator.meshes.world, []

    def on_forward(ended: int, tokens: int) -> bool:
        calls.append(tokens)
        return world.rank == world.size - 1 and len(calls) == 2

    with pytest.raises(Interrupted):
        list(generator.batches(prompts, 8, Stop(9), sampling, on_forward=on_forward))
    generator.clear()
    (again,) = generator.batches(prompts, 8, Stop(9), sampling)
    return calls == [8, 16] and [text.tokens for text in whole] == [text.tokens for text in again]


def as_they_end(path: Path, degrees: dict[str, int]) -> tuple[list[list[int]], bool]:
    """Return the numbers of texts that come together, and whether they are equal in order. The last ends first."""
    generator, sampling = saved.generator(path, degrees), Sampling(1.0, seed=5)
    prompts = [Prompt(number, [1] * (number + 1), 1, 0, number) for number in range(8)]
    (whole,) = generator.batches(prompts, 8, Stop(9), sampling)
    progress: list[tuple[int, int]] = []
    batches = list(
        generator.batches(
            prompts, 8, Stop(9), sampling, on_forward=lambda *done: bool(progress.append(done)), in_order=False
        )
    )
    texts = [text.tokens for batch in batches[::-1] for text in batch]
    assert progress == sorted(progress) and len({*progress}) == 9
    assert progress[0] == (0, 8) and progress[-1] == (8, sum(map(len, texts)))
    return [[text.number for text in batch] for batch in batches], [text.tokens for text in whole] == texts


def test_tokens_beyond_the_tokenizers_are_never_chosen(checkpoint) -> None:
    path, _ = checkpoint
    tokens = world.run(1, narrow, path)[0]
    assert tokens <= set(range(5)) and len(tokens) > 1


def narrow(path: Path) -> set[int]:
    generator = saved.generator(path, {})
    generator.vocab_size = 5
    return set(saved.complete(generator, [1], 40).tokens)


def test_the_table_of_pages_follows_the_rows() -> None:
    rows = CachedTexts(torch.device("cpu"))
    rows.begin_prompts([30, 3], [2, 1])
    rows.end_forward()
    for step in range(60):
        if remaining := {25: [0, 2], 45: [1]}.get(step):  # one of two equal rows ends, then the longer
            rows.select(remaining)
        rows.begin_tokens(1 + step % 2)
        most = max(map(len, rows.pages))
        assert rows.page_BN.shape == (len(rows.pages), most)
        for table, pages, place_n in zip(rows.page_BN.tolist(), rows.pages, rows.place_Bn.tolist(), strict=True):
            assert table[: len(pages)] == pages and len(pages) == place_n[-1] // PAGE + 1
        rows.end_forward()
