"""Measuring a server from outside, through its OpenAI-compatible API: ``castiron bench serve``."""
