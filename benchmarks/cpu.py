"""Ours beside llama.cpp, transformers' kimi_linear and a dense Llama of the same size, on two cores: docs/speed.md.

    python -m benchmarks.cpu                                       # all but `quickstart`, about half an hour
    python -m benchmarks.cpu --only train-512 prefill --rounds 5 --json speed.json

Every measurement is a process of its own with two threads; ours and the peers take turns. A ratio is the median of the
rounds' ratios, with the least and the greatest. What is not installed is a line that says so.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.quiet import QUIET_CORES, Watch, machine

ROOT = Path(__file__).parents[1]
OURS, TORCH, LLAMA = "benchmarks.programs", "benchmarks.peers.transformers", "benchmarks.peers.llama_cpp"
TIMEOUT_S = 900
RATIO, FIGURE, AT_MOST = "ratio", "figure", "at most"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command of `python -m`; an argument "@kind" stands for the GGUF file of that kind. `rounds` is at most so many."""

    name: str
    command: tuple[str, ...]
    rounds: int = 99
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table. Ours is the first program, the second the peer that the ratio is to, the rest stand beside."""

    name: str
    what: str
    programs: tuple[Program, ...]
    must: float
    want: float
    goal: str = RATIO
    unit: str = "tokens/s"
    rounds: int = 99
    mb_a_token: float | None = None  # what training may at most take


def ours(*arguments: object, name: str = "ours") -> Program:
    return Program(name=name, command=(OURS, *map(str, arguments)))


def peer(name: str, *arguments: object, rounds: int = 99) -> Program:
    """One of transformers' models."""
    module = OURS if arguments[0] in ("train", "kda_transformers") else TORCH
    return Program(name=name, command=(module, *map(str, arguments)), rounds=rounds, needs=("transformers",))


def llama(kind: str, what: str, *arguments: object, rounds: int = 99, setting: str = "float32") -> Program:
    command = (LLAMA, what, setting, f"@{kind}", *map(str, arguments))
    name = f"llama.cpp {kind}" + (", its defaults" if setting == "default" else "")
    return Program(name=name, command=command, rounds=rounds, needs=("llama_cpp", "gguf"))


def train_case(batch_size: int, num_tokens: int, must: float, want: float, *, repeats: int, rounds: int) -> Case:
    # A whole step to warm up where that takes seconds; one of 16,384 tokens of the dense model takes minutes.
    shape = (batch_size, num_tokens, repeats, num_tokens if num_tokens < 4096 else 64)
    programs = [ours("train", "ours", *shape), peer("dense_llama", "train", "dense_llama", *shape)]
    if num_tokens == 512:  # 4 MB a token: no larger batch fits, and no longer row
        programs.append(peer("kimi_linear B=2", "train", "kimi_linear", 2, 512, 1, 64, rounds=1))
    return Case(
        name=f"train-{num_tokens}",
        what=f"training, T={num_tokens} B={batch_size}, against a dense Llama of the same total size",
        programs=tuple(programs),
        must=must,
        want=want,
        rounds=rounds,
        mb_a_token=0.6,
    )


def decode_case(context: int, must: float, want: float, *, rounds: int) -> Case:
    few = max(4, 64 * 512 // max(context, 512) // 8)  # kimi_linear at 16,384 takes a fifth of a second each
    return Case(
        name=f"decode-{context}",
        what=f"decode at {context} tokens, float32, against llama.cpp kimi-k3",
        programs=(
            ours("decode", "float32", context, 64, 3),
            llama("float32", "decode", context, 64, 2, 3),
            llama("float32", "decode", context, 64, 2, 3, rounds=2, setting="default"),
            peer("kimi_linear", "decode", "kimi_linear", context, few, 2, 2, rounds=1),
            peer("dense_llama", "decode", "dense_llama", context, few, 2, 2, rounds=1),
        ),
        must=must,
        want=want,
        rounds=rounds,
    )


CASES = (
    Case(
        name="kda-forward",
        what="KDA forward, H=8 D=64 T=2048",
        programs=(ours("kda_ours", 0, 2048, 10), peer("transformers", "kda_transformers", 0, 2048, 2)),
        must=100e3,
        want=200e3,
        goal=FIGURE,
    ),
    Case(
        name="kda-backward",
        what="KDA forward and backward, H=8 D=64 T=2048",
        programs=(ours("kda_ours", 1, 2048, 10), peer("transformers", "kda_transformers", 1, 2048, 1, rounds=1)),
        must=30e3,
        want=60e3,
        goal=FIGURE,
    ),
    Case(
        name="kda-exponent",
        what="KDA forward and backward: exponent of time in T, 1,024 to 16,384",
        programs=(ours("kda_exponent", 3),),
        must=1.05,
        want=1.05,
        goal=AT_MOST,
        unit="",
    ),
    train_case(8, 512, 1.0, 1.15, repeats=2, rounds=99),
    train_case(1, 4096, 1.3, 1.6, repeats=1, rounds=99),
    train_case(1, 16384, 1.6, 2.0, repeats=1, rounds=2),
    Case(
        name="prefill",
        what="prefill T=2048, the last logits, against llama.cpp kimi-k3",
        programs=(
            ours("prefill", 2048, 3),
            llama("float32", "prefill", 2048, 2, 2),
            llama("float32", "prefill", 2048, 2, 2, rounds=2, setting="default"),
            peer("kimi_linear", "prefill", "kimi_linear", 2048, 2, 1, rounds=1),
            peer("dense_llama", "prefill", "dense_llama", 2048, 2, 2, rounds=1),
        ),
        must=1.2,
        want=2.0,
    ),
    decode_case(16, 1.0, 1.2, rounds=99),
    decode_case(4096, 1.3, 1.5, rounds=99),
    decode_case(16384, 2.0, 3.0, rounds=2),
    Case(
        name="decode-mxfp4",
        what="decode, bfloat16 trunk and MXFP4 experts, against llama.cpp on the same weights",
        programs=(
            ours("decode", "mxfp4", 16, 64, 3),
            llama("mxfp4", "decode", 16, 64, 2, 3),
            llama("Q8_0", "decode", 16, 64, 2, 3, rounds=2),
            llama("Q4_0", "decode", 16, 64, 2, 3, rounds=2),
        ),
        must=1.0,
        want=1.2,
    ),
    Case(
        name="decode-xl",
        what="bench-xl decode, share of the memory read rate of as many bytes",
        programs=(ours("decode", "bench-xl", 16, 8, 5),),
        must=0.75,
        want=0.9,
        goal=FIGURE,
        unit="of the reading loop",
        rounds=2,
    ),
    Case(
        name="nano",
        what="the quickstart's whole training steps, native against the torch path",
        programs=(ours("nano", "native", 5), ours("nano", "torch", 3, name="torch path")),
        must=2.0,
        want=2.5,
    ),
)
CHECKS = {
    "ops agree with their reference": ("tests/ops", "-k", "native or recurrence"),
    "the fused step is the forward": ("tests/model/test_step.py", "tests/ops/test_decode.py"),
    "llama.cpp writes what we write": ("-m", "slow", "tests/checkpoint/test_gguf.py", "-k", "writes_what and bench"),
}
NAMES = (*(case.name for case in CASES), "correct")
ASKED = "quickstart"  # five minutes, so only where it is asked for


# --- One measurement --------------------------------------------------------------------------------------------


class Failed(Exception):
    """Why there is no figure."""


@dataclass
class Bench:
    """Runs programs; `files` are the GGUF files that were made for them, by kind."""

    folder: Path
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def measure(self, program: Program) -> dict[str, Any]:
        """What the program's process printed, and what others did meanwhile."""
        missing = [name for name in program.needs if importlib.util.find_spec(name) is None]
        if missing:
            raise Failed(f"not installed: {', '.join(missing)}")
        kinds = [argument[1:] for argument in program.command if argument.startswith("@")]
        for kind in kinds:
            self.make_file(kind)
        paths = {f"@{kind}": str(self.folder / f"{kind}.gguf") for kind in kinds}
        # Ours as the command line sets it, the peers as they come.
        spin = {} if program.needs else {"GOMP_SPINCOUNT": "5000"}
        with Watch() as watch:
            printed = child("-m", *(paths.get(argument, argument) for argument in program.command), **spin)
        found = json.loads(printed.splitlines()[-1])
        found = {"figures": found} if isinstance(found, list) else found
        if kinds and "decode" in program.command:  # a prompt reads its weights once for all tokens
            found["bytes"] = self.files[kinds[0]]["bytes"]
        return {**found, "others_cores": watch.others}

    def make_file(self, kind: str) -> None:
        if kind not in self.files:
            if kind.startswith("Q"):  # quantised from the float32 one
                self.make_file("float32")
            self.files[kind] = json.loads(child("-m", OURS, "gguf", str(self.folder), kind).splitlines()[-1])


def child(*arguments: str, **variables: str) -> str:
    """Standard output of a Python process with two threads. Raises Failed with its last line of complaint."""
    env = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    env |= {"OMP_NUM_THREADS": "2", **variables}
    command = (sys.executable, *arguments)
    try:
        done = subprocess.run(
            command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"took more than {TIMEOUT_S} s") from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise Failed(f"exit code {done.returncode}: {lines[-1][:200]}")
    return done.stdout


# --- A case -----------------------------------------------------------------------------------------------------


def run_case(bench: Bench, case: Case, num_rounds: int) -> dict[str, Any]:
    """All programs of a case in turns, `num_rounds` of them; one that fails is not tried again."""
    runs: dict[str, list[dict[str, Any]]] = {program.name: [] for program in case.programs}
    missing: dict[str, str] = {}
    for idx in range(min(num_rounds, case.rounds)):
        for program in case.programs:
            if idx < program.rounds and program.name not in missing:
                try:
                    runs[program.name].append(bench.measure(program))
                except Failed as failed:
                    missing[program.name] = str(failed)
    for program in case.programs:
        for run in runs[program.name]:
            if program.command[0] == LLAMA and "bytes" in run and runs["ours"]:  # the state is as large as ours
                run["bytes"] += runs["ours"][0].get("state", 0)
    programs = {name: {"missing": missing[name]} if name in missing else summary(runs[name]) for name in runs}
    result: dict[str, Any] = {"what": case.what, "goal": case.goal, "must": case.must, "want": case.want}
    result |= {"unit": case.unit, "programs": programs}
    first, *others = programs.values()
    if "missing" not in first and others and "missing" not in others[0]:
        pairs = zip(first["figures"], others[0]["figures"], strict=False)  # the rounds that both have
        result["ratio"] = spread(a / b for a, b in pairs)
    head: dict[str, Any] = result.get("ratio", {}) if case.goal == RATIO else first
    result["reached"] = reached(head["median"], case) if "median" in head else "not measured"
    return result


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One figure a round, the median of its process; their spread; the rest from the median of the rounds."""
    found = spread(statistics.median(run["figures"]) for run in runs)
    for key in ("flops", "bytes", "read", "share", "mb_a_token", "tokens_per_s"):
        values = [run[key] for run in runs if run.get(key) is not None]
        if values:
            found[key] = statistics.median(values)
    found["rates"] = runs[-1].get("rates")
    others = [run["others_cores"] for run in runs]
    found["others_cores"] = None if None in others else max(others)
    return found


def spread(figures: Iterable[float]) -> dict[str, Any]:
    figures = list(figures)
    return {"median": statistics.median(figures), "low": min(figures), "high": max(figures), "figures": figures}


def reached(figure: float, case: Case) -> str:
    sign = -1 if case.goal == AT_MOST else 1
    return "want" if sign * (figure - case.want) >= 0 else "must" if sign * (figure - case.must) >= 0 else "missed"


def check() -> dict[str, Any]:
    """The tests that hold every kernel to its reference, and the GGUF file to llama.cpp."""
    found = {}
    for what, arguments in CHECKS.items():
        try:
            found[what] = child("-m", "pytest", "-q", "-n", "0", *arguments).strip().splitlines()[-1]
        except Failed as failed:
            found[what] = f"FAILED, {failed}"
    return {"what": "correctness in this run", "checks": found}


def run_quickstart(folder: Path, minutes: float = 4.0) -> dict[str, Any]:
    """Held-out bits per byte of the quickstart after `minutes`, beside gzip -9 of the held-out text joined."""
    with Watch() as watch:
        child("-m", "trivium", "quickstart", "--minutes", str(minutes), "--out", str(folder), "--name", "bench")
    run = json.loads((folder / "bench" / "run.json").read_text())
    text = b"".join(json.loads(line)["text"].encode() for line in (folder / "bench" / "heldout.jsonl").open())
    joined = 8 * len(gzip.compress(text, 9)) / len(text)
    bpb = run["report"]["heldout"]["bpb"]
    state = "want" if bpb <= 1.6 else "must" if bpb <= 0.95 * joined else "missed"
    line = (
        f"{bpb:.3f} bits per byte held out, must {0.95 * joined:.3f}, want 1.60; gzip -9 joined {joined:.3f}; {state}"
    )
    checks = {f"after {60 * minutes:.0f} s": f"{line}; {quiet(watch.others)}"}
    return {"what": "quickstart", "bpb": bpb, "gzip_joined": joined, "others_cores": watch.others, "checks": checks}


# --- The table --------------------------------------------------------------------------------------------------


def lines_of(name: str, result: dict[str, Any], ceiling: float | None, case: Case | None) -> list[str]:
    """The ratio or the figure with its goals, then a line a program."""
    if case is None:
        return [f"{name:14} {result['what']}", *(f"    {what:30} {line}" for what, line in result["checks"].items())]
    unit = "x" if case.goal == RATIO else f" {case.unit}".rstrip()
    head: dict[str, Any] = result.get("ratio", {}) if case.goal == RATIO else next(iter(result["programs"].values()))
    shown = f"{spread_text(head)}{unit}" if "median" in head else "no figure"
    goals = f"must {'≤ ' if case.goal == AT_MOST else ''}{text(case.must)}, want {text(case.want)}"
    lines = [f"{name:14} {shown}   {goals}: {result['reached']}   ({case.what})"]
    if case.goal != RATIO and "ratio" in result:
        lines[0] += f"; {spread_text(result['ratio'])}x the peer"
    own = result["programs"]["ours"]
    if case.mb_a_token and "mb_a_token" in own:
        state = "reached" if own["mb_a_token"] <= case.mb_a_token else "MISSED"
        lines[0] += f"; memory must ≤ {case.mb_a_token} MB a token: {state}"
    for program, found in result["programs"].items():
        lines.append(f"    {program:31} " + (found.get("missing") or program_text(found, ceiling, case)))
    return lines


def program_text(found: dict[str, Any], ceiling: float | None, case: Case) -> str:
    parts = [f"{spread_text(found)} {case.unit}".rstrip()]
    rate = found.get("tokens_per_s", found["median"])
    if case.unit.startswith("of"):
        parts.append(f"{text(rate)} tokens/s")
    if found.get("flops") and ceiling:
        parts.append(f"{found['flops'] * rate / 1e9:.0f} GFLOP/s, {found['flops'] * rate / ceiling:.2f} of a product")
    if found.get("bytes"):
        parts.append(f"{found['bytes'] / 1e6:.1f} MB a token, {found['bytes'] * rate / 1e9:.1f} GB/s")
    if found.get("read"):
        parts.append(f"{found['share']:.2f} of reading as much, {found['read'] / 1e9:.1f} GB/s")
    if "mb_a_token" in found:
        parts.append(f"{found['mb_a_token']:.2f} MB of memory a token")
    if found.get("rates"):
        parts.append(", ".join(f"T={T} {text(rate)}/s" for T, rate in found["rates"].items()))
    return "; ".join([*parts, quiet(found["others_cores"])])


def spread_text(found: dict[str, Any]) -> str:
    few = len(found["figures"]) < 2
    return text(found["median"]) + ("" if few else f" ({text(found['low'])} to {text(found['high'])})")


def text(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"


def quiet(others: float | None) -> str:
    if others is None:
        return "quiet or not: unknown"
    return "quiet" if others <= QUIET_CORES else f"NOT QUIET, others {others:.2f} cores"


def version_of(package: str) -> str:
    """As its __init__.py says, which is not run; "not installed" where there is none."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return "not installed"
    said = re.search(r"^__version__ = [\"'](.+?)[\"']", Path(spec.origin).read_text(), re.MULTILINE)
    return said[1] if said else "installed"


def write_whole(path: Path, content: dict[str, Any]) -> None:
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*NAMES, ASKED), default=NAMES, metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3, help="of every case, or fewer where one takes minutes")
    parser.add_argument("--json", type=Path, help="all figures, written after every case")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: wanted at least 1, got {args.rounds}")
    cases = {case.name: case for case in CASES}
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trivium-bench-") as folder:
        bench = Bench(Path(folder))
        try:
            ceilings = bench.measure(ours("ceilings"))
        except Failed as failed:
            raise SystemExit(f"ours does not run: {failed}") from None
        product = max(ceilings["figures"])
        about = {**machine(), **ceilings["about"]}
        about |= {name: version_of(name) for name in ("transformers", "llama_cpp")}
        content: dict[str, Any] = {"machine": about, "rounds": args.rounds, "ceilings": ceilings, "cases": {}}
        print(", ".join(f"{key} {value}" for key, value in about.items()))
        products = (
            f"{name} {rate / 1e9:.0f}" for name, rate in zip(ceilings["product"], ceilings["figures"], strict=True)
        )
        reads = (f"{size} {rate / 1e9:.1f}" for size, rate in ceilings["read"].items())
        print(f"product 2048: {', '.join(products)} GFLOP/s; reading: {', '.join(reads)} GB/s", end="; ")
        print(quiet(ceilings["others_cores"]), flush=True)
        special: dict[str, Callable[[], dict[str, Any]]] = {
            "correct": check,
            ASKED: lambda: run_quickstart(Path(folder)),
        }
        for name in args.only:
            try:
                result = special[name]() if name in special else run_case(bench, cases[name], args.rounds)
            except Failed as failed:
                result = {"what": name, "checks": {"": f"FAILED, {failed}"}}
            print(*lines_of(name, result, product, cases.get(name)), sep="\n", flush=True)
            content["cases"][name] = result
            content["seconds"] = round(time.monotonic() - begun_s)
            if args.json:
                write_whole(args.json, content)
    print(f"{content['seconds']} s")
    checks = [line for result in content["cases"].values() for line in result.get("checks", {}).values()]
    own = [result["programs"]["ours"] for result in content["cases"].values() if "programs" in result]
    if any("FAILED" in line for line in checks) or any("missing" in found for found in own):
        raise SystemExit(1)  # a peer may be missing, ours may not


if __name__ == "__main__":
    main()
