"""Of a database's URL only the scheme, the host and the database are ever shown."""

from __future__ import annotations

import pytest

from plantune.base.storage_urls import HIDDEN, shown, urls_in, without_secrets

# Each has S3CRET and H1DDEN where they are nobody's business, and what is shown of it.
URLS = {
    "postgresql://me:S3CRET@host:5432/plans": "postgresql://host/plans",
    "postgresql+psycopg://H1DDEN:S3CRET@db.example.org/plans": (
        "postgresql+psycopg://db.example.org/plans"
    ),
    "postgresql://me:S3CRET@H1DDEN@host/plans": "postgresql://host/plans",
    "postgresql://me:S3CRET/H1DDEN@host/plans": "postgresql://host/plans",
    "postgresql://me:S3CRET:H1DDEN@host/plans": "postgresql://host/plans",
    "postgresql://me:S3CRET#H1DDEN@host/plans": "postgresql://host/plans",
    "postgresql://me:S3CRET%40H1DDEN@host/plans": "postgresql://host/plans",
    "postgresql://me:S3CRET?H1DDEN@host/plans": "postgresql://***",
    "postgresql://me:S3CRET H1DDEN@host/plans": "postgresql://host/plans",
    "postgresql://S3CRET@host": "postgresql://host",
    "postgresql://:S3CRET@/plans": "postgresql:///plans",
    "postgresql://host:S3CRET/plans": "postgresql://host/plans",
    "postgresql://me:S3CRET@[::1]:5432/plans": "postgresql://[::1]/plans",
    "postgresql://host/plans?options=-csearch_path=S3CRET": "postgresql://host/plans",
    "postgresql://host/plans?options=-c%20a=S3CRET%20-c%20b=H1DDEN": "postgresql://host/plans",
    "postgresql://host/plans?application_name=a@S3CRET": "postgresql://***",
    "postgresql://host/plans;password=S3CRET": "postgresql://host/***",
    "postgresql://host/plans&password=S3CRET": "postgresql://host/***",
    "postgresql:///plans?host=S3CRET&user=H1DDEN": "postgresql:///plans",
    "mysql+pymysql://me:S3CRET@host/plans?ssl_key=H1DDEN": "mysql+pymysql://host/plans",
    "post gres://me:S3CRET@host/plans": HIDDEN,
    "postgresql:me:S3CRET@host/plans": HIDDEN,
    "postgresql:/me:S3CRET@host/plans": HIDDEN,
    "me:S3CRET@H1DDEN@host": HIDDEN,
    "S3CRET": HIDDEN,
    "host=h user=H1DDEN password=S3CRET": HIDDEN,
    "sqlite+pysqlcipher://:S3CRET@/plans.db": "sqlite+pysqlcipher:///plans.db",
    "sqlite:////home/me@work/a b.db": "sqlite:////home/me@work/a b.db",
    "sqlite:///plans.db?key=S3CRET": "sqlite:///plans.db",
    "sqlite://": "sqlite://",
}
SECRETS = ("S3CRET", "H1DDEN")


def is_clean(text: str) -> bool:
    return not any(secret in text.upper() for secret in SECRETS)


@pytest.mark.parametrize("url", URLS)
def test_the_scheme_the_host_and_the_database_are_shown(url: str) -> None:
    assert shown(url) == URLS[url]
    assert is_clean(shown(url))


@pytest.mark.parametrize("url", URLS)
def test_what_a_library_says_of_it_has_nothing_secret(url: str) -> None:
    said = (
        f"Could not parse URL from string '{url}'",
        f"cannot open {url}, {url.replace('postgresql://', 'postgresql+psycopg://')}",
        'failed to resolve host "S3CRET@host": Name or service not known',
        'could not translate host name "H1DDEN@host" to address',
        "connection failed: user 's3cret', database \"h1dden\"",
        "invalid dsn: missing '=' after \"S3CRET\"; (h1dden)",
    )
    own = [secret for secret in SECRETS if secret in url]
    for text in said:
        found = without_secrets(text, url).upper()
        assert not [secret for secret in own if secret in found], found


def test_the_rest_of_what_a_library_says_stays() -> None:
    url = "postgresql+psycopg://me:S3CRET@127.0.0.1:5432/plans"
    said = 'connection to server at "127.0.0.1" failed: Connection refused; is it running?'
    assert without_secrets(said, url) == said
    said = 'FATAL: database "plans" does not exist'
    assert without_secrets(said, url) == said
    url = "sqlite:////no/such/folder/x.db"
    said = "(sqlite3.OperationalError) unable to open database file /no/such/folder/x.db"
    assert without_secrets(said, url) == said


def test_what_plantune_says_itself_stays_readable() -> None:
    url = "postgresql://tuner:S3CRET@host/plans?connect_timeout=10"
    said = "tuner, wait for the tuner 10 s, or run plantune search"
    assert without_secrets(said, url, user=False) == said
    url = "postgresql://plantune:plantune@host/plans"
    assert without_secrets(said, url) == said
    assert without_secrets("S3CRET, H1DDEN", "S3CRET:H1DDEN@host", user=False) == "***, ***"
    found = without_secrets("tuner", "postgresql://tuner:tuner@host/plans", user=False)
    assert found == HIDDEN


@pytest.mark.parametrize(
    "arguments",
    [
        ["search", "--storage", "me:S3CRET@host"],
        ["search", "--storage=me:S3CRET@host", "--batch", "1"],
        ["search", "--status", "me:S3CRET@host"],
        ["search", "me:S3CRET@host"],
        ["me:S3CRET@host"],
    ],
)
def test_urls_are_found_in_a_command_line(arguments: list[str]) -> None:
    assert "me:S3CRET@host" in urls_in(arguments)


def test_a_url_is_found_in_its_variable_and_nothing_elsewhere() -> None:
    assert urls_in(["bench", "--batch", "1"], "sqlite:///a.db") == ("sqlite:///a.db",)
    assert urls_in(["bench", "--storage"]) == ()
    assert urls_in(["search", "--status", "--json"]) == ()
    assert urls_in(["bench", "--model", "/home/me@work/nets.py:Net", "--set=a=b@c"]) == ()
    assert urls_in(["bench", "--db=postgresql://h/d"]) == ("postgresql://h/d",)
