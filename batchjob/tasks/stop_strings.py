"""Stop strings of a row while it is generated: across tokens, characters split over tokens, and special tokens.

Only rows with stop strings come here; all others are decoded once, when they are over.

What a stop string does is a function of the text, not of how it was cut into tokens: the one that is complete first
ends the row, of several complete at the same character the longest. What was complete before `min_tokens` tokens were
out is passed over for good. The prompt takes no part. The output is what the tokenizer decodes of all output tokens,
cut at the stop string. A stop string that names a special token, such as "<|im_start|>user", is looked for in the text
with special tokens; the output is then the text before it without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from batchjob.sampling import SamplingParams
from batchjob.tasks.base import Detokenizer

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet
_MAX_WINDOW = 16  # tokens that are decoded again with each new one, before the window is cut
_CONTEXT_SIZES = (4, 8)  # tokens that a cut tries to leave in the window
_MAX_HELD = 64  # pushes without a new character, after which U+FFFD is taken for real


class IncrementalDetokenizer:
    """Keeps the end of the text of a growing list of token ids, and knows which part of it is new and certain.

    Decoding tokens one by one would not do: characters are split over byte-level tokens, SentencePiece drops the space
    before the first word, and a byte-fallback decoder turns a run of bytes into U+FFFD until the run is complete. So
    each push decodes a window of the last tokens and holds back trailing U+FFFD. A decoder may change its mind about
    text that seemed certain: byte fallback turns a whole run of characters into U+FFFD when a broken byte follows it.
    """

    __slots__ = (
        "_before", "_decode", "_known", "_limit", "_num_held", "_overlap", "_window", "num_certain", "num_known",
        "text",
    )  # fmt: skip

    def __init__(self, decode: Decode, *, overlap: int = 0) -> None:
        """`overlap`: the characters of `text` that are kept at least before what is new."""
        self._decode = decode
        self._overlap = overlap
        self._window: list[int] = []
        self._before = ""  # what is kept of the text before that of the window
        self._known = ""  # the last `text` up to its `num_certain`
        self._num_held = 0  # pushes since the last one that made more of the text certain
        self._limit = _MAX_WINDOW
        self.text = ""  # the end of the text of all ids
        # The leading characters of `text` that were certain before the last push and are the same still, and those that
        # are certain now: what lies between is new.
        self.num_known = self.num_certain = 0

    def push(self, ids: Iterable[int]) -> None:
        """Adds token ids and updates `text`, `num_certain` and `num_known`."""
        if self._known == self.text and len(self._window) > self._limit:
            self._cut()
        self._window += ids
        self.text = text = self._before + self._decode(self._window)
        end = len(text.rstrip(_REPLACEMENT)) if text.endswith(_REPLACEMENT) else len(text)
        self._num_held = 0 if end > len(self._known) else self._num_held + 1
        if self._num_held > _MAX_HELD:
            end = len(text)
        self._settle(end)

    def flush(self) -> None:
        """All of the text is certain, since no more tokens come: an incomplete character as its decoder shows it."""
        self._settle(len(self.text))

    def _settle(self, end: int) -> None:
        """The text is certain up to `end`."""
        if len(self._known) > end and self._known.startswith(self.text[:end]):
            self.num_known = self.num_certain = end  # what was certain is in doubt; the next tokens tell
            return
        self.num_known, self.num_certain = _common(self._known, self.text), end
        self._known = self.text[:end]

    def _cut(self) -> None:
        """Forgets all but a few tokens of context, if these alone decode to the end of the window's text.

        They do not where they start inside a character or a word that is written differently at the start of a text;
        then a wider context is tried, and after that a wider window.
        """
        for size in _CONTEXT_SIZES:
            context = self._window[-size:]
            tail = self._decode(context)
            if tail and self.text.endswith(tail):
                before = self.text[: len(self.text) - len(tail)]
                self._before = before[-self._overlap :] if self._overlap else ""
                self._known = self._before + tail
                self._window, self._limit = context, _MAX_WINDOW
                return
        self._limit = 2 * len(self._window)


def _common(known: str, text: str) -> int:
    """The length of the longest common prefix."""
    if text.startswith(known):
        return len(known)
    return next((at for at, (a, b) in enumerate(zip(known, text, strict=False)) if a != b), min(len(known), len(text)))


class StopMatch(NamedTuple):
    """A stop string that is complete, by its distances from the end of the text: these stay right when a decoder
    changes its mind about earlier text."""

    stop: str
    before_end: int  # characters from the start of the stop string to the end of the text
    after: int  # characters behind the stop string


class StopMatcher:
    """Looks for stop strings in the text of the tokens pushed. A token costs its own length, not that of the text."""

    __slots__ = ("_detokenizer", "_stop")

    def __init__(self, decode: Decode, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._detokenizer = IncrementalDetokenizer(decode, overlap=max(map(len, stop)) - 1)

    def push(self, ids: Iterable[int], *, armed: bool) -> StopMatch | None:
        """More tokens; the stop string that they complete. With `armed` false those complete by now are passed over."""
        self._detokenizer.push(ids)
        return self._find() if armed else None

    def flush(self, *, armed: bool) -> StopMatch | None:
        """The row is over for another reason; a stop string in text that was held back until now."""
        self._detokenizer.flush()
        return self._find() if armed else None

    def _find(self) -> StopMatch | None:
        """The stop string that ends first in what is new, of those that end there the longest."""
        text, end, known = self._detokenizer.text, self._detokenizer.num_certain, self._detokenizer.num_known
        found = [
            (at + len(stop), at, stop)
            for stop in self._stop
            if (at := text.find(stop, max(0, known + 1 - len(stop)), end)) >= 0
        ]
        if not found:
            return None
        stop_end, start, stop = min(found)
        return StopMatch(stop, len(text) - start, len(text) - stop_end)


class StopStrings:
    """The stop strings of one row, and the text that they leave of it."""

    __slots__ = ("_detokenizer", "_include_stop", "_match", "_matchers")

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._include_stop = params.include_stop
        special = tuple(stop for stop in params.stop if any(token in stop for token in detokenizer.special_tokens))
        plain = tuple(stop for stop in params.stop if stop not in special)
        kinds = ((False, detokenizer.decode, plain), (True, self._decode_all, special))
        self._matchers = [(is_special, StopMatcher(decode, stop)) for is_special, decode, stop in kinds if stop]
        self._match: tuple[bool, StopMatch] | None = None  # whether it is of the text with special tokens

    def _decode_all(self, ids: list[int]) -> str:
        return self._detokenizer.decode(ids, skip_special_tokens=False)

    def push(self, token: int, *, armed: bool) -> bool:
        """One more token; True if it completes a stop string, which is the last call."""
        return self._take(lambda matcher: matcher.push((token,), armed=armed))

    def flush(self, *, armed: bool) -> bool:
        """The row is over for another reason; True if text held back until now completes a stop string."""
        return self._take(lambda matcher: matcher.flush(armed=armed))

    def _take(self, feed: Callable[[StopMatcher], StopMatch | None]) -> bool:
        found = [(is_special, match) for is_special, matcher in self._matchers if (match := feed(matcher)) is not None]
        if found:
            # Most text behind it: complete first. Of two at the same place, the longer.
            self._match = max(found, key=lambda item: (item[1].after, item[1].before_end))
        return bool(found)

    def text(self, ids: list[int]) -> str:
        """The output text of all the row's output tokens, after a `push` or `flush` that was True."""
        assert self._match is not None
        is_special, (stop, before_end, after) = self._match
        text = self._decode_all(ids) if is_special else self._detokenizer.decode(ids)
        end = len(text) - (after if self._include_stop else before_end)
        if not text.startswith(stop, len(text) - before_end):  # a decoder that takes back what follows, too
            start = text.rfind(stop)
            end = start + len(stop) * self._include_stop if start >= 0 else len(text)
        return self._without_special(ids, end) if is_special else text[:end]

    def _without_special(self, ids: list[int], end: int) -> str:
        """What is output text of the first `end` characters of the text with special tokens."""
        low, high = 0, len(ids)
        while low < high:  # the fewest tokens that have these characters
            middle = (low + high) // 2
            low, high = (low, middle) if len(self._decode_all(ids[:middle])) >= end else (middle + 1, high)
        if low == 0:
            return ""
        before, last = ids[: low - 1], ids[low - 1 : low]
        text = self._detokenizer.decode(before)
        if not self._detokenizer.decode(last) and self._decode_all(last):  # the cut is at a special token
            return text
        return text + self._decode_all(ids[:low])[len(self._decode_all(before)) : end]
