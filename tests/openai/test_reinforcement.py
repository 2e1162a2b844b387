"""Reinforcement jobs that OpenAI's client creates: graders become rewards, and are shown as they were sent."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from app.config import Settings
from tests.app.uploads import lines
from tests.factories import make_model
from tests.openai.conftest import client_of
from tests.openai.test_errors import error_of
from tests.openai.test_files import CHAT, dataset_of, upload
from tests.openai.test_job_creation import run_of
from tests.server import ApiServer, ThreadServer

ROW: dict[str, Any] = {
    "messages": [{"role": "developer", "content": "Reply with a number."}, {"role": "user", "content": "1 + 1?"}],
    "solution": {"value": 2}, "style": "brief",
}  # fmt: skip
CHECK: dict[str, Any] = {
    "type": "string_check", "name": "value", "input": "{{sample.output_json.value}}",
    "reference": "{{item.solution.value}}", "operation": "eq",
}  # fmt: skip
SIMILAR: dict[str, Any] = {
    "type": "text_similarity", "name": "similar", "input": "{{sample.output_text}}", "reference": "{{item.style}}",
    "evaluation_metric": "rouge_l",
}  # fmt: skip
SCORE: dict[str, Any] = {
    "type": "score_model", "name": "score", "model": "gpt-4.1-mini", "range": [1, 5],
    "input": [
        {"role": "developer", "content": "Rate the style: {{ item.style }}."},
        {"role": "user", "content": [{"type": "input_text", "text": "{{ sample.output_text }}"}]},
    ],
    "sampling_params": {"temperature": 0.5, "max_completions_tokens": 9},
}  # fmt: skip
LABEL: dict[str, Any] = {
    "type": "label_model", "name": "label", "model": "gpt-4.1-mini", "labels": ["good", "bad"],
    "passing_labels": ["good"], "input": [{"role": "user", "content": "{{ sample.output_text }}"}],
}  # fmt: skip


def multi(calculate_output: str, **graders: Any) -> dict[str, Any]:
    return {"type": "multi", "name": "all", "graders": graders, "calculate_output": calculate_output}


def reinforcement(grader: dict[str, Any], **hyperparameters: Any) -> Any:
    options = {"hyperparameters": hyperparameters} if hyperparameters else {}
    return {"type": "reinforcement", "reinforcement": {"grader": grader, **options}}


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    make_model(emptied_api.settings, "tiny")
    return emptied_api


@pytest.fixture
def prompts(client: openai.OpenAI) -> str:
    file_id: str = upload(client, lines(ROW, ROW, ROW)).id
    return file_id


def test_file_of_questions_is_a_dataset_of_prompts_with_its_other_columns(
    api: ApiServer, client: openai.OpenAI, prompts: str
) -> None:
    dataset = dataset_of(api, prompts)
    assert dataset["format"] == "prompt" and set(dataset["columns"]) == {"prompt", "solution", "style"}
    assert dataset["preview"][0] == {"prompt": ROW["messages"], "solution": ROW["solution"], "style": "brief"}
    assert client.files.content(prompts).read() == lines(ROW, ROW, ROW)
    with pytest.raises(openai.BadRequestError, match=r"line 2.*ends with a message of the role `assistant`"):
        upload(client, lines(ROW, CHAT))


def test_graders_become_the_rewards_of_the_run_and_are_shown_again(
    api: ApiServer, client: openai.OpenAI, prompts: str
) -> None:
    grader = multi("(3*value + similar) / 4", value=CHECK, similar=SIMILAR)
    hyperparameters = {
        "n_epochs": 2, "batch_size": 6, "learning_rate_multiplier": 0.5, "compute_multiplier": 0.5, "eval_interval": 7,
        "eval_samples": "auto", "reasoning_effort": "default",
    }  # fmt: skip
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=prompts, validation_file=prompts, metadata={"team": "docs"},
        method=reinforcement(grader, **hyperparameters),
    )  # fmt: skip
    config = run_of(api, job.id)["config"]
    expected = {
        "method": "rlhf", "epochs": 2, "learning_rate": 5e-6, "eval_steps": 7, "batch_size": 4,
        "gradient_accumulation_steps": 6,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    assert (config["rlhf"]["algorithm"], config["rlhf"]["num_generations"]) == ("grpo", 4)
    check, similar = config["rlhf"]["rewards"]
    assert check == {**{key: value for key, value in CHECK.items() if key != "name"}, "weight": 0.75}
    assert similar == {**{key: value for key, value in SIMILAR.items() if key != "name"}, "weight": 0.25}
    assert job.method is not None and job.method.type == "reinforcement" and job.method.reinforcement is not None
    assert job.method.reinforcement.grader.to_dict() == grader
    used = job.method.reinforcement.hyperparameters
    assert used is not None and used.to_dict() == hyperparameters
    assert client.fine_tuning.jobs.retrieve(job.id) == job and job.metadata == {"team": "docs"}


def test_job_without_hyperparameters_has_the_defaults_of_the_service(
    api: ApiServer, client: openai.OpenAI, prompts: str
) -> None:
    job = client.fine_tuning.jobs.create(model="tiny", training_file=prompts, method=reinforcement(CHECK))
    config = run_of(api, job.id)["config"]
    assert (config["batch_size"], config["gradient_accumulation_steps"]) == (4, 4)
    assert job.method is not None and job.method.reinforcement is not None
    used = job.method.reinforcement.hyperparameters
    assert used is not None and (used.batch_size, used.compute_multiplier, used.eval_interval) == (2, 1, "auto")
    assert job.metadata is None and job.method.reinforcement.grader.to_dict() == CHECK


def test_compute_multiplier_alone_keeps_the_prompts_of_a_step(
    api: ApiServer, client: openai.OpenAI, prompts: str
) -> None:
    method = reinforcement(CHECK, compute_multiplier=1.5)
    job = client.fine_tuning.jobs.create(model="tiny", training_file=prompts, method=method)
    config = run_of(api, job.id)["config"]
    assert config["rlhf"]["num_generations"] == 12
    assert config["batch_size"] * config["gradient_accumulation_steps"] == 2 * 12
    assert job.hyperparameters.batch_size == 2


class TestModelGraders:
    @pytest.fixture
    def api(self, settings: Settings) -> Iterator[ApiServer]:
        hosts = {"reward_hosts": "api.openai.com", "reward_private_hosts": "10.1.2.3:8000"}
        with ThreadServer(settings.model_copy(update=hosts)) as api:
            make_model(api.settings, "tiny")
            yield api

    def test_they_become_judges_at_openai_or_at_the_url_of_the_job(self, api: ApiServer) -> None:
        with client_of(api) as client:
            file_id = upload(client, lines(ROW, ROW)).id
            grader = multi("2 * score - label", score=SCORE, label=LABEL)
            job = client.fine_tuning.jobs.create(model="tiny", training_file=file_id, method=reinforcement(grader))
            score, label = run_of(api, job.id)["config"]["rlhf"]["rewards"]
            url = "http://10.1.2.3:8000/v1"
            local = client.fine_tuning.jobs.create(
                model="tiny", training_file=file_id, method=reinforcement(SCORE),
                extra_body={"anneal": {"grader_url": url}},
            )  # fmt: skip
            (at_url,) = run_of(api, local.id)["config"]["rlhf"]["rewards"]
        expected = {
            "type": "judge", "url": "https://api.openai.com/v1", "model": "gpt-4.1-mini", "scale": [1, 5], "weight": 8,
            "parameters": {"temperature": 0.5, "max_completion_tokens": 9}, "rubric": None,
            "messages": [
                {"role": "developer", "content": "Rate the style: {{ item.style }}."},
                {"role": "user", "content": "{{ sample.output_text }}"},
            ],
        }  # fmt: skip
        assert {name: score[name] for name in expected} == expected
        assert (label["labels"], label["passing_labels"], label["weight"]) == (["good", "bad"], ["good"], -1)
        assert (at_url["url"], at_url["weight"]) == (url, 4)


@pytest.mark.parametrize(
    ("changes", "param", "code", "says"),
    [
        ({"method": {"type": "reinforcement"}}, "method.reinforcement", "missing", "`grader`"),
        ({"method": reinforcement({})}, "method.reinforcement.grader", None, "required"),
        ({"method": reinforcement({"type": "python", "name": "p", "source": "def grade(): ..."})},
         "method.reinforcement.grader.type", "not_supported", "plugin"),
        ({"method": reinforcement({**SIMILAR, "evaluation_metric": "cosine"})},
         "method.reinforcement.grader.evaluation_metric", "not_supported", "fuzzy_match"),
        ({"method": reinforcement({**SIMILAR, "evaluation_metric": "meteor"})},
         "method.reinforcement.grader.evaluation_metric", "not_supported", "WordNet"),
        ({"method": reinforcement(multi("max(value, similar)", value=CHECK, similar=SIMILAR))},
         "method.reinforcement.grader.calculate_output", "not_supported", "weighted sum"),
        ({"method": reinforcement(multi("value", value={**SIMILAR, "evaluation_metric": "cosine"}))},
         "method.reinforcement.grader.graders.value.evaluation_metric", "not_supported", "embeddings"),
        ({"method": reinforcement({**CHECK, "input": "{{ sample.output_tools.0 }}"})},
         "method.reinforcement.grader.string_check.input", "bad_template", "{{ sample.output_text }}"),
        ({"method": reinforcement({**CHECK, "reference": "{{ item.solutions }}"})},
         "training_file", "missing_column", "`solution`"),
        ({"method": reinforcement(SCORE)}, "method.reinforcement.grader", "host_not_allowed", "ANNEAL_REWARD_HOSTS"),
        ({"method": reinforcement(CHECK, reasoning_effort="high")},
         "method.reinforcement.hyperparameters.reasoning_effort", "value_error", "max_completion_length"),
        ({"method": reinforcement(CHECK, eval_samples=4)},
         "method.reinforcement.hyperparameters.eval_samples", "value_error", "must be `auto`"),
        ({"method": reinforcement(CHECK, eval_interval=4)},
         "method.reinforcement.hyperparameters.eval_interval", None, ""),
        ({"method": reinforcement(CHECK, compute_multiplier=1000)},
         "method.reinforcement.hyperparameters.compute_multiplier", None, ""),
        ({"method": reinforcement(CHECK, beta=0.1)},
         "method.reinforcement.hyperparameters.beta", "extra_forbidden", ""),
        ({"method": reinforcement(CHECK), "anneal": {"config": {"rlhf": {"rewards": []}}}},
         "anneal.config.rlhf.rewards", "conflict", "`method.reinforcement.grader`"),
        ({"method": reinforcement(CHECK), "anneal": {"config": {"method": "rlhf"}}},
         "anneal.config.method", "conflict", "`method.type`"),
        ({"method": reinforcement(CHECK), "anneal": {"grader_url": "ftp://x"}}, "anneal.grader_url", "bad_url", "http"),
        ({"anneal": {"grader_url": "https://x"}}, "anneal.grader_url", "conflict", "`method.reinforcement`"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_name(
    api: ApiServer, prompts: str, changes: dict[str, Any], param: str, code: str | None, says: str
) -> None:
    body = {"model": "tiny", "training_file": prompts, **changes}
    answer = api.client.post("/openai/v1/fine_tuning/jobs", json=body)
    error = error_of(answer)
    errors = error.get("errors", [{"field": error["param"], "code": error["code"], "message": error["message"]}])
    named = [one for one in errors if one["field"] == param]
    assert answer.status_code == 400 and named, answer.text
    assert code in (None, named[0]["code"]) and says in named[0]["message"]


class TestGraders:
    @pytest.mark.parametrize("grader", [CHECK, SIMILAR, SCORE, LABEL, multi("value + score", value=CHECK, score=SCORE)])
    def test_valid_one_is_returned(self, client: openai.OpenAI, grader: Any) -> None:
        valid = client.fine_tuning.alpha.graders.validate(grader=grader).grader
        assert valid is not None and (valid.type, valid.name) == (grader["type"], grader["name"])

    @pytest.mark.parametrize(
        ("grader", "says"),
        [
            (multi("2 ** value", value=CHECK), "not a weighted sum"),
            (multi("value +", value=CHECK), "not a formula"),
            (multi("value / 0", value=CHECK), "not a formula"),
            (multi("value + 1", value=CHECK), "leave it out"),
            (multi("value + other", value=CHECK), "names `other`"),
            (multi("value * value", value=CHECK), "not a weighted sum"),
            (multi("5000 * value", value=CHECK), "1000"),
            (multi("(" * 900, value=CHECK), "not a formula"),
            ({**LABEL, "passing_labels": ["fine"]}, "not one of its `labels`"),
            ({**SCORE, "range": [1, 1]}, "not below"),
            ({**SCORE, "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "no text"),
        ],
    )
    def test_invalid_one_is_refused_with_the_reason(self, client: openai.OpenAI, grader: Any, says: str) -> None:
        with pytest.raises(openai.BadRequestError, match=says.replace("*", r"\*")):
            client.fine_tuning.alpha.graders.validate(grader=grader)

    def test_none_is_run(self, client: openai.OpenAI) -> None:
        check: Any = CHECK
        with pytest.raises(openai.BadRequestError, match="/v1/runs/predict") as refused:
            client.fine_tuning.alpha.graders.run(grader=check, model_sample="2", item={"solution": {"value": 2}})
        assert refused.value.code == "not_supported"

    def test_single_grader_of_the_types_of_the_client_is_one_by_its_name(
        self, api: ApiServer, client: openai.OpenAI, prompts: str
    ) -> None:
        grader = {"type": "multi", "name": "all", "graders": CHECK, "calculate_output": "-0.5 * value"}
        job = client.fine_tuning.jobs.create(model="tiny", training_file=prompts, method=reinforcement(grader))
        (check,) = run_of(api, job.id)["config"]["rlhf"]["rewards"]
        assert check["weight"] == -0.5
