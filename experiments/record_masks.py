"""Keep masks of a routed model over a text, in the file that `python -m wide_kernels.bench --masks` reads.

`python -m experiments.record_masks RUN --text FILE --out FILE.safetensors`. The reference path decides; the text is
cut into sequences of --length tokens, each seen alone. The file holds "attention" and "ffn", bool [layers, tokens,
groups], True = the group runs.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from wide.base_model import load_tokenizer
from wide.checkpoint import from_pretrained, read_config, stored_base
from wide.model import RoutedModel
from wide.routing import KINDS


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.record_masks", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder or checkpoint folder")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--out", type=Path, required=True, help="file.safetensors")
    parser.add_argument("--tokens", type=int, default=8192, help="at most this many tokens of the text")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--sparsity", type=float, default=None, help="total sparsity to dial to")
    parser.add_argument("--layers", type=int, nargs="+", default=None, help="only these; all where left out")
    options = parser.parse_args(arguments)
    if options.out.suffix != ".safetensors":
        parser.error(f"--out must end in .safetensors, got {options.out}")
    checkpoint = options.run / "checkpoint" if (options.run / "checkpoint").is_dir() else options.run
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    routed = from_pretrained(checkpoint, sparsity=options.sparsity, device=device)
    tokenizer = load_tokenizer(stored_base(checkpoint, read_config(checkpoint)))
    ids = tokenizer(options.text.read_text(), return_tensors="pt")["input_ids"][0, : options.tokens].to(device)
    masks = record(routed, ids, options.length, options.layers)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(masks, options.out)
    shares = {kind: round(mask.float().mean().item(), 4) for kind, mask in masks.items()}
    shapes = {kind: list(mask.shape) for kind, mask in masks.items()}
    print(json.dumps({"file": str(options.out), "shapes": shapes, "kept": shares}))


@torch.no_grad()
def record(routed: RoutedModel, ids: Tensor, length: int, layers: list[int] | None = None) -> dict[str, Tensor]:
    """Masks bool[layers, T, groups] by kind on the CPU, for `ids` [T] in sequences of `length` tokens.

    Raises:
        ValueError: no tokens, or a layer that the model does not have.
    """
    num_layers = routed.geometry.num_layers
    if not len(ids):
        raise ValueError("the text has no tokens")
    if layers is not None and not all(0 <= layer < num_layers for layer in layers):
        raise ValueError(f"layers must be in 0..{num_layers - 1}, got {layers}")
    routed.gates.step.noise = None
    parts: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for sequence in ids.split(length):
        routed.hidden_states(input_ids=sequence[None])
        for kind in KINDS:
            gates = routed.last_gates(kind)[:, 0]
            parts[kind].append((gates if layers is None else gates[layers]).bool().cpu())
    return {kind: torch.cat(sequences, dim=1).contiguous() for kind, sequences in parts.items()}


if __name__ == "__main__":
    main()
