"""Code objects that travel with the package, for machines without a run-time compiler: gfx906, fp16, the usual calls.

They are found by the same key as in the disk cache but for the compiler's version, so that one which does not belong to
the present source is never used. ``python -m attnproof.backends.dot2.prebuilt`` (clang 19) makes them anew.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from . import source
from .variants import Variant

ARCHIVE = Path(__file__).with_name("prebuilt.zip")
ARCHITECTURE = "gfx906"
CLANG = "clang-19"
EPOCH = (1980, 1, 1, 0, 0, 0)


def key(variant: Variant) -> str:
    """The name of a variant in the archive."""
    return source.digest(source.text(variant.kernel), *variant.flags, ARCHITECTURE)


def find(variant: Variant, architecture: str) -> bytes | None:
    """The code object of a variant, or None; one built without feature flags fits every setting of them."""
    if architecture.split(":")[0] != ARCHITECTURE or not ARCHIVE.exists():
        return None
    with zipfile.ZipFile(ARCHIVE) as archive:
        wanted = f"{key(variant)}.co"
        return archive.read(wanted) if wanted in archive.namelist() else None


def usual() -> list[Variant]:
    """The variants that are built: fp16, aligned, D 64 and 128, full and causal, forward, decode and backward."""
    from ...masks import BIG
    from ...problem import Problem
    from . import planned

    made: list[Variant] = []
    for width in (64, 128):
        for right in (BIG, 0):
            problem = Problem("float16", "cuda", 1, 8, 8, 512, 512, width, width, right=right)
            made += planned.variants(problem)
        for rows in ("cached", "dense"):
            made += planned.variants(Problem("float16", "cuda", 1, 8, 8, 1, 4096, width, width, rows=rows))
    return list(dict.fromkeys(made))


def clang(
    variant: Variant, architecture: str = ARCHITECTURE, *, text: str = "", more: tuple[str, ...] = ()
) -> bytes:
    """Compile a variant, or another text with its flags, with clang; no GPU, SDK or header is needed."""
    program = shutil.which(CLANG) or shutil.which("clang")
    if program is None:
        raise FileNotFoundError(f"{CLANG}: expected it on PATH to compile {variant.kernel}, got nothing")
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "kernel.hip", Path(folder) / "kernel.co"
        given.write_text(text or source.text(variant.kernel), encoding="utf-8")
        command = [
            program, "-x", "hip", f"--offload-arch={architecture}", "--cuda-device-only", "--no-gpu-bundle-output",
            "-nogpulib", "-nogpuinc", "-fuse-cuid=none", "-O3", "-std=c++17", *variant.flags, *more, "-o", str(made), str(given),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, text=True)
        return made.read_bytes()


def build() -> int:
    """Write the archive; its bytes depend on the sources and the compiler alone."""
    variants = usual()
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
        for variant in sorted(variants, key=key):
            archive.writestr(
                zipfile.ZipInfo(f"{key(variant)}.co", EPOCH), clang(variant), zipfile.ZIP_DEFLATED
            )
    return len(variants)


if __name__ == "__main__":
    sys.stdout.write(f"{build()} code objects in {ARCHIVE.name}\n")
