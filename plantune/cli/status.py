"""`plantune search --status URL`: what searches that share a storage do, from anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plantune.base.storage_urls import shown
from plantune.cli.console import Console, bold, note
from plantune.report.progress import stage_text
from plantune.report.tables import counted

if TYPE_CHECKING:
    from plantune.search.shared.status import Member, Status


def show_status(console: Console, url: str) -> None:
    """Raises StorageLost if nothing answers, BadParameter for anything but a database's URL."""
    from plantune.cli.storage import required_shareable
    from plantune.search.results import Patience
    from plantune.search.shared.rdb import Persistent
    from plantune.search.shared.status import statuses

    url = required_shareable(url, "--status")
    found = statuses(url, Persistent(url, 0.0, note), Patience())
    for status in found:
        console.say(bold(f"{status.name}: {status.state}"))
        console.say(f"  {_counts(status)}")
        for member in status.members:
            console.say(f"  {_line(member)}")
    if not found:
        console.say(f"{shown(url)}: no search was shared there")
    document = [status.to_json() for status in found]
    console.emit({"storage": shown(url), "searches": document})


def _counts(status: Status) -> str:
    text = f"{status.measured} measured, {status.rejected} rejected, {status.running} running"
    plan = "" if status.median_ms is None else f"; a plan of {status.median_ms:.3f} ms"
    hosts = len({member.host for member in status.members})
    return f"{text} on {counted(hosts, 'host')} with {status.device}{plan}"


def _line(member: Member) -> str:
    detail = member.reported.get("detail") or ""
    seen = f", seen {member.reported['at']}" if "at" in member.reported else ""
    what = f" - {detail}" if detail and member.state == "measuring" else ""
    state = stage_text(member.state)
    return f"{member.host}, process {member.pid}: {state}, {member.measured} done{seen}{what}"
