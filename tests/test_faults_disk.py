"""A full or closed disk at every write path: the old file stays whole, nothing is left beside it, the error says so."""

import errno
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from data_text import byte_tokenizer, files_config, write_texts
from full_disk import full_disk
from safetensors.torch import load_file
from test_checkpoint import logits, save, trained
from test_cli import composed
from training import build_module, fit, tiny_run_config

from experiments.evaluate import write_report
from experiments.job import claim_folder, execute_part, leave_failed, prepare
from experiments.mistakes import explain
from wide import checkpoint, results
from wide.data.blocks import open_blocks
from wide.records import write_json, write_whole
from wide.resume import WholeCheckpoints

ROW = {"run_id": "a", "text": "x" * 3000}


def is_full(error: BaseException) -> bool:
    """A full disk, whichever library met it first."""
    return isinstance(error, OSError) and (error.errno == errno.EFBIG or "File too large" in str(error))


@pytest.mark.parametrize("room", (0, 1, 1500, 3000))
def test_a_row_that_does_not_fit_leaves_the_rows_before_it(tmp_path, room):
    path = tmp_path / "rows.jsonl"
    results.append_row(path, ROW)
    before = path.read_bytes()
    with pytest.raises(OSError) as caught, full_disk(len(before) + room):
        results.append_row(path, ROW | {"run_id": "b"})
    assert is_full(caught.value) and path.read_bytes() == before
    results.append_row(path, ROW | {"run_id": "c"})
    assert list(results.read_rows(path).run_id) == ["a", "c"]


@pytest.mark.parametrize("room", (0, 100, 2000, 6000))
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path, room):
    """From the first byte of the tensors to the last of the JSON, on disk and not by a stand-in."""
    expected = logits(save(tmp_path / "c"))
    with pytest.raises(OSError) as caught, full_disk(room):
        save(tmp_path / "c", trained())
    assert is_full(caught.value)
    assert torch.equal(logits(checkpoint.from_pretrained(tmp_path / "c")), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_the_json_of_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path):
    model = save(tmp_path / "c")
    room = (tmp_path / "c" / "routers.safetensors").stat().st_size
    with pytest.raises(OSError) as caught, full_disk(room):
        save(tmp_path / "c", model, recipe={"text": "x" * room})
    assert is_full(caught.value)
    assert checkpoint.read_config(tmp_path / "c")["recipe"] == {}


@pytest.mark.parametrize("room", (0, 1000, 20_000))
def test_resumable_state_that_does_not_fit_leaves_the_state_before(tmp_path, room):
    path = tmp_path / "checkpoints" / "last.ckpt"
    state = {"state_dict": {"a": torch.ones(10_000)}, "history": [], "global_step": 1}
    WholeCheckpoints().save_checkpoint(state, path)
    with pytest.raises(OSError) as caught, full_disk(room):
        WholeCheckpoints().save_checkpoint(state | {"global_step": 2}, path)
    assert is_full(caught.value)
    assert WholeCheckpoints().load_checkpoint(path)["global_step"] == 1
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_training_whose_second_save_fails_ends_and_goes_on_from_the_first(tmp_path):
    config = tiny_run_config(tmp_path, {"steps": 6, "batch_size": 4, "save_every": 2})
    path = tmp_path / "checkpoints" / "last.ckpt"
    module = build_module(config)
    step = module.training_step

    with ExitStack() as stack:

        def third_step_fills_the_disk(batch, batch_idx):
            step(batch, batch_idx)
            if module.global_step == 3:
                stack.enter_context(full_disk(1000))

        module.training_step = third_step_fills_the_disk
        with pytest.raises(OSError) as caught:
            fit(config, module)
    assert is_full(caught.value) and WholeCheckpoints().load_checkpoint(path)["global_step"] == 2
    resumed = build_module(config)
    fit(config, resumed, resume=str(path))
    assert len(resumed.history) == 6


@pytest.mark.parametrize("name", ("report.json", "history.json", "environment.json"))
def test_json_of_a_run_that_does_not_fit_leaves_the_file_before(tmp_path, name):
    write_json(tmp_path / name, {"old": 1})
    with pytest.raises(OSError) as caught, full_disk(200):
        value = {"text": "x" * 1000}
        write_report(value, tmp_path) if name == "report.json" else write_json(tmp_path / name, value)
    assert is_full(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert json.loads((tmp_path / name).read_text()) == {"old": 1}


def test_a_file_is_replaced_with_the_rights_of_any_other(tmp_path):
    (tmp_path / "other").write_text("x")
    write_whole(tmp_path / "file", b"x")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("room", (0, 500))
def test_a_token_cache_that_does_not_fit_is_not_there(tmp_path, room):
    cfg, root = files_config(write_texts(tmp_path / "texts")), tmp_path / "cache"
    with pytest.raises(OSError) as caught, full_disk(room):
        open_blocks(cfg, byte_tokenizer(), root)
    assert caught.value.errno == errno.EFBIG or "requested" in str(caught.value)  # numpy's words for it
    assert not list(root.iterdir())
    tokens, _ = open_blocks(cfg, byte_tokenizer(), root).train[:]
    assert tokens.dtype == np.int32 and len(tokens)


def test_a_folder_that_could_not_be_claimed_is_free_again(tmp_path):
    config, _ = prepare(composed(), sweep=False, run_dir=_folder(tmp_path / "first"))
    with pytest.raises(OSError), full_disk(10):
        claim_folder(_folder(tmp_path / "second"), config)
    claim_folder(tmp_path / "second", config)
    assert json.loads((tmp_path / "second" / "config.json").read_text()) == config.to_dict()


def test_the_failure_is_reported_where_its_row_does_not_fit(tmp_path, capsys):
    with full_disk(0):
        leave_failed(str(tmp_path / "rows.jsonl"), tmp_path, {"status": "failed"} | ROW)
    assert "the row of the failure could not be written" in capsys.readouterr().err


def test_a_run_whose_row_fits_only_in_its_own_folder_keeps_it_there(tmp_path):
    config = tiny_run_config(tmp_path, {"steps": 1})
    config.results_file = str(tmp_path / "shared" / "rows.jsonl")
    (tmp_path / "shared").write_text("a file where a folder should be")
    action = type("Action", (), {"run": staticmethod(lambda config: {"routed_perplexity": 5.0})})
    with pytest.raises(OSError) as caught:
        execute_part(config, action, tmp_path, "run")
    assert explain(caught.value) and "\n" not in explain(caught.value)
    first = json.loads((tmp_path / "row.jsonl").read_text().splitlines()[0])
    assert (first["status"], first["routed_perplexity"]) == ("finished", 5.0)


@pytest.mark.parametrize("place", ("folder", "file/rows.jsonl"))
def test_a_results_file_that_cannot_be_written_is_refused_before_the_run(tmp_path, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"results_file=.* cannot be written; legal: the path of a JSONL file"):
        prepare(composed(f"results_file={tmp_path / place}"), sweep=False, run_dir=_folder(tmp_path / "run"))
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("number", (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES))
def test_errors_of_the_system_are_one_line_with_the_file(number):
    line = explain(OSError(number, "the system's words", "outputs/x"))
    assert line == "the system's words: outputs/x; what was saved before is whole"


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_tensors_of_a_checkpoint_on_disk_are_the_whole_ones(tmp_path):
    """The limit above is no accident of small files: with room for all of it the same save succeeds."""
    with full_disk(2**20):
        model = save(tmp_path / "c")
    stored = load_file(tmp_path / "c" / "routers.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.gates.state_dict().items())
