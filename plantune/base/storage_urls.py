"""URLs of databases. Of each only the scheme, the host and the database are ever shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from urllib.parse import unquote_plus

HIDDEN = "***"
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30})://")
HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
NAME = re.compile(r"[\w.$/-]+")  # of a server's database
IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s'\"]*[@?][^\s'\"]*")
WORD = re.compile(r"\w+")
# Shorter parts are in any text, and say little of a password.
LEAST = 3
# Words of these programs' own messages: what is hidden among them would be told by that.
OPEN = frozenset(("plantune", "optuna", "postgres", "postgresql", "mysql", "mariadb", "sqlite"))
# The options whose value is a URL, and the variable that stands for one.
OPTIONS, VARIABLE = ("--storage", "--status"), "PLANTUNE_STORAGE"


def shown(url: str) -> str:
    """A URL without what may be secret in it. Where it can be read in two ways, a password may be
    in each part, and the scheme is all that is shown; without `://` nothing is.
    """
    scheme, place = _parts(url)
    if scheme is None:
        return HIDDEN
    return f"{scheme}://{HIDDEN if place is None else place}"


def without_secrets(text: str, url: str, *, user: bool = True) -> str:
    """What a library says of a URL, without what may be secret in the URL, in whole or in part; the
    name of the `user` is secret only where nothing else is likely to be called so.
    """
    text = text.replace(url, shown(url))
    for secret in _secrets(url, user=user):
        pattern = rf"(?<!\w){re.escape(secret)}(?!\w)" if WORD.fullmatch(secret) else None
        text = re.sub(pattern or re.escape(secret), HIDDEN, text, flags=re.IGNORECASE)
    return IN_TEXT.sub(lambda found: shown(found[0]), text)


def urls_in(arguments: Sequence[str], named: str | None = None) -> tuple[str, ...]:
    """What may be a database's URL in a command line, beside the one that a variable named."""
    found = [] if named is None else [named]
    for before, argument in pairwise(["", *arguments]):
        option, equals, value = argument.partition("=")
        joined = bool(equals) and option.startswith("--")
        text, option = (value, option) if joined else (argument, before)
        stray = "@" in text and not option.startswith("-")
        if text.startswith("-"):
            continue
        if option in OPTIONS or stray or SCHEME.match(text):
            found.append(text)
    return tuple(dict.fromkeys(filter(None, found)))


def _parts(url: str) -> tuple[str | None, str | None]:
    """The scheme, None without one; and host and database, None where they cannot be told."""
    match = SCHEME.match(url)
    if match is None:
        return None, None
    scheme, rest = match[1], url[match.end() :]
    head, _, query = rest.partition("?")
    if scheme.partition("+")[0].lower() == "sqlite" and head.startswith("/"):
        return scheme, head  # the path of a file, and nothing before it
    if "@" in query:  # the question mark may be the password's
        return scheme, None
    host, slash, database = head.rpartition("@")[2].partition("/")
    host = host if host.startswith("[") else host.partition(":")[0]
    host = host.partition("]")[0] + "]" if host.startswith("[") else host
    host = host if not host or HOST.fullmatch(host) else HIDDEN
    database = database if not database or NAME.fullmatch(database) else HIDDEN
    return scheme, host + slash + database


def _secrets(url: str, *, user: bool) -> list[str]:
    """All of a URL but what is shown of it, in parts as small as a library may tell them, the
    longest first.
    """
    scheme, place = _parts(url)
    rest = url if scheme is None else url[len(scheme) + 3 :]
    told = {*_pieces(scheme or ""), *_pieces(place or "")}
    rest = rest.removeprefix(place or "")
    if place is not None and not user and ":" in rest.rpartition("@")[0]:
        rest = rest.partition(":")[2]
    secrets = {*_pieces(rest), *_pieces(unquote_plus(rest))} - told - OPEN
    return sorted((part for part in secrets if len(part) >= LEAST), key=len, reverse=True)


def _pieces(text: str) -> Iterator[str]:
    """Between the marks of a URL, from mark to mark and word by word."""
    yield from WORD.findall(text)
    yield from re.split(r"[@:/?&=;,\s]+", text)
    user = text.rpartition("@")[0]
    yield user
    yield user.partition(":")[2]
