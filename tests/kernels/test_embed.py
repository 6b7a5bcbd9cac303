"""embed: a copy, in every stream, of the right row."""

from __future__ import annotations

import pytest
import torch

from dsv4dbg.kernels.ends.embed import embed
from dsv4dbg.kernels.oracle import to_numpy

WEIGHT = torch.arange(30, dtype=torch.float32).reshape(10, 3) / 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_copied_into_every_stream(dtype):
    weight = WEIGHT.to(dtype)
    streams = embed(torch.tensor([9, 0, 9]), weight, hc_mult=4)
    assert (streams.shape, streams.dtype) == ((3, 4, 3), dtype)
    for j in range(4):
        assert torch.equal(streams[:, j], weight[[9, 0, 9]])


def test_streams_are_storage_of_their_own():
    weight = WEIGHT.clone()
    streams = embed(torch.tensor([1, 1]), weight, hc_mult=2)
    assert streams.is_contiguous()
    streams[0, 0] = -1
    assert streams[0, 1].equal(WEIGHT[1])
    assert streams[1, 0].equal(WEIGHT[1])
    assert weight.equal(WEIGHT)


@pytest.mark.parametrize("wrong", [-1, 10])
def test_an_id_outside_the_vocabulary_is_an_error(wrong):
    with pytest.raises(IndexError):
        embed(torch.tensor([0, wrong]), WEIGHT, hc_mult=4)


def test_no_tokens():
    assert embed(torch.tensor([], dtype=torch.int64), WEIGHT, hc_mult=4).shape == (0, 4, 3)


def test_invariants_notice():
    args = {"ids": torch.tensor([3, 4]), "weight": WEIGHT, "hc_mult": 4}
    call = {n: to_numpy(v) for n, v in {**args, "streams": embed(**args)}.items()}
    assert [i.check(call) for i in embed.invariants] == [None, None]
    call["streams"] = call["streams"].copy()
    call["streams"][1, 2, 0] += 1
    assert [i.check(call) for i in embed.invariants] == [None, "streams differ from stream 0 at (1, 2, 0)"]
