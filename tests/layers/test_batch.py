import numpy as np
import pytest

from layers.batch import Batch


def test_prompts_are_packed_without_padding_and_ask_for_each_last_token() -> None:
    batch = Batch.prompts([[5, 6, 7], [8]], rows=[2, 0])
    assert batch.tokens.tolist() == [5, 6, 7, 8]
    assert batch.rows.tolist() == [2, 2, 2, 0]
    assert batch.positions.tolist() == [0, 1, 2, 0]
    assert batch.ends.tolist() == [1, 2, 3, 1]
    assert batch.outputs.tolist() == [2, 3]


def test_join_shifts_outputs_and_keeps_order() -> None:
    joined = Batch.join([Batch.step([9], [1], [4]), Batch.prompts([[5, 6]], [0])])
    assert joined.tokens.tolist() == [9, 5, 6]
    assert joined.ends.tolist() == [5, 1, 2]
    assert joined.outputs.tolist() == [0, 2]
    assert joined.pass_lengths().tolist() == [5, 2, 2]


def test_encoder_tokens_see_their_whole_text() -> None:
    batch = Batch.encode([[1, 2, 3], [4, 5]], types=[[0, 0, 1], [0, 1]])
    assert batch.ends.tolist() == [3, 3, 3, 2, 2]
    assert batch.types is not None and batch.types.tolist() == [0, 0, 1, 0, 1]
    assert batch.outputs.tolist() == [0, 1, 2, 3, 4]


def test_every_array_is_int32() -> None:
    batch = Batch.join([Batch.step(np.array([9], np.int64), [1], [4]), Batch.prompts([np.array([5, 6])], [0])])
    assert {getattr(batch, n).dtype for n in ("tokens", "rows", "positions", "ends", "outputs")} == {np.dtype(np.int32)}


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_an_empty_prompt_is_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="prompts"):
        Batch.prompts(prompts, range(len(prompts)))
