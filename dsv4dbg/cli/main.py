"""The command line: ``dsv4dbg COMMAND``. Commands load when they are asked for, and heavy imports inside them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from dsv4dbg import __version__
from dsv4dbg.errors import DbgError

COMMANDS = {
    "capture": "Run a forward and write every op's inputs and outputs to a trace.",
    "bisect": "Find the op whose candidate kernel diverges or faults, and where.",
    "diff": "Compare two traces: the first op that differs, and whether it is at fault.",
    "replay": "Run one site of a trace again with another implementation.",
    "reproduce": "Write a fault at one site as a directory that shows it without this tool.",
    "ops": "Show ops, their contracts and implementations.",
    "compile": "Compile every Triton kernel for AMD GPUs offline: LDS, registers, spills.",
    "doctor": "Show the environment and check this device's FP8 conversions.",
}


class Commands(click.Group):
    """A group whose commands live in modules of their own, ``dsv4dbg.cli.<command>``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"dsv4dbg.cli.{cmd_name}"), cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="dsv4dbg %(version)s")
def commands() -> None:
    """Find which kernel of a DeepSeek-V4 forward is wrong: which op, which layer, which tokens.

    \b
    dsv4dbg capture --prompt "The capital of France is"
    dsv4dbg ops sparse_mla_decode
    dsv4dbg doctor
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command (default: the process's arguments); what went wrong is one sentence on stderr and the exit code."""
    # before torch loads: idle OpenMP threads that spin made small forwards 10 times slower on a busy machine
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        commands(arguments, prog_name="dsv4dbg")
    except DbgError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("dsv4dbg"):
            raise
        print(f"error: the package {error.name} is missing\n hint: pip install {error.name}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
