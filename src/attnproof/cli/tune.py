"""Command `tune`: measure tile sizes on this machine's GPU and keep the best in a file."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._common import JsonOption, err_console, guarded, out_console, write_json

if TYPE_CHECKING:
    from ..backends.triton.tuning import Trial
    from ..problem import Problem, Tensors

TOKENS, WIDTH = 16384, 2048


class PassName(str, Enum):
    """Which kernel to tune."""

    forward = "forward"
    dkdv = "dkdv"
    dq = "dq"


class Dtype(str, Enum):
    """Input dtypes that are tuned."""

    float16 = "float16"
    bfloat16 = "bfloat16"


def register(app: typer.Typer) -> None:
    """Add this group's command."""
    app.command(rich_help_panel="Measure")(guarded(tune))


def tune(
    passes: Annotated[
        list[PassName] | None, typer.Option("--pass", help="Only this pass; may be repeated.")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, max=256, help="D of q, k and v.")] = 128,
    length: Annotated[int, typer.Option(min=16, max=TOKENS, help="Queries and keys of a sequence.")] = 8192,
    causal: Annotated[bool, typer.Option(help="Tune for a causal mask, or for none.")] = True,
    dtype: Annotated[Dtype, typer.Option(help="Input dtype.")] = Dtype.bfloat16,
    save: Annotated[bool, typer.Option(help="Keep the best; --no-save only shows.")] = True,
    json_path: JsonOption = None,
) -> None:
    """Measure tile sizes of the Triton kernels on this GPU and keep the best for later calls.

    The file ($ATTNPROOF_TUNING, or tuning.json in the cache folder) is keyed by device, versions and shape bucket; read
    it, ship it, or delete it to go back to the tables of the package.
    """
    from ..errors import Unsupported

    problem, tensors = _call(head_dim, length, causal, dtype.value)
    from ..backends import triton as backend

    reason = backend.why_not(problem)
    if reason is not None:
        raise Unsupported("tune", reason)
    from ..backends.triton import compat, configs, tuning

    results = []
    for which in passes or list(PassName):
        trials = tuning.tune(problem, tensors, which.value, tell=_tell)
        best = trials[0]
        if best.ms is None:
            raise Unsupported(
                "tune", f"no candidate of {which.value} ran; the first failed with: {best.reason}"
            )
        architecture = compat.architecture(tensors.q.get_device())
        name = tuning.bucket(configs.key_of(problem, which.value, architecture))
        out_console().print(f"{name}: {best.ms:.3f} ms with {_describe(best)}")
        if save:
            kept = tuning.store(tuning.section(tensors.q.get_device()), name, best.config, trials)
            out_console().print(f"kept in {kept}")
        results += [_row(name, trial) for trial in trials]
    write_json(json_path, {"trials": results})


def _call(head_dim: int, length: int, causal: bool, dtype: str) -> tuple[Problem, Tensors]:
    """16384 tokens of 2048 channels, as in the package's own measurements."""
    import torch

    from ..errors import Unsupported
    from ..problem import Options, bind

    if not torch.cuda.is_available():
        raise Unsupported("tune", "needs a GPU that torch can see")
    shape = (max(1, TOKENS // length), max(1, WIDTH // head_dim), length, head_dim)
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3))
    return bind(q, k, v, Options(causal=causal))


def _tell(trial: Trial) -> None:
    err_console().print(f"{_describe(trial)}: {trial.reason or f'{trial.ms:.3f} ms'}")


def _describe(trial: Trial) -> str:
    c = trial.config
    how = "descriptors" if c.tma else "pointers"
    return f"{c.block_m}x{c.block_n}, {c.num_warps} warps, {c.num_stages} stages, {how}"


def _row(name: str, trial: Trial) -> dict[str, Any]:
    from dataclasses import asdict

    return {"bucket": name, "config": asdict(trial.config), "ms": trial.ms, "reason": trial.reason}
