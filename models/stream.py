"""From tokens to text that can be shown at once: whole characters only, and nothing past a stop string.

    token id -> bytes -> (UTF-8, held until a character is whole) -> (stop strings, held while one may have begun) -> text
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence

LENGTH, EOS, STOP = "length", "eos", "stop"  # the finish reasons


class CharacterStream:
    """Bytes in, whole characters out. Bytes that can begin no character become U+FFFD, as in the whole text's decoding."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD where the last character never became whole."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Text in, text out up to the first stop string. Text that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        if not self.stops or self.stopped:
            return "" if self.stopped else text
        text = self._held + text
        starts = [at for at in map(text.find, self.stops) if at >= 0]
        if starts:
            self.stopped, self._held = True, ""
            return text[: min(starts)]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self.stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[len(text) - length :]) for stop in self.stops):
                return length
        return 0

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class TextStream:
    """One sequence's new tokens in, its text out, and the reason why it ended.

    token_bytes  id -> the bytes it stands for; None for a model without a tokenizer, whose text stays empty
    stop_ids     end the sequence with "stop", eos_ids with "eos"; neither token's text is part of the text
    limit        the most new tokens
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes] | None, stops: Sequence[str] = (),
        eos_ids: Collection[int] = (), stop_ids: Collection[int] = (), limit: int = 1 << 62,
    ) -> None:
        self._token_bytes = token_bytes or (lambda _: b"")
        self._characters = CharacterStream()
        self._stops = StopStrings(stops)
        self._eos_ids, self._stop_ids, self._limit = frozenset(eos_ids), frozenset(stop_ids), limit
        self._count = 0
        self.text = ""
        self.finish_reason: str | None = None

    def push(self, token: int) -> str:
        """Take one new token; returns the text that is now sure. Sets finish_reason when the sequence is over."""
        if self.finish_reason is not None:
            raise ValueError("push: this sequence has ended")
        self._count += 1
        if token in self._stop_ids or token in self._eos_ids:
            return self._end(STOP if token in self._stop_ids else EOS, "")
        piece = self._stops.push(self._characters.push(self._token_bytes(token)))
        if self._stops.stopped:
            self.finish_reason = STOP
        elif self._count >= self._limit:
            return self._end(LENGTH, piece)
        self.text += piece
        return piece

    def _end(self, reason: str, piece: str) -> str:
        piece += self._stops.push(self._characters.finish())
        if not self._stops.stopped:
            piece += self._stops.finish()
        # A stop string may be completed by the U+FFFD of a last, broken character.
        self.finish_reason = STOP if self._stops.stopped else reason
        self.text += piece
        return piece
