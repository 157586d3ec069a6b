"""What an engine reports (the fourth contract): plain data, the same for a stream, a timeline, a replay and a test."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

EventKind = Literal["submitted", "prefill", "token", "parked", "paused", "resumed", "error", "finished"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Usage:
    """Counts and seconds of one request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: of those, tokens that were not computed again.
        completion_tokens: tokens reported; the end token that the model gave is not among them.
        first_token_seconds: from submission to the first token read, None without one.
        prefill_seconds: from the first chunk to the first token read.
        decode_seconds: from the first token read to the last.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_seconds: float | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate, None below two tokens."""
        gaps = self.completion_tokens - 1
        return gaps / self.decode_seconds if gaps > 0 and self.decode_seconds > 0 else None


@dataclass(frozen=True)
class Event:
    """One thing that happened to one request. The `text` of a request's events, joined, is its answer.

    Attributes:
        kind: "submitted"; "prefill" (a chunk of the prompt was computed); "token"; "parked" and "paused" (memory ran
            short: its caches are gone, a paused row's are stored exactly), then "resumed"; "error" (what went wrong,
            before the end); "finished" (exactly one, the last).
        request: the request's id.
        time: seconds since the engine began.
        text: text that became certain with this event. It may lag behind the tokens: half characters and possible
            beginnings of stop strings are held back, and the rest comes with "finished".
        token, index: token id and its number in the answer, from 0.
        logprob, top_logprobs: log-probability of the token, and the most likely (token, logprob) pairs, if asked for.
        done, total: prompt tokens computed so far, and all of them ("prefill"); tokens that need not be computed
            again, and all that are known ("parked", "paused", "resumed").
        reason: why it finished.
        stop: what ended the text: a stop string, or the id of an end token.
        seed: of the request's draws ("submitted", "finished").
        usage: counts and times ("finished").
        error: code, message and what else helps ("error").
    """

    kind: EventKind
    request: str
    time: float
    text: str = ""
    token: int | None = None
    index: int | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    done: int | None = None
    total: int | None = None
    reason: FinishReason | None = None
    stop: str | int | None = None
    seed: int | None = None
    usage: Usage | None = None
    error: dict[str, Any] | None = None

    def as_record(self) -> dict[str, Any]:
        """JSON data, without what does not apply."""
        record = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        record["usage"] = asdict(self.usage) if self.usage else None
        return {name: value for name, value in record.items() if value is not None and (name != "text" or value)}


@dataclass(frozen=True)
class StepRecord:
    """One engine step: its plan and its result. From a list of them the run can be drawn, replayed and checked.

    `operations` tells what was done to caches since the record before, in order. A set of caches is named by the ids of
    its rows, in order; a row alone has serial caches, several have batched ones:

    * ("new", id) - empty caches
    * ("restore", id, n) - caches with the prompt's first n tokens, from a store
    * ("copy", id, other) - the state that another prompt's caches hold at that moment
    * ("merge", ids) - rows that stood alone, in one batch
    * ("extend", ids, more) - the rows `more` behind the rows `ids`
    * ("park", id) - a prompt's caches are gone
    * ("pause", id), ("resume", id) - a row that stands alone is put away, and comes back as it was
    * ("filter", ids, kept) - all rows but `kept` are gone
    * ("extract", ids, id) - one row of a batch, alone

    Attributes:
        index: number of the step.
        kind: "prefill" (a chunk of one prompt, or the last chunks of several), "decode" (one token a row) or "read"
            (tokens were read and nothing launched).
        rows: request ids, in the order of the batch.
        shape: [B, L] of the forward; (0, 0) without one.
        positions: position of each row's first column.
        lengths: valid tokens of each row.
        inputs: the token ids that were fed, row by row, padding left out.
        operations: what was done to caches before the forward, see above.
        joins, leaves: requests that entered before the forward, and left after it (finished, cancelled or failed).
            A row that has chosen its last token takes no part in the forward, and leaves with the step that reads it.
        chunk: (start, end) of the prompt tokens of a prefill, where it is one prompt's.
        cache_bytes: bytes of all live caches after the step.
        started, seconds: when it began (seconds since the engine began) and how long it took on the host.
    """

    index: int
    kind: Literal["prefill", "decode", "read"]
    rows: tuple[str, ...]
    shape: tuple[int, int]
    positions: tuple[int, ...]
    lengths: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    operations: tuple[tuple[Any, ...], ...]
    joins: tuple[str, ...]
    leaves: tuple[str, ...]
    chunk: tuple[int, int] | None
    cache_bytes: int
    started: float
    seconds: float

    def as_record(self) -> dict[str, Any]:
        """JSON data."""
        return asdict(self)
