"""The forward of a host backend is the same bits for every number of threads."""

from __future__ import annotations

import os
import subprocess
import sys

import attnproof

from .targets import absent

# what BLAS, OpenMP and the package itself read
VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATTNPROOF_NUM_THREADS")

PROGRAM = """
import hashlib, sys
import numpy as np
import attnproof
shapes = [(300, 300, 64, "f4"), (129, 513, 256, "f4"), (1, 3000, 128, "f4"), (5, 700, 3, "f4")]
shapes += [(200, 400, 80, "f8"), (1, 3000, 128, "f8"), (65, 300, 16, "f2")]
for backend in sys.argv[1:]:
    digest = hashlib.sha256()
    for seed, (m, n, d, dtype) in enumerate(shapes):
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal((1, 4, size, d)).astype(dtype) for size in (m, n, n))
        for causal in (False, True):
            for x in attnproof.attention_with_lse(q, k, v, causal=causal, backend=backend):
                digest.update(np.ascontiguousarray(x).tobytes())
    print(backend, digest.hexdigest())
"""


def digests(threads: int, names: list[str]) -> list[str]:
    environment = {**os.environ, **dict.fromkeys(VARIABLES, str(threads))}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()


def test_the_number_of_threads_does_not_change_a_bit_of_the_forward() -> None:
    """A sum that is split by thread would make a result depend on the machine's load or size."""
    names = [
        name for name in attnproof.backends() if name != "triton" and absent(name, "numpy", "cpu") is None
    ]
    one = digests(1, names)
    assert len(names) == len(one) >= 2
    for threads in (2, 3, 8):
        assert one == digests(threads, names)
