"""Capture of Hugging Face causal language models by torch.export, through transformers' dispatch points."""

from .api import Capture, CaptureReport, capture, capture_config
from .layers import AttentionLayer

__all__ = ["AttentionLayer", "Capture", "CaptureReport", "capture", "capture_config"]
