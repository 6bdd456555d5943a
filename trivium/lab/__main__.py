"""python -m trivium.lab: as `trivium lab`, with nothing but torch, numpy, safetensors and rich; a page wants matplotlib."""

from __future__ import annotations

import argparse
from pathlib import Path

from trivium.lab.lab import lab


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trivium.lab", description=lab.__doc__)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--seeds", type=int, dest="num_seeds")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant", action="append", default=[], dest="variants")
    parser.add_argument("--out", type=Path, default=Path("runs/lab"))
    parser.add_argument("--docs", type=Path, default=Path("docs/lab"))
    parser.add_argument("--redraw", action="store_true")
    lab(**vars(parser.parse_args()), say=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
