"""How many sequences may decode at once, by the times of the steps so far. Pure policy, part of the scheduler."""

from __future__ import annotations

from shared.sizing.step_fit import StepTimeFit
from shared.sizing.step_time import StepWork


class BatchLimit:
    """Bounds a decode batch so that its steps are predicted to take at most the target."""

    def __init__(self, target_s: float, fit: StepTimeFit) -> None:
        """`target_s`: seconds between two tokens of a sequence; 0 = no bound. `fit` learns from every step."""
        self.target_s = target_s
        self._fit = fit
        self._largest = 0  # that the fit knows of
        self._newer: tuple[int, int] = (0, 0)  # a larger one, and the number of its step

    def measured(self, work: StepWork) -> None:
        """A step has run; its time is in the fit."""
        if work.num_sequences > max(self._largest, self._newer[0]):
            self._newer = work.num_sequences, self._fit.num_steps

    def admits(self, num_seqs: int, num_context_tokens: int) -> bool:
        """Whether a batch may grow to this. A batch of one always may.

        Nothing is extrapolated far: a batch may be at most twice the largest one whose time is in the fit, and of two
        while too little was measured.
        """
        if self.target_s == 0 or num_seqs <= 1:
            return True
        times = self._fit.times
        if times is None:
            return num_seqs == 2
        if self._fit.num_fitted >= self._newer[1]:
            self._largest = max(self._largest, self._newer[0])
        return num_seqs <= 2 * self._largest and times.decode_step_s(num_seqs, num_context_tokens) <= self.target_s
