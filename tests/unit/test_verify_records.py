"""Records and what is made of them: the schema holds, numbers survive, tables and XML say what the record says."""

from __future__ import annotations

import io
import json
from copy import deepcopy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from attnproof.cases import find
from attnproof.report import html, verdicts
from attnproof.verify import records, suite
from attnproof.verify.mutants import kernel
from attnproof.verify.mutants.catalogue import find as operator


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A correct kernel, a broken one that is a peer, one that fails, one that skips."""
    answers = suite.Answers()
    cases = [find("normal-128/bfloat16"), find("mask-dead-rows/float32"), find("bias/float16")]
    rows = suite.run(kernel.correct(), cases, 0, answers)
    broken = suite.run(kernel.mutate(operator("dead-row-lse-zero")), cases, 0, answers)
    for verdict in broken:
        verdict.status = "FINDING" if verdict.status == "FAIL" else verdict.status
    rows += broken
    rows += suite.run(kernel.mutate(operator("tail-rows-unwritten")), cases[2:], 0, answers)
    rows.append(suite.Verdict(cases[0], "picky", "SKIP", reason="no <b>such</b> thing"))
    return records.record(
        "verify", {"tier": "test", "seed": 0}, [records.from_verdict(verdict) for verdict in rows]
    )


def test_a_record_fits_the_shipped_schema_and_survives_json(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(document, allow_nan=False))
    assert records.load(path) == json.loads(json.dumps(document))


def test_infinities_and_nan_are_words_because_json_has_none() -> None:
    plain = records.plain({"a": float("inf"), "b": (float("-inf"), float("nan"), 1.5)})
    assert plain == {"a": "inf", "b": ["-inf", "nan", 1.5]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema="attnproof/record/2"), "record.schema: expected 'attnproof/record/1'"),
        (lambda d: d.pop("results"), "record: expected a field 'results'"),
        (
            lambda d: d["environment"].update(dirty="yes"),
            "record.environment.dirty: expected boolean or null, got str",
        ),
        (lambda d: d["results"][0].update(status="FINE"), r"record.results\[0\].status: expected one of"),
        (
            lambda d: d["results"][0].update(seed=True),
            r"record.results\[0\].seed: expected integer, got bool",
        ),
        (
            lambda d: d["results"][0]["tensors"][0].pop("checks"),
            r"results\[0\].tensors\[0\]: expected a field 'checks'",
        ),
    ],
)
def test_a_document_that_does_not_fit_says_where(document: dict[str, Any], change: Any, message: str) -> None:
    spoiled = deepcopy(document)
    change(spoiled)
    with pytest.raises(ValueError, match=message):
        records.check(spoiled)


def test_the_environment_names_versions_and_never_a_host(document: dict[str, Any]) -> None:
    import getpass
    import socket

    environment = document["environment"]
    assert {"python", "numpy"} <= set(environment["versions"])
    text = json.dumps(document)
    assert socket.gethostname() not in text
    assert getpass.getuser() == "root" or getpass.getuser() not in text


def test_the_table_has_one_row_per_group_and_kernel_with_the_worst_numbers(document: dict[str, Any]) -> None:
    rows = {(row["group"], row["candidate"]): row for row in verdicts.rows(document)}
    assert rows["bias", "tail-rows-unwritten"]["status"] == "FAIL"
    assert rows["bias", "tail-rows-unwritten"]["max_abs"] == float("inf")
    assert rows["dead rows", "dead-row-lse-zero"]["status"] == "FINDING"
    assert rows["normal", "picky"]["counts"]["SKIP"] == 1
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(verdicts.summary_table(document))
    assert "1 finding" in console.export_text()


def test_deviations_of_one_kind_are_one_line(document: dict[str, Any]) -> None:
    kinds = verdicts.kinds(document)
    assert [(kind["status"], kind["candidate"]) for kind in kinds] == [
        ("FAIL", "tail-rows-unwritten"),
        ("FINDING", "dead-row-lse-zero"),
    ]


def test_junit_counts_failures_and_keeps_findings_green(document: dict[str, Any]) -> None:
    """A finding about somebody else's kernel must not turn a build red."""
    root = ElementTree.fromstring(verdicts.junit(document))
    suites = {suite.get("name"): suite for suite in root}
    assert suites["tail-rows-unwritten"].get("failures") == "1"
    assert suites["dead-row-lse-zero"].get("failures") == "0"
    assert "explain-case mask-dead-rows/float32" in (
        suites["dead-row-lse-zero"].findtext(".//system-out") or ""
    )
    assert suites["picky"].get("skipped") == "1"
    names = {item.get("name") for item in suites["streaming"].iter("property")}
    assert {"out.max_abs", "out.z_rms", "lse.bound_used"} <= names


def test_markdown_is_cut_below_the_limit_of_a_ci_page(document: dict[str, Any]) -> None:
    whole = verdicts.markdown(document)
    assert "| dead rows | dead-row-lse-zero |" in whole
    assert "**FAIL** `bias/float16` tail-rows-unwritten" in whole
    assert "and more; see the record" in verdicts.markdown(document, limit=len(whole) - 200)


def test_the_page_is_self_contained_and_escapes_what_kernels_say(document: dict[str, Any]) -> None:
    page = html.render(
        document, [html.Section("Real <input>", html.table(("a", "b"), [("<i>", 0.5), ("x", 3)], "note"))]
    )
    assert "{{" not in page
    assert "<b>such</b>" not in page
    assert 'id="real--input-"' in page and "&lt;i&gt;" in page
    for word in ("http://", "https://", "src=", "@import"):
        assert word not in page.replace("http://www.w3.org/2000/svg", "")
    assert len(page) < 3_000_000


def test_the_headline_counts_what_failed(document: dict[str, Any]) -> None:
    assert "1 of 7 results do not hold; 1 findings about other kernels" in html.headline(document)


def test_the_page_stays_below_three_megabytes_for_every_case_on_six_kernels(document: dict[str, Any]) -> None:
    from attnproof.cases import pool

    many = deepcopy(document)
    many["results"] = [
        result | {"case": case.id, "candidate": f"kernel {index}"}
        for case in pool()
        for index in range(6)
        for result in document["results"][:1]
    ]
    assert len(html.render(many)) < 3_000_000


def test_a_word_in_the_data_cannot_end_its_script() -> None:
    assert "</script>" not in html.embed({"why": "</script><script>alert(1)</script>"})


@pytest.mark.parametrize(
    ("said", "known"),
    [("0a1b", {"commit": "0a1b", "dirty": False}), ("0a1b-dirty", {"commit": "0a1b", "dirty": True})],
)
def test_a_copy_without_history_says_whether_its_original_was_clean(
    tmp_path: Path, said: str, known: object
) -> None:
    """A record that calls every copy clean vouches for changes that nobody can look up."""
    (tmp_path / "COMMIT").write_text(f"{said}\n")
    assert known == records.commit_of(tmp_path)


def test_a_copy_that_says_nothing_is_not_called_clean(tmp_path: Path) -> None:
    assert {"commit": None, "dirty": None} == records.commit_of(tmp_path)
