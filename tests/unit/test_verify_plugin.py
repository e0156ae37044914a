"""The pytest plugin, run in a pytest of its own."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

KERNEL = """
from attnproof.api import attention

def kernel(q, k, v, *, causal, scale, mask=None):
    return attention(q, k, v, causal=causal, scale=scale, mask=mask, backend="streaming"){change}

kernel.attnproof = {{"arrays": "numpy", "numerics": "precise", "dtypes": ["float16", "float32"], "gqa": {gqa}}}
"""
TEST = """
from attnproof.verify.pytest_plugin import attn_cases

@attn_cases("full", containing="longer-queries-causal/float16")
def test_mine(attn_case, attn_candidate):
    assert attn_candidate.judge(attn_case)

@attn_cases("full", containing="gqa-129x191-causal-grad/bfloat16")
def test_shared_heads(attn_case, attn_candidate):
    assert attn_candidate.judge(attn_case)
"""
PLUGIN = ("-p", "attnproof.verify.pytest_plugin", "-p", "no:attnproof", "-p", "no:cacheprovider")


def test_one_test_per_case_passes_for_a_right_kernel(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine=KERNEL.format(change="", gqa=True), test_mine=TEST)
    result = pytester.runpytest(*PLUGIN, "--attn-candidate", "mine.py:kernel", "-v", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["*test_mine?longer-queries-causal/float16?*PASSED*", "*SKIPPED*takes float16, float32*"]
    )


def test_a_failure_says_tensor_hint_and_replay(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine=KERNEL.format(change=" * 1.01", gqa=True), test_mine=TEST)
    result = pytester.runpytest(*PLUGIN, "--attn-candidate", "mine.py:kernel")
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*FAIL longer-queries-causal/float16: out: hard bound*",
            "*attnproof explain-case longer-queries-causal/float16 --candidate mine.py:kernel*",
        ]
    )


def test_without_a_kernel_the_error_names_the_option(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine=TEST)
    result = pytester.runpytest(*PLUGIN)
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*attn_candidate: expected --attn-candidate LOADER on the command line*"])


def test_a_kernel_that_is_not_here_skips(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine=TEST)
    result = pytester.runpytest(*PLUGIN, "--attn-candidate", "xformers")
    assert result.parseoutcomes().get("skipped", 0) + result.parseoutcomes().get("failed", 0) == 2
