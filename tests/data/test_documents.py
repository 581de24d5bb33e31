"""Which document a token is in, and some of a source's documents as a source of their own."""

import numpy as np
import pytest

from titanmoe.data.documents import MemoryDocuments, find_documents
from titanmoe.data.held_out import split_held_out

LENGTHS = [3, 0, 5, 1, 0, 0, 7, 2, 4, 6, 0]


class Elsewhere:
    """Starts that are not an array, like those of many shards."""

    def __init__(self, starts):
        self.starts = starts

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, which):
        return self.starts[which]


def documents(with_label_mask: bool = False, elsewhere: bool = False) -> MemoryDocuments:
    starts = np.append(0, np.cumsum(LENGTHS)).astype(np.uint64)
    tokens = np.arange(sum(LENGTHS), dtype=np.uint16)
    out = MemoryDocuments("some", tokens, starts, tokens % 3 == 0 if with_label_mask else None)
    if elsewhere:
        out.starts = Elsewhere(starts)
    return out


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_document_of_each_token(elsewhere):
    expected = [i for i, length in enumerate(LENGTHS) for _ in range(length)]
    assert find_documents(documents(elsewhere=elsewhere), np.arange(sum(LENGTHS))).tolist() == expected


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("every", [2, 3, 4, 11, 12])
def test_both_parts_are_the_documents_that_they_should_be(every, elsewhere):
    whole = documents(with_label_mask=True, elsewhere=elsewhere)
    tokens_of = [range(*whole.starts[i : i + 2].astype(int).tolist()) for i in range(len(LENGTHS))]
    parts = split_held_out(whole, every, 99)
    for is_held_out, part in enumerate(parts):
        expected = [list(tokens_of[i]) for i in range(len(LENGTHS)) if (i % every == every - 1) == bool(is_held_out)]
        assert len(part) == len(expected)
        starts = part.starts
        assert [list(part.read(starts[i], starts[i + 1])) for i in range(len(part))] == expected
        row = [token for document in expected for token in document]
        total = starts[len(part)]
        assert total == len(row) and starts[np.arange(len(part) + 1)].tolist() == starts[:].tolist()
        for a in range(total):
            for b in range(a + 1, total + 1):
                assert part.read(a, b).tolist() == row[a:b]
                assert part.label_mask(a, b).tolist() == [token % 3 == 0 for token in row[a:b]]
        number = [i for i, document in enumerate(expected) for _ in document]
        assert find_documents(part, np.arange(total)).tolist() == number
    assert parts[0].fingerprint != parts[1].fingerprint != whole.fingerprint


@pytest.mark.parametrize(("lengths", "every"), [([31], 4), ([9, 0, 20, 2], 5), ([23, 0, 8], 4), ([31], 31)])
def test_of_few_documents_the_last_tokens_are_held_out(lengths, every):
    starts, tokens = np.append(0, np.cumsum(lengths)), np.arange(31, dtype=np.uint16)
    whole = MemoryDocuments("some", tokens, starts, tokens % 3 == 0)
    rest, held_out = split_held_out(whole, every, 1)
    tail = 31 // every
    for part, expected in (rest, range(31 - tail)), (held_out, range(31 - tail, 31)):
        assert part.read(0, int(part.starts[len(part)])).tolist() == list(expected)
        assert part.label_mask(0, len(expected)).tolist() == [token % 3 == 0 for token in expected]
        borders = {int(part.starts[i]) + expected[0] for i in range(len(part) + 1)}
        assert borders == {
            expected[0],
            expected[-1] + 1,
            *(int(at) for at in starts if expected[0] <= at <= expected[-1]),
        }
    assert len({rest.fingerprint, held_out.fingerprint, whole.fingerprint}) == 3
    assert [len(part) for part in split_held_out(whole, every, tail + 1)] == [len(lengths), 0]
