"""The jobs of the SmolLM2 grid, most important first: what `experiments.grid` runs and the tables then show.

Groups: `rivals`, every other method at 25 and 50%; `grid`, both recipes of WIDE at 25, 50 and 70%; `granularity`, their
group sizes; `recovered`, LoRA after methods without training; `long`, calibration carried on; `search`, recipes looked
for. Every job is a command line of `run.py`. A run reports on its own setting and, by its dial, on the same share of
decisions and of parameters, so that one training fills both cells.
"""

from collections.abc import Iterator
from dataclasses import dataclass

SEEDS = (17, 18, 19)
STEPS = 300
UNTRAINED = (
    *("random", "wanda_sp", "flap", "flap_cost", "flap_channels", "cats", "teal", "cats_oracle"),
    *("shortgpt", "shortened_taylor", "shortened_ppl", "sleb", "blockpruner", "blockpruner_cost"),
)
TRAINED = ("ddp", "skipgpt", "skipgpt_matched", "skipgpt_paper", "dllm")
JOINT = ("dllm_joint", "mod_d_joint")
"""Router and LoRA together: no stage after it."""
RECOVERED = ("wanda_sp", "flap", "flap_cost", "cats", "teal", "shortened_ppl", "shortened_taylor", "blockpruner")
SIZES = ((3, 32), (3, 64), (3, 256), (3, 512), (1, 128), (9, 128))
"""Heads and channels per group, beside 3 and 128."""
SEARCH: dict[str, list[tuple[str, ...]]] = {
    "skipgpt": [
        ("stage.learning_rate=5e-4",),
        ("stage.learning_rate=8e-3",),
        ("method.router=mlp",),
        ("method.init_gap=4.0", "method.ramp_ratio=0.5"),
        ("method.router_norm=true", "method.init_gap=4.0", "method.ramp_ratio=0.5"),
        ("method.distill_weight=0.5",),
    ],
    "ddp": [
        ("stage.learning_rate=1e-2",),
        ("stage.learning_rate=5e-2",),
        ("method.linear_rate=0.02", "method.square_rate=0.4", "method.binary_rate=0.02"),
        ("method.linear_rate=0.2", "method.square_rate=4.0", "method.binary_rate=0.2"),
        ("method.distill_weight=0.0",),
        ("method.budget_price=cost",),
    ],
    "dllm": [
        ("method.budget_weight=20.0",),
        ("method.dial=global",),
        ("method.dense_layers=0",),
        ("stage.learning_rate=8e-3",),
    ],
    "flap": [("method.blocks=16",), ("method.blocks=256",), ("method.compensation=false",), ("method.spread=layer",)],
    "blockpruner": [("method.blocks=8",), ("method.blocks=64",)],
    "cats": [("method.spread=global",), ("method.blocks=64",)],
}
"""Departures from a rival's recipe that are tried at 50%, one at a time, as the ablation did for WIDE."""


@dataclass(frozen=True)
class Job:
    """`overrides` of `run.py`; `steps` of training in all, 0 for a method without any."""

    name: str
    group: str
    steps: int
    overrides: tuple[str, ...]


def all_jobs() -> list[Job]:
    """Every job, in the order in which they are worth running."""
    first, *further = SEEDS
    jobs = [job for percent in (50, 25) for job in _trained(percent, first)]
    jobs += [_rival(name, percent, first) for percent in (50, 25) for name in UNTRAINED]
    jobs += _wide(70, first)
    jobs += [_rival("random", percent, seed) for percent in (50, 25) for seed in further]
    jobs += [job for percent in (50, 25) for seed in further for job in _trained(percent, seed)]
    jobs += [job for seed in further for job in _wide(70, seed)]
    jobs += [_size(recipe, *sizes) for sizes in SIZES for recipe in ("", "_paper")]
    jobs += [_rival(name, percent, first, lora=True) for percent in (50, 25) for name in RECOVERED]
    jobs += [_longer(name, steps) for name in ("skipgpt", "skipgpt_matched", "ddp") for steps in (1000, 3000)]
    return [*jobs, *_search()]


def _trained(percent: int, seed: int) -> Iterator[Job]:
    yield from _wide(percent, seed)
    for name in (*TRAINED, *JOINT):
        yield _rival(name, percent, seed, lora=name in TRAINED)


def _wide(percent: int, seed: int) -> list[Job]:
    """Both recipes, with LoRA after them."""
    settings = (f"eval.at_mean=[{percent / 100}]", f"eval.at_cost=[{percent / 100}]")
    return [
        _job(f"smollm2_s{percent}{recipe}", "grid", 2 * STEPS, seed, "recovery=lora_gpu", *settings)
        for recipe in ("", "_paper")
    ]


def _rival(name: str, percent: int, seed: int, lora: bool = False) -> Job:
    steps = STEPS if name in (*TRAINED, *JOINT) else 0
    group = "recovered" if lora and not steps else "rivals"
    more = ("recovery=lora_gpu",) if lora else ()
    return _job(f"rivals_smollm2_{name}_s{percent}", group, steps + STEPS * lora, seed, *more)


def _size(recipe: str, heads: int, channels: int) -> Job:
    sizes = (f"method.attn_group_size={heads}", f"method.ffn_group_size={channels}")
    settings = ("eval.at_mean=[0.5]", "eval.at_cost=[0.5]")
    return _job(f"smollm2_s50{recipe}", "granularity", STEPS, SEEDS[0], *sizes, *settings)


def _longer(name: str, steps: int) -> Job:
    return _job(f"rivals_smollm2_{name}_s50", "long", steps, SEEDS[0], f"stage.steps={steps}")


def _search() -> Iterator[Job]:
    for name, trials in SEARCH.items():
        for number, changes in enumerate(trials):
            experiment = f"rivals_smollm2_{name}_s50"
            steps = STEPS if name in TRAINED else 0
            yield _job(experiment, "search", steps, SEEDS[0], f"experiment_name=search_{name}_{number}", *changes)


def _job(experiment: str, group: str, steps: int, seed: int, *more: str) -> Job:
    marks = [part.split("=", 1)[1] for part in more if part.startswith(("method.", "stage.", "recovery="))]
    overrides = (f"+experiment={experiment}", "eval=grid", f"seed={seed}", *more)
    return Job("-".join([experiment, str(seed), *marks]), group, steps, overrides)
