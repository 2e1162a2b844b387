"""Fields of a training configuration: name, type, bounds, default. Checks across fields: `rules.py`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from anneal.contracts.field_types import GgufType, ModelName, Strict, Traits
from anneal.contracts.human_numbers import COUNT, SECONDS, human_numbers
from anneal.contracts.methods import (
    DEFAULT_METHOD,
    METHODS,
    DpoOptions,
    GkdOptions,
    KtoOptions,
    OrpoOptions,
    RlhfOptions,
    SimpoOptions,
    TrainingMethod,
    method_of,
)
from anneal.contracts.plugins import Plugin, checked_template
from anneal.contracts.prompts import MOST_PROMPT_CHARACTERS, PredictOptions, SamplePrompts
from anneal.contracts.training_config.optimizers import OptimizerOptions, SchedulerOptions

MOST_STEPS = 100_000_000

Steps = Annotated[int, Field(ge=1, le=MOST_STEPS), COUNT]

Interval = Annotated[
    Annotated[Steps, Tag("steps")] | Annotated[Literal["epoch"], Tag("epoch")],
    Discriminator(lambda value: "epoch" if value == "epoch" else "steps"),
]
"""Optimizer steps between two events, or `epoch`: after each pass over the data."""

LogSteps = Annotated[int, Field(ge=0, le=MOST_STEPS), COUNT]

BatchSize = Annotated[int, Field(ge=1, le=4096), COUNT]

MOST_MICRO_BATCHES = 65_536
MicroBatches = Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES), COUNT]

Rank = Annotated[int, Field(ge=1, le=4096), COUNT]

LoraAlpha = Annotated[int, Field(ge=1, le=65_536), COUNT]

KeptCheckpoints = Annotated[int, Field(ge=1, le=10_000), COUNT]

Patience = Annotated[int, Field(ge=1, le=10_000), COUNT]

SampleLength = Annotated[int, Field(ge=1, le=512), COUNT]

LayerIndex = Annotated[int, Field(ge=0, le=10_000)]

TokenId = Annotated[int, Field(ge=0, le=10_000_000)]

LoraInit = Literal["default", "gaussian", "orthogonal", "pissa", "olora", "loftq"]
"""Values of peft's `init_lora_weights`; `default` is its `true`."""

Allocations = Annotated[int, Field(ge=1_000, le=10_000_000), COUNT]

Rows = Annotated[int, Field(ge=1, le=1_000_000_000), COUNT]

Length = Annotated[int, Field(ge=2, le=10_000_000), COUNT]

Seconds = Annotated[float, Field(gt=0, le=31_536_000), SECONDS]

TrackerName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^/\\#?%:\x00-\x1f]+$")]
"""Name in an experiment tracker; the characters are those that W&B accepts in a project."""

REVISION = r"^[A-Za-z0-9_][A-Za-z0-9_./-]*$"
"""Pattern of a branch, tag or commit of a hub model."""

ModuleName = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.]+$")]

MetricName = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_.-]+$")]

ChatTemplate = Annotated[str, Field(min_length=1, max_length=32_768), AfterValidator(checked_template)]

DType = Literal["bfloat16", "float16", "float32"]

Optimizer = Literal[
    "paged_adamw_8bit", "paged_adamw_32bit", "paged_lion_8bit", "paged_lion_32bit", "paged_ademamix_8bit",
    "paged_ademamix_32bit", "adamw_torch", "adamw_torch_fused", "adamw_torch_4bit", "adamw_torch_8bit", "adamw_8bit",
    "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit", "adafactor", "adagrad", "sgd", "rmsprop",
    "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit",
]  # fmt: skip

Scheduler = Literal[
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "polynomial",
    "inverse_sqrt",
]

LossOn = Literal["all", "completion", "assistant"]
Attention = Literal["eager", "sdpa", "varlen", "flash_attention_2", "flash_attention_3"]


class TrainerOptions(Strict):
    """Fields of `extra`: options of the trainer that few runs need."""

    max_grad_norm: Annotated[float, Traits()] = Field(
        default=1.0, ge=0, le=1e6, description="Maximum gradient norm for clipping; 0 disables clipping."
    )
    adam_beta1: Annotated[float, Traits()] = Field(
        default=0.9, ge=0, lt=1, description="Beta1 of Adam and Lion optimizers."
    )
    adam_beta2: Annotated[float, Traits()] = Field(
        default=0.999, ge=0, lt=1, description="Beta2 of Adam and Lion optimizers."
    )
    adam_epsilon: Annotated[float, Traits()] = Field(
        default=1e-8, gt=0, le=1, description="Epsilon of Adam optimizers, for numerical stability."
    )
    optim_args: Annotated[OptimizerOptions, Traits()] = Field(
        default_factory=OptimizerOptions, description="Options of the optimizer `optim`."
    )
    lr_scheduler_kwargs: Annotated[SchedulerOptions, Traits()] = Field(
        default_factory=SchedulerOptions, description="Options of the schedule `lr_scheduler_type`."
    )
    packing_strategy: Annotated[Literal["bfd", "wrapped"], Traits(supervised_only=True)] = Field(
        default="bfd",
        description="`bfd` packs whole documents by best-fit decreasing; `wrapped` concatenates all documents and "
        "splits the result into sequences.",
    )
    tiled_mlp: Annotated[bool, Traits()] = Field(
        default=False,
        description="Compute the MLP of a layer in tiles of 4,096 tokens, and again in the backward pass: saves memory "
        "with very long sequences. Estimates do not count the saving.",
    )
    padding_free: Annotated[bool | None, Traits(affects="step_time", supervised_only=True)] = Field(
        default=None,
        description="Concatenate the rows of a micro-batch instead of padding them to one length; `null`: where the "
        "attention computes each row by itself (`varlen`, flash-attn) and no plugin makes or reads the batches.",
    )
    eval_on_start: Annotated[bool, Traits(in_probe=False, needs_eval_data=True)] = Field(
        default=False, description="Also evaluate before the first step."
    )
    eval_batch_size: Annotated[BatchSize | None, Traits(in_probe=False, needs_eval_data=True)] = Field(
        default=None, description="Batch size per device for evaluation; `null` uses `batch_size`."
    )
    double_quant: Annotated[bool, Traits(four_bit_only=True)] = Field(
        default=True, description="Nested quantization: also quantize the constants of 4-bit quantization."
    )
    metrics: Annotated[list[MetricName], Traits(in_probe=False, needs_eval_data=True)] = Field(
        default_factory=list,
        max_length=20,
        description="Metric functions for evaluations, installed on the workers by the operator.",
    )
    peak_tflops: Annotated[float | None, Traits()] = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Peak throughput of the device in TFLOP/s, for `mfu`; `null` uses the known value of the device.",
    )
    spike_threshold: Annotated[float, Traits(in_probe=False)] = Field(
        default=6.0,
        ge=1,
        le=1000,
        description="Loss spike: this many times its usual noise above the median of the last 16 steps.",
    )
    max_rewinds: Annotated[int, Traits(in_probe=False)] = Field(
        default=3, ge=0, le=100, description="Maximum number of automatic rewinds per run."
    )
    distributions_steps: Annotated[Steps | None, Traits(in_probe=False)] = Field(
        default=None,
        description="Steps between two histograms of weights and gradients; the first 1,000 are kept.",
    )
    memory_profile: Annotated[bool | Literal["steps"], Traits(in_probe=False)] = Field(
        default=False,
        description="Record the memory use of each of the first 10,000 steps in a file of the output; `true` also "
        "records every allocation on a GPU.",
    )
    memory_profile_entries: Annotated[Allocations, Traits(in_probe=False)] = Field(
        default=100_000,
        description="Maximum number of allocations that `memory_profile` `true` records: the last ones.",
    )
    wall_clock_breakdown: Annotated[bool, Traits()] = Field(
        default=False,
        description="Also report the seconds of forward passes, backward passes and the optimizer with each metric.",
    )
    eval_log_steps: Annotated[Steps | None, Traits(in_probe=False, needs_eval_data=True)] = Field(
        default=None,
        description="Batches of an evaluation between two lines in the log with its progress and loss so far.",
    )
    probe: Annotated[bool, Traits(in_probe=False)] = Field(
        default=False,
        description="Only measure: train two steps on the longest rows and save nothing. "
        "`POST /v1/runs/estimate` with `probe` creates such runs.",
    )
    predict: Annotated[PredictOptions | None, Traits(in_probe=False)] = Field(
        default=None,
        description="Options of a prediction, which has no other of `extra` than those about its model. "
        "`POST /v1/runs/predict` creates such runs.",
    )
    prune_fraction: Annotated[float | None, Traits(in_probe=False)] = Field(
        default=None,
        gt=0,
        lt=1,
        description="Set this fraction of the weights of each linear layer of the output to zero, those of the "
        "smallest magnitude; only for runs that train all weights.",
    )
    data_source: Annotated[Plugin | None, Traits()] = Field(
        default=None, description="Plugin that provides the rows instead of the file."
    )
    model_factory: Annotated[Plugin | None, Traits()] = Field(
        default=None, description="Plugin that creates the base model."
    )
    optimizer: Annotated[Plugin | None, Traits()] = Field(default=None, description="Plugin that replaces `optim`.")
    scheduler: Annotated[Plugin | None, Traits()] = Field(
        default=None, description="Plugin that replaces `lr_scheduler_type`."
    )
    checkpoint_engine: Annotated[Plugin | None, Traits(in_probe=False)] = Field(
        default=None, description="Plugin that stores a replica of each checkpoint."
    )
    tokenizer: Annotated[Plugin | None, Traits()] = Field(
        default=None, description="Plugin that creates the tokenizer, or changes that of the base model."
    )
    collator: Annotated[Plugin | None, Traits()] = Field(
        default=None, description="Plugin that makes the batches, or changes those of the method; not for `rlhf`."
    )
    callbacks: Annotated[list[Plugin], Traits(in_probe=False)] = Field(
        default_factory=list, max_length=10, description="Plugins that are called between steps, in this order."
    )


_EXTRA_NUMBERS = human_numbers(TrainerOptions)


def _with_numbers(extra: dict[str, Any]) -> dict[str, Any]:
    """Convert numbers as text, so that `extra` contains plain ones for those that read it unvalidated."""
    return {name: _EXTRA_NUMBERS[name].parse_number(it) if name in _EXTRA_NUMBERS else it for name, it in extra.items()}


class TrainingConfig(Strict):
    """Training configuration: model, method and hyperparameters. `validation.config_errors` checks it as a whole."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "base_model": "my-model", "method": "qlora", "lora_r": 16, "learning_rate": 2e-4,
                "batch_size": 4, "gradient_accumulation_steps": 4, "epochs": 1, "max_seq_length": 1024,
            }
        }
    )  # fmt: skip

    base_model: Annotated[ModelName, Traits(affects="duration")] = Field(
        description="Folder below the models root, hub name, or `run_…` for the output of a finished run."
    )
    tokenizer: Annotated[ModelName | None, Traits()] = Field(
        default=None,
        description="Model whose tokenizer is used and saved with the output, with its chat template: a folder below "
        "the models root, or a hub name; `null` uses that of the base model.",
    )
    method: Annotated[TrainingMethod, Field(strict=False), Traits(affects="step_time")] = Field(
        default=DEFAULT_METHOD,
        description="Training method: determines the objective, and which weights are trained.",
    )

    lora_r: Annotated[Rank | None, Traits(affects="step_time", adapter_only=True, depends_on_method=True)] = Field(
        default=16, description="LoRA rank; `null` trains all weights."
    )
    lora_alpha: Annotated[LoraAlpha, Traits(adapter_only=True)] = Field(
        default=32, description="LoRA scaling factor: adapters are scaled by `lora_alpha / lora_r`."
    )
    lora_dropout: Annotated[float, Traits(adapter_only=True, usual=(0, 0.5))] = Field(
        default=0.05, ge=0, lt=1, description="Dropout probability of the LoRA layers."
    )
    target_modules: Annotated[list[ModuleName] | None, Traits(affects="step_time", adapter_only=True)] = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="Names of the modules that get an adapter; `null`: all linear layers.",
    )
    layers_to_transform: Annotated[list[LayerIndex] | None, Traits(affects="step_time", adapter_only=True)] = Field(
        default=None,
        min_length=1,
        max_length=1_000,
        description="Numbers of the layers that get an adapter, from 0; `null`: all.",
    )
    trainable_token_indices: Annotated[list[TokenId] | None, Traits(affects="step_time", adapter_only=True)] = Field(
        default=None,
        min_length=1,
        max_length=5_000,
        description="Ids of the tokens whose embeddings are trained and saved with the adapter.",
    )
    init_lora_weights: Annotated[LoraInit, Traits(adapter_only=True)] = Field(
        default="default",
        description="First values of the adapter. `default`, `gaussian` and `orthogonal` start as the base model does. "
        "`pissa` takes the largest singular values of the base weights, and `olora` their QR decomposition; the output "
        "is converted to twice the rank, for the unchanged base. `loftq` corrects the error of a base in 4 bits.",
    )
    use_rslora: Annotated[bool, Traits(adapter_only=True)] = Field(
        default=False, description="Rank-stabilized LoRA: scale by `lora_alpha / sqrt(lora_r)`."
    )
    use_dora: Annotated[bool, Traits(affects="step_time", adapter_only=True)] = Field(
        default=False, description="Weight-decomposed LoRA (DoRA)."
    )
    modules_to_save: Annotated[list[ModuleName] | None, Traits(affects="step_time", adapter_only=True)] = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="Modules that are trained in full and saved with the adapter.",
    )

    learning_rate: Annotated[float, Traits(changeable_on_resume=True)] = Field(
        default=2e-4, gt=0, le=10, description="Peak learning rate; the default depends on the method."
    )
    batch_size: Annotated[BatchSize, Traits(affects="step_time")] = Field(
        default=4,
        description="Sequences per device and micro-batch. If neither this nor `gradient_accumulation_steps` is set, a "
        "run on a GPU measures which size is fastest, with as many rows per step. `rlhf`: completions; `batch_size` x "
        "`gradient_accumulation_steps` of them are generated at once.",
    )
    gradient_accumulation_steps: Annotated[MicroBatches, Traits(affects="step_time")] = Field(
        default=4, description="Micro-batches per optimizer step."
    )
    epochs: Annotated[float, Traits(changeable_on_resume=True, affects="duration")] = Field(
        default=3, gt=0, le=10_000, description="Number of passes over the data; may be a fraction."
    )
    max_steps: Annotated[Steps | None, Traits(changeable_on_resume=True, affects="duration")] = Field(
        default=None, description="Total number of optimizer steps; overrides `epochs`."
    )
    min_steps: Annotated[Steps | None, Traits(changeable_on_resume=True, affects="duration")] = Field(
        default=None, description="Minimum number of optimizer steps; the data is repeated until then."
    )
    warmup_ratio: Annotated[float, Traits(usual=(0, 0.5))] = Field(
        default=0.03, ge=0, lt=1, description="Fraction of steps used for linear warmup."
    )
    weight_decay: Annotated[float, Traits(changeable_on_resume=True, usual=(0, 0.5))] = Field(
        default=0.01, ge=0, le=10, description="Weight decay; not applied to biases and norms."
    )
    optim: Annotated[Optimizer, Traits()] = Field(
        default="paged_adamw_8bit",
        description="Optimizer, by its name in transformers; by default `adamw_torch_fused` for an adapter, and "
        "`paged_adamw_8bit` for all weights.",
    )
    lr_scheduler_type: Annotated[Scheduler, Traits()] = Field(
        default="cosine", description="Learning-rate schedule, by its name in transformers."
    )
    neftune_noise_alpha: Annotated[float | None, Traits(supervised_only=True, usual=(0.1, 50))] = Field(
        default=None, gt=0, le=1000, description="NEFTune noise on embeddings; `null` disables it."
    )

    dtype: Annotated[DType | None, Traits(affects="step_time")] = Field(
        default=None,
        description="Data type of the computation, and of frozen weights that are not quantized; trained weights have "
        "32 bits. `null`: `bfloat16` on a GPU that supports it, `float16` on others, `float32` on a CPU, where "
        "`bfloat16` takes less memory and more time.",
    )
    weights_dtype: Annotated[Literal["float32", "bfloat16"], Traits(affects="step_time")] = Field(
        default="float32",
        description="Data type of the weights of a run that trains all of them. `bfloat16` halves their memory and "
        "that of gradients; an optimizer of torchao (`adamw_torch_8bit` or `_4bit`) rounds updates stochastically. The "
        "operator installs torchao on the workers.",
    )
    load_in_4bit: Annotated[bool, Traits(affects="step_time", depends_on_method=True)] = Field(
        default=True,
        description="Load the base model in 4-bit; if unset, false for `full`, `lora`, without adapter and with 8-bit.",
    )
    load_in_8bit: Annotated[bool, Traits(affects="step_time", depends_on_method=True)] = Field(
        default=False, description="Load the base model in 8-bit."
    )
    bnb_4bit_compute_dtype: Annotated[DType, Traits(four_bit_only=True)] = Field(
        default="bfloat16", description="Compute data type of 4-bit layers."
    )
    bnb_4bit_quant_type: Annotated[Literal["nf4", "fp4"], Traits(four_bit_only=True)] = Field(
        default="nf4", description="4-bit data type (NF4 or FP4)."
    )

    gradient_checkpointing: Annotated[bool | Literal["selective", "auto"], Traits(affects="step_time")] = Field(
        default="auto",
        description="Recompute activations in the backward pass to save memory at the cost of time: `true` for all "
        "layers, `selective` for half of them, `auto` for as few as the memory requires.",
    )
    activation_offload: Annotated[bool, Traits(affects="step_time")] = Field(
        default=False,
        description="Keep the activations that are not recomputed in host memory until the backward pass; needs a GPU. "
        "Estimates do not count the saving.",
    )
    attn_implementation: Annotated[Attention | None, Traits(affects="step_time")] = Field(
        default=None,
        description="Attention implementation; `null` selects the best for device and model: flash-attn if it is "
        "installed, else `varlen` (torch's kernel for texts without padding between them; on a CPU, `sdpa` for each "
        "text), else `sdpa`.",
    )
    torch_compile: Annotated[bool, Traits(affects="step_time")] = Field(
        default=False,
        description="Compile the layers of the model with `torch.compile` before the first step; needs a C++ compiler "
        "on the worker.",
    )

    max_seq_length: Annotated[Length | None, Traits(affects="step_time")] = Field(
        default=2048,
        description="Maximum length in tokens: longer sequences are truncated (`reward` and `rlhf` skip longer pairs "
        "and prompts); `null` uses the model's own limit.",
    )
    packing: Annotated[bool, Traits(affects="step_time", supervised_only=True)] = Field(
        default=False, description="Pack several documents into one sequence."
    )
    truncation_mode: Annotated[Literal["keep_start", "keep_end"], Traits()] = Field(
        default="keep_start", description="Which end of a sequence that is too long is kept."
    )
    loss_on: Annotated[LossOn | None, Traits(supervised_only=True)] = Field(
        default=None,
        description="Tokens in the loss: `all`; the `completion` (of a chat: its last answer); all `assistant` ones. "
        "`null` depends on the training data: the completion of `prompt_completion` and all tokens of the others as in "
        "TRL, but the answers of chats with a `weight` as at OpenAI.",
    )
    chat_template: Annotated[ChatTemplate | None, Traits()] = Field(
        default=None,
        description="Chat template, saved with the output: Jinja text, or the name of an installed plugin; `null` uses "
        "that of the tokenizer.",
    )
    overfit_first_batch: Annotated[bool, Traits()] = Field(
        default=False, description="Train on the first batch only, as a sanity check."
    )
    seed: Annotated[int, Traits()] = Field(
        default=42, ge=0, le=2**32 - 1, description="Random seed of Python, NumPy, torch and the data order."
    )

    save_steps: Annotated[Interval, Traits(changeable_on_resume=True, affects="duration")] = Field(
        default=100, description="Steps between two checkpoints, or `epoch`: after each epoch."
    )
    save_total_limit: Annotated[KeptCheckpoints | None, Traits(changeable_on_resume=True)] = Field(
        default=3, description="Maximum number of checkpoints to keep; `null` keeps all."
    )
    export: Annotated[Literal["best", "last"], Traits(changeable_on_resume=True, in_probe=False)] = Field(
        default="best",
        description="Weights of the output: those of the checkpoint with the `best` evaluation (without one, the last "
        "ones), or always the `last` ones.",
    )
    output: Annotated[
        Literal["adapter", "merged"], Traits(changeable_on_resume=True, in_probe=False, adapter_only=True)
    ] = Field(
        default="adapter",
        description="Form of the output of an adapter: the `adapter` alone, or `merged` into its base model, which "
        "transformers loads without peft.",
    )
    gguf: Annotated[GgufType | None, Traits(changeable_on_resume=True, in_probe=False)] = Field(
        default=None,
        description="Also write the output as `model.gguf` with weights of this type, such as `Q4_K_M`, and a "
        "`Modelfile` for Ollama, by the programs of llama.cpp, which the operator installs on the workers; an adapter "
        "must be `merged` for it.",
    )
    logging_steps: Annotated[LogSteps, Traits(changeable_on_resume=True)] = Field(
        default=10,
        description="Steps between two logged metrics; the last step is always logged, and 0 logs only that.",
    )
    eval_steps: Annotated[Interval | None, Traits(changeable_on_resume=True, affects="duration", in_probe=False)] = (
        Field(default=None, description="Steps between two evaluations, or `epoch`: after each epoch.")
    )
    eval_split: Annotated[float, Traits(affects="step_time", in_probe=False)] = Field(
        default=0.0, ge=0, lt=1, description="Fraction of the data held out for evaluation."
    )
    max_eval_rows: Annotated[Rows | None, Traits(affects="step_time", in_probe=False, needs_eval_data=True)] = Field(
        default=None,
        description="Evaluate on at most so many rows: the first ones of the evaluation data; `null` uses all.",
    )
    sample_steps: Annotated[Interval | None, Traits(changeable_on_resume=True, in_probe=False)] = Field(
        default=None,
        description="Steps between two samples, or `epoch`: the model completes each of `sample_prompts`, also after "
        "the last step.",
    )
    sample_prompts: Annotated[SamplePrompts, Traits(changeable_on_resume=True, in_probe=False, needs_samples=True)] = (
        Field(
            default_factory=list,
            max_length=8,
            description="Prompts of the samples: texts, which are user messages if the data is chats, or chats "
            f"(`[{{role, content}}, …]`); together at most {MOST_PROMPT_CHARACTERS:,} characters.",
        )
    )
    sample_max_new_tokens: Annotated[
        SampleLength, Traits(changeable_on_resume=True, in_probe=False, needs_samples=True)
    ] = Field(default=64, description="Maximum number of tokens of each sample.")
    sample_temperature: Annotated[float, Traits(changeable_on_resume=True, in_probe=False, needs_samples=True)] = Field(
        default=1.0, ge=0, le=10, description="Sampling temperature of the samples; 0 selects greedy decoding."
    )

    time_limit_seconds: Annotated[
        Seconds | None, Traits(changeable_on_resume=True, affects="duration", in_probe=False)
    ] = Field(default=None, description="Save and stop after this training time in seconds.")
    stop_at_step: Annotated[Steps | None, Traits(changeable_on_resume=True, affects="duration", in_probe=False)] = (
        Field(default=None, description="Save and stop after this step of the run.")
    )
    early_stopping_patience: Annotated[
        Patience | None, Traits(changeable_on_resume=True, affects="duration", in_probe=False)
    ] = Field(
        default=None,
        description="Stop after this many evaluations without a better loss (`rlhf`: reward).",
    )
    on_non_finite: Annotated[Literal["stop", "rewind"], Traits(changeable_on_resume=True, in_probe=False)] = Field(
        default="stop",
        description="On NaN or Inf loss or gradients: `stop` fails the run; `rewind` restores the last checkpoint and "
        "skips the batch. Either way its rows are reported.",
    )
    on_spike: Annotated[Literal["ignore", "stop", "rewind"], Traits(changeable_on_resume=True, in_probe=False)] = Field(
        default="ignore", description="On a loss spike (`extra.spike_threshold`): as `on_non_finite`, or ignore it."
    )
    on_out_of_memory: Annotated[Literal["repair", "stop"], Traits(changeable_on_resume=True, in_probe=False)] = Field(
        default="repair",
        description="On out of memory: `repair` continues from the last checkpoint with smaller micro-batches and as "
        "many more of them, then with `gradient_checkpointing`; `stop` fails the run.",
    )

    revision: Annotated[str | None, Traits()] = Field(
        default=None, min_length=1, max_length=200, pattern=REVISION,
        description="Branch, tag or commit of a hub model.",
    )  # fmt: skip
    report_to: Annotated[
        list[Literal["wandb", "mlflow", "tensorboard"]], Traits(changeable_on_resume=True, in_probe=False)
    ] = Field(default_factory=list, max_length=3, description="Experiment trackers that also receive the metrics.")
    wandb_project: Annotated[TrackerName | None, Traits(changeable_on_resume=True, in_probe=False)] = Field(
        default=None, description="W&B project; `null`: `WANDB_PROJECT` of the worker, else `anneal`."
    )
    wandb_entity: Annotated[TrackerName | None, Traits(changeable_on_resume=True, in_probe=False)] = Field(
        default=None,
        description="W&B user or team that owns the project; `null`: `WANDB_ENTITY` of the worker, else the key's own.",
    )
    wandb_name: Annotated[TrackerName | None, Traits(changeable_on_resume=True, in_probe=False)] = Field(
        default=None, description="Name of the run in W&B; `null`: the id of the run."
    )
    wandb_group: Annotated[TrackerName | None, Traits(changeable_on_resume=True, in_probe=False)] = Field(
        default=None, description="W&B group of the run; `null`: `WANDB_RUN_GROUP` of the worker, else none."
    )
    push_to_hub: Annotated[str | None, Traits(changeable_on_resume=True, in_probe=False)] = Field(
        default=None, max_length=193, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}$",
        description="Hub name (`owner/name`) to push the output to; a new repository is private.",
    )  # fmt: skip
    dpo: Annotated[DpoOptions, Traits()] = Field(default_factory=DpoOptions, description="Options of method `dpo`.")
    kto: Annotated[KtoOptions, Traits(affects="step_time")] = Field(
        default_factory=KtoOptions, description="Options of method `kto`."
    )
    orpo: Annotated[OrpoOptions, Traits()] = Field(default_factory=OrpoOptions, description="Options of method `orpo`.")
    simpo: Annotated[SimpoOptions, Traits()] = Field(
        default_factory=SimpoOptions, description="Options of method `simpo`."
    )
    rlhf: Annotated[RlhfOptions, Traits(affects="step_time")] = Field(
        default_factory=RlhfOptions, description="Options of method `rlhf`."
    )
    gkd: Annotated[GkdOptions, Traits(affects="step_time")] = Field(
        default_factory=GkdOptions, description="Options of method `gkd`."
    )
    extra: Annotated[dict[str, Any], AfterValidator(_with_numbers), Traits(affects="step_time")] = Field(
        default_factory=dict, description="Further options of the trainer; unknown ones are an error."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults_of_method(cls, fields: Any) -> Any:
        """Replace the declared defaults by those of the method."""
        if not isinstance(fields, Mapping):
            return fields
        rank = fields.get("lora_r", cls.model_fields["lora_r"].default)
        return {**method_of(fields).default_fields(rank), **fields}

    @property
    def generation(self) -> RlhfOptions | None:
        """Options of the method if it generates completions, else None."""
        return getattr(self, self.method) if METHODS[self.method].generates else None

    @property
    def has_kl_passes(self) -> bool:
        """True if each step has forward passes on prompts with the answers of other rows, to estimate a KL term."""
        return METHODS[self.method].options is KtoOptions and self.kto.loss_type == "kto"

    @property
    def trainer_options(self) -> TrainerOptions:
        """`extra`, validated and with all defaults; raises `pydantic.ValidationError` if it is invalid."""
        return TrainerOptions.model_validate(self.extra)
