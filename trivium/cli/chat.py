"""trivium chat: talk to a model, which may call the tools that it was taught."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trivium.cli.command import SHIPPED, check_finished, dtype_on
from trivium.cli.options import Device, TalkingDtype, TalkingRun

if TYPE_CHECKING:
    from rich.console import Console

    from trivium.api import Model
    from trivium.chat.message import Conversation, Message

HELP = "/new begins again, /effort low|high|max, /quit or Ctrl-D ends, Ctrl-C stops an answer"
ABOUT_SHIPPED = (
    "A small K3, taught with generated dialogues alone: it calls tools for arithmetic, units, dates and a directory, reads "
    "their results out, and declines what no tool does. It is no assistant: it knows nothing of the world, it has never "
    "seen a tool fail, and what is asked in other ways than it has learned it may get wrong. Its talks had up to five "
    "questions: after some, begin anew."
)
MAX_MESSAGES = 6  # of the assistant, on one question


class EffortChoice(StrEnum):
    low = "low"
    high = "high"
    max = "max"


def chat(
    run: TalkingRun = SHIPPED,
    effort: Annotated[
        EffortChoice | None, typer.Option(help="how long it thinks, else high", show_default=False)
    ] = None,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="whether it thinks at all")] = True,
    tools: Annotated[bool, typer.Option("--tools/--no-tools", help="whether it may call the built-in tools")] = True,
    system: Annotated[str | None, typer.Option(help="a system message to begin with")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token")] = 0.0,
    top_p: Annotated[float, typer.Option(help="sample from the likeliest tokens that hold this share")] = 0.95,
    max_tokens: Annotated[int, typer.Option(min=1, help="at most so many tokens an answer")] = 1024,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same answers; else one is drawn")] = None,
    show_tokens: Annotated[
        bool, typer.Option("--show-tokens", help="print each prompt and answer token by token, in colour")
    ] = False,
    device: Device = "cpu",
    dtype: TalkingDtype = None,
) -> None:
    """Talk to a model. It runs its tools itself: arithmetic, units, dates, and a small directory of people.

    What is piped in is answered line by line.
    """
    from rich.console import Console

    from trivium.api import load
    from trivium.chat.message import Conversation, Options
    from trivium.chat.message import system as system_message
    from trivium.envs.synth.tools import TOOLS, office
    from trivium.model.sample import check_sampling

    if effort is not None and not thinking:
        raise ValueError(f"effort: {effort} is given, and with --no-thinking nothing is thought")
    check_finished(run)
    _check_taught(run)
    check_sampling(temperature, top_p)
    model = load(run, device=device, dtype=dtype_on(device, dtype))
    if model.tokenizer is None:
        raise ValueError(f"{run}: has no tokenizer, so it cannot be talked to")
    console = Console(highlight=False, soft_wrap=True, emoji=False)  # what the model says is printed as it says it
    asked = sys.stdin.isatty()
    toolbox = office()
    if asked:
        console.print(
            _welcome(run, model, [person.name for person in toolbox.people], tools), markup=False, style="dim"
        )
    start = Conversation(
        messages=() if system is None else (system_message(system),),
        options=Options(
            tools=tuple(TOOLS.values()) if tools else (),
            thinking=thinking,
            effort=(effort or EffortChoice.high).value if thinking else None,
        ),
    )
    talk = Talk(
        model,
        start,
        toolbox.run,
        console,
        how={"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens},
        seed=seed,
        show_tokens=show_tokens,
    )
    while True:
        try:
            line = console.input("[bold]you:[/bold] ") if asked else next(iter(sys.stdin.readline, ""))
        except (EOFError, StopIteration):
            return
        except KeyboardInterrupt:
            console.print()
            return
        if not line.strip():
            continue
        if asked and line.startswith("/"):
            if line.strip() == "/quit":
                return
            _command(line.strip(), talk, console)
            continue
        try:
            talk.say(line.rstrip("\n"))
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="dim")


class Talk:
    """A conversation under way. `run_tool` is given a tool's name and arguments and gives its answer."""

    def __init__(
        self,
        model: Model,
        start: Conversation,
        run_tool: Callable[[str, dict[str, object]], str],
        console: Console,
        *,
        how: dict[str, float | int],
        seed: int | None = None,
        show_tokens: bool = False,
    ) -> None:
        from trivium.chat.render import Renderer

        assert model.tokenizer is not None
        self.start = self.conversation = start
        self._model, self._run_tool, self._console = model, run_tool, console
        self._renderer = Renderer(model.tokenizer)
        self._how, self._seed, self._show_tokens = how, seed, show_tokens
        self._num_answers = 0

    def begin_again(self) -> None:
        self.conversation = self.start

    def say(self, text: str) -> str:
        """The answer to what the user says, printed as it comes; tools are run on the way.

        What was said is kept only with a whole answer, so that one that was stopped leaves the conversation as it was.
        """
        from trivium.chat.message import tool_result, user

        conversation = _with(self.conversation, user(text))
        for _ in range(MAX_MESSAGES):
            asked = conversation
            answer = self._answer(asked)
            calls = [call for call in answer.calls if call.executable]
            if answer.finish_reason != "tool_calls" or not calls:
                break
            results: list[Message] = []
            for call in calls:
                result = self._run_tool(call.name, call.arguments or {})
                self._console.print(f"  {call.name}{call.text} -> {result}", style="cyan", markup=False)
                results.append(tool_result(result, call_id=call.id))
            conversation = _with(conversation, answer.message(), *results)
        else:
            self._console.print("(no more tools: it called them without an end)", style="dim")
            conversation = asked  # its last words are kept, without the calls that led nowhere
        message = replace(answer.message(), tool_calls=())
        self.conversation = _with(conversation, message)
        return message.text

    def _answer(self, conversation: Conversation):  # type: ignore[no-untyped-def]
        from trivium.chat.events import CallEnd, Flaw, ReasoningText, ResponseText, fold
        from trivium.chat.parse import Parser

        prompt = self._renderer.render(conversation)
        assert prompt.channel is not None and self._model.tokenizer is not None
        parser = Parser(self._model.tokenizer, channel=prompt.channel, tools=conversation.tools)
        seed = None if self._seed is None else self._seed + self._num_answers
        self._num_answers += 1
        if self._show_tokens:
            self._show_prompt(conversation)
        seen, styles = [], {ReasoningText: "dim italic", ResponseText: "bold green"}
        last = None
        for piece in self._model.stream(list(prompt.ids), seed=seed, **self._how):
            events = [event for id_ in piece.ids for event in parser.push(id_)]
            if piece.finish_reason is not None and not parser.finished:
                events += parser.finish("stop" if piece.finish_reason == "stop" else "length")
            if self._show_tokens:
                self._show_ids(piece.ids)
            for event in events:
                seen.append(event)
                if self._show_tokens:
                    continue
                if isinstance(event, ReasoningText | ResponseText):
                    if last not in (None, type(event)):
                        self._console.print()
                    last = type(event)
                    self._console.print(event.text, end="", style=styles[last], markup=False)
                elif isinstance(event, CallEnd) and event.problem:
                    self._console.print(f"\n(a call that is not made: {event.problem})", style="red", markup=False)
                elif isinstance(event, Flaw):
                    self._console.print(f"\n(stray {event.kind}: {event.text!r})", style="red", markup=False)
            if parser.finished:  # by [EOT] too, of which the model's loop knows nothing
                break
        if last is not None or self._show_tokens:
            self._console.print()
        answer = fold(seen)
        if answer.finish_reason == "length":
            self._console.print("(cut: it reached the most tokens an answer may have)", style="red")
        return answer

    def _show_prompt(self, conversation: Conversation) -> None:
        from trivium.chat.render import render, shown
        from trivium.cli.tokens import coloured

        segments = render(conversation).segments
        self._console.print(
            coloured([(shown(segment), self._renderer.ids_of(segment)) for segment in segments], self._renderer), end=""
        )

    def _show_ids(self, ids: tuple[int, ...]) -> None:
        from rich.text import Text

        from trivium.cli.tokens import CONTROL, pieces

        for id_ in ids:
            text = Text()
            if id_ >= self._renderer.tokenizer.num_ranks:
                text.append(self._renderer.tokenizer.decode([id_]), CONTROL)
            else:
                pieces(text, [id_], self._renderer)
            self._console.print(text, end="")


def _with(conversation: Conversation, *messages: Message) -> Conversation:
    return replace(conversation, messages=(*conversation.messages, *messages))


def _command(line: str, talk: Talk, console: Console) -> None:
    name, _, value = line.partition(" ")
    if name == "/new":
        talk.begin_again()
        console.print("(a new conversation)", style="dim")
    elif name == "/effort" and value in EffortChoice.__members__:
        for held in ("start", "conversation"):
            conversation = getattr(talk, held)
            setattr(
                talk, held, replace(conversation, options=replace(conversation.options, thinking=True, effort=value))
            )
        console.print(f"(effort {value})", style="dim")
    else:
        console.print(HELP, style="dim", markup=False)


def _check_taught(folder: Path) -> None:
    """Raises ValueError for a run that was never taught the format: it would write noise between marks."""
    from trivium.train.run_folder import RUN, read_run

    where = folder if folder.is_dir() else folder.parent
    if (where / RUN).exists() and read_run(where).get("chat_format") is None:
        raise ValueError(f"{folder}: this run was not taught to talk; teach it: trivium sft {folder}")


def _welcome(folder: Path, model: Model, people: list[str], tools: bool) -> str:
    from trivium.cost.params import count_params

    size = f"{count_params(model.config).total / 1e6:,.1f} million parameters"
    lines = [f"{folder.name}, {size}"]
    if folder == SHIPPED:
        lines.append(ABOUT_SHIPPED)
    if tools:
        lines.append(f"Try: What is 372 times 48? | How many feet are 12 meters? | Which room has {people[0]}?")
        lines.append(f"People: {', '.join(people)}")
    return "\n".join([*lines, HELP])
