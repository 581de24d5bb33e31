from hypothesis import given
from hypothesis import strategies as st

from titanmoe.data.tokenizer import ByteTokenizer


@given(st.text())
def test_text_comes_back(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.binary(max_size=300))
def test_a_document_is_its_bytes_between_marks(data):
    tokens = ByteTokenizer().document(data).tolist()
    assert tokens == [256, *data, 257]


def test_marks_and_broken_utf8_decode_to_something_readable():
    assert ByteTokenizer().decode([256, *"é".encode()[:1], *b"ab", 257, 258]) == "\ufffdab"
