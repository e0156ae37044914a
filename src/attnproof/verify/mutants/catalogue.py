"""All operators, and a hash that says which set a score was measured against."""

from __future__ import annotations

from functools import cache
from hashlib import sha256

from attnproof.verify.mutants.behaviour_operators import BEHAVIOUR_OPERATORS
from attnproof.verify.mutants.kernel import HOME, source
from attnproof.verify.mutants.operator import Operator
from attnproof.verify.mutants.source_operators import SOURCE_OPERATORS

OPERATORS: tuple[Operator, ...] = (*SOURCE_OPERATORS, *BEHAVIOUR_OPERATORS)
# the five mistakes that the source documents name
CLASSICS = ("no-rescale-acc", "masked-is-zero", "tail-read-past", "half-running-sum", "wrong-alignment")


def find(name: str) -> Operator:
    """The operator of this name.

    Raises:
        ValueError: there is none.
    """
    for operator in OPERATORS:
        if operator.name == name:
            return operator
    raise ValueError(
        f"mutant: expected one of {', '.join(operator.name for operator in OPERATORS)}, got {name!r}"
    )


@cache
def digest() -> str:
    """A short hash over the operators and the kernel that they change."""
    text = repr([(operator.name, operator.edits) for operator in OPERATORS]) + "".join(
        source(name) for name in HOME
    )
    return sha256(text.encode()).hexdigest()[:12]
