"""The backward pass: dq with the statistics of its rows, then dk and dv; no atomics, so that equal inputs give equal bits.

With ``deterministic=False`` one kernel makes all three up to head dim 128, and adds to dq in no fixed order.

Gradients of the sink and of ALiBi slopes come from the ``triton`` backend's kernels. Calls whose tensors TMA cannot
describe, or that ask for what these kernels do not make, run there as a whole; ``declines`` says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...problem import Grads, Problem, Tensors
from ..triton import arguments as args
from ..triton import backprop as portable
from ..triton import launch as portable_launch
from ..triton import registry
from ..triton.backprop import Given
from . import backward_configs as configs
from . import backward_launches as launches
from . import device, listings
from .arguments import ALIGNMENT, undescribable
from .backward_launches import Launch, Lists

ROWS = ("dense", "packed")
# as ``hopper.ON_TRIAL``, for gradients
ON_TRIAL: frozenset[str] = frozenset({"packed", "bounds"})
MAX_ROUTES = 4096  # a runaway of shapes must not hold memory for ever


@dataclass
class Route:
    """What the structure of a call decides: why ``triton`` serves it, if so, and how its kernels are launched again."""

    elsewhere: str | None
    fast: dict[str, Callable[..., None]] = field(default_factory=lambda: {})

    def send(self, name: str, device: int, addresses: tuple[int, ...], build: Callable[[], Launch]) -> None:
        """Launch on the current stream; described and through Triton only the first time."""
        fast = self.fast.get(name)
        if fast is not None:
            fast(torch._C._cuda_getCurrentRawStream(device), *addresses)
            return
        launch = build()
        fast = launch.adopt(launch.run())
        if fast is not None:
            self.fast[name] = fast


_routes: dict[Any, Route] = {}


def backward(
    problem: Problem, tensors: Tensors, out: Any, lse: Any, dout: Any, dlse: Any, needs: frozenset[str]
) -> Grads:
    """See ``backends.Backend``."""
    given = Given(out, lse, dout, dlse)
    route = route_of(problem, tensors, given)
    if route.elsewhere is not None or not (slots_walk_alone(problem) or feeds_lists(problem, needs)):
        return portable_launch.backward(problem, tensors, out, lse, dout, dlse, needs)
    tensors = tensors.expand(problem)
    with registry.device_of(tensors.q):
        return _run(route, problem, tensors, given, needs)


def route_of(problem: Problem, tensors: Tensors, given: Given) -> Route:
    """The route of this structure, made when it is new; everything that Triton specialises on is in the key."""
    slopes = tensors.alibi_slopes
    arrays = (*tensors[:3], given.dout, given.out, given.lse, given.dlse, slopes)
    facts = [None if x is None else (x.stride(), x.data_ptr() % ALIGNMENT == 0) for x in arrays]
    bounds = None if tensors.bounds is None else tensors.bounds.shape
    key = (problem, tensors.q.get_device(), None if slopes is None else slopes.shape, bounds, *facts)
    route = _routes.get(key)
    if route is None:
        if len(_routes) >= MAX_ROUTES:
            _routes.clear()
        reason = declines(problem, tensors, given)
        if reason is not None:
            device.say(f"hopper: {reason}; triton serves such gradients")
        route = _routes[key] = Route(reason)
    return route


def declines(problem: Problem, tensors: Tensors, given: Given) -> str | None:
    """Why the ``triton`` backend runs a backward, or None."""
    if problem.dtype not in ("float16", "bfloat16"):
        return f"needs float16 or bfloat16, got {problem.dtype}"
    if problem.rows not in ROWS:
        return f"needs {' or '.join(ROWS)} rows, got {problem.rows}"
    for option in ("has_bias", "has_keep", "dropout_p"):
        if getattr(problem, option):
            return f"has no {option.removeprefix('has_').removesuffix('_p')}"
    for feature, given_one in (("packed", problem.rows == "packed"), ("bounds", problem.has_bounds)):
        if given_one and feature in ON_TRIAL:
            return f"has not run with {feature} on a device"
    if max(problem.D, problem.Dv) > configs.WIDTHS[-1]:
        return f"holds head dims up to {configs.WIDTHS[-1]}"
    q, k, v = tensors[:3]
    if problem.rows == "packed" and problem.B == 0:
        return "has nothing to compute where there is no sequence"
    if min(*q.shape, *v.shape) == 0:
        return "has nothing to compute where an axis is empty"
    if given.out.stride(-1) != 1:
        return f"out: last stride is {given.out.stride(-1)}, not 1"
    # the gradient of an input is stored like it, but densely
    like = {f"d{name}": torch.empty_like(x, device="meta") for name, x in zip("qkv", (q, k, v), strict=True)}
    return undescribable(q=q, k=k, v=v, dout=given.dout, **like)


def _run(route: Route, problem: Problem, t: Tensors, given: Given, needs: frozenset[str]) -> Grads:
    dq = dk = dv = dalibi = dsink = None
    stats = launches.empty_statistics(problem, t.q.device)
    jointly, slopes = goes_jointly(problem, needs), problem.has_alibi and "alibi_slopes" in needs
    lists = lists_of(problem, t, needs)
    if "q" in needs and not (jointly or slopes):
        dq = queries(route, problem, t, stats, given, lists)
    elif needs & {"q", "k", "v"}:
        statistics(route, problem, given, stats)
    if slopes:
        scratch = _portable_stats(problem, t)
        dq, dalibi = portable.queries_pass(problem, t, given, scratch, make_stats=True, slopes=True)
    if jointly:
        dq, dk, dv = joint(route, problem, t, stats, given.dout)
    elif needs & {"k", "v"}:
        dk, dv = keys(route, problem, t, stats, given.dout, lists)
    if "sink" in needs and problem.has_sink:
        dsink = portable.stats_alone(problem, t, given, _portable_stats(problem, t), True)
    asked = {"q": dq, "k": dk, "v": dv}
    dq, dk, dv = (x if name in needs else None for name, x in asked.items())
    return Grads(dq, dk, dv, None, dalibi, dsink)


def goes_jointly(problem: Problem, needs: frozenset[str]) -> bool:
    """Whether one pass makes all three gradients: not asked to be repeatable, and nothing but these is asked of dS."""
    wanted = "q" in needs and bool(needs & {"k", "v"}) and not (problem.has_alibi and "alibi_slopes" in needs)
    alone = slots_walk_alone(problem)
    return wanted and alone and not problem.deterministic and configs.joint_gains(problem)


def slots_walk_alone(problem: Problem) -> bool:
    """Whether kernels find their tiles without lists."""
    return problem.rows == "dense" and not problem.has_bounds


def feeds_lists(problem: Problem, needs: frozenset[str]) -> bool:
    """Whether the pass over queries runs, which alone makes row statistics where tiles stand in lists."""
    return "q" in needs and not (problem.has_alibi and "alibi_slopes" in needs)


def lists_of(problem: Problem, t: Tensors, needs: frozenset[str]) -> Lists:
    """Lists of tiles for both passes, where they walk any."""
    if slots_walk_alone(problem):
        return launches.NO_LISTS
    n_slots, config = launches.query_slots(problem), configs.queries_config(problem)
    cut = listings.Cut(configs.QUERIES, config.block_n, n_slots)
    tiles, seen = listings.query_tiles(problem, t, cut)
    by_key = None
    if needs & {"k", "v"}:
        config = configs.keys_config(problem)
        own = listings.Cut(config.keys, config.block_m, launches.key_slots(problem))
        by_key = listings.key_tiles(problem, t, own, cut)
    return Lists(tiles, by_key, seen)


def _portable_stats(problem: Problem, t: Tensors) -> Any:
    return torch.empty(args.stats_shape(problem), dtype=torch.float32, device=t.q.device)


def _addresses(before: tuple[Any, ...], stats: Any, *after: Any) -> tuple[int, ...]:
    """Addresses of some tensors, of shift and delta, and of those of the others that there are."""
    shift = stats.data_ptr()
    behind = [x.data_ptr() for x in after if x is not None]
    return (*(x.data_ptr() for x in before), shift, shift + stats.stride(0) * stats.element_size(), *behind)


def statistics(route: Route, problem: Problem, given: Given, stats: Any) -> None:
    """Fill shift and delta of every row, where no pass over queries does."""
    read = [x for x in (given.out, given.dout, given.lse, given.dlse) if x is not None]
    addresses = _addresses(tuple(read), stats)
    route.send("rows", stats.get_device(), addresses, lambda: launches.statistics(problem, given, stats))


def keys(route: Route, problem: Problem, t: Tensors, stats: Any, dout: Any, lists: Lists) -> tuple[Any, Any]:
    """(dk, dv)."""
    dk, dv = torch.empty_like(t.k), torch.empty_like(t.v)
    addresses = _addresses((t.q, t.k, t.v, dout, dk, dv), stats, t.alibi_slopes, lists.keys, lists.bounds)
    build = functools.partial(launches.keys, problem, t, stats, dout, dk, dv, lists)
    route.send("keys", dk.get_device(), addresses, build)
    return dk, dv


def queries(route: Route, problem: Problem, t: Tensors, stats: Any, given: Given, lists: Lists) -> Any:
    """dq; fills shift and delta on its way."""
    dq = torch.empty_like(t.q)
    rows = (t.alibi_slopes, given.out, given.lse, given.dlse, lists.queries, lists.bounds)
    addresses = _addresses((t.q, t.k, t.v, given.dout, dq), stats, *rows)
    build = functools.partial(launches.queries, problem, t, stats, given, dq, lists)
    route.send("queries", dq.get_device(), addresses, build)
    return dq


def joint(route: Route, problem: Problem, t: Tensors, stats: Any, dout: Any) -> tuple[Any, Any, Any]:
    """(dq, dk, dv), dq summed in fp32 in no fixed order."""
    dq, dk, dv = torch.empty_like(t.q), torch.empty_like(t.k), torch.empty_like(t.v)
    total = torch.zeros_like(dq, dtype=torch.float32)
    addresses = _addresses((t.q, t.k, t.v, dout, dk, dv, total), stats, t.alibi_slopes)
    build = functools.partial(launches.joint, problem, t, stats, dout, dk, dv, total)
    route.send("joint", dq.get_device(), addresses, build)
    return torch.mul(total, problem.scale, out=dq), dk, dv
