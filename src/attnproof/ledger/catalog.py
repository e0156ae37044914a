"""The devices that `hardware` serves: a new one is a line of `_RATES`, a line of `_MEMORIES` and a title.

Dense peaks at boost clock, without sparsity. A figure with a question mark comes from a second-hand source,
from memory, or stands against another source; it is shown with that mark everywhere. A dash is a figure that
does not exist or is not known. Where AMD's table counts per work-group processor (RDNA), the line holds half
of it: a unit is one CU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .hardware import Figure, Hardware

# fp16, bf16: matrix unit with fp32 accumulation; packed: fp16 on the vector unit (v_dot2), where that is the
# best there is
_RATES = """
name      | arch    | units | clock | fp16   | bf16   | packed | fp32   | exp  | warp | threads | regs
a100-40gb | sm_80   | 108   | 1.41  | 312    | 312    | -      | 19.5   | 16   | 32   | 2048    | 255
a100-80gb | sm_80   | 108   | 1.41  | 312    | 312    | -      | 19.5   | 16   | 32   | 2048    | 255
v100      | sm_70   | 80    | 1.53  | 125    | -      | -      | 15.7   | 16   | 32   | 2048    | 255
t4        | sm_75   | 40    | 1.59  | 65     | -      | -      | 8.1    | 16   | 32   | 1024    | 255
rtx3090   | sm_86   | 82    | 1.695 | 71?    | 71?    | -      | 35.6   | 16   | 32   | 1536    | 255
rtx4090   | sm_89   | 128   | 2.52  | 165.2  | 165.2  | -      | 82.6   | 16   | 32   | 1536    | 255
l40s      | sm_89   | 142   | 2.52  | 362?   | 362?   | -      | 91.6   | 16   | 32   | 1536    | 255
h100      | sm_90   | 132   | 1.83  | 989.4  | 989.4  | -      | 66.9   | 16   | 32   | 2048    | 255
h200      | sm_90   | 132   | 1.83  | 989.4  | 989.4  | -      | 66.9   | 16   | 32   | 2048    | 255
b200      | sm_100  | 148   | 1.85? | 2250   | 2250   | -      | 75?    | 16   | 32   | 2048    | 255
mi50      | gfx906  | 60    | 1.725 | -      | -      | 26.5   | 13.3   | 16?  | 64   | 2560    | 256
mi100     | gfx908  | 120   | 1.502 | 184.6  | 92.3   | -      | 23.1   | 16?  | 64   | 2560    | 512
mi210     | gfx90a  | 104   | 1.7   | 181    | 181    | -      | 22.6   | 16?  | 64   | 2048    | 512
mi250     | gfx90a  | 104   | 1.7   | 181    | 181    | -      | 22.6   | 16?  | 64   | 2048    | 512
mi300x    | gfx942  | 304   | 2.1   | 1307.4 | 1307.4 | -      | 163.4? | 16?  | 64   | 2048    | 512
mi355x    | gfx950  | 256   | 2.4   | 2517?  | 2517?  | -      | 157.3? | 32?  | 64   | 2048    | 512
rx6900xt  | gfx1030 | 80    | 2.25  | -      | -      | 46.1   | 23.0   | 16?  | 32   | 1024    | 256
rx7900xtx | gfx1100 | 96    | 2.5   | 122.9  | 122.9  | -      | 61.4   | 16?  | 32   | 1024    | 256
rx9070xt  | gfx1201 | 64    | 2.97  | 194.6  | 194.6  | -      | 48.7   | 16?  | 32   | 1024    | 256
rx9070    | gfx1201 | 56    | 2.52  | 144.5  | 144.5  | -      | 36.1   | 16?  | 32   | 1024    | 256
cpu       | x86-64  | 8?    | 3.0?  | -      | -      | -      | 0.768? | 1.6? | 8    | 2       | 16
"""

# memory GB/s and GiB; caches MiB; bytes a clock between L2 and a unit; shared memory of a unit, its most for
# one block, and with L1 where they are one array, KiB; shared memory bytes a clock; register file KiB
_MEMORIES = """
name      | mem    | gib  | l2   | l3  | port | shared | block | onchip | bytes | file
a100-40gb | 1555   | 40   | 40   | -   | 64?  | 164    | 163   | 192    | 128   | 256
a100-80gb | 2039   | 80   | 40   | -   | 64?  | 164    | 163   | 192    | 128   | 256
v100      | 900    | 32   | 6    | -   | 64?  | 96     | 96    | 128    | 128   | 256
t4        | 320    | 16   | 4    | -   | 64?  | 64     | 64    | 96     | 128?  | 256
rtx3090   | 936    | 24   | 6    | -   | 64?  | 100    | 99    | 128    | 128   | 256
rtx4090   | 1008   | 24   | 72   | -   | 64?  | 100    | 99    | 128    | 128   | 256
l40s      | 864    | 48   | 96   | -   | 64?  | 100    | 99    | 128    | 128   | 256
h100      | 3350   | 80   | 50   | -   | 64?  | 228    | 227   | 256    | 128   | 256
h200      | 4800   | 141  | 50   | -   | 64?  | 228    | 227   | 256    | 128   | 256
b200      | 7700?  | 180? | 126? | -   | 64?  | 228    | 227   | 256    | 128   | 256
mi50      | 1024   | 32   | 4    | -   | 64?  | 64     | 64    | 64     | 128   | 256
mi100     | 1229   | 32   | 8    | -   | 64?  | 64     | 64    | 64     | 128   | 512
mi210     | 1638   | 64   | 8    | -   | 64?  | 64     | 64    | 64     | 128   | 512
mi250     | 1638.5 | 64   | 8    | -   | 64?  | 64     | 64    | 64     | 128   | 512
mi300x    | 5300   | 192  | 32   | 256 | 64?  | 64     | 64    | 64     | 128   | 512
mi355x    | 8000   | 288  | 32   | 256 | 64?  | 160    | 160   | 160    | 128?  | 512
rx6900xt  | 512    | 16   | 4    | 128 | 64?  | 64     | 64    | 64     | 128   | 256
rx7900xtx | 960    | 24   | 6    | 96  | 64?  | 64     | 64    | 64     | 128   | 384
rx9070xt  | 640    | 16   | 8    | 64  | 64?  | 64     | 64    | 64     | 128   | 384
rx9070    | 640    | 16   | 8    | 64  | 64?  | 64     | 64    | 64     | 128   | 384
cpu       | 50?    | 32?  | 32?  | -   | 32?  | 512?   | 512?  | 512?   | 64?   | 0.5?
"""

_TITLES: Mapping[str, str] = {
    "a100-40gb": "NVIDIA A100 40GB",
    "a100-80gb": "NVIDIA A100 SXM 80GB",
    "v100": "NVIDIA V100 SXM2",
    "t4": "NVIDIA T4",
    "rtx3090": "NVIDIA GeForce RTX 3090",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "l40s": "NVIDIA L40S",
    "h100": "NVIDIA H100 SXM5",
    "h200": "NVIDIA H200 SXM",
    "b200": "NVIDIA B200",
    "mi50": "AMD Instinct MI50",
    "mi100": "AMD Instinct MI100",
    "mi210": "AMD Instinct MI210",
    "mi250": "AMD Instinct MI250 (one die)",
    "mi300x": "AMD Instinct MI300X",
    "mi355x": "AMD Instinct MI355X",
    "rx6900xt": "AMD Radeon RX 6900 XT",
    "rx7900xtx": "AMD Radeon RX 7900 XTX",
    "rx9070xt": "AMD Radeon RX 9070 XT",
    "rx9070": "AMD Radeon RX 9070",
    "cpu": "Generic x86-64 CPU, AVX2",
}

_NOTES: Mapping[str, str] = {
    "h200": "the driver reports 60 MiB of L2; counters agree with the 50 of the data sheet (docs/06_numbers)",
    "mi50": "no matrix unit: v_dot2 on packed halves; also sold with 16 GB; often power-capped",
    "mi250": "one card is two devices; the figures are one of them, half of the card's",
    "mi300x": "the L2 is 4 MiB on each of eight dies",
    "mi355x": "the doubled exp rate is from the launch material, not measured",
    "rx6900xt": "no matrix unit",
    "rx7900xtx": "the fp32 rate needs dual issue",
    "cpu": "a unit is a core, its shared memory the core's own L2, and L2 here the shared last-level cache",
}

# column -> field of Hardware, unit
_COLUMNS: Mapping[str, tuple[str, str]] = {
    "units": ("units", "units"),
    "clock": ("clock", "GHz"),
    "fp16": ("matrix_float16", "TFLOP/s"),
    "bf16": ("matrix_bfloat16", "TFLOP/s"),
    "packed": ("packed_float16", "TFLOP/s"),
    "fp32": ("vector_float32", "TFLOP/s"),
    "exp": ("exp_per_clock", "exp/clock/unit"),
    "mem": ("memory_bandwidth", "GB/s"),
    "gib": ("memory_size", "GiB"),
    "l2": ("l2_size", "MiB"),
    "l3": ("l3_size", "MiB"),
    "port": ("port_bytes_per_clock", "B/clock/unit"),
    "shared": ("shared_per_unit", "KiB"),
    "block": ("shared_per_block", "KiB"),
    "onchip": ("onchip_per_unit", "KiB"),
    "bytes": ("shared_bytes_per_clock", "B/clock/unit"),
    "file": ("registers_per_unit", "KiB"),
}

_GUIDE = "CUDA programming guide, technical specifications per compute capability"
_ROCM = "ROCm documentation, GPU specifications"
_BANKS = "32 banks of 4 bytes a clock"
_PORT = "half a line a clock, commonly described, not measured here"
_SOURCES: Mapping[str, Mapping[str, str]] = {
    "nvidia": {
        "": "NVIDIA data sheet or architecture white paper",
        "exp_per_clock": "CUDA programming guide, throughput of special functions",
        "shared_per_unit": _GUIDE,
        "shared_per_block": _GUIDE,
        "registers_per_unit": _GUIDE,
        "shared_bytes_per_clock": _BANKS,
        "port_bytes_per_clock": _PORT,
    },
    "amd": {
        "": "AMD data sheet",
        "units": _ROCM,
        "memory_size": _ROCM,
        "l2_size": _ROCM,
        "l3_size": _ROCM,
        "shared_per_unit": _ROCM,
        "onchip_per_unit": _ROCM,
        "registers_per_unit": _ROCM,
        "shared_per_block": "HIP and compiler limit of one work-group",
        "shared_bytes_per_clock": _BANKS,
        "exp_per_clock": "quarter rate of 64 lanes, by the instruction timing of GCN",
        "port_bytes_per_clock": _PORT,
    },
    "cpu": {
        "": "a typical value, of no machine in particular",
        "exp_per_clock": "ten vector instructions on eight lanes, two of them a clock",
    },
}


def _lines(text: str) -> Iterator[dict[str, str]]:
    """The rows of a table as dictionaries by the names of its first line."""
    header, *rows = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    for row in rows:
        yield dict(zip(header, row, strict=True))


def _figures(cells: Mapping[str, str], vendor: str) -> dict[str, Figure | None]:
    """The cells of one line that are figures, by the field that holds them."""
    sources = _SOURCES[vendor]
    out: dict[str, Figure | None] = {}
    for column, (name, unit) in _COLUMNS.items():
        if column not in cells:
            continue
        cell = cells[column]
        source = sources.get(name, sources[""])
        out[name] = None if cell == "-" else Figure(float(cell.rstrip("?")), unit, source, cell.endswith("?"))
    return out


def _vendor(arch: str) -> str:
    if arch.startswith("sm_"):
        return "nvidia"
    return "amd" if arch.startswith("gfx") else "cpu"


def _build() -> dict[str, Hardware]:
    memories = {row["name"]: row for row in _lines(_MEMORIES)}
    table: dict[str, Hardware] = {}
    for rates in _lines(_RATES):
        name, vendor = rates["name"], _vendor(rates["arch"])
        memory = memories[name]
        figures = _figures(rates, vendor) | _figures(memory, vendor)
        table[name] = Hardware(
            name=name,
            title=_TITLES[name],
            vendor=vendor,
            arch=rates["arch"],
            warp=int(rates["warp"]),
            threads_per_unit=int(rates["threads"]),
            registers_per_thread=int(rates["regs"]),
            note=_NOTES.get(name, ""),
            **figures,  # pyright: ignore[reportArgumentType] (only columns that may be missing hold a dash)
        )
    return table


TABLE: dict[str, Hardware] = _build()
