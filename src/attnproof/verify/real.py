"""The real-input run: kernels judged on the layers of a real model, then the model itself with ours inside.

layers   q, k, v, padding mask and output gradient of every layer, captured while the model reads text;
         every backend that runs here, and torch's, against float64
model    the whole model with each of our backends (but the oracle, which never serves by itself) in place
         of its own attention: embeddings against those it has with SDPA, gradients of all its weights, and
         other tokens in the padding, which must change nothing
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from attnproof.cases import Case
from attnproof.verify import records, session
from attnproof.verify.blas import one_thread
from attnproof.verify.candidate import Candidate
from attnproof.verify.judge import Check, TensorReport
from attnproof.verify.real_layers import Heard, ask, case_of, decide
from attnproof.verify.real_model import (
    LENGTHS,
    PACKAGE,
    Layer,
    Reader,
    Reading,
    quiet_transformers,
    versions,
)
from attnproof.verify.suite import FAIL, PASS, SKIP, Verdict

EMBEDDING_LIMIT = 2e-5  # largest difference of a component; an embedding has length 1
GRADIENT_LIMIT = 1e-4  # relative, in the norm of each weight's gradient
# below this share of the whole gradient a weight has none in exact arithmetic: float32 shows only rounding
VANISHING = 1e-7

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


def run(
    *,
    judged: list[Candidate] | None = None,
    progress: Progress | None = None,
    lengths: tuple[int, ...] = LENGTHS,
) -> RealResult:
    """Run everything.

    Args:
        judged: what to judge; every backend of ours on the host, and torch's, if left out.
        progress: called with a title and a number of steps; the context it returns yields a function that is
            called after each step (``cli._common.progress``).
        lengths: tokens per text: an even number of at least four texts, 2 to 512 tokens each.

    Raises:
        BackendMissing: a package of the extra ``real`` is not installed.
        ValueError: lengths do not make two pairs of texts, with which a contrastive loss begins.
    """
    if len(lengths) < 4 or len(lengths) % 2 or not all(2 <= length <= 512 for length in lengths):
        raise ValueError(f"lengths: expected 4, 6, ... lengths from 2 to 512, got {lengths}")
    reader = Reader(lengths)
    judged = session.choose((), (), "cpu").candidates if judged is None else judged
    layers = int(reader.model.config.num_hidden_layers)
    inside = [one for one in judged if one.own and one.name != "attnproof:reference"]
    steps = 2 + layers * (len(judged) + 1) + len(inside)
    with one_thread(), quiet_transformers(), (progress or _silent)("real input", steps) as tick:
        baseline, captured = reader.capture()
        tick("the model in float64")
        exact = reader.read_float64()
        tick("the layers")
        rows = _layers(captured, judged, tick)
        for one in inside:
            rows.append(judge_model(reader, one, baseline, exact))
            tick(f"the model with {one.name}")
    return RealResult(tuple(rows), _record(reader, rows))


def _layers(captured: list[Layer], judged: list[Candidate], tick: Callable[[str], Any]) -> list[Verdict]:
    """Every layer forward; the first of each group backward too, since exact gradients take longest."""
    heard: list[Heard] = []
    for index, layer in enumerate(captured):
        group, first = _group(index, len(captured))
        heard.append(ask(layer, case_of(layer, index, group, backward=first), judged, tick))
    rows: list[Verdict] = []
    # the oracle is NumPy on one BLAS thread and leaves the interpreter free: two layers at a time
    with ThreadPoolExecutor(max_workers=2) as pool:
        for one, verdicts in zip(heard, pool.map(decide, heard), strict=True):
            tick(f"{one.inputs.case.name} judged")
            rows += verdicts
    return rows


def _silent(title: str, steps: int) -> AbstractContextManager[Callable[[str], Any]]:
    return nullcontext(lambda label: None)


def _group(index: int, layers: int) -> tuple[str, bool]:
    """One of three groups of layers (early, middle, late), and whether this is the first of its group."""
    size = -(-layers // 3)
    first = index // size * size
    last = min(first + size, layers)
    return f"real layers {first + 1}-{last}", index == first


def judge_model(reader: Reader, own: Candidate, baseline: Reading, exact: Reading) -> Verdict:
    """The whole model with one backend of ours in place of its attention."""
    from attnproof.compat.transformers import register

    case = _model_case(reader)
    refusal = own.refuse(case)
    if refusal:
        return Verdict(case, own.name, SKIP, reason=refusal)
    backend = own.name.partition(":")[2]
    name = register(f"attnproof-{backend}", backend=backend)
    found = reader.read(name, device=own.device)
    padded = reader.texts.with_other_padding(reader.vocabulary)
    other = reader.read(name, texts=padded, gradients=False, device=own.device)
    reports = [
        _embeddings(found, baseline, exact),
        _gradients(found.gradients, baseline.gradients),
        _padding(found, other),
    ]
    broken = [f"{report.tensor}: {check.name}" for report in reports for check in report.failures()]
    status = FAIL if broken else PASS
    return Verdict(case, own.name, status, reason="; ".join(broken), tensors=reports)


def _model_case(reader: Reader) -> Case:
    """What every layer of the model asks of a backend."""
    (B, L), config = reader.texts.ids.shape, reader.model.config
    H = config.num_attention_heads
    D = config.hidden_size // H
    return Case(
        name="real-model",
        group="real model",
        B=B,
        H=H,
        Hkv=H,
        M=L,
        N=L,
        D=D,
        Dv=D,
        generator="captured",
        keep="padding",
        backward=True,
    )


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


def _gradients(mine: dict[str, Any], theirs: dict[str, Any]) -> TensorReport:
    """Every weight by the norm of its gradient.

    A shift of all logits of a row changes no softmax, so the bias of a key projection has gradient zero in
    exact arithmetic and only rounding in any other. Such weights are held against the smallest true gradient.
    """
    import torch

    same = mine.keys() == theirs.keys()
    norms = {name: float(grad.norm()) for name, grad in theirs.items()}
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    alive = [name for name, norm in norms.items() if norm > VANISHING * total and name in mine]
    gone = sorted(mine.keys() - set(alive))
    apart = [float((mine[name] - theirs[name]).norm()) / norms[name] for name in alive]
    noise = max((float(mine[name].norm()) for name in gone), default=0.0) / min(norms[name] for name in alive)
    checks = [
        Check("weights without a gradient", 0.0 if same else 1.0, 0.0),
        Check(f"relative to sdpa, {len(alive)} weights", max(apart), GRADIENT_LIMIT),
        Check(f"vanishing, {len(gone)} weights", noise, GRADIENT_LIMIT),
    ]
    joined = [torch.cat([grads[name].flatten() for name in alive]) for grads in (mine, theirs)]
    return _report("weight gradients", joined[0] - joined[1], joined[1], checks)


def _record(reader: Reader, rows: list[Verdict]) -> dict[str, Any]:
    results = [{**records.from_verdict(row), "replay": "attnproof verify --real"} for row in rows]
    config = reader.model.config
    protocol = {
        "tier": "real",
        "seed": 0,
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
