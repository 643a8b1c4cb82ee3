"""Capture of Hugging Face causal language models by torch.export through transformers' own dispatch points."""

from .api import AttentionLayer, Capture, CaptureReport, capture, capture_config

__all__ = ["AttentionLayer", "Capture", "CaptureReport", "capture", "capture_config"]
