"""Command `anneal chat`: a conversation with a model, or one question."""

import sys
import threading
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import error_text
from app.cli.console import AsJson, fail, open_client, print_json, print_note, print_text
from app.cli.names import CheckpointOfModel, ModelName, checkpoint_or_model
from app.infra.terminal_text import plain_text

if TYPE_CHECKING:
    from anneal.client.client import Anneal
    from anneal.contracts.schemas.runs.reads import RunRead

commands = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_LOOK_SECONDS = 1.0
"""Seconds between two looks at a serving run that does not answer yet."""


@commands.command()
def chat(
    model: ModelName,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Ask this, print the answer and exit.")] = None,
    system: Annotated[str | None, typer.Option(help="System message, with which the chat starts.")] = None,
    checkpoint: CheckpointOfModel = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="Sampling temperature; 0: the most probable tokens. Default: 1.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling. Default: another one each time.")] = None,
    as_json: AsJson = False,
) -> None:
    """Chat with the output of a run, a checkpoint or a base model.

    On a terminal: /reset starts over, Ctrl-C stops an answer, Ctrl-D ends. Elsewhere, it prints the answer to one
    question, which is --prompt or standard input.

    Example: `anneal chat run_01k3x9m6q2v8s4t0w7y5z1a3b6 --prompt "What does annealing do?"`
    """
    values = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    options: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    with open_client() as client:
        conversation = _Conversation(client, checkpoint_or_model(client, model, checkpoint), system, options)
        try:
            if prompt is None and sys.stdin.isatty() and sys.stdout.isatty() and not as_json:
                return conversation.talk()
            question = sys.stdin.read().rstrip("\n") if prompt is None else prompt
        except UnicodeDecodeError:
            fail("Standard input is not text in UTF-8: convert it.", code="not_utf8")
        if not question.strip():
            fail("There is no question: add --prompt, or write one to standard input.", code="no_question")
        if as_json:
            print_json(client.chat(conversation.model, conversation.with_question(question), **options))
        else:
            conversation.ask(question)


class _Conversation:
    """Chat with a model. Of an answer, what was printed is remembered, however it has ended."""

    def __init__(self, client: "Anneal", model: str, system: str | None, options: dict[str, Any]) -> None:
        self.model = model
        self._client, self._options = client, options
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = self._start

    def with_question(self, question: str) -> list[dict[str, str]]:
        """Return the messages so far and a question."""
        return [*self._messages, {"role": "user", "content": question}]

    def talk(self) -> None:
        """Ask what a person types, until Ctrl-D."""
        from anneal.client.errors import AnnealError

        with suppress(ImportError):  # without it, `input` has no editing and no earlier lines
            import readline  # noqa: F401
        print_note(f"{self.model}: /reset starts over, Ctrl-C stops an answer, Ctrl-D ends.")
        while True:
            try:
                question = input("> ").strip()
            except EOFError:
                return print_note("")
            if question == "/reset":
                self._messages = self._start
                print_note("The chat starts over.")
            elif question:
                try:
                    self.ask(question)
                except AnnealError as error:
                    for line in error_text.error_lines(error):
                        print_text(line, err=True)
                except KeyboardInterrupt:
                    print_note("The answer was stopped.")

    def ask(self, question: str) -> None:
        """Print the answer to a question as it is written."""
        messages, answer, finish_reason = self.with_question(question), "", None
        wait = _Wait(self._client)
        stream = self._client.stream_chat(self.model, messages, on_serving_run=wait.follow, **self._options)
        try:
            with closing(stream):
                for chunk in stream:
                    wait.end_wait()
                    typer.echo(plain_text(chunk.text), nl=False)
                    answer += chunk.text
                    finish_reason = next((choice.finish_reason for choice in chunk.choices), finish_reason)
        finally:
            wait.end_wait()
            if answer:
                typer.echo()
                self._messages = [*messages, {"role": "assistant", "content": answer}]
        if finish_reason == "length":
            print_note("The answer is cut at its maximum number of tokens: raise --max-tokens, or shorten the chat.")


class _Wait:
    """Says on standard error what a serving run does until its answer begins."""

    def __init__(self, client: "Anneal") -> None:
        self._client = client
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, run_id: str) -> None:
        """Start to look at a serving run."""
        self._thread = threading.Thread(target=self._look, args=(run_id,), daemon=True)
        self._thread.start()

    def end_wait(self) -> None:
        """End the looks; nothing is printed from then on."""
        if self._thread is not None:
            self._has_ended.set()
            self._thread.join(_LOOK_SECONDS)
            self._thread = None

    def _look(self, run_id: str) -> None:
        from anneal.client.errors import AnnealError

        printed: str | None = None
        while not self._has_ended.wait(_LOOK_SECONDS):
            with suppress(AnnealError):  # the answer will say what is wrong
                text = _describe_wait(self._client.runs.get(run_id))
                if text is not None and text != printed and not self._has_ended.is_set():
                    print_note(text)
                    printed = text


def _describe_wait(run: "RunRead") -> str | None:
    """Return what a serving run waits for; None once its model is loaded."""
    if run.status == "initializing":
        return f"Serving run {run.id} loads the model."
    if run.status != "pending":
        return None
    reason = run.pending_reason
    why = "It waits for its turn." if reason is None else error_text.in_commands(reason.message)
    return f"Serving run {run.id} is pending: {why}"
