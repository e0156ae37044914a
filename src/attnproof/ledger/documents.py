"""The accounts of the two documents that started this project, in their own simple form.

The tutorial counts elements of one head and multiplies by the element size. With `M` elements of on-chip
memory it takes `B_c = ceil(M / 4d)` keys and `B_r = min(B_c, d)` queries per tile, and counts

    naive       4Nd + 4N^2                         q, k, v, out once; s and p written and read
    keys outer  2Nd + 3 T_c N d + 4 T_c N          k, v once; per column of tiles q read, out read and
    written,
                                                   row maximum and row sum read and written; T_c = ceil(N /
                                                   B_c)
    FLOP        4 N^2 d

(FlashAttention, arXiv:2205.14135, section 3.2 and theorem 2, counts the same loop.) The engineer's notes add
the size of one layer's scores, the bytes of one call, and the shared-memory budget of a tile. Exact counts,
for masks, packed rows, other loop orders and backward passes, are in `traffic`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .hardware import GIB, KIB, MIB, Hardware, dtype_size, get

SRAM_BANDWIDTH = 19e12  # byte/s, the tutorial's constant for an A100; 108 SMs x 128 B x 1.41 GHz is 19.5e12
TUTORIAL_DEVICE = "a100-40gb"
TUTORIAL_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def onchip_elements(hardware: Hardware, dtype: str) -> int:
    """`M`: elements of `dtype` in the on-chip memory of one unit (98304 halves in 192 KiB)."""
    return int(hardware.onchip_per_unit.value * KIB) // dtype_size(dtype)


def tile(elements: int, head_dim: int) -> tuple[int, int]:
    """`(B_r, B_c)`, queries and keys of a tile for `elements` on chip: (64, 384) for an A100 at d = 64."""
    block_k = -(-elements // (4 * head_dim))
    return min(block_k, head_dim), block_k


def naive_elements(length: int, head_dim: int) -> int:
    """Elements that the materialised form moves for one head."""
    return 4 * length * head_dim + 4 * length * length


def keys_outer_elements(length: int, head_dim: int, block_k: int) -> int:
    """Elements that the tile loop with keys outside moves for one head."""
    columns = -(-length // block_k)
    return 2 * length * head_dim + 3 * columns * length * head_dim + 4 * columns * length


def flops(length: int, head_dim: int) -> int:
    """FLOP of the two matrix products for one head, nothing masked."""
    return 4 * length * length * head_dim


def balance(hardware: Hardware, dtype: str) -> float:
    """FLOP per byte at which matrix unit and memory take equally long (201 for an A100-40GB with halves)."""
    return hardware.product_rate(dtype) / hardware.memory_bytes_per_second


@dataclass(frozen=True)
class IoRow:
    """One line of the tutorial's IO ledger: bytes of one head and FLOP per byte."""

    length: int
    naive_bytes: int
    flash_bytes: int
    flops: int

    @property
    def ratio(self) -> float:
        """How many times fewer bytes the tile loop moves."""
        return self.naive_bytes / self.flash_bytes

    @property
    def naive_intensity(self) -> float:
        """FLOP per byte of the materialised form."""
        return self.flops / self.naive_bytes

    @property
    def flash_intensity(self) -> float:
        """FLOP per byte of the tile loop."""
        return self.flops / self.flash_bytes


def io_row(length: int, head_dim: int = 64, dtype: str = "float16", *, elements: int | None = None) -> IoRow:
    """The IO ledger at one length; `elements` of on-chip memory default to the tutorial's device."""
    size = dtype_size(dtype)
    elements = onchip_elements(get(TUTORIAL_DEVICE), dtype) if elements is None else elements
    _, block_k = tile(elements, head_dim)
    return IoRow(
        length,
        size * naive_elements(length, head_dim),
        size * keys_outer_elements(length, head_dim, block_k),
        flops(length, head_dim),
    )


def first_compute_bound(
    head_dim: int = 64, dtype: str = "float16", *, hardware: Hardware | None = None
) -> int | None:
    """The first power of two where the tile loop's intensity passes the balance point; None below 2^30.

    Powers of two, as the tutorial tabulates. Between them the curve is a saw: with N = 2305 a seventh column
    of tiles begins and the intensity drops below the balance point once more.
    """
    device = get(TUTORIAL_DEVICE) if hardware is None else hardware
    elements = onchip_elements(device, dtype)
    for exponent in range(31):
        row = io_row(1 << exponent, head_dim, dtype, elements=elements)
        if row.flash_intensity >= balance(device, dtype):
            return row.length
    return None


@dataclass(frozen=True)
class ActivationRow:
    """One line of the tutorial's activation ledger: bytes kept for the backward pass of one layer."""

    length: int
    linear_bytes: int
    quadratic_bytes: int
    layers: int

    @property
    def eager_bytes(self) -> int:
        """One layer of the materialised form."""
        return self.linear_bytes + self.quadratic_bytes

    @property
    def ratio(self) -> float:
        """How many times more the materialised form keeps."""
        return self.eager_bytes / self.linear_bytes


def activation_row(
    length: int,
    *,
    model_dim: int = 3072,
    heads: int = 24,
    batch: int = 1,
    layers: int = 32,
    dtype: str = "bfloat16",
) -> ActivationRow:
    """The tutorial's form: six tensors `[B, N, d_model]`, three `[B, H, N, N]` where scores are stored."""
    size = dtype_size(dtype)
    return ActivationRow(
        length,
        6 * batch * length * model_dim * size,
        3 * batch * heads * length * length * size,
        layers,
    )


def mi50_budget(
    block_q: int = 128, block_k: int = 64, head_dim: int = 64, dtype: str = "float16"
) -> dict[str, int]:
    """The notes' shared memory of one tile, in bytes by buffer: 16 + 8 + 8 + 8 KiB = 40 KiB.

    The notes give 16 KB for q, 8 KB for k and v tiles of 64 x 64, and "about 40 KB" with buffers; the one
    reading that closes is a k and a v tile and one more tile of the same size in flight.
    """
    size = dtype_size(dtype)
    one = block_k * head_dim * size
    return {"q": block_q * head_dim * size, "k": one, "v": one, "next": one}


@dataclass(frozen=True)
class Line:
    """One claim of the documents: what they say, what the formula gives, what explains a difference."""

    what: str
    said: str
    computed: str
    note: str = ""


def io_report() -> Iterator[Line]:
    """The tutorial's IO ledger, claim by claim."""
    device = get(TUTORIAL_DEVICE)
    elements = onchip_elements(device, "float16")
    rows, keys = tile(elements, 64)
    at4k, at32k = io_row(4096), io_row(32768)
    yield Line("M, elements on chip", "98304", str(elements))
    yield Line("B_c, B_r", "384, 64", f"{keys}, {rows}")
    yield Line("naive, N=4096", "130 MiB", f"{at4k.naive_bytes / MIB:.1f} MiB")
    yield Line("keys outer, N=4096", "17.8 MiB", f"{at4k.flash_bytes / MIB:.1f} MiB")
    yield Line("ratio, N=4096", "7.3x", f"{at4k.ratio:.1f}x")
    yield Line("naive intensity", "31.5 FLOP/byte", f"{at4k.naive_intensity:.1f} FLOP/byte")
    yield Line("balance point", "201 FLOP/byte", f"{balance(device, 'float16'):.0f} FLOP/byte")
    crossing = f"N={first_compute_bound()}"
    yield Line(
        "passes balance from", "N=2048", crossing, "among powers of two; N=2305 to 2351 fall below it again"
    )
    yield Line("keys outer, N=32768", "1061 MiB", f"{at32k.flash_bytes / MIB:.1f} MiB")
    said = "8.2 GiB is 8208 MiB / 1000; in binary units it is 8.02 GiB"
    yield Line("naive, N=32768", "8.2 GiB", f"{at32k.naive_bytes / MIB:.0f} MiB", said)


def activation_report() -> Iterator[Line]:
    """The tutorial's activation ledger, claim by claim."""
    short, long = activation_row(4096), activation_row(32768)
    yield Line("one layer, N=4096, scores stored", "2.39 GiB", f"{short.eager_bytes / GIB:.2f} GiB")
    yield Line("one layer, N=4096, linear only", "0.141 GiB", f"{short.linear_bytes / GIB:.3f} GiB")
    yield Line("ratio, N=4096", "17x", f"{short.ratio:.0f}x")
    yield Line("32 layers, N=4096, scores stored", "76.5 GiB", f"{32 * short.eager_bytes / GIB:.1f} GiB")
    yield Line("32 layers, N=4096, linear only", "4.5 GiB", f"{32 * short.linear_bytes / GIB:.1f} GiB")
    yield Line(
        "32 layers, N=32768, scores stored", "4.54 TiB", f"{32 * long.eager_bytes / GIB / 1024:.2f} TiB"
    )
    yield Line("32 layers, N=32768, linear only", "36 GiB", f"{32 * long.linear_bytes / GIB:.0f} GiB")


def engineer_report() -> Iterator[Line]:
    """The engineer's notes: the scores that are avoided, the bytes of one call, the budget of a tile."""
    head = 4096 * 4096 * dtype_size("float32")
    yield Line("scores of one head, N=4096, fp32", "64 MiB", f"{head / MIB:.0f} MiB")
    yield Line("scores of one layer, H=32", "2 GiB", f"{32 * head / GIB:.0f} GiB")
    half = 32 * flops(4096, 64) / 2
    note = "q k^T alone, cut to whole units; both products are 137.4 GFLOP"
    yield Line("work of that layer", "68 GFLOP", f"{half / 1e9:.1f} GFLOP", note)
    call = 4 * 32 * 4096 * 64 * dtype_size("float16")
    yield Line(
        "q, k, v, out of one call, fp16", "64 MiB", f"{call / MIB:.0f} MiB", "rounded to 80 MB in the notes"
    )
    low = f"{call / 0.2e-3 / 1e9:.0f} to {80e6 / 0.2e-3 / 1e9:.0f} GB/s"
    yield Line("bandwidth at 0.2 ms", "336 to 400 GB/s", low)
    budget = mi50_budget()
    parts = " + ".join(f"{name} {size // KIB}" for name, size in budget.items())
    total = f"{sum(budget.values()) // KIB} KiB"
    yield Line("MI50 tile 128x64, k and v 64x64", "about 40 KB of LDS", total, parts)
