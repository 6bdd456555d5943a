"""Loader: the micro-batches of one optimiser step after another without end, from a place that can be written down."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trivium.data.batch import Batch
from trivium.data.pack import Stream, make_batch, pieces


class Place(NamedTuple):
    """Where a step begins: `offset` tokens into the `piece`-th piece of the `epoch` of a stage."""

    stage: int
    max_len: int
    epoch: int
    piece: int
    offset: int


class Loader:
    """All pieces of a stream in a new order each epoch: an endless iterator over this rank's share of each step.

    A step is `num_micro` micro-batches of exactly `micro_tokens` tokens; micro-batch j is given to rank j % `num_ranks`,
    as one of a list. A document is read in pieces of at most `max_len` tokens. A piece that does not fit into what is
    left of a micro-batch is cut there and goes on, as a sequence of its own, in the next. The order depends on the seed,
    the stage and the epoch alone: ranks and workers share it out and change nothing in it.

    With `whole` no document is cut: there are those of at most `max_len` tokens, and a micro-batch is as many as fit, of
    at most `micro_tokens` tokens in all.

    `workers` threads make so many steps ahead. A state is that of what was given out, whatever lies ready behind it.
    Raises ValueError for numbers that do not go together, and when no token of the stream has one behind it.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        max_len: int,
        micro_tokens: int,
        num_micro: int,
        seed: int,
        source: str,
        whole: bool = False,
        rank: int = 0,
        num_ranks: int = 1,
        workers: int = 0,
    ) -> None:
        for name, value, least in (
            ("micro_tokens", micro_tokens, 1),
            ("num_micro", num_micro, 1),
            ("num_ranks", num_ranks, 1),
            ("workers", workers, 0),
        ):
            if value < least:
                raise ValueError(f"loader: {name}: wanted at least {least}, got {value}")
        if not 0 <= rank < num_ranks:
            raise ValueError(f"loader: rank: wanted one of {num_ranks} from 0 on, got {rank}")
        if num_micro % num_ranks:
            raise ValueError(
                f"loader: num_micro: {num_micro} micro-batches a step cannot be shared out evenly among {num_ranks} ranks"
            )
        self._stream, self._seed, self._source = stream, seed, source
        self._micro_tokens, self._num_micro, self._whole = micro_tokens, num_micro, whole
        self._rank, self._num_ranks, self._workers = rank, num_ranks, workers
        self._closed = False
        self._ready: deque[tuple[Future[list[Batch]], Place]] = deque()
        self._go_to(Place(stage=0, max_len=max_len, epoch=0, piece=0, offset=0))
        if workers:
            self._pool = ThreadPoolExecutor(workers, thread_name_prefix="loader")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[Batch]:
        if self._closed:
            raise ValueError("loader: it was closed")
        try:
            if self._workers:
                while len(self._ready) <= self._workers:  # one to give out, and one for each worker
                    spans, place = self._plan()
                    self._ready.append((self._pool.submit(_make, self._stream, spans, self._source), place))
                future, place = self._ready[0]
                batches = future.result()
                self._ready.popleft()
            else:
                spans, place = self._plan()
                batches = _make(self._stream, spans, self._source)
        except BaseException:
            self._go_to(self._place)  # nothing was given out, so the next call tries this step again
            raise
        self._place = place
        return batches

    def enter_stage(self, index: int, max_len: int) -> bool:
        """From the next step on pieces of at most `max_len`, in an order of the stage's own, from its beginning.

        Returns whether it is another stage than before: in that stage already nothing changes. Raises ValueError for a
        stage before it: it would give what was given.
        """
        if index < self._place.stage:
            raise ValueError(f"loader: wanted stage {self._place.stage} or one after it, got {index}")
        if index == self._place.stage and max_len != self._place.max_len:
            raise ValueError(f"loader: stage {index} has pieces of at most {self._place.max_len}, got {max_len}")
        if index == self._place.stage:
            return False
        self._go_to(Place(stage=index, max_len=max_len, epoch=0, piece=0, offset=0))
        return True

    def state(self) -> dict[str, int]:
        """Where the next step begins, in numbers that JSON has."""
        return self._place._asdict()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` says: the tokens that follow are those that followed there, given the same stream and seed.

        A step may be cut into other micro-batches and shared out among other ranks. Raises ValueError for a state that
        no loader of this stream can have; the loader then stays where it is.
        """
        if set(state) != set(Place._fields) or not all(type(value) is int for value in state.values()):
            raise ValueError(f"loader: wanted a state of the whole numbers {', '.join(Place._fields)}, got {state}")
        place = Place(**state)
        if place.stage == self._place.stage and place.max_len != self._place.max_len:
            raise ValueError(
                f"loader: {state} does not fit: stage {place.stage} has pieces of at most {self._place.max_len}"
            )
        self._go_to(place)

    def close(self) -> None:
        """End the workers; what they are about is lost, the state is not. Also done when nobody holds the loader."""
        self._closed = True
        self._ready.clear()
        if self._workers:
            self._pool.shutdown(cancel_futures=True)

    def _go_to(self, place: Place) -> None:
        if place.max_len > self._micro_tokens:
            raise ValueError(
                f"loader: max_len {place.max_len} is more than the {self._micro_tokens} tokens of a micro-batch, "
                "where every piece is cut"
            )
        self._walk = _Walk(self._stream, self._seed, place, self._whole)
        self._place = place
        for future, _ in self._ready:
            future.cancel()
        self._ready.clear()

    def _plan(self) -> tuple[list[NDArray[np.int64]], Place]:
        """The spans of this rank's micro-batches of the next step, and where that step ends."""
        spans = [self._walk.take(self._micro_tokens) for _ in range(self._num_micro)]
        return spans[self._rank :: self._num_ranks], self._walk.place


def _make(stream: Stream, spans: Sequence[NDArray[np.int64]], source: str) -> list[Batch]:
    # No method: a worker that held the loader would keep it from being collected.
    return [make_batch(stream, span_S2, source) for span_S2 in spans]


class _Walk:
    """The way through a stream from a place on, by arithmetic on indices: not a token is read."""

    def __init__(self, stream: Stream, seed: int, place: Place, whole: bool) -> None:
        self._whole = whole
        self._piece_P2 = pieces(stream, place.max_len, whole=whole)
        num_pieces = len(self._piece_P2)
        if not num_pieces:
            short = f" in a document of at most {place.max_len} tokens" if whole else ""
            raise ValueError(f"data: not one token{short} has another one behind it, nothing to train on")
        if not (place.stage >= 0 and place.epoch >= 0 and 0 <= place.piece < num_pieces):
            raise ValueError(f"loader: {place._asdict()} does not fit a stream of {num_pieces} pieces")
        self._seed, self.place = seed, place
        self._order_P = self._order_of(place.stage, place.epoch)
        first, end = self._piece_P2[self._order_P[place.piece]]
        if not 0 <= place.offset < end - first:
            raise ValueError(f"loader: {place._asdict()} does not fit: that piece has {end - first} tokens")
        if whole and place.offset:
            raise ValueError(f"loader: {place._asdict()} does not fit: no document is cut")

    def take(self, num_tokens: int) -> NDArray[np.int64]:
        """The spans [S, 2] of the next so many tokens, through as many epochs as it takes; of whole pieces at most so many."""
        spans = []
        while num_tokens:
            _, max_len, epoch, piece, offset = self.place
            # Pieces enough if they are half full on average; if not, there is another round.
            span_S2 = self._piece_P2[self._order_P[piece : piece + 2 * num_tokens // max_len + 1]]
            span_S2[0, 0] += offset
            end_S = (span_S2[:, 1] - span_S2[:, 0]).cumsum()
            num_whole = int(end_S.searchsorted(num_tokens, side="right"))
            num_taken = int(end_S[num_whole - 1]) if num_whole else 0
            if num_whole:
                piece, offset = piece + num_whole, 0
            full = self._whole and num_whole < len(span_S2)  # the next one does not fit
            if not self._whole and num_whole < len(span_S2) and num_taken < num_tokens:
                left = num_tokens - num_taken
                span_S2[num_whole, 1] = span_S2[num_whole, 0] + left
                num_whole, num_taken, offset = num_whole + 1, num_tokens, offset + left
            if piece == len(self._piece_P2):
                epoch, piece = epoch + 1, 0
                self._order_P = self._order_of(self.place.stage, epoch)
            self.place = self.place._replace(epoch=epoch, piece=piece, offset=offset)
            spans.append(span_S2[:num_whole])
            num_tokens -= num_taken
            if full:
                break
        return np.concatenate(spans)

    def _order_of(self, stage: int, epoch: int) -> NDArray[np.int64]:
        # torch takes the low 32 bits of a seed, and these must differ: the factors are odd, and the seed's high bits join.
        number = (self._seed * 1_000_003 + epoch + stage * 2_654_435_761 + (self._seed >> 32) * 2_246_822_519) % 2**63
        return torch.randperm(len(self._piece_P2), generator=torch.Generator().manual_seed(number)).numpy()
