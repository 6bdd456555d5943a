import json
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.config import PRESETS, K3Config, preset
from trivium.recipes.override import describe, override
from trivium.train.pretrain import PretrainConfig
from trivium.train.schedule import Length, Schedule
from trivium.train.stages import Stage

NANO = preset("nano")


@dataclass(frozen=True, kw_only=True)
class Part:
    width: int = 4
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Config:
    """One field of every kind that an annotation may have."""

    name: str = "a"
    note: str | None = None
    steps: int = 3
    limit: int | None = None
    rate: float = 0.5
    clip: float | None = 1.0
    on: bool = False
    kind: Literal["one", "two"] = "one"
    size: Literal[8, 16] = 8
    betas: tuple[float, float] = (0.9, 0.95)
    layers: tuple[int, ...] | None = None
    stages: tuple[Stage, ...] = (Stage(max_len=256, share=1.0),)
    schedule: Schedule = field(default_factory=Schedule)
    part: Part | None = None
    anything: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: wanted at least 1, got {self.steps}")
        if self.limit is not None and self.steps > self.limit:
            raise ValueError(f"{self.steps} steps are more than the limit {self.limit}")

    @property
    def twice(self) -> int:
        return 2 * self.steps


@pytest.mark.parametrize(
    ("assignment", "want"),
    [
        ("name=b", {"name": "b"}),
        ("name=a=b", {"name": "a=b"}),
        ("name=8", {"name": "8"}),
        ("name=", {"name": ""}),
        ('name="none"', {"name": "none"}),
        ("note=none", {"note": None}),
        ('note="none"', {"note": "none"}),
        ("note=, :", {"note": ", :"}),
        ("steps=7", {"steps": 7}),
        (" steps = 7 ", {"steps": 7}),
        ("limit=8", {"limit": 8}),
        ("limit=null", {"limit": None}),
        ("rate=.25", {"rate": 0.25}),
        ("rate=1", {"rate": 1.0}),
        ("rate=3e-4", {"rate": 3e-4}),
        ("clip=none", {"clip": None}),
        ("on=true", {"on": True}),
        ("on=False", {"on": False}),
        ("kind=two", {"kind": "two"}),
        ('kind="two"', {"kind": "two"}),
        ("size=16", {"size": 16}),
        ("betas=.9,.98", {"betas": (0.9, 0.98)}),
        ("betas=[0.9, 0.98]", {"betas": (0.9, 0.98)}),
        ("betas.1=.98", {"betas": (0.9, 0.98)}),
        ("layers=4,8", {"layers": (4, 8)}),
        ("layers=4", {"layers": (4,)}),
        ("layers=[]", {"layers": ()}),
        ("layers=none", {"layers": None}),
        ("stages=256:.5,512:.5", {"stages": (Stage(max_len=256, share=0.5), Stage(max_len=512, share=0.5))}),
        ("stages=[[256, 1]]", {"stages": (Stage(max_len=256, share=1.0),)}),
        ('stages=[{"share": 1, "max_len": 64}]', {"stages": (Stage(max_len=64, share=1.0),)}),
        ("stages.0.max_len=64", {"stages": (Stage(max_len=64, share=1.0),)}),
        ("stages.0=64:.5", {"stages": (Stage(max_len=64, share=0.5),)}),
        ("schedule.kind=cosine", {"schedule": Schedule(kind="cosine")}),
        ("schedule.warmup_steps=20", {"schedule": Schedule(warmup_steps=20)}),
        ('schedule={"kind": "cosine", "final": 0}', {"schedule": Schedule(kind="cosine", final=0.0)}),
        ('part={"names": ["a,b", "none"]}', {"part": Part(names=("a,b", "none"))}),
        ('part={"width": 9}', {"part": Part(width=9)}),
        ("part=none", {"part": None}),
    ],
)
def test_a_value_is_read_as_its_field_says(assignment, want):
    got = override(Config(), [assignment])
    assert got == replace(Config(), **want)
    (name,) = want
    assert type(getattr(got, name)) is type(want[name])


def test_many_are_made_at_once_so_that_only_their_sum_is_checked():
    """Each alone is refused: a limit of 2 under 3 steps; 256 more ids than the vocabulary has."""
    assert override(Config(), ["limit=2", "steps=1"]) == Config(limit=2, steps=1)
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id")
    moved = override(
        NANO, [*(f"{name}={getattr(NANO, name) + 256}" for name in names), f"vocab_size={NANO.vocab_size + 256}"]
    )
    assert moved.vocab_size == 4096 + 256 and moved.bos_token_id == 3840 + 256


def test_the_config_that_was_given_stays_as_it_was():
    config = Config()
    assert override(config, ['part={"width": 9}', "schedule.kind=cosine"]) != config == Config()
    assert override(config, []) == config


def test_a_value_that_was_there_already_is_no_error():
    """So that the points of a grid can be typed alike, the default among them."""
    assert override(Config(), ["steps=3", "stages.0.share=1", "note=none"]) == Config()


@pytest.mark.parametrize(
    ("assignments", "word"),
    [
        (["steps"], "override: wanted NAME=VALUE with a name such as model.num_layers, got 'steps'"),
        (["=3"], "override: wanted NAME=VALUE .*, got '=3'"),
        (["schedule..kind=wsd"], "override: wanted NAME=VALUE .*"),
        (["step=3"], "step: Config has no such field; did you mean steps\\? It has name, note, .*, schedule, part"),
        (["xyz=3"], "xyz: Config has no such field; It has name, .*"),
        (
            ["schedule.kin=wsd"],
            "schedule.kin: Schedule has no such field; did you mean schedule.kind\\? It has kind, .*",
        ),
        (["anything={}"], "anything: Config has no such field; .*"),
        (["__class__=3"], "__class__: Config has no such field; .*"),
        (["twice=3"], "twice: follows from other values and cannot be set; wanted one of name, .*"),
        (["steps=3", "steps=3"], "steps: was given already, wanted it once"),
        (["schedule.kind=wsd", "schedule.kind=cosine"], "schedule.kind: was given already, wanted it once"),
        (["stages=256:1", "stages.0.share=1"], "stages.0.share: stages was given already, as a whole"),
        (["stages.0.share=1", "stages=256:1"], "stages: was given already, wanted it once"),
        (["steps=3.0"], "steps: wanted a whole number, got '3.0'"),
        (["steps=true"], "steps: wanted a whole number, got 'true'"),
        (["steps="], "steps: wanted a whole number, got ''"),
        (["steps=none"], "steps: wanted a whole number, got 'none'"),
        (["limit=x"], "limit: wanted none or a whole number, got 'x'"),
        (["rate=x"], "rate: wanted a number, got 'x'"),
        (["rate=nan"], "rate: wanted a number, got 'nan'"),
        (["clip=[1]"], "clip: wanted none or a number, got '\\[1\\]'"),
        (["on=1"], "on: wanted true or false, got '1'"),
        (["kind=three"], "kind: wanted one of one, two, got 'three'"),
        (["size=9"], "size: wanted one of 8, 16, got '9'"),
        (["betas=.9"], "betas: wanted 2 values, 0.5,0.5, got 1 in '.9'"),
        (["betas=.9,.95,.99"], "betas: wanted 2 values, 0.5,0.5, got 3 in '.9,.95,.99'"),
        (["betas=.9,x"], "betas.1: wanted a number, got 'x'"),
        (["betas={}"], "betas: wanted 2 values, 0.5,0.5, got '{}'"),
        (["betas=[.9"], "betas: wanted 2 values, 0.5,0.5, got '\\[.9'"),
        (["betas.2=.9"], "betas.2: wanted an item's number below 2, got '2'"),
        (["betas.first=.9"], "betas.first: wanted an item's number below 2, got 'first'"),
        (["layers.0=4"], "layers.0: layers is none, which has no parts"),
        (["steps.x=4"], "steps.x: steps is 3, which has no parts"),
        (["part=9"], "part: wanted none or a Part, as JSON, or its fields one by one, by their own names, got '9'"),
        (["part.width=4"], "part.width: part is none, which has no parts"),
        (["stages=256:x"], "stages.0.share: wanted a number, got 'x'"),
        (["stages=256:.5:1"], "stages.0: wanted at most 2 values, max_len:share, got '256:.5:1'"),
        (["stages=256"], "stages.0: missing 1 required keyword-only argument: 'share'"),
        (['stages=[{"length": 256}]'], "stages.0.length: Stage has no such field; .*"),
        (["stages=256:2"], "stages.0: share: wanted one in \\(0, 1\\], got 2.0"),
        (["stages.0.share=2"], "stages.0.share: wanted one in \\(0, 1\\], got 2.0"),
        (["steps=0"], "steps: wanted at least 1, got 0"),
        (["limit=2"], "limit: 3 steps are more than the limit 2"),
        (["limit=2", "steps=4", "rate=1"], "limit, steps, rate: 4 steps are more than the limit 2"),
    ],
)
def test_what_cannot_be_made_names_what_came_and_what_was_wanted(assignments, word):
    with pytest.raises(ValueError, match=f"^{word}$"):
        override(Config(), assignments)


def test_an_option_without_effect_is_refused_by_the_config_it_is_for():
    with pytest.raises(
        ValueError, match="^schedule.decay_from: wanted none, a cosine decays from its warm-up on; got 0.5$"
    ):
        override(Config(), ["schedule.kind=cosine", "schedule.decay_from=.5"])


def test_layers_follow_their_number():
    """Which layers are MLA's is derived, so that fewer layers are one number; a list that was given must be given anew."""
    eight = override(preset("k3"), ["num_layers=8", "moe.num_experts=32"])
    assert eight.mla_layers == (4, 8) and eight.moe.num_experts == 32
    assert K3Config.from_json(json.loads(json.dumps(eight.to_json()))) == eight
    listed = replace(NANO, full_attn_layers=(2, 6))
    with pytest.raises(ValueError, match="^num_layers: full_attn_layers names layer 6, but num_hidden_layers is 4"):
        override(listed, ["num_layers=4"])
    assert override(listed, ["num_layers=4", "full_attn_layers=2,4"]).mla_layers == (2, 4)
    assert override(listed, ["num_layers=4", "full_attn_layers.1=3"]).mla_layers == (2, 3)


def test_what_contradicts_another_value_of_a_model_is_refused():
    with pytest.raises(ValueError, match="^hidden_size: text_hidden_size 7168 of vision_config is not hidden_size 64"):
        override(preset("k3"), ["hidden_size=64"])
    both = override(preset("k3"), ["hidden_size=64", "vision.text_hidden_size=64"])
    assert both.hidden_size == both.vision.text_hidden_size == 64
    assert override(preset("k3"), ["hidden_size=64", "vision=none"]).vision is None


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_described_is_read_back(name):
    config = preset(name)
    lines = describe(config)
    assert override(config, lines) == config
    assert f"moe.num_experts={config.moe.num_experts}" in lines
    assert not any(line.startswith("source") for line in lines)


def pretraining_run():
    return PretrainConfig(recipe="any", model=NANO, length=Length(seconds=60.0, num_steps=1000))


def test_a_run_is_changed_in_all_its_parts_at_once():
    run = pretraining_run()
    given_ = (
        "model.num_layers=8",
        "model.moe.num_experts=32",
        "schedule.kind=cosine",
        "adamw_betas=.9,.98",
        "length.num_steps=500",
        "stages=256:.5,512:.5",
    )
    want = replace(
        run,
        model=replace(NANO, num_layers=8, moe=replace(NANO.moe, num_experts=32)),
        schedule=Schedule(kind="cosine"),
        adamw_betas=(0.9, 0.98),
        length=Length(seconds=60.0, num_steps=500),
        stages=(Stage(max_len=256, share=0.5), Stage(max_len=512, share=0.5)),
    )
    assert override(run, given_) == want
    assert override(run, describe(want)) == want
    assert "model.moe.num_experts=32" in describe(want) and "stages=256:0.5,512:0.5" in describe(want)


@pytest.mark.parametrize(
    ("assignments", "word"),
    [
        (
            ["batch_token=8"],
            "^batch_token: PretrainConfig has no such field; did you mean batch_tokens\\? It has recipe, ",
        ),
        (["model=nano"], "^model: wanted a K3Config, as JSON, or its fields one by one, .*, got 'nano'$"),
        (["muon_lr=0"], "^muon_lr: wanted a number above 0, got 0.0$"),
        (
            ["length.num_steps=none", "stages=64:.05,128:.95"],
            "stages: a run by the clock does not know at first when the 2 stages ",
        ),
        (["length.num_steps=none", "schedule.kind=cosine"], "a cosine wants the number of steps from the first one on"),
    ],
)
def test_the_checks_of_a_run_are_made_after_its_changes(assignments, word):
    with pytest.raises(ValueError, match=word):
        override(pretraining_run(), assignments)


def test_a_description_has_every_value_in_order():
    assert describe(Config(part=Part(names=("a",)))) == [
        "name=a",
        "note=none",
        "steps=3",
        "limit=none",
        "rate=0.5",
        "clip=1.0",
        "on=false",
        "kind=one",
        "size=8",
        "betas=0.9,0.95",
        "layers=none",
        "stages=256:1.0",
        "schedule.kind=wsd",
        "schedule.warmup_steps=none",
        "schedule.warmup_share=none",
        "schedule.decay_from=none",
        "schedule.final=none",
        "part.width=4",
        'part.names=["a"]',
    ]
    assert describe(Config())[-1] == "part=none"
    assert describe(Length(seconds=1.5)) == ["seconds=1.5", "num_steps=none"]


PARTS = st.builds(Part, width=st.integers(), names=st.lists(st.text()).map(tuple))


@settings(max_examples=50)
@given(
    st.builds(
        Config,
        name=st.text() | st.sampled_from(["none", "null", "NONE", '"', '"a"', "[1]", " a", "a\n", "\x85"]),
        note=st.none() | st.text(),
        steps=st.integers(1, 10**20),
        rate=st.floats(allow_nan=False),
        clip=st.none() | st.floats(allow_nan=False),
        on=st.booleans(),
        kind=st.sampled_from(["one", "two"]),
        betas=st.tuples(*[st.floats(allow_nan=False)] * 2),
        layers=st.none() | st.lists(st.integers()).map(tuple),
        stages=st.lists(
            st.builds(Stage, max_len=st.integers(1), share=st.floats(0, 1, exclude_min=True)), max_size=3
        ).map(tuple),
        schedule=st.builds(Schedule, kind=st.just("cosine"), final=st.none() | st.floats(0, 1)),
        part=PARTS,
    )
)
def test_any_config_is_read_back_from_its_description(config):
    got = override(Config(part=Part()), describe(config))
    assert got == config
    assert math.copysign(1, got.rate) == math.copysign(1, config.rate)
