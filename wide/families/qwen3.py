"""Qwen3 (dense): a norm on every query and key head, and an explicit head size that need not be D / H."""

from transformers import Qwen3Config

from wide.families import Layout

LAYOUT = Layout()


def tiny_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=199,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        use_sliding_window=False,
        bos_token_id=1,
        eos_token_id=2,
    )
