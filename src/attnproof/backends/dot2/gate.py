"""Whether this backend may serve the current GPU: the right kind of device, libraries, and a self-test that held.

The self-test is one small causal problem of fp16, forward and backward, against fp32 torch on the same device. Its
verdict is kept on disk under the driver's version, the architecture and the sources, so that it runs once per machine.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from . import compiler, source
from .source import FILES

# prefixes of the architectures that the compile matrix covers
SERVED = ("gfx906", "gfx908", "gfx90a", "gfx942", "gfx101", "gfx103", "gfx110", "gfx120")
SHAPE = (2, 64, 96, 64)  # heads, queries, keys, head dim
ALLOWED = 2e-2  # of results around 1; a wrong row is off by about 1


def closed() -> str | None:
    """Why the current GPU cannot be served, or None."""
    import torch

    if not torch.version.hip:
        return "serves AMD GPUs, and this torch is not built for ROCm"
    if not torch.cuda.is_available():
        return "needs an AMD GPU that torch can see"
    return _closed(torch.cuda.current_device())


@functools.cache
def _closed(index: int) -> str | None:
    import torch

    from ...errors import BackendMissing

    about: Any = torch.cuda.get_device_properties(index)
    architecture = str(about.gcnArchName)
    if not architecture.startswith(SERVED):
        return f"serves {', '.join(SERVED)}, got {architecture.split(':')[0]}"
    try:
        from . import loader

        made = loader.device(index)
        verdict = _remembered(made, index)
    except (BackendMissing, compiler.CompileError, OSError) as error:
        return f"could not be brought up on {architecture}: {str(error).splitlines()[0]}"
    if verdict is None:
        loader.announce(f"serves {architecture} after its self-test")
    return verdict


def _remembered(device: Any, index: int) -> str | None:
    """The self-test's verdict, from disk if it ran before with all the same parts."""
    version = device.runtime.compiler.version if device.runtime.compiler else "prebuilt"
    texts = [source.text(kernel) for kernel in FILES]
    key = source.digest(*texts, device.architecture, version, str(device.runtime.driver))
    path = compiler.cache_folder() / f"selftest-{key}.json"
    try:
        if json.loads(path.read_text(encoding="utf-8"))["holds"] is True:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    errors = self_test(index)
    if max(errors.values()) > ALLOWED or any(x != x for x in errors.values()):
        return f"failed its self-test on {device.architecture}: {errors}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"holds": True, "errors": errors}), encoding="utf-8")
    except OSError:
        return None
    return None


def self_test(index: int | str) -> dict[str, float]:
    """Largest error of out, lse and the gradients of a small problem, against fp32 torch on the same device."""
    import torch

    from ...problem import Options, bind
    from . import backward, forward

    heads, m, n, d = SHAPE
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (1, heads, m, d), "k": (1, 1, n, d), "v": (1, 1, n, d), "dout": (1, heads, m, d)}
    q, k, v, dout = (
        torch.randn(shape, generator=generator).to(torch.float16).to(index) for shape in shapes.values()
    )
    problem, tensors = bind(q, k, v, Options(causal=True))
    out, lse = forward(problem, tensors)
    grads = backward(problem, tensors, out, lse, dout, None, frozenset("qkv"))
    right = [x.float().requires_grad_() for x in (q, k, v)]
    scores = right[0] @ right[1].transpose(-1, -2) * problem.scale
    rows, keys = torch.arange(m, device=q.device)[:, None], torch.arange(n, device=q.device)[None, :]
    scores = scores.masked_fill(keys > rows + n - m, -torch.inf)
    whole = torch.softmax(scores, -1) @ right[2]
    made = torch.autograd.grad(whole, right, dout.float())
    pairs = {
        "out": (out, whole),
        "lse": (lse, torch.logsumexp(scores, -1)),
        **dict(zip(("dq", "dk", "dv"), zip(grads[:3], made, strict=True), strict=True)),
    }
    return {at: float((got.float() - want).detach().abs().max()) for at, (got, want) in pairs.items()}
