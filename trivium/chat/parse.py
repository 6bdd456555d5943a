"""Parse: the token ids of a model's answer to events, id by id.

A marker is made of control ids, so the text of a channel is never held back for one: it goes out with the id that
completes its last character. Whatever the ids say, nothing is raised and no text is dropped: what has no place in an
answer is a `Flaw`, and a call that is not whole says its problem.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trivium.chat.events import (
    Answer,
    CallArguments,
    CallStart,
    Event,
    Finish,
    Flaw,
    FlawKind,
    ReasoningText,
    ResponseText,
    Usage,
    fold,
)
from trivium.chat.message import MAX_NAME_CHARS, Tool
from trivium.chat.render import Channel, Mark
from trivium.chat.tokenizer import Tokenizer

MAX_HEADER_BYTES = 4096  # a name of 256 characters is at most 1,280: four bytes each, or five of &amp;

EndReason = Literal["stop", "length", "abort"]
# Where text that is pushed would go. between: in the message, and in none of its elements. nameless: in a call without
# a tool. closed: behind the message, and the end id has not come.
_Place = Literal["think", "response", "between", "tools", "call", "nameless", "closed"]
_CHANNELS: dict[str, _Place] = {"think": "think", "response": "response", "tools": "tools"}
_LOST_IN: dict[_Place, FlawKind] = {"nameless": "call", "closed": "end"}


def new_call_id() -> str:
    """An id of a call that no other call has: 96 random bits."""
    return f"call_{secrets.token_hex(12)}"


def parse(
    ids: Iterable[int],
    tokenizer: Tokenizer,
    *,
    channel: Channel,
    tools: Sequence[Tool] | None = (),
    stop: Sequence[str] = (),
    new_id: Callable[[], str] = new_call_id,
    reason: EndReason = "length",
) -> Answer:
    """The answer that the ids are, up to its end. As `events`, taken together."""
    return fold(events(ids, tokenizer, channel=channel, tools=tools, stop=stop, new_id=new_id, reason=reason))


def events(
    ids: Iterable[int],
    tokenizer: Tokenizer,
    *,
    channel: Channel,
    tools: Sequence[Tool] | None = (),
    stop: Sequence[str] = (),
    new_id: Callable[[], str] = new_call_id,
    reason: EndReason = "length",
) -> Iterator[Event]:
    """The events of an answer; no id is pulled before its events are wanted, and none behind the end.

    `reason` says why the ids are over where they have no end.
    """
    parser = Parser(tokenizer, channel=channel, tools=tools, stop=stop, new_id=new_id)
    for token_id in ids:
        yield from parser.push(token_id)
        if parser.finished:
            return
    yield from parser.finish(reason)


class Parser:
    """Ids of one answer to events. The answer goes on behind a prompt that opened `channel`.

    `tools` are those that may be called; None: any. `stop`: the answer is over before the first of these strings in its
    response text; in reasoning and arguments they are text like any other. Raises ValueError for an empty stop string,
    and in `push` for an id that is out of range, and for nothing else.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        channel: Channel,
        tools: Sequence[Tool] | None = (),
        stop: Sequence[str] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop: wanted texts that are not empty, got {stop!r}")
        ids = tokenizer.special_ids
        self._open_id, self._close_id, self._sep_id = (ids[mark.value] for mark in (Mark.OPEN, Mark.CLOSE, Mark.SEP))
        self._end_ids = {ids[name] for name in (Mark.END.value, "[EOS]", "[EOT]") if name in ids}
        self._num_ranks = tokenizer.num_ranks
        self._bytes_of = tokenizer.vocabulary.bytes_of
        self._decoder = tokenizer.decoder()
        self._tools = None if tools is None else {tool.name: tool for tool in tools}
        self._stops = _Stops(stop)
        self._new_id = new_id

        self.finished = False
        self._place: _Place = channel
        self._responded = channel == "response"  # a response was opened
        self._header: _Header | None = None
        self._call: CallArguments | None = None
        self._lost: list[str] = []  # text for one flaw, until the next control id
        self._lost_kind: FlawKind = "text"
        self._blank: list[str] = []  # whitespace behind think, held until it is known what follows
        self._loose = False  # words were said outside of any channel
        self._num_calls = 0
        self._any_executable = False
        self._num_ids = 0
        self._num_reasoning = 0

    @property
    def channel(self) -> Channel | None:
        """The channel that is open."""
        return self._place if self._place in ("think", "response") and not self.finished else None

    def push(self, token_id: int) -> list[Event]:
        """What this id completes, often nothing. Behind the end each id is a flaw."""
        out: list[Event] = []
        if self.finished:
            out.append(Flaw("end", self._bytes_of(token_id).decode("utf-8", errors="replace")))
        elif not 0 <= token_id < self._num_ranks:
            self._control(token_id, self._bytes_of(token_id).decode("utf-8"), out)
        elif self._header is not None:
            self._num_ids += 1
            self._header_text(self._header, token_id, out)
        else:
            self._num_ids += 1
            if self._place == "think":
                self._num_reasoning += 1
            text = self._decoder.push(token_id)
            if text:
                self._text(text, out)
        return out

    def finish(self, reason: EndReason) -> list[Event]:
        """What is still held, where the ids are over without an end id. Nothing where the answer had its end."""
        if reason not in ("stop", "length", "abort"):
            raise ValueError(f"finish: wanted stop, length or abort, got {reason!r}")
        out: list[Event] = []
        if not self.finished:
            self._flush(out)
        if not self.finished:  # by a stop string that the cut character completed
            self._cut_header(out)
            self._end(reason, out)
        return out

    # --- Text ---

    def _text(self, text: str, out: list[Event]) -> None:
        place, call = self._place, self._call
        if place == "think":
            out.append(ReasoningText(text))
        elif place == "between" and not self._responded and not self._loose and not text.strip():
            self._blank.append(text)  # it is an answer's beginning only if words follow
        elif place == "response" or (place == "between" and not self._responded):
            if place == "between":
                text, self._loose = "".join([*self._blank, text]), True
                self._blank.clear()
            shown, stopped = self._stops.push(text)
            if shown:
                out.append(ResponseText(shown))
            if stopped:
                self._end("stop", out, by_string=True)
        elif call is None or call.value is None or call.value.mode == "lost":
            self._lose(_LOST_IN.get(place, "text"), text)
            if call is not None and call.value is None and text.strip():
                call.spoil("text between arguments")  # it may be the end of one that a close in its own text cut
        else:
            call.push(text, out)

    def _flush(self, out: list[Event]) -> None:
        """A character that a control id or the end cuts is U+FFFD."""
        text = self._decoder.flush()
        if text and self._header is not None:
            self._lose("header", text)
        elif text:
            self._text(text, out)

    def _lose(self, kind: FlawKind, text: str) -> None:
        self._lost_kind = kind
        self._lost.append(text)

    def _release(self, out: list[Event]) -> None:
        if self._blank:
            self._lose("text", "".join(self._blank))
            self._blank.clear()
        text = "".join(self._lost)
        self._lost.clear()
        if text:
            out.append(Flaw(self._lost_kind, text))

    def _spoil(self, problem: str) -> None:
        if self._call is not None:
            self._call.spoil(problem)

    # --- Control ids and headers: from OPEN or CLOSE up to SEP, or to the next OPEN, CLOSE or end ---

    def _control(self, token_id: int, name: str, out: list[Event]) -> None:
        self._flush(out)
        if self.finished:
            out.append(Flaw("end", name))
            return
        self._num_ids += 1
        header = self._header
        if header is None:
            self._release(out)
        if token_id in (self._open_id, self._close_id):
            self._cut_header(out)
            self._header = _Header(opens=token_id == self._open_id, mark=name)
        elif token_id in self._end_ids:
            self._cut_header(out)
            self._end("stop", out)
        elif header is None:
            self._flaw("marker" if token_id == self._sep_id else "control", name, out)
        elif token_id == self._sep_id:
            self._close_header(header, name, out)
        else:
            self._break_header(header)
            self._lose("header", self._decoder.flush() + name)

    def _header_text(self, header: _Header, token_id: int, out: list[Event]) -> None:
        if header.broken:
            self._lose("header", self._decoder.push(token_id))
            return
        header.ids.append(token_id)
        header.content += self._bytes_of(token_id)
        text = header.content.decode("utf-8", errors="ignore")
        if _begins_header(text, header.opens) and len(header.content) <= MAX_HEADER_BYTES:
            return
        if _HAS_ATTRIBUTES.match(text):
            self._break_header(header)
            if len(header.content) > MAX_HEADER_BYTES:
                self._release(out)  # at once; what is left of the header is lost too, and no content
            return
        # A stray mark, or one without its SEP, hides no more than a word: the character that ends that is text again.
        behind = [header.ids.pop()]
        while header.ids and self._bytes_of(behind[0])[0] & 0xC0 == 0x80:
            behind.insert(0, header.ids.pop())
        self._cut_header(out)
        self._num_reasoning += len(behind) if self._place == "think" else 0
        if again := "".join([self._decoder.push(id_) for id_ in behind]):
            self._text(again, out)

    def _break_header(self, header: _Header) -> None:
        if not header.broken:
            header.broken = True
            self._lose("header", header.mark + "".join([self._decoder.push(token_id) for token_id in header.ids]))
            self._spoil("a broken marker")

    def _cut_header(self, out: list[Event]) -> None:
        if self._header is not None:
            self._break_header(self._header)
            self._lose("header", self._decoder.flush())
            self._header = None
        self._release(out)

    def _close_header(self, header: _Header, sep: str, out: list[Event]) -> None:
        try:
            text = b"".join([self._bytes_of(token_id) for token_id in header.ids]).decode("utf-8")
        except UnicodeDecodeError:
            text = ""  # which is no header either
        read = None if header.broken else header_of(text)
        if read is None or (not header.opens and read[1]):  # a close has no attributes
            self._break_header(header)
            self._lose("header", self._decoder.flush() + sep)
            self._header = None
            self._release(out)
            return
        self._header = None
        tag, attributes = read
        marker = header.mark + text + sep
        if self._place == "closed":
            out.append(Flaw("end", marker))
        elif header.opens:
            leading = self._num_ids == len(header.ids) + 2
            self._open(tag, attributes, marker, leading, out)
        else:
            self._close(tag, marker, out)

    def _flaw(self, kind: FlawKind, text: str, out: list[Event]) -> None:
        out.append(Flaw("end" if self._place == "closed" else kind, text))
        self._spoil(f"{text[:60]} has no place")

    # --- Elements ---

    def _open(self, tag: str, attributes: dict[str, str], marker: str, leading: bool, out: list[Event]) -> None:
        call = self._call
        if tag in _CHANNELS and tag != self._place:
            self._move(_CHANNELS[tag], out)
            self._responded |= tag == "response"
        elif tag in _CHANNELS:
            if not leading:  # the prompt opened the channel, and the model may say so again
                self._flaw("marker", marker, out)
        elif tag == "call":
            self._start_call(attributes.get("tool", ""), marker, out)
        elif tag in ("argument", "json") and call is not None:
            call.open(tag, attributes, marker, out)
        elif tag in ("argument", "json") and self._place == "nameless":
            out.append(Flaw("call", marker))
        else:
            if tag == "message":  # another one begins, so this one is over
                self._move("closed", out)
            self._flaw("marker", marker, out)

    def _close(self, tag: str, marker: str, out: list[Event]) -> None:
        place, call = self._place, self._call
        if tag == "message":
            self._move("closed", out)
        elif tag in _CHANNELS and (tag == place or (tag == "tools" and place in ("call", "nameless"))):
            self._move("between", out)
        elif tag == "call" and call is not None:
            self._end_call(call, out, closed=True)
            self._place = "tools"
        elif call is not None and call.value is not None and call.value.tag == tag:
            call.close(out)
        elif place == "nameless" and tag in ("call", "argument", "json"):
            out.append(Flaw("call", marker))
            self._place = "tools" if tag == "call" else place
        else:
            self._flaw("marker", marker, out)

    def _move(self, place: _Place, out: list[Event]) -> None:
        """To another place; what is open ends here."""
        if self._call is not None:
            self._end_call(self._call, out, closed=False)
        held = self._stops.release()
        if held:
            out.append(ResponseText(held))
        self._place = place

    def _start_call(self, name: str, marker: str, out: list[Event]) -> None:
        self._move("call", out)
        if not name:
            self._place = "nameless"
            out.append(Flaw("call", marker))
            return
        tool = self._tools.get(name) if self._tools is not None else None
        self._call = CallArguments(self._num_calls, tool)
        self._num_calls += 1
        out.append(CallStart(self._call.index, self._new_id(), name))
        if self._tools is not None and tool is None:
            self._call.undeclared = f"undeclared tool {name[:60]!r}"
        elif len(name) > MAX_NAME_CHARS:
            self._call.spoil(f"a name of {len(name)} characters, at most {MAX_NAME_CHARS} are allowed")

    def _end_call(self, call: CallArguments, out: list[Event], *, closed: bool) -> None:
        problem = call.end(out, closed=closed)
        self._any_executable |= not problem
        self._call = None

    def _end(self, reason: EndReason, out: list[Event], *, by_string: bool = False) -> None:
        self._move("closed", out)
        calls = reason == "stop" and not by_string and self._any_executable
        usage = Usage(num_completion=self._num_ids, num_reasoning=self._num_reasoning)
        out.append(Finish("tool_calls" if calls else reason, usage))
        self.finished = True


# --- Headers --------------------------------------------------------------------------------------------------------

# What follows these may be of an attribute, and is no content.
_HAS_ATTRIBUTES = re.compile(
    r'(?:(?:call|argument|json)(?![^\s"=])|(?:message|think|response|tools)(?![^\s"=])[^"]*=")'
)
_TAG = re.compile(r"(?:message|think|response|tools|call|argument|json) ")
_BEGUN = re.compile(r'[^\s"=]{0,64}(?<!^)(?: [^\s"=]+="[^"]*")*(?: (?:[^\s"=]+(?:=(?:"[^"]*)?)?)?)?')
_HEADER = re.compile(r'([^\s"=]+)((?: [^\s"=]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([^\s"=]+)="([^"]*)"')


@dataclass
class _Header:
    opens: bool
    mark: str
    ids: list[int] = field(default_factory=list)
    content: bytearray = field(default_factory=bytearray)
    broken: bool = False  # it is a flaw up to its end, and its text is in the flaw already


def _begins_header(text: str, opens: bool) -> bool:
    """Whether a header may begin so. One that closes has a tag alone, and with attributes it is one flaw."""
    return not text or (
        _BEGUN.fullmatch(text) is not None and (opens or " " not in text or _TAG.match(text) is not None)
    )


def header_of(text: str) -> tuple[str, dict[str, str]] | None:
    """Tag and attributes of the text between a mark and SEP; None where it is no header."""
    match = _HEADER.fullmatch(text)
    if match is None:
        return None
    found = _ATTRIBUTE.findall(match[2])
    attributes = {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found}
    return (match[1], attributes) if len(attributes) == len(found) else None


# --- Stop strings ---------------------------------------------------------------------------------------------------


class _Stops:
    """Text up to the first stop string. Of two that end at the same character the longer one counts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""  # the longest end of the text that a stop string could begin with

    def push(self, text: str) -> tuple[str, bool]:
        """What is to be shown of all so far that is not shown yet, and whether a stop string has come."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, False
        text = self._held + text
        ends = [(at + len(stop), -len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, minus_len = min(ends)
            self._held = ""
            return text[: end + minus_len], True
        num_held = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut], False

    def release(self) -> str:
        """What is held, which no stop string began with after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that the stop string begins with, and is longer than."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
