"""Stands in for vLLM where a test injects faults into the start of engines."""
