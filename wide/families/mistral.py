"""Mistral: as Llama, with an optional sliding attention window that the stock model applies."""

from transformers import MistralConfig

from wide.families import Layout

LAYOUT = Layout()


def tiny_config() -> MistralConfig:
    return MistralConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=8,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
