"""What a rung of the ladder found."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from vocabshard.options import LogpOutput
from vocabshard.testing.compare import as_integers


@dataclass
class Rung:
    """Counts of a rung: rows compared and rows whose bytes differed, ours and an ordinary log_softmax's."""

    level: str
    what: str
    rows: int = 0
    differing: int = 0
    ordinary_rows: int = 0
    ordinary_differing: int = 0
    seconds: float = 0.0
    first: str = ""  # where the first difference was
    detail: dict[str, Any] = field(default_factory=dict)
    _started: float = field(default_factory=time.perf_counter, repr=False)

    @property
    def holds(self) -> bool:
        """Whether something was compared and no row differed."""
        return self.rows > 0 and self.differing == 0

    def compare(self, got: LogpOutput | tuple[Tensor | None, ...], want: tuple[Tensor | None, ...], where: str) -> None:
        """Counts the rows in which any of logp, lse, entropy differ in bytes."""
        wrong = None
        for a, b in zip(got[:3], want[:3], strict=True):
            if a is None or b is None:
                continue
            other = as_integers(a).cpu() != as_integers(b).cpu()
            wrong = other if wrong is None else wrong | other
        assert wrong is not None, "nothing to compare"
        self.rows += wrong.numel()
        self.differing += int(wrong.sum())
        if not self.first and bool(wrong.any()):
            self.first = f"{where}, row {int(wrong.nonzero()[0])}"

    def compare_ordinary(self, got: Tensor, want: Tensor) -> None:
        """Counts where an ordinary sum differs, so that the comparison is known to be able to fail."""
        self.ordinary_rows += got.numel()
        self.ordinary_differing += int((as_integers(got).cpu() != as_integers(want).cpu()).sum())

    def done(self) -> Rung:
        """Stops the clock."""
        self.seconds = time.perf_counter() - self._started
        return self

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        stated = asdict(self)
        stated.pop("_started")
        return {**stated, "holds": self.holds}


def ordinary_logp(logits: Tensor, target_ids: Tensor) -> Tensor:
    """What most trainers do with logits [N, V]."""
    return torch.log_softmax(logits.float(), -1).gather(-1, target_ids[:, None])[:, 0]
