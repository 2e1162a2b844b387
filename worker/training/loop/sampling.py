"""Text generation during training without a trace in it: no random number is drawn, and no mode changes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from worker.training.checkpointing import rng_state
from worker.training.context import TrainingContext
from worker.training.data.chat_template import default_template, end_of_turn
from worker.training.data.preferences import is_conversational
from worker.training.failures import Stopped, one_line
from worker.training.trainer_protocol import ServiceTrainer

Prompt = str | list[dict[str, str]]
"""A text, or a chat of messages with `role` and `content`."""


def sample_if_due(trainer: ServiceTrainer) -> None:
    """Generate and report the samples that the configuration schedules after the current step."""
    every, step = trainer.run.sample_every, trainer.state.global_step
    if every is not None and (step % every == 0 or step >= trainer.state.max_steps):
        report_samples(trainer)


def report_samples(trainer: ServiceTrainer) -> None:
    """Generate and report a text for each configured prompt; a stop request leaves them to the resumed run."""
    run, config = trainer.run, trainer.run.config
    prompts: list[Prompt] = [
        one if isinstance(one, str) else [message.model_dump() for message in one] for one in config.sample_prompts
    ]
    run.state.samples_pending = False
    try:
        texts = generate_texts(trainer, prompts, config.sample_max_new_tokens, config.sample_temperature)
    except Stopped:
        run.state.samples_pending = True
        return
    except Exception as error:
        if run.is_sharded:  # the other ranks may wait for a forward pass of this one
            raise
        reason = f"{type(error).__name__}: {one_line(error)}".rstrip(".")
        run.report.message(f"Sampling failed: {reason}. Training continues.", level="warning")
        return
    for prompt, text in zip(prompts, texts, strict=True):
        run.report.send(
            {"type": "sample", "step": trainer.state.global_step, "prompt": _prompt_text(prompt), "completion": text}
        )


def _prompt_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def generate_texts(
    trainer: ServiceTrainer, prompts: Sequence[Prompt], max_new_tokens: int, temperature: float
) -> list[str]:
    """Return the text that the current model generates after each prompt.

    With a temperature, tokens are drawn with the run's seed and step, so the same weights generate the same text again.
    A prompt that is too long for the model loses its beginning.

    Raises:
        Stopped: a stop was requested before the end.
    """
    run, tokenizer = trainer.run, trainer.processing_class
    model = trainer.accelerator.unwrap_model(trainer.model)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    options = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=0 if temperature > 0 else None,
        use_cache=True,
        eos_token_id=end_tokens(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    texts: list[str] = []
    with (
        run.stopping_together(run.is_sharded),
        preserve_rng(),
        evaluation_mode(model),
        torch.no_grad(),
        trainer.accelerator.autocast(),
    ):
        torch.manual_seed(run.config.seed + trainer.state.global_step)
        for prompt in prompts:
            run.report_progress("sampling", len(texts), len(prompts))
            is_chat = not isinstance(prompt, str) or _is_chat(run)
            rendered = _render_prompt(tokenizer, prompt) if is_chat else prompt
            prompt_ids = tokenizer(rendered, add_special_tokens=not is_chat)["input_ids"]
            if most is not None:
                prompt_ids = prompt_ids[-max(most - max_new_tokens, 1) :]
            ids = torch.tensor([prompt_ids], device=model.device)
            written = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=options,
                stopping_criteria=StoppingCriteriaList([_HeartbeatAndStop(run)]),
                synced_gpus=run.is_sharded,
            )
            texts.append(tokenizer.decode(written[0, len(prompt_ids) :], skip_special_tokens=True))
    return texts


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text: those of the tokenizer and of the model, and the end of a turn in a chat."""
    every = [*_eos_tokens(model, tokenizer), end_of_turn(tokenizer)]
    return list(dict.fromkeys(token for token in every if token is not None))


def _eos_tokens(model: Any, tokenizer: Any) -> list[int]:
    published = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = published if isinstance(published, list) else [published]
    return list(dict.fromkeys(token for token in [tokenizer.eos_token_id, *more] if token is not None))


def end_answers_at_turns(run: TrainingContext, model: Any, tokenizer: Any) -> str | None:
    """Add the token that ends an answer of the chat template to the end tokens of a model that learns chats.

    Return the token if neither the tokenizer nor the model has it as one, else None.
    """
    config, turn = getattr(model, "generation_config", None), end_of_turn(tokenizer)
    if config is None or turn is None or not _is_chat(run):
        return None
    ends = _eos_tokens(model, tokenizer)
    if turn in ends:
        return None
    config.eos_token_id = [*ends, turn]
    return str(tokenizer.convert_ids_to_tokens(turn))


class _HeartbeatAndStop(StoppingCriteria):  # type: ignore[misc]
    """Sends a heartbeat with each token, and raises `Stopped` if a stop was requested."""

    def __init__(self, run: TrainingContext) -> None:
        self._run = run

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self._run.report.alive()
        if self._run.is_sharded:
            self._run.raise_if_stopped()
        elif self._run.stop_requested is not None:
            raise Stopped
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _is_chat(run: TrainingContext) -> bool:
    return run.dataset.format == "chat" or is_conversational(str(run.dataset.path))


def _render_prompt(tokenizer: Any, prompt: Prompt) -> str:
    """Return the prompt as the chat template renders it, with the plain one if the tokenizer has none."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    template = None if tokenizer.chat_template else default_template(tokenizer)
    return str(
        tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    )


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, and restore the mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, was in modes:
            module.training = was


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore every random number generator on exit."""
    state = rng_state.current_states()
    try:
        yield
    finally:
        rng_state.set_current(state)
