"""What multi-token prediction sees of a sample: the next token of each position, and the label of the one after."""

from __future__ import annotations

import torch

from titanmoe.data.batch import Batch
from titanmoe.parallel.batch import shifted
from titanmoe.tokens import IGNORE


def batch(labels: list[int], document: list[int] | None = None) -> Batch:
    """A batch of the ids 10, 11, 12, 13, 14."""
    whole = [torch.arange(10, 15), torch.tensor(labels), torch.ones(5, dtype=torch.bool)]
    whole.append(None if document is None else torch.tensor(document))
    return Batch(*(x if x is None else x.unsqueeze(0) for x in whole))


def test_the_next_token_and_the_label_after_it() -> None:
    next_BL, later_BL = shifted(batch([11, 12, 13, 14, 15]))
    assert next_BL.tolist() == [[11, 12, 13, 14, 15]]
    assert later_BL.tolist() == [[12, 13, 14, 15, IGNORE]]


def test_a_position_whose_next_label_is_ignored_has_none() -> None:
    next_BL, later_BL = shifted(batch([IGNORE, 12, IGNORE, 14, IGNORE]))
    assert next_BL.tolist() == [[11, 12, 13, 14, 14]]  # the last position has no next token and no label
    assert later_BL.tolist() == [[12, IGNORE, 14, IGNORE, IGNORE]]


def test_no_prediction_crosses_the_start_of_a_document() -> None:
    _, later_BL = shifted(batch([11, 12, 13, 14, 15], document=[0, 0, 1, 1, 2]))
    # Position 1 would see the embedding of the next document's first token, so it has no label.
    assert later_BL.tolist() == [[12, IGNORE, 14, IGNORE, IGNORE]]
