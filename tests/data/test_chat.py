"""Conversations to tokens: what counts is what the assistant writes, and nothing of what it reads."""

import json
import weakref
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

from tests.talks import ADD, plain, tokenizer_of, with_tool, write_jsonl
from trivium.chat.completions import read_request
from trivium.chat.render import Renderer, render
from trivium.data.chat import (
    build_chat,
    chat_shards,
    chat_stream,
    num_counted,
    open_chat,
    read_conversations,
    split,
    tokens_of,
)
from trivium.data.shards import read_manifest

TOKENIZER = tokenizer_of(300)
OTHER = tokenizer_of(300, num_dialogues=3)  # as many ids, some of them others


def nothing(line):
    pass


def counted_texts(body):
    """The texts of the runs of ids that count."""
    document = tokens_of(read_request(body), Renderer(TOKENIZER))
    assert document.ids.dtype == "int32" and document.counted.dtype == bool
    runs = groupby(zip(document.ids.tolist(), document.counted.tolist(), strict=True), key=lambda pair: pair[1])
    return [TOKENIZER.decode([id_ for id_, _ in run]) for counts, run in runs if counts]


def conversations(*bodies):
    return [read_request(body) for body in bodies]


def texts_of(found):
    return [conversation.messages[0].text for conversation in found]


# --- What counts


def test_of_two_answers_and_a_call_all_that_the_assistant_writes_counts():
    """The opening of its message, with the channel that it begins in, was given to it; what a tool said, too."""
    called = (
        "add<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="add" index="1"<|sep|>'
        '<|open|>argument key="a" type="number"<|sep|>2<|close|>argument<|sep|>'
        '<|open|>argument key="b" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    said = "<|close|>think<|sep|><|open|>response<|sep|>5.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    assert counted_texts(with_tool(2, 3)) == [called, said]


def test_without_thinking_the_answer_begins_in_the_response():
    """What the history says of reasoning is then no part of the conversation."""
    body = {**plain(7), "thinking": {"type": "disabled"}}
    assert counted_texts(body) == ["It is 7.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"]


def test_a_call_that_fell_back_to_text_is_read_and_not_learned():
    body = with_tool(2, 3)
    first = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 2'}}
    body["messages"][1]["tool_calls"].insert(0, first)
    before, behind, last = counted_texts(body)
    assert before.endswith("<|open|>tools<|sep|>") and last.startswith("<|close|>think")
    assert behind.startswith('<|open|>call tool="add" index="2"<|sep|>') and "json" not in before + behind + last


def test_a_control_string_in_the_words_is_words():
    body = plain(7)
    body["messages"][1]["content"] = "<|end_of_msg|>"
    document = tokens_of(read_request(body), Renderer(TOKENIZER))
    counted = document.ids[document.counted].tolist()
    assert counted.count(TOKENIZER.eos_id) == 1 and TOKENIZER.decode(counted).count("<|end_of_msg|>") == 2


def test_a_document_is_the_whole_conversation_and_asks_for_no_answer():
    for body in (plain(7), with_tool(2, 3)):
        ids = tokens_of(read_request(body), Renderer(TOKENIZER)).ids.tolist()
        assert ids == list(Renderer(TOKENIZER).render(read_request(body), answer=False).ids)
        assert ids[0] == TOKENIZER.special_ids["<|open|>"] and ids[-1] == TOKENIZER.eos_id


def test_a_stream_holds_one_document_a_conversation():
    found = conversations(plain(7), with_tool(2, 3), plain(8))
    stream = chat_stream(found, TOKENIZER)
    documents = [tokens_of(conversation, Renderer(TOKENIZER)) for conversation in found]
    assert stream.starts.tolist() == [0, *torch.tensor([len(ids) for ids, _ in documents]).cumsum(0).tolist()]
    assert stream.ids_T.tolist() == [id_ for ids, _ in documents for id_ in ids.tolist()]
    assert stream.weight_T.tolist() == [flag for _, flags in documents for flag in flags.tolist()]
    # Bytes of the words and the headers that count, control ids stand for none.
    texts = ["".join(counted_texts(body)) for body in (plain(7), with_tool(2, 3), plain(8))]
    marks = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    assert stream.num_bytes == sum(len(text) - sum(text.count(mark) * len(mark) for mark in marks) for text in texts)
    assert len(chat_stream([], TOKENIZER).ids_T) == 0


# --- A file of them


def test_a_file_is_read_line_by_line_and_empty_lines_are_passed_over(tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(f"\n{json.dumps(plain(1))}\n  \n{json.dumps(with_tool(2, 3))}")
    assert list(read_conversations(path)) == conversations(plain(1), with_tool(2, 3))


USER = {"role": "user", "content": "x"}
ASSISTANT = {"role": "assistant", "content": "y"}
PICTURE = {"type": "image_url", "image_url": {"url": "u", "width": 9, "height": 9}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "too deep"),
        ("[]", "wanted an object with messages, got list"),
        ("{}", "messages: missing"),
        (json.dumps({"messages": [USER]}), "messages: the assistant says nothing, so there is nothing to learn"),
        (
            json.dumps({"messages": [{"role": "user", "content": [PICTURE]}, ASSISTANT]}),
            "messages: pictures cannot be trained on",
        ),
        (
            json.dumps({"messages": [USER, ASSISTANT, USER, {**ASSISTANT, "partial": True}]}),
            "messages: the last answer is partial, wanted whole ones",
        ),
        (json.dumps({"messages": [USER, {**ASSISTANT, "surprise": 1}]}), r"messages\[1\]\.surprise: unknown here"),
        (
            json.dumps({"messages": [USER, ASSISTANT], "tools": [ADD], "tool_choice": "required"}),
            "tool_choice, response_format: are of one answer",
        ),
        (
            json.dumps({"messages": [USER, ASSISTANT], "response_format": {"type": "json_object"}}),
            "tool_choice, response_format: are of one answer",
        ),
    ],
)
def test_what_is_no_conversation_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "talk.jsonl"
    path.write_text(f"{json.dumps(plain(1))}\n\n{line}\n{json.dumps(plain(2))}\n")
    with pytest.raises(ValueError, match=f"^{path}: line 3: {message}"):
        list(read_conversations(path))


def test_what_is_no_file_of_text_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"^{tmp_path}/none: cannot be read: No such file"):
        list(read_conversations(tmp_path / "none"))
    with pytest.raises(ValueError, match=f"^{tmp_path}: cannot be read: Is a directory"):
        list(read_conversations(tmp_path))
    (tmp_path / "latin").write_bytes(b'{"messages": "\xff"}')
    with pytest.raises(ValueError, match=f"^{tmp_path}/latin: is not UTF-8: "):
        list(read_conversations(tmp_path / "latin"))


# --- What is held out


@pytest.mark.parametrize(("num", "want"), [(2, 1), (9, 1), (30, 2), (50, 2), (51, 3)])  # 1.5 and 2.5 go to the even
def test_one_in_twenty_is_held_out_and_at_least_one(num, want):
    found = conversations(*(plain(number) for number in range(num)))
    train, heldout = split(found)
    assert (len(train), len(heldout)) == (num - want, want)
    assert sorted(texts_of([*train, *heldout])) == sorted(texts_of(found))


def test_no_more_than_200_are_held_out():
    train, heldout = split(conversations(*(plain(number) for number in range(230))), fraction=0.95)
    assert (len(train), len(heldout)) == (30, 200)


def test_the_split_depends_on_what_is_said_and_not_on_its_place():
    bodies = [plain(number) for number in range(40)]
    train, heldout = split(conversations(*bodies))
    assert split(conversations(*bodies[::-1])) == (train, heldout)
    _, more = split(conversations(*bodies, with_tool(1, 2)))
    assert len(more) == 2 and set(texts_of(more)) <= {*texts_of(heldout), "1 + 2?"}


def test_the_same_conversation_twice_is_on_one_side():
    """Also where it is written down in another way; to learn from it stays twice, to score with once is enough."""
    again = [json.loads(json.dumps(plain(number), sort_keys=True)) for number in range(12)]
    for body in again:
        body["messages"][0]["content"] = [{"type": "text", "text": body["messages"][0]["content"]}]
    train, heldout = split(conversations(*(plain(number) for number in range(12)), *again), fraction=0.4)
    assert len(heldout) == len(set(texts_of(heldout))) == 5 and len(train) == 14
    assert not set(texts_of(train)) & set(texts_of(heldout))


def test_the_same_is_what_is_read_the_same():
    """The id of a call stands in no document, and what was thought does."""
    calls, thoughts = [with_tool(2, 3), with_tool(2, 3)], [plain(1), plain(1)]
    calls[1]["messages"][1]["tool_calls"][0]["id"] = calls[1]["messages"][2]["tool_call_id"] = "another"
    thoughts[1]["messages"][1]["reasoning_content"] = "Something else."
    assert [len(part) for part in split(conversations(*thoughts))] == [1, 1]
    with pytest.raises(ValueError, match="^data: wanted at least 2 different conversations, got 1$"):
        split(conversations(*calls))


def test_with_less_than_two_different_ones_there_is_no_split():
    for bodies, num in (([], 0), ([plain(1)], 1), ([plain(1)] * 5, 1)):
        with pytest.raises(ValueError, match=f"^data: wanted at least 2 different conversations, got {num}$"):
            split(conversations(*bodies))


# --- Shards


@pytest.fixture
def file(tmp_path):
    return write_jsonl(tmp_path / "talk.jsonl", [*(plain(number) for number in range(6)), with_tool(2, 3)])


def test_a_file_becomes_two_folders_of_shards(file, tmp_path):
    said = []
    streams = build_chat(file, TOKENIZER, tmp_path / "out", said.append)
    assert [line.split(" to ")[0] for line in said] == ["tokenizing", "tokenizing"]
    train, heldout = split(list(read_conversations(file)))
    for got, wanted in ((streams.train, train), (streams.heldout, heldout)):
        want = chat_stream(wanted, TOKENIZER)
        assert got.ids_T.tolist() == want.ids_T.tolist() and got.starts.tolist() == want.starts.tolist()
        assert got.weight_T.tolist() == want.weight_T.tolist() and got.num_bytes == want.num_bytes
        assert got.num_bytes_W.tolist() == want.num_bytes_W.tolist()
    assert streams.folder == tmp_path / "out" / "tokens"
    assert num_counted(streams.train) == int(streams.train.weight_T.sum()) > 0
    manifest = read_manifest(streams.folder)
    assert manifest.first_id == TOKENIZER.special_ids["<|open|>"] and manifest.num_documents == 6
    again = open_chat(tmp_path / "out", TOKENIZER)
    assert again.train.manifest == streams.train.manifest and again.folder == streams.folder
    assert again.heldout.ids_T.tolist() == streams.heldout.ids_T.tolist()


def test_shards_that_are_there_are_used_and_those_of_another_text_or_tokenizer_are_not(file, tmp_path):
    def built(tokenizer):
        said = []
        streams = build_chat(file, tokenizer, tmp_path / "out", said.append)
        return streams, [line.removeprefix(str(tmp_path / "out")) for line in said]

    first, _ = built(TOKENIZER)
    before = (tmp_path / "out" / "tokens" / "tokens-00000.bin").stat()
    _, said = built(TOKENIZER)
    num_heldout = len(first.heldout.ids_T)
    assert said == [
        f"/heldout: {num_heldout:,} tokens are there already",
        f"/tokens: {first.train.manifest.num_tokens:,} tokens are there already",
    ]
    assert (tmp_path / "out" / "tokens" / "tokens-00000.bin").stat().st_mtime_ns == before.st_mtime_ns
    _, said = built(OTHER)
    assert "/tokens: of another tokenizer, written anew" in said
    with file.open("a") as more:
        more.write(json.dumps(plain(77)) + "\n")
    streams, said = built(OTHER)
    assert "/tokens: of another text, written anew" in said
    assert len(streams.train.starts) + len(streams.heldout.starts) - 2 == 8


def test_shards_of_another_rendering_are_made_anew(file, tmp_path, monkeypatch):
    """As a version that renders otherwise would find them: the file is the same, its tokens are not."""
    build_chat(file, TOKENIZER, tmp_path / "out", nothing)
    monkeypatch.setattr(
        "trivium.data.chat.render", lambda *args, **options: SimpleNamespace(text=render(*args, **options).text + "!")
    )
    said = []
    build_chat(file, TOKENIZER, tmp_path / "out", said.append)
    assert sum("of another text, written anew" in line for line in said) == 2


def test_a_damaged_shard_is_made_anew(file, tmp_path):
    streams = build_chat(file, TOKENIZER, tmp_path / "out", nothing)
    want = streams.train.weight_T.tolist()
    path = streams.folder / "tokens-00000.counted"
    path.write_bytes(bytes([1]) + path.read_bytes()[1:])
    said = []
    again = build_chat(file, TOKENIZER, tmp_path / "out", said.append)
    assert any("this is not what was written; written anew" in line for line in said)
    assert again.train.weight_T.tolist() == want


def test_a_line_that_is_none_leaves_what_was_there(file, tmp_path):
    build_chat(file, TOKENIZER, tmp_path / "out", nothing)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with file.open("a") as more:
        more.write("no conversation\n")
    with pytest.raises(ValueError, match=f"^{file}: line 8: "):
        build_chat(file, TOKENIZER, tmp_path / "out", nothing)
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}


def test_shards_of_another_tokenizer_are_refused(file, tmp_path):
    build_chat(file, TOKENIZER, tmp_path / "out", nothing)
    with pytest.raises(ValueError, match=f"^{tmp_path}/out/tokens: made with another tokenizer than this model's"):
        open_chat(tmp_path / "out", OTHER)


def test_two_folders_of_two_texts_are_no_split_of_one(file, tmp_path):
    """As a kill between the two writes leaves them: what is learned from may be what is scored with."""
    build_chat(file, TOKENIZER, tmp_path / "out", nothing)
    chat_shards(conversations(plain(3)), TOKENIZER, tmp_path / "out" / "heldout", text="other", say=nothing)
    with pytest.raises(ValueError, match=f"^{tmp_path}/out: tokens and heldout were made of other texts; make them"):
        open_chat(tmp_path / "out", TOKENIZER)


@pytest.mark.parametrize("name", ["tokens", "heldout"])
def test_a_folder_whose_tokens_are_damaged_is_refused(file, tmp_path, name):
    build_chat(file, TOKENIZER, tmp_path / "out", nothing)
    path = tmp_path / "out" / name / "tokens-00000.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    with pytest.raises(ValueError, match=f"^{path}: wanted the SHA-256 .*: this is not what was written$"):
        open_chat(tmp_path / "out", TOKENIZER)


@pytest.mark.parametrize("name", ["tokens", "heldout"])
def test_a_folder_that_is_not_whole_is_refused(file, tmp_path, name):
    build_chat(file, TOKENIZER, tmp_path / "out", nothing)
    (tmp_path / "out" / name / "manifest.json").unlink()
    with pytest.raises(ValueError, match=f"^{tmp_path}/out/{name}/manifest.json: cannot be read: "):
        open_chat(tmp_path / "out", TOKENIZER)


def test_conversations_come_one_at_a_time(tmp_path):
    """Twelve thousand generated ones are never held together."""
    seen, most = [], 0

    def one_by_one():
        nonlocal most
        for number in range(9):
            conversation = read_request(plain(number))
            seen.append(weakref.ref(conversation))
            most = max(most, sum(held() is not None for held in seen))
            yield conversation
            del conversation

    shards = chat_shards(one_by_one(), TOKENIZER, tmp_path, text="x", say=nothing)
    assert shards.manifest.num_documents == len(seen) == 9
    assert most <= 2  # this one, and the one before it
