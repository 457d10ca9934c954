"""Packing items into as few rows as best fit decreasing finds (Johnson 1974)."""

from collections.abc import Sequence


def packed(costs: Sequence[Sequence[int]], room: Sequence[int]) -> list[list[int]]:
    """The numbers of items with these costs, in as few rows as best fit decreasing finds.

    The first cost decides; the others must have room, too. An item that fits nowhere is a row of
    its own.
    """
    rows: list[list[int]] = []
    left: list[list[int]] = []  # room of each row
    with_room: list[list[int]] = [[] for _ in range(room[0] + 1)]  # rows by the first of that
    is_there = 0  # bits: which of these lists are not empty
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n][0], n)):
        cost = costs[number]
        row, at = None, cost[0]
        while row is None and is_there >> at:
            rest = is_there >> at
            at += (rest & -rest).bit_length() - 1
            last = with_room[at][-1]
            if all(a >= b for a, b in zip(left[last], cost, strict=True)):
                row = with_room[at].pop()
                if not with_room[at]:
                    is_there ^= 1 << at
            at += 1
        if row is None:
            row = len(rows)
            rows.append([])
            left.append(list(room))
        rows[row].append(number)
        left[row] = [a - b for a, b in zip(left[row], cost, strict=True)]
        if left[row][0] >= 0:
            with_room[left[row][0]].append(row)
            is_there |= 1 << left[row][0]
    return rows
