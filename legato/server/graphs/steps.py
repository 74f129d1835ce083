"""All graphs of an engine: which step runs with one, and what is captured when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from legato.layers.kv_cache import KVCache
from legato.layers.shard import Shard
from legato.models.registry import CausalModel
from legato.server.graphs.captures import CapturePolicy, decode_sizes
from legato.server.graphs.decode import Decoded, DecodeGraphs, Graphs, Record
from legato.server.graphs.mixed import MixedGraphs
from legato.server.rows import Rows, RowStep


class StepGraphs:
    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        rows: Rows,
        sizes: Sequence[int],  # of decodes, as `decode_sizes` takes them
        mixed: Sequence[int],  # of steps with prompts, in tokens; none: those have no graphs
        record: Record,
        shard: Shard,
        max_sampled: int,  # positions of a step, drafts included
    ) -> None:
        self._rows = rows
        # Without adapters and, on a shard that takes them, with: a step in which nobody has one pays nothing for them.
        self._decodes: list[DecodeGraphs] = []
        self._mixed: list[MixedGraphs] = []
        for has_adapters in (False, True) if rows.adapters is not None else (False,):
            policy = CapturePolicy(decode_sizes(rows.padding, sizes), are_given=bool(sizes))
            self._decodes.append(DecodeGraphs(model, cache, rows, policy, record, shard))
            self._decodes[-1].has_adapters = has_adapters
            if mixed:
                policy = CapturePolicy(mixed, small=mixed[0])
                self._mixed.append(MixedGraphs(model, cache, rows, policy, record, shard, max_sampled))
                self._mixed[-1].has_adapters = has_adapters

    @property
    def kinds(self) -> list[Graphs]:
        return [*self._decodes, *self._mixed]

    def run(self, parts: list[RowStep]) -> Decoded | None:
        """What became of the parts that sample, if a graph fits; else None, and nothing has happened. Decodes first."""
        row_numbers = [part.row for part in parts]
        has_adapters = self._rows.adapters is not None and self._rows.adapters.are_used_by(parts)
        if all(part.decode for part in parts):
            is_in_sync = self._rows.out_of_sync.isdisjoint(row_numbers)
            return self._decodes[has_adapters].run(row_numbers) if is_in_sync else None
        if not self._mixed or any(map(self._rows.wants_scores, parts)):
            return None
        done = self._mixed[has_adapters].run(parts)
        if done is not None:
            self._rows.out_of_sync.difference_update(row_numbers)
        return done

    # ---- captures, between steps ----------------------------------------------------------------------------------

    def capture_first(self) -> None:
        for graphs in self.kinds:
            for size in graphs.policy.at_start:
                self._capture(graphs, size)

    def after_step(self) -> Callable[[], None] | None:
        """A capture that is worth it though requests may be waiting. To be asked once after every step."""
        wanted = [(graphs, graphs.policy.after_step()) for graphs in self.kinds]
        return next((partial(self._capture, graphs, size) for graphs, size in wanted if size is not None), None)

    def capture_while_idle(self) -> None:
        """One size that may be needed, while no request waits."""
        for graphs in self.kinds:
            if (size := graphs.policy.when_idle()) is not None:
                return self._capture(graphs, size)

    def _capture(self, graphs: Graphs, size: int) -> None:
        """One that fails was the last: there is no room for others, or something is wrong with them."""
        if not graphs.capture(size):
            for each in self.kinds:
                each.policy.stop()

    @property
    def num_pending(self) -> int:
        """Sizes that have no graph and may yet get one."""
        return sum(graphs.policy.num_pending for graphs in self.kinds)
