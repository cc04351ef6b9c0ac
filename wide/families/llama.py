"""Llama 2, Llama 3.x and SmolLM2: grouped-query attention without biases, rotary scaling left to the stock model."""

from transformers import LlamaConfig

from wide.families import Layout

LAYOUT = Layout()


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
