"""``ops``, ``doctor`` and the group itself."""

from __future__ import annotations

import json

import pytest
import torch

from dsv4dbg.cli.main import COMMANDS
from dsv4dbg.kernels.registry import registry
from dsv4dbg.model import environment


def test_ops_lists_every_op(dsv4dbg) -> None:
    ran = dsv4dbg("ops")
    assert ran.code == 0
    assert all(op in ran.out for op in registry().ops)


def test_one_op_in_text_and_json(dsv4dbg) -> None:
    assert '@implements("sparse_mla_decode", "mine")' in dsv4dbg("ops", "sparse-mla-decode").out
    (op,) = json.loads(dsv4dbg("ops", "compress_insert", "--json").out)["ops"]
    assert op["mutates"] == {"state_cache": "state_slots", "cache": "slots"}
    assert "torch" in op["implementations"]
    assert "token" in op["args"]["positions"]["dims"]


def test_unknown_op(dsv4dbg) -> None:
    ran = dsv4dbg("ops", "warp_drive")
    assert ran.code == 2
    assert "unknown op 'warp_drive'" in ran.err
    assert "rms_norm" in ran.err


def test_numerics_differences(dsv4dbg) -> None:
    changed = json.loads(dsv4dbg("ops", "--numerics", "official", "--diff", "hf", "--json").out)["differences"]
    assert changed["index_hadamard"] == [True, False]
    assert json.loads(dsv4dbg("ops", "--diff", "official", "--json").out)["differences"] == {}
    assert dsv4dbg("ops", "--numerics", "nope").code == 2


def test_doctor(dsv4dbg, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    ran = dsv4dbg("doctor", "--device", "cpu", "--json")
    document = json.loads(ran.out)
    assert ran.code == 0
    assert document["fp8"] == {"ocp": None, "fnuz": None}
    assert document["environment"]["switches"]["VLLM_ROCM_USE_AITER"] == "1"
    assert document["environment"]["torch"] == torch.__version__
    assert "FP8 conversions right on cpu" in dsv4dbg("doctor", "--device", "cpu").out


def test_doctor_finds_a_wrong_conversion(dsv4dbg, monkeypatch: pytest.MonkeyPatch) -> None:
    right = environment.fp8_decode

    def nan_lost(codes: torch.Tensor, dialect: str) -> torch.Tensor:
        return right(codes, dialect).nan_to_num(-0.0)

    monkeypatch.setattr(environment, "fp8_decode", nan_lost)
    ran = dsv4dbg("doctor", "--device", "cpu")
    assert ran.code == 1
    assert "byte 0x80 decodes to -0.0, not nan" in ran.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(dsv4dbg, command: str) -> None:
    for flag in ("-h", "--help"):
        ran = dsv4dbg(command, flag)
        assert ran.code == 0
        assert f"dsv4dbg {command}" in ran.out


def test_the_group_lists_all_commands(dsv4dbg) -> None:
    ran = dsv4dbg("--help")
    assert all(command in ran.out for command in COMMANDS)
    assert dsv4dbg("no-such-command").code == 2
