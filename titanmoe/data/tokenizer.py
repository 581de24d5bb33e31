"""A tokenizer that needs no vocabulary: one token per byte."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class ByteTokenizer:
    """Tokens 0-255 are bytes; three more mark where a document begins and ends, and padding."""

    bos, eos, pad = 256, 257, 258
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: Iterable[int]) -> str:
        """Marks are left out; bytes that are no UTF-8 become U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def document(self, data: bytes) -> Tensor:
        """A whole document between its marks, as int16: half a corpus's memory is worth a cast per batch."""
        tokens = torch.empty(len(data) + 2, dtype=torch.int16)
        tokens[0], tokens[-1] = self.bos, self.eos
        if data:
            tokens[1:-1] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return tokens
