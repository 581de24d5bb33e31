"""A prompt with several answers, with the prompt there once.

Of the prompt's tokens all but the last come first; then, answer by answer, the prompt's last token and the answer. That
token predicts the first one of each answer, so it is there for each. Positions go on from the prompt in every branch
(titanmoe.mask).

Shapes: P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from titanmoe.tokens import IGNORE


class SharedPrefix(NamedTuple):
    tokens_P: np.ndarray
    labels_P: np.ndarray
    """Of the answers alone."""
    until_P: np.ndarray
    """As in Batch, counted from the first token of the prompt."""
    depth_P: np.ndarray
    answer_P: np.ndarray
    """Which answer a position is of; -1 in the prompt."""


def share_prefix(prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> SharedPrefix:
    """The last token of an answer is only a label, as in a document of its own."""
    shared, lengths = len(prompt) - 1, [len(answer) for answer in answers]
    begin = shared + np.cumsum([0, *lengths])
    number_P = np.repeat(np.arange(-1, len(answers)), [shared, *lengths])
    branches = [token for answer in answers for token in (prompt[-1], *answer[:-1])]
    labels = [token for answer in answers for token in answer]
    in_answer_P = np.arange(begin[-1]) - np.append(begin, 0)[number_P]
    return SharedPrefix(
        np.array([*prompt[:-1], *branches], np.int64),
        np.array([*[IGNORE] * shared, *labels], np.int64),
        np.where(number_P < 0, begin[-1], np.append(begin[1:], 0)[number_P]),
        np.where(number_P < 0, np.arange(begin[-1]), shared + in_answer_P),
        number_P,
    )
