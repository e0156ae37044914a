"""The end-to-end gains that were published for fused attention, beside what a training run here gave.

Reference: Dao et al., "FlashAttention", arXiv 2205.14135, abstract. The published baselines differ from model to model
and are named; ours is tokens per second over the eager attention of the same model on the same machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

SOURCE = "Dao et al., arXiv 2205.14135, abstract"
BASE, OWN = "eager", "attnproof"


@dataclass(frozen=True)
class Gain:
    """A published ratio of training speeds, its sequence lengths, and what it was against."""

    ratio: float
    lengths: str
    against: str


GAINS = {
    "bert-large": Gain(1.15, "512", "the MLPerf 1.1 training speed record"),
    "gpt2-small": Gain(3.0, "1K", "existing baselines"),
    "lra": Gain(2.4, "1K-4K", "existing baselines"),
}


@dataclass(frozen=True)
class Beside:
    """One model: the published gain, and ours; None where this run did not train it."""

    model: str
    published: float | None
    lengths: str
    against: str
    ours: float | None
    length: int | None
    memory: float | None  # peak of eager over ours

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


def beside(model: str, length: int, rows: Iterable[Mapping[str, Any]]) -> list[Beside]:
    """Every published model, with ours where ``rows`` (of one training run, seed 0) hold both attentions."""
    found = {row["candidate"]: row for row in rows if not row["seed"]}
    speed = memory = None
    if BASE in found and OWN in found:
        base, own = found[BASE], found[OWN]
        speed = own["tokens_per_second"] / base["tokens_per_second"] if base["tokens_per_second"] else None
        memory = base["peak_bytes"] / own["peak_bytes"] if own["peak_bytes"] else None
    table: list[Beside] = []
    for name in dict.fromkeys((*GAINS, model)):
        known = GAINS.get(name)
        said = (None, "", "") if known is None else (known.ratio, known.lengths, known.against)
        mine = (speed, length, memory) if name == model else (None, None, None)
        table.append(Beside(name, *said, *mine))
    return table
