"""``dsv4dbg doctor``: what runs here, and whether this device's FP8 conversions are right."""

from __future__ import annotations

import sys

import click

from dsv4dbg.cli.output import columns, print_json


@click.command()
@click.option("--device", "device_name", default=None, help="cpu, cuda or cuda:N (default: cuda if there is one).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(device_name: str | None, as_json: bool) -> None:
    """Show the environment and check this device's FP8 conversions over all 256 bytes.

    Exit code 1 if a conversion is wrong.

    \b
    dsv4dbg doctor
    dsv4dbg doctor --device cuda:1 --json
    """
    import torch

    from dsv4dbg.kernels.registry import registry
    from dsv4dbg.model.environment import check_fp8, environment
    from dsv4dbg.model.run import open_device

    device = open_device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    found = environment(device)
    fp8 = check_fp8(device)
    implementations: dict[str, int] = {}
    for _, name in registry().implementations:
        implementations[name] = implementations.get(name, 0) + 1
    missing = {u.module: u.reason for u in registry().unavailable}
    bad = [dialect for dialect, problem in fp8.items() if problem]
    if as_json:
        document = {"environment": found, "fp8": fp8, "implementations": implementations, "unavailable": missing}
        print_json("doctor", document)
    else:
        verdict = (
            f"FP8 conversions are WRONG on {device}: {', '.join(bad)}" if bad else f"FP8 conversions right on {device}"
        )
        print(verdict)
        rows = [(d, problem or "256 bytes right") for d, problem in fp8.items()]
        rows += [(k, _shown(v)) for k, v in found.items() if k != "switches"]
        rows += [(f"kernels: {name}", f"{count} ops") for name, count in sorted(implementations.items())]
        rows += [(module, f"unavailable: {reason}") for module, reason in missing.items()]
        print(columns(rows, "  "))
        print("switches set: " + ("none of the known ones" if not found["switches"] else ""))
        if found["switches"]:
            print(columns(list(found["switches"].items()), "  "))
        print('next: dsv4dbg capture --prompt "The capital of France is"')
    sys.exit(1 if bad else 0)


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
