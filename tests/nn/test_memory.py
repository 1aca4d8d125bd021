"""The queue of keys: order, wrap-around, whose keys count; and networks that follow another."""

from __future__ import annotations

import torch
from torch import nn

from afire.nn.memory import NOBODY, KeyQueue, follow_network, of_all, twin


def keys(*numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, 2), torch.tensor(numbers)


def test_the_oldest_makes_room_and_the_ring_wraps_around() -> None:
    queue, expected = KeyQueue(5, 2), [NOBODY] * 5
    at = 0
    for pushed in ([0, 1], [2, 3], [4, 5], [6], [7, 8, 9]):
        queue.push(*keys(*pushed))
        for number in pushed:
            expected[at % 5] = number
            at += 1
        assert queue.owners.tolist() == expected and int(queue.pointer) == at % 5
    assert queue.keys[:, 0].tolist() == expected and queue.keys.shape == (5, 2)


def test_of_more_keys_than_fit_the_last_stay() -> None:
    queue = KeyQueue(3, 2)
    queue.push(*keys(0))
    queue.push(*keys(*range(1, 8)))
    assert sorted(queue.owners.tolist()) == [5, 6, 7] and int(queue.pointer) == 8 % 3
    queue.push(*keys(8))  # in the place of the oldest
    assert sorted(queue.owners.tolist()) == [6, 7, 8]


def test_empty_places_and_own_keys_do_not_count() -> None:
    queue = KeyQueue(4, 2)
    assert not queue.others(torch.tensor([0, NOBODY])).any()
    queue.push(*keys(3, 0))
    assert queue.others(torch.tensor([0, 3, 9])).tolist() == [
        [True, False, False, False],
        [False, True, False, False],
        [True, True, False, False],
    ]


def test_a_queue_comes_back_from_its_state() -> None:
    first, second = KeyQueue(3, 2), KeyQueue(3, 2)
    first.push(*of_all(*keys(1, 2)))
    second.load_state_dict(first.state_dict())
    for queue in (first, second):
        queue.push(*keys(5, 6))
    assert torch.equal(first.keys, second.keys) and torch.equal(first.owners, second.owners)


def test_a_twin_follows() -> None:
    student = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    teacher = twin(student)
    assert not teacher.training and not any(weight.requires_grad for weight in teacher.parameters())
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    with torch.no_grad():
        for value in (*student.parameters(), *student.buffers()):
            value.add_(1)
    follow_network(teacher, student, 0.75)
    for name, value in teacher.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * student.state_dict()[name])
        else:
            assert value == before[name] + 1
