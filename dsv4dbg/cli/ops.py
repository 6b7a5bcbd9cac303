"""``dsv4dbg ops``: the registry: contracts, implementations, why one is unavailable, and the zoo's planted faults."""

from __future__ import annotations

import inspect
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import click

from dsv4dbg.cli.output import columns, print_json

if TYPE_CHECKING:
    from dsv4dbg.kernels.contract import Op
    from dsv4dbg.kernels.numerics import Numerics
    from dsv4dbg.kernels.registry import Registry
    from dsv4dbg.kernels.zoo.case import Case


@click.command()
@click.argument("name", required=False, metavar="[OP]")
@click.option("--plugin", type=click.Path(), multiple=True, metavar="FILE", help="Load your kernels first.")
@click.option("--numerics", default=None, metavar="PROFILE", help="Show the switches of a numerics profile.")
@click.option("--diff", "other", default=None, metavar="PROFILE", help="With --numerics: what differs from this one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def ops(name: str | None, plugin: tuple[str, ...], numerics: str | None, other: str | None, as_json: bool) -> None:
    """Show all ops, or one op's contract, implementations and planted faults.

    \b
    dsv4dbg ops
    dsv4dbg ops sparse-mla-decode
    dsv4dbg ops --numerics official --diff hf
    """
    if numerics or other:
        _show_numerics(numerics or "official", other, as_json)
        return
    from pathlib import Path

    from dsv4dbg.kernels.registry import load_plugin, registry

    for file in plugin:
        load_plugin(Path(file))
    found = registry()
    shown = [found.op(name)] if name else sorted(found.ops.values(), key=lambda op: (op.family, op.name))
    if as_json:
        print_json("ops", {
            "ops": [_describe(found, op) for op in shown],
            "unavailable": [{"module": u.module, "reason": u.reason} for u in found.unavailable],
        })  # fmt: skip
    elif name:
        _show_op(found, shown[0])
    else:
        print(f"{len(shown)} ops")
        rows = [(op.family, op.name, ", ".join(found.names(op.name)), _first_line(op)) for op in shown]
        print(columns(rows, "  "))
        for module in found.unavailable:
            print(f"  unavailable: {module.module}: {module.reason}")
        print("next: dsv4dbg ops sparse_mla_decode")


def _first_line(op: Op) -> str:
    return (inspect.getdoc(op.reference) or "").splitlines()[0]


def _describe(found: Registry, op: Op) -> dict[str, Any]:
    def args(mapping: Any) -> dict[str, Any]:
        return {n: {name: value for name, value in asdict(a).items() if value} for n, a in mapping.items()}

    return {
        "name": op.name,
        "family": op.family,
        "formula": inspect.getdoc(op.reference),
        "args": args(op.args),
        "outputs": args(op.outputs),
        "mutates": op.mutates,
        "compare": {name: repr(kind) for name, kind in op.compare.items()},
        "invariants": [invariant.name for invariant in op.invariants],
        "switches": list(op.switches),
        "implementations": found.names(op.name),
        "zoo": [
            {"name": c.implementation.name, "bug": c.bug, "kind": c.kind, "shows": c.shows, "doc": c.doc}
            for c in _zoo(op)
        ],
    }


def _zoo(op: Op) -> list[Case]:
    from dsv4dbg.kernels.zoo.case import cases

    return [case for case in cases().values() if case.op == op.name]


def _show_op(found: Registry, op: Op) -> None:
    print(f"{op.name}  ({op.family})  implementations: {', '.join(found.names(op.name))}")
    print()
    print(inspect.getdoc(op.reference))
    rows = []
    for title, mapping in (("in", op.args), ("out", op.outputs)):
        for name, arg in mapping.items():
            note = (
                arg.doc + (" (optional)" if arg.optional else "") + (f" (written at {arg.slots})" if arg.slots else "")
            )
            rows.append((title, name, arg.kind, arg.dtype, f"[{arg.dims}]" if arg.dims else "", note.strip()))
            title = ""
    print()
    print(columns(rows, "  "))
    print()
    rows = [("compared", f"{name}: {kind!r}") for name, kind in op.compare.items()]
    rows += [("holds", invariant.name) for invariant in op.invariants]
    rows += [("switches", ", ".join(op.switches))] if op.switches else []
    print(columns(rows, "  "))
    print()
    if planted := _zoo(op):
        print("planted faults, to try bisect on:")
        print(columns([(c.implementation.name, c.bug, c.shows) for c in planted], "  "))
        print()
    print("yours: a file with")
    print(f'  from dsv4dbg.kernels.registry import implements\n\n  @implements("{op.name}", "mine")')
    print(f"  def mine{inspect.signature(op.reference)}: ...".replace("'", ""))
    print(f"next: dsv4dbg capture --prompt TEXT --plan 'op:{op.name}=mine' --plugin FILE")


def _show_numerics(name: str, other: str | None, as_json: bool) -> None:
    from dsv4dbg.kernels.numerics import differences, profile

    base: Numerics = profile(name)
    if other is None:
        rows: list[tuple[str, ...]] = [(f.name, str(getattr(base, f.name))) for f in fields(base) if f.name != "name"]
        document: dict[str, Any] = {"profile": name, "switches": {f.name: getattr(base, f.name) for f in fields(base)}}
    else:
        changed = differences(base, profile(other))
        rows = [("switch", name, other), *((k, str(a), str(b)) for k, (a, b) in changed.items())]
        document = {"profile": name, "other": other, "differences": {k: list(v) for k, v in changed.items()}}
    if as_json:
        print_json("numerics", document)
        return
    print(columns(rows))
