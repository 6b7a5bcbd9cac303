"""Triton kernels on the CPU: calls made in a process where Triton is its own interpreter.

``TRITON_INTERPRET=1`` counts when Triton is first imported, and this process may need Triton as a compiler. So the
first call starts ``python -m dsv4dbg.kernels.interpreter``, which stays for the process's life and answers one call
after the other; a call that kills it is a `ChildDied` here, and the next one starts another. Results have the bits of
the same call made in a process under ``TRITON_INTERPRET=1``; what it writes to its arguments is written here too.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import inspect
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from dsv4dbg.kernels.child import Child, ChildDied, parent
from dsv4dbg.kernels.shipping import Storages

_lock = threading.Lock()
_child: Child | None = None


class RemoteTraceback(Exception):
    """Where an exception came from, as text."""


def call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], fill: int | None = None
) -> tuple[Any, Any]:
    """``function(*args, **kwargs)`` in the interpreter's process.

    Args:
        function: a function at the top of a module; there it is found by its module's name or file.
        fill: if given, the call is observed (see `triton_run.observed`).
    Returns:
        the result and the observation, or None.
    """
    with _lock:
        child = _warm()
        try:
            return _exchange(child, function, args, kwargs, fill)
        except (EOFError, OSError) as error:
            died = child.died()
            raise ChildDied(f"Triton's interpreter {died} (in {function.__name__})") from error


def _warm() -> Child:
    global _child
    if _child is None or not _child.usable:
        _child = Child("dsv4dbg.kernels.interpreter", {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
        atexit.register(_child.close)
    return _child


def _exchange(
    child: Child, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], fill: int | None
) -> tuple[Any, Any]:
    connection, storages = child.connection, Storages()
    packed = storages.pack((args, dict(kwargs)))
    sizes = [s.nbytes() for s in storages.storages]
    place = (function.__module__, inspect.getsourcefile(function), function.__qualname__)
    connection.send((place, packed, sizes, fill))
    for number in range(len(sizes)):
        connection.send_bytes(storages.bytes(number))
    error, packed, changed, new = connection.recv()
    for number in changed:
        connection.recv_bytes_into(storages.bytes(number))
    _receive(connection, storages, new)
    if error is not None:
        raise pickle.loads(error[0]) from RemoteTraceback(error[1])
    return storages.unpack(packed)


def _receive(connection: Any, storages: Storages, sizes: list[int]) -> None:
    """New storages of these sizes with the bytes that come in."""
    import torch

    for size in sizes:
        storages.add(torch.UntypedStorage(size))
        connection.recv_bytes_into(storages.bytes(len(storages.storages) - 1))


def _serve() -> None:
    import numpy as np
    import xxhash

    np.seterr(all="ignore")  # inf - inf and log(0) are ordinary in masked lanes
    quicken()
    connection = parent()
    while True:
        try:
            place, packed, sizes, fill = connection.recv()
        except EOFError:
            return
        storages = Storages()
        _receive(connection, storages, sizes)
        before = [xxhash.xxh3_128_digest(storages.bytes(i)) for i in range(len(sizes))]
        error, result = None, None
        try:
            args, kwargs = storages.unpack(packed)
            result = _call(_find(*place), args, kwargs, fill)
        except Exception as exception:
            error = _portable(exception)
        answer = storages.pack(result)
        changed = [i for i in range(len(sizes)) if xxhash.xxh3_128_digest(storages.bytes(i)) != before[i]]
        new = range(len(sizes), len(storages.storages))
        connection.send((error, answer, changed, [storages.storages[i].nbytes() for i in new]))
        for number in (*changed, *new):
            connection.send_bytes(storages.bytes(number))


def quicken() -> None:
    """Patch `triton.language` for interpretation once, not at every call of a device function (half of the time)."""
    import types

    import triton.language as tl
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    # as Triton 3.9 has it; 3.6 fails here with numpy 2.4
    setattr(tl.tensor, "__index__", lambda self: int(self.handle.data.squeeze()))  # noqa: B010
    kept = types.SimpleNamespace(scope=scope, restore=lambda: None)
    interpreter._patch_lang = lambda fn: kept


def _call(function: Callable[..., Any], args: tuple, kwargs: dict, fill: int | None) -> tuple[Any, Any]:
    if fill is None:
        return function(*args, **kwargs), None
    from dsv4dbg.kernels.triton_run import observed

    return observed(function, args, kwargs, fill)


def _find(module: str, file: str, name: str) -> Callable[..., Any]:
    """A function by its module (imported by name where that leads to ``file``, else from the file) and name."""
    found = sys.modules.get(module)
    if found is None:
        try:
            found = importlib.import_module(module)
        except ImportError:
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None
            assert spec.loader is not None
            found = importlib.util.module_from_spec(spec)
            sys.modules[module] = found
            spec.loader.exec_module(found)
    value: Any = found
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _portable(exception: Exception) -> tuple[bytes, str]:
    """An exception as bytes that load in the parent, and its traceback."""
    text = "".join(traceback.format_exception(exception))
    try:
        data = pickle.dumps(exception)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(RuntimeError(f"{type(exception).__name__}: {exception}"))
    return data, text


if __name__ == "__main__":
    _serve()
