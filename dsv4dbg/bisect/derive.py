"""Calls derived from a call: fewer tokens, tokens in another order, pages elsewhere or fewer.

What an op's contract says of dims and pointers is all that these functions know of it. A derived call is one that the
reference can run; None says that the call has nothing to derive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dsv4dbg.kernels.paged import Cache, field_rows
from dsv4dbg.kernels.table import Call

Back = Callable[[Mapping[str, Any]], dict[str, Any]]


def tokens_of(call: Call) -> int | None:
    """How many tokens a call has; None where its contract does not let them be taken apart."""
    lead = _token_args(call)
    return len(call.args[lead[0]]) if lead else None


def keep_tokens(call: Call, rows: Sequence[int]) -> Call | None:
    """The call with some of its tokens, in the order given. Rows in a row stay a view, with the strides they had."""
    lead = _token_args(call)
    if not lead:
        return None
    rows = list(rows)
    together = bool(rows) and rows == list(range(rows[0], rows[0] + len(rows)))
    picked = slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows, dtype=torch.long)
    return _with(call, {name: call.args[name][picked] for name in lead})


def reorder_tokens(call: Call, order: Sequence[int]) -> Call | None:
    """The call with its tokens in another order."""
    return keep_tokens(call, order)


def other_contents(call: Call, other: Call | None) -> Call | None:
    """The call with other contents in buffers of the same form: dtypes, shapes and strides.

    Weights, tables and scalars stay. Everything else is that of ``other``, a call of the same op, if it has the form,
    or else every second channel of the floats is halved, and what slots of a cache hold that is only read moves by one
    slot; where tokens can be reordered, they come in reversed order.
    """
    changing = [n for n, a in call.op.args.items() if a.kind in ("tensor", "cache") and call.args[n] is not None]
    if other is not None and _same_form(call, other):
        changed = _with(call, {name: other.args[name] for name in changing})
    else:
        floats = {n: _halved(v) for n in changing if isinstance(v := call.args[n], torch.Tensor)}
        changed = _with(call, floats | {n: _turned(call, n) for n in caches_of(call) if n not in call.op.mutates})
    if not call.op.mutates and (tokens := tokens_of(changed)):
        changed = keep_tokens(changed, range(tokens)[::-1]) or changed
    args = {name: _formed(changed.args[name], call.args[name]) for name in changing}
    return None if all(_same(args[name], call.args[name]) for name in changing) else _with(call, args)


def _same_form(call: Call, other: Call) -> bool:
    if call.numerics != other.numerics:
        return False
    for name, arg in call.op.args.items():
        mine, theirs = call.args[name], other.args[name]
        if arg.kind == "attr" and mine != theirs:
            return False
        if arg.kind in ("tensor", "cache") and _form(mine) != _form(theirs):
            return False
    return True


def _form(value: Any) -> Any:
    if isinstance(value, Cache):
        return value.layout, _form(value.data)
    return value if value is None else (value.dtype, value.shape, value.stride())


def _halved(value: torch.Tensor) -> torch.Tensor:
    """Every second element of the last dim halved, which is exact; integers stay."""
    if not value.dtype.is_floating_point or not value.dim():
        return value
    halves = value.to(torch.float32, copy=True)
    halves[..., ::2] /= 2
    return halves.to(value.dtype)


def _turned(call: Call, name: str) -> Cache:
    """A cache whose records that the call points to are one place further; with pages named as a whole, the same."""
    cache = call.args[name]
    if any(pointer.unit == "page" for pointer in call.op.args[name].pointers):
        return cache
    turned, entries = replace(cache, data=cache.data.clone()), owned_entries(call, name).nonzero(as_tuple=True)
    for to, rows in zip(field_rows(turned), field_rows(cache), strict=True):
        to[entries] = rows[entries].roll(1, 0)
    return turned


def _formed(value: Any, like: Any) -> Any:
    """A value of the same shape with the strides of another; itself if it has them."""
    if isinstance(value, Cache):
        return replace(like, data=_formed(value.data, like.data))
    if value.stride() == like.stride():
        return value
    held = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in like.stride())
    held[once].copy_(value[once])
    return held


def _same(value: Any, other: Any) -> bool:
    value, other = (v.data if isinstance(v, Cache) else v for v in (value, other))
    return value is other or torch.equal(*(v.contiguous().flatten().view(torch.uint8) for v in (value, other)))


def _token_args(call: Call) -> list[str]:
    """Arguments whose first dim is the token; none if another dim of some argument or output is."""
    args = [*call.op.args.values(), *call.op.outputs.values()]
    if any("token" in arg.dims.split()[1:] for arg in args):
        return []
    return [n for n, arg in call.op.args.items() if arg.dims.split()[:1] == ["token"] and call.args[n] is not None]


def permute_pages(call: Call, rng: np.random.Generator) -> tuple[Call, Back] | None:
    """The call with the pages of every cache in another order, and what brings its results' caches back in theirs."""
    orders = {name: rng.permutation(len(cache.data)) for name, cache in caches_of(call).items() if len(cache.data) > 1}
    if not orders:
        return None
    taken = {name: torch.from_numpy(order) for name, order in orders.items()}
    moved = _renumbered(call, taken)

    def back(results: Mapping[str, Any]) -> dict[str, Any]:
        returned = dict(results)
        for name in taken.keys() & returned.keys():
            cache = returned[name]
            data = torch.empty_like(cache.data)
            data[taken[name]] = cache.data
            returned[name] = replace(cache, data=data)
        return returned

    return moved, back


def compact_pages(call: Call) -> Call:
    """The call without pages that nothing points to; a cache keeps at least one."""
    taken = {}
    for name, cache in caches_of(call).items():
        kept = owned_entries(call, name).any(1).nonzero().flatten()
        taken[name] = kept if len(kept) else torch.zeros(min(1, len(cache.data)), dtype=torch.long)
    return _renumbered(call, taken)


def caches_of(call: Call) -> dict[str, Cache]:
    """The call's caches by the argument's name."""
    return {name: value for name, value in call.args.items() if isinstance(value, Cache)}


def owned_entries(call: Call, name: str) -> torch.Tensor:
    """Which entries of a cache the call may touch: ``bool [page, entry]``; of a table's pages, all."""
    cache = call.args[name]
    pages, entries = len(cache.data), cache.layout.entries
    owned = torch.zeros(pages, entries, dtype=torch.bool)
    for pointer in call.op.args[name].pointers:
        values = call.args[pointer.arg]
        if values is None:
            continue
        values = values[..., pointer.columns(call.args)].reshape(-1).cpu().long()
        if pointer.unit == "page":
            owned[values[(values >= 0) & (values < pages)]] = True
        else:
            owned.view(-1)[values[(values >= 0) & (values < pages * entries)]] = True
    return owned


def _renumbered(call: Call, taken: Mapping[str, torch.Tensor]) -> Call:
    """Page ``i`` of each cache becomes what page ``taken[i]`` was, and pointers follow."""
    changed: dict[str, Any] = {}
    for name, old in taken.items():
        cache = call.args[name]
        changed[name] = replace(cache, data=cache.data[old])
        new = torch.full((len(cache.data),), -1)
        new[old] = torch.arange(len(old))
        for pointer in call.op.args[name].pointers:
            values = changed.get(pointer.arg, call.args[pointer.arg])
            if values is None:
                continue
            values, columns = values.clone(), pointer.columns(call.args)
            values[..., columns] = _follow(values[..., columns], new, pointer.unit, cache.layout.entries)
            changed[pointer.arg] = values
    return _with(call, changed)


def _follow(values: torch.Tensor, new: torch.Tensor, unit: str, entries: int) -> torch.Tensor:
    """Pointers after pages got new numbers; what points nowhere, or beyond the pool, stays."""
    per = 1 if unit == "page" else entries
    inside = (values >= 0) & (values < len(new) * per)
    safe = torch.where(inside, values, torch.zeros_like(values)).long()
    moved = new[safe // per] * per + safe % per
    return torch.where(inside, moved.to(values.dtype), values)


def _with(call: Call, changed: Mapping[str, Any]) -> Call:
    return replace(call, args={**call.args, **changed})
