"""Device functions that both routers share: ``sqrt(softplus(z))`` and the weights of chosen experts.

exp and log1p are written out in float32 (argument reduction and the polynomials of Cephes and of FreeBSD's log1pf,
about one unit in the last place, subnormals kept), because the hardware's approximations differ from device to device
and flush subnormals, and a router's near ties are decided by the last bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from dsv4dbg.kernels import triton_codes as codes
from dsv4dbg.kernels.contract import ACT_DTYPES
from dsv4dbg.kernels.numerics import Numerics


@triton.jit
def _exp(x):
    """``exp(x)`` in float32 for x up to 88, subnormal results included; 0 below -104; NaN stays."""
    low = tl.where(x < -150.0, -150.0, x)
    n = tl.floor(low * 1.4426950408889634 + 0.5)
    r = (low - n * 0.693359375) - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = (p * (r * r) + r) + 1.0
    power = tl.where(x == x, n, 0.0).to(tl.int32)
    half = power >> 1  # 2^power in two steps: the result may be subnormal, the factors not
    return tl.where(x == x, p * codes.power_of_two(half) * codes.power_of_two(power - half), x)


@triton.jit
def _log1p(e):
    """``log(1 + e)`` in float32 for ``e >= 0``."""
    u = 1.0 + e
    bits = u.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    k = ((bits >> 23) - 127).to(tl.float32)
    lost = tl.where(k >= 25.0, 0.0, tl.where(k >= 2.0, 1.0 - (u - e), e - (u - 1.0)))  # of e, in 1 + e
    c = tl.div_rn(lost, u)
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    s = tl.div_rn(f, 2.0 + f)
    z = s * s
    w = z * z
    r = z * (0.66666662693 + w * 0.28498786688) + w * (0.40000972152 + w * 0.24279078841)
    half = 0.5 * f * f
    result = s * (half + r) + (k * 9.0580006145e-6 + c) - half + f + k * 6.9313812256e-1
    return tl.where(e < 5.9604645e-8, e, result)


@triton.jit
def nearest(x, dtype: tl.constexpr):
    """float32 rounded to ``dtype`` and widened again."""
    return codes.widened(codes.rounded(x, dtype))


@triton.jit
def scores(z, dtype: tl.constexpr):
    """``sqrt(softplus(z))`` of float32 logits, each step rounded to ``dtype``; softplus is z above 20."""
    softplus = tl.where(z > 20.0, z, _log1p(_exp(tl.where(z > 20.0, 20.0, z))))
    return nearest(tl.sqrt_rn(nearest(softplus, dtype)), dtype)


@triton.jit
def weights_of(chosen, eps, scale, dtype: tl.constexpr):
    """``chosen / (sum(chosen) + eps) * scale`` along axis 1 (zeros beyond the choices), steps rounded to ``dtype``."""
    total = nearest(nearest(tl.sum(chosen, 1), dtype) + eps, dtype)
    share = nearest(tl.div_rn(chosen, tl.broadcast_to(total[:, None], chosen.shape)), dtype)
    return nearest(share * scale, dtype)


def rounding(logits: Any, numerics: Numerics) -> tl.dtype:
    """The dtype that every step is rounded to."""
    return tl.bfloat16 if numerics.router == "act" and logits.dtype == ACT_DTYPES[0] else tl.float32


def unsupported(args: Mapping[str, Any]) -> str | None:
    """Why the routers' kernels cannot serve these arguments, or None."""
    if args["logits"].dtype not in ACT_DTYPES:
        return f"logits are {args['logits'].dtype}"
    if args["logits"].shape[1] > 1 << 12:
        return f"{args['logits'].shape[1]} experts (at most {1 << 12})"
    if args["logits"].shape[1] * args["logits"].stride(1) >= 1 << 31:
        return "logits of a token lie 2^31 elements apart"
    return None
