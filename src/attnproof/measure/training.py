"""Real small training runs: the loss curves of two attentions must coincide within the spread of seeds.

Data ships or is made: the bytes of this package's own documentation for the language models, a long-range matching
task for ``lra``, moving patterns for ``dit``. Nothing is downloaded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from . import memory
from .models import ATTENTION, Size, build

Tick = Callable[[int, float], None]
MASK_TOKEN = 0
MASK_SHARE = 0.15


@dataclass(frozen=True)
class Run:
    """One training run."""

    model: str
    attention: str
    seed: int
    losses: tuple[float, ...]
    tokens_per_second: float
    peak_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


def corpus() -> torch.Tensor:
    """The bytes of this package's own sources, whose docstrings are its documentation."""
    root = Path(__file__).resolve().parent.parent
    text = "\n".join(path.read_text() for path in sorted(root.rglob("*.py")))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def batches(model: str, size: Size, seed: int, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(inputs, targets) without end; the same seed gives the same batches."""
    generator = torch.Generator().manual_seed(seed)
    if model == "dit":
        yield from _clips(size, generator, device)
    elif model == "lra":
        yield from _matches(size, generator, device)
    else:
        yield from _text(model, size, generator, device)


def _text(model: str, size: Size, generator: torch.Generator, device: str) -> Iterator[Any]:
    data = corpus()
    window = torch.arange(size.length + 1)
    while True:
        starts = torch.randint(0, len(data) - size.length - 1, (size.batch, 1), generator=generator)
        rows = data[starts + window]
        if model != "bert-large":
            yield rows[:, :-1].to(device), rows[:, 1:].to(device)
            continue
        rows = rows[:, :-1]
        hidden = torch.rand(rows.shape, generator=generator) < MASK_SHARE
        # cross_entropy leaves out targets of -100
        yield rows.masked_fill(hidden, MASK_TOKEN).to(device), rows.masked_fill(~hidden, -100).to(device)


def _matches(size: Size, generator: torch.Generator, device: str) -> Iterator[Any]:
    """The last token must repeat the one that follows a marker far back."""
    marker = size.vocabulary - 1
    while True:
        rows = torch.randint(1, marker, (size.batch, size.length), generator=generator)
        at = torch.randint(0, size.length // 2, (size.batch,), generator=generator)
        each = torch.arange(size.batch)
        rows[each, at] = marker
        targets = torch.full_like(rows, -100)
        targets[:, -1] = rows[each, at + 1]
        yield rows.to(device), targets.to(device)


def _clips(size: Size, generator: torch.Generator, device: str) -> Iterator[Any]:
    channels = 16
    position = torch.linspace(0, 8 * np.pi, size.length)[None, :, None]
    while True:
        phase = torch.rand(size.batch, 1, channels, generator=generator) * 2 * np.pi
        noise = torch.randn(size.batch, size.length, channels, generator=generator)
        yield (torch.sin(position + phase) + noise).to(device), noise.to(device)


def loss_of(model: str, predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the noise, or cross entropy of the tokens that are asked for."""
    if model == "dit":
        return F.mse_loss(predicted.float(), target)
    return F.cross_entropy(predicted.float().flatten(0, 1), target.flatten())


def train(
    model: str,
    attention: str,
    size: Size,
    *,
    steps: int,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    tick: Tick = lambda step, loss: None,
) -> Run:
    """AdamW on one model; weights float32, activations ``dtype`` by autocast.

    The seed fixes weights and data, so runs that differ in ``attention`` alone can be laid over each other.
    """
    _load_libraries(model, attention, device)
    torch.manual_seed(seed)
    network = build(model, size, ATTENTION[attention], recompute=recompute).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4)
    stream = batches(model, size, seed, device)
    losses: list[float] = []

    def step() -> None:
        inputs, target = next(stream)
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            predicted = network(inputs)
        loss = loss_of(model, predicted, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())

    held = memory.peak(step, device).bytes
    tick(1, losses[-1])
    took: list[float] = []
    for at in range(1, steps):
        started = time.perf_counter()
        step()
        took.append(time.perf_counter() - started)
        tick(at + 1, losses[-1])
    # of the median step: one that waited for a neighbour, or for a clock, says nothing about an attention
    speed = size.batch * size.length / statistics.median(took) if took else 0.0
    return Run(model, attention, seed, tuple(losses), speed, held)


def _load_libraries(model: str, attention: str, device: str) -> None:
    """A step of a toy: what a process loads once must not count as the peak of whoever trains first."""
    size = Size(1, 16, 2, 16, 1)
    network = build(model, size, ATTENTION[attention]).to(device)
    optimizer = torch.optim.AdamW(network.parameters())
    inputs, target = next(batches(model, size, 0, device))
    loss_of(model, network(inputs), target).backward()
    optimizer.step()


def final(run: Run, *, tail: float = 0.25) -> float:
    """Mean loss over the last ``tail`` of the steps."""
    keep = max(1, int(len(run.losses) * tail))
    return float(np.mean(run.losses[-keep:]))


def coincide(a: Run, b: Run, seeds: Sequence[Run]) -> tuple[bool, float, float]:
    """Whether two curves of one seed differ by less than seeds do: (verdict, difference, spread).

    Args:
        a: the curve to compare with.
        b: another attention, same seed.
        seeds: the attention of ``a`` with two or more other seeds.

    Returns:
        The difference is that of the final losses; the spread is the range of them over the seeds.
    """
    if not seeds:
        raise ValueError("seeds: expected at least one run with another seed, got none")
    over = [final(a), *(final(run) for run in seeds)]
    difference, spread = abs(final(a) - final(b)), max(over) - min(over)
    return bool(difference <= spread), difference, spread
