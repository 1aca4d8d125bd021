"""Which rows are in which shard, and what is typed for one."""

from __future__ import annotations

import pytest

from afire.cluster.shards import Shard, all_shards, parse_shard, shard_of_name, shards_asked
from afire.errors import UserError


@pytest.mark.parametrize("count", [1, 2, 7, 64, 200])
@pytest.mark.parametrize(("total", "unit"), [(100, 1), (100, 32), (64, 32), (1, 8), (0, 4)])
def test_every_row_is_in_one_shard_in_order(total: int, unit: int, count: int) -> None:
    pieces = [shard.rows(total, unit) for shard in all_shards(count)]
    assert [row for rows in pieces for row in rows] == list(range(total))
    assert all(rows.start % unit == 0 for rows in pieces if len(rows))
    lengths = [-(-len(rows) // unit) for rows in pieces]
    assert max(lengths) - min(lengths) <= 1


def test_batches_are_the_same_in_any_number_of_shards() -> None:
    def batches(count: int) -> list[range]:
        shards = [shard.rows(1000, 32) for shard in all_shards(count)]
        return [rows[start : start + 32] for rows in shards for start in range(0, len(rows), 32)]

    assert batches(1) == batches(7) == batches(64)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("3", "not a shard such as 3/64"), ("64/64", "the last of 64 is 63"), ("-1/4", "not a shard"), ("0/0", "between")],
)
def test_a_mistyped_shard(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_shard(text)


def test_names_and_numbers() -> None:
    assert parse_shard("3/64") == Shard(3, 64) == shard_of_name("images-00003-of-00064.npy")
    assert shard_of_name("images.npy") is None
    assert shards_asked(None, "3/64") == (64, Shard(3, 64)) and shards_asked(7, None) == (7, None)
    with pytest.raises(UserError, match="different numbers"):
        shards_asked(7, "3/64")
    with pytest.raises(UserError, match="leave out --shard"):
        shards_asked(None, "3/64", finish=True)
