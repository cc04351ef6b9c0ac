"""Offline tasks for lm-evaluation-harness: a YAML and a JSONL file each, made by `experiments.make_tasks`."""
