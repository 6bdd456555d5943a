"""Vocabulary: which bytes or which control string an id stands for, and the two released files that say so."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

NUM_SPECIALS = 256

# Released id - 163584 -> name. Every other of the 256 ids n is <|reserved_token_n|>.
NAMED_OFFSETS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
# The frame of a chat message: flagged not special, so decoding that skips special ids keeps them for the parser.
FRAME = ("<|open|>", "<|close|>", "<|sep|>")
# Without one of these no chat can be written or ended.
_NEEDED = ("[BOS]", "<|end_of_msg|>", *FRAME, *(NAMED_OFFSETS[offset] for offset in range(18, 22)), "[PAD]")


@dataclass(frozen=True)
class Special:
    """A control id: its string, and whether decoding that skips special ids skips it."""

    name: str
    skipped: bool


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """R byte strings by rank, the 256 single bytes first in any order, then 256 control ids R..R+255.

    A rank is the id and the merge priority at once. `config` is tokenizer_config.json as read: of its fields only
    `added_tokens_decoder` is used, the others are kept.
    """

    ranks: tuple[bytes, ...] = field(repr=False)
    config: dict[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        _check_ranks(self.ranks)
        assert len(self.specials) == NUM_SPECIALS  # reads them, and so checks the config

    @classmethod
    def of_ranks(cls, ranks: Sequence[bytes]) -> Vocabulary:
        """With the released control strings behind the ranks."""
        return cls(ranks=tuple(ranks), config=_new_config(len(ranks)))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Vocabulary:
        """Read tiktoken.model and tokenizer_config.json. Raises ValueError with the file, and the line or field."""
        ranks_path, config_path = Path(folder) / RANKS_FILE, Path(folder) / CONFIG_FILE
        ranks = _ranks_of_lines(ranks_path, _read(ranks_path))
        try:
            config = json.loads(_read(config_path))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{config_path}: not a JSON file: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{config_path}: wanted a JSON object, got {type(config).__name__}")
        try:
            _check_ranks(ranks)
        except ValueError as error:
            raise ValueError(f"{ranks_path}: {error}") from error
        try:
            return cls(ranks=ranks, config=config)
        except ValueError as error:
            raise ValueError(f"{config_path}: {error}") from error

    def save(self, folder: str | Path) -> None:
        """Write both files into the folder, made if missing: each under a temporary name, then renamed."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(self.ranks))
        _write(folder / RANKS_FILE, b"".join(lines))
        config = json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"
        _write(folder / CONFIG_FILE, config.encode("utf-8"))

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def size(self) -> int:
        """Ids in all: ranks and control ids."""
        return len(self.ranks) + NUM_SPECIALS

    @cached_property
    def specials(self) -> tuple[Special, ...]:
        """The 256 control ids in order. A reserved id stands for no text, so it is skipped."""
        return _specials_of(self.config, len(self.ranks))

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Name -> id of all 256 control strings."""
        return {special.name: len(self.ranks) + offset for offset, special in enumerate(self.specials)}

    @cached_property
    def skipped_ids(self) -> frozenset[int]:
        """The control ids that decoding with skip_special leaves out."""
        return frozenset(self.special_ids[special.name] for special in self.specials if special.skipped)

    def bytes_of(self, token_id: int) -> bytes:
        """What the id stands for; a control id for its name. Raises ValueError for an id out of range."""
        if not 0 <= token_id < self.size:
            raise ValueError(f"id {token_id}: wanted one of 0..{self.size - 1}")
        if token_id < len(self.ranks):
            return self.ranks[token_id]
        return self.specials[token_id - len(self.ranks)].name.encode("utf-8")


# --- tiktoken.model: a line "base64(bytes) rank" for each rank ----------------------------------------------------


def _ranks_of_lines(path: Path, content: bytes) -> tuple[bytes, ...]:
    line_of_rank: dict[int, int] = {}
    line_of_token: dict[bytes, int] = {}
    tokens: dict[int, bytes] = {}
    for line_num, line in enumerate(content.splitlines(), start=1):
        try:
            encoded, number = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(number)
        except (ValueError, binascii.Error) as error:
            wanted = 'wanted "base64(bytes) rank"'
            raise ValueError(f"{path}: line {line_num}: {wanted}, got {_shown(line)}") from error
        if rank in line_of_rank:
            raise ValueError(f"{path}: line {line_num}: rank {rank} is already on line {line_of_rank[rank]}")
        if token in line_of_token:
            raise ValueError(f"{path}: line {line_num}: {_shown(token)} is already on line {line_of_token[token]}")
        line_of_rank[rank] = line_of_token[token] = line_num
        tokens[rank] = token
    missing = next((rank for rank in range(len(tokens)) if rank not in tokens), None)
    if missing is not None:
        outside = next(rank for rank in tokens if not 0 <= rank < len(tokens))
        raise ValueError(f"{path}: rank {missing} is missing: {len(tokens)} lines, and one of them has rank {outside}")
    return tuple(tokens[rank] for rank in range(len(tokens)))


def _shown(content: bytes) -> str:
    text = repr(content)[1:]
    return text if len(text) <= 60 else f"{text[:60]}..."


def _check_ranks(ranks: tuple[bytes, ...]) -> None:
    if len(ranks) < 256:
        raise ValueError(f"wanted at least the 256 single bytes as ranks, got {len(ranks)} ranks")
    for rank, token in enumerate(ranks[:256]):
        if len(token) != 1:
            raise ValueError(f"rank {rank} is {_shown(token)}, wanted the 256 single bytes as ranks 0..255")
    seen: set[bytes] = set()
    for rank, token in enumerate(ranks):
        if not token or token in seen:
            raise ValueError(
                f"rank {rank} is {_shown(token)}, " + ("which an earlier rank is" if token else "no bytes")
            )
        seen.add(token)


# --- tokenizer_config.json -------------------------------------------------------------------------------------


def _new_config(num_ranks: int) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(num_ranks + offset): {"content": name, **plain, "special": name not in FRAME}
        for offset, name in NAMED_OFFSETS.items()
    }
    return {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }


def _specials_of(config: dict[str, Any], num_ranks: int) -> tuple[Special, ...]:
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict):
        raise ValueError("added_tokens_decoder is missing, wanted the control strings by id")
    specials: dict[int, Special] = {}
    for key, token in added.items():
        offset = int(key) - num_ranks if key.isascii() and key.isdigit() else -1
        if not 0 <= offset < NUM_SPECIALS:
            last = num_ranks + NUM_SPECIALS - 1
            raise ValueError(
                f"added_tokens_decoder: id {key} is none of {num_ranks}..{last}, the {NUM_SPECIALS} ids behind the "
                f"{num_ranks} ranks of {RANKS_FILE}"
            )
        specials[offset] = _special_of(key, token)
    for offset in range(NUM_SPECIALS):
        specials.setdefault(offset, Special(f"<|reserved_token_{num_ranks + offset}|>", skipped=True))
    offset_of: dict[str, int] = {}
    for offset in range(NUM_SPECIALS):
        name = specials[offset].name
        if name in offset_of:
            first = num_ranks + offset_of[name]
            raise ValueError(f"added_tokens_decoder: {name} is id {first} and id {num_ranks + offset}, wanted one")
        offset_of[name] = offset
    for offset, name in NAMED_OFFSETS.items():
        if offset_of.get(name, offset) != offset:
            got = num_ranks + offset_of[name]
            raise ValueError(f"added_tokens_decoder: {name} is id {got}, wanted {num_ranks + offset}")
        if name in _NEEDED and name not in offset_of:
            raise ValueError(f"added_tokens_decoder: {name} is missing, wanted it at id {num_ranks + offset}")
    return tuple(specials[offset] for offset in range(NUM_SPECIALS))


def _special_of(key: str, token: Any) -> Special:
    content = token.get("content") if isinstance(token, dict) else None
    if not isinstance(content, str) or not content:
        raise ValueError(f"added_tokens_decoder: id {key} wants a content string, got {json.dumps(token)}")
    special = token.get("special", False)
    if not isinstance(special, bool):
        raise ValueError(f"added_tokens_decoder: id {key} wants special true or false, got {json.dumps(special)}")
    return Special(content, skipped=special)


# --- Files -----------------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)  # what was there before stays as it was
        raise OSError(f"{path}: cannot be written: {error.strerror or error}; what was there is kept") from error
