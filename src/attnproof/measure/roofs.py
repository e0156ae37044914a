"""What this machine can do at most, by its own probes: bytes copied, products, exponentials, each per second.

A call needs three times: its bytes over the copy rate, its FLOP over the product rate, its exponentials over their
rate. The largest is the roof that it stands under, its share of the measured time says how close it comes. A
processor without a matrix unit does products and exponentials on the same unit, so there the two add up.

Reference: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009; the exponential as a roof of its own: Shah et
al., arXiv 2407.08608, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .shapes import Shape
from .timer import Timer

COPY_BYTES = {"cpu": 2**26, "cuda": 2**31}  # past every cache
PRODUCT_SIDE = {"cpu": 512, "cuda": 8192}
EXPONENTIALS = {"cpu": 2**16, "cuda": 2**27}  # in cache on a CPU: the rate of the unit, not of the memory
REPEATS, BUDGET = 7, 0.5  # runs of a probe, and seconds after which two of them must do
SHORT_REPEATS = 100  # on a processor: the best of a few long calls is never undisturbed
ABOVE = 1.1  # share of a roof from which the probe, and not the call, is to be doubted
WORDS = {
    "memory": "memory",
    "products": "matrix products",
    "exponentials": "exponentials",
    "arithmetic": "arithmetic",  # products and exponentials on one unit
}


@dataclass(frozen=True)
class Roofs:
    """Measured rates: bytes per second (read and written), FLOP per second by dtype, exponentials per second."""

    copy: float
    products: dict[str, float]
    exponentials: float
    one_unit: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


@dataclass(frozen=True)
class Stand:
    """Where a call stands: seconds of each term at the roofs, the largest, and the share of it in what was measured."""

    terms: dict[str, float]
    limit: str
    share: float
    intensity: float  # FLOP per byte

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)

    def __str__(self) -> str:
        if self.share < 0.1:
            # launches, latency, an interpreter: what the roofs do not know
            return f"overhead ({self.share:.1%} of the roof of {WORDS[self.limit]})"
        if self.share > ABOVE:
            return f"{WORDS[self.limit]} ({self.share:.1f} times its probe, which was disturbed or reads no cache)"
        return f"{WORDS[self.limit]} ({self.share:.0%} of its roof)"


def probe(device: str, dtypes: tuple[str, ...], timer: Timer) -> Roofs:
    """Measure the roofs; the best of a few runs each, since a roof is what can be reached."""
    import torch

    def shortest(call: Callable[[], Any], repeats: int) -> float:
        first = timer.run([call] * 2, cold=False)[0]
        if sum(first) > BUDGET:
            return min(first)
        return min(timer.run([call] * repeats, cold=False)[0])

    def best(call: Callable[[], Any], repeats: int = REPEATS) -> float:
        found = shortest(call, repeats)
        if device != "cpu":
            return found
        # where others want the cores too, threads wait for each other, and one alone is faster
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return min(found, shortest(call, repeats))
        finally:
            torch.set_num_threads(threads)

    source = torch.zeros(COPY_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / best(lambda: target.copy_(source))
    rates: dict[str, float] = {}
    side = PRODUCT_SIDE[device]
    for dtype in sorted(set(dtypes)):
        a, b = (torch.ones(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
        rates[dtype] = 2 * side**3 / best(lambda a=a, b=b: a @ b)
    x = torch.linspace(-8, 0, EXPONENTIALS[device], device=device)
    y = torch.empty_like(x)
    took = best(lambda: torch.exp(x, out=y), SHORT_REPEATS if device == "cpu" else REPEATS)
    return Roofs(copied, rates, x.numel() / took, device == "cpu")


def stand(shape: Shape, seconds: float, roofs: Roofs) -> Stand:
    """Where a measured time of a shape stands under the roofs."""
    products = shape.flop / roofs.products[shape.dtype]
    # the weights are made once in the forward and once more in the backward
    passes = 2 if shape.run == "both" else 1
    exps = passes * shape.call.pairs / roofs.exponentials
    terms = {"memory": shape.bytes / roofs.copy}
    terms |= (
        {"arithmetic": products + exps} if roofs.one_unit else {"products": products, "exponentials": exps}
    )
    limit = max(terms, key=lambda name: terms[name])
    return Stand(terms, limit, terms[limit] / seconds, shape.flop / shape.bytes)
