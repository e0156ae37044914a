"""Findings on CPUs."""

from __future__ import annotations

from attnproof.verify.findings import BUG, CONVENTION, PRECISION, VALIDATION, Finding

TORCH = "torch 2.13.0, x86-64"

FINDINGS: tuple[Finding, ...] = (
    Finding(
        name="sdpa-cpu-causal-scale-not-positive",
        kernel="sdpa:flash",
        kind=BUG,
        title="a causal call with a scale of zero or below returns NaN in every row that masks a key",
        code="""
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

x = torch.ones(1, 1, 2, 1)
with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
    got = scaled_dot_product_attention(x, x, x, is_causal=True, scale=-1.0)
right = x  # every average of ones is one
""",
        seen=TORCH,
        note="The documentation asks for a float and names no range; without `is_causal`, and in the math backend, the "
        "same call is right. The mask is presumably multiplied by the scale after it was filled with -inf.",
        case="scale-negative-causal/float32",
    ),
    Finding(
        name="sdpa-cpu-lse-of-dead-rows",
        kernel="sdpa:flash",
        kind=CONVENTION,
        title="the lse of a row without a key is 0, which is that of a row whose one key has logit 0",
        code="""
import torch

q = torch.ones(1, 1, 1, 8)
mask = torch.full((1, 1, 1, 1), float("-inf"))
_, got = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, False, attn_mask=mask)
right = torch.tensor([float("-inf")])
""",
        seen=TORCH,
        note="The operator is internal and documents no lse. Whoever merges partial results by it gives a dead part the "
        "weight of one key; treat its rows as dead by the mask instead.",
        case="mask-dead-rows/float32",
    ),
    Finding(
        name="sdpa-cpu-half-lse",
        kernel="sdpa:flash",
        kind=PRECISION,
        title="the lse of half-precision inputs is off by 5e-5, fifty times what fp32 arithmetic loses",
        code="""
import math
import torch

q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
k = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
_, got = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, False)
right = [math.log(64)]
""",
        within=4e-6,
        seen=TORCH,
        note="All inputs are zero, so the lse is log 64 exactly; fp32 inputs give it to 1e-7. The half path uses a cheaper "
        "exponential. The output hides it (it is below a half-precision unit), merged partial results do not.",
        case="equal-300/bfloat16",
    ),
    Finding(
        name="sdpa-cpu-half-gradients-drift",
        kernel="sdpa:flash",
        kind=PRECISION,
        title="dk and dv of half-precision inputs lose accuracy with the number of queries",
        code="""
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def error(queries):
    q = torch.zeros(1, 1, queries, 8, dtype=torch.bfloat16, requires_grad=True)
    k = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    v = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(q, k, v)
    out.backward(torch.ones_like(out))
    return abs(v.grad[0, 0, 0, 0].item() / queries - 1)  # one key: dv is the number of queries


got = [error(256), error(131072)]
right = [0.0, 0.0]
""",
        within=2.0**-8,
        seen=TORCH,
        note="The gradients of a key are summed in bfloat16 from tile to tile: a sum stops growing when a tile adds less "
        "than half a unit, so that with one key dv stays at 65536 for any number of queries above. On random inputs z "
        "is 1.3 at 1024 keys and 2.1 at 4096, where an fp32 sum keeps it at 1.",
        case="long-2048-grad/bfloat16",
    ),
    Finding(
        name="flex-cpu-lse-of-very-negative-rows",
        kernel="torch:flex",
        kind=PRECISION,
        title="the lse of a row whose logits are all the least float32 is -inf although its output is an average",
        code="""
import torch
from torch.nn.attention.flex_attention import flex_attention

x = torch.ones(1, 1, 2, 8)
least = torch.finfo(torch.float32).min


def lowest(score, b, h, i, j):
    return torch.where(i == 0, least, score)


out, lse = flex_attention(x, x, x, score_mod=lowest, return_lse=True)
got = [out[0, 0, 0, 0], lse[0, 0, 0]]
right = [1.0, least]
""",
        within=1e33,
        seen=TORCH,
        note="The lse is computed in base 2, and least/ln 2 is below the range. A finite logit is arithmetic, not a mask: "
        "-inf says that the row has no key, and its output says that it has.",
        case="bias-minimum-row/float32",
    ),
    Finding(
        name="sdpa-causal-is-top-left",
        kernel="sdpa:math",
        kind=CONVENTION,
        title="with more keys than queries the causal mask starts at the top left",
        code="""
import torch
from torch.nn.functional import scaled_dot_product_attention

q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 4, 8)
v = torch.arange(4.0)[:, None].expand(1, 1, 4, 8)
got = scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0, 0, 0]
right = 1.5  # the last query of a cached decode sees all four keys
""",
        seen=TORCH,
        note="Documented: `is_causal` is the lower triangle from the upper left. A cached decode with it sees one key. "
        "`torch.nn.attention.bias.causal_lower_right` and our `attention` align to the bottom right.",
        case="top-left-100x160/float32",
    ),
    Finding(
        name="sdpa-math-negative-dropout",
        kernel="sdpa:math",
        kind=VALIDATION,
        title="a dropout probability below zero is accepted",
        code="""
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

x = torch.ones(1, 1, 2, 8)
try:
    with sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(x, x, x, dropout_p=-0.1)
    got = [1.0]  # accepted
except (RuntimeError, ValueError):
    got = [0.0]
right = [0.0]
""",
        seen=TORCH,
        note="No probability is negative; the sign of a mistake is lost.",
    ),
    Finding(
        name="sdpa-uneven-key-and-value-heads",
        kernel="sdpa:math",
        kind=VALIDATION,
        title="k with four heads and v with two are accepted under `enable_gqa`",
        code="""
import torch
from torch.nn.functional import scaled_dot_product_attention

q, k, v = (torch.ones(1, heads, 3, 8) for heads in (8, 4, 2))
try:
    scaled_dot_product_attention(q, k, v, enable_gqa=True)
    got = [1.0]  # accepted
except (RuntimeError, ValueError):
    got = [0.0]
right = [0.0]
""",
        seen=TORCH,
        note="The documentation asks that k and v have one number of heads; each is repeated by its own factor instead.",
    ),
)
