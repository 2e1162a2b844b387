"""Tests and campaigns; services that they start offer the backend that simulates training, and record each step."""

import os

os.environ["ANNEAL_FAKE_BACKEND"] = os.environ["ANNEAL_TRAINER_JOURNAL"] = "true"
