"""The loss on text that was held out, in nats a token and in bits per byte."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import torch

from trivium.data.pack import TokenStream, pieces
from trivium.model.kimi_k3 import KimiK3
from trivium.model.state import ModelState
from trivium.ops.rows import Rows
from trivium.train.loss import bits_per_byte, token_nll

# Documents under way at once: enough for products of a good size, few enough that a window is longer than a chunk.
_LANES = 8


@dataclass(frozen=True, kw_only=True)
class Heldout:
    """`loss` is nats a token, `bpb` bits a byte of the text; both over the same tokens."""

    loss: float
    bpb: float
    num_tokens: int
    num_bytes: int


@torch.no_grad()
def score(model: KimiK3, stream: TokenStream, *, batch_tokens: int = 2048) -> Heldout:
    """Every token of every document that counts as a target once, [BOS] apart, given all of its document before it.

    A document is read in consecutive windows and the state is carried from one to the next, so that how it is cut
    changes nothing but rounding. At most `batch_tokens` tokens go through the model at once. Raises ValueError when
    there is no token to score.
    """
    device = model.device
    # Longest first: what is short then fills up beside it.
    documents = sorted(
        ((start, end - 1) for start, end in pairwise(stream.starts.tolist()) if end - start > 1),
        key=lambda span: span[0] - span[1],
    )
    weight_T = torch.ones(len(stream.ids_T)) if stream.weight_T is None else stream.weight_T.float()
    if not documents or not any(weight_T[first + 1 : end + 1].any() for first, end in documents):
        raise ValueError("held out: no token to score")
    was_training = model.training
    model.eval()
    waiting = deque(documents)
    lanes: list[tuple[int, int, ModelState]] = []  # first token not read yet, end, state
    nll, num_tokens, num_bytes = 0.0, 0, 0
    while waiting or lanes:
        while waiting and len(lanes) < min(_LANES, batch_tokens):
            lanes.append((*waiting.popleft(), model.empty_state(1)))
        window = batch_tokens // len(lanes)
        spans = [(first, min(first + window, end)) for first, end, _ in lanes]
        ids_T = torch.cat([stream.ids_T[first:end] for first, end in spans]).to(device, torch.int64)
        targets_T = torch.cat([stream.ids_T[first + 1 : end + 1] for first, end in spans]).to(device, torch.int64)
        state = ModelState.join([state for *_, state in lanes])
        rows = Rows.of([end - first for first, end in spans], device, past=state.lengths)
        hidden_TD, state = model(ids_T, rows, state)
        # In float64: a float32 sum over 100,000 tokens would lose the digits that two runs differ in.
        counted_T = torch.cat([weight_T[first + 1 : end + 1] for first, end in spans]).to(device)
        nll_T = token_nll(hidden_TD, model.language_model.lm_head.weight, targets_T).double()
        nll += float((nll_T * counted_T).sum())
        num_tokens += int(counted_T.sum())
        num_bytes += int(stream.num_bytes_W[targets_T[counted_T > 0].cpu()].sum())
        lanes = [
            (read, end, state.sequence(s))
            for s, ((_, read), (_, end, _)) in enumerate(zip(spans, lanes, strict=True))
            if read < end
        ]
    model.train(was_training)
    return Heldout(loss=nll / num_tokens, bpb=bits_per_byte(nll, num_bytes), num_tokens=num_tokens, num_bytes=num_bytes)


def excerpt(stream: TokenStream, num_tokens: int, piece_len: int) -> TokenStream:
    """About `num_tokens` tokens of the stream: pieces of `piece_len` from all over it, one wherever its share is due.

    A piece that begins inside a document knows nothing of what came before: its loss is a little above `score`'s of
    the whole.
    """
    spans = pieces(stream, piece_len)
    every = max(1.0, stream.num_targets / num_tokens)
    chosen, taken, passed = [], 0, 0
    for first, end in spans:
        if taken * every <= passed:
            chosen.append((first, end))
            taken += end - first
        passed += end - first
    parts = [stream.ids_T[first : end + 1] for first, end in chosen]
    weight_T = stream.weight_T
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part))
    return TokenStream(
        ids_T=torch.cat(parts),
        starts=tuple(starts),
        num_bytes_W=stream.num_bytes_W,
        weight_T=None if weight_T is None else torch.cat([weight_T[first : end + 1] for first, end in chosen]),
    )
