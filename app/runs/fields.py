"""Every field of a training configuration: name, type, bounds, default. Together: `config.py`."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from app.runs.counts import COUNT, SECONDS
from app.runs.plugins import Plugin
from app.runs.rewards import ModelName, Rewards, Strict


class TrainingMethod(StrEnum):
    """An objective and an adapter: what a run optimises and which weights train."""

    full = "full"
    lora = "lora"
    qlora = "qlora"
    dpo = "dpo"
    reward = "reward"
    rlhf = "rlhf"
    sft = "sft"


SUPERVISED = (TrainingMethod.full, TrainingMethod.lora, TrainingMethod.qlora, TrainingMethod.sft)
"""Methods that learn from examples; the one place that lists them."""
PREFERENCE = (TrainingMethod.dpo, TrainingMethod.reward)
"""Methods that learn from pairs of a better and a worse answer."""


class TrainingStatus(StrEnum):
    """Where a run stands; a request to stop is not a status."""

    pending = "pending"
    initializing = "initializing"
    running = "running"
    checkpointing = "checkpointing"
    completed = "completed"
    failed = "failed"
    cancelled = "cancelled"


Steps = Annotated[int, Field(ge=1, le=100_000_000), COUNT]
BatchSize = Annotated[int, Field(ge=1, le=4096), COUNT]
MicroBatches = Annotated[int, Field(ge=1, le=65_536), COUNT]
Length = Annotated[int, Field(ge=2, le=10_000_000), COUNT]
Seconds = Annotated[float, Field(gt=0, le=31_536_000), SECONDS]
ModuleName = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.]+$")]
MetricName = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_.-]+$")]
DType = Literal["bfloat16", "float16", "float32"]
Optimizer = Literal[
    "paged_adamw_8bit", "paged_adamw_32bit", "paged_lion_8bit", "paged_lion_32bit",
    "adamw_torch", "adamw_torch_fused", "adamw_8bit", "lion_8bit", "lion_32bit",
    "adafactor", "sgd", "rmsprop",
]  # fmt: skip
Scheduler = Literal[
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
]
DpoLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "sigmoid_norm",
]  # fmt: skip
"""Losses of TRL that need no further options."""
Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"]


class DpoOptions(Strict):
    """Preference optimisation; for method `dpo` only."""

    beta: float = Field(default=0.1, gt=0, le=100, description="How closely to stay to the reference model.")
    loss_type: DpoLoss = Field(default="sigmoid", description="Form of the loss.")
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Part of the pairs that may be reversed; for `robust`, `exo_pair`, `aot`, `aot_unpaired`.",
    )


class RlhfOptions(Strict):
    """Reinforcement learning from rewards; for method `rlhf` only."""

    algorithm: Literal["grpo", "rloo"] = Field(default="grpo", description="How a completion is held against others.")
    rewards: Rewards = Field(
        default_factory=list, description="What a completion is rewarded for: the weighted sum of these."
    )
    num_generations: int = Field(
        default=8, ge=2, le=1024, description="Completions of a prompt that are held against each other."
    )
    max_completion_length: int = Field(
        default=256, ge=1, le=1_000_000, description="Tokens after which a completion is cut off."
    )
    temperature: float = Field(default=1.0, gt=0, le=100, description="How freely completions are sampled.")
    beta: float = Field(default=0.0, ge=0, le=100, description="How closely to stay to the base model; 0: not at all.")


class TrainerOptions(Strict):
    """What `extra` may hold: options of the trainer that few runs need."""

    max_grad_norm: float = Field(default=1.0, ge=0, le=1e6, description="Clip gradients to this norm; 0: never.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="First decay rate of Adam and Lion.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="Second decay rate of Adam and Lion.")
    adam_epsilon: float = Field(default=1e-8, gt=0, le=1, description="What keeps Adam from dividing by zero.")
    packing_strategy: Literal["bfd", "wrapped"] = Field(
        default="bfd",
        description="How documents are packed: whole ones by best fit, or one long stream cut in pieces.",
    )
    eval_on_start: bool = Field(default=False, description="Evaluate before the first step too.")
    eval_batch_size: int | None = Field(
        default=None, ge=1, le=4096, description="Sequences per device in an evaluation; None: `batch_size`."
    )
    double_quant: bool = Field(default=True, description="Quantise the 4-bit constants too.")
    metrics: list[MetricName] = Field(
        default_factory=list,
        max_length=20,
        description="Metric functions of evaluations that the operator has installed on the workers.",
    )
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="What the device can do at most, in 10^12 operations a second, for `mfu`; None: as known of it.",
    )
    spike_threshold: float = Field(
        default=6.0,
        ge=1,
        le=1000,
        description="A leap of the loss: so many times its usual noise above the median of the last 16 steps.",
    )
    max_rewinds: int = Field(default=3, ge=0, le=100, description="How often a run goes back by itself, in all.")
    distributions_steps: int | None = Field(
        default=None,
        ge=1,
        le=100_000_000,
        description="Steps between two distributions of weights and gradients; of more than 1,000 every second goes.",
    )
    memory_profile: bool | Literal["steps"] = Field(
        default=False,
        description="Memory of every step as a file of the output (of more than 10,000 every second goes); true: on "
        "a GPU every allocation too.",
    )
    probe: bool = Field(
        default=False,
        description="Only measure: two steps on the longest rows, and nothing is saved or kept. "
        "`POST /v1/runs/estimate` with `probe` makes such runs.",
    )
    recipe: Plugin | None = Field(
        default=None,
        description='`{"type": name, …}`: an installed recipe in the place of the method\'s own (docs/plugins.md).',
    )
    data_source: Plugin | None = Field(default=None, description="Where rows come from, in the place of the file.")
    model_factory: Plugin | None = Field(default=None, description="What makes the base model.")
    optimizer: Plugin | None = Field(default=None, description="In the place of `optim`.")
    scheduler: Plugin | None = Field(default=None, description="In the place of `lr_scheduler_type`.")
    checkpoint_engine: Plugin | None = Field(default=None, description="A second place for checkpoints.")


class TrainingConfig(Strict):
    """What to train, from what, and how; checked field by field here and as a whole by `config.problems`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "base_model": "my-model", "method": "qlora", "lora_r": 16, "learning_rate": 2e-4,
                "batch_size": 4, "gradient_accumulation_steps": 4, "epochs": 1, "max_seq_length": 1024,
            }
        }
    )  # fmt: skip

    base_model: ModelName = Field(
        description="A folder below the models root, a hub name, or `run_…` to build on a finished run."
    )
    method: Annotated[TrainingMethod, Field(strict=False)] = Field(
        default=TrainingMethod.qlora,
        description="Objective and adapter: which weights train, and towards what.",
    )

    lora_r: int | None = Field(default=16, ge=1, le=4096, description="Rank of the adapter; None: every weight.")
    lora_alpha: int = Field(default=32, ge=1, le=65_536, description="Scale of the adapter, over its rank.")
    lora_dropout: float = Field(default=0.05, ge=0, lt=1, description="Dropout before the adapter.")
    target_modules: list[ModuleName] | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="Layers that get an adapter; None: all linear ones.",
    )
    use_rslora: bool = Field(default=False, description="Scale by alpha over the root of the rank.")
    use_dora: bool = Field(default=False, description="Train magnitude and direction apart (DoRA).")
    modules_to_save: list[ModuleName] | None = Field(
        default=None, min_length=1, max_length=200, description="Layers trained whole beside the adapter."
    )

    learning_rate: float = Field(default=2e-4, gt=0, le=10, description="Highest learning rate.")
    batch_size: BatchSize = Field(
        default=4,
        description="Sequences per device and micro-batch; `rlhf`: completions, of which a whole round, `batch_size` x "
        "`gradient_accumulation_steps`, is generated at once.",
    )
    gradient_accumulation_steps: MicroBatches = Field(default=4, description="Micro-batches a step.")
    epochs: float = Field(default=3, gt=0, le=10_000, description="Passes over the data; may be a fraction.")
    max_steps: Steps | None = Field(default=None, description="Optimizer steps in all; wins over `epochs`.")
    min_steps: Steps | None = Field(default=None, description="Repeat the data until at least this many steps.")
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1, description="Part of the steps with a rising rate.")
    weight_decay: float = Field(default=0.01, ge=0, le=10, description="Decay of weights that are not norms.")
    optim: Optimizer = Field(default="paged_adamw_8bit", description="Optimizer.")
    lr_scheduler_type: Scheduler = Field(default="cosine", description="Course of the learning rate.")
    neftune_noise_alpha: float | None = Field(default=None, gt=0, le=1000, description="Noise on embeddings.")

    load_in_4bit: bool = Field(
        default=True,
        description="4-bit base; unset it is false for `full`, `lora`, without adapter and beside 8-bit.",
    )
    load_in_8bit: bool = Field(default=False, description="8-bit base.")
    bnb_4bit_compute_dtype: DType = Field(default="bfloat16", description="Type that 4-bit layers compute in.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field(default="nf4", description="Form of the 4-bit numbers.")

    gradient_checkpointing: bool | Literal["selective", "auto"] = Field(
        default="auto",
        description="Recompute activations in the backward pass, which takes less memory and more time: of all layers, "
        "of every second one (`selective`), or as the memory needs (`auto`).",
    )
    activation_offload: bool = Field(default=False, description="Keep activations in host memory.")
    attn_implementation: Attention | None = Field(default=None, description="None: the best for the device.")
    torch_compile: bool = Field(default=False, description="Compile the model before training.")

    max_seq_length: Length | None = Field(
        default=2048,
        description="Tokens a sequence is cut to (`reward` and `rlhf` leave out longer pairs and prompts); None: the "
        "model's own limit.",
    )
    packing: bool = Field(default=False, description="Put several documents in one sequence.")
    truncation_mode: Literal["keep_start", "keep_end"] = Field(
        default="keep_start", description="Which end of a sequence that is too long stays."
    )
    loss_on: Literal["all", "completion", "assistant"] = Field(
        default="all",
        description="Tokens that are learnt: all; the completion (a chat: its last answer); every answer.",
    )
    overfit_first_batch: bool = Field(default=False, description="Train on the first batch only, as a check.")
    seed: int = Field(default=42, ge=0, le=2**32 - 1, description="Seed of python, numpy, torch and the data order.")

    save_steps: Steps = Field(default=100, description="Steps between two checkpoints.")
    save_total_limit: int | None = Field(default=3, ge=1, le=10_000, description="Checkpoints kept; None: all.")
    logging_steps: Steps = Field(default=10, description="Steps between two metrics.")
    eval_steps: Steps | None = Field(default=None, description="Steps between two evaluations.")
    eval_split: float = Field(default=0.0, ge=0, lt=1, description="Part of the data held out for evaluation.")

    time_limit_seconds: Seconds | None = Field(default=None, description="Save and stop after this long in training.")
    stop_at_step: Steps | None = Field(default=None, description="Save and stop after this step of the run.")
    early_stopping_patience: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Stop after so many evaluations without a better loss (`rlhf`: reward).",
    )
    on_non_finite: Literal["stop", "rewind"] = Field(
        default="stop",
        description="When loss or gradients are no number: end, or go back to the last checkpoint and pass over the "
        "step; either way its rows are named.",
    )
    on_spike: Literal["ignore", "stop", "rewind"] = Field(
        default="ignore", description="When the loss leaps by `extra.spike_threshold`: the same, or nothing."
    )
    on_out_of_memory: Literal["repair", "stop"] = Field(
        default="repair",
        description="When memory does not suffice: go on from the last checkpoint with smaller micro-batches and as "
        "many more of them, then with `gradient_checkpointing`; or end.",
    )

    revision: str | None = Field(
        default=None, min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]*$",
        description="Branch, tag or commit of a hub model.",
    )  # fmt: skip
    report_to: list[Literal["wandb", "mlflow", "tensorboard"]] = Field(
        default_factory=list, max_length=3, description="Experiment trackers that get the metrics too."
    )
    push_to_hub: str | None = Field(
        default=None, max_length=193, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}$",
        description="Hub name (`owner/name`) that the output is pushed to, privately if it is new.",
    )  # fmt: skip
    dpo: DpoOptions = Field(default_factory=DpoOptions, description="Options of method `dpo`.")
    rlhf: RlhfOptions = Field(default_factory=RlhfOptions, description="Options of method `rlhf`.")
    extra: dict[str, Any] = Field(
        default_factory=dict, description="Further options of the trainer; an unknown one is an error."
    )

    @property
    def trainer_options(self) -> TrainerOptions:
        """`extra`, checked and with every default; raises ValidationError where it holds something else."""
        return TrainerOptions.model_validate(self.extra)
