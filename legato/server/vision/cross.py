"""Images for models with cross-attention layers.

They are in the first slots of a sequence. A step computes keys and values of the slots that it is given and takes them
out: what the model reads is text alone, with positions and block tables that begin where the text does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from legato.kernels.attention.paged import PagedContext
from legato.layers.kv_cache import KVCache
from legato.layers.step import CrossImages, CrossTokens, ImageEmbeddings, Step
from legato.models.vision import CrossModel
from legato.pb import generate_pb2 as pb
from legato.pb import unpack_token_ids
from legato.server.rows import Rows, RowStep, to_device
from legato.server.vision.images import ImageInPrompt, RowImages, VisionEncoder, is_cached
from legato.vision.cross import aligned


@dataclass(slots=True)
class RowBesideImages(RowImages):
    front: int = 0  # slots before the text
    seen: Sequence[tuple[int, int, int]] = ()  # from this position on tokens see the slots [begin, end)

    def groups_of(self, part: RowStep, offset: int) -> list[CrossTokens]:
        last = part.start + part.count
        found: list[CrossTokens] = []
        ends = [*(first for first, _, _ in self.seen[1:]), last]
        for (first, begin, end), next_first in zip(self.seen, ends, strict=False):
            first, stop = max(first, part.start), min(next_first, last)
            if first < stop:
                found.append(CrossTokens(offset + first - part.start, stop - first, begin, end, part.row))
        return found


class CrossVisionEncoder(VisionEncoder):
    def admit(self, admission: pb.Admission) -> None:
        ids = unpack_token_ids(admission.input_ids)
        images = [self._image(image, is_cached(image, admission)) for image in admission.images]
        front = aligned(images[-1].span.start + images[-1].span.num_tokens) if images else 0
        seen = self._seen([front + i for i, number in enumerate(ids[front:]) if number == self._rules.token_id], images)
        self._rows[admission.row] = RowBesideImages(len(ids), images, None, front=front, seen=seen)

    def _seen(self, places: list[int], images: list[ImageInPrompt]) -> list[tuple[int, int, int]]:
        assert isinstance(self._model, CrossModel)
        run = 0
        seen: list[tuple[int, int, int]] = []
        for number, (place, image) in enumerate(zip(places, images, strict=False)):
            if not self._model.sees_runs or (number and place != places[number - 1] + 1):
                run = number
            seen.append((place, images[run].span.start, image.span.start + image.span.num_tokens))
        return seen

    def store_images(self, parts: list[RowStep], rows: Rows, cache: KVCache) -> list[RowStep]:
        states: list[torch.Tensor] = []
        places: list[np.ndarray] = []  # [2, n]: rows, positions
        text: list[RowStep] = []
        for part in parts:
            row, last = self._row(part), part.start + part.count
            for image in row.images if part.start < row.front else ():
                first, stop = image.part(part.start, last)
                if first < stop:
                    assert image.embeddings is not None, "it was said to be in the cache"
                    states.append(image.embeddings[first - image.span.start : stop - image.span.start])
                    places.append(np.stack((np.full(stop - first, part.row), np.arange(first, stop))))
            if last > row.front:
                begin = max(part.start, row.front)
                text.append(replace(part, start=begin, count=last - begin))
        if states:
            there, size = to_device(np.concatenate(places, axis=1), self._device), cache.block_size
            owners, positions = there[0], there[1]
            slots = rows.block_tables[owners, positions // size].long() * size + positions % size
            assert isinstance(self._model, CrossModel)
            self._model.store_images(torch.cat(states), slots, cache)
        return text

    def add_images(self, step: Step, parts: Sequence[RowStep], block_size: int) -> Step:
        rows = [self._row(part) for part in parts]
        groups: list[CrossTokens] = []
        offset = 0
        for row, part in zip(rows, parts, strict=True):
            groups += row.groups_of(part, offset)
            offset += part.count
        sees = None
        if groups:
            seeing = np.zeros((offset, 1), dtype=np.float32)
            for group in groups:
                seeing[group.first : group.first + group.count] = 1
            sees = to_device(seeing, self._device)
        cross = CrossImages(tuple(groups), step.block_tables, sees)
        step = replace(step, images=ImageEmbeddings(None, None, None, cross=cross))
        fronts = np.array([row.front for row in rows])
        counts = np.array([part.count for part in parts])
        return _behind(step, fronts, counts, block_size) if fronts.any() else step

    def _row(self, part: RowStep) -> RowBesideImages:
        row = self._rows.get(part.row)
        return row if isinstance(row, RowBesideImages) else RowBesideImages(0, [], None)


def _behind(step: Step, fronts: np.ndarray, counts: np.ndarray, block_size: int) -> Step:
    """The step as if its sequences began behind `fronts` slots, which are whole blocks. The slots of its tokens stay:
    only where attention reads is another place."""
    device, host = step.positions.device, step.on_host
    front = to_device(fronts, device)
    if host is not None:
        lens = [length - int(shift) for length, shift in zip(host.context_lens, fronts, strict=True)]
        tables = _shifted(host.block_tables, front // block_size)
        host = PagedContext(host.query_lens, lens, host.num_decodes, tables, block_size, host.dtype)
    return replace(
        step,
        positions=step.positions - to_device(np.repeat(fronts, counts), device),
        context_lens=(step.context_lens - front).int(),
        block_tables=_shifted(step.block_tables[step.rows.long()], front // block_size),
        rows=torch.arange(len(fronts), dtype=torch.int32, device=device),
        chunks=None if step.chunks is None else replace(step.chunks, whole_prompts=None),
        on_host=host,
    )


def _shifted(tables: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[n, max_blocks], row i from its blocks[i] on."""
    columns = torch.arange(tables.shape[1], device=tables.device) + blocks[:, None]
    return tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))
