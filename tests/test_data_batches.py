"""The DataModule: order, ranks, resume, held-out batches, and attention kept inside documents."""

from collections import Counter
from pathlib import Path

import lightning
import pytest
import torch
import transformers
from data_text import byte_tokenizer, files_config, write_texts
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from wide.data.batches import (
    IGNORED_LABEL,
    EvalBatches,
    StepBatches,
    StepOrder,
    check_boundaries,
    forward_inputs,
    make_batch,
    positions_within,
)
from wide.data.module import CalibrationData

END = 2


def calibration_data(folder: Path, **options: object) -> CalibrationData:
    cfg_keys = ("document_boundaries", "block_size", "max_train_blocks", "max_eval_blocks")
    cfg = files_config(write_texts(folder / "text"), **{k: options.pop(k) for k in cfg_keys if k in options})
    defaults = {"steps": 8, "batch_size": 4, "seed": 17, "cache_root": folder / "cache"}
    return CalibrationData(cfg, byte_tokenizer(), **defaults | options)


def rank_batches(data: CalibrationData, rank: int, world_size: int) -> StepBatches:
    order = StepOrder(len(data.train_blocks), data.batch_size, data.seed)
    return StepBatches(data.train_blocks, order, data.steps, rank, world_size, lambda: 0, data.cfg.document_boundaries)


def test_every_epoch_visits_every_block_once_in_another_order() -> None:
    order = StepOrder(num_blocks=10, batch_size=4, seed=3)
    stream = [b for step in range(5) for b in order.blocks(step)]
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))
    assert stream[:10] != stream[10:] and stream[:10] != list(range(10))
    assert order.blocks(2) == stream[8:12], "a batch may straddle two epochs"
    assert [StepOrder(10, 4, 3).blocks(s) for s in range(5)] == [order.blocks(s) for s in range(5)]
    assert [StepOrder(10, 4, 4).blocks(s) for s in range(5)] != [order.blocks(s) for s in range(5)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_shares_of_all_ranks_are_the_batch_of_one(tmp_path: Path, world_size: int) -> None:
    data = calibration_data(tmp_path, document_boundaries=True)
    alone = list(data.train_dataloader())
    shares = [list(rank_batches(data, rank, world_size)) for rank in range(world_size)]
    assert len(alone) == data.steps
    for step, whole in enumerate(alone):
        for rank in range(world_size):
            share = shares[rank][step]
            assert share["sample_positions"].tolist() == list(range(rank, 4, world_size))
            for key, value in share.items():
                assert torch.equal(value, whole[key][rank::world_size]), key


def test_a_batch_that_ranks_cannot_share_evenly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stage.batch_size=4 must be a multiple of the 3 ranks"):
        rank_batches(calibration_data(tmp_path), 0, 3)


def test_fewer_blocks_than_one_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gives 3 training blocks of 32 tokens, fewer than stage.batch_size=4"):
        calibration_data(tmp_path, max_train_blocks=3).setup()


@pytest.mark.parametrize(("num_blocks", "world_size", "rows"), [(21, 2, 4), (21, 1, 4), (3, 4, 2), (8, 2, 4)])
def test_held_out_blocks_count_once_and_ranks_step_together(
    tmp_path: Path, num_blocks: int, world_size: int, rows: int
) -> None:
    blocks = calibration_data(tmp_path, block_size=16).eval_blocks
    loaders = [EvalBatches(blocks, num_blocks, rows, rank, world_size, False) for rank in range(world_size)]
    batches = [list(loader) for loader in loaders]
    assert {len(b) for b in batches} == {len(loaders[0])}
    counted: Counter[int] = Counter()
    for batch in (b for rank in batches for b in rank):
        counted.update(batch["sample_positions"][batch["counted"]].tolist())
        assert torch.equal(batch["labels"][batch["counted"]], batch["input_ids"][batch["counted"]])
        assert (batch["labels"][~batch["counted"]] == IGNORED_LABEL).all()
        for row, position in zip(batch["input_ids"], batch["sample_positions"].tolist(), strict=True):
            assert row.tolist() == blocks[[min(position, num_blocks - 1)]][0][0].tolist()
    assert counted == Counter(range(num_blocks))


def test_val_blocks_takes_the_first(tmp_path: Path) -> None:
    data = calibration_data(tmp_path, val_blocks=6)
    found = torch.cat([b["input_ids"] for b in data.val_dataloader()])
    assert torch.equal(found, torch.from_numpy(data.eval_blocks[:6][0]).long())


class Recorder(lightning.LightningModule):
    """Trains one number and remembers which blocks it saw."""

    def __init__(self, look_ahead: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.look_ahead = look_ahead
        self.seen: list[tuple[int, list[list[int]]]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append((self.global_step, batch["input_ids"].tolist()))
        return (self.weight - batch["input_ids"].float().mean()) ** 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.look_ahead:  # builds the loaders before a checkpoint's step is restored
            assert self.trainer.estimated_stepping_batches == 8
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(data: CalibrationData, folder: Path, max_steps: int, resume: str | None, look_ahead: bool) -> Recorder:
    module = Recorder(look_ahead)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = lightning.Trainer(
        default_root_dir=folder, max_steps=max_steps, enable_checkpointing=False, limit_val_batches=0, **quiet
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_sees_what_the_straight_run_saw(tmp_path: Path, look_ahead: bool) -> None:
    """29 samples an epoch and 4 a step: the stop falls inside an epoch, the rest crosses into the next."""

    def data() -> CalibrationData:
        return calibration_data(tmp_path, max_train_blocks=29)

    straight = fit(data(), tmp_path, 8, None, look_ahead)
    first = fit(data(), tmp_path, 3, None, False)
    second = fit(data(), tmp_path, 8, str(tmp_path / "last.ckpt"), look_ahead)
    assert [step for step, _ in straight.seen] == list(range(8))
    assert first.seen + second.seen == straight.seen
    assert torch.equal(second.weight, straight.weight)


@pytest.mark.parametrize("change", [{"seed": 18}, {"batch_size": 2}, {"block_size": 16}])
def test_resuming_on_another_stream_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    state = calibration_data(tmp_path).state_dict()
    calibration_data(tmp_path, steps=20).load_state_dict(state)
    with pytest.raises(ValueError, match="cannot resume on other data"):
        calibration_data(tmp_path, **change).load_state_dict(state)


def test_positions_restart_with_each_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 2, 2], [5, 6, 6, 6, 6, 7]])
    assert positions_within(documents).tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 0]]


def test_labels_are_ignored_by_place_never_by_identity(tmp_path: Path) -> None:
    blocks = calibration_data(tmp_path).train_blocks
    plain, bounded = (make_batch(blocks, range(len(blocks)), flag) for flag in (False, True))
    assert torch.equal(plain["labels"], plain["input_ids"])
    starts = torch.ones_like(plain["input_ids"], dtype=torch.bool)
    starts[:, 1:] = plain["input_ids"][:, :-1] == END
    assert torch.equal(bounded["labels"] == IGNORED_LABEL, starts)
    ends = (plain["input_ids"] == END) & ~starts
    assert ends.sum() > 10
    assert (bounded["labels"][ends] == END).all()


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_packed_documents_get_the_logits_they_get_alone(tmp_path: Path, attn: str, family: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attn_implementation=attn,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    blocks = calibration_data(tmp_path, block_size=256, document_boundaries=True).train_blocks
    batch = make_batch(blocks, [0, 1, 2], True)
    with torch.no_grad():
        packed = model(**forward_inputs(batch)).logits
        joined = model(input_ids=batch["input_ids"], use_cache=False).logits
        pieces = 0
        for row, documents in enumerate(batch["document_ids"]):
            for document in documents.unique().tolist():
                inside = documents == document
                alone = model(input_ids=batch["input_ids"][row, inside][None], use_cache=False).logits[0]
                torch.testing.assert_close(packed[row, inside], alone, atol=1e-5, rtol=1e-5)
                pieces += 1
    assert pieces >= 6
    assert (packed - joined).abs().max() > 1e-2, "without boundaries the texts do see each other"


def test_a_cache_in_the_call_would_join_the_documents(tmp_path: Path) -> None:
    """Why `forward_inputs` has none: with a cache the stock model ignores that positions restart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    batch = make_batch(calibration_data(tmp_path, block_size=256).train_blocks, [0], True)
    inputs = forward_inputs(batch)
    with torch.no_grad():
        apart, joined = (model(**inputs | {"use_cache": flag}).logits for flag in (False, True))
    assert (apart - joined).abs().max() > 1e-2


def test_boundaries_that_flash_attention_would_ignore_are_refused() -> None:
    check_boundaries(True, "flash_attention_2", 1)
    check_boundaries(True, "sdpa", 4)
    check_boundaries(False, "flash_attention_2", 4)
    with pytest.raises(ValueError, match=r"needs stage.micro_batch_size=1, got 4; or use sdpa"):
        check_boundaries(True, "flash_attention_2", 4)
