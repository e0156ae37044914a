"""The real-input run: kernels judged on the layers of a real model, then the model itself with ours inside.

layers   q, k, v, padding mask and output gradient of every layer, captured while the model reads text; every
         backend that runs here, and torch's, against float64
model    the whole model with each of our backends in place of its own attention: embeddings against those it has
         with SDPA, gradients of all its weights, and other tokens in the padding, which must change nothing
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from attnproof.cases import Case
from attnproof.verify import records
from attnproof.verify.blas import one_thread
from attnproof.verify.judge import Check, TensorReport
from attnproof.verify.real_layers import candidates, case_of, judge_layer
from attnproof.verify.real_model import LENGTHS, PACKAGE, Reader, Reading, quiet_transformers, versions
from attnproof.verify.suite import FAIL, PASS, Verdict

EMBEDDING_LIMIT = 2e-5  # largest difference of a component; an embedding has length 1
GRADIENT_LIMIT = 1e-4  # relative, in the norm of each weight's gradient
# below this share of the whole gradient a weight has none in exact arithmetic: float64 shows its rounding there
VANISHING = 1e-12

Progress = Callable[[str, int], AbstractContextManager[Callable[[str], Any]]]


@dataclass(frozen=True)
class RealResult:
    """What came out.

    Attributes:
        rows: one verdict per layer and candidate, and one per backend for the whole model.
        record: the record, ready to be written as JSON.
    """

    rows: tuple[Verdict, ...]
    record: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Everything holds; findings about torch's kernels do not count against us."""
        return all(row.status != FAIL for row in self.rows)


def run(*, progress: Progress | None = None, lengths: tuple[int, ...] = LENGTHS) -> RealResult:
    """Run everything.

    Args:
        progress: called with a title and a number of steps; the context it returns yields a function that is called
            after each step (``cli._common.progress``).
        lengths: tokens per text, an even number of texts, at most 512 tokens each.

    Raises:
        BackendMissing: a package of the extra ``real`` is not installed.
        ValueError: lengths do not make pairs of texts.
    """
    if len(lengths) % 2 or not all(2 <= length <= 512 for length in lengths):
        raise ValueError(f"lengths: expected an even number of lengths from 2 to 512, got {lengths}")
    reader = Reader(lengths)
    judged = candidates()
    own = [candidate.name.partition(":")[2] for candidate in judged if candidate.own]
    layers = int(reader.model.config.num_hidden_layers)
    steps = 2 + layers * len(judged) + len(own)
    with one_thread(), quiet_transformers(), (progress or _silent)("real input", steps) as tick:
        baseline, captured = reader.capture()
        tick("captured")
        exact = reader.read_float64()
        tick("float64 model")
        rows: list[Verdict] = []
        for index, layer in enumerate(captured):
            case = case_of(layer, index, _group(index, layers))
            rows += judge_layer(layer, case, judged, tick)
        for name in own:
            rows.append(judge_model(reader, name, baseline, exact))
            tick(f"model with {name}")
    return RealResult(tuple(rows), _record(reader, rows))


def _silent(title: str, steps: int) -> AbstractContextManager[Callable[[str], Any]]:
    return nullcontext(lambda label: None)


def _group(index: int, layers: int) -> str:
    """Three groups of neighbouring layers: early, middle, late."""
    size = -(-layers // 3)
    first = index // size * size
    return f"real layers {first + 1}-{min(first + size, layers)}"


def judge_model(reader: Reader, backend: str, baseline: Reading, exact: Reading) -> Verdict:
    """The whole model with one backend of ours."""
    from attnproof.compat.transformers import register

    name = register(f"attnproof-{backend}", backend=backend)
    found = reader.read(name)
    other = reader.read(name, texts=reader.texts.with_other_padding(reader.vocabulary), gradients=False)
    reports = [
        _embeddings(found, baseline, exact),
        _gradients(found, baseline, exact),
        _padding(found, other),
    ]
    broken = [f"{report.tensor}: {check.name}" for report in reports for check in report.failures()]
    shape = reader.texts.ids.shape
    config = reader.model.config
    case = Case(
        name="real-model",
        group="real model",
        B=shape[0],
        H=config.num_attention_heads,
        Hkv=config.num_attention_heads,
        M=shape[1],
        N=shape[1],
        D=config.hidden_size // config.num_attention_heads,
        Dv=config.hidden_size // config.num_attention_heads,
        generator="captured",
        keep="padding",
        backward=True,
    )
    status = FAIL if broken else PASS
    return Verdict(case, f"attnproof:{backend}", status, reason="; ".join(broken), tensors=reports)


def _report(tensor: str, difference: Any, size: Any, checks: list[Check]) -> TensorReport:
    largest, rms = float(difference.abs().max()), float(difference.square().mean().sqrt())
    scale = float(size.square().mean().sqrt())
    worst = max(checks, key=lambda check: check.value / check.limit if check.limit else check.value)
    used = worst.value / worst.limit if worst.limit else worst.value
    return TensorReport(
        tensor, largest, rms, rms / scale if scale else 0.0, checks, bound=worst.limit, bound_used=used
    )


def _embeddings(found: Reading, baseline: Reading, exact: Reading) -> TensorReport:
    difference = found.embeddings - baseline.embeddings
    checks = [
        Check("max abs to sdpa", float(difference.abs().max()), EMBEDDING_LIMIT),
        Check(
            "max abs to float64", float((found.embeddings - exact.embeddings).abs().max()), EMBEDDING_LIMIT
        ),
    ]
    return _report("embeddings", difference, baseline.embeddings, checks)


def _padding(found: Reading, other: Reading) -> TensorReport:
    difference = other.embeddings - found.embeddings
    check = Check("max abs", float(difference.abs().max()), 0.0, "other tokens in the padding change nothing")
    return _report("other padding", difference, found.embeddings, [check])


def _gradients(found: Reading, baseline: Reading, exact: Reading) -> TensorReport:
    """Every weight by its norm.

    A shift of all logits of a row changes no softmax, so the bias of a key projection has gradient zero in exact
    arithmetic and only rounding in any other. Such weights are held against the smallest true gradient.
    """
    import torch

    mine, theirs, true = found.gradients, baseline.gradients, exact.gradients
    norms = {name: float(grad.norm()) for name, grad in true.items()}
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    alive = [name for name, norm in norms.items() if norm > VANISHING * total]
    gone = sorted(set(norms) - set(alive))
    smallest = min(norms[name] for name in alive)

    def worst(of: dict[str, Any], to: dict[str, Any]) -> float:
        return max(float((of[name] - to[name]).norm() / to[name].norm()) for name in alive)

    same = mine.keys() == theirs.keys() == true.keys()
    checks = [
        Check("weights without a gradient", 0.0 if same else 1.0, 0.0),
        Check(f"relative to sdpa, {len(alive)} weights", worst(mine, theirs), GRADIENT_LIMIT),
        Check(f"relative to float64, {len(alive)} weights", worst(mine, true), GRADIENT_LIMIT),
        Check(
            f"vanishing, {len(gone)} weights",
            max((float(mine[name].norm()) for name in gone), default=0.0) / smallest,
            GRADIENT_LIMIT,
        ),
    ]
    joined = [torch.cat([grads[name].flatten() for name in alive]) for grads in (mine, theirs)]
    return _report("weight gradients", joined[0] - joined[1], joined[1], checks)


def _record(reader: Reader, rows: list[Verdict]) -> dict[str, Any]:
    results = [{**records.from_verdict(row), "replay": "attnproof verify --real"} for row in rows]
    config = reader.model.config
    protocol = {
        "model": PACKAGE,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "weights": sum(weight.numel() for weight in reader.model.parameters()),
        "text": "docstrings of attnproof",
        "lengths": list(reader.texts.lengths),
        "padded_to": int(reader.texts.ids.shape[1]),
        "token_digest": reader.texts.digest,
        "dtype": "float32",
        "versions": versions(),
    }
    return records.record("verify-real", protocol, results)
