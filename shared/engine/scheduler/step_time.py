"""How long a decode step takes, learnt from those measured, and how many sequences it may hold. Pure policy.

seconds = a + b · sequences + c · context tokens: reading the weights, each sequence's share of the arithmetic, reading
the KV. Least squares with exponential forgetting; a slope that comes out negative is left out, so that a prediction
grows with both.
"""

from __future__ import annotations

FORGETTING = 0.99
"""An observation's weight falls to a half after about 70 newer ones."""
MIN_OBSERVATIONS = 8
"""With fewer there is no prediction."""
OUTLIER = 4.0
"""A step counts as at most this many times the prediction: one that compiled a kernel must not shrink the batch."""
_RIDGE = 1e-6  # share of a feature's variance added to it: keeps collinear features solvable


class StepTimeModel:
    """Learns from (sequences, context tokens, seconds)."""

    def __init__(self) -> None:
        self.num_observations = 0
        self._weight = 0.0
        self._means = [0.0, 0.0, 0.0]  # of sequences, context tokens, seconds
        self._products = [[0.0] * 3 for _ in range(3)]  # weighted sums of products of deviations from the means
        self._slopes: tuple[float, float] | None = None

    def observe(self, num_seqs: int, num_context_tokens: int, seconds: float) -> None:
        """One step that only decoded."""
        predicted = self.predict_s(num_seqs, num_context_tokens)
        if predicted:
            seconds = min(seconds, OUTLIER * predicted)
        values = (float(num_seqs), float(num_context_tokens), seconds)
        self._weight = FORGETTING * self._weight + 1.0
        before = [value - mean for value, mean in zip(values, self._means, strict=True)]
        self._means = [mean + step / self._weight for mean, step in zip(self._means, before, strict=True)]
        after = [value - mean for value, mean in zip(values, self._means, strict=True)]
        for i in range(3):
            for j in range(3):
                self._products[i][j] = FORGETTING * self._products[i][j] + before[i] * after[j]
        self.num_observations += 1
        self._slopes = None

    def predict_s(self, num_seqs: int, num_context_tokens: int) -> float | None:
        """Seconds of a step; None before MIN_OBSERVATIONS."""
        if self.num_observations < MIN_OBSERVATIONS:
            return None
        if self._slopes is None:
            self._slopes = self._solve()
        by_seq, by_token = self._slopes
        mean_seqs, mean_tokens, mean_s = self._means
        return max(0.0, mean_s + by_seq * (num_seqs - mean_seqs) + by_token * (num_context_tokens - mean_tokens))

    def _solve(self) -> tuple[float, float]:
        """Seconds by sequence and by context token, both ≥ 0."""
        (seqs, cross, seqs_s), (_, tokens, tokens_s), _ = self._products
        seqs, tokens = seqs * (1 + _RIDGE), tokens * (1 + _RIDGE)
        determinant = seqs * tokens - cross * cross
        if determinant > 0:
            by_seq = (seqs_s * tokens - tokens_s * cross) / determinant
            by_token = (tokens_s * seqs - seqs_s * cross) / determinant
            if by_seq >= 0 and by_token >= 0:
                return by_seq, by_token
        # One alone: the one that explains more.
        alone = [max(0.0, s / var) if var > 0 else 0.0 for s, var in ((seqs_s, seqs), (tokens_s, tokens))]
        return (alone[0], 0.0) if alone[0] * seqs_s >= alone[1] * tokens_s else (0.0, alone[1])


class BatchLimit:
    """Bounds a decode batch so that its steps are predicted to take at most the target."""

    def __init__(self, target_s: float) -> None:
        """`target_s`: seconds between two tokens of a sequence; 0 = no bound."""
        self.target_s = target_s
        self._model = StepTimeModel()
        self._largest = 0

    def observe(self, num_seqs: int, num_context_tokens: int, seconds: float) -> None:
        """One step that only decoded: its sequences, the tokens whose KV it read, how long it took."""
        if self.target_s > 0:
            self._largest = max(self._largest, num_seqs)
            self._model.observe(num_seqs, num_context_tokens, seconds)

    def admits(self, num_seqs: int, num_context_tokens: int) -> bool:
        """Whether a batch may grow to this. A batch of one always may.

        Nothing is extrapolated far: a batch may be at most twice the largest one that was measured, and of two while
        too little was.
        """
        if self.target_s == 0 or num_seqs <= 1:
            return True
        predicted = self._model.predict_s(num_seqs, num_context_tokens)
        if predicted is None:
            return num_seqs == 2
        return num_seqs <= 2 * self._largest and predicted <= self.target_s
