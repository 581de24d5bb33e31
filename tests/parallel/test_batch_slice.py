"""What multi-token prediction sees of a sample: the next token of each position, and the label of the one after. And
the numbers of tokens, of which random numbers are functions.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from titanmoe.data.batch import Batch
from titanmoe.parallel.batch_slice import mask_of, mtp_ids_and_labels, take_slice
from titanmoe.parallel.context import Placement
from titanmoe.tokens import IGNORE


def batch(labels: list[int], document: list[int] | None = None) -> Batch:
    """A batch of the ids 10, 11, 12, ..."""
    whole = [torch.arange(10, 10 + len(labels)), torch.tensor(labels), torch.ones(len(labels), dtype=torch.bool)]
    whole.append(None if document is None else torch.tensor(document))
    return Batch(*(x if x is None else x.unsqueeze(0) for x in whole))


def shifts(given: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return mtp_ids_and_labels(given, mask_of(given).until_BL)


def test_the_next_token_and_the_label_after_it() -> None:
    next_BL, later_BL = shifts(batch([11, 12, 13, 14, 15]))
    assert next_BL.tolist() == [[11, 12, 13, 14, 15]]
    assert later_BL.tolist() == [[12, 13, 14, 15, IGNORE]]


def test_a_position_whose_next_label_is_ignored_has_none() -> None:
    next_BL, later_BL = shifts(batch([IGNORE, 12, IGNORE, 14, IGNORE]))
    assert next_BL.tolist() == [[11, 12, 13, 14, 14]]  # the last position has no next token and no label
    assert later_BL.tolist() == [[12, IGNORE, 14, IGNORE, IGNORE]]


def test_no_prediction_crosses_the_start_of_a_document() -> None:
    _, later_BL = shifts(batch([11, 12, 13, 14, 15], document=[0, 0, 1, 1, 2]))
    # Position 1 would see the embedding of the next document's first token, so it has no label.
    assert later_BL.tolist() == [[12, IGNORE, 14, IGNORE, IGNORE]]


def test_no_prediction_goes_beyond_a_branch() -> None:
    """Two completions of two tokens of a prompt of two: its first position would predict the first token of both."""
    whole = batch([12, 13, 14, 15, 16, 17])._replace(until_BS=torch.tensor([[6, 6, 4, 4, 6, 6]]))
    _, later_BL = shifts(whole)
    assert later_BL.tolist() == [[13, IGNORE, 15, IGNORE, 17, IGNORE]]


def test_a_token_has_its_samples_number_in_the_step_and_its_place() -> None:
    """Rank 1 of 3 has samples 14 and 15 in microbatch 2, unless they were distributed by their work."""
    one, two = batch([11, 12, 13, 14, 15]), batch([21, 22, 23, 24, 25])
    both = Batch(*(x if x is None else torch.cat((x, y)) for x, y in zip(one[:-1], two[:-1], strict=True)))
    alone = SimpleNamespace(size=1, rank=0)
    meshes = SimpleNamespace(data=SimpleNamespace(size=3, rank=1), cp=alone, tp=alone)
    for numbers, given in ([14, 15], None), ([9, 4], torch.tensor([9, 4])):
        part = take_slice(both._replace(number_B=given), 2, meshes, Placement(1, True), torch.device("cpu"))
        assert part.tokens.index_T.tolist() == [number * 5 + place for number in numbers for place in range(5)]


def test_further_numbers_are_cut_like_labels_if_they_are_per_position() -> None:
    whole = batch([11, 12, 13, 14])._replace(
        extra_fields={"weight": torch.arange(4.0).view(1, 4), "reward": torch.ones(1)}
    )
    alone = SimpleNamespace(size=1, rank=0)
    meshes = SimpleNamespace(data=alone, cp=SimpleNamespace(size=2, rank=1), tp=alone)
    part = take_slice(whole, 0, meshes, Placement(2, False), torch.device("cpu"))
    assert part.extra_fields["weight"].tolist() == [[2, 3]] and part.extra_fields["reward"].tolist() == [1]


def test_a_batch_is_chunked_with_all_that_it_has() -> None:
    two = batch([11, 12, 13, 14, 15])
    both = Batch(*(x if x is None else torch.cat((x, x + 1)) for x in two[:-1]))._replace(
        extra_fields={"reward": torch.tensor([3.0, 4.0])}
    )
    first, second = both.chunk(2)
    assert first.tokens_BS.tolist() == two.tokens_BS.tolist() and first.document_BS is None
    assert (first.extra_fields["reward"].tolist(), second.extra_fields["reward"].tolist()) == ([3], [4])
