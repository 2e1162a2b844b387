"""Commands about the service as a whole: `status`, `open` and `down`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anneal.contracts.run_status import LIVE
from app.cli.console import AsJson, ca_file, fail, open_client, print_details, print_json, print_note, print_text
from app.cli.runs.state_text import status_text

if TYPE_CHECKING:
    from anneal.client.client import Anneal
    from anneal.settings import ClientSettings

_MOST_SHOWN = 20
_EXTRA_SECONDS = 60.0
"""Time to stop beyond the save grace of trainers: that of the API and of the embedded servers."""


def status(as_json: AsJson = False) -> None:
    """Show if the service is up, its version and workers, the queue, the active runs, and where data and logs are.

    Exit code 1 if the service does not answer or is not ready.

    Example: `anneal status`
    """
    from anneal.settings import ClientSettings
    from app.infra import home_lock

    settings = ClientSettings()
    pid = home_lock.holder_pid(settings.home)
    local: dict[str, Any] = {"home": str(settings.home), "logs": None, "up_pid": pid}
    if pid is not None:
        local["logs"] = str(settings.home / "logs")
    report = _service_report(settings) | local
    if as_json:
        print_json(report)
    else:
        _print_report(report)
    raise typer.Exit(0 if report["ready"] else 1)


def _service_report(settings: "ClientSettings") -> dict[str, Any]:
    """Return what the service reports, or why it does not."""
    from anneal.client.client import Anneal
    from anneal.client.errors import AnnealError

    report: dict[str, Any] = {"url": settings.url, "ready": False, "version": None, "problem": None}
    try:
        with Anneal(ca_file=ca_file(), patience=0) as client:
            report["url"] = client.url
            report["version"] = _service_version(client, report)
            report["workers"] = [worker.model_dump(mode="json") for worker in client.workers.list(limit=_MOST_SHOWN)]
            for name, statuses in (("active", LIVE), ("pending", ("pending",))):
                runs = list(client.runs.list(status=list(statuses), limit=_MOST_SHOWN + 1))
                report[name] = [
                    {key: getattr(run, key) for key in ("id", "name", "status", "current_step", "total_steps")}
                    for run in runs[:_MOST_SHOWN]
                ]
                report[f"more_{name}"] = len(runs) > _MOST_SHOWN
    except AnnealError as error:
        report["problem"] = error.detail
    else:
        report["ready"] = report["problem"] is None
    return report


def _service_version(client: "Anneal", report: dict[str, Any]) -> str | None:
    from anneal.client.errors import AnnealError

    try:
        return client.service.ready().version
    except AnnealError as error:
        if error.code != "not_ready":
            raise
        report["problem"] = error.detail  # what works is shown all the same
        return None


def _print_report(report: dict[str, Any]) -> None:
    state = "ready" if report["ready"] else "not ready" if "workers" in report else "down"
    version = f", version {report['version']}" if report["version"] else ""
    workers, figures = report.get("workers"), {}
    if workers is not None:
        online = [worker for worker in workers if worker["state"] == "online"]
        names = [f"{worker['host']} ({', '.join(one['name'] for one in worker['devices'])})" for worker in online]
        figures = {
            "workers": f"{len(online)} online{': ' if names else ''}{', '.join(names)}",
            "active runs": _count_text(report, "active"),
            "pending runs": _count_text(report, "pending"),
        }
    up = None if report["up_pid"] is None else f"process {report['up_pid']}"
    print_details({"service": f"{state}{version}", "url": report["url"], "anneal up": up, **figures,
             "data": report["home"], "logs": report["logs"]})  # fmt: skip
    for run in report.get("active", ()):
        step = f"{run['current_step']}/{run['total_steps'] or '?'}"
        print_text(f"  {run['id']}  {status_text(run['status'])}  {step}  {run['name']}")
    if report["problem"]:
        print_note(f"anneal: {report['problem']}")


def _count_text(report: dict[str, Any], name: str) -> str:
    return f"more than {_MOST_SHOWN}" if report[f"more_{name}"] else str(len(report[name]))


def open_dashboard(
    print_only: Annotated[bool, typer.Option("--print", help="Only print the link; open no browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Open the dashboard in a browser that is signed in, or print a link that signs one in.

    The link works once, within ten minutes; the session that it creates lasts 30 days, or as long as the key.

    Example: `anneal open`
    """
    import webbrowser

    with open_client() as client:
        link = client.service.sign_in_link()
    if as_json:
        print_json(link)
    else:
        print_text(link.url)
    if not print_only and not as_json and not webbrowser.open(link.url):
        print_note("No browser was found: open this link in one. It works once, within ten minutes.")


def down(as_json: AsJson = False) -> None:
    """Stop the `anneal up` of this home: active runs save a checkpoint and resume at the next start.

    Ctrl-C stops the command, not the stopping.

    Example: `anneal down`
    """
    from anneal.local_service import is_held
    from app.cli.errors import environment_settings, plain_errors
    from app.infra import home_lock

    with plain_errors():
        settings = environment_settings()
    home: Path = settings.home
    stopping = home_lock.stop_holder(home)
    if stopping is None:
        if is_held(home):
            fail(f"The `anneal up` of {home} runs in another container or as another user: stop it there.")
        print_note(f"No `anneal up` runs for {home}; nothing to stop.")
        _print_down(as_json, None)
        return
    with stopping:
        print_note(f"Stopping process {stopping.pid}: active runs save a checkpoint …")
        try:
            ended = stopping.wait(settings.save_grace_seconds + _EXTRA_SECONDS)
        except KeyboardInterrupt:
            print_note("It continues to stop. Run the command again to wait for it.")
            raise typer.Exit(130) from None
    if not ended:
        fail(f"Process {stopping.pid} does not exit. Check {home / 'logs'}, or kill it.")
    print_note("Stopped.")
    _print_down(as_json, stopping.pid)


def _print_down(as_json: bool, pid: int | None) -> None:
    if as_json:
        print_json({"stopped": pid is not None, "up_pid": pid})
