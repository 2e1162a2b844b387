"""Sequence parallelism (Ulysses): several ranks hold one sequence, each some of its positions.

Everything in a model treats positions one by one, except attention. Before it, the ranks exchange their tensors so that
each has all positions of some of the heads; afterwards they exchange the result back.
The only module that changes the attention interfaces of transformers.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import find_packed_sequence_indices, packed_sequence_compatibility_function

from anneal.contracts.training_config.sequence_parallel import division_obstacle
from worker.training.data.sequence_share import WholeSequences
from worker.training.failures import TrainingFailure
from worker.training.model.attention import VARLEN
from worker.training.ranks import NEVER, Ranks

_KERNELS = ("sdpa", VARLEN, "flash_attention_2", "flash_attention_3")
_ROTARY_BY_LENGTH = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the highest position of a forward pass, which differs between the ranks."""
_RECURRENT = ("linear", "mamba", "conv", "recurrent")
"""Parts of the names of layers that pass a state from position to position."""
_CHECKED_TOKENS = 512
_TOLERANCE = 1e-4
_TOLERANCE_16_BIT = 5e-2
"""Largest relative difference between logits that rounding explains."""


class SequenceParallel:
    """Attention of one model over sequences that are divided among ranks; every rank makes the same calls."""

    def __init__(self, model: Any, ranks: Ranks) -> None:
        """Create the groups of ranks, and wrap the attention that the model uses in the exchange.

        Raises:
            TrainingFailure: `config_error`, if the attention of this model cannot be divided.
        """
        self._count, self._part, self._ranks = ranks.per_sequence, ranks.sequence_parallel_rank, ranks
        if (obstacle := _division_obstacle(model, ranks.size, self._count)) is not None:
            raise TrainingFailure("config_error", f"`resources.sequence_parallel` is {self._count}, but {obstacle}.")
        for first in range(0, ranks.size, self._count):
            # Every rank takes part in creating each.
            group = dist.new_group(list(range(first, first + self._count)), timeout=NEVER)
            if first <= ranks.rank < first + self._count:
                self._group = group
        self._whole: WholeSequences | None = None
        self._texts: torch.Tensor | None = None
        name = model.config._attn_implementation
        self._kernel: Callable[..., Any] = AttentionInterface()[name]
        self._kernel_mask: Callable[..., Any] = AttentionMaskInterface()[name]
        AttentionInterface.register(name, self._compute_attention)
        AttentionMaskInterface.register(name, self._create_mask)

    @contextmanager
    def divide_during(self, whole: WholeSequences) -> Iterator[None]:
        """During the block, which contains the backward pass, sequences are divided; otherwise each rank is alone."""
        self._whole = whole
        self._texts = None if whole.mask is not None else find_packed_sequence_indices(whole.positions)
        try:
            yield
        finally:
            self._whole = self._texts = None

    def check_logits(
        self, model: Any, text: Sequence[int], autocast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Compare the logits of a text that is divided with those of the same text on each rank alone.

        The second half of the text is at the last positions that the model knows, so that what depends on the length
        of a sequence differs too.

        Raises:
            TrainingFailure: `config_error`, if they differ by more than rounding; on every rank.
        """
        length = max(min(len(text), _CHECKED_TOKENS) // self._count, 1) * self._count
        ids = torch.tensor([(list(text) * self._count)[:length]], device=model.device)
        positions = torch.arange(length, device=model.device)[None]
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length
        positions[:, length // 2 :] += max(longest - length, 0)
        mask = torch.ones_like(ids)
        own = slice(*(length * one // self._count for one in (self._part, self._part + 1)))

        def compute_logits(part: slice) -> torch.Tensor:
            inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
            output = model(**{name: one[:, part] for name, one in inputs.items()}, use_cache=False).logits
            return output.float()

        trains = model.training
        model.eval()
        try:
            with torch.no_grad(), autocast():
                alone = compute_logits(slice(None))[:, own]
                with self.divide_during(WholeSequences(positions, mask, {})):
                    divided = compute_logits(own)
                is_exact = not torch.is_autocast_enabled()
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except RuntimeError as error:  # shapes that do not fit, on every rank: attention without the interface
            raise TrainingFailure("config_error", _divides_otherwise(f"its attention fails: {error}")) from error
        finally:
            model.train(trains)
        is_exact = is_exact and all(one.dtype == torch.float32 for one in model.parameters())
        difference = float((divided - alone).norm() / alone.norm())
        differences = self._ranks.gather_values(difference)
        limit = _TOLERANCE if is_exact else _TOLERANCE_16_BIT
        if not all(one <= limit for one in differences):  # NaN is none
            raise TrainingFailure("config_error", _divides_otherwise(f"its logits differ by {max(differences):.1g}"))

    def _compute_attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention; queries, keys and values have the shape (sequences, heads, positions, width)."""
        whole = self._whole
        if whole is not None:
            repeats = math.lcm(key.shape[1], self._count) // key.shape[1]
            if repeats > 1:  # fewer heads of keys and values than ranks, or a number that cannot be divided
                key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
                module = _SharedHeads(module, query.shape[1] // key.shape[1])
            query, key, value = (self._exchange_parts(one, 1, 2) for one in (query, key, value))
            options |= {"position_ids": whole.positions, **whole.kernel_options}
        out, _ = self._kernel(module, query, key, value, attention_mask, **options)
        return (out if whole is None else self._exchange_parts(out, 1, 2)), None

    def _create_mask(
        self,
        *,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any],
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Create the mask of whole sequences, whatever part of them the model has been given."""
        whole = self._whole
        if whole is not None:
            q_length = kv_length = whole.positions.shape[1]
            attention_mask = None if whole.mask is None else whole.mask.bool()
            if self._texts is not None:
                mask_function = packed_sequence_compatibility_function(mask_function, whole.positions, self._texts)
                options["allow_is_causal_skip"] = False
        return self._kernel_mask(
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )

    def _exchange_parts(self, tensor: torch.Tensor, split: int, join: int) -> torch.Tensor:
        exchanged: torch.Tensor = _Exchange.apply(tensor, self._group, self._count, split, join)
        return exchanged


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Sends part i of dimension `split` to rank i, and concatenates what is received in dimension `join`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any, count: int, split: int, join: int) -> torch.Tensor:
        ctx.back = group, count, join, split
        return _exchange_tensor(tensor, group, count, split, join)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _exchange_tensor(gradients[0], *ctx.back), None, None, None, None


def _exchange_tensor(tensor: torch.Tensor, group: Any, count: int, split: int, join: int) -> torch.Tensor:
    sent = torch.stack(tensor.chunk(count, dim=split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=join)


class _SharedHeads:
    """An attention module as its kernel sees it, with another number of query heads for each head of keys."""

    def __init__(self, module: Any, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _divides_otherwise(how: str) -> str:
    return (
        f"This model computes something else once a sequence is divided among devices ({how}): set "
        "`resources.sequence_parallel` to 1."
    )


def _division_obstacle(model: Any, devices: int, count: int) -> str | None:
    """Return a clause that says why the configuration of a model rules out the division; None if it does not."""
    kernel, heads = model.config._attn_implementation, _head_count(model)
    if kernel not in _KERNELS:
        return f"its attention is `{kernel}`, which cannot be divided; set `attn_implementation` to `sdpa`"
    if (obstacle := _obstacle_of_any_division(model)) is not None:
        return f"{obstacle}; set it to 1"
    undivided = division_obstacle(count, devices, heads)
    return f"it {undivided}" if undivided is not None else None


def _head_count(model: Any) -> Any:
    return getattr(model.config.get_text_config(), "num_attention_heads", None)


def _obstacle_of_any_division(model: Any) -> str | None:
    config = model.config.get_text_config()
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(_head_count(model), int):
        return "the number of attention heads of this model is not known"
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        return "this model takes no positions"
    if any(part in kind for kind in getattr(config, "layer_types", None) or () for part in _RECURRENT):
        return "this model has layers that pass a state from position to position"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "the attention of this model has sinks"
    if _rotary_types(getattr(config, "rope_parameters", None)) & _ROTARY_BY_LENGTH:
        return "the rotary embeddings of this model depend on the length of the sequence"
    return None


def _rotary_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    own = parameters.get("rope_type")
    return {str(own)}.union(*(_rotary_types(one) for one in parameters.values()))
