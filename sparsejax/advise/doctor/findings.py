"""The report of an examination: its findings, as text with a line for each, and as JSON."""

import dataclasses

from sparsejax.advise import codec
from sparsejax.advise.doctor.links import Links
from sparsejax.advise.explain.explanation import Explanation


OK, NOTE, WRONG = "OK", "note", "WRONG"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        about: The subject, a word.
        status: "OK" if the check passed, "WRONG" if it failed, or "note" for a check that
            was not made, and for other information.
        text: The result, a sentence.
        fix: What to do, or "".
    """

    about: str
    status: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return (
            f"{self.status:5}  {self.about:10}  {self.text}{' ' * bool(self.fix)}{self.fix}"
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of `doctor`, equal on all processes; `print` shows it as text.

    Attributes:
        findings: The findings, in the order of the checks.
        links: The measured times of messages between ranks; None if nothing was measured.
        explanation: The forecast for the model; None without a model or a network.

    Example:
        >>> report = sparsejax.advise.doctor.findings.Report(findings=())
        >>> report.wrong
        ()
    """

    findings: tuple[Finding, ...]
    links: Links | None = None
    explanation: Explanation | None = None

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """The findings that must be fixed before training."""
        return tuple(one for one in self.findings if one.status == WRONG)

    def to_json(self) -> str:
        """Returns the whole report as a JSON object."""
        return codec.dumps(self, wrong=len(self.wrong))

    def __str__(self) -> str:
        count = len(self.wrong)
        end = f"{count} {'thing is' if count == 1 else 'things are'} wrong."
        end = end if count else "Nothing that was checked is wrong."
        return "\n".join([*map(str, self.findings), end])
