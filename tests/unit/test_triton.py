"""The Triton backend's host side: what is chosen, planned and kept. Numbers are the parity suite's business."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attnproof import masks, philox  # noqa: E402
from attnproof.backends import triton as backend  # noqa: E402
from attnproof.backends.triton import (  # noqa: E402
    arguments,
    cached,
    compile_matrix,
    configs,
    offline,
    plan,
    registry,
    tuning,
)
from attnproof.backends.triton.configs import Config, Key  # noqa: E402
from attnproof.backends.triton.kernels import pieces  # noqa: E402

ARCHITECTURES = compile_matrix.TARGETS


def problem(width: int = 128, variant: str = "causal", **changes: Any) -> Any:
    return replace(offline.Sample(width, variant).problem(), **changes)


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"device": "cpu"}, "needs a GPU, and the tensors are on cpu"),
            ({"dtype": "float64"}, "would lose float64"),
            ({"D": 257}, "head dims up to 256, got D=257"),
            ({"Dv": 300}, "Dv=300"),
        ],
    )
    def test_a_refusal_says_what_and_why(
        self, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        assert words in (backend.why_not(problem(**changes)) or "")

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "_installed", lambda: False)
        assert "pip install" in (backend.why_not(problem()) or "")


class TestConfigs:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("width", [1, 64, 80, 128, 200, 256])
    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_every_pass_has_a_configuration_everywhere(
        self, architecture: str, width: int, dtype: str
    ) -> None:
        """A hole in the table is a KeyError in a user's call."""
        for which in configs.PASSES:
            found = configs.choose(problem(width, dtype=dtype), which, architecture)
            assert 16 <= found.block_m <= 128
            assert 16 <= found.block_n <= 128

    def test_every_measured_row_names_its_record(self) -> None:
        """A row without a record is a starting point; one that names a record must not name a file that is gone."""
        root = Path(__file__).parents[2] / "results"
        kept = {str(path.relative_to(root)) for path in root.rglob("*.json")}
        assert {row.record for row in configs.TABLE.values()} <= kept | {""}

    def test_small_calls_do_without_descriptors(self) -> None:
        """Building a descriptor costs more host time than a small attention runs."""
        small, large = problem(M=128, N=128), problem()
        assert [False, True] == [configs.choose(p, "forward", "sm90").tma for p in (small, large)]

    @pytest.mark.parametrize(("width", "least"), [(8, 64), (64, 64), (96, 128)])
    def test_hopper_pads_narrow_head_dims(self, width: int, least: int) -> None:
        """Triton 3.6 reads outside of a 32-wide operand of a warpgroup product."""
        p = problem(width)
        blocks = arguments.blocks(p, configs.choose(p, "forward", "sm90"))
        assert (least, least) == (blocks["BLOCK_D"], blocks["BLOCK_DV"])

    @pytest.mark.parametrize(
        ("width", "padded"), [(0, 16), (1, 16), (16, 16), (17, 32), (96, 128), (128, 128), (200, 256)]
    )
    def test_head_dims_are_padded_to_powers_of_two(self, width: int, padded: int) -> None:
        assert padded == configs.padded(width)


class TestSplits:
    @pytest.mark.parametrize(
        ("slots", "planes", "most", "parts"),
        [
            (132, 128, 64, 1),
            (132, 8, 64, 16),
            (132, 8, 4, 4),
            (132, 132, 9, 1),
            (264, 128, 64, 2),
            (132, 256, 64, 1),
        ],
    )
    def test_parts_fill_whole_waves(self, slots: int, planes: int, most: int, parts: int) -> None:
        """More parts than fill the device cost a merge, fewer leave multiprocessors idle."""
        assert parts == cached.best_splits(slots, planes, most)

    def test_few_queries_of_a_cache_are_split_and_others_are_not(self) -> None:
        cases = [
            ("cached", {}),
            ("paged", {}),
            ("cached", {"M": 65}),
            ("cached", {"dropout_p": 0.1}),
            ("causal", {}),
        ]
        assert [True, True, False, False, False] == [
            cached.serves(problem(128, at, **more)) for at, more in cases
        ]


class TestArguments:
    def test_broadcast_axes_have_stride_zero(self) -> None:
        sample = offline.Sample(128, "bias", length=64)
        found = arguments.extras(sample.tensors().expand(sample.problem()))
        assert (0, 64 * 64, 64, 1) == tuple(found[f"stride_bias{axis}"] for axis in "bhmn")

    def test_packed_rows_have_no_batch_axis(self) -> None:
        q = offline.Sample(64, "packed", length=64).tensors().q
        assert {"stride_qb": 0, "stride_qh": 64, "stride_qm": 2048, "stride_qd": 1} == arguments.strides(
            "q", q, "bhmd"
        )

    def test_offsets_inside_a_tile_are_widened_when_they_pass_two_billion(self) -> None:
        """64 rows of 2^25 elements are 2^31."""
        narrow, wide = (
            torch.empty_strided((1, 1, 64, 128), (1, 1, step, 1), device="meta") for step in (2**24, 2**25)
        )
        assert [False, True] == [arguments.wide(64, problem(), x) for x in (narrow, wide)]

    def test_threshold_bits_fit_a_signed_argument(self) -> None:
        """Half of all thresholds are above 2^31."""
        for p in (0.1, 0.5, 0.9, 1.0):
            bits = arguments.sizes(problem(dropout_p=p))["threshold"]
            assert -(2**31) <= bits < 2**31
            assert philox.threshold(p) == bits % 2**32

    @pytest.mark.parametrize("index", [0, 1, 2, 3])
    def test_descriptors_are_refused_where_the_hardware_cannot(self, index: int) -> None:
        """A misaligned base, a strided column, an odd row, a broadcast axis."""
        base = torch.empty(4 * 64 * 128 + 8, dtype=torch.float16)
        views = (
            base[1 : 1 + 2 * 64 * 128].view(1, 2, 64, 128),
            base[: 2 * 64 * 128].view(1, 2, 64, 128)[..., ::2],
            torch.empty(1, 2, 64, 130, dtype=torch.float16)[..., :127],
            torch.empty(1, 1, 64, 128, dtype=torch.float16).expand(2, 4, 64, 128),
        )
        config = Config(64, 64, 4, 2, tma=True)
        assert {} == arguments.boxes(problem(), config, 64, {1: views[index]})
        good = torch.empty(1, 2, 64, 128, dtype=torch.float16)
        assert {1: (64, 128)} == arguments.boxes(problem(), config, 64, {1: good})

    def test_constants_are_the_ones_of_the_rest_of_the_package(self) -> None:
        assert (masks.BIG, masks.EDGE, masks.FULL) == (pieces.BIG.value, 1, 2)


class TestRecords:
    """Tables against the times that they name."""

    RESULTS = Path(__file__).parents[2] / "results"

    def rows(self, name: str) -> list[dict[str, Any]]:
        return json.loads((self.RESULTS / name).read_text(encoding="utf-8"))["results"]

    def test_every_row_that_names_a_record_is_the_fastest_in_it(self) -> None:
        """Within 2%, which is what two readings of one kernel differ by there."""
        named = {key: config for key, config in configs.TABLE.items() if config.record == configs.TUNED}
        assert 18 == len(named)
        slow: list[str] = []
        for key, config in named.items():
            bucket = {"pass": key.which, "D": key.width, "causal": key.banded, "N": 8192}
            times = {
                configs.Config(**row["config"] | {"record": ""}): row["ms"]
                for row in self.rows(config.record)
                if row["ms"] is not None and bucket.items() <= row.items()
            }
            own = times[replace(config, narrowest=64, record="")]
            if own > 1.02 * min(times.values()):
                slow.append(f"{key}: {own / min(times.values()):.3f}")
        assert [] == slow

    @pytest.mark.parametrize("page", [0, 16, 256])
    @pytest.mark.parametrize(("B", "N"), [(1, 8192), (1, 65536), (16, 8192), (16, 65536)])
    def test_decode_takes_what_was_fastest(
        self, B: int, N: int, page: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tile, stages and parts together, as a call on an H200 would choose them."""
        monkeypatch.setattr(cached.compat, "architecture", lambda _: "sm90")
        monkeypatch.setattr(cached.compat, "multiprocessors", lambda _: 132)
        rows = "paged" if page else "cached"
        call = problem(B=B, H=32, Hkv=8, M=1, N=N, D=128, Dv=128, rows=rows, page=page)
        config, splits = cached._decode_shape.__wrapped__(call, 0)
        cell = {"B": B, "N": N, "page": page}
        rates = {
            (
                row["config"]["block_n"],
                row["config"]["num_warps"],
                row["config"]["num_stages"],
                row["splits"],
            ): row["GB/s"]
            for row in self.rows(configs.TUNED_DECODE)
            if cell.items() <= row.items()
        }
        own = rates[config.block_n, config.num_warps, config.num_stages, splits]
        assert own >= 0.98 * max(rates.values())


class TestRegistry:
    def test_another_dtype_of_any_array_is_another_plan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sink in float32 was read by the kernel that a sink in bfloat16 had compiled."""
        monkeypatch.setattr(registry, "PLANS", {})
        q = torch.zeros(4, dtype=torch.bfloat16)
        calls: list[Any] = []
        for sink in (q, q.float(), q):
            registry.run(
                "forward", None, (q, None, sink), lambda sink=sink: lambda *_: calls.append(sink.dtype)
            )
        assert [torch.bfloat16, torch.float32, torch.bfloat16] == calls


class TestRehearsal:
    def test_a_rehearsed_call_launches_nothing_and_keeps_nothing(self) -> None:
        before = dict(registry.PLANS)
        plans = offline.Sample(64).plans("sm90")
        assert ["forward", "dq", "dkdv"] == [tag for tag, _, _ in plans]
        assert before == registry.PLANS
        assert registry.rehearsal() is None

    @pytest.mark.parametrize(
        ("needs", "tags"),
        [
            ("q", ["dq"]),
            ("kv", ["stats", "dkdv"]),
            ("v", ["stats", "dkdv"]),
            ("qkv", ["dq", "dkdv"]),
            ("", ["stats"]),
        ],
    )
    def test_only_the_passes_that_are_asked_for_run(self, needs: str, tags: list[str]) -> None:
        """Row statistics are made by the pass over queries, or alone where that does not run."""
        plans = offline.Sample(64).plans("sm90", needs=frozenset(needs))
        assert ["forward", *tags] == [tag for tag, _, _ in plans]

    def test_a_given_configuration_is_used(self) -> None:
        given = Config(16, 32, 2, 1)
        ((_, made, _),) = [
            at for at in offline.Sample(64).plans("sm80", {"forward": given}) if at[0] == "forward"
        ]
        assert (2, 1) == (made.options["num_warps"], made.options["num_stages"])


class TestDescriptors:
    def test_a_descriptor_does_not_keep_its_tensor(self) -> None:
        """A cached descriptor that held its tensor would be a leak of gigabytes."""
        ((_, made, arrays),) = [at for at in offline.Sample(64).plans("sm90") if at[0] == "forward"]
        described = made.described(arrays)
        bases = [x.base for x in described if type(x).__name__ == "TensorDescriptor"]
        assert 2 == len(bases)
        assert all(isinstance(base, plan.Address) for base in bases)

    def test_descriptors_are_remembered_up_to_a_limit(self) -> None:
        ((_, made, _),) = [at for at in offline.Sample(64).plans("sm90") if at[0] == "forward"]
        for _ in range(plan.MAX_DESCRIPTORS + 10):
            made.described(tuple(torch.empty(1, 1, 64, 64, dtype=torch.bfloat16) for _ in range(3)))
        assert len(made.descriptors) <= plan.MAX_DESCRIPTORS


class TestTuning:
    def test_a_result_can_be_read_back(self, tmp_path: Path) -> None:
        file = tmp_path / "folder" / "tuning.json"
        best = Config(64, 128, 4, 1, tma=True)
        tuning.store("card", "forward, head dim 128", best, [tuning.Trial(best, 1.5)], file)
        tuning.store("card", "dq, head dim 128", Config(64, 64, 4, 2), [], file)
        rows = json.loads(file.read_text())["sections"]["card"]
        assert best == Config(**rows["forward, head dim 128"]["config"])
        assert {"forward, head dim 128", "dq, head dim 128"} == set(rows)

    def test_a_file_of_another_format_is_not_read(self, tmp_path: Path) -> None:
        file = tmp_path / "tuning.json"
        file.write_text('{"format": "attnproof/tuning/0", "sections": {"card": {}}}')
        assert {} == tuning.read(file)["sections"]

    def test_what_the_user_tuned_comes_before_the_table(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ATTNPROOF_TUNING", str(tmp_path / "tuning.json"))
        monkeypatch.setattr(tuning, "section", lambda device: "card")
        monkeypatch.setattr(tuning.compat, "architecture", lambda device: "sm90")
        tuning._kept.cache_clear()
        p = problem()
        assert tuning.lookup(p, "forward", 0) is None
        best = Config(32, 32, 8, 3)
        tuning.store("card", tuning.bucket(configs.key_of(p, "forward", "sm90")), best, [])
        assert best == tuning.lookup(p, "forward", 0)
        assert tuning.lookup(problem(64), "forward", 0) is None
        tuning._kept.cache_clear()

    def test_buckets_are_readable(self) -> None:
        assert "dkdv, head dim 128, banded" == tuning.bucket(Key("sm90", "dkdv", 128, banded=True))

    @pytest.mark.parametrize("which", tuning.TUNED_PASSES)
    @pytest.mark.parametrize("width", [64, 128, 256])
    def test_candidates_are_worth_a_measurement(self, which: Any, width: int) -> None:
        """A handful would miss, hundreds would take an hour."""
        found = list(tuning.candidates(which, width))
        assert len(found) == len(set(found))
        assert 8 <= len(found) <= 80


class TestOffline:
    def test_a_kernel_compiles_for_a_card_that_is_not_here(self) -> None:
        ((_, made, arrays),) = [at for at in offline.Sample(64, "cached").plans("sm90") if at[0] == "combine"]
        found = offline.resources(offline.compile_plan(made, arrays, "sm90"), "sm90")
        assert found.fits
        assert 0 == found.spills
        assert 0 < found.registers <= 255
