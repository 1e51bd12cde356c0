"""The arithmetic of tensor slicing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l1_kernels.errors import UserError
from l2_dense_parallel.slicing import ExpertShard, Shard, check_tp, global_tensors, layer_tensors, possible_tp
from layers.config import ModelConfig, MoEConfig

CONFIG = ModelConfig(
    family="test", vocab_size=1023, hidden_size=64, num_layers=2, num_heads=12, num_kv_heads=4, head_dim=8, ffn_size=199, max_positions=32
)


@given(count=st.integers(0, 500), size=st.integers(1, 17))
def test_parts_of_a_split_are_whole_and_differ_by_at_most_one(count, size):
    parts = [Shard(rank, size).split(count) for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(vocab=st.integers(1, 5000), size=st.integers(1, 16))
def test_vocabulary_parts_are_equal_and_pad_less_than_a_row_each(vocab, size):
    parts = [Shard(rank, size).vocabulary(vocab) for rank in range(size)]
    rows = [row for part in parts for row in part]
    assert rows == list(range(len(rows))) and len({len(part) for part in parts}) == 1
    assert vocab <= len(rows) < vocab + size


def test_every_rank_holds_the_kv_heads_that_its_query_heads_read():
    for heads, kv_heads in ((12, 4), (8, 2), (8, 8), (6, 1), (32, 8), (9, 3)):
        config = replace(CONFIG, num_heads=heads, num_kv_heads=kv_heads)
        for tp in possible_tp(config):
            for rank in range(tp):
                shard = Shard(rank, tp)
                held = shard.kv_heads(kv_heads)
                read = sorted({head // (heads // kv_heads) for head in shard.heads(heads)})
                assert list(held) == read, (heads, kv_heads, tp, rank)
                assert len(shard.heads(heads)) % len(held) == 0  # a kernel's group is H/G of the rank


def test_possible_degrees():
    assert possible_tp(replace(CONFIG, num_heads=9, num_kv_heads=3)) == [1, 3, 9]
    assert possible_tp(CONFIG) == [1, 2, 4, 12]  # 3 and 6 would tear a group of query heads from its KV head
    assert possible_tp(CONFIG, most=4) == [1, 2, 4]


@pytest.mark.parametrize("tp", [0, 3, 5, 6, 24])
def test_a_degree_that_does_not_divide_is_refused_with_those_that_do(tp):
    with pytest.raises(UserError) as refused:
        check_tp(CONFIG, tp)
    message = str(refused.value)
    assert f"--tp {tp}" in message and "1, 2, 4, 12" in message and "--pp" in message and "\n" not in message


def test_a_degree_that_divides_is_accepted():
    for tp in (1, 2, 4, 12):
        check_tp(CONFIG, tp)


@pytest.mark.parametrize("rank, size", [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_group_is_a_programming_error(rank, size):
    with pytest.raises(ValueError, match="Shard"):
        Shard(rank, size)


def test_row_parallel_biases_are_on_rank_0_only():
    moe = MoEConfig(layers=(1,), num_experts=3, top_k=1, expert_size=37)
    for rank in range(4):
        layers = [layer_tensors(replace(CONFIG, moe=moe), layer, Shard(rank, 4)) for layer in (0, 1)]
        held = {name for tensors in layers for name, part in tensors.items() if part.held}
        row_parallel = {"attn.out.bias", "ffn.down.bias", "moe.down.bias"}
        assert held & row_parallel == (row_parallel if rank == 0 else set())
        assert {"attn.qkv.bias", "ffn.up.bias", "moe.up.bias"} <= held


def test_gated_feed_forward_takes_the_same_part_of_gate_and_up():
    config = replace(CONFIG, gated_ffn=True)
    part = layer_tensors(config, 0, Shard(1, 4))["ffn.up.weight"]
    assert part.whole_shape == (398, 64) and part.rows == (range(49, 99), range(49, 99)) and part.shape == (100, 64)


def test_tied_models_have_no_head_matrix():
    assert "head.weight" not in global_tensors(CONFIG)
    assert global_tensors(replace(CONFIG, tie_embeddings=False), Shard(3, 4))["head.weight"].rows == (range(768, 1024),)


def test_experts_over_owners_and_slices_are_every_expert_once():
    """ep = 2 owners of es = 3 slices: each number of each expert lies on one rank, and a slice's bias on one."""
    moe = MoEConfig(layers=(1,), num_experts=4, top_k=1, expert_size=37)
    config = replace(CONFIG, moe=moe, gated_ffn=True)
    up, down, biases = set(), set(), []
    for owner in range(2):
        for slice_ in range(3):
            tensors = layer_tensors(config, 1, Shard(0, 1, ExpertShard(owner, 2, slice_, 3)))
            part = tensors["moe.up.weight"]
            assert part.shape == (2, 2 * len(part.rows[0]), 64) and part.whole_shape == (4, 74, 64)
            up |= {(e, row) for e in part.owned for row in part.rows[1]}
            part = tensors["moe.down.weight"]
            assert part.shape == (2, 64, len(part.columns))
            down |= {(e, column) for e in part.owned for column in part.columns}
            biases += [owner] if tensors["moe.down.bias"].held else []
            assert tensors["moe.gate.weight"].shape == (4, 64)  # every rank routes
    assert up == down == {(e, i) for e in range(4) for i in range(37)}
    assert biases == [0, 1]


def test_experts_that_do_not_divide_over_their_owners():
    with pytest.raises(ValueError, match="5 experts do not divide over 2 owners"):
        ExpertShard(0, 2).owned(5)
