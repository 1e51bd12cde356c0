"""Streaming: characters stay whole, text is cut before a stop string however tokens cut it, and what was shown stays shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.stream import CharacterStream, StopStrings, TextStream


def cut(data: bytes, places) -> list[bytes]:
    edges = [0, *sorted(p % (len(data) + 1) for p in places), len(data)]
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@given(st.text(max_size=30), st.lists(st.integers(0, 200), max_size=20))
def test_characters_come_whole(text, places):
    stream = CharacterStream()
    pieces = [stream.push(piece) for piece in cut(text.encode(), places)]
    assert "".join(pieces) == text and stream.finish() == ""


@given(st.binary(max_size=30), st.lists(st.integers(0, 200), max_size=20))
def test_broken_bytes_read_as_in_the_whole(data, places):
    stream = CharacterStream()
    text = "".join(stream.push(piece) for piece in cut(data, places)) + stream.finish()
    assert text == data.decode("utf-8", errors="replace")


def first_stop(pieces, stops):
    """The plain definition: after each piece, is there a stop string in all of the text? Cut at the leftmost."""
    text = ""
    for piece in pieces:
        text += piece
        found = [at for at in map(text.find, stops) if at >= 0]
        if found:
            return text[: min(found)], True
    return text, False


@given(st.lists(st.text("ab", max_size=4), max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_stop_strings_cut_like_the_whole_text(pieces, stops):
    stream, shown = StopStrings(stops), ""
    for piece in pieces:
        shown += stream.push(piece)
        if stream.stopped:
            break
    if not stream.stopped:
        shown += stream.finish()
    assert (shown, stream.stopped) == first_stop(pieces, stops)


def test_only_a_possible_beginning_is_held():
    stream = StopStrings(["</end>", "STOP"])
    assert stream.push("one two") == "one two"
    assert stream.push(" three <") == " three "
    assert stream.push("/e") == ""
    assert stream.push("x") == "</ex"
    assert stream.push("S") == "" and stream.push("TO") == "" and stream.push("Pped") == ""
    assert stream.stopped


TABLE = {1: b"Say ", 2: b"\xe4\xbd", 3: b"\xa0", 4: b"\xf0\x9f", 5: b"\x98\x80", 6: b" sto", 7: b"p now", 8: b"<eos>"}


def feed(stream: TextStream, tokens):
    return [stream.push(token) for token in tokens]


def test_a_character_over_two_tokens_is_shown_when_whole():
    stream = TextStream(TABLE.__getitem__, limit=5)
    assert feed(stream, [1, 2, 3, 4, 5]) == ["Say ", "", "你", "", "😀"]
    assert (stream.text, stream.finish_reason) == ("Say 你😀", "length")


def test_a_character_that_never_becomes_whole_is_marked_at_the_end():
    stream = TextStream(TABLE.__getitem__, limit=2)
    assert feed(stream, [1, 2]) == ["Say ", "\ufffd"] and stream.finish_reason == "length"


def test_a_stop_string_over_two_tokens():
    stream = TextStream(TABLE.__getitem__, ["stop"], limit=9)
    assert feed(stream, [1, 6, 7]) == ["Say ", " ", ""]
    assert (stream.text, stream.finish_reason) == ("Say  ", "stop")
    with pytest.raises(ValueError, match="ended"):
        stream.push(1)


def test_what_was_held_is_shown_at_the_end():
    stream = TextStream(TABLE.__getitem__, ["stop"], eos_ids=[8], limit=9)
    assert feed(stream, [1, 6, 8]) == ["Say ", " ", "sto"] and (stream.text, stream.finish_reason) == ("Say  sto", "eos")
    stream = TextStream(TABLE.__getitem__, ["stop"], limit=1)
    assert feed(stream, [6]) == [" sto"] and stream.finish_reason == "length"


def test_end_tokens_have_no_text_and_their_own_reasons():
    stream = TextStream(TABLE.__getitem__, eos_ids=[8], stop_ids=[7])
    assert feed(stream, [1, 7]) == ["Say ", ""] and stream.finish_reason == "stop"
    stream = TextStream(TABLE.__getitem__, eos_ids=[], limit=2)  # --ignore-eos: its text is shown
    assert feed(stream, [1, 8]) == ["Say ", "<eos>"] and stream.finish_reason == "length"


def test_a_stop_string_in_the_last_token_is_a_stop_not_a_length():
    stream = TextStream(TABLE.__getitem__, ["now"], limit=1)
    assert feed(stream, [7]) == ["p "] and stream.finish_reason == "stop"


def test_no_tokenizer_no_text():
    stream = TextStream(None, limit=2)
    assert feed(stream, [5, 6]) == ["", ""] and stream.finish_reason == "length"
