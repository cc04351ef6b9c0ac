"""The dial's table and picture: what one run reported along its dial beside runs trained at their own sparsity."""

import pytest
from test_conf import hydra_conf  # noqa: F401
from test_tables import cell, write_rows

from experiments.figures import dial_runs
from experiments.tables.dial import build
from experiments.tables.rows import load

DIALLED, DEDICATED = "perplexity, dialled", "perplexity, trained there"


@pytest.fixture
def rows(tmp_path):
    places = [{"price": "cost", "asked": a, "routed_perplexity": 100 * a, "skipped_params": a} for a in (0.25, 0.7)]
    places.append({"price": "mean", "asked": 0.25, "routed_perplexity": 1.0, "skipped_params": 0.2})
    own = {"routed_perplexity": 43.0, "skipped_params": 0.5}
    return load(
        write_rows(
            tmp_path,
            (["+experiment=smollm2_dial"], own | {"other_settings": places}),
            (["+experiment=smollm2_s25", "seed=1"], {"routed_perplexity": 30.0, "skipped_params": 0.25}),
            (["+experiment=smollm2_s25", "seed=2"], {"routed_perplexity": 32.0, "skipped_params": 0.25}),
            (["+experiment=smollm2_s25", "method.init_gap=1.0"], {"routed_perplexity": 5.0, "skipped_params": 0.25}),
            (["+experiment=smollm2_s70_paper"], {"routed_perplexity": 6.0, "skipped_params": 0.7}),
        )
    )


@pytest.mark.parametrize(
    ("percent", "column", "value"),
    [("25%", DIALLED, 25.0), ("25%", DEDICATED, 31.0), ("50%", DEDICATED, 43.0), ("70%", DIALLED, 70.0)],
)
def test_cells_hold_their_own_kind_of_run(rows, percent, column, value):
    assert cell(build(rows), "dial", (percent,), column).value == pytest.approx(value)


def test_what_no_run_reported_is_missing(rows):
    tables = build(rows)
    for percent, column in (("10%", DIALLED), ("70%", DEDICATED)):
        assert cell(tables, "dial", (percent,), column).status == "missing"
    assert {c.status for row in build(rows[:0])[0].cells for c in row} == {"missing"}


def test_picture_has_both_kinds(rows, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(dial_runs.plt, "close", drawn.append)
    dial_runs.save(rows, "smollm2", tmp_path / "dial.png")
    (axis,) = drawn[0].axes
    assert [sorted(line.get_xdata()) for line in axis.lines] == [[25.0, 70.0], [25.0, 50.0]]
    assert (tmp_path / "dial.png").read_bytes().startswith(b"\x89PNG")
