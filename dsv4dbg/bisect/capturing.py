"""A candidate's launches as a graph of the device (CUDA or HIP), as servers run them in decode steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 2  # calls before the capture, in which kernels are compiled and tuned


class NotCapturable(Exception):
    """The candidate does something that no graph can hold, such as waiting for the device."""


def captured(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """What replays a function's launches on the buffers that it was captured with.

    A CPU has no graphs: there the function itself is made use of again, after one call.

    Returns:
        a function that replays, and returns the result of the capture, whose tensors every replay overwrites.

    Raises:
        NotCapturable: with the device's reason; the process's device is in no state to be used any further.
    """
    if device.type == "cpu":
        function()
        return function
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = function()
    except RuntimeError as error:
        raise NotCapturable(_reason(error)) from error

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _reason(error: BaseException) -> str:
    """The first line of the first error: one that breaks a capture off makes its end fail as well."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).partition("\n")[0]
