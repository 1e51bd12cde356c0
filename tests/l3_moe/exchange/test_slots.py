"""A slot a token: the same sums as with counted rows, no counts, a message to each peer and one back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from l1_kernels.device import open_device
from l3_moe.exchange.peers import NoPeers
from l3_moe.exchange.slots import SlotExchange
from tests.l3_moe.exchange.threads import Mail, on_threads, peers

TOKENS, SIZE, TOP_K, EXPERTS = 3, 5, 2, 6


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_its_tokens_back(ranks: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (ranks, TOKENS, SIZE)).astype(np.float32)
    experts = np.array([[rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)] for _ in range(ranks)], np.int32)
    share = rng.integers(1, 4, experts.shape).astype(np.float32)
    matrices = rng.integers(-3, 4, (EXPERTS, SIZE, SIZE)).astype(np.float32)
    mail, owned = Mail(), EXPERTS // ranks

    def rank(me: int) -> tuple[np.ndarray, Any]:
        group = NoPeers() if ranks == 1 else peers(mail, "across", list(range(ranks)), me)
        exchange = SlotExchange(group, open_device("cpu"))
        arrived = exchange.dispatch(x[me], experts[me], share[me])
        assert np.array_equal(arrived.x, x.reshape(-1, SIZE)) or ranks == 1
        mine = (arrived.experts >= me * owned) & (arrived.experts < (me + 1) * owned)
        made = np.einsum("td,tkde->tke", arrived.x, matrices[arrived.experts])
        y = (made * (arrived.share * mine)[..., None]).sum(1).astype(np.float32)
        return exchange.collect(y), group.counters

    for me, (got, counters) in enumerate(on_threads(ranks, rank)):
        want = (np.einsum("td,tkde->tke", x[me], matrices[experts[me]]) * share[me][..., None]).sum(1)
        assert np.array_equal(got, want)
        others = ranks - 1
        assert dict(counters.messages) == ({"gather": others, "rows back": others} if others else {})
        assert counters.bytes["gather"] == others * 4 * TOKENS * (SIZE + 2 * TOP_K) and counters.bytes["rows back"] == others * 4 * TOKENS * SIZE
