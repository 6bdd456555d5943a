"""What users hold: `load` a run folder or a released checkpoint, look at its logits, let it write, save it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trivium.chat.tokenizer import Tokenizer
from trivium.checkpoint.published import Layout, read_published, write_published
from trivium.config import K3Config
from trivium.model.kimi_k3 import KimiK3
from trivium.model.sample import check_sampling, sample
from trivium.model.state import ModelState
from trivium.model.step import DecodeState, Stepper, serves
from trivium.model.trace import trace
from trivium.ops.backend import NAMES, availability, choose, use_backend
from trivium.ops.rows import Rows

__all__ = ["Generation", "Model", "Piece", "load", "trace"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A finished continuation. `finish_reason` is "stop" (end id or a stop string) or "length".

    `ids` and `logprobs` are the sampled tokens without the end id; `text` ends before the stop string.
    """

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one step of `stream` adds; text is held back while it may become a stop string or half a character."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: str | None


def load(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    experts: str = "unpacked",
    backend: str | None = None,
    deterministic: bool = False,
) -> Model:
    """The model of a run folder or a released folder, and its tokenizer when the folder has one.

    dtype None: what the file says. experts "packed" keeps MXFP4 experts as bytes. deterministic: equalities are
    bitwise over cuts, batches, prefill and decode (CPU). Raises ValueError with the file and tensor that is wrong.
    """
    if backend is not None and backend not in NAMES:
        raise ValueError(f"backend: wanted one of {', '.join(NAMES)}, got {backend!r}")
    kind = _device_kind(device)
    for line in availability():
        if line.device == kind and line.backend == (backend or "torch") and not line.usable:
            raise ValueError(f"device {device}, backend {line.backend}: {line.reason}")
    if deterministic and kind != "cpu":
        raise ValueError(f"deterministic: its equalities are established on the CPU only, not on {device}")
    path = Path(path)
    folder = path.parent if path.is_file() else path
    published = read_published(path, dtype=dtype, device=device, experts=experts)
    published.model.eval()
    published.model.deterministic = deterministic
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tiktoken.model").exists() else None
    if tokenizer is not None and tokenizer.vocab_size != published.config.vocab_size:
        raise ValueError(
            f"{folder}: tiktoken.model gives a vocabulary of {tokenizer.vocab_size}, config.json says "
            f"{published.config.vocab_size}"
        )
    return Model(network=published.model, tokenizer=tokenizer, folder=folder, backend=backend, layout=published.layout)


def _device_kind(device: str | torch.device) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device: {device!r} is not one that torch knows") from error


class Model:
    """A network, its config, its tokenizer (None when the folder has none) and the folder it came from."""

    def __init__(
        self,
        *,
        network: KimiK3,
        tokenizer: Tokenizer | None = None,
        folder: Path | None = None,
        backend: str | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.network = network
        self.tokenizer = tokenizer
        self.folder = folder
        self.backend = backend
        self._layout = layout

    @property
    def config(self) -> K3Config:
        return self.network.config

    @torch.no_grad()
    def logits(self, ids: Tensor | Sequence[Sequence[int]]) -> Tensor | list[Tensor]:
        """Next-token logits at every position, float32.

        ids int64 [B, T] gives [B, T, W]; a list of B lists of lengths T_i gives a list of [T_i, W]. Rows are packed
        inside and independent of each other.
        """
        if isinstance(ids, Tensor):
            if ids.dim() != 2:
                raise ValueError(f"ids: wanted [B, T], got {list(ids.shape)}; a single row is ids[None]")
            return torch.stack(self._logits(ids.tolist())) if ids.numel() else self._no_logits(*ids.shape)
        return self._logits(ids)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Continue the prompt, text or ids, until the end id, a stop string, or max_tokens.

        A text that is not empty is encoded as it is; an empty one is a document's beginning, [BOS]. Raises ValueError
        as `stream` does.
        """
        pieces = list(
            self.stream(prompt, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
        )
        return Generation(
            ids=tuple(id_ for piece in pieces for id_ in piece.ids),
            text="".join(piece.text for piece in pieces),
            logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
            finish_reason=pieces[-1].finish_reason or "length",
        )

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> Iterator[Piece]:
        """`generate`, piece by piece: one piece a token, the last one with its finish_reason.

        The model is to be left as it is until the last piece: of weights that are changed meanwhile some hold at once, and a
        hook or a trace that comes later is not seen. Raises ValueError before the first token for a prompt or an option that is wrong.
        """
        prompt_ids = self._prompt_ids(prompt)
        check_sampling(temperature, top_p)
        if type(max_tokens) is not int or max_tokens < 1:
            raise ValueError(f"max_tokens: wanted a whole number of at least 1, got {max_tokens!r}")
        stop = stop if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
        if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop: wanted a sequence of strings that are not empty, got {stop!r}")
        if stop and self.tokenizer is None:
            raise ValueError("stop: strings need a tokenizer, and this model has none")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
            raise ValueError(f"seed: wanted a whole number in [0, 2^63), got {seed!r}")
        generator = torch.Generator(device=self.network.device)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        return self._stream(prompt_ids, max_tokens, temperature, top_p, generator, stop)

    def save(self, path: str | Path, *, dtype: str | torch.dtype | None = None, pack_experts: bool = False) -> None:
        """Write the released layout (and the tokenizer) to a folder; packed experts stay packed, in their shards."""
        write_published(self.network, Path(path), dtype=dtype, pack_experts=pack_experts, layout=self._layout)
        if self.tokenizer is not None:
            self.tokenizer.save(Path(path))

    def _logits(self, rows_of_ids: Sequence[Sequence[int]]) -> list[Tensor]:
        if not isinstance(rows_of_ids, Iterable):
            raise ValueError(f"ids: wanted rows of token ids, got {type(rows_of_ids).__name__}")
        checked = [self._checked_ids(ids, f"ids[{row}]") for row, ids in enumerate(rows_of_ids)]
        rows = Rows.of([len(ids) for ids in checked], self.network.device)
        flat_T = torch.tensor([id_ for ids in checked for id_ in ids], dtype=torch.int64, device=self.network.device)
        with self._chosen_backend():
            hidden_TD, _ = self.network(flat_T, rows)
            return list(self.network.head(hidden_TD).float().split(rows.lengths))

    def _no_logits(self, B: int, T: int) -> Tensor:
        return torch.empty(B, T, self.config.vocab_size, device=self.network.device)

    @torch.no_grad()
    def _next(self, ids: Sequence[int], state, past: int):
        ids_T = torch.tensor(ids, dtype=torch.int64, device=self.network.device)
        with self._chosen_backend():
            hidden_TD, state = self.network(ids_T, Rows.one(len(ids), self.network.device, past), state)
            return self.network.head(hidden_TD[-1:]), state

    def _stepper(self, state: ModelState) -> Callable[[int], Tensor]:
        """From the next token's id to the logits [1, W] behind it, from this state on: fused where that serves."""

        def by_forward(held: ModelState = state) -> Callable[[int], Tensor]:
            def step(id_: int) -> Tensor:
                nonlocal held
                logits_1W, held = self._next([id_], held, held.lengths[0])
                return logits_1W

            return step

        def fused() -> Callable[[int], Tensor]:
            stepper, held, plain = Stepper(self.network), DecodeState.of(self.config, state), None

            def step(id_: int) -> Tensor:
                nonlocal stepper, plain
                if plain is None and stepper.is_stale:
                    if serves(self.network):
                        stepper = Stepper(self.network)
                    else:  # it also got a hook, say
                        plain = by_forward(held.to_state(self.config, self.network.dtype))
                return plain(id_) if plain else stepper(id_, held)[None]

            return step

        native = fused if serves(self.network) else by_forward
        with self._chosen_backend():
            return choose("decode step", reference=by_forward, torch=by_forward, native=native)()

    def _stream(self, prompt_ids, max_tokens, temperature, top_p, generator, stop) -> Iterator[Piece]:
        logits_1W, state = self._next(prompt_ids, self.network.empty_state(1), 0)
        step = self._stepper(state) if max_tokens > 1 else None
        del state  # the fused step has its own, and of a long prompt one is large
        decoder = self.tokenizer.decoder() if self.tokenizer is not None else None
        held = ""  # text that may still turn out to be the beginning of a stop string
        for count in range(1, max_tokens + 1):
            id_S, logprob_S = sample(logits_1W, temperature=temperature, top_p=top_p, generator=generator)
            id_, logprob = int(id_S), float(logprob_S)
            if id_ == self.config.eos_token_id:
                yield Piece(ids=(), text=held + (decoder.flush() if decoder else ""), logprobs=(), finish_reason="stop")
                return
            held += decoder.push(id_) if decoder else ""
            last = count == max_tokens
            if last and decoder:
                held += decoder.flush()
            cut = min((at for at in (held.find(text) for text in stop) if at >= 0), default=-1)
            if cut >= 0:
                yield Piece(ids=(id_,), text=held[:cut], logprobs=(logprob,), finish_reason="stop")
                return
            ready = len(held) if last else len(held) - _held_back(held, stop)
            yield Piece(ids=(id_,), text=held[:ready], logprobs=(logprob,), finish_reason="length" if last else None)
            held = held[ready:]
            if not last:
                logits_1W = step(id_)

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt: text needs a tokenizer, and this model has none; give token ids")
            prompt = self.tokenizer.encode(prompt) or [self.config.bos_token_id]
        ids = self._checked_ids(prompt, "prompt")
        if not ids:
            raise ValueError("prompt: wanted at least one token id, got none")
        return ids

    def _checked_ids(self, ids: Sequence[int], name: str) -> list[int]:
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
            raise ValueError(f"{name}: wanted a row of token ids, got {ids!r}")
        checked = []
        for id_ in ids:
            try:
                plain = operator.index(id_)  # an int, or what stands for one: numpy's, a tensor of one
            except TypeError:
                plain = -1
            if isinstance(id_, bool) or not 0 <= plain < self.config.vocab_size:
                raise ValueError(f"{name}: wanted token ids in [0, {self.config.vocab_size}), got {id_!r}")
            checked.append(plain)
        return checked

    def _chosen_backend(self):
        return use_backend(self.backend) if self.backend else nullcontext()


def _held_back(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    return max((n for word in stop for n in range(1, len(word)) if text.endswith(word[:n])), default=0)
