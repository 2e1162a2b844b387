"""Exported metrics, dashboard, alerts and documentation use the same metric names."""

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from anneal.settings import ClientSettings
from app.config import REMOVED_SETTINGS, Settings
from tests.server import ApiServer

DOCS = Path(__file__).parents[2] / "docs"
METRICS = (DOCS / "reference" / "metrics.md").read_text()
OPERATIONS = "".join(path.read_text() for path in sorted((DOCS / "operations").glob("*.md")))
DASHBOARD = (DOCS / "grafana" / "anneal.json").read_text()
ALERTS = (DOCS / "grafana" / "alerts.yml").read_text()
_NAME = re.compile(r"\b(?:anneal|process)_[a-z_]+[a-z]\b")
_OF_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


@pytest.fixture(scope="module")
def exported(shared_api: ApiServer) -> dict[str, set[str]]:
    """Series names of every exported metric, by metric name."""
    text = shared_api.client.get("/metrics").text
    labels_by_metric: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels_by_metric[name] = (
            {f"{name}_{part}" for part in ("bucket", "sum", "count")} if family.type == "histogram" else {name}
        )
    assert len(labels_by_metric) > 20
    return labels_by_metric


def _expressions(dashboard: str) -> list[str]:
    panels = [panel for panel in json.loads(dashboard)["panels"] if panel["type"] != "row"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def _rules(alerts: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load(alerts)["groups"]
    return [rule for group in groups for rule in group["rules"]]


def unknown(expressions: list[str], exported: dict[str, set[str]]) -> set[str]:
    """Return metrics that expressions use and that are not exported."""
    series = set().union(*exported.values())
    return {name for one in expressions for name in _NAME.findall(one)} - series


def unreadable(expressions: list[str]) -> list[str]:
    """Return the expressions that are not valid PromQL."""
    unknown = []
    for expression in expressions:
        try:
            promql_parser.parse(expression.replace("$__rate_interval", "5m"))
        except ValueError as error:
            unknown.append(f"{expression}: {error}")
    return unknown


def documented(document: str) -> set[str]:
    """Return the names in the first column of the metrics table."""
    rows = [line.split("|")[1] for line in document.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in _NAME.findall(row)}


def named(text: str) -> set[str]:
    """Return the metrics of Anneal that a text names, outside of Python and storage names."""
    return set(re.findall(r"\banneal_(?:[a-z]+_)*(?:total|seconds|up|step|steps|runs|depth|day)\b", text))


def test_every_exported_metric_is_documented_and_every_documented_one_exported(exported: dict[str, set[str]]) -> None:
    assert documented(METRICS) == set(exported)
    assert named(OPERATIONS) <= set(exported)


def test_labels_are_documented_as_they_are(exported: dict[str, set[str]], shared_api: ApiServer) -> None:
    rows = [line.split("|")[1:3] for line in METRICS.splitlines() if line.startswith("| `anneal_")]
    documented_labels = {_NAME.findall(names)[0]: set(re.findall(r"`(\w+)`", labels)) for names, labels in rows}
    families = list(text_string_to_metric_families(shared_api.client.get("/metrics").text))
    for family in families:
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        if labels and name in documented_labels:
            assert documented_labels[name] == labels, name


def test_dashboard_and_alerts_name_only_what_is_exported(exported: dict[str, set[str]]) -> None:
    expressions = _expressions(DASHBOARD) + [rule["expr"] for rule in _rules(ALERTS)]
    assert len(expressions) > 30
    assert unknown(expressions, exported) == set()
    assert unreadable(expressions) == []
    assert len(unreadable([one + ")" for one in expressions])) == len(expressions)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("anneal_queue_depth", "anneal_queue_length"), ("anneal_event_lag_seconds_bucket", "anneal_event_lag_seconds")],
)
def test_a_wrong_name_in_the_dashboard_would_be_found(right: str, wrong: str, exported: dict[str, set[str]]) -> None:
    assert right in DASHBOARD
    assert unknown(_expressions(DASHBOARD.replace(right, wrong)), exported) == {wrong}


def test_what_is_worth_a_look_is_on_the_dashboard(exported: dict[str, set[str]]) -> None:
    shown = {_OF_HISTOGRAM.sub("", name) for one in _expressions(DASHBOARD) for name in _NAME.findall(one)}
    assert {name for name in exported if name.startswith("anneal_")} - shown == set()


def test_the_dashboard_asks_for_its_data_source_and_its_panels_do_not_overlap() -> None:
    dashboard = json.loads(DASHBOARD)
    assert [one["type"] for one in dashboard["templating"]["list"]] == ["datasource"]
    assert dashboard["schemaVersion"] >= 39 and dashboard["uid"] and dashboard["title"]
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
            assert {source["uid"] for source in sources} == {"${datasource}"}, panel["title"]
            assert panel["description"], panel["title"]


def test_every_alert_says_what_it_means_and_how_long_it_waits() -> None:
    rules = _rules(ALERTS)
    names = [rule["alert"] for rule in rules]
    assert len(names) == len(set(names)) > 8
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s")), rule["alert"]


def test_alerts_that_the_document_names_exist() -> None:
    named = set(re.findall(r"`(Anneal[A-Z]\w+)`", OPERATIONS))
    assert named and named <= {rule["alert"] for rule in _rules(ALERTS)}


def test_variables_that_the_documents_name_are_settings() -> None:
    pages = [path.read_text() for folder in ("guides", "operations") for path in (DOCS / folder).glob("*.md")]
    named = {name for page in pages for name in re.findall(r"\bANNEAL_[A-Z_]+\b", page)} - REMOVED_SETTINGS.keys()
    fields = {*Settings.model_fields, *ClientSettings.model_fields}
    assert {name.removeprefix("ANNEAL_").lower() for name in named} - fields == set()


def test_documented_services_of_compose_fit_the_file_that_they_are_added_to() -> None:
    compose = yaml.safe_load((DOCS.parent / "docker-compose.yml").read_text())
    blocks = [
        yaml.safe_load(block)
        for path in DOCS.rglob("*.md")
        for block in re.findall(r"^```yaml\n(services:.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert any("vllm" in block["services"] for block in blocks)
    for name, service in (item for block in blocks for item in block["services"].items()):
        assert name in compose["services"] or "image" in service, name
        assert set(service.get("networks", ())) <= set(compose["networks"]), name
        volumes = [name for text in service.get("volumes", ()) for name in re.findall(r":-(\w+)\}", text)]
        assert set(volumes) <= set(compose["volumes"]), name
        own = {key.removeprefix("ANNEAL_").lower() for key in service.get("environment", ()) if "ANNEAL_" in key}
        assert own <= set(Settings.model_fields), name


def test_documented_proxies_have_a_certificate_buffer_nothing_and_pass_the_host_on() -> None:
    blocks = [
        block
        for path in DOCS.rglob("*.md")
        for block in re.findall(r"^```nginx\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert len(blocks) == 2
    needed = (
        "ssl_certificate ", "ssl_certificate_key ", "client_max_body_size 0;", "proxy_set_header Host $http_host;",
        "proxy_http_version 1.1;",
        'proxy_set_header Connection "";', "proxy_buffering off;", "proxy_request_buffering off;",
        "proxy_read_timeout 1h;",
    )  # fmt: skip
    assert [(line, block) for block in blocks for line in needed if line not in block] == []
