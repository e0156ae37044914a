"""Draws the ledger's figures from plain data, as SVG and PNG, in English or Chinese.

Colours are of the Okabe-Ito set and the cividis map, which stay apart for colour-blind readers; lines also
differ in dash and points in shape. English text is DejaVu Sans, which matplotlib brings along, as outlines, and
looks the same everywhere. Chinese needs a font of the system: PNG is drawn with the first known one that is
found, and left out with a sentence where there is none; SVG keeps its text as text, for the fonts of the reader.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import BackendMissing, ShapeError, expected
from .figure_text import TEXT

NAIVE, TILED, EDGE, SKIP, INK, SOFT = "#D55E00", "#0072B2", "#E69F00", "#E7EAEE", "#17202A", "#6B7683"
MARKERS = ("o", "s", "D", "^", "v", "P")
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Chinese sans-serif faces, free ones first
CHINESE = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "Microsoft YaHei",
    "PingFang SC",
    "SimHei",
)
UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))

Words = Callable[..., str]


def draw_all(
    data: Mapping[str, Any], folder: Path, *, lang: str = "en", only: Sequence[str] | None = None
) -> Iterator[str]:
    """Draw every figure that `data` holds; yields a line for each file written or left out."""
    wanted = list(FIGURES) if only is None else list(only)
    for name in wanted:
        if name not in FIGURES:
            raise ShapeError(expected("figures", f"names among {', '.join(FIGURES)}", repr(name)))
    folder.mkdir(parents=True, exist_ok=True)
    font = chinese_font() if lang == "zh" else None
    for name in wanted:
        if name not in data:
            yield f"left out {name}: it needs a record of `attnproof ledger --measure` (--record PATH)"
            continue
        with style(lang, font):
            figure = FIGURES[name](data[name], words(lang))
            yield from _save(figure, folder / (f"{name}.zh" if lang == "zh" else name), lang, font)


def words(lang: str) -> Words:
    """A function from a key of `figure_text` to the phrase in `lang`, with its blanks filled."""
    if lang not in TEXT:
        raise ShapeError(expected("lang", f"one of {', '.join(TEXT)}", repr(lang)))

    def say(key: str, **blanks: Any) -> str:
        return TEXT[lang][key].format(**blanks)

    return say


def chinese_font() -> str | None:
    """The first known Chinese face that is installed."""
    manager = _matplotlib("font_manager")
    installed = {entry.name for entry in manager.fontManager.ttflist}
    return next((name for name in CHINESE if name in installed), None)


@contextmanager
def style(lang: str, font: str | None) -> Generator[None]:
    """The look of all figures, and quiet about Chinese letters that are only measured, not drawn."""
    families = ["DejaVu Sans"]
    if lang == "zh":
        # without a font the list stands in the SVG for the reader's own; drawing with it would only warn
        families = [*(CHINESE if font is None else (font,)), *families]
    settings = {
        "font.family": families,
        "font.size": 10,
        "svg.fonttype": "path" if lang == "en" else "none",
        "svg.hashsalt": "attnproof",  # the same file from the same data
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": SOFT,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        # Chinese faces come in one weight
        "figure.titleweight": "bold" if lang == "en" else "normal",
        "axes.unicode_minus": False,
        "figure.dpi": 110,
        "savefig.dpi": 160,
        "figure.constrained_layout.use": True,
        "legend.frameon": False,
    }
    logger = import_module("logging").getLogger("matplotlib.font_manager")
    level = logger.level
    with _matplotlib().rc_context(settings), warnings.catch_warnings():
        if lang == "zh" and font is None:
            logger.setLevel("ERROR")
            warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        try:
            yield
        finally:
            logger.setLevel(level)


def _matplotlib(module: str | None = None) -> Any:
    try:
        return import_module("matplotlib" if module is None else f"matplotlib.{module}")
    except ImportError:
        raise BackendMissing(
            "figures: matplotlib is not installed (pip install 'attnproof[report]')"
        ) from None


def _new(columns: int, size: tuple[float, float], **more: Any) -> tuple[Any, Any]:
    """A figure with `columns` axes in a row, without pyplot's global state."""
    figure = _matplotlib("figure").Figure(figsize=size)
    return figure, figure.subplots(1, columns, squeeze=False, **more)[0]


def _save(figure: Any, stem: Path, lang: str, font: str | None) -> Iterator[str]:
    svg = stem.with_name(stem.name + ".svg")
    figure.savefig(svg, format="svg", metadata={"Date": None})
    yield f"wrote {svg}"
    if lang == "zh" and font is None:
        why = "no Chinese font is installed (for one: apt install fonts-wqy-microhei)"
        yield f"left out {stem.name}.png: {why}; the SVG keeps its text as text"
        return
    png = stem.with_name(stem.name + ".png")
    figure.savefig(png, format="png", metadata={"Software": None})
    yield f"wrote {png}"


def size(count: float) -> str:
    """Bytes in the largest binary unit that leaves at least one."""
    unit, scale = next(((unit, scale) for unit, scale in UNITS if count >= scale), UNITS[-1])
    return f"{count / scale:.3g} {unit}"


def tiling(data: Mapping[str, Any], say: Words) -> Any:
    """The square cut into tiles beside the two memories and what they hold."""
    figure, (left, right) = _new(2, (9.2, 4.6), width_ratios=(1, 1.05))
    patches = _matplotlib("patches")
    colours = {"full": TILED, "edge": EDGE, "skip": SKIP}
    hatches = {"full": "", "edge": "///", "skip": ""}
    count = len(data["classes"])
    for row, line in enumerate(data["classes"]):
        for column, kind in enumerate(line):
            look = {"facecolor": colours[kind], "hatch": hatches[kind], "edgecolor": "white"}
            left.add_patch(patches.Rectangle((column, row), 1, 1, **look))
    left.set(xlim=(0, count), ylim=(count, 0), aspect="equal", xticks=[], yticks=[])
    left.spines[:].set_visible(False)
    left.set_xlabel(say("tiling.keys"))
    left.set_ylabel(say("tiling.queries"))
    left.set_title(say("tiling.kept", kept=data["kept"], total=data["total"]))
    handles = [
        patches.Patch(
            facecolor=colours[kind], hatch=hatches[kind], edgecolor="white", label=say(f"tiling.{kind}")
        )
        for kind in colours
    ]
    left.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=1)
    _memories(right, data, say)
    figure.suptitle(say("tiling.title"), x=0.01, ha="left")
    return figure


def _memories(axes: Any, data: Mapping[str, Any], say: Words) -> None:
    """Two boxes with what each memory holds, and a line for what neither does."""
    box = _matplotlib("patches").FancyBboxPatch
    weight = _matplotlib().rcParams["figure.titleweight"]
    axes.set(xlim=(0, 10), ylim=(0, 10))
    axes.axis("off")
    for key, bottom, colour in (("memory", 5.6, "#F1E3D3"), ("chip", 1.0, "#DCE9F3")):
        axes.add_patch(box((0.2, bottom), 9.6, 3.7, boxstyle="round,pad=0.1", facecolor=colour, lw=0))
        heading = f"{say(f'tiling.{key}')}: {size(sum(data[key].values()))}"
        axes.text(0.5, bottom + 3.15, heading, fontweight=weight, va="center")
        for at, name in enumerate(data[key]):
            x, y = 0.5 + 4.8 * (at % 2), bottom + 2.2 - 0.85 * (at // 2)
            axes.text(x, y, f"{name}  {size(data[key][name])}", va="center")
    axes.text(
        0.5, 0.25, say("tiling.never", size=size(data["never"])), color=NAIVE, fontweight=weight, va="center"
    )


def growth(data: Mapping[str, Any], say: Words) -> Any:
    """Bytes moved and bytes kept against N, both axes logarithmic."""
    figure, (left, right) = _new(2, (9.2, 4.0))
    _curves(left, data["lengths"], {"naive": data["naive"], "tiled": data["tiled"]}, say)
    left.set_title(say("growth.moved"))
    _curves(right, data["lengths"], {"naive": data["kept_naive"], "linear": data["kept_linear"]}, say)
    right.axhline(data["limit"], color=INK, lw=1, ls=":")
    right.annotate(
        say("growth.limit"), (data["lengths"][0], data["limit"]), xytext=(0, 4), textcoords="offset points"
    )
    right.set_title(say("growth.kept", layers=data["layers"]))
    return figure


def _curves(axes: Any, lengths: Sequence[int], curves: Mapping[str, Sequence[float]], say: Words) -> None:
    looks = {"naive": (NAIVE, "o", "-"), "tiled": (TILED, "s", "--"), "linear": (TILED, "s", "--")}
    for name, values in curves.items():
        colour, marker, dash = looks[name]
        label = say(f"growth.{name}")
        axes.plot(lengths, values, color=colour, marker=marker, ls=dash, ms=4.5, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel(say("length"))
    axes.set_xticks(lengths[::2], [_length(n) for n in lengths[::2]])
    lowest = min(min(values) for values in curves.values())
    highest = max(max(values) for values in curves.values())
    ticks = [2.0**power for power in range(10, 60, 5) if lowest / 8 <= 2.0**power <= highest * 2]
    axes.set_yticks(ticks, [size(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(color=SKIP, lw=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left")


def _length(n: int) -> str:
    return f"{n // 1024}K" if n >= 1024 else str(n)


def intensity(data: Mapping[str, Any], say: Words) -> Any:
    """FLOP per byte against N, with the balance point."""
    figure, (axes,) = _new(1, (7.4, 4.2))
    axes.plot(data["lengths"], data["naive"], color=NAIVE, label=say("intensity.naive"))
    axes.plot(data["lengths"], data["tiled"], color=TILED, ls="--", label=say("intensity.tiled"))
    axes.axhline(
        data["balance"], color=INK, lw=1, ls=":", label=say("intensity.balance", balance=data["balance"])
    )
    axes.axhspan(data["balance"], max(data["tiled"]) * 1.12, color=SKIP, lw=0, alpha=0.6)
    axes.set_xscale("log", base=2)
    ticks = [1 << power for power in range(7, 16)]
    axes.set_xticks(ticks, [_length(n) for n in ticks])
    axes.minorticks_off()
    axes.set(xlim=(data["lengths"][0], data["lengths"][-1]), ylim=(0, max(data["tiled"]) * 1.12))
    axes.axvline(data["crossing"], color=SOFT, lw=0.8)
    axes.annotate(
        say("intensity.crossing", crossing=data["crossing"]),
        (data["crossing"], 6),
        xytext=(5, 0),
        textcoords="offset points",
    )
    left = data["lengths"][0] * 1.1
    axes.text(left, data["balance"] + 6, say("intensity.bound"), color=SOFT)
    axes.text(left, data["balance"] - 6, say("intensity.memory"), color=SOFT, va="top")
    axes.set_xlabel(say("length"))
    axes.set_ylabel(say("intensity.axis"))
    axes.set_title(say("intensity.title"))
    axes.legend(loc="center right", bbox_to_anchor=(1, 0.42))
    return figure


def measured(data: Mapping[str, Any], say: Words) -> Any:
    """Counted bytes against predicted bytes, with the two bands that are promised."""
    figure, (axes,) = _new(1, (5.8, 5.8))
    points = data["points"]
    values = [value for point in points for value in (point["counted"], point["predicted"]) if value > 0]
    low, high = min(values) / 2, max(values) * 2
    for factor, colour, key in ((2.0, SKIP, "wide"), (1.1, "#C9D6E3", "band")):
        axes.fill_between(
            [low, high], [low / factor, high / factor], [low * factor, high * factor], color=colour, lw=0,
            label=say(f"measured.{key}"),
        )  # fmt: skip
    axes.plot([low, high], [low, high], color=SOFT, lw=0.8)
    names = sorted({point["implementation"] for point in points})
    for at, name in enumerate(names):
        for direction, fill in (("forward", True), ("backward", False)):
            here = [p for p in points if p["implementation"] == name and p["direction"] == direction]
            if not here:
                continue
            axes.scatter(
                [p["predicted"] for p in here],
                [p["counted"] for p in here],
                marker=MARKERS[at % len(MARKERS)],
                s=34,
                facecolors=COLOURS[at % len(COLOURS)] if fill else "white",
                edgecolors=COLOURS[at % len(COLOURS)],
                label=f"{name}, {say(f'measured.{direction}')}",
                zorder=3,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set_xlabel(say("measured.predicted"))
    axes.set_ylabel(say("measured.counted"))
    axes.set_title(f"{say('measured.title')}\n{data['device']}".strip())
    axes.legend(loc="upper left", fontsize=9)
    return figure


def planner(data: Mapping[str, Any], say: Words) -> Any:
    """Time of each block size relative to the best, and what stands in the way of the others."""
    figure, (axes,) = _new(1, (7.2, 4.6))
    patches = _matplotlib("patches")
    ratios = [[cell["ratio"] for cell in line] for line in data["cells"]]
    highest = 2.0
    colours = _matplotlib().colormaps["cividis_r"]
    scale = _matplotlib("colors").Normalize(1, highest)
    for row, line in enumerate(ratios):
        for column, ratio in enumerate(line):
            cell = data["cells"][row][column]
            colour = SKIP if ratio is None else colours(scale(min(ratio, highest)))
            axes.add_patch(patches.Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", lw=2))
            if ratio is None:
                text, ink = say(f"planner.{cell['why']}"), SOFT
            else:
                best = f"{say('planner.best')}\n" if ratio == 1 else f"{ratio:.2f}x\n"
                text = f"{best}{cell['warps']}w {cell['stages']}s"
                ink = "white" if scale(min(ratio, highest)) > 0.55 else INK
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=9)
    axes.set(xlim=(0, len(ratios[0])), ylim=(len(ratios), 0))
    axes.set_xticks([at + 0.5 for at in range(len(data["block_k"]))], [str(n) for n in data["block_k"]])
    axes.set_yticks([at + 0.5 for at in range(len(data["block_q"]))], [str(n) for n in data["block_q"]])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(say("planner.k"))
    axes.set_ylabel(say("planner.q"))
    axes.set_title(say("planner.title", device=data["device"], dim=data["head_dim"]))
    bar = figure.colorbar(_matplotlib("cm").ScalarMappable(scale, colours), ax=axes, shrink=0.8)
    bar.set_label(say("planner.bar"))
    bar.outline.set_visible(False)
    return figure


def banks(data: Mapping[str, Any], say: Words) -> Any:
    """Dwords asked of each bank for plain, padded and swizzled rows, and what padding does to each width."""
    figure = _matplotlib("figure").Figure(figsize=(9.6, 5.2))
    grid = figure.add_gridspec(3, 2, width_ratios=(1.5, 1))
    highest = max(max(map(max, panel["loads"])) for panel in data["panels"].values())
    maps = [figure.add_subplot(grid[row, 0]) for row in range(3)]
    for at, (name, panel) in zip(maps, data["panels"].items(), strict=True):
        at.pcolormesh(panel["loads"], cmap="cividis", vmin=0, vmax=highest, edgecolors="white", linewidth=0.5)
        at.invert_yaxis()
        at.set_title(say(f"banks.{name}", clocks=panel["clocks"], padding=data["padding"]), fontsize=10)
        at.set_ylabel(say("banks.phase"))
        at.set_yticks(
            [row + 0.5 for row in range(0, len(panel["loads"]), 2)], range(0, len(panel["loads"]), 2)
        )
        at.set_xticks([bank + 0.5 for bank in range(0, 32, 4)], range(0, 32, 4))
        at.spines[:].set_visible(False)
        at.tick_params(length=0)
    maps[-1].set_xlabel(say("banks.bank"))
    bar = figure.colorbar(maps[0].collections[0], ax=maps, location="bottom", shrink=0.7, aspect=40)
    bar.set_label(say("banks.loads"))
    bar.outline.set_visible(False)
    _padding(figure.add_subplot(grid[:, 1]), data["padding_clocks"], say)
    figure.suptitle(say("banks.title", row=data["row"], width=data["width"]), x=0.01, ha="left")
    return figure


def _padding(axes: Any, widths: Mapping[str, Any], say: Words) -> None:
    """Clocks of a column access against padding, one line for each width of access."""
    for at, (width, line) in enumerate(widths.items()):
        look = {"color": COLOURS[at], "marker": MARKERS[at], "ls": ("-", "--", ":")[at], "ms": 4.5}
        axes.plot(line["padding"], line["ratio"], label=f"b{8 * int(width)}", **look)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.set_xticks(range(0, 65, 16))
    axes.minorticks_off()
    axes.grid(color=SKIP, lw=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(say("banks.padding"))
    axes.set_title(say("banks.ratio"), fontsize=10)
    axes.legend(loc="upper right")


FIGURES: dict[str, Callable[[Mapping[str, Any], Words], Any]] = {
    "tiling": tiling,
    "growth": growth,
    "intensity": intensity,
    "measured": measured,
    "planner": planner,
    "banks": banks,
}
