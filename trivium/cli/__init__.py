"""The command line: one small file a verb, which parses and calls.

A verb imports what it needs when it runs, so that `trivium --help` does not wait for torch.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import trivium
from trivium.cli import (
    chat,
    convert,
    cost,
    data,
    doctor,
    evaluate,
    generate,
    lab,
    parse,
    plot,
    quickstart,
    render,
    sft,
    train,
)


class OneLineErrors(TyperGroup):
    """What is wrong with a user's input, file or disk is one line on stderr, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # The reader, such as `head`, has gone. Python would complain again when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            if ctx.params["debug"]:
                raise
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None
        except (ValueError, OSError, ArithmeticError, RuntimeError, ImportError, MemoryError) as error:
            # typer.Exit and typer.Abort are RuntimeErrors and carry their own exit code.
            if ctx.params["debug"] or isinstance(error, typer.Exit | typer.Abort):
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            typer.echo(f"error: {message}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(cls=OneLineErrors, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
TRAIN, USE, KNOW = "Train a model", "Use a model", "What it takes"
app.command(rich_help_panel=TRAIN)(quickstart.quickstart)
app.command(rich_help_panel=TRAIN)(train.train)
app.command(rich_help_panel=TRAIN)(sft.sft)
app.add_typer(data.app, name="data", rich_help_panel=TRAIN)
app.command(rich_help_panel=TRAIN)(plot.plot)
app.command(rich_help_panel=TRAIN)(lab.lab)
app.command(rich_help_panel=USE)(chat.chat)
app.command(rich_help_panel=USE)(generate.generate)
app.command(rich_help_panel=USE)(convert.convert)
app.add_typer(evaluate.app, name="eval", rich_help_panel=USE)
app.add_typer(cost.app, name="cost", rich_help_panel=KNOW)
app.command(rich_help_panel=KNOW)(render.render)
app.command(rich_help_panel=KNOW)(parse.parse)
app.command(rich_help_panel=KNOW)(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trivium {trivium.__version__}")
        raise typer.Exit


@app.callback()
def trivium_(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. May stand behind the verb, too.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """The whole Kimi K3 system: train one of your own, run it, look into it.

    Begin with `trivium chat`, or train one yourself with `trivium quickstart`.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 something was wrong, 2 wrong usage, 130 interrupted."""
    # Before torch is loaded. A thread that waits for the others spins, by default long enough to hold the core that one
    # of them needs when other programs are busy: a training step of nano on two cores then took up to 60 s. Spinning a
    # sixtieth as long it takes 1.6 s there, and 0.57 s on a free machine, as before; sleeping at once it takes 1.12 s.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    arguments = _debug_first(sys.argv[1:] if arguments is None else arguments)
    # What was typed goes along as the context's object: a run keeps it, to say how it goes on.
    app(arguments, prog_name="trivium", obj=[argument for argument in arguments if argument != "--debug"])


def _debug_first(arguments: list[str]) -> list[str]:
    """--debug behind a verb is the same option as before it; behind a bare -- it is an argument like any other."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest = [argument for argument in arguments[:end] if argument != "--debug"]
    return ["--debug"] * (len(rest) < end) + rest + arguments[end:]
