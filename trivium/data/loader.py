"""Loader: batches of a fixed size without end, from a place that can be written down."""

from __future__ import annotations

import torch

from trivium.data.batch import Batch
from trivium.data.pack import Span, TokenStream, make_batch, pieces


class Loader:
    """All pieces of a stream in a new order each epoch, in batches of exactly `num_tokens`: an endless iterator.

    A document is read in pieces of at most `max_len` tokens. A piece that does not fit into what is left of a batch is
    cut there and goes on, as a sequence of its own, in the next. The order depends on the seed and the epoch alone.
    Raises ValueError when no token of the stream has one behind it.
    """

    def __init__(self, stream: TokenStream, *, max_len: int, num_tokens: int, seed: int, source: str) -> None:
        if num_tokens < 1:
            raise ValueError(f"loader: wanted a positive number of tokens, got {num_tokens}")
        self._stream, self._num_tokens, self._seed, self._source = stream, num_tokens, seed, source
        self._pieces = pieces(stream, max_len)
        if not self._pieces:
            raise ValueError("data: not one token has another one behind it, nothing to train on")
        self._begin(epoch=0)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        spans: list[Span] = []
        room = self._num_tokens
        while room:
            first, end = self._pieces[self._order[self._piece]]
            first += self._offset
            taken = min(room, end - first)
            spans.append((first, first + taken))
            room -= taken
            self._offset += taken
            if first + taken == end:
                self._piece, self._offset = self._piece + 1, 0
            if self._piece == len(self._pieces):
                self._begin(self._epoch + 1)
        return make_batch(self._stream, spans, self._source)

    def state(self) -> dict[str, int]:
        """Where the next batch begins: `offset` tokens into the `piece`-th piece of the `epoch`."""
        return {"epoch": self._epoch, "piece": self._piece, "offset": self._offset}

    def restore(self, state: dict[str, int]) -> None:
        """Go on where `state` says: what follows equals what followed there, given the same stream and arguments.

        Raises ValueError for a state that no loader of this stream can have; the loader then stays where it is.
        """
        if set(state) != {"epoch", "piece", "offset"} or not all(type(value) is int for value in state.values()):
            raise ValueError(f"loader: wanted a state of the whole numbers epoch, piece and offset, got {state}")
        epoch, piece, offset = state["epoch"], state["piece"], state["offset"]
        if not (epoch >= 0 and 0 <= piece < len(self._pieces)):
            raise ValueError(f"loader: {state} does not fit a stream of {len(self._pieces)} pieces")
        order = self._order_of(epoch)
        first, end = self._pieces[order[piece]]
        if not 0 <= offset < end - first:
            raise ValueError(f"loader: {state} does not fit: that piece has {end - first} tokens")
        self._epoch, self._order, self._piece, self._offset = epoch, order, piece, offset

    def _begin(self, epoch: int) -> None:
        self._epoch, self._order, self._piece, self._offset = epoch, self._order_of(epoch), 0, 0

    def _order_of(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(len(self._pieces), generator=generator).tolist()
