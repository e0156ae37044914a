"""Mistakes about where things lie: tiles, tails, heads, strides, pages, and the wrong rows written."""

from __future__ import annotations

from attnproof.verify.mutants.operator import LOOP, ROWS, Operator

ADDRESSING = (
    Operator(
        "tail-skipped",
        "keys after the last whole tile are dropped",
        (
            (
                LOOP,
                "np.flatnonzero(line != SKIP)",
                "np.flatnonzero((line != SKIP) & ((np.arange(len(line)) + 1) * block_n <= max(n, block_n - 1) if order == 'queries' else line == line))",
            ),
        ),
    ),
    Operator(
        "tail-read-past",
        "the last tile reads on past the keys",
        (
            (
                LOOP,
                "cols = (col * block_n, min((col + 1) * block_n, n))",
                "cols = (col * block_n, (col + 1) * block_n if order == 'queries' else min((col + 1) * block_n, n))",
            ),
            (
                LOOP,
                "return self._load(self.seq.keys(x, self.h // self.problem.G, *cols))",
                "tile = self._load(self.seq.keys(x, self.h // self.problem.G, cols[0], min(cols[1], self.seq.n)))\n        return np.concatenate([tile, np.zeros((cols[1] - cols[0] - len(tile), tile.shape[1]), tile.dtype)])",
            ),
            (
                LOOP,
                "            j = np.arange(*cols)\n            allowed = (j >= self.lo[slice(*rows), None]) & (j < self.hi[slice(*rows), None])\n",
                "            j = np.arange(*cols)\n            allowed = (j >= self.lo[slice(*rows), None]) & ((j < self.hi[slice(*rows), None]) | (j >= self.seq.n))\n",
            ),
            (
                LOOP,
                "bias = tensors.bias[b, self.h, slice(*rows), slice(*cols)]",
                "bias = np.zeros(s.shape, tensors.bias.dtype); part = tensors.bias[b, self.h, slice(*rows), slice(*cols)]; bias[:, :part.shape[1]] = part",
            ),
            (
                LOOP,
                "s = np.where(tensors.keep[b, self.h, slice(*rows), slice(*cols)], s, -np.inf)",
                "keep = np.ones(s.shape, bool); part = tensors.keep[b, self.h, slice(*rows), slice(*cols)]; keep[:, :part.shape[1]] = part; s = np.where(keep, s, -np.inf)",
            ),
        ),
    ),
    Operator(
        "last-key-dropped",
        "the loop ends one key early",
        (
            (
                LOOP,
                "cols = (col * block_n, min((col + 1) * block_n, n))",
                "cols = (col * block_n, max(min((col + 1) * block_n, n - 1), col * block_n + 1))",
            ),
        ),
    ),
    Operator(
        "one-key-in-257-dropped",
        "a sparse pattern of keys is lost",
        (
            (
                LOOP,
                "    state.m[:], point, alpha",
                "    s[:, np.arange(*cols) % 257 == 256] = -np.inf\n    state.m[:], point, alpha",
            ),
        ),
    ),
    Operator(
        "tile-twice",
        "the second tile is computed twice",
        (
            (
                LOOP,
                "np.flatnonzero(line != SKIP).tolist()",
                "[t for t in np.flatnonzero(line != SKIP).tolist() for _ in range(1 + (t == 1))]",
            ),
        ),
    ),
    Operator(
        "far-keys-skipped",
        "keys from 896 on are never visited",
        (
            (
                LOOP,
                "np.flatnonzero(line != SKIP).tolist()",
                "[t for t in np.flatnonzero(line != SKIP).tolist() if order == 'keys' or t * block_n < 896]",
            ),
        ),
    ),
    Operator(
        "sixth-tile-skipped",
        "one tile in the middle is never visited",
        (
            (
                LOOP,
                "np.flatnonzero(line != SKIP).tolist()",
                "[t for t in np.flatnonzero(line != SKIP).tolist() if order == 'keys' or t != 5]",
            ),
        ),
    ),
    Operator(
        "values-swapped",
        "two neighbouring rows of v change places in each tile",
        (
            (
                LOOP,
                "product(head.drop(p, rows, cols), head.load_keys(head.seq.tensors.v, cols))",
                "product(head.drop(p, rows, cols)[:, np.r_[0:3, 4, 3, 5:p.shape[1]] if p.shape[1] > 4 else slice(None)], head.load_keys(head.seq.tensors.v, cols))",
            ),
        ),
    ),
    Operator(
        "heads-tiled",
        "key heads are tiled over query heads instead of repeated",
        (
            (
                LOOP,
                "self.seq.keys(x, self.h // self.problem.G, *cols)",
                "self.seq.keys(x, self.h % self.problem.Hkv, *cols)",
            ),
        ),
    ),
    Operator(
        "key-head-zero",
        "every query head reads key head 0",
        ((LOOP, "self.seq.keys(x, self.h // self.problem.G, *cols)", "self.seq.keys(x, 0, *cols)"),),
    ),
    Operator(
        "batch-zero-keys",
        "every batch entry reads the keys of the first",
        (
            (
                ROWS,
                "            return x[self.b, head, start:stop]",
                "            return x[0, head, start:stop]",
            ),
        ),
    ),
    Operator(
        "head-dim-64",
        "only the first 64 channels enter the dot product",
        (
            (
                LOOP,
                "s = capped = product(scaled_q, k.T)",
                "s = capped = product(scaled_q[:, :64], k[:, :64].T)",
            ),
        ),
    ),
    Operator(
        "value-dim-of-keys",
        "only as many value channels are written as keys have",
        (
            (
                LOOP,
                "    out[slice(*rows)] = narrow(result, head.problem.dtype)",
                "    out[slice(*rows), :head.problem.D] = narrow(result, head.problem.dtype)[:, :head.problem.D]",
            ),
        ),
    ),
    Operator(
        "strides-ignored",
        "k is read as if it lay contiguous",
        (
            (
                LOOP,
                "    k = head.load_keys(head.seq.tensors.k, cols)\n",
                "    k = head.load_keys(as_if_contiguous(head.seq.tensors.k), cols)\n",
            ),
            (
                LOOP,
                "import numpy as np\n",
                "import numpy as np\nfrom attnproof.verify.mutants.misread import as_if_contiguous\n",
            ),
        ),
    ),
    Operator(
        "wrong-alignment",
        "v is read from the 16-byte boundary below its address",
        (
            (
                LOOP,
                "head.load_keys(head.seq.tensors.v, cols))\n",
                "head.load_keys(below_boundary(head.seq.tensors.v), cols))\n",
            ),
            (
                LOOP,
                "import numpy as np\n",
                "import numpy as np\nfrom attnproof.verify.mutants.misread import below_boundary\n",
            ),
        ),
    ),
    Operator(
        "int32-offset",
        "offsets of rows past 2^31 elements wrap around",
        (
            (
                LOOP,
                "    k = head.load_keys(head.seq.tensors.k, cols)\n",
                "    k = head.load_keys(head.seq.tensors.k, cols)\n    step = head.seq.tensors.k.strides[-2] // head.seq.tensors.k.itemsize\n    k = np.where((np.arange(*cols) * step >= 2**31)[:, None], k[:1], k)\n",
            ),
        ),
    ),
    Operator(
        "tail-rows-unwritten",
        "query rows after the last whole tile are not stored",
        (
            (
                LOOP,
                "    result, log_sum = online_softmax.finalize(state)\n",
                "    result, log_sum = online_softmax.finalize(state)\n    if rows[1] - rows[0] < 64 <= head.seq.m:\n        return\n",
            ),
        ),
    ),
    Operator(
        "row-shift",
        "the last row of each query tile repeats the one before",
        (
            (
                LOOP,
                "    result, log_sum = online_softmax.finalize(state)\n",
                "    result, log_sum = online_softmax.finalize(state)\n    result[63:64] = result[62:63]\n",
            ),
        ),
    ),
    Operator(
        "skipped-rows-unwritten",
        "rows whose every tile is skipped are not stored",
        ((LOOP, "    if start < stop:\n", "    if False:\n"),),
    ),
    Operator(
        "packed-keys-by-queries",
        "packed keys start where the queries do",
        (
            (
                ROWS,
                "k0, k1 = int(tensors.cu_k[b]), int(tensors.cu_k[b + 1])",
                "k0, k1 = int(tensors.cu_q[b]), int(tensors.cu_q[b]) + int(tensors.cu_k[b + 1] - tensors.cu_k[b])",
            ),
        ),
    ),
    Operator(
        "cache-one-too-long",
        "one slot past the valid length is attended",
        (
            (
                ROWS,
                "problem.M, int(tensors.lengths[b]))",
                "problem.M, min(int(tensors.lengths[b]) + 1, problem.N))",
            ),
        ),
    ),
    Operator(
        "pages-in-order",
        "the page table is not looked at",
        (
            (
                ROWS,
                "pages = x[self.tensors.block_table[self.b, first:last], head]",
                "pages = x[np.arange(first, last) % len(x), head]",
            ),
        ),
    ),
)
