"""Documents to one stream of tokens, and pieces of it to a batch.

A document is [BOS] and its tokens. It is read in pieces; each piece is a sequence of its own in `Rows`, so nothing leaks
from one document to the next, and each token but [BOS] is a target exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from trivium.chat.pieces import MAX_CHARS
from trivium.data.batch import Batch
from trivium.data.source import Document
from trivium.ops.rows import Rows


class Stream(Protocol):
    """Documents as token ids, one behind the other, in memory (`TokenStream`) or on disk (`shards.Shards`).

    `starts` (int64) are the bounds of the documents, from 0 to the number of tokens. `num_bytes_W` (int64) is how many
    bytes of text each id stands for, 0 for a special one. `num_targets` are the tokens that follow another one of their
    document, `num_bytes` what they stand for in all.
    """

    @property
    def starts(self) -> NDArray[np.int64]: ...
    @property
    def num_bytes_W(self) -> Tensor: ...
    @property
    def num_targets(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def ids_T(self) -> Tensor:
        """All of them, int32: in memory, however many they are."""
        ...

    @property
    def weight_T(self) -> Tensor | None:
        """Which of them count as targets, bool, in memory; None: all."""
        ...

    def read(self, first: int, end: int) -> Tensor:
        """The ids [first, end) as int64. Raises ValueError where the stream has none."""
        ...

    def weights(self, first: int, end: int) -> Tensor:
        """The weights of the ids [first, end) as targets, float32, 1 or 0."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStream:
    """A `Stream` in memory; `ids_T` is int32. `weight_T` (bool) says which ids count as targets, None: all.

    Raises ValueError for bounds that do not begin at 0, fall, or do not end where the tokens do.
    """

    ids_T: Tensor
    starts: NDArray[np.int64]
    num_bytes_W: Tensor
    weight_T: Tensor | None = None

    def __post_init__(self) -> None:
        starts = np.asarray(self.starts, dtype=np.int64)
        if (
            starts.ndim != 1
            or not len(starts)
            or starts[0]
            or starts[-1] != len(self.ids_T)
            or (np.diff(starts) < 0).any()
        ):
            raise ValueError(f"stream: wanted bounds that rise from 0 to {len(self.ids_T)}, got {starts}")
        object.__setattr__(self, "starts", starts)
        if self.weight_T is not None and self.weight_T.shape != self.ids_T.shape:
            raise ValueError(f"stream: wanted {len(self.ids_T)} weights, got {tuple(self.weight_T.shape)}")

    @property
    def num_targets(self) -> int:
        return count_targets(self.starts)

    @property
    def num_bytes(self) -> int:
        # By counts of ids: one number of 8 bytes for each token would be twice the stream.
        ids_T = self.ids_T if self.weight_T is None else self.ids_T[self.weight_T]
        return int(torch.bincount(ids_T, minlength=len(self.num_bytes_W)) @ self.num_bytes_W)

    def read(self, first: int, end: int) -> Tensor:
        check_span(first, end, len(self.ids_T))
        return self.ids_T[first:end].long()

    def weights(self, first: int, end: int) -> Tensor:
        check_span(first, end, len(self.ids_T))
        return torch.ones(end - first) if self.weight_T is None else self.weight_T[first:end].float()


def count_targets(starts: NDArray[np.int64]) -> int:
    """Tokens that follow another one of their document, by the documents' bounds."""
    return int(np.maximum(np.diff(starts) - 1, 0).sum())


def check_span(first: int, end: int, num_tokens: int) -> None:
    """Raise ValueError unless a stream of so many tokens has these: a slice would give fewer without a word."""
    if not 0 <= first <= end <= num_tokens:
        raise ValueError(f"stream: tokens {first} to {end} of {num_tokens} are not there")


def tokenize(
    documents: Iterable[Document], encode: Callable[[str], list[int]], *, bos_id: int, num_bytes_W: Tensor
) -> TokenStream:
    """Every document of `token_documents`, in memory."""
    arrays = list(token_documents(documents, encode, bos_id=bos_id, num_bytes_W=num_bytes_W))
    ids_T = torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int32), *arrays]))
    return TokenStream(ids_T=ids_T, starts=np.cumsum([0, *map(len, arrays)]), num_bytes_W=num_bytes_W)


def token_documents(
    documents: Iterable[Document], encode: Callable[[str], list[int]], *, bos_id: int, num_bytes_W: Tensor
) -> Iterator[NDArray[np.int32]]:
    """Every document as [BOS] and its tokens, one at a time.

    A long text is encoded in parts of 400,000 characters, where the tokenizer cuts it in any case. Raises ValueError
    when the tokens of a document do not stand for all of its bytes, no more and no less.
    """
    num_bytes = num_bytes_W.numpy()
    for document in documents:
        # An array for each part: as Python objects the ids of 200 MB of text would take 2 GB.
        parts = [
            np.array(encode(document.text[start : start + MAX_CHARS]), dtype=np.int32)
            for start in range(0, len(document.text), MAX_CHARS)
        ]
        got = sum(int(num_bytes[part].sum()) for part in parts)
        if got != document.num_bytes:
            raise ValueError(f"data: the tokens of {document.path} stand for {got} bytes of {document.num_bytes}")
        yield np.concatenate([np.array([bos_id], dtype=np.int32), *parts])


def pieces(stream: Stream, max_len: int, *, whole: bool = False) -> NDArray[np.int64]:
    """The inputs of every document, cut into consecutive pieces of at most `max_len` tokens: [P, 2].

    A piece is its first token and the one behind its last. `whole`: documents that are longer are left out, not cut.
    """
    if max_len < 1:
        raise ValueError(f"pieces: wanted a positive length, got {max_len}")
    first_D, end_D = stream.starts[:-1], stream.starts[1:] - 1
    if whole:
        short_D = end_D - first_D <= max_len
        first_D, end_D = first_D[short_D], end_D[short_D]
    num_D = np.maximum(-(-(end_D - first_D) // max_len), 0)
    before_D = num_D.cumsum() - num_D  # pieces of the documents before
    piece_P2 = np.empty((int(num_D.sum()), 2), dtype=np.int64)
    piece_P2[:, 0] = np.repeat(first_D - before_D * max_len, num_D)
    piece_P2[:, 0] += np.arange(len(piece_P2)) * max_len
    np.minimum(piece_P2[:, 0] + max_len, np.repeat(end_D, num_D), out=piece_P2[:, 1])
    return piece_P2


def make_batch(stream: Stream, spans: ArrayLike | Sequence[tuple[int, int]], source: str) -> Batch:
    """These pieces [S, 2] as the sequences of one batch, every target with its weight in the stream."""
    spans = np.asarray(spans).tolist()
    parts = [stream.read(first, end + 1) for first, end in spans]  # with the target of its last token
    targets_T = torch.cat([part[1:] for part in parts])
    weight_T = torch.cat([stream.weights(first + 1, end + 1) for first, end in spans])
    return Batch(
        ids_T=torch.cat([part[:-1] for part in parts]),
        targets_T=targets_T,
        weight_T=weight_T,
        rows=Rows.of([end - first for first, end in spans]),
        num_bytes=int(stream.num_bytes_W[targets_T[weight_T > 0]].sum()),
        source=source,
    )
