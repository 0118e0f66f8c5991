"""The stand-in for CUDA graphs is as stale as they are."""

import pytest
import torch
from torch import Tensor

from graphs.cuda_graph import RecordedGraphs


def test_a_replay_reads_and_writes_where_the_capture_did() -> None:
    x, out = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def run() -> None:
        doubled = x * 2
        out.copy_(doubled.view(2, 1).squeeze(1).add_(1))

    graph = RecordedGraphs().capture(run)
    assert out.tolist() == [3.0, 5.0]
    for values, expected in (([5.0, 7.0], [11.0, 15.0]), ([0.0, -1.0], [1.0, -1.0])):
        x.copy_(torch.tensor(values))
        graph.replay()
        assert out.tolist() == expected


def test_what_python_decided_stays_as_it_was() -> None:
    x, out, factor = torch.tensor([1.0]), torch.zeros(1), [2.0]
    graph = RecordedGraphs().capture(lambda: out.copy_(x * factor[0]))
    factor[0] = 100.0
    graph.replay()
    assert out.item() == 2.0


def test_another_tensor_in_the_place_of_an_input_is_not_seen() -> None:
    held, out = [torch.tensor([1.0])], torch.zeros(1)
    graph = RecordedGraphs().capture(lambda: out.copy_(held[0]))
    held[0] = torch.tensor([9.0])
    graph.replay()
    assert out.item() == 1.0


@pytest.mark.parametrize("read", [Tensor.item, Tensor.nonzero, bool], ids=["item", "nonzero", "bool"])
def test_reading_a_tensor_on_the_host_cannot_be_captured(read: object) -> None:
    with pytest.raises(RuntimeError, match="cannot be captured"):
        RecordedGraphs().capture(lambda: read(torch.ones(1)))  # type: ignore[operator]


def test_memory_counts_results_once_until_the_reset() -> None:
    maker, out = RecordedGraphs(), torch.zeros(4)
    x = torch.ones(4)

    def run() -> None:
        y = x + 1
        out.copy_(y.view(2, 2).view(4))

    maker.capture(run)
    assert maker.memory_used() == 2 * 4 * 4  # y and, since it is written to, out
    maker.capture(run)
    assert maker.memory_used() == 4 * 4 * 4
    maker.reset()
    assert maker.memory_used() == 0
