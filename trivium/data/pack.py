"""Documents to one stream of tokens, and the stream to batches of fixed size.

A document is [BOS] and its tokens. It is read in pieces; each piece is a sequence of its own in `Rows`, so nothing leaks
from one document to the next, and each token but [BOS] is a target exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

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
        return int(self.num_bytes_W[self.ids_T.long()].sum())


# Where the inputs of one piece lie in a stream: its first token and the one behind its last.
Span = tuple[int, int]


def tokenize(
    documents: Iterable[Document], encode: Callable[[str], list[int]], *, bos_id: int, num_bytes_W: Tensor
) -> TokenStream:
    """Every document as [BOS] and its tokens.

    Raises ValueError when the tokens of a document do not stand for all of its bytes, no more and no less.
    """
    ids: list[int] = []
    starts = [0]
    for document in documents:
        tokens = encode(document.text)
        got = int(num_bytes_W[torch.tensor(tokens, dtype=torch.int64)].sum())
        if got != document.num_bytes:
            raise ValueError(f"data: the tokens of {document.path} stand for {got} bytes of {document.num_bytes}")
        ids += [bos_id, *tokens]
        starts.append(len(ids))
    return TokenStream(ids_T=torch.tensor(ids, dtype=torch.int32), starts=tuple(starts), num_bytes_W=num_bytes_W)


def pieces(stream: TokenStream, max_len: int) -> list[Span]:
    """The inputs of every document, cut into consecutive pieces of at most `max_len` tokens."""
    if max_len < 1:
        raise ValueError(f"pieces: wanted a positive length, got {max_len}")
    return [
        (first, min(first + max_len, end - 1))
        for start, end in pairwise(stream.starts)
        for first in range(start, end - 1, max_len)
    ]


def pack(stream: TokenStream, spans: Iterable[Span], num_tokens: int, source: str) -> Iterator[Batch]:
    """Batches of exactly `num_tokens` inputs; only the last one may be shorter.

    A piece that does not fit into what is left of a batch is cut there and goes on, as a sequence of its own, in the
    next.
    """
    if num_tokens < 1:
        raise ValueError(f"pack: wanted a positive number of tokens, got {num_tokens}")
    taken: list[Span] = []
    room = num_tokens
    for first, end in spans:
        while end - first >= room:
            yield make_batch(stream, [*taken, (first, first + room)], source)
            first, taken, room = first + room, [], num_tokens
        if first < end:
            taken.append((first, end))
            room -= end - first
    if taken:
        yield make_batch(stream, taken, source)


def shuffled_batches(stream: TokenStream, *, max_len: int, num_tokens: int, seed: int, source: str) -> Iterator[Batch]:
    """Batches without end: all pieces in a new order each epoch, which depends on the seed and the epoch alone."""
    spans = pieces(stream, max_len)
    if not spans:
        raise ValueError("data: not one token has another one behind it, nothing to train on")

    def endless() -> Iterator[Span]:
        epoch = 0
        while True:
            order = torch.randperm(len(spans), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
            yield from (spans[idx] for idx in order.tolist())
            epoch += 1

    return pack(stream, endless(), num_tokens, source)


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
