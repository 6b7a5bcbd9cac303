"""Number formats in torch: FP8 in both dialects, FP4 (e2m1), E8M0 scales, Hadamard rotation.

The rounding points of the official inference semantics: values are clamped before every FP8 cast and rounded to
nearest even; scales are powers of two, ``2^ceil(log2(amax / max))`` by exponent and mantissa bits, and are applied
by multiplying with the reciprocal power of two (exact). A group that holds inf or NaN gets the scale NaN (byte 255).
FNUZ uses 224 as its maximum, so that its values equal OCP's, and never holds 0x80 (its NaN). The oracles do not use
this module.
"""

from __future__ import annotations

from functools import cache

import torch

FP8_MAX = {"ocp": 448.0, "fnuz": 224.0}
FP8_DTYPE = {"ocp": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz}
FP8_AMAX_FLOOR = 1e-4  # floor of amax in the official FP8 quantiser
FP4_MAX = 6.0
FP4_AMAX_FLOOR = 6.0 * 2.0**-126
E8M0_BIAS = 127
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """``2.0 ** exponent`` in float32 for integer exponents up to 127, from bits (exact); 0 below -126."""
    return ((exponent.to(torch.int32) + 127).clamp_min(0) << 23).view(torch.float32)


def e8m0_decode(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8) to float32: ``2^(byte - 127)``; byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    byte = scale.to(torch.int32)
    bits = torch.where(byte == 0, 1 << 22, byte << 23)
    return torch.where(byte == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def scale_exponent(amax: torch.Tensor, maximum: float) -> torch.Tensor:
    """``ceil(log2(amax / maximum))`` as int32, from the bits of the float32 product ``amax * (1 / maximum)``.

    Above 127 (where E8M0 has its NaN) for inf and NaN, and for nothing else.
    """
    bits = (amax.float() * torch.tensor(1.0 / maximum, dtype=torch.float32, device=amax.device)).view(torch.int32)
    return ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def fp8_encode(x: torch.Tensor, dialect: str) -> torch.Tensor:
    """float32 to e4m3 bytes (uint8), clamped, round to nearest even; FNUZ never emits 0x80."""
    limit = FP8_MAX[dialect]
    codes = x.float().clamp(-limit, limit).to(FP8_DTYPE[dialect]).view(torch.uint8)
    return torch.where(codes == 0x80, 0, codes) if dialect == "fnuz" else codes


def fp8_decode(codes: torch.Tensor, dialect: str) -> torch.Tensor:
    """e4m3 bytes (uint8, or a torch float8 tensor) to float32."""
    return codes.view(torch.uint8).view(FP8_DTYPE[dialect]).float()


def fp8_quantize(x: torch.Tensor, group: int, dialect: str = "ocp") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise along the last dim in groups with one E8M0 scale each.

    Args:
        x: ``[..., n]``, any float dtype; ``n`` is a multiple of ``group``.
    Returns:
        codes ``uint8 [..., n]`` and scale bytes ``uint8 [..., n / group]`` (E8M0).
    """
    grouped = x.float().unflatten(-1, (x.shape[-1] // group, group))
    amax = grouped.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR)
    exponent = scale_exponent(amax, FP8_MAX[dialect])
    codes = fp8_encode(grouped * power_of_two(-exponent)[..., None], dialect)
    return codes.flatten(-2), (exponent + E8M0_BIAS).clamp(0, 255).to(torch.uint8)


def fp8_dequantize(codes: torch.Tensor, scale: torch.Tensor, dialect: str = "ocp") -> torch.Tensor:
    """Inverse of `fp8_quantize`, in float32 (exact)."""
    values = fp8_decode(codes, dialect).unflatten(-1, (scale.shape[-1], -1))
    return (values * e8m0_decode(scale)[..., None]).flatten(-2)


def block_dequantize(weight: torch.Tensor, scale: torch.Tensor, block: int = 128) -> torch.Tensor:
    """FP8 weight ``[..., out, in]`` with one scale per ``block x block`` to float32.

    ``scale`` is ``[..., ceil(out/block), ceil(in/block)]``: E8M0 bytes (uint8) or float32.
    """
    factor = e8m0_decode(scale) if scale.dtype == torch.uint8 else scale.float()
    rows, columns = weight.shape[-2:]
    factor = factor.repeat_interleave(block, -2)[..., :rows, :].repeat_interleave(block, -1)[..., :columns]
    return fp8_decode(weight, "ocp") * factor


@cache
def _e2m1_table(device: torch.device) -> torch.Tensor:
    return torch.tensor((*E2M1_VALUES, *(0.0 - v for v in E2M1_VALUES)), dtype=torch.float32, device=device)


def fp4_encode(x: torch.Tensor) -> torch.Tensor:
    """float32 to e2m1 codes 0..15 (uint8, one per byte), saturating at 6, ties to even."""
    magnitude = x.float().abs().clamp_max(FP4_MAX)
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    # midpoints between neighbours; a tie goes to the even code, so it moves up only below an even neighbour
    for upper, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), start=1):
        code += magnitude >= midpoint if upper % 2 == 0 else magnitude > midpoint
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def fp4_decode(codes: torch.Tensor) -> torch.Tensor:
    """e2m1 codes 0..15 (uint8) to float32; code 8 (minus zero) decodes to +0."""
    return _e2m1_table(codes.device)[codes.long()]


def fp4_pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[..., n]`` to bytes ``[..., n / 2]``: channel 2k in the low nibble, 2k + 1 in the high one."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def fp4_unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes ``[..., n / 2]`` to codes ``[..., n]``, low nibble first."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def fp4_quantize(x: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise along the last dim: packed codes ``uint8 [..., n / 2]`` and E8M0 bytes ``uint8 [..., n / group]``."""
    grouped = x.float().unflatten(-1, (x.shape[-1] // group, group))
    exponent = scale_exponent(grouped.abs().amax(-1).clamp_min(FP4_AMAX_FLOOR), FP4_MAX)
    codes = fp4_encode(grouped * power_of_two(-exponent)[..., None])
    return fp4_pack(codes.flatten(-2)), (exponent + E8M0_BIAS).clamp(0, 255).to(torch.uint8)


def fp4_dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Inverse of `fp4_quantize` and of the MXFP4 weight format, in float32 (exact)."""
    values = fp4_decode(fp4_unpack(packed)).unflatten(-1, (scale.shape[-1], -1))
    return (values * e8m0_decode(scale)[..., None]).flatten(-2)


@cache
def _hadamard_matrix(n: int, device: torch.device) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.to(device)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Sylvester-order Hadamard rotation of the last dim (a power of two), scaled by ``n^-0.5``; result in x's dtype."""
    n = x.shape[-1]
    return (x.float() @ _hadamard_matrix(n, x.device) * n**-0.5).to(x.dtype)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """RoPE on the last ``r`` channels, interleaved pairs: ``(a, b) -> (a cos - b sin, a sin + b cos)`` in float32.

    Args:
        x: ``[token, ..., channel]``.
        cos_sin: ``[token, r]``: r/2 cosines, then r/2 sines.
        inverse: rotate by the negative angle.
    """
    r = cos_sin.shape[-1]
    shape = (x.shape[0], *(1,) * (x.dim() - 2), r // 2)
    cos, sin = (t.float().reshape(shape) for t in cos_sin.split(r // 2, dim=-1))
    if inverse:
        sin = -sin
    a, b = x[..., -r::2].float(), x[..., -r + 1 :: 2].float()
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-r], rotated.to(x.dtype)), dim=-1)
