"""A static checkpoint as a smaller transformers model: exported, compared, weighed and timed; one JSON row.

`python -m experiments.export_bench RUN [--folder FOLDER] [--rows FILE]`. The exported model must equal the masked one
before anything is timed. Speed is that of transformers' own code over the stock model, alternating, medians; the rows
in `experiments/results/exports` fill the table `exports`.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from wide.adapter import merge
from wide.base_model import load_base
from wide.checkpoint import from_pretrained, read_config, stored_base
from wide.export import Shape, export_static
from wide.results import append_row, environment_report

TOLERANCE = 1e-5
"""Largest difference of a log-probability, in float64: a model cut hard amplifies the rounding of float32."""
TOKENS, NEW_TOKENS, REPEATS = 512, 16, 5


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.export_bench", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder or checkpoint folder of a static method")
    parser.add_argument("--folder", type=Path, help="where the exported model stays; left out: it is thrown away")
    parser.add_argument("--rows", type=Path, default=Path("outputs/exports.jsonl"), help="file the row is appended to")
    options = parser.parse_args(arguments)
    checkpoint = options.run / "checkpoint" if (options.run / "checkpoint").is_dir() else options.run
    with tempfile.TemporaryDirectory() as place:
        row = measure(checkpoint, options.folder or Path(place) / "export", Path(place) / "stock")
    row |= {"command": f"python -m experiments.export_bench {options.run}", "run_command": run_command(options.run)}
    append_row(options.rows, row)
    print(json.dumps(row))


def run_command(run: Path) -> str | None:
    """The command of the run whose checkpoint it is, where its row lies beside it."""
    path = run / "row.jsonl"
    return json.loads(path.read_text().splitlines()[-1])["command"] if path.is_file() else None


def measure(checkpoint: Path, folder: Path, stock_folder: Path) -> dict:
    """The row; float32 throughout, on the GPU where there is one.

    Raises:
        RuntimeError: the exported model is not the masked one.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = read_config(checkpoint)
    routed = from_pretrained(checkpoint, device=device)
    routed = routed if routed.model is routed.base else merge(routed)
    set_dtype(routed.base, torch.float32)
    shape = export_static(routed, folder)
    exported = AutoModelForCausalLM.from_pretrained(folder).eval()
    nn.Module.to(exported, device)
    ids = torch.randint(3, exported.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(5))
    ids = ids.to(device)
    difference = largest_difference(routed, exported, ids)
    if not difference <= TOLERANCE:
        raise RuntimeError(f"the exported model is {difference:.1e} away from the masked one (limit {TOLERANCE:.0e})")
    stock = load_base(stored_base(checkpoint, config), device)
    set_dtype(stock, torch.float32)
    stock_folder.mkdir()
    save_model(
        stock, str(stock_folder / "model.safetensors")
    )  # transformers refuses to save what came from a GGUF file
    environment = environment_report()
    return {
        "experiment": config["recipe"].get("experiment_name"),
        "method": config["method"],
        "skipped": {key: config["metrics"].get(key) for key in ("sparsity_total", "skipped_params", "skipped_kv")},
        "difference": difference,
        "shape": describe(shape),
        "megabytes": weigh(folder),
        "stock_megabytes": weigh(stock_folder),
        **timings(stock, exported, ids),
        **{key: environment[key] for key in ("device", "num_threads", "versions", "git_revision")},
    }


@torch.no_grad()
def largest_difference(routed: torch.nn.Module, exported: PreTrainedModel, ids: Tensor) -> float:
    """Between the two models' log-probabilities of every next token, in float64; both are float32 again after it."""
    for model in (routed, exported):
        set_dtype(model, torch.float64)
    logs = [model(input_ids=ids).logits.double().log_softmax(-1) for model in (routed, exported)]
    for model in (routed, exported):
        set_dtype(model, torch.float32)
    return float((logs[0] - logs[1]).abs().max())


def set_dtype(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Tensor by tensor: transformers refuses to cast what came from a GGUF file."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def describe(shape: Shape) -> dict:
    sizes = {"layers": len(shape.layers), "kv_heads": shape.kv_heads, "heads_per_kv": shape.heads_per_kv}
    padded = {kind: len(layers) for kind, layers in shape.padded.items()}
    return sizes | {"channels": shape.channels, "padded_layers": padded}


def weigh(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6


@torch.inference_mode()
def timings(stock: PreTrainedModel, exported: PreTrainedModel, ids: Tensor) -> dict[str, float]:
    """Median milliseconds of a prefill of TOKENS, and of a token among NEW_TOKENS after 16; the models take turns."""
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    prompt = {"input_ids": ids[:, :16], "attention_mask": torch.ones_like(ids[:, :16])}
    tasks: dict[str, Callable[[PreTrainedModel], object]] = {
        "prefill": lambda model: model(input_ids=ids, logits_to_keep=1),
        "decode": lambda model: cast(GenerationMixin, model).generate(**prompt, **settings),
    }
    found: dict[str, float] = {}
    for name, task in tasks.items():
        times: dict[str, list[float]] = {"stock": [], "exported": []}
        for repeat in range(REPEATS + 1):
            for label, model in (("stock", stock), ("exported", exported)):
                elapsed = clock(partial(task, model), ids.device)
                if repeat:  # the first warms up
                    times[label].append(elapsed / (NEW_TOKENS if name == "decode" else 1))
        medians = {label: statistics.median(values) for label, values in times.items()}
        found |= {f"{label}_{name}_ms": value for label, value in medians.items()}
        found[f"{name}_speedup"] = medians["stock"] / medians["exported"]
    return found


def clock(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds, the device idle before and after."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
