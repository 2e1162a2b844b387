"""Models as OpenAI's client lists them: base models, outputs of runs, checkpoints."""

import openai
import pytest
from sqlalchemy import Engine

from app.openai import models
from tests.factories import Trainer, make_model, mark_checkpoint, mark_run
from tests.openai.conftest import async_client_of, client_of
from tests.rows import add_run
from tests.server import ApiServer, ThreadServer


def add_output(engine: Engine, **values: object) -> str:
    run_id: str = add_run(engine, backend="celery", **values).id
    mark_run(engine, run_id, output_attempt=1)
    return run_id


def test_base_models_and_runs_with_an_output_are_listed(
    emptied_api: ApiServer, engine: Engine, client: openai.OpenAI
) -> None:
    make_model(emptied_api.settings, "Qwen/Qwen3-0.6B")
    make_model(emptied_api.settings, "tiny")
    outputs = [add_output(engine), add_output(engine, task="export")]
    add_run(engine, backend="celery")
    add_output(engine, task="predict", config={"extra": {"predict": {}}})
    mark_run(engine, add_run(engine, backend="fake").id, output_attempt=1)
    page = client.models.list()
    assert [model.id for model in page] == ["Qwen/Qwen3-0.6B", "tiny", *reversed(outputs)]
    assert page.object == "list" and {model.object for model in page} == {"model"}
    assert all(model.created > 1_700_000_000 and model.owned_by for model in page)


def test_model_is_retrieved_by_its_name_with_and_without_a_slash(
    emptied_api: ApiServer, engine: Engine, client: openai.OpenAI
) -> None:
    for name in ("Qwen/Qwen3-0.6B", "tiny"):
        make_model(emptied_api.settings, name)
        model = client.models.retrieve(name)
        assert (model.id, model.owned_by) == (name, "system")
    run_id = add_output(engine)
    assert client.models.retrieve(run_id).id == run_id


def test_checkpoint_is_a_model_until_its_files_are_deleted(
    emptied_api: ApiServer, engine: Engine, client: openai.OpenAI
) -> None:
    run_id = add_run(engine, backend="celery").id
    checkpoint_id = Trainer(engine, run_id).begin().checkpoint(40)
    assert client.models.retrieve(checkpoint_id).id == checkpoint_id
    mark_checkpoint(engine, checkpoint_id, bad_reason="torn")
    for unusable in (checkpoint_id, run_id, "ckpt_" + "0" * 26, "run_" + "0" * 26, "tiny", "../tiny"):
        with pytest.raises(openai.NotFoundError) as unknown:
            client.models.retrieve(unusable)
        assert unknown.value.code == "model_not_found"


def test_model_that_the_operator_does_not_allow_is_neither_listed_nor_retrieved(emptied_api: ApiServer) -> None:
    settings = emptied_api.settings.model_copy(update={"allowed_models": "qwen*"})
    make_model(settings, "qwen3")
    make_model(settings, "llama")
    with ThreadServer(settings) as server, client_of(server) as client:
        assert [model.id for model in client.models.list()] == ["qwen3"]
        with pytest.raises(openai.NotFoundError, match="ANNEAL_ALLOWED_MODELS"):
            client.models.retrieve("llama")


async def test_asynchronous_client_lists_and_retrieves(emptied_api: ApiServer) -> None:
    make_model(emptied_api.settings, "tiny")
    async with async_client_of(emptied_api) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).object == "model"


def test_no_connection_of_the_database_waits_while_folders_of_models_are_read(
    emptied_api: ThreadServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, in_use = emptied_api.application.state.reading_engine.pool, []

    def read_folders(*_: object) -> list[object]:
        in_use.append(pool.checkedout())
        return []

    monkeypatch.setattr(models, "list_models", read_folders)
    assert not client.models.list().data
    assert in_use == [0]
