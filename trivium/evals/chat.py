"""Chat: how well a model talks and calls tools, on dialogues in which code knows the right calls and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from trivium.chat.events import Answer
from trivium.chat.message import Conversation, Effort, tool_result
from trivium.chat.parse import parse
from trivium.chat.render import Renderer
from trivium.chat.tokenizer import Tokenizer
from trivium.envs.grade import says
from trivium.envs.synth.dialogue import EFFORTS, KINDS, NO_CALLS, Dialogue, dialogue
from trivium.evals.continuation import answers
from trivium.model.kimi_k3 import KimiK3

WITH_TOOLS = tuple(kind for kind in KINDS if kind not in NO_CALLS)
MAX_MESSAGES = 4  # of the assistant, on one question
MAX_TOKENS = 320  # of one of them
_BATCH = 48


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a model made of a dialogue: its answers to the last question, and what was right.

    `well_formed`: each parses as XTML without a flaw, every call of it is whole, and it ends by itself; whether the tools
    that it calls are declared is another matter. `calls_right`: the right tools in the right order with the very
    arguments. `answer_right`: the last one says what it should.
    """

    kind: str
    answers: tuple[Answer, ...]
    well_formed: bool
    calls_right: bool
    answer_right: bool

    @property
    def num_tokens(self) -> int:
        return sum(answer.usage.num_completion for answer in self.answers)


@dataclass(frozen=True, kw_only=True)
class Score:
    """Shares of `num` dialogues, and the mean number of tokens that were written on one."""

    num: int
    well_formed: float
    calls_right: float
    answer_right: float
    tokens: float


@dataclass(frozen=True, kw_only=True)
class ChatReport:
    """Scores by kind, over the kinds with tools, over those without, and over all; mean tokens of each effort."""

    scores: Mapping[str, Score]
    effort_tokens: Mapping[str, float]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ChatReport:
        """What `to_json` gave. Raises ValueError for anything else."""
        try:
            scores = {name: Score(**score) for name, score in content["scores"].items()}
            return cls(scores=scores, effort_tokens=content["effort_tokens"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a report of talks: wanted scores and effort_tokens, got {content!r:.200}") from error

    def to_json(self) -> dict[str, Any]:
        return {
            "scores": {name: asdict(score) for name, score in self.scores.items()},
            "effort_tokens": dict(self.effort_tokens),
        }


def play(
    model: KimiK3,
    tokenizer: Tokenizer,
    dialogues: Sequence[Dialogue],
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """The model answers the last question of each, its calls are run, and their results are given back to it.

    An answer with a call that cannot be executed is its last; so is the fourth.
    """
    outcomes: list[Outcome] = []
    for start in range(0, len(dialogues), _BATCH):
        batch = dialogues[start : start + _BATCH]
        outcomes += _play(model, tokenizer, batch, temperature=temperature, top_p=top_p, seed=seed + start)
        say(f"{len(outcomes)} of {len(dialogues)} dialogues")
    return outcomes


def report(outcomes: Iterable[Outcome], by_effort: Mapping[str, Sequence[Outcome]]) -> ChatReport:
    """The shares; `by_effort` are outcomes of the same questions at each effort."""
    by_kind: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_kind.setdefault(outcome.kind, []).append(outcome)
    every = [outcome for kind in by_kind.values() for outcome in kind]
    groups = {kind: by_kind[kind] for kind in KINDS if kind in by_kind}
    groups["with tools"] = [outcome for outcome in every if outcome.kind in WITH_TOOLS]
    groups["without tools"] = [outcome for outcome in every if outcome.kind in NO_CALLS]
    groups["all"] = every
    return ChatReport(
        scores={name: _score(group) for name, group in groups.items() if group},
        effort_tokens={effort: _score(group).tokens for effort, group in by_effort.items()},
    )


def evaluate(
    model: KimiK3,
    tokenizer: Tokenizer,
    *,
    num_dialogues: int = 400,
    num_efforts: int = 40,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> ChatReport:
    """The report on held-out dialogues: other phrasings and other numbers than any that is learned from."""
    heldout = [dialogue(seed * 1_000_003 + number, heldout=True) for number in range(num_dialogues)]
    outcomes = play(model, tokenizer, heldout, say=say)
    by_effort: dict[Effort, list[Outcome]] = {}
    for effort in EFFORTS:
        same = [dialogue(-1 - number, heldout=True, effort=effort) for number in range(num_efforts)]
        by_effort[effort] = play(model, tokenizer, same)
        say(f"effort {effort}")
    return report(outcomes, by_effort)


def table(reports: Mapping[str, ChatReport]) -> Table:
    """Several models side by side."""
    shown = Table(title="held-out dialogues: % well-formed, right calls, right answers")
    shown.add_column("")
    for name in reports:
        shown.add_column(name, justify="right")
    there = {row for found in reports.values() for row in found.scores}
    for row in (row for row in (*KINDS, "with tools", "without tools", "all") if row in there):
        cells = []
        for found in reports.values():
            score = found.scores.get(row)
            shares = () if score is None else (score.well_formed, score.calls_right, score.answer_right)
            cells.append(" ".join(f"{100 * share:5.1f}" for share in shares) or "-")
        shown.add_row(row, *cells)
    shown.add_row("tokens: " + ", ".join(EFFORTS), *(_effort_cell(found) for found in reports.values()))
    return shown


def _effort_cell(found: ChatReport) -> str:
    return " ".join(f"{found.effort_tokens[effort]:.0f}" for effort in EFFORTS if effort in found.effort_tokens) or "-"


def _play(
    model: KimiK3, tokenizer: Tokenizer, dialogues: Sequence[Dialogue], *, temperature: float, top_p: float, seed: int
) -> list[Outcome]:
    renderer = Renderer(tokenizer)
    conversations: list[Conversation] = [each.prompt for each in dialogues]
    given: list[list[Answer]] = [[] for _ in dialogues]
    well_formed = [True] * len(dialogues)
    alive = list(range(len(dialogues)))
    for turn in range(MAX_MESSAGES):
        prompts = [renderer.render(conversations[index]) for index in alive]
        written = answers(
            model,
            [prompt.ids for prompt in prompts],
            max_tokens=MAX_TOKENS,
            end_id=tokenizer.eos_id,
            temperature=temperature,
            top_p=top_p,
            seed=seed + turn,
        )
        going_on = []
        for index, prompt, ids in zip(alive, prompts, written, strict=True):
            assert prompt.channel is not None
            conversation = conversations[index]
            answer = parse(ids, tokenizer, channel=prompt.channel, tools=conversation.tools)
            given[index].append(answer)
            well_formed[index] &= _well_formed(parse(ids, tokenizer, channel=prompt.channel, tools=None))
            if answer.calls and all(call.executable for call in answer.calls) and answer.finish_reason == "tool_calls":
                conversations[index] = replace(
                    conversation, messages=(*conversation.messages, *_with_results(dialogues[index], answer))
                )
                going_on.append(index)
        alive = going_on
        if not alive:
            break
    return [
        _outcome(each, tuple(said), formed) for each, said, formed in zip(dialogues, given, well_formed, strict=True)
    ]


def _with_results(played: Dialogue, answer: Answer) -> list[Any]:
    results = [
        tool_result(played.toolbox.run(call.name, call.arguments or {}), call_id=call.id) for call in answer.calls
    ]
    return [answer.message(), *results]


def _well_formed(answer: Answer) -> bool:
    ended = answer.finish_reason in ("stop", "tool_calls")
    return ended and not answer.flaws and all(call.executable for call in answer.calls)


def _outcome(played: Dialogue, given: tuple[Answer, ...], well_formed: bool) -> Outcome:
    called = [tuple((call.name, call.arguments) for call in answer.calls) for answer in given if answer.calls]
    last = given[-1]
    return Outcome(
        kind=played.turn.kind,
        answers=given,
        well_formed=well_formed,
        calls_right=called == list(played.turn.steps),
        answer_right=not last.calls and all(says(last.text, each) for each in played.turn.answers),
    )


def _score(outcomes: Sequence[Outcome]) -> Score:
    num = len(outcomes)

    def share(name: str) -> float:
        return sum(getattr(outcome, name) for outcome in outcomes) / num

    return Score(
        num=num,
        well_formed=share("well_formed"),
        calls_right=share("calls_right"),
        answer_right=share("answer_right"),
        tokens=share("num_tokens"),
    )
