"""Tests and campaigns; services that they start offer the backend that simulates training."""

import os

os.environ["ANNEAL_FAKE_BACKEND"] = "true"
