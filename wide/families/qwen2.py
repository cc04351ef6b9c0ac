"""Qwen2 and Qwen2.5: as Llama, with biases on the query, key and value projections."""

from transformers import Qwen2Config

from wide.families import Layout

LAYOUT = Layout()


def tiny_config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        use_sliding_window=False,
        bos_token_id=1,
        eos_token_id=2,
    )
