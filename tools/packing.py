"""Whole chats packed into documents of one length; knows tokens and loss masks, no text."""

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# Chats among which one looks for what fills a document: some thousand fill it to 99%.
WINDOW = 4096


@dataclass(frozen=True)
class Chat:
    """tokens and mask: [L] integers; the mask is 1 where the token is learned."""

    tokens: np.ndarray
    mask: np.ndarray


def packed(chats: Iterable[Chat], *, length: int, fill: int, counts: Counter[str]) -> Iterator[Chat]:
    """Documents of exactly `length` tokens, of whole chats and, behind them, of `fill` with mask 0.

    A longer chat is cut; one whose beginning has nothing to learn is left out. Both are counted in `counts`, and so
    are all tokens and those of filling.
    """
    window: list[Chat] = []
    for chat in itertools.chain(chats, [None]):
        if chat is not None:
            window += _at_most(chat, length, counts=counts)
        if window and (chat is None or len(window) == WINDOW):
            for group in best_fit([len(one.tokens) for one in window], length):
                yield _joined([window[index] for index in group], length, fill=fill, counts=counts)
            window = []


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups of indices with a sum of lengths of at most `capacity`: the longest first, each where it fits tightest.

    Groups are in the order of their first index, indices in a group rise. No length may exceed the capacity.
    """
    groups: list[list[int]] = []
    open_groups: list[tuple[int, int]] = []  # (room left, group), sorted
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect.bisect_left(open_groups, (lengths[index], -1))
        if place < len(open_groups):
            room, group = open_groups.pop(place)
        else:
            room, group = capacity, len(groups)
            groups.append([])
        groups[group].append(index)
        if room > lengths[index]:
            bisect.insort(open_groups, (room - lengths[index], group))
    return sorted(sorted(group) for group in groups)


def _at_most(chat: Chat, length: int, *, counts: Counter[str]) -> list[Chat]:
    if len(chat.tokens) <= length:
        return [chat]
    cut = Chat(chat.tokens[:length], chat.mask[:length])
    learns = bool(cut.mask.any())
    counts["cut" if learns else "too long"] += 1
    return [cut] if learns else []


def _joined(chats: list[Chat], length: int, *, fill: int, counts: Counter[str]) -> Chat:
    tokens = np.full(length, fill, dtype=chats[0].tokens.dtype)
    mask = np.zeros(length, dtype=chats[0].mask.dtype)
    end = 0
    for chat in chats:
        begin, end = end, end + len(chat.tokens)
        tokens[begin:end], mask[begin:end] = chat.tokens, chat.mask
    counts["filling"] += length - end
    return Chat(tokens, mask)
