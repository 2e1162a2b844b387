"""Commands of `anneal runs`."""

import re
import threading
from pathlib import Path

from sqlalchemy import Engine, update

from anneal.contracts.schemas.postmortem import CorrectedRequest
from app.cli.runs.postmortem import shell_command
from app.infra.storage import Storage
from app.tables.runs import Run
from tests.conftest import ROWS, Anneal, json_of
from tests.factories import Trainer, make_model, mark_run
from tests.rows import add_worker
from tests.server import ApiServer


def test_runs_are_filtered_and_paged(anneal: Anneal, run_file: Path) -> None:
    create = ["runs", "create", "-f", str(run_file), "--set", "tags=[paged]"]
    ids = [anneal(*create).stdout.strip() for _ in range(3)]
    first = anneal("runs", "list", "--tag", "paged", "--limit", "2")
    assert [line.split()[0] for line in first.stdout.splitlines()[1:]] == ids[:0:-1]
    assert f"--after {ids[1]}" in first.stderr
    rest = json_of(anneal("runs", "list", "--tag", "paged", "--after", ids[1], "--json"))
    assert [run["id"] for run in rest["data"]] == ids[:1] and rest["has_more"] is False
    assert anneal("runs", "list", "--tag", "paged", "--status", "failed").stderr == "There are none.\n"
    assert re.search(r"config.learning_rate +0\.0001\n", anneal("runs", "show", ids[0]).stdout)
    assert json_of(anneal("runs", "stop", ids[0], "--json"))["status"] == "cancelled"
    unknown = "run_" + "0" * 26
    stopped = anneal("runs", "stop", "--wait", unknown, *ids[1:], code=1)
    assert stopped.stdout.splitlines() == [f"{run_id} has stopped." for run_id in ids[1:]]
    assert f"There is no run {unknown}" in stopped.stderr


def test_a_created_run_is_printed_with_its_warnings(anneal: Anneal, run_file: Path) -> None:
    closed = anneal("experiments", "create", "closed", "--max-devices", "0").stdout.strip()
    create = ["runs", "create", "-f", str(run_file), "--set", f"experiment_id={closed}"]
    created = anneal(*create)
    assert re.fullmatch(r"run_\w+\n", created.stdout)
    assert "resources.devices: The run needs 1 device. The quota of experiment closed is 0 devices" in created.stderr
    assert json_of(anneal(*create, "--json"))["status"] == "pending" and "quota" not in anneal(*create, "--json").stderr


def test_editing_changes_what_is_named(anneal: Anneal, run_file: Path) -> None:
    run_id = anneal("runs", "create", "-f", str(run_file)).stdout.strip()
    assert json_of(anneal("runs", "edit", run_id, "--name", "x", "--json"))["tags"] == ["2026-01-02", "no"]
    assert json_of(anneal("runs", "edit", run_id, "--tag", "a", "--tag", "b", "--json"))["tags"] == ["a", "b"]
    experiment_id = anneal("experiments", "create", "ranks").stdout.strip()
    assert anneal("experiments", "edit", experiment_id, "--name", "x").stderr == f"{experiment_id} is changed.\n"
    assert json_of(anneal("experiments", "show", experiment_id, "--json"))["name"] == "x"


def test_show_has_the_values_that_actions_changed(anneal: Anneal, trainer: Trainer, engine: Engine) -> None:
    assert "config.learning_rate  0.0001" in anneal("runs", "show", trainer.run_id).stdout
    in_force = {"learning_rate": 1e-6, "max_steps": 500, "optim": "adamw_8bit"}
    with engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == trainer.run_id).values(effective_config=in_force))
    shown = " ".join(anneal("runs", "show", trainer.run_id).stdout.split())
    assert "config.learning_rate 1e-06" in shown and "config.max_steps 500" in shown and "adamw_8bit" not in shown


def test_runs_are_compared(anneal: Anneal, trainer: Trainer, run_file: Path) -> None:
    trainer.metric(10, loss=2.5)
    mark_run(trainer.engine, trainer.run_id, best_loss=2.5)
    create = ["runs", "create", "-f", str(run_file), "--set", "name=other", "--set", "config.lora_r=4"]
    ids = [trainer.run_id, anneal(*create).stdout.strip()]
    header, *lines = anneal("runs", "compare", *ids).stdout.splitlines()
    assert header.split() == ids
    rows = [re.split("  +", line) for line in lines]
    assert ["name", "counting", "other"] in rows and ["loss", "2.5", "-"] in rows
    assert any(row[0] == "config.lora_r" and row[2] == "4" for row in rows)
    compared = json_of(anneal("runs", "compare", *ids, "--json"))
    assert compared["differences"]["config.lora_r"][ids[1]] == 4
    assert "2 to 20" in anneal("runs", "compare", ids[0], code=1).stderr
    assert json_of(anneal("runs", "list", "--sort", "best", "--json"))["data"][0]["id"] == trainer.run_id


def test_pinned_run_is_not_deleted_by_the_command(anneal: Anneal, trainer: Trainer) -> None:
    checkpoint_id = trainer.checkpoint(40)
    trainer.complete()
    assert anneal("runs", "pin", trainer.run_id).stderr == f"{trainer.run_id} is pinned.\n"
    checkpoint = [trainer.run_id, "--checkpoint", checkpoint_id, "--json"]
    assert json_of(anneal("runs", "pin", *checkpoint))["pinned"] is True
    assert "periodic, pinned" in anneal("runs", "checkpoints", trainer.run_id).stdout
    assert "pinned" in anneal("runs", "delete", trainer.run_id, code=1).stderr
    assert json_of(anneal("runs", "unpin", *checkpoint))["pinned"] is False
    assert json_of(anneal("runs", "unpin", trainer.run_id, "--json"))["pinned"] is False
    assert anneal("runs", "delete", trainer.run_id).stderr == f"{trainer.run_id} is deleted.\n"


def test_why_names_a_command_that_can_be_typed(anneal: Anneal, trainer: Trainer) -> None:
    trainer.metric(1, loss=2.0)
    trainer.metric(2, loss=25.0)
    trainer.fail("non_finite_loss", "At step 3 the loss became nan.")
    reported = anneal("runs", "why", trainer.run_id).stdout
    command, body, end = reported.splitlines()[-3:]
    assert (command, end) == ("anneal runs create -f - <<'EOF'", "EOF") and "diverged" in reported
    Path("again.json").write_text(body)
    assert anneal("runs", "create", "-f", "again.json").stdout.startswith("run_")
    request = CorrectedRequest(path="/v1/runs/run_1/resume", body={"config": {"learning_rate": 1e-05, "epochs": 2}})
    assert (
        shell_command("run_1", request)
        == "anneal runs resume run_1 --set config.learning_rate=1e-05 --set config.epochs=2"
    )


def test_a_model_and_the_records_of_an_attempt_are_downloaded_into_folders_of_their_own(
    anneal: Anneal, trainer: Trainer, shared_api: ApiServer
) -> None:
    trainer.write_output(Storage(shared_api.settings))
    trainer.complete()
    assert anneal("runs", "download", trainer.run_id).stdout.strip() == trainer.run_id
    assert (Path(trainer.run_id) / "adapter_config.json").read_text() == "{}"
    files = json_of(anneal("runs", "download", trainer.run_id, "-o", "here", "--path", "*.json", "--json"))
    assert files == {"folder": "here", "files": ["adapter_config.json"]}
    records = Storage(shared_api.settings).attempt_dir(trainer.run_id, 1)
    records.mkdir(parents=True, exist_ok=True)
    (records / "metrics.jsonl").write_text("{}\n")
    of_attempt = json_of(anneal("runs", "download", trainer.run_id, "--attempt", "1", "--json"))
    assert of_attempt == {"folder": f"{trainer.run_id}-attempt-1", "files": ["metrics.jsonl"]}


def test_an_evaluation_shows_its_metrics_and_has_no_output(
    anneal: Anneal, shared_api: ApiServer, trainer: Trainer
) -> None:
    trainer.complete()
    make_model(shared_api.settings, "counted")
    Path("rows.jsonl").write_text(ROWS)
    created = anneal("eval", "counted", "rows.jsonl", "--no-wait")  # the file is uploaded, unless it was before
    assert re.search(r"rows\.jsonl (is uploaded|was uploaded before)", created.stderr)
    run_id = created.stdout.strip()
    evaluation = Trainer(trainer.engine, run_id).begin()
    evaluation.events("eval", {"step": 0, "metrics": {"eval_loss": 0.5}})
    evaluation.complete()
    assert anneal("runs", "watch", run_id).stdout.splitlines()[-1] == "  eval_loss 0.5"
    shown = anneal("runs", "show", run_id).stdout
    assert re.search(r"^task +evaluate$", shown, re.MULTILINE) and re.search(r"^eval_loss +0.5$", shown, re.MULTILINE)
    assert "is an evaluation" in anneal("runs", "download", run_id, code=1).stderr
    listed = json_of(anneal("runs", "list", "--task", "evaluate", "--json"))["data"]
    assert [run["id"] for run in listed] == [run_id]
    assert "--install-completion" not in anneal("eval", "--help").stdout


def test_an_evaluation_can_use_several_devices(anneal: Anneal, shared_api: ApiServer, engine: Engine) -> None:
    make_model(shared_api.settings, "divided")
    add_worker(engine, 2, backends=["celery"])
    Path("rows.jsonl").write_text(ROWS)
    anneal("datasets", "upload", "rows.jsonl")
    sets = ("--set", "resources.devices=2", "--set", "config.seed=7", "--set", "max_eval_rows=3")
    run = json_of(anneal("eval", "divided", "last", *sets, "--no-wait", "--json"))
    anneal("runs", "stop", run["id"])
    assert (run["resources"]["devices"], run["config"]["seed"], run["config"]["max_eval_rows"]) == (2, 7, 3)


def test_checkpoints_are_listed_and_resumed_from(anneal: Anneal, trainer: Trainer) -> None:
    checkpoint_id = trainer.checkpoint(40)
    assert checkpoint_id in anneal("runs", "checkpoints", trainer.run_id).stdout
    assert json_of(anneal("runs", "checkpoints", trainer.run_id, "--json"))["data"][0]["step"] == 40
    assert anneal("runs", "resume", trainer.run_id, code=1).stderr.startswith("anneal: ")
    trainer.checkpoint(50, metrics={"loss": 1.5, "eval_loss": 2.5})
    trainer.checkpoint(60, metrics={"eval_loss": 2.25})
    listed = anneal("runs", "checkpoints", trainer.run_id).stdout
    assert "eval_loss 2.25 (best)" in listed and "eval_loss 2.5 " in listed and listed.count("(best)") == 1
    anneal("runs", "stop", trainer.run_id)
    trainer.cancel()
    assert "no checkpoint" in anneal("runs", "resume", "last", "--checkpoint", "ckpt_zz", code=1).stderr
    resume = ["runs", "resume", trainer.run_id, "--checkpoint", checkpoint_id[:-4], "--json"]
    assert "--set config.epochs" in anneal(*resume, "--set", "epochs=5", code=2).stderr
    child = json_of(anneal(*resume, "--set", "config.epochs=5"))
    assert (child["parent_run_id"], child["resume_checkpoint_id"]) == (trainer.run_id, checkpoint_id)
    assert child["config"]["epochs"] == 5


def test_resume_without_a_checkpoint_names_from_start(anneal: Anneal, trainer: Trainer) -> None:
    trainer.fail()
    assert "has no checkpoint yet; `anneal" in anneal("runs", "export", "last", "--checkpoint", "last", code=1).stderr
    assert "--from-start" in anneal("runs", "resume", trainer.run_id, code=1).stderr
    assert anneal("runs", "resume", trainer.run_id, "--from-start").stdout.startswith("run_")


def test_stop_can_wait_for_the_end(anneal: Anneal, trainer: Trainer) -> None:
    assert "was asked to stop; it is running" in anneal("runs", "stop", trainer.run_id).stdout
    ending = threading.Timer(0.3, trainer.cancel)
    ending.start()
    assert "is stopped" in anneal("runs", "stop", "--wait", "--no-save", trainer.run_id).stdout
    ending.join()


def test_several_runs_are_stopped_tagged_and_deleted_by_name_or_filter(
    anneal: Anneal, run_file: Path, trainer: Trainer
) -> None:
    create = ["runs", "create", "-f", str(run_file), "--set", "tags=[bulk]"]
    first, second, third = (anneal(*create).stdout.strip() for _ in range(3))
    trainer.complete()
    stopped = anneal("runs", "stop", first, trainer.run_id).stdout.splitlines()
    assert stopped[0] == f"{first} was asked to stop." and "completed: it has ended by itself" in stopped[1]
    assert "completed already" in anneal("runs", "stop", trainer.run_id).stdout
    assert "Nothing is stopped" in anneal("runs", "stop", "--tag", "bulk", code=1).stderr
    rest = json_of(anneal("runs", "stop", "--tag", "bulk", "--yes", "--json"))["runs"]
    assert {run["id"]: run["outcome"] for run in rest} == {second: "changed", third: "changed"}
    assert "No run is selected" in anneal("runs", "stop", "--tag", "bulk", "--yes").stderr
    untagged = anneal("runs", "create", "-f", str(run_file)).stdout.strip()
    for contradiction in (first, "--tag=bulk"):
        assert "--all stops every live run" in anneal("runs", "stop", "--all", contradiction, code=2).stderr
    assert "will be stopped." in anneal("runs", "stop", "--all", code=1).stderr
    everything = json_of(anneal("runs", "stop", "--all", "--yes", "--json"))["runs"]
    assert (untagged, "changed") in {(run["id"], run["outcome"]) for run in everything}
    assert json_of(anneal("runs", "list", "--status", "pending", "--json"))["data"] == []
    anneal("runs", "tag", "--tag", "bulk", "--search", "bulk", "--add", "old", "--remove", "no")
    listed = json_of(anneal("runs", "list", "--tag", "old", "--json"))["data"]
    assert {run["id"] for run in listed} == {first, second, third} and listed[0]["tags"] == ["bulk", "old"]
    anneal("runs", "pin", third)
    refused = anneal("runs", "delete", first, second, third, code=1)
    assert f"{first} is deleted." in refused.stdout and "1 of 3 runs" in refused.stderr and "pinned" in refused.stderr
    anneal("runs", "unpin", third)
    assert anneal("runs", "delete", "--tag", "old", "--yes").stdout == f"{third} is deleted.\n"
    for verb in ("stop", "delete", "tag"):
        more = ["--add", "x"] if verb == "tag" else []
        assert "select some with a filter" in anneal("runs", verb, *more, code=2).stderr
        assert "not both" in anneal("runs", verb, first, "--tag", "a", *more, code=2).stderr


def test_an_order_shows_the_metric_by_which_it_orders(anneal: Anneal, trainer: Trainer, engine: Engine) -> None:
    trainer.complete()
    mark_run(engine, trainer.run_id, best_loss=1.5, best_score=2.25, final_score=2.25)
    header, *lines = anneal("runs", "list", "--sort", "best").stdout.splitlines()
    assert "BEST OF ITS METHOD" in header
    assert "sft eval_loss 2.25" in next(line for line in lines if line.startswith(trainer.run_id))
    assert " 1.5 " in next(
        line for line in anneal("runs", "list").stdout.splitlines() if line.startswith(trainer.run_id)
    )
    shown = anneal("runs", "list", "--sort", "best_eval", "--order", "desc").stdout
    assert "BEST EVAL" in shown and "2.25" in shown
    assert "only one direction" in anneal("runs", "list", "--sort", "live", "--order", "asc", code=1).stderr
