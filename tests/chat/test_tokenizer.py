"""Laws of text, ids and back; the encoder against `tokenizers` and against one written out in plain Python."""

import base64
import errno
import itertools
import json
import textwrap
import unicodedata
from pathlib import Path

import pytest
import regex
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from trivium.chat.bpe import ranks_of, train_bpe
from trivium.chat.pieces import PATTERN, cut_text
from trivium.chat.tokenizer import Tokenizer, train_tokenizer
from trivium.chat.vocabulary import CONFIG_FILE, NAMED_OFFSETS, RANKS_FILE, Vocabulary
from trivium.config import model_preset

WORDS = (
    "I'll we've DON'T can't IT'S they're I'm he'd a'\u017f 'S 'LL ''' 12345 1234567 \u0663\u0664 \u00bd \u2167\n"
    "漢字とかな交じり文 中文没有空格 々〇 한국어 日本語\r\n\r\nστοιχεῖον Привет ǅ ﬁ İı \u0295x\n"
    "👩\u200d👩\u200d👧\u200d👦 🇫🇷🇩🇪 👍🏽 e\u0301a\u0308\u0323 \u0301\u0302 नमस्ते สวัสดี שָׁלוֹם العَرَبِيَّة\n"
    "   \t\t  \u00a0\u3000\u2028\u0085 \x00\x1b[0m\x1c\x1d\x1e\x1f\x7f\ufeff \ue000 \U0010ffff \n\n\n  x  \n \r"
)
TEXTS = [Path(textwrap.__file__).read_text(encoding="utf-8"), WORDS * 4, "\n".join(NAMED_OFFSETS.values()) * 4]
CORPUS = "".join(TEXTS)
BPE = train_bpe(TEXTS, 1200)
TOKENIZER = Tokenizer(Vocabulary.of_ranks(ranks_of(BPE)))
BYTES = Tokenizer(Vocabulary.of_ranks([bytes([value]) for value in range(256)]))

# Characters of which all Unicode versions in use say the same: assigned, and not U+0295, which became Lo in Unicode 17.
CHARS = st.characters(exclude_categories=("Cs", "Cn"), exclude_characters="\u0295")
FRAGMENTS = (
    *WORDS.split(" "),
    *NAMED_OFFSETS.values(),
    "<|reserved_token_1208|>",
    *(" ", "  ", "\n", "\r\n", "\t", "'", "\u200d", "\ufe0f", "\u0301"),
)
SLICES = st.builds(
    lambda start, length: CORPUS[start : start + length], st.integers(0, len(CORPUS)), st.integers(1, 30)
)
TEXT = st.lists(st.one_of(st.text(CHARS, max_size=12), st.sampled_from(FRAGMENTS), SLICES), max_size=12).map("".join)
SAME_IN_ALL_VERSIONS = TEXT.map(lambda text: text.replace("\u0295", ""))


# --- Pieces ----------------------------------------------------------------------------------------------------

# The released rule once more, with a lookahead where the pattern under test intersects sets.
UPPER = r"(?:(?!\p{Script=Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
LOWER = r"(?:(?!\p{Script=Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
HEAD = r"(?:(?![\r\n]|\p{L}|\p{N})[\s\S])?"
TAIL = r"(?:'(?:[sS\u017f]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?"
PLAIN_PATTERN = regex.compile(
    rf"\p{{Script=Han}}+|{HEAD}{UPPER}*{LOWER}+{TAIL}|{HEAD}{UPPER}+{LOWER}*{TAIL}|\p{{N}}\p{{N}}?\p{{N}}?"
    r"|\ ?(?:(?!\s|\p{L}|\p{N})[\s\S])+[\r\n]*|\s*[\r\n]+|\s+(?=\s|\Z)|\s+"
)


def plain_pieces(text: str) -> list[str]:
    pieces = PLAIN_PATTERN.findall(text)
    assert "".join(pieces) == text
    return pieces


def plain_encode(text: str, ranks: tuple[bytes, ...]) -> list[bytes]:
    """The merge rule in words: join the leftmost adjacent pair whose concatenation has the lowest rank, until none."""
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    encoded = []
    for piece in plain_pieces(text):
        parts = [bytes([value]) for value in piece.encode("utf-8")]
        while pairs := [(rank_of[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in rank_of]:
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        encoded += parts
    return encoded


def split_pieces(text: str) -> list[str]:
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("abc漢字かな", ["abc", "漢字", "かな"]),  # Han stands alone, kana does not
        ("a漢b々〇", ["a", "漢", "b", "々〇"]),  # a Han letter mark (Lm) and number (Nl) are Han
        ("Hello world's", ["Hello", " world's"]),
        ("DON'T we'Ll x'y", ["DON'T", " we'Ll", " x", "'y"]),
        ("camelCaseHTTPServer", ["camel", "Case", "HTTPServer"]),  # alternative 2: upper* lower+
        ("HTTP server", ["HTTP", " server"]),  # alternative 3: upper+ lower*
        ("1234567 890", ["123", "456", "7", " ", "890"]),
        ("a += b;\n\n  c", ["a", " +=", " b", ";\n\n", " ", " c"]),
        ("x  \n\n  y", ["x", "  \n\n", " ", " y"]),
        ("x   ", ["x", "   "]),
        ("x \u00a0\t1", ["x", " \u00a0", "\t", "1"]),
        ("e\u0301\u0302 \u0301", ["e\u0301\u0302", " \u0301"]),  # marks are letters here
        ("漢\u0301", ["漢", "\u0301"]),
        ("E\u0301Ab", ["E\u0301Ab"]),
        ("\u0301A", ["\u0301", "A"]),  # alternative 2 takes the mark as lower before 3 could take it as the head
        ("👍🏽!", ["👍🏽!"]),
        ("", []),
    ],
)
def test_pieces_by_hand(text, pieces):
    assert split_pieces(text) == pieces
    assert plain_pieces(text) == pieces


@settings(max_examples=400, deadline=None)
@given(SAME_IN_ALL_VERSIONS)
def test_pieces_equal_the_plain_reference(text):
    assert split_pieces(text) == plain_pieces(text)


def test_every_character_is_in_the_same_class_for_both_engines():
    # Around a letter of each case, a digit and a space, the pieces tell apart all classes that the pattern names. Of
    # the planes from U+20000, ideographs and private use without exception, every 64th character.
    codes = [*range(0x20000), *range(0x20000, 0x110000, 64)]
    chars = [chr(code) for code in codes if unicodedata.category(chr(code)) not in ("Cs", "Cn") and code != 0x295]
    for start in range(0, len(chars), 4096):
        text = "".join(f"A{char}Bb a{char}B1{char} {char}!!{char}\n" for char in chars[start : start + 4096])
        assert split_pieces(text) == plain_pieces(text)


# --- Encoding --------------------------------------------------------------------------------------------------


def byte_of_char() -> dict[str, int]:
    """The byte-level alphabet, read off the characters that `tokenizers` makes of text."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    codes = [*range(1, 0xD800, 61), *range(0x80), *range(0xE000, 0x110000, 0xFF1)]
    return {
        char: value
        for code in codes
        for char, value in zip(level.pre_tokenize_str(chr(code))[0][0], chr(code).encode("utf-8"), strict=True)
    }


BYTE_OF_CHAR = byte_of_char()


def bpe_encode(text: str) -> list[bytes]:
    return [bytes(BYTE_OF_CHAR[char] for char in token) for part in cut_text(text) for token in BPE.encode(part).tokens]


@settings(max_examples=600, deadline=None)
@given(TEXT)
def test_tiktoken_and_tokenizers_encode_alike(text):
    assert [TOKENIZER.vocabulary.ranks[token_id] for token_id in TOKENIZER.encode(text)] == bpe_encode(text)


@settings(max_examples=400, deadline=None)
@given(SAME_IN_ALL_VERSIONS)
def test_encoding_equals_the_plain_reference(text):
    ranks = TOKENIZER.vocabulary.ranks
    assert [ranks[token_id] for token_id in TOKENIZER.encode(text)] == plain_encode(text, ranks)


def test_the_corpus_encodes_alike_and_merges_are_used():
    ids = TOKENIZER.encode(CORPUS)
    assert [TOKENIZER.vocabulary.ranks[token_id] for token_id in ids] == bpe_encode(CORPUS)
    assert len(ids) < len(CORPUS) / 2


@settings(max_examples=300, deadline=None)
@given(st.one_of(TEXT, st.text(st.characters(exclude_categories=("Cs",)))))
def test_text_comes_back_and_content_holds_no_control_id(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(ids, skip_special=True) == text
    assert all(0 <= token_id < TOKENIZER.num_ranks for token_id in ids)
    assert TOKENIZER.decode(TOKENIZER.encode_control(text)) == text


def test_only_control_encoding_knows_control_strings():
    for name, token_id in TOKENIZER.special_ids.items():
        assert TOKENIZER.encode_control(name) == [token_id]
        content = TOKENIZER.encode(name)
        assert max(content) < TOKENIZER.num_ranks and TOKENIZER.decode(content) == name
    open_id, sep_id = TOKENIZER.special_ids["<|open|>"], TOKENIZER.special_ids["<|sep|>"]
    text = "<|open|>message<|sep|>"
    assert TOKENIZER.encode_control(text) == [open_id, *TOKENIZER.encode("message"), sep_id]


@pytest.mark.parametrize("encode", [TOKENIZER.encode, TOKENIZER.encode_control])
@pytest.mark.parametrize("text", ["漢a\ud83d", "漢a\ude00\ud83d"])
def test_a_lone_surrogate_is_refused(encode, text):
    with pytest.raises(
        ValueError, match=rf"^text: character 2 is the lone surrogate U\+{ord(text[2]):04X}, wanted text$"
    ):
        encode(text)


# --- Cuts of long text -----------------------------------------------------------------------------------------


def plain_cut(text: str, max_chars: int, max_run_chars: int) -> list[str]:
    parts, run = [], 0
    for idx, char in enumerate(text):
        run = run + 1 if idx and char.isspace() == text[idx - 1].isspace() else 1
        if idx % max_chars == 0 or run > max_run_chars:
            parts.append("")
            run = 1
        parts[-1] += char
    return parts


@settings(max_examples=300, deadline=None)
@given(st.text("a\u6f22 \n\x1c\u3000", max_size=60), st.integers(1, 40), st.integers(1, 9))
def test_cuts_equal_the_count_by_hand(text, max_chars, max_run_chars):
    assert list(cut_text(text, max_chars, max_run_chars)) == plain_cut(text, max_chars, max_run_chars)


def uncut_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ranks = {token: rank for rank, token in enumerate(tokenizer.vocabulary.ranks)}
    return tiktoken.Encoding("uncut", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}).encode_ordinary(text)


def test_text_is_cut_after_400000_characters():
    tokenizer = train_tokenizer([" pear" * 9], 260)  # four merges: " pear" is one id, 259, and nothing crosses a word
    inside = " pear" * 79_999 + "xxx" + " pear"  # the last word stands at 399,998: cut after two characters
    assert uncut_ids(tokenizer, inside) == [259] * 79_999 + [*b"xxx", 259]
    assert tokenizer.encode(inside) == [259] * 79_999 + [*b"xxx"] + tokenizer.encode(" p") + tokenizer.encode("ear")
    ending = " pear" * 80_000  # exactly 400,000 characters
    assert tokenizer.encode(ending) == [259] * 80_000
    assert tokenizer.encode(ending + " pear") == [259] * 80_001  # here the cut falls between two words


@pytest.mark.parametrize("encode", ["encode", "encode_control"])
@pytest.mark.parametrize(
    "pair, num_merges, odd",
    [("ab", 1, "x"), ("漢字", 5, "字")],  # a pair of characters is one id; in 漢字 a character has three bytes
)
def test_runs_are_cut_after_25000_characters(encode, pair, num_merges, odd):
    tokenizer = train_tokenizer([pair], 256 + num_merges)
    joined = 255 + num_merges
    assert getattr(tokenizer, encode)(pair * 12_500) == [joined] * 12_500  # 25,000 characters: whole
    text = odd + pair * 12_500  # one more: the last pair is cut in two
    first = tokenizer.encode(odd)
    assert uncut_ids(tokenizer, text) == first + [joined] * 12_500
    halves = tokenizer.encode(pair[0]) + tokenizer.encode(pair[1])
    assert getattr(tokenizer, encode)(text) == first + [joined] * 12_499 + halves


def test_whitespace_runs_are_cut_too():
    tokenizer = train_tokenizer(["\t\t\t"], 258)  # 256 is two tabs, 257 is three
    assert tokenizer.encode("\t" * 24_999) == uncut_ids(tokenizer, "\t" * 24_999) == [256] * 12_498 + [257]
    assert uncut_ids(tokenizer, "\t" * 25_001) == [256] * 12_499 + [257]
    assert tokenizer.encode("\t" * 25_001) == tokenizer.encode_control("\t" * 25_001) == [256] * 12_500 + [9]


def test_a_control_string_across_a_cut_is_text():
    text = "a " * 199_998 + "<|sep|>"  # from 399,996: four characters before the cut, three behind it
    assert TOKENIZER.encode_control(text) == TOKENIZER.encode(text)
    assert TOKENIZER.encode_control(text[6:])[-1] == TOKENIZER.special_ids["<|sep|>"]


# --- Decoding --------------------------------------------------------------------------------------------------


def test_the_frame_survives_skipping_and_the_end_does_not():
    ids = TOKENIZER.encode_control("[BOS]<|open|>a<|sep|>b<|close|><|media_pad|><|end_of_msg|>[PAD]")
    assert TOKENIZER.decode(ids, skip_special=True) == "<|open|>a<|sep|>b<|close|>"
    assert TOKENIZER.decode(ids[-2:]) == "<|end_of_msg|>[PAD]"
    assert TOKENIZER.decode([TOKENIZER.num_ranks + 8], skip_special=True) == ""
    assert TOKENIZER.decode([TOKENIZER.num_ranks + 8]) == "<|reserved_token_1208|>"


@pytest.mark.parametrize("token_id", [-1, 1456, 10**12])
def test_an_id_out_of_range_is_refused(token_id):
    decoder = TOKENIZER.decoder()
    for decode in (TOKENIZER.decode, TOKENIZER.decode_bytes, lambda ids: [decoder.push(i) for i in ids]):
        with pytest.raises(ValueError, match=rf"^id {token_id}: wanted one of 0\.\.1455$"):
            decode([5, token_id])


@pytest.mark.parametrize("text", ["👩\u200d👩\u200d👧\u200d👦", "漢字かな", "🇫🇷e\u0301é👍🏽", "a漢😀b"])
def test_a_stream_emits_whole_characters_wherever_it_ends(text):
    ids = BYTES.encode(text)  # an id a byte: every character of more than one byte is split
    for end in range(len(ids) + 1):
        decoder = BYTES.decoder()
        pieces = [decoder.push(token_id) for token_id in ids[:end]]
        assert all(len(piece) <= 1 and piece != "\ufffd" for piece in pieces)
        assert text.startswith("".join(pieces))
        rest = decoder.flush()
        cut = len("".join(pieces).encode("utf-8")) < end
        assert rest == ("\ufffd" if cut else "")
        assert "".join(pieces) + rest == BYTES.decode(ids[:end])
        assert decoder.flush() == ""


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 1455), st.integers(0x80, 0xFF), st.integers(1200, 1221)), max_size=40),
    st.booleans(),
)
def test_a_stream_of_any_ids_equals_the_whole(ids, skip_special):
    decoder = TOKENIZER.decoder(skip_special)
    streamed = "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()
    assert streamed == TOKENIZER.decode(ids, skip_special)
    assert TOKENIZER.decode_bytes(ids).decode("utf-8", errors="replace") == TOKENIZER.decode(ids)


# --- Training --------------------------------------------------------------------------------------------------


def test_merges_by_hand():
    # "low low lower": lo (3), low (3), then of " low" (2), "we" (1), "er" (1) the most frequent.
    tokenizer = train_tokenizer(["low low lower"], 259)
    assert tokenizer.vocabulary.ranks[:256] == tuple(bytes([value]) for value in range(256))
    assert tokenizer.vocabulary.ranks[256:] == (b"lo", b"low", b" low")


def test_exactly_as_many_ranks_as_asked_for_in_any_order_of_texts():
    for num_ranks in (256, 257, 700):
        tokenizer = train_tokenizer(TEXTS, num_ranks)
        assert tokenizer.num_ranks == num_ranks and tokenizer.vocab_size == num_ranks + 256
        assert tokenizer == train_tokenizer(reversed(TEXTS), num_ranks)
    assert tokenizer.vocabulary.ranks == TOKENIZER.vocabulary.ranks[:700]


def test_too_little_text_is_refused_with_what_it_gives():
    with pytest.raises(ValueError, match="^train_tokenizer: the texts give 258 ranks, wanted 300: give more text$"):
        train_tokenizer(["abc"], 300)
    with pytest.raises(ValueError, match="^num_ranks: wanted at least the 256 single bytes, got 255$"):
        train_tokenizer(["abc"], 255)
    with pytest.raises(ValueError, match=r"^text: character 1 is the lone surrogate U\+D800, wanted text$"):
        train_tokenizer(["abc", "a\ud800"], 257)


def test_training_cuts_text_as_encoding_does():
    text = "1" * 24_999 + "bc"  # digits come in threes: two merges; "bc" is the third, unless c stands behind the cut
    assert ranks_of(train_bpe([text[1:]], 300))[256:] == (b"11", b"111", b"bc")
    assert ranks_of(train_bpe([text], 300))[256:] == (b"11", b"111")


# --- Ids and files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["nano", "k3"])
def test_control_ids_are_those_of_the_config(preset):
    config = model_preset(preset)
    num_ranks = config.vocab_size - 256
    ranks = [bytes([value]) for value in range(256)] + [
        b"%d" % value for value in range(1_000_000, 1_000_000 + num_ranks - 256)
    ]
    tokenizer = Tokenizer(Vocabulary.of_ranks(ranks))
    assert tokenizer.vocab_size == config.vocab_size
    assert tokenizer.bos_id == config.bos_token_id
    assert tokenizer.eos_id == tokenizer.end_of_msg_id == config.eos_token_id == tokenizer.special_ids["[EOS]"] + 1
    assert tokenizer.pad_id == config.pad_token_id == config.vocab_size - 1
    assert tokenizer.media_pad_id == config.media_placeholder_token_id
    assert list(tokenizer.special_ids.values()) == list(range(num_ranks, num_ranks + 256))
    if preset == "k3":
        assert tokenizer.special_ids["<osagent_mode>"] == 163649
        assert tokenizer.special_ids["<|reserved_token_163592|>"] == 163592


def test_a_saved_tokenizer_reads_back_equal_and_saves_the_same_bytes(tmp_path):
    TOKENIZER.save(tmp_path / "new" / "first")
    read = Tokenizer.from_folder(tmp_path / "new" / "first")
    assert read == TOKENIZER and read.encode(CORPUS) == TOKENIZER.encode(CORPUS)
    read.save(tmp_path / "second")
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == [RANKS_FILE, CONFIG_FILE]
    for name in (RANKS_FILE, CONFIG_FILE):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "new" / "first" / name).read_bytes()
    lines = (tmp_path / "second" / RANKS_FILE).read_bytes().split(b"\n")
    assert lines[97] == b"YQ== 97" and lines[-1] == b"" and len(lines) == 1201


def test_other_fields_and_the_order_of_bytes_are_kept(tmp_path):
    ranks = [bytes([value]) for value in (*range(33, 256), *range(33))] + [b"ab"]
    Vocabulary.of_ranks(ranks).save(tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    config |= {"model_max_length": 10**30, "auto_map": {"AutoTokenizer": ["a.B", None]}}
    config["added_tokens_decoder"]["265"] = {"content": "<|ours 我们|>", "special": False}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("!ab") == [0, 256]
    assert tokenizer.special_ids["<|ours 我们|>"] == 265
    assert tokenizer.decode(tokenizer.encode_control("[BOS]<|ours 我们|>"), skip_special=True) == "<|ours 我们|>"
    tokenizer.save(tmp_path / "again")
    written = (tmp_path / "again" / CONFIG_FILE).read_text(encoding="utf-8")
    assert json.loads(written) == config and "我们" in written


@pytest.mark.parametrize("full", [RANKS_FILE, CONFIG_FILE])
def test_a_full_disk_loses_nothing_saved_before(tmp_path, monkeypatch, full):
    BYTES.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_bytes = Path.write_bytes

    def write_half(path, content):
        if not path.name.startswith(full):
            return write_bytes(path, content)
        write_bytes(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="No space left on device"):
        BYTES.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("token, message", [(b"a", "'a', which an earlier rank is"), (b"", "'', no bytes")])
def test_ranks_are_different_and_not_empty(token, message):
    with pytest.raises(ValueError, match=f"^rank 256 is {message}$"):
        Vocabulary.of_ranks([*BYTES.vocabulary.ranks, token])


def line(token: bytes, rank: int) -> bytes:
    return b"%s %d\n" % (base64.b64encode(token), rank)


SINGLE_BYTES = b"".join(line(bytes([value]), value) for value in range(256))


@pytest.mark.parametrize(
    "content, message",
    [
        (SINGLE_BYTES + b"YW*I= 256\n", "line 257: wanted \"base64(bytes) rank\", got 'YW*I= 256'"),
        (SINGLE_BYTES + b"YWI 256\n", "line 257: wanted \"base64(bytes) rank\", got 'YWI 256'"),
        (SINGLE_BYTES + b"YWI=\n", "line 257: wanted \"base64(bytes) rank\", got 'YWI='"),
        (SINGLE_BYTES + b"YWI= x\n", "line 257: wanted \"base64(bytes) rank\", got 'YWI= x'"),
        (SINGLE_BYTES + line(b"ab", 255), "line 257: rank 255 is already on line 256"),
        (SINGLE_BYTES + line(b"a", 256), "line 257: 'a' is already on line 98"),
        (SINGLE_BYTES + line(b"ab", 257), "rank 256 is missing: 257 lines, and one of them has rank 257"),
        (SINGLE_BYTES + line(b"ab", -1), "rank 256 is missing: 257 lines, and one of them has rank -1"),
        (
            SINGLE_BYTES.replace(line(b"a", 97), line(b"ab", 97)),
            "rank 97 is 'ab', wanted the 256 single bytes as ranks 0..255",
        ),
        (SINGLE_BYTES[:-9], "wanted at least the 256 single bytes as ranks, got 255 ranks"),
        (b"", "wanted at least the 256 single bytes as ranks, got 0 ranks"),
    ],
)
def test_a_broken_tiktoken_model_is_refused(tmp_path, content, message):
    BYTES.save(tmp_path)
    (tmp_path / RANKS_FILE).write_bytes(content)
    with pytest.raises(ValueError) as error:
        Tokenizer.from_folder(tmp_path)
    assert str(error.value) == f"{tmp_path / RANKS_FILE}: {message}"


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"256": None, "512": {"content": "[BOS]"}},
            "id 512 is none of 256..511, the 256 ids behind the 256 ranks of tiktoken.model",
        ),
        ({"259": None}, "<|open|> is missing, wanted it at id 259"),
        ({"259": {"content": "<|sep|>"}}, "<|sep|> is id 259 and id 261, wanted one"),
        ({"259": {"content": "<|sep|>"}, "261": {"content": "<|open|>"}}, "<|open|> is id 261, wanted 259"),
        ({"300": {"content": ""}}, 'id 300 wants a content string, got {"content": ""}'),
        ({"300": "x"}, 'id 300 wants a content string, got "x"'),
        ({"300": {"content": "x", "special": "no"}}, 'id 300 wants special true or false, got "no"'),
    ],
)
def test_a_tokenizer_config_that_contradicts_is_refused(tmp_path, changes, message):
    BYTES.save(tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    added = config["added_tokens_decoder"] | changes
    config["added_tokens_decoder"] = {key: token for key, token in added.items() if token is not None}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(ValueError) as error:
        Tokenizer.from_folder(tmp_path)
    assert str(error.value) == f"{tmp_path / CONFIG_FILE}: added_tokens_decoder: {message}"


@pytest.mark.parametrize("num_ranks", [1199, 1201])
def test_a_tokenizer_config_of_another_rank_count_is_refused(tmp_path, num_ranks):
    TOKENIZER.save(tmp_path)
    ranks = [*TOKENIZER.vocabulary.ranks, b"\xff\xff"][:num_ranks]
    (tmp_path / RANKS_FILE).write_bytes(b"".join(line(token, rank) for rank, token in enumerate(ranks)))
    with pytest.raises(ValueError, match=rf"id 1(200|455) is none of {num_ranks}\.\.{num_ranks + 255}, the 256 ids"):
        Tokenizer.from_folder(tmp_path)


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tiktoken\.model: cannot be read: No such file or directory$"):
        Tokenizer.from_folder(tmp_path)
    BYTES.save(tmp_path)
    config_path = tmp_path / CONFIG_FILE
    for content, message in (
        (b"{", "not a JSON file: Expecting property name"),
        (b'"\xff"', "not a JSON file: 'utf-8' codec can't decode"),
        (b"[]", "wanted a JSON object, got list"),
        (b"{}", "added_tokens_decoder is missing, wanted the control strings by id"),
    ):
        config_path.write_bytes(content)
        with pytest.raises(ValueError) as error:
            Tokenizer.from_folder(tmp_path)
        assert str(error.value).startswith(f"{config_path}: {message}")
    config_path.unlink()
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: cannot be read: No such file or directory$"):
        Tokenizer.from_folder(tmp_path)
