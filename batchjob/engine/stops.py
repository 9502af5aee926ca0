"""Text while it is being made: token ids to text piece by piece, and stop strings that may lie across pieces.

Only rows with stop strings come here; all others are decoded once, when they are over.

What a stop string does is a function of the text, not of how it was cut into tokens: the one that is complete first
ends the row, of several complete at the same character the longest. What was complete before `min_tokens` tokens were
out is passed over for good. The prompt takes no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from batchjob.sampling import SamplingParams

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet
_MAX_WINDOW = 16  # tokens that are decoded again with each new one, before the window is cut
_CONTEXT_SIZES = (4, 8)  # tokens that a cut tries to leave in the window
_MAX_HELD = 64  # pushes without a new character, after which U+FFFD is taken for real


class IncrementalDetokenizer:
    """Gives out the text of a growing list of token ids as soon as no later token can change it.

    The pieces and the flush together are `decode(all ids)`, for any grouping of the ids. Decoding tokens one by one
    would not do: characters are split over byte-level tokens, SentencePiece drops the space before the first word,
    and a byte-fallback decoder turns a run of bytes into U+FFFD until the run is complete. So each push decodes a
    window of the last tokens, gives out what is new in it, and holds back trailing U+FFFD.
    """

    __slots__ = ("_decode", "_limit", "_num_given", "_num_held", "_window")

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_given = 0  # characters of the window's text that have been given out
        self._num_held = 0  # pushes since the last one that gave out something
        self._limit = _MAX_WINDOW

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain now and was not before; often empty."""
        self._window += ids
        text = self._decode(self._window)
        end = len(text.rstrip(_REPLACEMENT)) if text.endswith(_REPLACEMENT) else len(text)
        self._num_held = 0 if end > self._num_given else self._num_held + 1
        if self._num_held > _MAX_HELD:
            end = len(text)
        piece = text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        if self._num_given == len(text) and len(self._window) > self._limit:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """The rest, now that no more tokens come: an incomplete character as its decoder shows it."""
        text = self._decode(self._window)
        piece = text[self._num_given :]
        self._num_given = len(text)
        return piece

    def _cut(self, text: str) -> None:
        """Forgets all but a few tokens of context, if these alone decode to the end of the window's text.

        They do not where they start inside a character or a word that is written differently at the start of a text;
        then a wider context is tried, and after that a wider window.
        """
        for size in _CONTEXT_SIZES:
            context = self._window[-size:]
            tail = self._decode(context)
            if tail and text.endswith(tail):
                self._window, self._num_given, self._limit = context, len(tail), _MAX_WINDOW
                return
        self._limit = 2 * len(self._window)


class StopMatcher:
    """Collects text and cuts it at a stop string. A piece costs its own length, not that of the text before it."""

    __slots__ = ("_include_stop", "_num_chars", "_overlap", "_pieces", "_stop", "_tail")

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._overlap = max(map(len, stop)) - 1  # characters before a piece that may begin a stop string
        self._tail = ""
        self._pieces: list[str] = []
        self._num_chars = 0

    @property
    def text(self) -> str:
        """All text so far, or what a stop string left of it."""
        return "".join(self._pieces)

    def feed(self, piece: str, *, armed: bool = True) -> bool:
        """Adds a piece; True if a stop string is complete within it, which cuts the text and is the last call.

        With `armed` false, stop strings that are complete at the end of this piece are passed over.
        """
        if not piece:
            return False
        text = self._tail + piece
        self._pieces.append(piece)
        self._num_chars += len(piece)
        if armed:
            first = len(self._tail) + 1  # a match ends here or later: before, it would have been found before
            found = [(at + len(s), at) for s in self._stop if (at := text.find(s, max(0, first - len(s)))) >= 0]
            if found:
                end, start = min(found)
                keep = self._num_chars - len(text) + (end if self._include_stop else start)
                self._pieces = [self.text[:keep]]
                return True
        self._tail = text[-self._overlap :] if self._overlap else ""
        return False


class StopStrings:
    """The stop strings of one row: an incremental detokenizer that feeds a matcher."""

    __slots__ = ("_detokenizer", "_matcher")

    def __init__(self, decode: Decode, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(decode)
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop)

    @property
    def text(self) -> str:
        """The text up to the stop string, once `push` or `flush` has been True."""
        return self._matcher.text

    def push(self, token: int, *, armed: bool) -> bool:
        """One more token; True if it completes a stop string."""
        return self._matcher.feed(self._detokenizer.push((token,)), armed=armed)

    def flush(self, *, armed: bool) -> bool:
        """The row is over for another reason; True if text held back until now completes a stop string."""
        return self._matcher.feed(self._detokenizer.flush(), armed=armed)
