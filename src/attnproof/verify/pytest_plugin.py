"""pytest plugin: `@attn_cases("smoke")` makes one test per case, `attn_candidate` is the kernel under test.

    from attnproof.verify.pytest_plugin import attn_cases

    @attn_cases("smoke")
    def test_my_kernel(attn_case, attn_candidate):
        assert attn_candidate.judge(attn_case)

    pytest --attn-candidate my_kernel.py:attention

A verdict is true when the case passed; a case that the kernel does not take is a skipped test with the reason. The
assertion message holds the tensor, the bound, the hint and the command that replays the case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnproof.cases import Case
    from attnproof.verify.candidate import Candidate
    from attnproof.verify.suite import Verdict

# pytest loads this in every run of an environment that has the package, so nothing heavy is imported up here
FIXTURE = "attn_case"


def attn_cases(tier: str = "smoke", *, containing: str = "") -> Callable[[Any], Any]:
    """Run the decorated test once for each case of a tier; it takes the case as `attn_case`."""
    from attnproof.verify import tiers

    chosen = [case for case in tiers.cases(tier) if containing in case.id]
    return pytest.mark.parametrize(FIXTURE, chosen, ids=[case.id for case in chosen])


class Judged:
    """A verdict that explains itself when an assertion on it fails."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    def __bool__(self) -> bool:
        return self.verdict.ok

    def __repr__(self) -> str:
        verdict = self.verdict
        lines = [f"{verdict.status} {verdict.case.id}: {verdict.reason}", verdict.hint, verdict.replay]
        return "\n".join(line for line in lines if line)


class UnderTest:
    """The kernel under test: what `attn_candidate` yields."""

    def __init__(self, candidate: Candidate) -> None:
        from attnproof.verify.suite import Answers

        self.candidate, self.answers = candidate, Answers()

    def judge(self, case: Case, seed: int = 0) -> Judged:
        """The verdict on one case; skips the test when the kernel does not take it."""
        from attnproof.verify import suite
        from attnproof.verify.blas import one_thread

        with one_thread():
            verdict = suite.run_case(self.candidate, case, seed, self.answers)
        if verdict.status == suite.SKIP:
            pytest.skip(verdict.reason)
        return Judged(verdict)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the plugin."""
    group = parser.getgroup("attnproof")
    group.addoption(
        "--attn-candidate",
        metavar="LOADER",
        default=None,
        help="kernel under test: file.py:fn, module:attr, lib.so:symbol, sdpa:flash, ...",
    )
    group.addoption(
        "--attn-device", metavar="DEVICE", default=None, help="cpu or cuda; default: where the kernel runs"
    )


@pytest.fixture(scope="session")
def attn_candidate(request: pytest.FixtureRequest) -> UnderTest:
    """The kernel that --attn-candidate names."""
    from attnproof.verify import loaders
    from attnproof.verify.candidate import Skip

    word = request.config.getoption("--attn-candidate")
    if word is None:
        raise pytest.UsageError("attn_candidate: expected --attn-candidate LOADER on the command line")
    try:
        return UnderTest(loaders.load(word, request.config.getoption("--attn-device")))
    except Skip as reason:
        pytest.skip(str(reason))
