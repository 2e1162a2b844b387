"""Log lines for people: all, the last ones, those with a text, and those still to come."""

import asyncio
import re
import threading

import httpx
import pytest
from sqlalchemy import Engine

from app.config import Settings
from app.infra.ids import new_id
from app.runs.events.responses import OpenStreams
from tests.factories import Trainer, make_dataset, make_run
from tests.server import ApiServer, ThreadServer
from tests.waiting import eventually


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


@pytest.fixture
def trainer(api: ApiServer, engine: Engine) -> Trainer:
    return Trainer(engine, make_run(api.client, make_dataset(engine))["id"]).begin()


def lines(api: ApiServer, trainer: Trainer, **query: object) -> list[str]:
    answer = api.client.get(f"/v1/runs/{trainer.run_id}/logs", params=query)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text == "" or answer.text.endswith("\n")
    return answer.text.splitlines()


class TestPlain:
    def test_plain_log_has_every_line_in_order_and_nothing_else(self, api: ApiServer, trainer: Trainer) -> None:
        trainer.log("one", "zwei ä 🦙", "")
        trainer.metric(1, loss=1.0)
        trainer.log("<b>four</b>")
        assert lines(api, trainer) == ["one", "zwei ä 🦙", "", "<b>four</b>"]

    def test_plain_log_continues_beyond_one_read(self, api: ApiServer, trainer: Trainer) -> None:
        trainer.log(*(f"line {number}" for number in range(1700)))
        assert lines(api, trainer) == [f"line {number}" for number in range(1700)]

    def test_tail_is_the_last_lines(self, api: ApiServer, trainer: Trainer) -> None:
        for number in range(10):
            trainer.log(f"line {number}")
            trainer.metric(number + 1, loss=1.0)
        assert lines(api, trainer, tail=3) == ["line 7", "line 8", "line 9"]
        assert lines(api, trainer, tail=100) == [f"line {number}" for number in range(10)]
        assert lines(api, trainer, tail=0) == []

    def test_searches_that_look_at_every_line_take_turns_and_hold_no_one_else_up(
        self, api: ApiServer, trainer: Trainer
    ) -> None:
        trainer.log("one")
        assert isinstance(api, ThreadServer)
        state = api.application.state
        before, state.log_searches = state.log_searches, asyncio.Semaphore(0)
        try:
            with pytest.raises(httpx.ReadTimeout):
                api.client.get(f"/v1/runs/{trainer.run_id}/logs", params={"tail": 1, "grep": "x"}, timeout=0.5)
            assert lines(api, trainer, tail=1) == lines(api, trainer, grep="one") == ["one"]
        finally:
            state.log_searches = before

    def test_grep_keeps_lines_with_the_text_and_tail_counts_those(self, api: ApiServer, trainer: Trainer) -> None:
        trainer.log(*(f"step {number} {'odd' if number % 2 else 'even'}" for number in range(10)))
        assert lines(api, trainer, grep="odd", tail=2) == ["step 7 odd", "step 9 odd"]
        assert lines(api, trainer, grep="step 3") == ["step 3 odd"]
        assert lines(api, trainer, grep=".*") == []

    def test_a_run_that_printed_nothing_has_no_lines(self, api: ApiServer, trainer: Trainer) -> None:
        assert lines(api, trainer) == [] and lines(api, trainer, tail=5) == []

    def test_an_unknown_run_is_a_404_and_an_absurd_tail_a_422(self, api: ApiServer, trainer: Trainer) -> None:
        assert api.client.get(f"/v1/runs/{new_id('run')}/logs").status_code == 404
        for wrong in (-1, "x", 10**9):
            assert api.client.get(f"/v1/runs/{trainer.run_id}/logs", params={"tail": wrong}).status_code == 422


class TestFollow:
    def test_followed_log_has_lines_as_they_come_until_the_run_ends(self, api: ApiServer, trainer: Trainer) -> None:
        trainer.log("before")
        seen: list[str] = []

        def read() -> None:
            with api.client_with(api.key) as client:
                path = f"/v1/runs/{trainer.run_id}/logs"
                with client.stream("GET", path, params={"follow": True}) as answer:
                    seen.extend(answer.iter_lines())

        reader = threading.Thread(target=read)
        reader.start()
        trainer.log("during")
        trainer.complete()
        reader.join(timeout=30)
        assert not reader.is_alive()
        assert seen == ["before", "during"]

    def test_a_line_is_there_while_the_run_still_trains(self, api: ApiServer, trainer: Trainer) -> None:
        with (
            api.client_with(api.key) as client,
            client.stream("GET", f"/v1/runs/{trainer.run_id}/logs", params={"follow": True, "tail": 0}) as answer,
        ):
            trainer.log("now")
            assert next(answer.iter_lines()) == "now"

    def test_followed_log_of_an_ended_run_ends(self, api: ApiServer, trainer: Trainer) -> None:
        trainer.log("one")
        trainer.fail()
        assert lines(api, trainer, follow=True) == ["one"]

    def test_followed_log_is_served_as_events_for_that_accept_header(self, api: ApiServer, trainer: Trainer) -> None:
        trainer.log("one", "two")
        trainer.metric(1, loss=1.0)
        trainer.complete()
        answer = api.client.get(
            f"/v1/runs/{trainer.run_id}/logs",
            params={"follow": True, "grep": "two"},
            headers={"Accept": "text/event-stream"},
        )
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert re.findall(r"^event: (.*)$", answer.text, flags=re.MULTILINE) == ["log", "end"]
        assert answer.text.count('"line":') == answer.text.count('"line":"two"') == 1

    def test_as_events_it_continues_behind_the_last_event_id(self, api: ApiServer, trainer: Trainer) -> None:
        trainer.log("one", "two")
        trainer.complete()
        path = f"/v1/runs/{trainer.run_id}/logs"
        events = {"Accept": "text/event-stream"}
        whole = api.client.get(path, params={"follow": True}, headers=events).text
        ids = [line.removeprefix("id: ") for line in whole.splitlines() if line.startswith("id: ")]
        rest = api.client.get(
            path, params={"follow": True, "tail": 9}, headers={**events, "Last-Event-ID": ids[0]}
        ).text
        assert '"line":"one"' not in rest and '"line":"two"' in rest and "event: end" in rest
        assert api.client.get(path, headers={**events, "Last-Event-ID": ids[-1]}).status_code == 204
        assert api.client.get(path, headers={**events, "Last-Event-ID": "123456789"}).status_code == 204
        assert api.client.get(path, headers={**events, "Last-Event-ID": "x"}).status_code == 422

    def test_a_key_has_a_limit_of_open_streams(self, api: ApiServer, trainer: Trainer) -> None:
        assert isinstance(api, ThreadServer)
        state = api.application.state
        path, follow = f"/v1/runs/{trainer.run_id}/logs", {"follow": True}
        before, state.open_streams = state.open_streams, OpenStreams(1)
        try:
            with api.client_with(api.key) as client, client.stream("GET", path, params=follow):
                refused = api.client.get(path, params=follow)
                assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
                assert "ANNEAL_STREAMS_PER_KEY" in refused.json()["detail"] and refused.headers["retry-after"]
                with (
                    api.client_with(api.key_with(["read"])) as other,
                    other.stream("GET", path, params=follow) as stream,
                ):
                    assert stream.status_code == 200
            trainer.complete()
            eventually(lambda: api.client.get(path, params=follow).status_code == 200)
        finally:
            state.open_streams = before

    def test_a_reader_that_leaves_holds_nothing(self, api: ApiServer, engine: Engine, trainer: Trainer) -> None:
        for _ in range(15):
            with (
                api.client_with(api.key) as client,
                client.stream("GET", f"/v1/runs/{trainer.run_id}/logs", params={"follow": True}),
            ):
                pass
        assert eventually(lambda: api.client.get(f"/v1/runs/{trainer.run_id}").status_code == 200)
