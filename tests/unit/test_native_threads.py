"""Whose threads the C++ backend computes on, and what forks, signals, exceptions and other callers do to it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from attnproof.backends.native import loader
from attnproof.errors import ShapeError

built = loader.why_not() is None
needs_extension = pytest.mark.skipif(not built, reason=loader.why_not() or "")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | environment,
    )


# helpers of the programs below; the array is so big that torch runs over it in a parallel region
PROLOGUE = """
    import os, signal, sys, threading, time
    import numpy as np
    import attnproof
    from attnproof.backends.native import loader

    def call(q):
        return np.asarray(attnproof.attention(q, q, q, causal=True, backend="native"))

    def region_of_torch():
        return float(torch.ones(1 << 22).add(1).sum())

    def child(work):
        \"\"\"The exit code of a forked child that does the work; it has 60 seconds.\"\"\"
        pid = os.fork()
        if pid == 0:
            code = 9
            try:
                code = 0 if work() else 1
            finally:
                os._exit(code)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "hangs"

    q = np.random.default_rng(0).standard_normal((1, 8, 256, 32)).astype(np.float32)
"""
TORCH = "import torch\ntorch.set_num_threads(3)\n"
POOLS = [pytest.param({loader.POOL: ""}, id="borrowed"), pytest.param({loader.POOL: "own"}, id="own")]


def lines(code: str, **environment: str) -> list[str]:
    """What a program says that starts with the helpers above; it must end well within two minutes."""
    done = run_python(textwrap.dedent(PROLOGUE) + textwrap.dedent(code), **environment)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout.splitlines()


def with_torch(code: str, **environment: str) -> list[str]:
    pytest.importorskip("torch")
    return lines(TORCH + textwrap.dedent(code), **environment)


@needs_extension
def test_a_forked_child_computes() -> None:
    """Threads do not survive a fork: a pool that waits for them hangs in the child."""
    code = """
        right = call(q)
        print(child(lambda: (call(q) == right).all()), (call(q) == right).all(), loader.describe()["pool"])
    """
    assert ["0 True own"] == lines(code, ATTNPROOF_NUM_THREADS="3")


@needs_extension
@pytest.mark.parametrize("pool", POOLS)
def test_after_a_call_with_torch_a_forked_child_computes_and_so_does_torch_there(
    pool: dict[str, str],
) -> None:
    """GNU's OpenMP threads do not survive a fork: torch alone hangs in a child after its first region. Ours must neither
    hang nor make torch's first region in the child hang.
    """
    code = """
        right = call(q)
        print(loader.describe()["pool"])
        print(child(lambda: (call(q) == right).all() and loader.describe()["pool"] == "own"))
        print(child(lambda: region_of_torch() == 2 << 22 and (call(q) == right).all()))
        print(region_of_torch() == 2 << 22, (call(q) == right).all())
        print(child(lambda: child(lambda: (call(q) == right).all()) == 0))
    """
    found = with_torch(code, **pool)
    assert ["own" if pool[loader.POOL] else "torch's threads", "0", "0", "True True", "0"] == found


@needs_extension
def test_a_child_forked_after_a_region_of_torch_borrows_no_thread() -> None:
    """The extension was never used before the fork: nobody told it of the fork, and torch's threads are gone."""
    code = """
        region_of_torch()
        print(child(lambda: np.isfinite(call(q)).all() and loader.describe()["pool"] == "own"))
    """
    assert ["0"] == with_torch(code)


@needs_extension
def test_a_child_forked_by_another_thread_than_that_of_torch_computes() -> None:
    """The thread that forks has used no team; the one that did is not in the child."""
    code = """
        right, found = call(q), []
        stop = threading.Event()
        busy = threading.Thread(target=lambda: [call(q) for _ in iter(stop.is_set, True)])
        busy.start()
        forks = threading.Thread(
            target=lambda: found.extend(child(lambda: (call(q) == right).all()) for _ in range(5))
        )
        forks.start()
        forks.join()
        stop.set()
        busy.join()
        print(found)
    """
    assert ["[0, 0, 0, 0, 0]"] == with_torch(code)


@needs_extension
def test_torch_may_come_later_and_change_its_threads() -> None:
    """The pool changes under way, and torch's team grows and shrinks: never a bit of the result."""
    code = """
        right = call(q)
        print(loader.describe()["pool"])
        import torch
        for threads in (1, 2, 7, 3, 1, 5):
            torch.set_num_threads(threads)
            print(threads == loader.threads(), (call(q) == right).all(), region_of_torch() == 2 << 22)
        print(loader.describe()["pool"])
    """
    assert ["own", *["True True True"] * 6, "torch's threads"] == lines(code, ATTNPROOF_NUM_THREADS="2")


@needs_extension
def test_calls_inside_a_parallel_region_of_torch_compute() -> None:
    """There a region has one thread only: whoever calls does all the work."""
    code = """
        import ctypes
        from pathlib import Path
        right, found = call(q), []
        runtime = next(Path(torch.__path__[0], "lib").glob("libgomp*"), None)
        if runtime is None:
            runtime = next(Path(torch.__path__[0]).parent.glob("torch.libs/libgomp*"))
        body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append(bool((call(q) == right).all())))
        ctypes.CDLL(str(runtime)).GOMP_parallel(body, None, 3, 0)
        print(found, (call(q) == right).all())
    """
    assert ["[True, True, True] True"] == with_torch(code)
    assert ["[True, True, True] True"] == with_torch(code, OMP_MAX_ACTIVE_LEVELS="3")


@needs_extension
def test_fewer_threads_than_torch_asks_for_do_all_the_work() -> None:
    """The runtime may give a smaller team than torch has threads."""
    code = """
        torch.set_num_threads(1)
        right = call(q)
        torch.set_num_threads(8)
        print(loader.threads(), (call(q) == right).all())
    """
    assert ["8 True"] == with_torch(code, OMP_THREAD_LIMIT="2")


@needs_extension
@pytest.mark.parametrize("pool", POOLS)
def test_denormals_are_flushed_by_torch_for_every_thread_or_for_none(pool: dict[str, str]) -> None:
    """torch.set_flush_denormal speaks to the calling thread: the others take it over, and only for the call."""
    code = """
        q = torch.randn(1, 8, 512, 64)
        v = torch.randn(1, 8, 512, 64) * 1e-38
        def out(threads, flush):
            torch.set_flush_denormal(flush)
            torch.set_num_threads(threads)
            return attnproof.attention(q, q, v, backend="native")
        kept, flushed = out(3, False), out(3, True)
        print(torch.equal(flushed, out(1, True)), torch.equal(kept, out(1, False)), torch.equal(kept, out(3, False)))
        print(torch.equal(kept, flushed))
    """
    assert ["True True True", "False"] == with_torch(code, **pool)


@needs_extension
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("torch", [False, True], ids=["alone", "torch"])
def test_ctrl_c_ends_a_long_call(torch: bool, pool: dict[str, str]) -> None:
    """The signal is seen between items, with the GIL taken for the look; the next call is a whole one."""
    code = """
        long = np.zeros((1, 64, 8192, 64), np.float32)
        right = call(q)
        for _ in range(2):
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                call(long)
            except KeyboardInterrupt:
                print("interrupted", (call(q) == right).all())
    """
    found = with_torch(code, **pool) if torch else lines(code, ATTNPROOF_NUM_THREADS="3")
    assert ["interrupted True"] * 2 == found


@needs_extension
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("torch", [False, True], ids=["alone", "torch"])
def test_an_exception_of_any_thread_reaches_the_caller(torch: bool, pool: dict[str, str]) -> None:
    """It must neither end the process nor be lost, and the pool goes on."""
    code = """
        each, caller = loader.kernels().for_each, threading.get_ident()
        loader.threads()
        def item(i, fails_on_caller):
            time.sleep(0.002)
            if (threading.get_ident() == caller) == fails_on_caller:
                raise KeyError(i)
        for fails_on_caller in (False, True) * 3:
            try:
                each(lambda i: item(i, fails_on_caller), 60, 3)
            except KeyError:
                print("raised")
        seen = []
        each(seen.append, 60, 3)
        print(sorted(seen) == list(range(60)))
    """
    found = with_torch(code, **pool) if torch else lines(code)
    assert [*["raised"] * 6, "True"] == found


@needs_extension
def test_torchs_threads_run_the_items() -> None:
    """With the pool of our own two threads more would live; with torch's there is none more."""
    code = """
        region_of_torch()
        def tasks():
            return set(os.listdir("/proc/self/task"))
        before = tasks()
        loader.threads()
        ran = set()
        def item(_):
            ran.add(threading.get_native_id())
            time.sleep(0.005)
        loader.kernels().for_each(item, 30, 3)
        print(len(ran), tasks() == before)
    """
    assert ["3 True"] == with_torch(code)
    assert ["3 False"] == with_torch(code, **{loader.POOL: "own"})


@needs_extension
@pytest.mark.parametrize("pool", POOLS)
def test_many_python_threads_may_call_while_torch_does(pool: dict[str, str]) -> None:
    """The pool serves one call; another runs on its own thread, and gets the same bits."""
    code = """
        from concurrent.futures import ThreadPoolExecutor
        right = call(q)
        with ThreadPoolExecutor(6) as threads:
            print(all(threads.map(lambda i: region_of_torch() and (call(q) == right).all(), range(60))))
    """
    assert ["True"] == with_torch(code, **pool)


@needs_extension
def test_an_unknown_pool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.POOL, "mine")
    with pytest.raises(ShapeError, match="ATTNPROOF_POOL: expected own or nothing, got 'mine'"):
        loader.borrows_torch_threads()


@needs_extension
def test_forward_and_backward_need_little_memory() -> None:
    """N = 16384, H = 8, D = 64: less than 64 MiB beside inputs, outputs and gradients; a score matrix is 8 GiB."""
    code = """
        import numpy as np
        from attnproof.backends import native
        from attnproof.problem import Options, bind
        rng = np.random.default_rng(0)
        # a window keeps the test short; scratch and statistics do not depend on it
        q = rng.standard_normal((1, 8, 16384, 64), dtype=np.float32)
        problem, tensors = bind(q, q, q, Options(causal=True, window=(256, 0)))
        # not ru_maxrss: a new process inherits that of the one that started it
        def status(field):
            lines = open("/proc/self/status").read().splitlines()
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
        before = status("VmRSS")
        out, lse = native.forward(problem, tensors)
        grads = native.backward(problem, tensors, out, lse, q, None, frozenset("qkv"))
        held = sum(x.nbytes for x in (out, lse, *grads[:3]))
        print(status("VmHWM") - before - held)
    """
    done = run_python(code, ATTNPROOF_NUM_THREADS="2")
    # some scratch there must be: a measurement that sees none is broken
    assert 2**18 < int(done.stdout) < 64 * 2**20, done.stderr
