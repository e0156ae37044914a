"""The real-input run on short texts: what it captures, what it decides, and that it finds planted mistakes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import attnproof
from attnproof.verify import real, real_layers, real_model, session
from attnproof.verify.candidate import Traits, wrap
from attnproof.verify.suite import FAIL, PASS

torch = pytest.importorskip("torch")

SHORT = (40, 24, 12, 5)

needs_model = pytest.mark.skipif(bool(real_model.missing()), reason=f"not installed: {real_model.missing()}")
pytestmark = pytest.mark.real


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads cost more than they give at this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reader() -> real_model.Reader:
    if real_model.missing():
        pytest.skip(f"not installed: {real_model.missing()}")
    return real_model.Reader(SHORT)


@pytest.fixture(scope="module")
def captured(reader: real_model.Reader) -> tuple[real_model.Reading, list[real_model.Layer]]:
    return reader.capture()


@pytest.fixture(scope="module")
def result() -> real.RealResult:
    if real_model.missing():
        pytest.skip(f"not installed: {real_model.missing()}")
    return real.run(lengths=SHORT)


def test_every_layer_is_judged_on_every_kernel_and_the_model_on_every_backend(
    result: real.RealResult,
) -> None:
    judged = [candidate.name for candidate in session.choose((), (), "cpu").candidates]
    own = [name for name in judged if name.startswith("attnproof:") and name != "attnproof:reference"]
    layers = [(f"real-layer-{index}", name) for index in range(1, 7) for name in judged]
    rows = [(row.case.name, row.candidate) for row in result.rows]
    assert [*layers, *(("real-model", name) for name in own)] == rows
    assert "sdpa:flash" in judged and "attnproof:streaming" in own


def test_everything_of_ours_holds(result: real.RealResult) -> None:
    broken = [(row.case.name, row.candidate, row.reason) for row in result.rows if row.status == FAIL]
    assert [] == broken
    assert result.ok
    assert {PASS} == {row.status for row in result.rows if row.candidate == "attnproof:streaming"}


def test_gradients_are_judged_once_in_each_group_of_layers(result: real.RealResult) -> None:
    rows = [
        row for row in result.rows if row.candidate == "attnproof:streaming" and row.case.name != "real-model"
    ]
    tensors = {row.case.group: [] for row in rows}
    for row in rows:
        tensors[row.case.group].append([report.tensor for report in row.tensors])
    with_gradients, without = ["out", "dq", "dk", "dv", "lse"], ["out", "lse"]
    assert {f"real layers {a}-{a + 1}": [with_gradients, without] for a in (1, 3, 5)} == tensors


def test_the_record_says_what_was_read_and_by_what(result: real.RealResult) -> None:
    protocol = result.record["protocol"]
    assert list(SHORT) == protocol["lengths"]
    assert "verify-real" == result.record["kind"]
    assert set(real_model.NEEDED) == set(protocol["versions"])
    assert len(result.rows) == len(result.record["results"])
    assert {"attnproof verify --real"} == {entry["replay"] for entry in result.record["results"]}


def test_the_weights_without_a_gradient_are_the_biases_of_the_keys(result: real.RealResult) -> None:
    """Their exact gradient is zero, so a relative error of it would be noise over noise."""
    (row,) = [
        row for row in result.rows if (row.case.name, row.candidate) == ("real-model", "attnproof:streaming")
    ]
    checks = [
        check.name for report in row.tensors if report.tensor == "weight gradients" for check in report.checks
    ]
    assert ["weights without a gradient", "relative to sdpa, 95 weights", "vanishing, 6 weights"] == checks


def test_capturing_changes_nothing(reader: real_model.Reader, captured: Any) -> None:
    """Otherwise the baseline would not be the model's own."""
    reading, _ = captured
    own = reader.read("sdpa")
    assert torch.equal(own.embeddings, reading.embeddings)
    assert all(torch.equal(own.gradients[name], grad) for name, grad in reading.gradients.items())
    assert own.gradients.keys() == reading.gradients.keys()


def test_a_captured_layer_holds_what_attention_was_given(reader: real_model.Reader, captured: Any) -> None:
    _, layers = captured
    assert 6 == len(layers)
    for layer in layers:
        assert {(4, 12, 40, 32)} == {tuple(x.shape) for x in (layer.q, layer.k, layer.v, layer.dout)}
        assert torch.equal(reader.texts.mask.bool()[:, None, None].expand(4, 1, 40, 40), layer.keep)
        assert layer.dout.abs().max() > 0
        assert 32**-0.5 == layer.scale


def test_only_padding_is_replaced(reader: real_model.Reader) -> None:
    other = reader.texts.with_other_padding(reader.vocabulary)
    seen = reader.texts.mask.bool()
    assert torch.equal(reader.texts.ids[seen], other.ids[seen])
    assert (reader.texts.ids[~seen] != other.ids[~seen]).float().mean() > 0.9


def test_the_text_is_the_documentation_of_the_package_and_long_enough() -> None:
    texts = real_model.documents()
    assert any(
        "Exact attention, ``dropout(softmax(mask(scores(scale * q k^T)))) v``" in text for text in texts
    )
    # a token of English is shorter than a word on average, so this many words fill the longest row
    assert len(texts[0].split()) > max(real_model.LENGTHS)
    assert sorted(map(len, texts), reverse=True) == [len(text) for text in texts]


def unmasked(q: Any, k: Any, v: Any, *, causal: bool, scale: float, mask: Any = None) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


def half_scores(q: Any, k: Any, v: Any, *, causal: bool, scale: float, mask: Any = None) -> Any:
    scores = (q.bfloat16() @ k.bfloat16().transpose(-1, -2)).float() * scale
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v


@pytest.mark.parametrize("mistake", [unmasked, half_scores])
def test_a_planted_mistake_is_found_in_a_real_layer(mistake: Any, captured: Any) -> None:
    """One reads the padding, the other loses bits of its scores."""
    _, layers = captured
    case = real_layers.case_of(layers[2], 2, "real layers 3-4", backward=True)
    candidate = wrap("planted", mistake, Traits())
    heard = real_layers.ask(layers[2], case, [candidate], lambda label: None)
    (verdict,) = real_layers.decide(heard)
    assert FAIL == verdict.status
    assert "out" in {report.tensor for report in verdict.tensors if not report.ok}


def test_the_same_mistake_of_a_kernel_that_is_only_looked_at_is_a_finding(captured: Any) -> None:
    _, layers = captured
    candidate = wrap("planted", unmasked, Traits())
    candidate.peer = True
    case = real_layers.case_of(layers[0], 0, "real layers 1-2", backward=False)
    (verdict,) = real_layers.decide(real_layers.ask(layers[0], case, [candidate], lambda label: None))
    assert "FINDING" == verdict.status


def test_a_refusal_is_a_skip_with_its_sentence(captured: Any) -> None:
    _, layers = captured
    candidate = wrap("refuses", unmasked, Traits(dtypes=("float16",)))
    case = real_layers.case_of(layers[0], 0, "real layers 1-2", backward=False)
    (verdict,) = real_layers.decide(real_layers.ask(layers[0], case, [candidate], lambda label: None))
    assert ("SKIP", "takes float16") == (verdict.status, verdict.reason)

    def raises(*arrays: Any, **options: Any) -> Any:
        raise attnproof.Unsupported("mine", "not today")

    candidate = wrap("refuses", raises, Traits())
    (verdict,) = real_layers.decide(real_layers.ask(layers[0], case, [candidate], lambda label: None))
    assert ("SKIP", "mine: not today") == (verdict.status, verdict.reason)


def test_a_backend_that_refuses_is_skipped_with_its_sentence(
    reader: real_model.Reader, captured: Any
) -> None:
    """A GPU backend on a machine without one must not end the run."""
    candidate = wrap("attnproof:elsewhere", unmasked, Traits(), own=True)
    candidate.refuse = lambda case: "needs another machine"
    verdict = real.judge_model(reader, candidate, captured[0], captured[0])
    assert ("SKIP", "needs another machine") == (verdict.status, verdict.reason)


def test_a_kernel_that_crashes_or_writes_to_its_inputs_fails_and_ends_nothing(captured: Any) -> None:
    def crashes(*arrays: Any, **options: Any) -> Any:
        raise RuntimeError("out of registers")

    def writes(q: Any, k: Any, v: Any, *, causal: bool, scale: float, mask: Any = None) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, attn_mask=mask)
        q.mul_(scale)
        return out

    _, layers = captured
    case = real_layers.case_of(layers[0], 0, "real layers 1-2", backward=False)
    judged = [wrap("planted", fn, Traits()) for fn in (crashes, writes)]
    verdicts = real_layers.decide(real_layers.ask(layers[0], case, judged, lambda label: None))
    expected = [(FAIL, "raised RuntimeError: out of registers"), (FAIL, "wrote to its inputs: q")]
    assert expected == [(verdict.status, verdict.reason) for verdict in verdicts]


@pytest.mark.parametrize(
    ("weight", "factor", "check"),
    [("query.weight", 1 + 2e-4, "relative to sdpa"), ("key.bias", 1e6, "vanishing")],
)
def test_a_wrong_gradient_of_one_weight_is_found(
    weight: str, factor: float, check: str, captured: Any
) -> None:
    reading, _ = captured
    name = f"encoder.layer.3.attention.self.{weight}"
    wrong = {**reading.gradients, name: reading.gradients[name] * factor}
    report = real._gradients(wrong, reading.gradients)
    assert [check] == [failed.name.partition(",")[0] for failed in report.failures()]
    assert real._gradients(reading.gradients, reading.gradients).ok


def test_a_weight_that_lost_its_gradient_is_found(captured: Any) -> None:
    reading, _ = captured
    fewer = dict(reading.gradients)
    del fewer["encoder.layer.3.attention.self.query.weight"]
    report = real._gradients(fewer, reading.gradients)
    assert ["weights without a gradient"] == [failed.name for failed in report.failures()]


@pytest.mark.parametrize("lengths", [(), (8, 8), (8,) * 5, (8, 8, 8, 1), (513, 8, 8, 8)])
def test_lengths_must_make_pairs_of_texts(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="lengths: expected 4, 6, ... lengths from 2 to 512, got"):
        real.run(lengths=lengths)


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(real_model.NEEDED, "sentences-of-nobody", "sentences_of_nobody")
    with pytest.raises(
        attnproof.BackendMissing, match=r"sentences-of-nobody: pip install 'attnproof\[real\]'"
    ):
        real.run()


@needs_model
def test_remarks_of_transformers_come_back_afterwards() -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with real_model.quiet_transformers():
        assert (logging.ERROR, False) == (logging.get_verbosity(), logging.is_progress_bar_enabled())
    assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled())


# --- the command -----------------------------------------------------------------------------------------------------


def invoke(*words: str) -> Any:
    from typer.testing import CliRunner

    from attnproof.cli._app import build

    return CliRunner().invoke(build(), ["verify", "--real", *words])


@needs_model
def test_the_command_prints_both_tables_and_writes_record_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "run", functools.partial(real.run, lengths=SHORT))
    done = invoke(
        "--backend", "streaming", "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")
    )
    assert 0 == done.exit_code, done.output
    assert "read 4 texts of 40, 24, 12 and 5 tokens in one batch padded to 40" in done.output
    assert "the whole model with our attention in place of its own" in done.output
    record = json.loads((tmp_path / "r.json").read_text())
    assert "verify-real" == record["kind"]
    page = (tmp_path / "r.html").read_text()
    assert '<section id="real-model"' in page and "max abs to sdpa" in page


@pytest.mark.parametrize("other", [("--quick",), ("--case", "x"), ("--seed", "1"), ("--adversarial",)])
def test_a_choice_of_named_cases_beside_real_is_refused(other: tuple[str, ...]) -> None:
    done = invoke(*other)
    assert 2 == done.exit_code
    assert "--real: expected no choice of named cases beside it" in done.output


def test_the_command_says_in_one_line_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(real_model.NEEDED, "sentences-of-nobody", "sentences_of_nobody")
    done = invoke()
    assert 2 == done.exit_code
    assert "error: real input needs sentences-of-nobody: pip install 'attnproof[real]'" in done.output


@needs_model
def test_progress_counts_every_step_exactly_once() -> None:
    seen: list[Any] = []

    @contextmanager
    def progress(title: str, steps: int) -> Iterator[Any]:
        seen.append(steps)
        yield seen.append

    own = [one for one in session.choose((), (), "cpu").candidates if one.name == "attnproof:streaming"]
    real.run(judged=own, progress=progress, lengths=(6, 5, 4, 3))
    assert seen[0] == len(seen) - 1
