"""What the libraries compute once in a process, computed before trainers are forked from it."""

import contextlib
import functools
import io
import tempfile
import warnings
from pathlib import Path

import datasets
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import imports as accelerate_imports
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from tests.worker.training.tiny import make_tiny_model
from worker.training.data.chat_template import DEFAULT_TEMPLATE


def warm_libraries() -> None:
    """Train a tiny model for a step with plain TRL: compiles patterns and templates, and fills caches of modules.

    This takes a quarter of what a trainer of a tiny model computes. Only the libraries are used, so a trainer finds
    none of our own code prepared, and no thread is left that a fork would lose.
    """
    # Accelerate reads the metadata of PEFT a dozen times in each run, which takes a twentieth of one of a tiny model.
    accelerate_imports._is_package_available = functools.cache(accelerate_imports._is_package_available)
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stdout(io.StringIO()),  # the losses, which TRL prints
    ):
        name = make_tiny_model(Path(folder) / "model")
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "text"}],
            chat_template=DEFAULT_TEMPLATE.format(eos=tokenizer.eos_token),
            tokenize=False,
        )
        options = BitsAndBytesConfig(load_in_4bit=True)
        base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, quantization_config=options)
        trainer = SFTTrainer(
            get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")),
            args=SFTConfig(
                output_dir=str(Path(folder) / "output"),
                per_device_train_batch_size=1,
                max_steps=1,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=datasets.Dataset.from_dict({"input_ids": [[1, 2, 3, 4]]}),
            processing_class=tokenizer,
        )
        trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    transformers.logging.enable_progress_bar()
    datasets.enable_progress_bars()
