"""Commands about the data of the service, on the server: `backup`, `restore`, `export`, `import`, `storage copy`."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.console import AsJson, CommandGroup, format_size, print_json, print_note, show_transfer
from app.cli.errors import environment_settings, plain_errors, settings_with_urls

if TYPE_CHECKING:
    from app.backup.create import CreatedBackup
    from app.backup.layout import Problem
    from app.backup.restore import RestoredBackup

_LINE_SECONDS = 10.0
"""Seconds between two lines of progress without a terminal."""
_MOST_SHOWN = 20
_NAMES = {"api_keys": "keys"}
"""Words for tables."""


class _ConsoleProgress:
    """Progress on standard error: a bar on a terminal, otherwise a line every ten seconds."""

    def say(self, text: str) -> None:
        print_note(text)

    @contextmanager
    def step(self, label: str, total: int | None) -> Iterator[Callable[[int], None]]:
        print_note(f"{label}{'' if total is None else f' ({format_size(total)})'} …")
        with show_transfer(label, total) as bar:
            yield _line_reporter(label, total) if bar is None else bar


def _line_reporter(label: str, total: int | None) -> Callable[[int], None]:
    shown_at = time.monotonic()

    def report_line(done: int) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= _LINE_SECONDS:
            shown_at = time.monotonic()
            print_note(f"{label}: {format_size(done)}{'' if total is None else f' of {format_size(total)}'}")

    return report_line


storage = typer.Typer(
    cls=CommandGroup, help="Manage the storage of this service.", no_args_is_help=True, rich_markup_mode=None
)


def backup(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of backups; created if it does not exist.")],
    keep: Annotated[
        int | None,
        typer.Option(
            min=1, help="Delete older backups in DIR, except this many newest ones and the newest without problems."
        ),
    ] = None,
    with_secret_key: Annotated[
        bool,
        typer.Option("--with-secret-key", help="Include the key file: everyone who has the backup can read secrets."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add a backup of the database and of all files to a folder, while the service runs.

    Works with the servers of `anneal up`, also while it is stopped, and with your own. Files that the newest backup
    in DIR already has are linked to it instead of copied. A backup that was interrupted is continued by the next one.
    Exit code 1 if something in the service is missing, corrupt or unreadable; everything else is in the backup.

    Example: `anneal backup /mnt/backups --keep 7`
    """
    from app.backup.create import BackupJob
    from app.infra.files.unfinished_restore import refuse_unfinished_restore

    with plain_errors():
        settings = environment_settings()
        refuse_unfinished_restore(settings)
        created = BackupJob(settings, folder, _ConsoleProgress(), with_secret_key=with_secret_key).run(keep)
    manifest = created.backup.manifest
    if as_json:
        facts = {"files": manifest.files, "file_bytes": manifest.file_bytes, "copied": created.counts.copied}
        counts = {"copied_bytes": created.counts.copied_bytes, "database_bytes": manifest.database.bytes}
        problems = [problem.model_dump() for problem in manifest.problems]
        print_json({"backup": str(created.backup.folder), **facts, **counts, "problems": problems})
    else:
        _show_created(created, str(settings.secret_key_path))
    raise typer.Exit(1 if manifest.problems else 0)


def restore(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder of backups, for the newest one, or one of those in it."),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a service that is here; it is moved to another folder.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Restore a backup into an empty home, or your own empty database and storage, and check all files.

    The service must be stopped. A restore that was interrupted is continued by the same command. Exit code 1 if files
    of the restored service are missing or corrupt; everything else is restored.

    Example: `ANNEAL_HOME=/srv/anneal anneal restore /mnt/backups`
    """
    from app.backup.restore import RestoreJob

    with plain_errors():
        settings = environment_settings()
        restored = RestoreJob(settings, folder, _ConsoleProgress(), replace=replace).run()
    if as_json:
        aside = None if restored.aside is None else str(restored.aside)
        problems = [problem.model_dump() for problem in restored.problems]
        report = {"backup": str(restored.backup.folder), "replaced": aside, "problems": problems}
        print_json({**report, "unreadable_secrets": restored.unreadable_secrets})
    else:
        _show_restored(restored, str(settings.secret_key_path))
    raise typer.Exit(1 if restored.problems else 0)


def export(
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="New file, such as runs.tar.")],
    run: Annotated[
        list[str] | None, typer.Option("--run", metavar="RUN", help="Only this run, by id or name; repeatable.")
    ] = None,
    experiment: Annotated[
        list[str] | None,
        typer.Option("--experiment", metavar="EXPERIMENT", help="Only runs of this experiment; repeatable."),
    ] = None,
    with_keys: Annotated[
        bool, typer.Option("--with-keys", help="Include the API keys, of which only hashes are stored.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write runs that have ended, with events, checkpoints and outputs, and their datasets to one file.

    Without --run and --experiment: all runs, datasets and experiments. Runs that the chosen ones build on are included.
    `anneal import` adds them to another service with the same ids. The service may be running. Exit code 1 if files in
    the service are missing, corrupt or unreadable; everything else is in the archive.

    Example: `anneal export llama.tar --experiment llama`
    """
    from app.backup.export import ExportJob
    from app.infra.files.unfinished_restore import refuse_unfinished_restore

    with plain_errors():
        settings = environment_settings()
        refuse_unfinished_restore(settings)
        job = ExportJob(
            settings, archive, _ConsoleProgress(), runs=run or (), experiments=experiment or (), with_keys=with_keys
        )
        created = job.run()
    selection, problems = created.selection, created.problems
    counts = {
        "runs": len(selection.runs),
        "datasets": len(selection.datasets),
        "experiments": len(selection.experiments),
        "keys": len(selection.keys),
    }
    if as_json:
        files = {"files": created.files, "file_bytes": created.file_bytes, "left_out": selection.live}
        print_json(
            {"archive": str(created.path), **counts, **files, "problems": [item.model_dump() for item in problems]}
        )
    else:
        print_note(f"{_count_text(counts)}; {created.files:,} files ({format_size(created.file_bytes)}).")
        if selection.live:
            named = ", ".join(selection.live[:_MOST_SHOWN])
            print_note(
                f"Left out, because they or runs that they need have not ended: {len(selection.live)} runs ({named})."
            )
        _show_problems("Missing, corrupt or unreadable in the service, and so in the archive:", problems)
        typer.echo(created.path)
    raise typer.Exit(1 if problems else 0)


def import_archive(
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="File of `anneal export`.")],
    with_keys: Annotated[
        bool, typer.Option("--with-keys", help="Add its API keys too; each then grants access to this service.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add the runs, datasets and experiments of an archive to this service, with their ids; it may be running.

    What is here already stays as it is, so that an archive can be imported again. An id that belongs to something else
    here is an error, and nothing is imported. Exit code 1 also if the archive lacks files that its runs list.

    Example: `anneal import archive llama.tar`, or `anneal import llama.tar` for short
    """
    from app.backup.archive_import import ImportJob
    from app.infra.files.unfinished_restore import refuse_unfinished_restore

    with plain_errors():
        settings = environment_settings()
        refuse_unfinished_restore(settings)
        imported = ImportJob(settings, archive, _ConsoleProgress(), with_keys=with_keys).run()
    added = {_NAMES.get(name, name): count for name, count in imported.added.items()}
    present = {_NAMES.get(name, name): count for name, count in imported.present.items()}
    if as_json:
        problems = [problem.model_dump() for problem in imported.problems]
        counts = {"added": added, "present": present, "skipped_keys": imported.skipped_keys, "files": imported.files}
        print_json({**counts, "problems": problems})
    else:
        print_note(f"Added: {_count_text(added)}; {imported.files:,} files.")
        if any(present.values()):
            print_note(f"Here already: {_count_text(present)}.")
        if imported.skipped_keys:
            print_note(f"{imported.skipped_keys} API keys are not imported without --with-keys.")
        _show_problems("Not in the archive as they were stored:", imported.problems)
    raise typer.Exit(1 if imported.problems else 0)


@storage.callback()
def _group() -> None:
    """Have `copy` as a command of its own, although it is the only one."""


@storage.command("copy")
def copy(
    url: Annotated[str, typer.Argument(help="URL of the object store, such as s3://bucket/prefix.")],
) -> None:
    """Copy the storage from the folder ANNEAL_STORAGE to an object store, of a service that is stopped.

    Everything is verified on its way, and a copy that was interrupted continues. Then set ANNEAL_STORAGE to the URL on
    every host. Exit code 1 if a file of the folder is missing or corrupt; the others are copied.

    Example: `anneal storage copy s3://bucket/prefix`
    """
    from app.infra.files.unfinished_restore import refuse_unfinished_restore

    with plain_errors():
        refuse_unfinished_restore(settings_with_urls())  # reports a missing URL as a readable error
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "worker.storage_copy", url])


def _show_created(created: "CreatedBackup", secret_key: str) -> None:
    manifest, counts = created.backup.manifest, created.counts
    if manifest.object_store is not None:
        print_note(
            f"The files are in {manifest.object_store} and are not copied: protect them with the store's own versions."
        )
    else:
        print_note(
            f"{counts.copied:,} files copied ({format_size(counts.copied_bytes)}), {counts.reused:,} unchanged; "
            f"{format_size(manifest.file_bytes)} in all."
        )
    if manifest.removed:
        print_note(
            f"Deleted while the backup ran, and not in it: {len(manifest.removed)} checkpoints, datasets or outputs."
        )
    if created.secrets and not created.has_secret_key:
        print_note(f"The key of the secrets is not in the backup: store a copy of {secret_key} in another place.")
    print_note("Base models on this machine are not in the backup either.")
    for old in created.deleted:
        print_note(f"Deleted {old}.")
    _show_problems("Missing, corrupt or unreadable in the service, and so in the backup:", manifest.problems)
    typer.echo(created.backup.folder)


def _show_restored(restored: "RestoredBackup", secret_key: str) -> None:
    manifest = restored.backup.manifest
    print_note(
        f"Restored {restored.backup.folder} of {manifest.created_at:%Y-%m-%d %H:%M} UTC: {manifest.files:,} files."
    )
    if restored.aside is not None:
        print_note(f"What was here before is in {restored.aside}: delete it when you no longer need it.")
    if restored.unreadable_secrets:
        print_note(
            f"{restored.unreadable_secrets} secrets cannot be decrypted: copy the key file of the service to "
            f"{secret_key}, or set them again with `anneal secrets set`."
        )
    _show_problems("Not as they were stored:", restored.problems)
    if not restored.problems:
        print_note("Every dataset, checkpoint and output is as it was stored.")
    print_note("Start the service: runs that were training continue from their last checkpoint.")


def _show_problems(title: str, problems: "Sequence[Problem]") -> None:
    if problems:
        print_note(title)
        for problem in problems[:_MOST_SHOWN]:
            print_note(f"  {problem}")
        if len(problems) > _MOST_SHOWN:
            print_note(f"  and {len(problems) - _MOST_SHOWN} more, which `--json` prints.")


def _count_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "nothing"
