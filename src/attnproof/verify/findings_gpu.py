"""Deviations of kernels on GPUs: those that were seen, and suspects that a device run (`tools/gpu_verify.py`) asks about.

A suspect becomes a finding when a run on a device has shown it; until then nothing is claimed.
"""

from __future__ import annotations

from attnproof.verify.findings import BUG, CONVENTION, PRECISION, Finding

FINDINGS: tuple[Finding, ...] = ()

BEGIN = """
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, **options):
    with sdpa_kernel(SDPBackend.{backend}):
        return scaled_dot_product_attention(q, k, v, **options)
"""

ODD = """
flat = torch.randn(3, 2 * 64 * 64 + 1, device="cuda", dtype=torch.float16)
q, k, v = (part[1:].view(1, 2, 64, 64) for part in flat)  # two bytes past an aligned address
got = attention(q, k, v)
right = attention(q.contiguous().clone(), k.contiguous().clone(), v.contiguous().clone())
torch.cuda.synchronize()
"""

ODD_BACKWARD = """
flat = torch.randn(3, 2 * 64 * 64 + 1, device="cuda", dtype=torch.float16)
q, k, v = (part[1:].view(1, 2, 64, 64).requires_grad_(True) for part in flat)
got = torch.autograd.grad(attention(q, k, v).sum(), q)[0]
q, k, v = (part.detach().clone().requires_grad_(True) for part in (q, k, v))
right = torch.autograd.grad(attention(q, k, v).sum(), q)[0]
torch.cuda.synchronize()
"""

NEGATIVE = """
x = torch.ones(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16)
got = attention(x, x, x, is_causal={causal}, scale={scale})[0, 0, :, 0]
right = torch.ones(128)  # every average of ones is one
"""

DEAD = """
x = torch.ones(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
mask = torch.ones(1, 1, 64, 64, device="cuda", dtype=torch.bool)
mask[..., 0, :] = False
got = attention(x, x, x, attn_mask=mask)[0, 0, :2, 0]
right = [0.0, 1.0]  # a row without a key is zero
"""

DEAD_GRADIENT = """
x = [torch.ones(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
mask = torch.ones(1, 1, 64, 64, device="cuda", dtype=torch.bool)
mask[..., 0, :] = False
out = attention(*x, attn_mask=mask)
got = torch.autograd.grad(out, x[2], torch.ones_like(out))[0][0, 0, :, 0]
right = torch.full((64,), 63 / 64)  # 63 rows see a key, and each gives it a share of 1/64
"""

SINGLE = """
torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, 256, 64, device="cuda") for _ in range(3))
exact = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
got = [(attention(q, k, v) - exact).abs().max().item()]
right = [0.0]
"""

LSE = """
import math
import torch

q = torch.zeros(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
got = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, False, False, scale=1.0)[1][0, 0]
right = [math.log(64)] * 64
"""

_NAMES = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


def _suspect(
    backend: str, what: str, kind: str, title: str, code: str, *, within: float = 0.0, crashes: bool = False
) -> Finding:
    return Finding(
        name=f"sdpa-cuda-{backend}-{what}",
        kernel=f"sdpa:{backend}",
        kind=kind,
        title=title,
        code=BEGIN.format(backend=_NAMES[backend]) + code if "attention(" in code else code,
        within=within,
        crashes=crashes,
        device="cuda",
        seen="no device yet",
        note="",
    )


def suspects() -> tuple[Finding, ...]:
    """What a device run should ask, with the kind that it would have."""
    made: list[Finding] = []
    for backend in _NAMES:
        odd = "an address that no sixteen bytes divide"
        made += [
            _suspect(backend, "odd-offset", BUG, f"{odd} ends the process's context", ODD, crashes=True),
            _suspect(backend, "odd-offset-values", BUG, f"{odd} gives other values", ODD, within=2e-3),
            _suspect(
                backend,
                "odd-offset-backward",
                BUG,
                f"{odd} ends the process's context in the backward pass",
                ODD_BACKWARD,
                crashes=True,
            ),
            _suspect(backend, "mask-dead-rows", CONVENTION, "a row without a key is not zero", DEAD),
            _suspect(
                backend,
                "mask-dead-rows-gradient",
                BUG,
                "a row without a key reaches the gradient of v",
                DEAD_GRADIENT,
                within=4e-3,
            ),
            _suspect(backend, "fp32", PRECISION, "fp32 inputs are multiplied in less", SINGLE, within=2e-6),
        ]
        for causal in (False, True):
            for scale in (-1.0, 0.0):
                what = ("causal-" if causal else "") + ("scale-zero" if scale == 0 else "scale-negative")
                code = NEGATIVE.format(causal=causal, scale=scale)
                made.append(_suspect(backend, what, BUG, f"scale={scale} is not an average", code))
    made.append(
        _suspect("flash", "lse", PRECISION, "the lse is off by more than fp32 loses", LSE, within=2e-6)
    )
    return tuple(made)
