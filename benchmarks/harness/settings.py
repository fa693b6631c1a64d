"""The settings of a benchmark: a frozen dataclass whose fields are its arguments.

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        PROGRAM = "benchmarks.network.messages"
        hosts: tuple[int, ...] = option((2, 4, 8, 16), "numbers of hosts")
        rate: str = option("250mbit", "of each link, each way")

`parse` reads them from a command line, `command` writes the command line for result files,
and `environment` and `from_environment` hand them to the processes of a testbed as JSON.
"""

import argparse
import dataclasses
import json
import os
import shlex
import typing
from collections.abc import Sequence
from typing import Any, ClassVar, Self


VARIABLE = "BENCHMARK_SETTINGS"


def option(default: Any = dataclasses.MISSING, help: str = "", **how: Any) -> Any:
    """Returns a dataclass field with the options of its command-line argument.

    Args:
        default: The default; without one the argument is required.
        help: The help of the argument.
        how: `choices`, the allowed values; `positional=True`; `hidden=True`; or `recorded`,
            a word that replaces the value in the command of result files.
    """
    return dataclasses.field(default=default, metadata={"help": help, **how})


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of one benchmark; `parse` reports a ValueError of `__post_init__`."""

    PROGRAM: ClassVar[str] = ""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), field.metadata.get("choices")
            values = value if isinstance(value, tuple) else (value,)
            for unknown in [one for one in values if choices and one not in choices]:
                raise ValueError(
                    f"unknown {field.name} {unknown!r}; there are {', '.join(choices)}"
                )

    @classmethod
    def parse(cls, argv: Sequence[str] | None = None) -> Self:
        """Parses a command line, by default that of this process."""
        about = (cls.__doc__ or "").partition("\n")[0]
        parser = argparse.ArgumentParser(prog=f"python -m {cls.PROGRAM}", description=about)
        for field in dataclasses.fields(cls):
            cls._add(parser, field)
        given = vars(parser.parse_args(argv))
        try:
            return cls._of(given)
        except ValueError as error:
            parser.error(str(error))

    @classmethod
    def _add(cls, parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
        """Adds the argument of a field."""
        kind, several = cls._kind(field)
        options: dict[str, Any] = {"help": _help(field), "default": field.default}
        if kind is bool:
            options["action"] = "store_true"
        else:
            options["type"] = kind
        if several:
            options["nargs"] = "*"
        required = field.default is dataclasses.MISSING
        if required:
            del options["default"]
        if field.metadata.get("positional"):
            parser.add_argument(field.name, metavar=field.name.upper(), **options)
        else:
            name = "--" + field.name.replace("_", "-")
            parser.add_argument(name, dest=field.name, required=required, **options)

    @classmethod
    def _kind(cls, field: dataclasses.Field) -> tuple[Any, bool]:
        """Returns the type of a field's value or items, and whether it has several."""
        hint = typing.get_type_hints(cls)[field.name]
        if typing.get_origin(hint) is tuple:
            return typing.get_args(hint)[0], True
        alternatives = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return (alternatives[0] if alternatives else hint), False

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Self:
        """Makes settings of these values: lists become tuples, and texts their types."""
        for field in dataclasses.fields(cls):
            (kind, several), value = cls._kind(field), values[field.name]
            if several:
                values[field.name] = tuple(map(kind, value))
            elif value is not None:
                values[field.name] = kind(value)
        return cls(**values)

    def command(self) -> str:
        """Returns the command line that gives these settings, without defaults."""
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if not field.metadata.get("positional"):
                words.append("--" + field.name.replace("_", "-"))
            if "recorded" in field.metadata:
                words.append(field.metadata["recorded"])
            elif not isinstance(value, bool):
                words += map(str, value if isinstance(value, tuple) else (value,))
        return shlex.join(["python", "-m", *self.PROGRAM.split(), *words])

    def environment(self) -> dict[str, str]:
        """Returns the environment variable from which `from_environment` reads them."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self), default=str)}

    @classmethod
    def from_environment(cls) -> Self:
        """Returns the settings that the process which started this one has passed on."""
        return cls._of(json.loads(os.environ[VARIABLE]))


def _help(field: dataclasses.Field) -> str:
    """Returns the help of an argument: its description, its choices and its default."""
    if field.metadata.get("hidden"):
        return argparse.SUPPRESS
    words = [field.metadata.get("help", "")]
    if choices := field.metadata.get("choices"):
        words.append(f"of {', '.join(choices)}")
    default = field.default
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    if default not in (dataclasses.MISSING, None, False, ""):
        words.append(f"({default})")
    return " ".join(filter(None, words)).replace("%", "%%")
