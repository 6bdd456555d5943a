"""Documents to one stream of tokens, and pieces of it to a batch.

A document is [BOS] and its tokens. It is read in pieces; each piece is a sequence of its own in `Rows`, so nothing leaks
from one document to the next, and each token but [BOS] is a target exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from trivium.chat.pieces import MAX_CHARS
from trivium.data.batch import Batch
from trivium.data.source import Document
from trivium.ops.rows import Rows


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """Documents as token ids, one behind the other.

    `ids_T` is int32, `starts` are the bounds of the documents in it, `num_bytes_W` (int64) is how many bytes of text
    each id stands for, 0 for a special one.
    """

    ids_T: Tensor
    starts: tuple[int, ...]
    num_bytes_W: Tensor

    @property
    def num_targets(self) -> int:
        """Tokens that follow another one of their document."""
        return sum(max(0, end - start - 1) for start, end in pairwise(self.starts))

    @property
    def num_bytes(self) -> int:
        """Bytes of text that all targets stand for."""
        # By counts of ids: one number of 8 bytes for each token would be twice the stream.
        return int(torch.bincount(self.ids_T, minlength=len(self.num_bytes_W)) @ self.num_bytes_W)


# Where the inputs of one piece lie in a stream: its first token and the one behind its last.
Span = tuple[int, int]


def tokenize(
    documents: Iterable[Document], encode: Callable[[str], list[int]], *, bos_id: int, num_bytes_W: Tensor
) -> TokenStream:
    """Every document as [BOS] and its tokens.

    A long text is encoded in parts of 400,000 characters, where the tokenizer cuts it in any case. Raises ValueError
    when the tokens of a document do not stand for all of its bytes, no more and no less.
    """
    num_bytes = num_bytes_W.numpy()
    arrays = [np.empty(0, dtype=np.int32)]
    starts = [0]
    for document in documents:
        # An array for each part: as Python objects the ids of 200 MB of text would take 2 GB.
        parts = [
            np.array(encode(document.text[start : start + MAX_CHARS]), dtype=np.int32)
            for start in range(0, len(document.text), MAX_CHARS)
        ]
        got = sum(int(num_bytes[part].sum()) for part in parts)
        if got != document.num_bytes:
            raise ValueError(f"data: the tokens of {document.path} stand for {got} bytes of {document.num_bytes}")
        arrays += [np.array([bos_id], dtype=np.int32), *parts]
        starts.append(starts[-1] + 1 + sum(map(len, parts)))
    ids_T = torch.from_numpy(np.concatenate(arrays))
    return TokenStream(ids_T=ids_T, starts=tuple(starts), num_bytes_W=num_bytes_W)


def pieces(stream: TokenStream, max_len: int) -> list[Span]:
    """The inputs of every document, cut into consecutive pieces of at most `max_len` tokens."""
    if max_len < 1:
        raise ValueError(f"pieces: wanted a positive length, got {max_len}")
    return [
        (first, min(first + max_len, end - 1))
        for start, end in pairwise(stream.starts)
        for first in range(start, end - 1, max_len)
    ]


def make_batch(stream: TokenStream, spans: Sequence[Span], source: str) -> Batch:
    """These pieces as the sequences of one batch, every target with weight 1."""
    ids_T = torch.cat([stream.ids_T[first:end] for first, end in spans]).long()
    targets_T = torch.cat([stream.ids_T[first + 1 : end + 1] for first, end in spans]).long()
    return Batch(
        ids_T=ids_T,
        targets_T=targets_T,
        weight_T=torch.ones(len(ids_T)),
        rows=Rows.of([end - first for first, end in spans]),
        num_bytes=int(stream.num_bytes_W[targets_T].sum()),
        source=source,
    )
