"""trivium doctor: what this machine can run, and why not the rest."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def doctor(as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False) -> None:
    """Say which devices and backends are usable here, and why the others are not."""
    found = _look()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return

    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print("  ".join(f"{name} {version}" for name, version in found["versions"].items()))
    machine = found["machine"]
    memory = "" if machine["memory_bytes"] is None else f", {machine['memory_bytes'] / 2**30:.1f} GiB memory"
    console.print(f"{machine['system']}, {machine['cores']} cores, torch uses {machine['torch_threads']}{memory}\n")

    table = Table("device", "backend", "usable", "why", title="backends", title_justify="left")
    for row in found["backends"]:
        table.add_row(row["device"], row["backend"], "yes" if row["usable"] else "no", row["reason"])
    console.print(table)

    table = Table("package", "version", "part of", title="packages", title_justify="left")
    for row in found["packages"]:
        table.add_row(row["package"], row["version"] or "absent", row["part_of"])
    console.print(table)


def _look() -> dict[str, Any]:
    import os
    import platform
    from dataclasses import asdict

    import torch

    import trivium
    from trivium.ops.backend import availability

    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS
    pages = os.sysconf_names.keys() >= {"SC_PHYS_PAGES", "SC_PAGE_SIZE"}
    return {
        "versions": {
            "trivium": trivium.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": len(affinity(0)) if affinity else os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if pages else None,
        },
        "backends": [asdict(row) for row in availability()],
        "packages": _packages(),
    }


def _packages() -> list[dict[str, str | None]]:
    """Every package that pyproject.toml names: its version, None where it is absent, and base or the extra."""
    import re
    from importlib.metadata import PackageNotFoundError, requires, version

    try:
        wanted = requires("trivium") or []
    except PackageNotFoundError:  # run from a source folder that was not installed
        return []
    rows: list[dict[str, str | None]] = []
    for requirement in wanted:
        package = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if package == "trivium":  # an extra that takes in another one, whose packages are listed by themselves
            continue
        extra = re.search(r"""extra\s*==\s*['"](.+?)['"]""", requirement)
        try:
            found = version(package)
        except PackageNotFoundError:
            found = None
        rows.append({"package": package, "version": found, "part_of": f"[{extra[1]}]" if extra else "base"})
    return rows
