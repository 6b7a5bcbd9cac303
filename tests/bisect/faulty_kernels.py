"""Candidates with planted faults, a plug-in of the tests of bisect; those named ``right`` are the reference again."""

from __future__ import annotations

import ctypes
import os
import random
import time

import torch

from dsv4dbg.kernels.registry import implements, registry


def _reference(op):
    return registry().ops[op].reference


def right(op):
    reference = _reference(op)
    return lambda **kwargs: reference(**kwargs)


for _op in ("rms_norm", "sparse_mla_decode", "compress_insert", "inv_rope", "lm_head", "moe_combine"):
    implements(_op, "right")(right(_op))


# one fault of every kind, each in an op of its own


@implements("rms_norm", "all_kinds")
def one_row_wrong(**kwargs):
    out = _reference("rms_norm")(**kwargs)
    if len(out) > 1:
        out[-1] *= 2
    return out


@implements("silu_mul", "all_kinds")
def segfault(**kwargs):
    ctypes.string_at(0)


@implements("moe_router", "all_kinds")
def raising(**kwargs):
    raise RuntimeError("the grid is 0 wide")


@implements("hash_router", "all_kinds")
def ending(**kwargs):
    os._exit(0)


@implements("lm_head", "all_kinds")
def hanging(**kwargs):
    while True:
        time.sleep(0.01)


@implements("embed", "all_kinds")
def out_of_memory(**kwargs):
    return torch.empty(1 << 50, dtype=torch.uint8)


_chance = random.Random(2)  # the same in every process, so that the test is


@implements("inv_rope", "all_kinds")
def racing(**kwargs):
    out = _reference("inv_rope")(**kwargs)
    if _chance.random() < 1 / 6:
        out[..., -1] += 1
    return out


@implements("moe_combine", "all_kinds")
def unwritten(**kwargs):
    out = _reference("moe_combine")(**kwargs)
    result = torch.empty_like(out)
    result[:, 1:] = out[:, 1:]
    return result


@implements("qnorm_rope_kv_insert", "all_kinds")
def stray(**kwargs):
    out = _reference("qnorm_rope_kv_insert")(**kwargs)
    kwargs["window_cache"].data[0, 0] += 1
    return out


_last: dict[str, torch.Tensor] = {}


@implements("gather_kv", "all_kinds")
def carrying(**kwargs):
    out = _reference("gather_kv")(**kwargs)
    before = _last.get("rows")
    _last["rows"] = out.clone()
    if before is not None and len(before) != len(out) and len(out):
        out[0] = 0
    return out


# faults that need something of the workload


@implements("sparse_mla_decode", "only_several_tokens")
def only_several_tokens(**kwargs):
    """Rows after the first of a sequence get the first one's lists, as if every row were a sequence of its own."""
    indices, window = kwargs["indices"].clone(), kwargs["window"]
    for row in range(1, len(indices)):
        before = indices[row - 1, :window]
        before = before[before >= 0]
        if len(before) and torch.isin(before[1:], indices[row, :window]).all():
            indices[row] = indices[row - 1]
    return _reference("sparse_mla_decode")(**kwargs | {"indices": indices})


@implements("rms_norm", "one_layer")
def one_layer_dies(**kwargs):
    if os.environ.get("DSV4DBG_TEST_WEIGHT") == fingerprint(kwargs["weight"]):
        os.abort()
    return _reference("rms_norm")(**kwargs)


def fingerprint(weight):
    return f"{float(weight.double().sum()):.12g}"


@implements("mhc_head", "pair")
def first_of_a_pair(**kwargs):
    _last["pair"] = kwargs["streams"]
    return _reference("mhc_head")(**kwargs)


@implements("lm_head", "pair")
def second_of_a_pair(**kwargs):
    out = _reference("lm_head")(**kwargs)
    return out * 1.5 if "pair" in _last else out


# kernels that were wired wrongly


@implements("rms_norm", "wrong_dtype")
def wrong_dtype(**kwargs):
    return _reference("rms_norm")(**kwargs).double()


@implements("rms_norm", "wrong_shape")
def wrong_shape(**kwargs):
    return _reference("rms_norm")(**kwargs)[..., :-1]


@implements("rms_norm", "no_tensor")
def no_tensor(**kwargs):
    return None


@implements("rms_norm", "two_outputs")
def two_outputs(**kwargs):
    out = _reference("rms_norm")(**kwargs)
    return out, out


@implements("rms_norm", "wrong_signature")
def wrong_signature(x, weight):
    return x * weight
