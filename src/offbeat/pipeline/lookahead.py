"""How many tickets are worth opening: all that the bound allows, or as many as the trainer needs.

Staleness is a budget, not an aim: with every ticket open and generation faster than training, the
mean lag *is* ``max_staleness``. Owns one number between g (groups per step) and L (what the bound
allows); knows no tickets and no clock.
"""

from __future__ import annotations


class Lookahead:
    """The most tickets that may be open.

    ``adaptive`` starts with two batches and moves a quarter of one with each batch: up when the
    trainer had to wait although requests could have started, down when another whole batch was
    finished already when this one was taken.

    Args:
        groups_per_step: g ≥ 1.
        max_open: L ≥ g.
        adaptive: whether the number moves; otherwise it is L.
        start: where it stood when a resumed run stopped; 0 begins anew.
    """

    def __init__(
        self, *, groups_per_step: int, max_open: int, adaptive: bool, start: int = 0
    ) -> None:
        if not 1 <= groups_per_step <= max_open:
            raise ValueError(
                f"groups_per_step {groups_per_step} must be between 1 and max_open {max_open}"
            )
        self._least, self._most = groups_per_step, max_open
        self._pace = max(1, groups_per_step // 4)
        self._adaptive = adaptive
        first = max(start, groups_per_step) if start else 2 * groups_per_step
        self.limit = min(first, max_open) if adaptive else max_open

    def batch_taken(self, *, waited: bool, slots_free: bool, finished: int) -> None:
        """Tell it how the last batch was come by.

        Args:
            waited: the trainer asked before the batch was complete.
            slots_free: a group could have started while it waited.
            finished: groups that are complete and not in this batch.
        """
        if not self._adaptive:
            return
        if waited and slots_free:
            self.limit = min(self._most, self.limit + self._pace)
        elif finished >= self._least:
            self.limit = max(self._least, self.limit - self._pace)
