"""A machine that runs the Hopper kernels' own source on NumPy: a thread for every warp group, barriers that block.

Arithmetic is in float64 and copies are instant, but products and stores read shared memory only when they are waited for, and
threads change hands at every barrier: a stage handed back too early gives wrong numbers, a barrier that nobody reaches is
found at once, because everybody waits. It knows nothing of layouts, fences, registers and the dtypes of products: those are for
the compiler and for a device.
"""

from __future__ import annotations

import ast
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

BACKENDS = Path(__file__).parents[2] / "src" / "attnproof" / "backends"
local = threading.local()


class Stuck(Exception):
    """Everybody waits."""


# ---- who runs ----


class Floor:
    """One thread runs at a time; whoever waits gives the floor to one that can go on, drawn at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.gates: list[threading.Semaphore] = []
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.error: BaseException | None = None

    def wait(self, ready: Callable[[], bool]) -> None:
        """Give way, and come back once ``ready``."""
        self.waiting[local.number] = ready
        self.give_way()
        self.enter()

    def enter(self) -> None:
        """Come back when this thread is drawn."""
        self.gates[local.number].acquire()
        if self.error is not None:
            raise Stuck from self.error
        del self.waiting[local.number]

    def give_way(self) -> None:
        able = [at for at, ready in self.waiting.items() if ready()]
        if able:
            self.gates[self.random.choice(able)].release()
        elif self.waiting:
            self.fail(Stuck(f"{len(self.waiting)} threads wait for ever"))

    def fail(self, error: BaseException) -> None:
        """Everybody stops; the first error is what counts."""
        self.error = self.error or error
        for gate in self.gates:
            gate.release()

    def run(self, jobs: list[Callable[[], None]]) -> None:
        """All jobs to their end."""

        def body(number: int, job: Callable[[], None]) -> None:
            local.number = number
            try:
                self.enter()
                with np.errstate(all="ignore"):
                    job()
            except BaseException as error:  # handed to the caller below
                self.fail(error)
            else:
                self.give_way()

        self.gates = [threading.Semaphore(0) for _ in jobs]
        self.waiting = {number: lambda: True for number in range(len(jobs))}
        threads = [threading.Thread(target=body, args=pair, daemon=True) for pair in enumerate(jobs)]
        for thread in threads:
            thread.start()
        self.give_way()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error


# ---- memory ----


class Pointer:
    """Addresses into a flat array: one, or an array of them."""

    def __init__(self, data: Any, at: Any = 0) -> None:
        self.data, self.at = data, at

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.data, self.at + step)

    def inside(self, mask: Any) -> Any:
        at = np.where(mask, self.at, 0)
        assert (at >= 0).all() and (at < self.data.size).all(), "outside of the array"
        return at


class Shared:
    """A view of shared memory."""

    def __init__(self, data: Any) -> None:
        self.data, self.dtype = data, data.dtype

    def index(self, at: int) -> Shared:
        return Shared(self.data[at])

    def reshape(self, shape: Any) -> Shared:
        view = self.data.reshape(shape)
        assert np.shares_memory(view, self.data)
        return Shared(view)

    def permute(self, axes: Any) -> Shared:
        return Shared(self.data.transpose(axes))

    def load(self, layout: Any = None) -> Any:
        return self.data.copy()

    def store(self, value: Any) -> None:
        self.data[...] = value


class Descriptor:
    """A tensor map: the host's own, over the float64 values of the same storage."""

    def __init__(self, made: Any, data: Any, writes: Any = None) -> None:
        self.shape, self.strides, self.data, self.writes = made.shape, made.strides, data, writes
        shape = list(made.block_shape)
        self.block_type = SimpleNamespace(shape=shape, nbytes=8 * int(np.prod(shape)))
        self.dtype, self.layout = np.dtype(np.float64), None

    def cells(self, at: Any) -> tuple[Any, Any]:
        """(offsets, which are inside) of a block, 64-bit wrapping as the hardware's."""
        assert len(at) == len(self.shape) and all(-(2**31) <= x < 2**31 for x in at)
        lead = [int(x) for x in at[:-2]]
        inside = all(0 <= x < size for x, size in zip(lead, self.shape, strict=False))
        base = sum(x * step for x, step in zip(lead, self.strides, strict=False))
        rows, columns = (
            int(start) + np.arange(n) for start, n in zip(at[-2:], self.block_type.shape[-2:], strict=True)
        )
        row_base = np.array([(base + int(row) * self.strides[-2]) % 2**64 for row in rows], dtype=object)
        offsets = row_base[:, None] + columns[None, :]
        there = ((rows >= 0) & (rows < self.shape[-2]))[:, None] & (
            (columns >= 0) & (columns < self.shape[-1])
        )[None, :]
        there &= inside
        offsets = np.where(there, offsets, 0).astype(np.int64)
        assert (offsets < self.data.size).all(), "outside of the tensor"
        return offsets, there


# ---- barriers ----


class Barrier:
    """An mbarrier."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def move(self, arrivals: int, some: int) -> None:
        self.pending -= arrivals
        self.bytes += some
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


class Named:
    """A named barrier."""

    def __init__(self) -> None:
        self.threads = self.generation = 0

    def arrive(self, threads: int) -> None:
        self.threads += local.threads
        assert self.threads <= threads, "more threads than the barrier counts"
        if self.threads == threads:
            self.threads, self.generation = 0, self.generation + 1


class Barriers:
    """[COUNT] mbarriers in shared memory."""

    def __init__(self, count: int, arrivals: int) -> None:
        self.each = [Barrier(arrivals) for _ in range(count)]

    def index(self, at: int) -> Barrier:
        return self.each[at]


# ---- instructions ----


class Product:
    """A matrix instruction in flight: it reads its operands when it is waited for."""

    def __init__(self, a: Any, b: Any, acc: Any) -> None:
        self.a, self.b, self.acc = a, b, acc

    def value(self) -> Any:
        acc = self.acc.value() if isinstance(self.acc, Product) else self.acc
        with np.errstate(invalid="ignore"):
            return acc + (self.a.data if isinstance(self.a, Shared) else self.a) @ self.b.data


def either(scalar: Any, array: Any) -> Any:
    def best(a: Any, b: Any) -> Any:
        return array(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else scalar(a, b)

    return best


def convert(x: Any, dtype: Any) -> Any:
    """``x.to(dtype)``: everything is wide enough."""
    return x.astype(np.int64) if dtype is np.int64 and isinstance(x, np.ndarray) else x


def plain(x: Any) -> Any:
    return x.item() if isinstance(x, np.generic) or np.ndim(x) == 0 else x


def load(at: Pointer, mask: Any = True, other: Any = 0) -> Any:
    return plain(np.where(mask, at.data[at.inside(mask)], other))


class Machine:
    """Kernel modules on this machine, and the state of the program that runs."""

    def __init__(self, seed: int) -> None:
        self.seed, self.modules = seed, {}
        self.program = self.programs = 0
        self.named: dict[int, Named] = {}
        self.floor = Floor(seed)
        self.compat = self._compat()

    # -- what kernels import --

    def _compat(self) -> dict[str, Any]:
        nothing = lambda *_, **__: None  # noqa: E731
        gl = SimpleNamespace(
            constexpr=lambda x: x, static_range=range, to_tensor=lambda x: x, cast=lambda x, _: np.asarray(x, float),
            int32=np.int64, int64=np.int64, float32=np.float64, int1=bool,
            minimum=either(min, np.minimum), maximum=either(max, np.fmax), where=lambda c, a, b: plain(np.where(c, a, b)),
            max=lambda x, axis: plain(np.fmax.reduce(x, axis=axis)), sum=lambda x, axis: plain(x.sum(axis=axis)),
            exp2=lambda x: plain(np.exp2(x)), log2=lambda x: plain(np.log2(x)), arange=lambda a, b, *_: np.arange(a, b),
            full=lambda shape, value, *_: np.full(shape, value), zeros=lambda shape, *_: np.zeros(shape),
            convert_layout=lambda x, *_, **__: x, load=load, store=self.store, atomic_add=self.atomic_add,
            program_id=lambda _: self.program, num_programs=lambda _: self.programs,
            allocate_shared_memory=lambda dtype, shape, _: Shared(np.full(shape, -1 if dtype is np.int64 else np.nan, dtype)),
            warp_specialize=self.warp_specialize,
            **dict.fromkeys(("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "NVMMADistributedLayout"), nothing),
            DotOperandLayout=nothing,
        )  # fmt: skip
        mbarrier = SimpleNamespace(wait=self.wait, arrive=self.arrive, expect=self.expect)
        return {
            "gl": gl, "tl": gl, "mbarrier": mbarrier, "fence_async_shared": nothing, "any_value": None,
            "warpgroup_mma": lambda a, b, acc, use_acc=True, is_async=False: Product(a, b, acc),
            "warpgroup_mma_wait": self.mma_wait, "tma_load": self.tma_load, "tma_store": self.tma_store,
            "tma_store_wait": self.tma_store_wait, "copy_load": self.copy_load, "copy_arrive": nothing,
        }  # fmt: skip

    def instructions(self) -> dict[str, Any]:
        """Functions that are written in assembly, or make what this machine has its own of."""
        hidden = -np.inf
        return {
            "named_barrier": self.named_barrier,
            "allocate_barriers": self.allocate_barriers,
            "reciprocal": lambda x: 1 / x,
            "raised": lambda columns: columns + 2.0**23,
            "show_below": lambda s, j, limit: np.where(j[None, :] < limit[:, None], s, hidden),
            "show_between": lambda s, j, low, high: np.where(
                (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None]), s, hidden
            ),
            "shrink_sums": lambda sums, alpha: sums * alpha[:, None],
            "keep_up_to": lambda p, j, high: np.where(j[None, :] <= high[:, None], p, 0.0),
            "keep_from": lambda p, j, low: np.where(j[None, :] >= low[:, None], p, 0.0),
            "keep_between": lambda p, j, low, high: np.where(
                (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None]), p, 0.0
            ),
            "keep_bounded": lambda p, rows, own: np.where(
                (rows[:, None] >= load(own)[None, :]) & (rows[:, None] < load(own + 1)[None, :]), p, 0.0
            ),
            "afresh": lambda index, i, asked: index,
        }

    def module(self, path: Path) -> dict[str, Any]:
        """The names of a kernel module."""
        if path not in self.modules:
            names = self.modules[path] = dict(self.compat)
            exec(
                compile(Rewrite(self, path, names).visit(ast.parse(path.read_text())), str(path), "exec"),
                names,
            )
        return self.modules[path]

    # -- memory --

    def store(self, at: Pointer, value: Any, mask: Any = True) -> None:
        where, value, mask = np.broadcast_arrays(at.inside(mask), value, mask)
        at.data[where[mask]] = value[mask]

    def atomic_add(self, at: Pointer, value: Any, sem: str = "") -> Any:
        before = int(at.data[at.at])
        at.data[at.at] += value
        return before

    def copy_load(self, target: Shared, source: Pointer) -> None:
        target.store(load(source))

    def tma_load(self, desc: Descriptor, at: Any, full: Barrier, target: Shared) -> None:
        offsets, there = desc.cells(at)
        target.data.reshape(offsets.shape)[...] = np.where(there, desc.data[offsets], 0.0)
        full.move(0, -desc.block_type.nbytes)

    def tma_store(self, desc: Descriptor, at: Any, source: Shared) -> None:
        local.stores.append((desc, at, source))

    def tma_store_wait(self, _: int) -> None:
        for desc, at, source in local.stores:
            offsets, there = desc.cells(at)
            desc.data[offsets[there]] = source.data.reshape(offsets.shape)[there]
            desc.writes[offsets[there]] += 1
        local.stores.clear()

    def mma_wait(self, _: int, deps: Any) -> Any:
        self.floor.wait(lambda: True)  # others go on meanwhile
        found = tuple(x.value() if isinstance(x, Product) else x for x in deps)
        return found[0] if len(found) == 1 else found

    # -- barriers --

    def allocate_barriers(self, count: int, arrivals: int) -> Barriers:
        return Barriers(count, arrivals)

    def wait(self, barrier: Barrier, phase: int) -> None:
        self.floor.wait(lambda: barrier.phase != phase)

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        barrier.move(count, 0)

    def expect(self, barrier: Barrier, some: int) -> None:
        barrier.move(1, some)

    def named_barrier(self, verb: str, number: int, threads: int) -> None:
        barrier = self.named.setdefault(number, Named())
        generation = barrier.generation
        barrier.arrive(threads)
        if verb == "sync":
            self.floor.wait(lambda: barrier.generation > generation)

    # -- programs --

    def warp_specialize(self, parts: Any, warps: Any, registers: Any) -> None:
        """A thread per part, the last one a single warp."""

        def job(function: Any, arguments: Any, threads: int) -> Callable[[], None]:
            def body() -> None:
                local.threads, local.stores = threads, []
                function(*arguments)
                assert not local.stores, "stores that were not waited for"

            return body

        self.named = {}
        self.seed += 1
        self.floor = Floor(self.seed)
        sizes = [128, *(32 * n for n in warps)]
        pairs = zip(parts, sizes, strict=True)
        self.floor.run([job(function, arguments, threads) for (function, arguments), threads in pairs])

    def launch(self, kernel: Any, programs: int, *arguments: Any, **named: Any) -> None:
        """Programs one after the other."""
        self.programs = programs
        for self.program in range(programs):
            kernel(*arguments, **named)


class Rewrite(ast.NodeTransformer):
    """Device source to plain Python: no decorators and annotations, imports from the machine."""

    def __init__(self, machine: Machine, path: Path, names: dict[str, Any]) -> None:
        self.machine, self.path, self.names = machine, path, names
        names["convert"] = convert

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        folder = self.path.parent
        for _ in range(node.level - 1):
            folder = folder.parent
        if node.module and node.module != "compat":
            found = self.machine.module(folder.joinpath(*node.module.split(".")).with_suffix(".py"))
            self.names.update({at.asname or at.name: found[at.name] for at in node.names})
        return None

    def visit_Import(self, node: ast.Import) -> Any:
        return None

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        self.generic_visit(node)
        node.decorator_list = []
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        if node.name in self.machine.instructions():
            self.names[node.name] = self.machine.instructions()[node.name]
            return None
        self.generic_visit(node)
        node.decorator_list = []
        for argument in node.args.args:
            argument.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if node.attr == "layout" and isinstance(node.value, ast.Attribute) and node.value.attr == "type":
            return ast.copy_location(ast.Constant(None), node)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            call = ast.Call(ast.Name("convert", ast.Load()), [node.func.value, *node.args], [])
            return ast.fix_missing_locations(ast.copy_location(call, node))
        return node
