"""A step in flight, and its measurements when it is done."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from legato.scheduling.state import Output, StepPlan, StepResult
from legato.telemetry.metrics import StepFigures


@dataclass(frozen=True, slots=True)
class SentStep:
    """What must be remembered of a step until its result is here."""

    plan: StepPlan
    sent_at: float
    planning_time: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preempted: int

    def figures(
        self, result: StepResult, arrived: float, gap: float, filter_time: float, outputs: list[tuple[int, Output]]
    ) -> StepFigures:
        """`gap` is the time since the result before; `outputs` were handed out, which took `filter_time`."""
        plan, num_tokens, num_computed = self.plan, len(outputs), sum(self.plan.num_tokens)
        num_drafts, accepted = 0, Counter[int]()
        if plan.drafts:
            num_drafts = sum(map(len, plan.drafts.values()))
            accepted.update(request_id for request_id, output in outputs if output.is_draft)
        return StepFigures(
            method="prefill" if plan.admitted or num_computed > len(plan.rows) + num_drafts else "decode",
            batch_size=len(plan.rows),
            num_admitted=len(plan.admitted),
            inference_time=arrived - self.sent_at,
            forward_time=result.forward_ns / 1e9,
            decode_time=max(result.total_ns - result.forward_ns, 0) / 1e9,
            filter_time=filter_time,
            planning_time=self.planning_time,
            num_tokens=num_tokens,
            num_gaps=min(self._num_decodes(), num_tokens),
            num_drafts=num_drafts,
            accepted=tuple(accepted.values()),
            gap=gap,
            num_computed=num_computed,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preempted=self.num_preempted,
            failed=result.error is not None,
            num_placements=len(plan.placements),
        )

    def _num_decodes(self) -> int:
        """Rows that go on with a token of the step before."""
        plan = self.plan
        count = plan.num_tokens.count(1) + len(plan.drafts)
        if plan.admitted and count:
            admitted = {admission.row for admission in plan.admitted}
            count -= sum(row in admitted for row, num in zip(plan.rows, plan.num_tokens, strict=True) if num == 1)
        return count
