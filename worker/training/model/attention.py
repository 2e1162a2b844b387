"""Attention `varlen`, for batches in which texts follow each other without padding; other batches are those of `sdpa`.

On a GPU, a kernel of torch computes all texts of a batch at once. On some GPUs, cuDNN's kernel for batches is faster
for long texts of equal length. Elsewhere, and where these kernels do not apply, each text is a call of sdpa. No mask
has the pairs of tokens of such a batch.
Registers itself with transformers when it is imported.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    masking_utils,
)
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from worker.training.failures import OUT_OF_MEMORY, TrainingFailure, classify_error, one_line

VARLEN = "varlen"
"""Name of this attention in transformers and in `attn_implementation`."""

_MIXES_TEXTS = {"afmoe"}
"""Families whose masks do not depend on positions, and whose layers do not receive the borders of texts."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)
"""Those of torch's kernel: torch 2.10 has no `scale` and no `window_size`, torch 2.11 no `enable_gqa`."""
_CHECKED_TOKENS = 64
_CHECKED_WIDTH = 64
_CHECKED_TOLERANCE = 2e-2
"""Largest relative difference of results and gradients that rounding to bfloat16 explains."""
_WIDEST_HEAD = 256
_WIDTH_STEP = 8
_FIRST_CAPABILITY = (8, 0)
"""Limits of torch's flash attention: the width of a head, what divides it, and the compute capability of the GPU."""
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of sdpa that prepare nothing for each new length, unlike those of cuDNN."""
_BATCH_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
"""Kernels of sdpa for texts of equal length, the fastest first; torch skips one that does not apply."""
_BATCH_GENERATION = 9
"""Major compute capability of the GPUs (Hopper) on which that of cuDNN is about twice as fast as flash attention."""
_FIRST_CUDNN = 91501
"""First version of cuDNN that torch prefers for sdpa: earlier ones have errors with some lengths."""
_SHORTEST_BATCHED = 1024
_BATCHED_STEP = 128
_WIDEST_BATCHED_HEAD = 128
"""Limits of texts as a batch: where cuDNN gains, where no tile of tokens is partly empty, and of its backward pass."""
_batched_length: int | None = None
"""Number of tokens of the texts that are computed as a batch; set by `batch_texts`."""


@dataclass(frozen=True)
class Texts:
    """Texts that follow each other in one sequence: what layers get in place of a mask over the whole sequence."""

    borders: tuple[int, ...]
    """Index of the first token of each text, and the number of all tokens."""
    on_device: torch.Tensor
    """The same on the device; shape (texts + 1,), int32."""
    longest: int
    """Number of tokens of the longest text."""
    window: int | None
    """Number of tokens, itself included, that a token attends to; None: all before it in its text."""


class _KnownTexts:
    """Borders of the texts of a batch, which the host has from the collator."""

    def __init__(self, borders: Sequence[int], on_device: torch.Tensor) -> None:
        self.borders = tuple(borders)
        self.on_device = on_device
        self.are_in_masks = False
        """True if the model makes masks that separate texts by the positions of their tokens."""

    def sequence_indices(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the number of the text of each token as transformers does; None for a single text.

        Transformers reads from the device whether there are several texts.
        """
        self.are_in_masks = True
        if len(self.borders) == 2:
            return None
        return (positions.diff(prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)


_READ_INDICES = "find_packed_sequence_indices"
"""Function of transformers that reads from the device whether a sequence has several texts, for masks."""
_known_texts: _KnownTexts | None = None
"""Texts of the batch that is being computed; set by `known_texts`."""


@contextmanager
def known_texts(borders: Sequence[int], on_device: torch.Tensor) -> Iterator[None]:
    """In the block, which computes one batch, read the borders of its texts from the host.

    To read them from a GPU, the host waits for everything that it has launched, such as the backward pass of the
    micro-batch before, and the GPU then waits for the host to launch the next layers.

    Args:
        borders: index of the first token of each text, and the number of all tokens.
        on_device: the same on the device; shape (texts + 1,), int32.
    """
    global _known_texts
    read_indices = getattr(masking_utils, _READ_INDICES, None)
    if read_indices is None:  # another version of transformers, which reads them as it does
        yield
        return
    _known_texts = _KnownTexts(borders, on_device.to(torch.int32))
    setattr(masking_utils, _READ_INDICES, _known_texts.sequence_indices)
    try:
        yield
    finally:
        setattr(masking_utils, _READ_INDICES, read_indices)
        _known_texts = None


def supports_varlen(architecture: PretrainedConfig) -> bool:
    """Return True if the layers of this model mix tokens by nothing but causal attention over a text or a window of it.

    Excluded are models without transformers' interface of attention, with a state that is passed from token to token,
    with sinks or capped scores, and those whose tokens attend to later ones. For others, transformers itself relies on
    the borders of texts alone, for flash attention.
    """
    model = AutoModelForCausalLM._model_mapping.get(type(architecture), None)
    if isinstance(model, tuple):
        model = model[0]
    if not (
        getattr(model, "_supports_attention_backend", False)
        and getattr(model, "_supports_flash_attn", False)
        and getattr(model, "_supports_sdpa", False)
        and not getattr(model, "_is_stateful", False)
    ):
        return False
    text = architecture.get_text_config()
    is_causal = architecture.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(text, "is_causal", True)
    if architecture.model_type in _MIXES_TEXTS:
        return False
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    return bool(is_causal) and takes_positions and set(getattr(text, "layer_types", None) or ()) <= _LAYER_TYPES


def compute_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Texts | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention; queries, keys and values have the shape (sequences, heads, tokens, width).

    Args:
        module: attention layer.
        query: queries.
        key: keys, of as many heads or of fewer.
        value: values.
        attention_mask: what `make_mask` has returned.
        dropout: probability of dropout.
        scaling: factor of the scores.
        options: further options of `sdpa`.

    Returns:
        The result in the shape (sequences, tokens, heads, width), and no weights.

    Raises:
        TrainingFailure: `config_error`: the batch has several texts in a sequence, and the model has made a mask
            that does not separate them.
    """
    states = query, key, value
    texts = attention_mask if isinstance(attention_mask, Texts) else _passed_texts(query, attention_mask, **options)
    if texts is None:
        result, _ = sdpa_attention_forward(module, *states, attention_mask, dropout, scaling, **options)
        return result, None
    if dropout == 0 and _has_kernel(query, value, texts):
        if _are_batch(query, value, texts):
            return _as_batch(*states, texts.longest, scaling), None
        return _at_once(*states, texts, scaling, repeats_keys=_repeats_keys(query.device)), None
    return _one_by_one(module, *states, texts, dropout, scaling, **options), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it would be compiled again for every number of texts
def _one_by_one(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    texts: Texts,
    dropout: float,
    scaling: float | None,
    **options: Any,
) -> torch.Tensor:
    """Compute the attention of one sequence of texts with a call of sdpa for each."""
    with _without_plans(query.device):
        parts = [
            sdpa_attention_forward(
                module, *(tensor[:, :, first:end] for tensor in (query, key, value)),
                _window_mask(end - first, texts.window, query.device), dropout, scaling, **options,
            )[0]
            for first, end in pairwise(texts.borders)
        ]  # fmt: skip
    return torch.cat(parts, dim=1)


def _without_plans(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which sdpa does not use cuDNN on a GPU, which prepares a plan for each new length."""
    return sdpa_kernel(_WITHOUT_PLANS) if device.type == "cuda" else nullcontext()


def make_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    q_offset: Any = 0,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **options: Any,
) -> torch.Tensor | Texts | None:
    """Return the mask of `sdpa`, the texts in place of it, or None where attention is merely causal.

    Called as transformers' functions for masks are. Padding after a text needs no mask, since no token attends to
    later ones.
    """
    # Functions for masks that tokens after it are part of pass this option.
    is_causal = "allow_is_bidirectional_skip" not in options
    is_whole = q_length == kv_length and isinstance(q_offset, int) and q_offset == 0
    if is_causal and is_whole and attention_mask is None and not allow_is_causal_skip:
        texts = _texts_of_mask(mask_function, q_length, local_size, device)
        if texts is not None:
            return texts
    if is_causal and is_whole and allow_is_causal_skip and _is_padded_at_end(attention_mask):
        attention_mask = None
    mask: torch.Tensor | None = sdpa_mask(
        q_length=q_length, kv_length=kv_length, mask_function=mask_function, attention_mask=attention_mask,
        q_offset=q_offset, local_size=local_size, allow_is_causal_skip=allow_is_causal_skip, device=device, **options,
    )  # fmt: skip
    return mask


def _texts_of_mask(
    mask_function: Callable[..., Any], length: int, window: int | None, device: torch.device | str
) -> Texts | None:
    """Return the texts that a mask separates: the first token of each does not attend to the one before it."""
    known = _known_texts
    if known is not None and known.are_in_masks and known.borders[-1] == length:
        if len(known.borders) == 2:
            return None
        return Texts(known.borders, known.on_device, _longest_text(known.borders), window)
    later, zero = torch.arange(1, length, device=device), torch.zeros((), dtype=torch.long, device=device)
    is_first = ~torch.as_tensor(mask_function(zero, zero, later, later - 1))
    first = (is_first.nonzero().flatten() + 1).tolist()
    if not first:
        return None
    borders = (0, *first, length)
    return Texts(borders, torch.tensor(borders, dtype=torch.int32, device=device), _longest_text(borders), window)


def _longest_text(borders: tuple[int, ...]) -> int:
    return max(end - first for first, end in pairwise(borders))


def _passed_texts(
    query: torch.Tensor, attention_mask: torch.Tensor | None, cu_seq_lens_q: torch.Tensor | None = None, **_: Any
) -> Texts | None:
    """Return the texts that a batch names: of a model whose masks do not depend on positions, or a single one.

    A mask that was left out has no window within the length of the sequence.
    """
    if cu_seq_lens_q is None:
        return None
    is_single = len(cu_seq_lens_q) == 2
    if attention_mask is None:
        borders = (0, query.shape[2]) if is_single else tuple(cu_seq_lens_q.tolist())
        return Texts(borders, cu_seq_lens_q, _longest_text(borders), None)
    if is_single:
        return None
    raise TrainingFailure(
        "config_error",
        "The attention of this model does not separate the texts of a sequence: leave `packing` out, and set "
        "`extra.padding_free` to false.",
    )


def _is_padded_at_end(mask: torch.Tensor | None) -> bool:
    """Return True if there is a mask of padding, and no token follows padding."""
    if mask is None:
        return False
    tokens = mask.bool()
    return not bool((tokens[:, 1:] & ~tokens[:, :-1]).any())


def supports_kernel(device: torch.device) -> bool:
    """Return True if a GPU is of a generation that torch's kernel for texts of several lengths supports."""
    capability: tuple[int, int] = torch.cuda.get_device_capability(device)
    return capability >= _FIRST_CAPABILITY


def _has_kernel(query: torch.Tensor, value: torch.Tensor, texts: Texts) -> bool:
    """Return True if torch's kernel for texts of several lengths applies."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and _compute_type(query) in (torch.float16, torch.bfloat16)
        and value.shape[-1] <= width <= _WIDEST_HEAD
        and width % _WIDTH_STEP == 0
        and (texts.window is None or "window_size" in _PARAMETERS)
        and _kernel_works(query.device)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a compiler would look into the check
def _kernel_works(device: torch.device) -> bool:
    return supports_kernel(device) and kernel_failure(device) is None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _repeats_keys(device: torch.device) -> bool:
    return _form_failure(device, False, varlen_attn) is not None


def kernel_failure(device: torch.device, kernel: Callable[..., Any] = varlen_attn) -> str | None:
    """Return why the kernel cannot be used on a device: an error, or other results than those of sdpa; None if it can.

    Two small texts are computed once per process, and again with repeated keys and values if that fails with fewer
    heads of them than of queries. It draws no random numbers of the run.
    """
    return _form_failure(device, False, kernel) and _form_failure(device, True, kernel)


@cache
def _form_failure(device: torch.device, repeats_keys: bool, kernel: Callable[..., Any]) -> str | None:
    """Return why the kernel cannot be called in one of two ways; None if it can."""

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, texts: Texts) -> torch.Tensor:
        return _at_once(query, key, value, texts, None, repeats_keys=repeats_keys, kernel=kernel)

    return _find_failure(attention, device, (0, 24, _CHECKED_TOKENS), (4, 2), _CHECKED_WIDTH)


def batch_texts(device: torch.device, architecture: PretrainedConfig, length: int) -> str | None:
    """From now on, compute the texts of a sequence as a batch if all have this length, where the device gains by it.

    cuDNN prepares a plan for each new shape, so this is for one length: that at which the texts of a run are truncated.
    It draws no random numbers of the run. Call it before the first forward pass, since it computes gradients.

    Returns:
        Why that cannot be done on a device that would gain: an error, or other results than those of sdpa for two texts
        with heads as the model's. None if it is done, or nothing is gained.
    """
    global _batched_length
    _batched_length = None
    text = architecture.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads is None or not _gains_by_batches(device, length):
        return None
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    if width > _WIDEST_BATCHED_HEAD:
        return None

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, texts: Texts) -> torch.Tensor:
        return _as_batch(query, key, value, texts.longest, None)

    failure = _find_failure(attention, device, (0, _SHORTEST_BATCHED, 2 * _SHORTEST_BATCHED), (heads, kv_heads), width)
    if failure is None:
        _batched_length = length
    return failure


def batched_length() -> int | None:
    """Return the number of tokens of the texts that are computed as a batch if all have it; None: no texts are."""
    return _batched_length


def _gains_by_batches(device: torch.device, length: int) -> bool:
    return (
        length >= _SHORTEST_BATCHED
        and length % _BATCHED_STEP == 0
        and torch.cuda.get_device_capability(device)[0] == _BATCH_GENERATION
        and _cudnn_version() >= _FIRST_CUDNN
    )


def _cudnn_version() -> int:
    try:
        return torch.backends.cudnn.version() or 0
    except RuntimeError:  # the library path of the process has an older one than torch was built with
        return 0


def _are_batch(query: torch.Tensor, value: torch.Tensor, texts: Texts) -> bool:
    """Return True if all texts have the length of which batches are made, and no window within it."""
    return (
        _batched_length is not None
        and texts.longest == _batched_length
        and texts.longest * (texts.on_device.shape[0] - 1) == query.shape[2]
        and (texts.window is None or texts.window >= texts.longest)
        and value.shape[-1] == query.shape[-1] <= _WIDEST_BATCHED_HEAD
    )


def _find_failure(
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Texts], torch.Tensor],
    device: torch.device,
    borders: tuple[int, ...],
    heads: tuple[int, int],
    width: int,
) -> str | None:
    """Return why an attention cannot be used on a device: an error, or other results and gradients than those of sdpa.

    Args:
        attention: takes queries, keys, values and texts.
        device: the device.
        borders: those of the texts that are computed.
        heads: number of heads of queries, and of keys and values.
        width: that of a head.
    """
    generator = torch.Generator(device).manual_seed(0)
    texts = Texts(borders, torch.tensor(borders, dtype=torch.int32, device=device), _longest_text(borders), None)
    shapes = ((1, borders[-1], count, width) for count in (heads[0], heads[1], heads[1]))
    # In memory, the heads of a token follow each other, as in a model.
    states = [torch.randn(shape, generator=generator, device=device).bfloat16().requires_grad_() for shape in shapes]

    def compute_results(compute: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        out = compute(*(state.transpose(1, 2) for state in states))
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), states)]

    def each_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        parts = [
            functional.scaled_dot_product_attention(
                query[:, :, first:end], repeat_kv(key, groups)[:, :, first:end],
                repeat_kv(value, groups)[:, :, first:end], is_causal=True,
            )
            for first, end in pairwise(borders)
        ]  # fmt: skip
        return torch.cat(parts, dim=2).transpose(1, 2)

    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            computed = compute_results(lambda query, key, value: attention(query, key, value, texts))
            with _without_plans(device):
                expected = compute_results(each_alone)
            differences = [
                float((tensor.float() - other.float()).norm() / other.float().norm())
                for tensor, other in zip(computed, expected, strict=True)
            ]
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if classify_error(error).code == OUT_OF_MEMORY:
            raise
        return f"it fails: {one_line(error)}"
    excessive = [difference for difference in differences if not difference <= _CHECKED_TOLERANCE]  # NaN is wrong too
    return f"its results differ by {max(excessive):.1g} from those of sdpa" if excessive else None


def _compute_type(tensor: torch.Tensor) -> torch.dtype:
    """Return the data type in which the current precision computes attention."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    texts: Texts,
    scaling: float | None,
    *,
    repeats_keys: bool = False,
    kernel: Callable[..., Any] = varlen_attn,
    parameters: frozenset[str] = _PARAMETERS,
) -> torch.Tensor:
    """Compute the attention of one sequence of texts with a kernel that has these parameters.

    torch 2.10 and 2.11 hand fewer heads of keys and values to flash attention, which takes them, without a parameter
    for it.
    """
    width, value_width, dtype = query.shape[-1], value.shape[-1], _compute_type(query)
    groups = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {}
    if repeats_keys:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    elif "enable_gqa" in parameters:
        options["enable_gqa"] = groups > 1
    if "scale" in parameters:
        options["scale"] = scaling
    elif scaling is not None:
        query = query * (scaling * width**0.5)
    if "window_size" in parameters:
        options["window_size"] = (-1 if texts.window is None else texts.window - 1, 0)
    else:
        options["is_causal"] = True
    if value_width < width:
        value = functional.pad(value, (0, width - value_width))
    # The gradient of an index or of a slice would be copied into a tensor of zeros.
    query, key, value = (tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in (query, key, value))
    borders, longest = texts.on_device, texts.longest
    result: torch.Tensor = kernel(query, key, value, borders, borders, longest, longest, **options)
    if value_width < width:
        result = result[..., :value_width]
    return result.unsqueeze(0)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it would be compiled again for every number of texts
def _as_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, scaling: float | None
) -> torch.Tensor:
    """Compute the attention of one sequence of texts that all have this length; nothing is copied."""
    dtype, is_grouped = _compute_type(query), query.shape[1] != key.shape[1]
    query, key, value = (
        tensor.squeeze(0).unflatten(1, (-1, length)).transpose(0, 1).to(dtype) for tensor in (query, key, value)
    )
    with sdpa_kernel(_BATCH_KERNELS, set_priority=True) if query.is_cuda else nullcontext():
        result = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=is_grouped
        )
    result = result.transpose(1, 2).flatten(0, 1).unsqueeze(0)
    if result.requires_grad:
        # torch keeps cuDNN's plan for other gradients of the result too, whatever their layout in memory.
        result.register_hook(torch.Tensor.contiguous)
    return result


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the mask of one text of which each token attends to a window; None if all of it is in the window."""
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return ((distance >= 0) & (distance < window))[None, None]


AttentionInterface.register(VARLEN, compute_attention)
AttentionMaskInterface.register(VARLEN, make_mask)
