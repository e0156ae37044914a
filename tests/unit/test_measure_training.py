"""Training runs: every model learns with finite losses, curves are compared with the spread of seeds, published gains."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("model", ["bert-large", "lra", "dit", "gpt2-small"])
def test_every_model_takes_steps_with_finite_losses(model: str) -> None:
    from attnproof.measure import models, training

    size = models.Size(1, 16, 2, 24, 2)
    found = training.train(model, "attnproof", size, steps=3)
    again = training.train(model, "eager", size, steps=3, recompute=True)
    assert found.losses == pytest.approx(again.losses, abs=1e-4)


def trained(candidate: str, speed: float, peak: int, seed: int = 0) -> dict[str, Any]:
    return {"candidate": candidate, "seed": seed, "tokens_per_second": speed, "peak_bytes": peak}


def test_our_gain_stands_beside_the_published_one() -> None:
    """T10: the published gains are named with their source, and only a model that was trained has a number of ours."""
    from attnproof.measure import published

    rows = [trained("eager", 100.0, 300), trained("attnproof", 250.0, 100), trained("eager", 1.0, 1, seed=1)]
    table = {one.model: one for one in published.beside("gpt2-small", 1024, rows)}
    assert {"bert-large": 1.15, "gpt2-small": 3.0, "lra": 2.4} == {
        name: one.published for name, one in table.items()
    }
    assert (2.5, 1024, 3.0) == (
        table["gpt2-small"].ours,
        table["gpt2-small"].length,
        table["gpt2-small"].memory,
    )
    assert (None, None) == (table["lra"].ours, table["bert-large"].ours)
    unnamed = published.beside("tiny", 64, rows)[-1]
    assert ("tiny", None, 2.5) == (unnamed.model, unnamed.published, unnamed.ours)
    assert all(one.ours is None for one in published.beside("lra", 64, rows[:1]))


def test_a_curve_outside_the_spread_fails() -> None:
    from attnproof.measure import training

    def curve(level: float, seed: int = 0) -> training.Run:
        return training.Run("m", "a", seed, (level,) * 8, 1.0, 1)

    assert not training.coincide(curve(1.0), curve(1.3), [curve(1.1, 1), curve(0.95, 2)])[0]
    same, difference, spread = training.coincide(curve(1.0), curve(1.1), [curve(1.1, 1), curve(0.95, 2)])
    assert (True, 0.1, 0.15) == (same, pytest.approx(difference), pytest.approx(spread))
    with pytest.raises(ValueError, match="another seed"):
        training.coincide(curve(1.0), curve(1.0), [])
