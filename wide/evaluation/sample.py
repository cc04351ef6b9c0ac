"""A text sample of the dense and of the routed model for one prompt, greedy, so that a reader sees the difference."""

import torch
from transformers import PreTrainedTokenizerBase

from wide.model import RoutedModel


@torch.no_grad()
def sample_texts(
    routed: RoutedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, new_tokens: int
) -> dict[str, str]:
    """{"prompt", "dense", "routed"}: continuations of at most `new_tokens` tokens each."""
    device = next(routed.parameters()).device
    routed.gates.step.noise = None
    inputs = {k: v.to(device) for k, v in tokenizer(prompt, return_tensors="pt").items() if k != "token_type_ids"}
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    length = inputs["input_ids"].shape[1]
    with routed.dense():
        dense = routed.generate(**inputs, **settings)
    pruned = routed.generate(**inputs, **settings)
    texts = [str(tokenizer.decode(ids[0, length:], skip_special_tokens=True)) for ids in (dense, pruned)]
    return {"prompt": prompt, "dense": texts[0], "routed": texts[1]}
