"""Images that are encoded by CUDA graphs, with a recorder that needs no device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from legato.server.vision.tower_graphs import MOST_GRAPHS, MOST_SEEN, UNUSED_IMAGES, TowerGraphs

CPU = torch.device("cpu")


class Recorder:
    """Repeats a computation into the tensor that it gave first, as a graph does."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_captured = self.num_replayed = 0
        self._error = error

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        if self._error is not None:
            raise self._error
        self.num_captured += 1
        result = compute()

        def replay() -> None:
            self.num_replayed += 1
            result.copy_(compute())

        return replay, result


def doubled(pixels: torch.Tensor) -> torch.Tensor:
    return 2 * pixels.float()


def image(number: int, size: int = 4) -> np.ndarray:
    return np.full((size, size), number, dtype=np.uint8)


def encoded(graphs: TowerGraphs, number: int, size: int = 4) -> torch.Tensor:
    return graphs.run((size,), image(number, size), CPU, doubled)


def test_a_shape_has_a_graph_from_its_second_image_on() -> None:
    graphs = TowerGraphs(recorder := Recorder())
    found = [encoded(graphs, number) for number in range(5)]
    assert all(torch.equal(each, torch.full((4, 4), 2.0 * number)) for number, each in enumerate(found))
    assert (recorder.num_captured, recorder.num_replayed) == (1, 4)
    encoded(graphs, 1, size=6)
    assert recorder.num_captured == 1


def test_a_graph_that_is_not_used_any_more_is_given_up() -> None:
    graphs = TowerGraphs(recorder := Recorder())
    for size in range(1, MOST_GRAPHS + 1):
        assert encoded(graphs, 3, size).sum() == encoded(graphs, 3, size).sum() == 6 * size * size
    for _ in range(UNUSED_IMAGES):
        encoded(graphs, 3, 2)
    for number in range(3):
        assert torch.equal(encoded(graphs, number, 99), torch.full((99, 99), 2.0 * number))
    assert recorder.num_captured == MOST_GRAPHS + 1
    assert torch.equal(encoded(graphs, 4, 1), torch.full((1, 1), 8.0))  # eagerly: it was the first to go
    assert torch.equal(encoded(graphs, 4, 2), torch.full((2, 2), 8.0))
    assert len(graphs._graphs) == MOST_GRAPHS == len(graphs._last_used)


def test_images_of_all_sizes_are_not_captured_again_and_again() -> None:
    graphs = TowerGraphs(recorder := Recorder())
    for _ in range(20):
        for size in range(1, 3 * MOST_GRAPHS):
            encoded(graphs, 1, size)
    assert recorder.num_captured <= 3 * MOST_GRAPHS


def test_shapes_of_long_ago_are_forgotten() -> None:
    graphs = TowerGraphs(Recorder())
    for size in range(1, MOST_SEEN + 10):
        graphs.run((size,), image(1), CPU, doubled)
    assert len(graphs._seen) == MOST_SEEN


@pytest.mark.parametrize("error", [RuntimeError("cannot be captured\nmore"), MemoryError("full")])
def test_a_tower_that_cannot_be_captured_is_run_eagerly(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    graphs = TowerGraphs(Recorder(error))
    for number in range(4):
        assert torch.equal(encoded(graphs, number), torch.full((4, 4), 2.0 * number))
    (line,) = caplog.messages
    assert "images are encoded eagerly" in line and "more" not in line
