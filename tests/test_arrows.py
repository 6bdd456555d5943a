"""Imports point strictly down, and what is light stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trivium

PACKAGE = Path(trivium.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

RANKS = (
    ("config",),
    ("cost", "ops", "chat"),
    ("model", "data", "envs"),
    ("checkpoint", "parallel"),
    ("train", "serve"),
    ("post", "evals"),
    ("recipes",),
    ("lab", "api"),
    ("cli",),
    ("__main__",),
)
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}

# `trivium/__init__.py` holds nothing but lazy names: it may name every room, since it imports none by itself.
ENTRANCE = PACKAGE / "__init__.py"


def room_of(path: Path) -> str:
    name = path.relative_to(PACKAGE)
    return name.parts[0].removesuffix(".py")


def rooms_imported(source: str) -> set[str]:
    """The rooms that a file imports anywhere in it, also inside functions and for types alone."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"line {node.lineno}: a relative import")
            # `from trivium import ops` names the room behind the import.
            names = [f"trivium.{a.name}" for a in node.names] if node.module == "trivium" else [node.module or ""]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("trivium.")}
    return rooms


@pytest.mark.parametrize(
    "path", [path for path in FILES if path != ENTRANCE], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_point_strictly_down(path):
    room = room_of(path)
    assert room in RANK, f"{room} has no rank"
    for imported in rooms_imported(path.read_text(encoding="utf-8")) - {room}:
        assert imported in RANK, f"{path}: imports {imported}, which has no rank"
        assert RANK[imported] < RANK[room], (
            f"{path}: {room} (rank {RANK[room]}) imports {imported} (rank {RANK[imported]})"
        )


def test_every_way_to_write_an_import_is_seen():
    assert rooms_imported("import trivium.ops.rows as r\nimport torch") == {"ops"}
    assert rooms_imported("from trivium import api, config") == {"api", "config"}
    assert rooms_imported("def f():\n    from trivium.train.loop import x") == {"train"}
    with pytest.raises(ValueError, match="line 1: a relative import"):
        rooms_imported("from .rows import Rows")


# Imports every module of the named rooms while modules are blocked; prints how many there were.
IMPORT_ALL = """
import sys, importlib, importlib.abc, importlib.metadata, pathlib, re

rooms, allowed = sys.argv[1].split(","), sys.argv[2].split(",")

def closure(names):
    seen, todo = set(), list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        seen.add(name)
        todo += [re.split(r"[^\\w.-]", r, maxsplit=1)[0] for r in requirements if "extra ==" not in r]
    return seen

kept = closure(allowed)
BLOCKED = {
    module
    for module, owners in importlib.metadata.packages_distributions().items()
    if not {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} & kept
} - {"trivium", *sys.modules}  # what a start-up file has loaded already cannot be kept out

class Wall(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Wall())
import trivium
package = pathlib.Path(trivium.__file__).parent
count = 0
for room in rooms:
    paths = [package / f"{room}.py"] if (package / f"{room}.py").exists() else sorted((package / room).rglob("*.py"))
    for path in paths:
        parts = path.relative_to(package.parent).with_suffix("").parts
        importlib.import_module(".".join(part for part in parts if part != "__init__"))
        count += 1
assert not BLOCKED & set(sys.modules), BLOCKED & set(sys.modules)
print(count, *sorted(set(BLOCKED) & {"torch", "tiktoken"}))
"""


def import_all(rooms: list[str], allowed: list[str]) -> list[str]:
    """Words: how many modules were imported, and which of torch and tiktoken were blocked."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, ",".join(rooms), ",".join(allowed)],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_cost_and_chat_import_no_torch():
    count, *blocked = import_all(
        ["config", "cost", "chat"], ["numpy", "typer", "rich", "tiktoken", "tokenizers", "regex"]
    )
    assert int(count) > 5 and "torch" in blocked


@pytest.mark.parametrize("room", ["config", "ops", "model", "train"])
def test_training_needs_five_packages(room):
    count, *blocked = import_all([room], ["torch", "numpy", "safetensors", "typer", "rich"])
    assert int(count) > 0 and blocked == ["tiktoken"]
