"""What limits a call: time bounds of each kernel from the bytes it moves and the operations it executes.

The classic roofline knows two terms, memory and matrix products. Attention has a third and a fourth that
recent devices made visible: one exponential for every pair, at 16 a clock and unit where the matrix unit does
thousands of FLOP, and the fp32 instructions around it. On a device without a matrix unit for the dtype all
three share the vector unit and add up.

    units apart       max(memory, ports, products, exponentials, vector)     they overlap perfectly
    one vector unit   max(memory, ports, products + exponentials + vector)

Ports are the paths between the L2 and the units: every request passes one, and few blocks have few of them.
Every figure is a lower bound at peak rates: a kernel can be slower for other reasons, never faster. Blocks
are handed out in whole rounds, so a launch of 140 blocks on 132 units takes as long as one of 264.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .accounts import Account, Kernel
from .cache import Memory, on
from .hardware import Hardware

WORDS: Mapping[str, str] = {
    "memory": "memory bandwidth",
    "ports": "the ports between L2 and units",
    "products": "matrix products",
    "exponentials": "exponentials",
    "vector": "vector instructions",
    "vector unit": "the vector unit, which does everything",
    "nothing": "nothing: there is no work",
}


@dataclass(frozen=True)
class KernelBound:
    """Lower bounds of one kernel, seconds by term; `used` is the share of units that its blocks keep busy."""

    kernel: str
    terms: Mapping[str, float]
    used: float

    @property
    def seconds(self) -> float:
        """The largest term."""
        return max(self.terms.values(), default=0.0)

    @property
    def serial_seconds(self) -> float:
        """All terms but the bytes one after the other: what no overlap at all would cost."""
        bytes_terms = ("memory", "ports")
        busy = sum(seconds for term, seconds in self.terms.items() if term not in bytes_terms)
        return max(busy, *(self.terms.get(term, 0.0) for term in bytes_terms))

    @property
    def limits(self) -> tuple[str, ...]:
        """The terms within 3% of the largest, largest first: at D = 64 an H100 has two."""
        if self.seconds == 0:
            return ("nothing",)
        near = [term for term, seconds in self.terms.items() if seconds >= 0.97 * self.seconds]
        return tuple(sorted(near, key=lambda term: -self.terms[term]))


@dataclass(frozen=True)
class Roofline:
    """Bounds of a pass on a device.

    Attributes:
        memory: bytes between cache and memory, from the cache model.
    """

    account: Account
    hardware: Hardware
    memory: Memory

    @property
    def intensity(self) -> float:
        """Asked-for FLOP per byte of memory traffic; infinite where nothing reaches memory."""
        return self.account.flops / self.memory.total if self.memory.total else float("inf")

    @property
    def request_intensity(self) -> float:
        """Asked-for FLOP per byte that the processors request."""
        return self.account.flops / self.account.total if self.account.total else float("inf")

    @property
    def balance(self) -> float:
        """FLOP per byte at which products and memory take equally long."""
        return self.hardware.product_rate(self.account.call.dtype) / self.hardware.memory_bytes_per_second

    @property
    def classic_seconds(self) -> float:
        """The two-term roofline: asked-for FLOP at peak, or memory traffic at peak."""
        products = self.account.flops / self.hardware.product_rate(self.account.call.dtype)
        return max(products, self.memory.total / self.hardware.memory_bytes_per_second)

    @cached_property
    def kernels(self) -> tuple[KernelBound, ...]:
        """The bounds of each kernel."""
        moved = {kernel.kernel: kernel.read + kernel.written for kernel in self.memory.kernels}
        asked = self.account.by_kernel()
        return tuple(
            self._bound(kernel, moved.get(kernel.name, 0), sum(asked.get(kernel.name, (0, 0))))
            for kernel in self.account.kernels
        )

    @property
    def seconds(self) -> float:
        """All kernels, one after the other."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def serial_seconds(self) -> float:
        """All kernels, nothing overlapped inside them: a kernel should land between this and `seconds`."""
        return sum(kernel.serial_seconds for kernel in self.kernels)

    @property
    def limits(self) -> tuple[str, ...]:
        """The terms that hold the longest kernel."""
        return max(self.kernels, key=lambda kernel: kernel.seconds).limits

    @property
    def sentence(self) -> str:
        """What limits this call, in words."""
        longest = max(self.kernels, key=lambda kernel: kernel.seconds)
        where = f"{longest.kernel}: " if len(self.kernels) > 1 else ""
        idle = ""
        if longest.used < 0.75 and longest.limits != ("memory",) and longest.seconds > 0:
            idle = f", with {longest.used:.0%} of the units busy"
        return f"{where}{' and '.join(WORDS[term] for term in longest.limits)}{idle}"

    def _bound(self, kernel: Kernel, moved: int, asked: int) -> KernelBound:
        device, dtype = self.hardware, self.account.call.dtype
        units = int(device.units.value)
        rounds = -(-kernel.blocks // units)
        used = kernel.blocks / (rounds * units) if rounds else 0.0
        terms = {"memory": moved / device.memory_bytes_per_second}
        if used:
            terms["ports"] = asked / device.port_bandwidth / used
        if kernel.executed_pairs and used:
            pairs = kernel.executed_pairs
            lanes = device.vector_float32.value * 1e12 / 2  # a lane's FMA counts as two FLOP
            compute = {
                "products": kernel.flop_per_pair * pairs / device.product_rate(dtype) / used,
                "exponentials": kernel.exp_per_pair * pairs / device.exp_rate / used,
                "vector": kernel.vector_per_pair * pairs / lanes / used,
            }
            shared = device.matrix_unit(dtype) is None
            terms |= {"vector unit": sum(compute.values())} if shared else compute
        return KernelBound(kernel.name, terms, used)


def roofline(account: Account, hardware: Hardware, *before: Account) -> Roofline:
    """The bounds of `account`, with the cache as the passes `before` left it (empty without any)."""
    return Roofline(account, hardware, on(hardware, *before, account, counted=1))
