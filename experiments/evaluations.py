"""Further figures for methods that can decide in more than one way (`GateProvider.evaluations`)."""

from experiments.train import held_batches
from wide.data.module import CalibrationData
from wide.evaluation.perplexity import score
from wide.model import RoutedModel
from wide.options import Config


def other_evaluations(config: Config, routed: RoutedModel, data: CalibrationData) -> dict[str, float]:
    """Columns `<way>_routed_perplexity` and `<way>_sparsity_total` of a results row, on the held-out blocks."""
    blocks, row = data.eval_blocks, {}
    for way in routed.gates.evaluations:
        batches = held_batches(blocks, min(config.eval.blocks or len(blocks), len(blocks)), config)
        with routed.gates.evaluated(way):
            result = score(routed, batches, dense=False, bf16=config.trainer.precision != "fp32")
        row[f"{way}_routed_perplexity"] = result.perplexity
        assert result.stats is not None
        row[f"{way}_sparsity_total"] = float(result.stats.total)
    return row
