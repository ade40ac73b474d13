"""The instrument that counts live bytes is right about who keeps what alive."""

import pytest
import torch
from torch import nn

from autograder.lab import gpt, memory, ranks
from autograder.lab.live import LiveTensors

KB = 1024


def kilobytes(n: int) -> torch.Tensor:
    return torch.zeros(n * KB // 4)


def test_counts_what_is_held_and_forgets_what_is_dropped():
    with LiveTensors() as live:
        a, b = kilobytes(3), kilobytes(5)
        assert live.nbytes() == 8 * KB
        assert live.sizes() == [5 * KB, 3 * KB]
        del a
        assert live.nbytes() == 5 * KB
        b.untyped_storage().resize_(0)
        assert live.nbytes() == 0
        b.untyped_storage().resize_(2 * KB)
        assert live.nbytes() == live.settled() == 2 * KB


def test_views_share_and_clones_do_not():
    with LiveTensors() as live:
        a = kilobytes(4)
        view = a[:10].view(2, 5)
        assert live.nbytes() == 4 * KB
        copy = view.clone()
        assert live.nbytes() == 4 * KB + copy.nbytes
        del a
        assert live.nbytes() == 4 * KB + copy.nbytes, "a view keeps the whole storage"


def test_tensors_of_before_count_when_they_are_given_or_used():
    a, b, unused = kilobytes(1), kilobytes(2), kilobytes(4)
    with LiveTensors([a]) as live:
        assert live.nbytes() == KB
        c = b + 1
        assert live.nbytes() == 5 * KB
        assert live.nbytes(without=[a, c[:3]]) == 2 * KB
    assert unused.numel()


def test_a_new_storage_at_an_old_address_is_a_new_one():
    with LiveTensors() as live:
        for _ in range(100):
            a = kilobytes(2)
            assert live.nbytes() == 2 * KB
            del a


def test_what_autograd_saves_is_live_until_backward():
    torch.manual_seed(0)
    model = gpt.tiny(torch.float32)
    tokens = torch.randint(0, 64, (2, 2, 8))
    with LiveTensors([*model.parameters(), tokens]) as live:
        before = live.nbytes()
        assert before == memory.storage_bytes([*model.parameters(), tokens])
        loss = model.loss(*tokens)
        ids = 16 * 2 * 8  # in saved_bytes, and here before and after
        saved = memory.gpt_activation_bytes(model.config, 2, 8)
        assert live.nbytes() - before == saved - ids + loss.nbytes
        loss.backward()
        del loss
        gradients = sum(p.grad.nbytes for p in model.parameters())
        assert live.nbytes() - before == gradients
        assert live.nbytes(without=[p.grad for p in model.parameters()]) == before


def test_peak():
    with LiveTensors(peak=True) as live:
        a = kilobytes(2)
        b = kilobytes(6)
        del b
        c = a * 2
        assert (live.nbytes(), live.peak()) == (4 * KB, 8 * KB)
        live.reset_peak()
        del c
        assert live.peak() == 4 * KB
    with pytest.raises(ValueError, match="peak=True"), LiveTensors() as live:
        live.peak()


class Pair(torch.Tensor):
    """A tensor made of two, as a DTensor is made of a local one; it claims their size."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a, b):
        self.a, self.b = a, b

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Pair(func(*[x.a for x in args]), func(*[x.b for x in args]))


def test_a_wrapper_counts_as_what_is_in_it():
    with LiveTensors() as live:
        pair = Pair(kilobytes(1), kilobytes(1))
        total = pair + pair
        assert live.nbytes() == 4 * KB
        del pair
        assert live.nbytes() == 2 * KB
    assert total.a.numel()


def on_rank(context) -> list:
    """Beside the recorder; a message under way keeps its tensor."""
    with LiveTensors() as live:
        full = torch.zeros(context.world_size * 256)
        work = torch.distributed.all_gather_into_tensor(full, torch.ones(256), async_op=True)
        moving = live.nbytes()
        work.wait()
        del work
        layer = nn.Linear(4, 4)
        layer(full[:4]).sum().backward()
        return [moving, live.nbytes(without=layer.parameters()), full.sum().item()]


def test_in_a_rank_with_the_recorder():
    run = ranks.run(on_rank, 2)
    for rank in (0, 1):
        moving, rest, total = run.values[rank]
        assert moving in (2048, 3072)  # whether the input is kept is the backend's business
        assert rest >= 2048 + 80
        assert total == 512
    calls = run.of(0, "all_gather")
    assert [e.api for e in calls] == ["all_gather_into_tensor"]
    assert calls[0].done is not None
