"""Sentences and their German translations, from the gettext catalogues of the system."""

import gettext
import pathlib
import re
import sys


CATALOGUES = pathlib.Path("/usr/share/locale/de/LC_MESSAGES")


class Missing(Exception):
    """Data that this machine does not have."""


def sentence_pairs() -> tuple[list[tuple[list[str], list[str]]], int]:
    """The words of every message and of its translation, each pair once.

    Messages of a word or two are left out: they are labels and names, not sentences.

    Returns:
        The pairs, and how many catalogues were read.
    """
    pairs, read = {}, 0
    for path in sorted(CATALOGUES.glob("*.mo")):
        try:
            with path.open("rb") as file:
                # There is no public way to list the messages.
                messages = gettext.GNUTranslations(file)._catalog
        except (OSError, UnicodeDecodeError):
            print(f"{path.name} cannot be read and is left out", file=sys.stderr)
            continue
        read += 1
        for message, german in messages.items():
            # A message with plurals comes as itself and which plural.
            english = message[0] if isinstance(message, tuple) else message
            words = re.findall("[a-z]+", english.lower())
            if len(words) > 2:
                pairs[english, german] = words, re.findall("[a-zäöüß]+", german.lower())
    if not pairs:
        raise Missing(f"there are no German catalogues in {CATALOGUES}")
    return list(pairs.values()), read
