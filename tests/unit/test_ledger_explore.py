"""The interactive page's account agrees with the exact one, and the page is one file."""

from __future__ import annotations

import random

from attnproof.ledger import accounts, explore
from attnproof.ledger.explore import Settings
from attnproof.ledger.traffic import Call
from attnproof.masks import EDGE, Mask, causal
from attnproof.report import explorer


def test_the_live_account_is_the_exact_account_where_both_apply() -> None:
    generator = random.Random(3)
    for _ in range(150):
        s = Settings(
            n=generator.randint(1, 600),
            d=generator.choice([16, 40, 64, 128]),
            heads=generator.randint(1, 3),
            size=generator.choice([2, 4]),
            causal=generator.random() < 0.6,
            sram=generator.choice([16, 64, 192]),
            bandwidth=1555,
            products=312,
            exps=2.4,
            l2=40,
        )
        shown = explore.account(s)
        block_q, block_k = explore.tile(s)
        mask = causal() if s.causal else Mask()
        kinds = mask.tiles(s.n, s.n, block_q, block_k)
        dtype = {2: "float16", 4: "float32"}[s.size]
        call = Call.dense(s.n, heads=s.heads, head_dim=s.d, dtype=dtype, mask=mask)
        assert (shown["visited"], shown["edge"]) == (kinds.kept, kinds.count(EDGE))
        assert shown["keys_outer_bytes"] == accounts.keys_outer(call, block_q, block_k, stat=s.size).total
        assert shown["queries_outer_bytes"] == accounts.forward(call, block_q, block_k).total
        assert shown["pairs"] == call.pairs
        assert (
            shown["naive_bytes"]
            == accounts.eager(Call.dense(s.n, heads=s.heads, head_dim=s.d, dtype=dtype)).total
        )


def test_the_page_is_one_file_with_every_device() -> None:
    text = explorer.page(explore.page_data())
    assert "{{" not in text
    assert "src=" not in text and "<link" not in text
    for each in explore.page_data()["devices"]:
        assert each["title"] in text


def test_data_cannot_end_the_script_element() -> None:
    text = explorer.page({"dtypes": {}, "limits": [], "devices": [{"title": "</script><b>"}]})
    assert "</script><b>" not in text
