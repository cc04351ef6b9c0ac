"""How wide each token of a text ran, layer by layer: what the report colours."""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from wide.model import RoutedModel
from wide.routing import KINDS


@torch.no_grad()
def token_widths(
    routed: RoutedModel, tokenizer: PreTrainedTokenizerBase, input_ids: Tensor, bf16: bool = False
) -> dict:
    """JSON-ready shares of groups that each token ran.

    Args:
        input_ids: one text [T].
        bf16: under bfloat16 autocast, as training was.

    Returns:
        `tokens` [T] strings, `attention` and `ffn` [T][L] shares in 0..1, `attention_weight`: attention's share of the
        prunable parameters, for one figure of both.
    """
    device = next(routed.parameters()).device
    routed.gates.step.noise = None
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        routed.hidden_states(input_ids=input_ids[None].to(device))
    shares = {kind: routed.last_gates(kind)[:, 0].float().mean(-1).T.cpu() for kind in KINDS}  # [T, L]
    rounded = {kind: [[round(float(x), 3) for x in row] for row in rows] for kind, rows in shares.items()}
    tokens = [tokenizer.decode([int(token)]) for token in input_ids]
    return {"tokens": tokens, **rounded, "attention_weight": routed.cost(length=1).attention_weight}
