"""`trivium chat`: with a model that says what it is told, and once with one that says anything."""

import io
import json
import sys

import pytest
from rich.console import Console

from tests.talks import answer_ids, scripted, tokenizer_of
from tests.tiny import tiny_config
from trivium import cli
from trivium.api import Model
from trivium.chat.message import Conversation, Options, ToolCall, assistant, system, user
from trivium.chat.render import Renderer
from trivium.chat.transcript import read_transcript
from trivium.cli import chat as chat_file
from trivium.cli import command
from trivium.envs.synth.tools import TOOLS, Toolbox, office
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3

NUM_RANKS = 300
TOKENIZER = tokenizer_of(NUM_RANKS)
RENDERER = Renderer(TOKENIZER)


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(argument) for argument in arguments])
    return exit_.value.code, *capsys.readouterr()


def untaught():
    network = KimiK3(tiny_config(NUM_RANKS))
    initialise_(network, seed=1)
    return Model(network=network, tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that says that it was taught to talk, of a model that never was."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    untaught().save(folder)
    (folder / "run.json").write_text('{"finished": true, "chat_format": "xtml"}')
    return folder


@pytest.fixture
def talk(run, capsys, monkeypatch):
    """(what is printed, the prompts that the model was given with their options) of a talk whose answers are told."""

    def talked(lines, answers, *arguments, typed=False):
        stream = scripted(TOKENIZER, answers)
        monkeypatch.setattr(Model, "stream", lambda model, prompt, **options: stream(prompt, **options))
        if typed:
            monkeypatch.setattr(sys, "stdin", Terminal())
            left = iter(lines)
            monkeypatch.setattr(Console, "input", lambda console, prompt: typed_line(left))
        else:
            monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code, out, err = main(capsys, "chat", run, *arguments)
        assert (code, err) == (0, "")
        return out, stream.prompts

    return talked


class Terminal(io.StringIO):
    def isatty(self):
        return True


def typed_line(left):
    line = next(left, None)
    if line is None:
        raise EOFError
    if line is KeyboardInterrupt:
        raise KeyboardInterrupt
    return line


def said(text="", *, thinking=True, **more):
    """The ids of an answer of the assistant."""
    before = Conversation(messages=(user("x"),), options=Options(thinking=thinking))
    return answer_ids(RENDERER, before, assistant(text, **more))


def called(tool, /, **arguments):
    return said(tool_calls=[ToolCall(id="x", name=tool, arguments=arguments)])


def conversations_of(prompts):
    return [read_transcript(ids, TOKENIZER).conversation.messages for ids, _ in prompts]


def words_of(messages):
    return [
        (message.role, message.text or [(call.name, call.arguments) for call in message.tool_calls])
        for message in messages
    ]


def test_a_call_is_run_its_result_goes_back_and_the_answer_is_printed(talk):
    ada = office().people[0]
    out, prompts = talk(
        [f"Which room has {ada.name}?"],
        [
            called("find_person", name=ada.name),
            called("get_field", id=ada.id, field="room"),
            said(f"It is {ada.record['room']}.", reasoning="I know it."),
        ],
    )
    assert out == (
        f'  find_person{{"name": "{ada.name}"}} -> {ada.id}\n'
        f'  get_field{{"id": {ada.id}, "field": "room"}} -> {ada.record["room"]}\n'
        f"I know it.\nIt is {ada.record['room']}.\n"
    )
    question = ("user", f"Which room has {ada.name}?")
    first = [("assistant", [("find_person", {"name": ada.name})]), ("tool", str(ada.id))]
    second = [("assistant", [("get_field", {"id": ada.id, "field": "room"})]), ("tool", ada.record["room"])]
    assert [words_of(messages) for messages in conversations_of(prompts)] == [
        [question],
        [question, *first],
        [question, *first, *second],
    ]


def test_two_calls_at_once_are_both_run_and_a_wrong_one_is_told(talk):
    calls = [
        ToolCall(id="a", name="calculate", arguments={"expression": "372 * 48"}),
        ToolCall(id="b", name="calculate", arguments={"expression": "one"}),
    ]
    out, prompts = talk(["What is 372 times 48, and one?"], [said(tool_calls=calls), said("17856.")])
    assert '  calculate{"expression": "372 * 48"} -> 17856\n' in out
    assert '  calculate{"expression": "one"} -> error: ' in out and out.endswith("17856.\n")
    *_, one, two = conversations_of(prompts)[1]
    assert one.text == "17856" and two.text.startswith("error: 'one' has more than numbers")


def test_each_line_is_answered_with_all_before_it_in_mind(talk):
    out, prompts = talk(["One.", "", "  ", "Two."], [said("First.", reasoning="hm"), said("Second.")])
    assert out == "hm\nFirst.\nSecond.\n"
    first, second = conversations_of(prompts)
    assert words_of(first) == [("user", "One.")]
    assert words_of(second) == [("user", "One."), ("assistant", "First."), ("user", "Two.")]
    assert second[1].reasoning == "hm"


@pytest.mark.parametrize(
    ("arguments", "options", "messages"),
    [
        ((), Options(tools=tuple(TOOLS.values()), effort="high"), ()),
        (("--effort", "max"), Options(tools=tuple(TOOLS.values()), effort="max"), ()),
        (("--no-thinking",), Options(tools=tuple(TOOLS.values()), thinking=False), ()),
        (("--no-tools", "--effort", "low"), Options(effort="low"), ()),
        (("--no-tools", "--system", "Be brief."), Options(effort="high"), (system("Be brief."),)),
    ],
)
def test_the_prompt_is_the_conversation_with_the_options_that_were_given(talk, arguments, options, messages):
    _, prompts = talk(["Hello <|open|>"], [said("Hi.", thinking=options.thinking)], *arguments)
    want = RENDERER.render(Conversation(messages=(*messages, user("Hello <|open|>")), options=options))
    assert prompts[0][0] == list(want.ids)


def test_how_it_is_sampled_reaches_the_model_and_each_answer_has_a_seed_of_its_own(talk):
    arguments = ("--temperature", "0.5", "--top-p", "0.9", "--max-tokens", "7", "--seed", "40")
    _, prompts = talk(
        ["One.", "Two."], [called("weekday", date="2024-03-17"), said("Sunday."), said("Yes.")], *arguments
    )
    how = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}
    assert [options for _, options in prompts] == [{**how, "seed": seed} for seed in (40, 41, 42)]
    _, prompts = talk(["One."], [said("Yes.")])
    assert prompts[0][1] == {"temperature": 0.0, "top_p": 0.95, "max_tokens": 1024, "seed": None}


def test_what_looks_like_markup_is_printed_as_it_is(talk):
    word = "[red]x[/red] [/] [bold :smile: \\[a] " + "long " * 60
    assert len(TOKENIZER.encode(" [/]")) == 1  # which, as markup, closes what nobody opened
    out, _ = talk(["Say it."], [said(word, reasoning=f"They want {word}")])
    assert out == f"They want {word}\n{word}\n"
    out, _ = talk(["Find it."], [called("find_person", name="[red]:smile:"), said("No.")])
    assert '  find_person{"name": "[red]:smile:"} -> error: nobody is named \'[red]:smile:\'\n' in out


def stream_interrupted(patch, answers):
    """In place of `Model.stream`: the first answer is cut by Ctrl-C."""
    stream, first = scripted(TOKENIZER, answers), []

    def cut(model, prompt, **options):
        pieces = stream(prompt, **options)
        if first:
            yield from pieces
            return
        first.append(1)
        for _, piece in zip(range(3), pieces, strict=False):
            yield piece
        raise KeyboardInterrupt

    patch.setattr(Model, "stream", cut)
    return stream.prompts


def test_an_answer_that_is_stopped_leaves_the_conversation_as_it_was(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("One.\nTwo.\n"))
    prompts = stream_interrupted(monkeypatch, [said("Never said whole."), said("Second.")])
    code, out, _ = main(capsys, "chat", run)
    assert code == 0 and out.endswith("\n(stopped)\nSecond.\n")
    assert words_of(conversations_of(prompts)[1]) == [("user", "Two.")]


def test_an_answer_that_is_stopped_behind_a_call_leaves_no_call(talk, monkeypatch):
    def run_tool(toolbox, name, arguments):
        if arguments["date"] == "never":
            raise KeyboardInterrupt
        return "Sunday"

    monkeypatch.setattr(Toolbox, "run", run_tool)
    answers = [called("weekday", date="2024-03-17"), called("weekday", date="never"), said("Second.")]
    out, prompts = talk(["One.", "Two."], answers)
    assert "-> Sunday" in out and "(stopped)" in out
    assert words_of(conversations_of(prompts)[-1]) == [("user", "Two.")]


def test_who_calls_without_an_end_is_stopped(talk):
    answers = [called("weekday", date="2024-03-17")] * chat_file.MAX_MESSAGES
    out, prompts = talk(["One.", "Two."], [*answers, said("Second.")])
    assert out.count("-> Sunday") == chat_file.MAX_MESSAGES
    assert "(no more tools: it called them without an end)" in out and out.endswith("Second.\n")
    last = conversations_of(prompts)[-1]
    assert len(prompts) == chat_file.MAX_MESSAGES + 1 and words_of(last)[-1] == ("user", "Two.")
    assert last[-2].role == "assistant" and not last[-2].tool_calls


@pytest.mark.parametrize(
    ("ids", "word"),
    [
        (called("fly[/]", place="Rome"), "(a call that is not made: undeclared tool 'fly[/]')"),
        (
            said(tool_calls=[ToolCall(id="x", name="weekday", arguments="soon")]),
            "(a call that is not made: no JSON object in json)",
        ),
    ],
)
def test_a_call_that_cannot_be_made_is_told_and_is_the_end(talk, ids, word):
    out, prompts = talk(["One.", "Two."], [ids, said("Second.")])
    assert word in out and "->" not in out and len(prompts) == 2
    assert not any(message.tool_calls for message in conversations_of(prompts)[1])


def test_without_tools_no_call_is_made(talk):
    out, prompts = talk(["One."], [called("weekday", date="2024-03-17")], "--no-tools")
    assert "undeclared tool 'weekday'" in out and len(prompts) == 1


def test_what_has_no_place_in_an_answer_is_told(talk):
    ids = said("Yes.")
    stray = TOKENIZER.encode_control("<|open|>[red]<|sep|>")
    out, _ = talk(["One."], [[*stray, *ids[:-1], TOKENIZER.special_ids["[UNK]"], ids[-1]]])
    assert "(stray marker: '<|open|>[red]<|sep|>')" in out and "(stray end: '[UNK]')" in out and "Yes." in out


@pytest.mark.parametrize("end", ["[EOS]", "[EOT]"])
def test_nothing_is_generated_behind_an_end(talk, end):
    ids = [*said("Yes.")[:-1], TOKENIZER.special_ids[end], *TOKENIZER.encode(" and so on") * 100]
    out, _ = talk(["One."], [ids])
    assert "Yes." in out and out.count("stray") == 0 and "(cut:" not in out


def test_an_answer_that_is_cut_says_so(talk):
    out, prompts = talk(["One.", "Two."], [said("It goes on and on.")[:-12], said("Second.")])
    assert "(cut: it reached the most tokens an answer may have)" in out
    assert words_of(conversations_of(prompts)[1])[1][0] == "assistant"


def test_token_by_token_the_prompt_and_the_answer_are_shown(talk):
    out, prompts = talk(["Hello."], [said("Hi.")], "--no-tools", "--show-tokens")
    shown = out.replace("\n", "")
    assert shown == (TOKENIZER.decode(prompts[0][0]) + TOKENIZER.decode(said("Hi.")[:-1])).replace("\n", "")


# --- At a terminal


def test_at_a_terminal_it_says_what_it_is_and_what_to_type(talk, run):
    out, _ = talk(["Hello."], [said("Hi.")], typed=True)
    first, *rest = out.splitlines()
    assert first.startswith(f"{run.name}, ") and first.endswith(" million parameters")
    assert chat_file.HELP in rest and any(line.startswith("Try: ") for line in rest)
    assert ", ".join(person.name for person in office().people) in out and out.endswith("Hi.\n")
    out, _ = talk([], [], "--no-tools", typed=True)
    assert "Try: " not in out and chat_file.HELP in out


def test_commands_are_no_questions(talk):
    lines = ["One.", "/effort max", "Two.", "/new", "/effort", "/effort much", "/fly", "Three.", "/quit", "Four."]
    out, prompts = talk(lines, [said("First."), said("Second."), said("Third.")], typed=True)
    assert out.count(chat_file.HELP) == 1 + 3
    transcripts = [read_transcript(ids, TOKENIZER).conversation for ids, _ in prompts]
    assert [each.options.effort for each in transcripts] == ["high", "max", "max"]
    assert [words_of(each.messages) for each in transcripts] == [
        [("user", "One.")],
        [("user", "One."), ("assistant", "First."), ("user", "Two.")],
        [("user", "Three.")],
    ]


def test_an_effort_is_a_way_to_think_again(talk):
    _, prompts = talk(["/effort low", "One."], [said("First.")], "--no-thinking", typed=True)
    want = Conversation(messages=(user("One."),), options=Options(tools=tuple(TOOLS.values()), effort="low"))
    assert prompts[0][0] == list(RENDERER.render(want).ids)


def test_in_a_pipe_a_slash_begins_a_question_like_any_other(talk):
    _, prompts = talk(["/quit"], [said("No.")])
    assert words_of(conversations_of(prompts)[0]) == [("user", "/quit")]


def test_ctrl_c_at_the_prompt_ends_the_talk(talk):
    out, prompts = talk(["One.", KeyboardInterrupt, "Two."], [said("First.")], typed=True)
    assert len(prompts) == 1 and out.endswith("First.\n\n")


# --- Which models talk


def test_a_run_that_was_not_taught_says_how_to_teach_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello.\n"))
    for about in ({"finished": True, "chat_format": None}, {"finished": True}):
        folder = tmp_path / str(len(about))
        untaught().save(folder)
        (folder / "run.json").write_text(json.dumps(about))
        code, out, err = main(capsys, "chat", folder)
        assert (code, out) == (1, "")
        assert err == f"error: {folder}: this run was not taught to talk; teach it: trivium sft {folder}\n"


def test_a_folder_in_the_released_layout_is_no_run_and_may_talk(capsys, tmp_path, monkeypatch):
    untaught().save(tmp_path / "released")
    stream = scripted(TOKENIZER, [said("Hi.")])
    monkeypatch.setattr(Model, "stream", lambda model, prompt, **options: stream(prompt, **options))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello.\n"))
    assert main(capsys, "chat", tmp_path / "released") == (0, "Hi.\n", "")


def test_what_cannot_talk_is_one_line(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello.\n"))
    Model(network=untaught().network).save(tmp_path / "mute")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text('{"finished": false, "command": ["sft", "base"]}')
    for arguments, message in (
        ((tmp_path / "mute",), f"{tmp_path}/mute: has no tokenizer, so it cannot be talked to"),
        ((tmp_path / "begun",), f"{tmp_path}/begun: this run is unfinished; the command that began it"),
        ((tmp_path / "nowhere",), f"{tmp_path}/nowhere"),
        ((run, "--top-p", "0"), "top_p: wanted a number in (0, 1], got 0.0"),
        ((run, "--seed", "-1"), "seed: wanted a whole number in [0, 2^63), got -1"),
        ((run, "--no-thinking", "--effort", "low"), "effort: low is given, and with --no-thinking nothing is thought"),
        ((run, "--device", "toaster"), "device: 'toaster' is not one that torch knows"),
    ):
        code, _, err = main(capsys, "chat", *arguments)
        assert code == 1 and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert main(capsys, "chat", run, "--effort", "medium")[0] == 2


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_says_anything_ends_no_talk(run, capsys, monkeypatch, seed):
    """At this temperature it draws from all ids alike, and nearly half of them are control ids."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello.\nAnd now?\n"))
    code, out, err = main(
        capsys, "chat", run, "--temperature", "1000", "--seed", seed, "--max-tokens", "60", "--top-p", "1"
    )
    assert (code, err) == (0, "") and out.count("\n") >= 2


def test_where_no_model_is_shipped_one_has_to_be_named(capsys, monkeypatch, tmp_path):
    missing = tmp_path / "shipped"
    monkeypatch.setattr(command, "SHIPPED", missing)
    code, out, err = main(capsys, "chat", missing)
    assert (code, out) == (1, "") and err.startswith("error: no model is shipped with this installation: name a run")
