"""Weights on the device, by official name, and what a trace says of them.

A `ModelWeights` takes tensors from a checkpoint source, moves a layer's to the device and remembers which tensor is
which, so that a capture can name a weight instead of copying it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dsv4dbg.model.checkpoint import Checkpoint

Weights = Mapping[str, torch.Tensor]


class ModelWeights:
    """All layers' weights, resident on one device.

    Args:
        source: gives tensors by name within a layer (``attn.wq_a.weight``).
    """

    def __init__(self, source: Checkpoint, device: torch.device) -> None:
        self.source = source
        self.device = device
        self._groups: dict[str, Weights] = {}
        self._names: dict[int, str] = {}

    def _group(self, prefix: str, load: Callable[[], Weights]) -> Weights:
        if prefix not in self._groups:
            group = {name: tensor.to(self.device) for name, tensor in load().items()}
            self._groups[prefix] = group
            self._names |= {id(tensor): prefix + name for name, tensor in group.items()}
        return self._groups[prefix]

    def layer(self, index: int) -> Weights:
        return self._group(f"layers.{index}.", lambda: self.source.layer(index))

    def mtp(self, index: int) -> Weights:
        return self._group(f"mtp.{index}.", lambda: self.source.mtp(index))

    def ends(self) -> Weights:
        return self._group("", self.source.ends)

    def tensor(self, name: str) -> torch.Tensor:
        """A weight by its full official name, on the device."""
        kind, _, rest = name.partition(".")
        if kind in ("layers", "mtp"):
            index, _, key = rest.partition(".")
            group = self.layer(int(index)) if kind == "layers" else self.mtp(int(index))
            return group[key]
        return self.ends()[name]

    def reference(self, tensor: torch.Tensor) -> dict[str, object] | None:
        """Name, hash, dtype and shape of a weight handed out earlier, as a trace stores it; None for other tensors."""
        name = self._names.get(id(tensor))
        if name is None:
            return None
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"tensor": name, "hash": self.source.hash(name), "dtype": dtype, "shape": list(tensor.shape)}
