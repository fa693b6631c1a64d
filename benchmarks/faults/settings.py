"""What a case of `benchmarks.faults` is: a scheme, a fault, and when it befalls whom."""

import dataclasses

from benchmarks.faults.kinds import FAULTS
from benchmarks.harness import settings
from benchmarks.harness.settings import option


AXIS = "data"
LOCAL = ("diloco", "sparse_loco")  # they train by local steps
SCHEMES = (
    *("dense", "zen", "dgc", "dragonn", "ok_topk", "spardl", "gtopk"),
    *("momentum", "rows", "embrace"),
    *LOCAL,
)
ROUND = 2  # steps: of three a checkpoint, so every other one is within a round
ANY = "any"
MOMENTS = (ANY, "round", "exchange", "save")


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Lets faults befall hosts that train, and looks at what becomes of the job."""

    PROGRAM = "benchmarks.faults"
    schemes: tuple[str, ...] = option(SCHEMES, choices=SCHEMES)
    faults: tuple[str, ...] = option(tuple(FAULTS), choices=tuple(FAULTS))
    moments: tuple[str, ...] = option((ANY,), "of local steps", choices=MOMENTS)
    hosts: int = option(4, "that train at first")
    rate: str = option("250mbit", "of each link, each way")
    steps: int = option(12, "of a run")
    every: int = option(3, "steps a checkpoint")
    silence: float = option(5.0, "seconds that are a loss")
    seed: int = option(0, "of gradients, and of when what befalls whom")
    out: str | None = option(None, "a folder for the results, not benchmarks/results")
    scheme: str = option("", hidden=True)
    fault: str = option("", hidden=True)
    moment: str = option(ANY, hidden=True)
    folder: str = option("", hidden=True)
    phase: int = option(0, hidden=True)
    at: int = option(-1, hidden=True)
    lost: int = option(-1, hidden=True)
    resumed: int = option(-1, hidden=True)

    @property
    def is_clean(self) -> bool:
        """Whether nothing befalls anybody, from the first step to the last."""
        return self.phase == 0 and self.at < 0

    def cases(self) -> list["Settings"]:
        """Each scheme with each fault; those of local steps at each moment."""
        return [
            dataclasses.replace(self, scheme=scheme, fault=fault, moment=moment)
            for scheme in self.schemes
            for fault in self.faults
            for moment in (self.moments if scheme in LOCAL else (ANY,))
        ]

    def candidates(self) -> list[int]:
        """The steps at which a host may be befallen: not before a checkpoint is there."""
        after = range(self.every + 1, self.steps)
        if self.moment == "save":
            return [step for step in after if (step + 1) % self.every == 0]
        if self.moment == ANY:
            return [*after]
        in_round = 0 if self.moment == "round" else ROUND - 1
        return [step for step in after if step % ROUND == in_round]

    @property
    def befalls(self) -> bool:
        """Whether something is to happen in this phase."""
        return self.phase == 0 and self.at >= 0

    def ranks_at(self, step: int) -> int:
        """How many ranks took a step."""
        was_before = self.resumed < 0 or step < self.resumed
        return self.hosts if was_before else self.hosts - 1
