"""The order in which waiting requests enter the queue. The caller gives a bounded window; rows keep their identity."""

from __future__ import annotations

from collections.abc import Iterable

from batchjob.records import Request

ORDERS = ("auto", "input", "prefix", "length")


def arrange(requests: Iterable[Request], order: str = "auto", *, block_size: int = 16) -> list[Request]:
    """The same requests in the order in which they should start. Stable, and a function of the requests alone.

    input    as given
    length   longest expected first, so that no long row is left over at the end
    prefix   rows that share leading blocks of tokens side by side, groups and rows in order of first appearance
    auto     the groups of `prefix`, longest expected first inside each

    Rows that share a longer prefix form a group inside their group. In a group, the rows that share nothing more come
    first; so rows without any common prefix come before all groups. Raises ValueError on another order.
    """
    window = list(requests)
    if order == "input":
        return window
    if order == "length":
        return sorted(window, key=_longest_first)
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; known: {', '.join(ORDERS)}")
    paths = _shared_paths(window, block_size)
    if order == "prefix":
        ranks = sorted(range(len(window)), key=lambda i: paths[i])
    else:
        ranks = sorted(range(len(window)), key=lambda i: (paths[i], _longest_first(window[i])))
    return [window[i] for i in ranks]


def _longest_first(request: Request) -> tuple[bool, int]:
    """Prompt and allowed output together; without max_tokens the output is bounded by the context alone."""
    max_tokens = request.params.max_tokens
    return max_tokens is not None, -len(request.token_ids) - (max_tokens or 0)


def _shared_paths(requests: list[Request], block_size: int) -> list[list[int]]:
    """For each request its way down the tree of leading blocks, as far as another request goes with it.

    Level by level, so that unshared blocks cost nothing. A node's number is its rank of first appearance in its
    level; the requests of one node stay together from level to level, so paths compare as the groups should lie.
    """
    paths: list[list[int]] = [[] for _ in requests]
    alive = list(range(len(requests)))
    start = 0
    while alive:
        nodes: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for i in alive:
            block = tuple(requests[i].token_ids[start : start + block_size])
            if len(block) == block_size:
                nodes.setdefault((paths[i][-1] if start else 0, block), []).append(i)
        alive = []
        for rank, members in enumerate(nodes.values()):
            if len(members) > 1:
                alive += members
                for i in members:
                    paths[i].append(rank)
        start += block_size
    return paths
