"""Tokenizer: text to token ids and back.

Text from outside goes through `encode`, which cannot yield a control id whatever the text says. Only what we write
ourselves goes through `encode_control`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tiktoken

from trivium.chat.bpe import ranks_of, train_bpe
from trivium.chat.pieces import PATTERN, check_text, cut_text
from trivium.chat.vocabulary import Vocabulary


@dataclass(frozen=True)
class Tokenizer:
    """Byte pairs by tiktoken's rule over the released pieces, and 256 control ids behind the ranks."""

    vocabulary: Vocabulary

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tiktoken.model and tokenizer_config.json, ours or the released ones.

        Raises ValueError with the file, and the line or field that is wrong.
        """
        return cls(Vocabulary.from_folder(folder))

    def save(self, folder: str | Path) -> None:
        """Write tiktoken.model and tokenizer_config.json: each under a temporary name, then renamed."""
        self.vocabulary.save(folder)

    def encode(self, text: str) -> list[int]:
        """Ids of content, all below the number of ranks: a control string in it is text like any other.

        Long text is cut first (`cut_text`), which changes ids at the cuts. Raises ValueError for a lone surrogate.
        """
        check_text(text)
        return [token_id for part in cut_text(text) for token_id in self._encoding.encode_ordinary(part)]

    def encode_control(self, text: str) -> list[int]:
        """Ids of text in which control strings are control ids: for text no user has touched.

        The cuts come first here too, so a control string across one is ordinary text.
        """
        check_text(text)
        encode = self._encoding.encode
        return [token_id for part in cut_text(text) for token_id in encode(part, allowed_special="all")]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of the ids, U+FFFD for bytes that are no UTF-8. A control id is its name.

        `skip_special` leaves out control ids first, but for <|open|>, <|close|> and <|sep|>, which the file flags not
        special. Raises ValueError for an id out of range.
        """
        ids = list(ids)
        if skip_special:
            skipped = self.vocabulary.skipped_ids
            ids = [token_id for token_id in ids if token_id not in skipped]
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of the ids; a control id is its name. Raises ValueError for an id out of range."""
        bytes_of = self.vocabulary.bytes_of
        return b"".join([bytes_of(token_id) for token_id in ids])

    def decoder(self, skip_special: bool = False) -> Decoder:
        """A new `Decoder`, for one stream of ids."""
        return Decoder(self.vocabulary, skip_special=skip_special)

    @property
    def num_ranks(self) -> int:
        """Ids of content; the control ids follow."""
        return self.vocabulary.num_ranks

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    @property
    def special_ids(self) -> dict[str, int]:
        """Name -> id of all 256 control strings."""
        return dict(self.vocabulary.special_ids)

    @property
    def bos_id(self) -> int:
        return self.vocabulary.special_ids["[BOS]"]

    @property
    def end_of_msg_id(self) -> int:
        return self.vocabulary.special_ids["<|end_of_msg|>"]

    @property
    def eos_id(self) -> int:
        """Where generation stops: <|end_of_msg|>, as config.json says, and not [EOS], the id before it."""
        return self.end_of_msg_id

    @property
    def pad_id(self) -> int:
        return self.vocabulary.special_ids["[PAD]"]

    @property
    def media_pad_id(self) -> int:
        """The placeholder of an image: media_placeholder_token_id of config.json."""
        return self.vocabulary.special_ids["<|media_pad|>"]

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        return tiktoken.Encoding(
            name="trivium",
            pat_str=PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(self.vocabulary.ranks)},
            special_tokens=self.vocabulary.special_ids,
            explicit_n_vocab=self.vocab_size,
        )


class Decoder:
    """Ids of one stream to text, piece by piece; the pieces joined are `Tokenizer.decode` of the whole.

    Bytes of an unfinished character are held back. What can no longer become one is U+FFFD, once.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = False) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.skipped_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters this id completes, often none. Raises ValueError for an id out of range."""
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._vocabulary.bytes_of(token_id))

    def flush(self) -> str:
        """The end of the stream: U+FFFD for a character cut in the middle, else nothing. The next id starts anew."""
        return self._utf8.decode(b"", final=True)


def train_tokenizer(texts: Iterable[str], num_ranks: int) -> Tokenizer:
    """Byte-level BPE of exactly `num_ranks` ranks, the released control strings behind them.

    Raises ValueError if the texts do not give that many: an id that no text reaches would be a row of the model that
    never learns.
    """
    ranks = ranks_of(train_bpe(texts, num_ranks))
    if len(ranks) < num_ranks:
        raise ValueError(f"train_tokenizer: the texts give {len(ranks)} ranks, wanted {num_ranks}: give more text")
    return Tokenizer(Vocabulary.of_ranks(ranks))
