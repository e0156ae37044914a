"""A verify run spread over processes: faster where cores are free, and a kernel that takes its process with it ends
one case and not the run.

A worker judges one case after the other. When it dies, goes silent, or loses its GPU context (after an illegal access
every later call of that process fails), the case is asked once more, alone in a fresh process; the verdict says what
both did, and the cases that are left go to fresh processes too. On a GPU no two kernels share a process.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection, get_context
from typing import TYPE_CHECKING, Any

from attnproof.cases import Case
from attnproof.verify import isolation, records, steps, suite
from attnproof.verify.candidate import Candidate
from attnproof.verify.isolation import GRACE, LOST_CONTEXT, exit_words

if TYPE_CHECKING:
    from attnproof.verify.session import Plan

STARTS = 3  # processes in a row that may die before their first question


@dataclass(frozen=True)
class Task:
    """One question: a case for some candidates (by number), the probes of one, or the self-test (neither).

    Attributes:
        case: the case, None for probes and the self-test.
        of: numbers of the candidates.
        power: some candidate was judged on the case before, so its power matters whatever comes now.
        before: what this question did to another process; it is asked alone then.
    """

    case: Case | None
    of: tuple[int, ...] = ()
    power: bool = False
    before: str = ""

    @property
    def label(self) -> str:
        """For progress and reasons."""
        return self.case.id if self.case is not None else "guards" if self.of else "self-test"


@dataclass
class Found:
    """What came out: results by (number of the candidate, case or guards), cases without power, the self-test."""

    results: dict[tuple[int, str], list[dict[str, Any]]] = field(default_factory=dict)
    powerless: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    score: dict[str, Any] = field(default_factory=dict)
    lost: int = 0  # processes that ended before they were told to


def run(
    candidates: Sequence[Candidate], plan: Plan, tick: Callable[[str], Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Results in the order of a run in one process, and the self-test's part of the protocol."""
    found = Found()
    on_gpu = any(candidate.device != "cpu" for candidate in candidates)
    groups = [[number] for number in range(len(candidates))] if on_gpu else [list(range(len(candidates)))]
    for first, numbers in enumerate(groups):
        tasks = [*([Task(None)] if first == 0 else []), *_tasks(candidates, numbers, plan)]
        Pool([(number, candidates[number]) for number in numbers], plan, found, tick).run(tasks)
    results: list[dict[str, Any]] = []
    for number, candidate in enumerate(candidates):
        for label in (*(steps.served(case, candidate).id for case in plan.cases), "guards"):
            results += found.results.get((number, label), [])
    asked = {steps.served(case, candidate).id for case in plan.cases for candidate in candidates}
    results += [entry for name in sorted(asked) for entry in found.powerless.get(name, [])]
    return results, {**found.score, "jobs": plan.jobs, "processes_lost": found.lost}


def _tasks(candidates: Sequence[Candidate], numbers: Sequence[int], plan: Plan) -> list[Task]:
    """Probes first, then the cases that take longest, so that nothing long is left for the end.

    On a GPU that is compiling, and most of it for gradients; elsewhere the products.
    """
    by_case: dict[Case, list[int]] = {}
    for case in plan.cases:
        for number in numbers:
            by_case.setdefault(steps.served(case, candidates[number]), []).append(number)
    compiled = any(candidates[number].device != "cpu" for number in numbers)
    cases = sorted(by_case, key=lambda case: (compiled and case.backward, _size(case)), reverse=True)
    return [*(Task(None, (number,)) for number in numbers), *(Task(c, tuple(by_case[c])) for c in cases)]


def _size(case: Case) -> float:
    pairs = float(case.B * case.H * max(case.M, 1) * max(case.N, 1))
    return pairs * (case.D + case.Dv + 1) * (5 if case.backward else 1)


class Worker:
    """One process and what it is doing."""

    def __init__(self, kernels: Sequence[tuple[int, Candidate]], plan: Plan) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        words = [(number, one.word or one.name, one.device, one.peer) for number, one in kernels]
        # the cases stay here: a worker gets them one by one
        self.process = context.Process(
            target=serve, args=(theirs, words, replace(plan, cases=()), variables(plan.jobs)), daemon=True
        )
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.ready = False
        self.answered = 0
        self.since = time.monotonic()

    @property
    def waits_for_kernel(self) -> bool:
        """Whether what it does now is somebody's kernel; the oracle may take its time."""
        return self.task is not None and (not self.ready or self.answered < len(self.task.of))

    def ask(self, task: Task) -> None:
        """Send it a task."""
        self.task, self.answered, self.since = task, 0, time.monotonic()
        with suppress(OSError):  # it is dead already: the next look at its pipe says so
            self.pipe.send(task)

    def stop(self, grace: float = GRACE) -> str:
        """End it; returns how it ended, in words."""
        self.pipe.close()
        self.process.join(grace)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
            return "had to be stopped"
        return exit_words(code)


class Pool:
    """Workers for some candidates, as many as the plan has jobs."""

    def __init__(
        self, kernels: list[tuple[int, Candidate]], plan: Plan, found: Found, tick: Callable[[str], Any]
    ) -> None:
        self.kernels, self.plan, self.found, self.tick = kernels, plan, found, tick
        self.known = dict(kernels)
        self.queue: deque[Task] = deque()
        self.workers: list[Worker] = []
        self.failed_starts = 0
        self.until = time.monotonic() + plan.budget

    def run(self, tasks: Sequence[Task]) -> None:
        """Until every task has its answer."""
        self.queue.extend(tasks)
        try:
            while self.queue or any(worker.task for worker in self.workers):
                self._hand_out()
                busy = {worker.pipe: worker for worker in self.workers if worker.task}
                for pipe in connection.wait(list(busy), timeout=1.0):
                    self._listen(busy[pipe])  # type: ignore[index]
                for worker in [one for one in self.workers if one.waits_for_kernel]:
                    # importing a framework is no case
                    patience = self.plan.patience if worker.ready else isolation.PATIENCE
                    if time.monotonic() - worker.since > patience:
                        self._lost(worker, f"no answer in {patience:.0f} s", grace=0.0, again=False)
        finally:
            for worker in self.workers:
                worker.pipe.close()
            for worker in self.workers:
                worker.stop()
            self.workers = []

    def _hand_out(self) -> None:
        if time.monotonic() > self.until:
            self._give_up()
        idle = [worker for worker in self.workers if worker.task is None]
        while self.queue and (idle or len(self.workers) < self.plan.jobs):
            task = self.queue.popleft()
            if task.before and idle:  # what may kill its process gets a fresh one
                old = idle.pop()
                self.workers.remove(old)
                old.stop()
            if task.before or not idle:
                idle.append(Worker(self.kernels, self.plan))
                self.workers.append(idle[-1])
            idle.pop().ask(task)

    def _give_up(self) -> None:
        """The time is over: what has not begun is skipped, and says so."""
        why = f"not begun within {self.plan.budget:.0f} s"
        while self.queue:
            task = self.queue.popleft()
            for number in task.of:
                status = suite.FAIL if task.before else suite.SKIP
                self._store(
                    number,
                    replace(task, before=""),
                    [self._verdict(number, task, task.before or why, status)],
                )

    def _listen(self, worker: Worker) -> None:
        task = worker.task
        try:
            what, number, payload = worker.pipe.recv()
        except (EOFError, OSError):
            self._lost(worker, "the process died")
            return
        if what == "ready":
            worker.ready, self.failed_starts, worker.since = True, 0, time.monotonic()
        elif what == "unable":
            raise RuntimeError(payload)
        elif what == "score":
            self.found.score = payload
        elif what == "power" and task is not None and task.case is not None:
            self.found.powerless[task.case.id] = payload
            self.tick(f"power of {task.label}")
        elif what == "results":
            worker.answered, worker.since = worker.answered + 1, time.monotonic()
            self._store(number, task, payload)
        elif what == "lost":
            self._lost(worker, payload, grace=0.0)
        elif what == "done":
            worker.task = None

    def _store(self, number: int, task: Task | None, entries: list[dict[str, Any]]) -> None:
        if task is None:
            return
        if task.before:
            entries = [_twice(entry, task.before, self.known[number]) for entry in entries]
        self.found.results[number, task.label] = entries
        self.tick(f"{task.label} of {self.known[number].name}")

    def _lost(self, worker: Worker, why: str, *, grace: float = GRACE, again: bool = True) -> None:
        """A process is gone: its case is asked once more, alone, and what it had not come to goes back."""
        self.found.lost += 1
        self.workers.remove(worker)
        ended, task = worker.stop(grace), worker.task
        why = f"{why} ({ended})" if why == "the process died" else why
        if task is None:
            return
        if not worker.ready:
            self.failed_starts += 1
            if self.failed_starts >= STARTS:
                raise RuntimeError(f"{STARTS} processes in a row died before their first case: {why}")
            self.queue.appendleft(task)
            return
        if not task.of:
            self._lost_without_kernel(task, why)
            return
        number, *rest = task.of[worker.answered :] or task.of[-1:]
        if task.before or not again:
            status = suite.INVALID if task.case is None else suite.FAIL
            self._store(number, task, [self._verdict(number, task, why, status)])
            if task.case is not None:
                self.queue.append(Task(task.case, tuple(rest), power=True))
            return
        if rest:
            self.queue.appendleft(Task(task.case, tuple(rest), power=True))
        self.queue.appendleft(Task(task.case, (number,), power=True, before=why))

    def _lost_without_kernel(self, task: Task, why: str) -> None:
        """Our own part took a process with it, twice: the self-test ends the run, a case counts as one without power."""
        if not task.before:
            self.queue.appendleft(replace(task, before=why))
        elif task.case is None:
            raise RuntimeError(f"{task.label}: {why}")
        else:
            reason = f"its power could not be told: {why}"
            verdict = suite.Verdict(task.case, "decoy", suite.POWERLESS, self.plan.seed, reason)
            self.found.powerless[task.case.id] = [records.from_verdict(verdict)]

    def _verdict(self, number: int, task: Task, why: str, status: str) -> dict[str, Any]:
        candidate, seed = self.known[number], self.plan.seed
        if task.case is None:
            return steps.guards_of(candidate, seed, status, why, {})
        return steps.entry(suite.Verdict(task.case, candidate.name, status, seed, why), candidate)


def _twice(entry: dict[str, Any], before: str, candidate: Candidate) -> dict[str, Any]:
    """The verdict of the second try, with what the first one did; a kernel that once took its process has not passed."""
    bad = steps.FINDING if candidate.peer else suite.FAIL
    reason = f"took its process with it: {before}; alone in a fresh one: {entry['reason'] or entry['status']}"
    return {**entry, "status": bad, "reason": reason}


def variables(jobs: int) -> dict[str, str]:
    """Environment of a worker: the cores are shared out, where the user has not said otherwise."""
    share = str(max(1, (os.cpu_count() or 1) // max(jobs, 1)))
    wanted = {
        "OMP_NUM_THREADS": share,
        "ATTNPROOF_NUM_THREADS": share,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # the workers are the parallel part
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def serve(
    pipe: Any, words: Sequence[tuple[int, str, str, bool]], plan: Plan, environment: dict[str, str]
) -> None:
    """The worker: answer tasks until the pipe closes."""
    os.environ.update(environment)  # before anything of the candidates is imported
    from attnproof.verify import loaders
    from attnproof.verify.blas import one_thread

    try:
        kernels: dict[int, Candidate] = {}
        for number, word, device, peer in words:
            kernels[number] = loaders.load(word, device)
            kernels[number].peer = peer
    except Exception as error:  # the parent has loaded the same: whatever differs here is the end of the run
        pipe.send(("unable", -1, f"a worker cannot load its kernels: {type(error).__name__}: {error}"))
        return
    pipe.send(("ready", -1, None))
    with one_thread():
        while True:
            try:
                task = pipe.recv()
            except (EOFError, OSError):
                return
            for message in _answers(task, kernels, plan):
                pipe.send(message)
                if message[0] == "lost":
                    return
            pipe.send(("done", -1, None))


def _answers(task: Task, kernels: dict[int, Candidate], plan: Plan) -> Iterator[tuple[str, int, Any]]:
    """Messages that answer one task."""
    answers = suite.Answers()
    if task.case is None and not task.of:
        yield "score", -1, steps.sharpness(plan, answers)
        return
    judged = task.power
    for number in task.of:
        candidate = kernels[number]
        if task.case is None:
            entries = steps.guard_entry(candidate, plan.seed)
        else:
            entries = [steps.entry(_judge(candidate, task.case, plan.seed, answers), candidate)]
        why = context_lost(entries, candidate.device)
        if why:
            yield "lost", number, why
            return
        judged = judged or any(entry["status"] != suite.SKIP for entry in entries)
        yield "results", number, entries
    if task.case is not None:
        yield "power", -1, steps.powerless(task.case, plan.seed, answers) if judged else []


def _judge(candidate: Candidate, case: Case, seed: int, answers: suite.Answers) -> suite.Verdict:
    """A verdict whatever happens: also what fails while a result is looked at must not end the run."""
    try:
        return suite.run_case(candidate, case, seed, answers)
    except Exception as error:
        reason = f"while it was judged: {type(error).__name__}: {error}".splitlines()[0]
        return suite.Verdict(case, candidate.name, suite.INVALID, seed, reason)


def context_lost(entries: Sequence[dict[str, Any]], device: str) -> str:
    """Why this process cannot judge anything more, empty where it can."""
    bad = [entry["reason"] for entry in entries if entry["status"] not in (suite.PASS, suite.SKIP)]
    if not bad:
        return ""
    told = next((reason for reason in bad if any(sentence in reason for sentence in LOST_CONTEXT)), "")
    if told or device == "cpu":
        return told
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        return f"{bad[0]}; then {str(error).splitlines()[0]}"
    return ""
