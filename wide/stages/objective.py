"""What a stage minimises: the fields that the config of a method with a budget has, and those of a method without."""

from dataclasses import dataclass
from typing import cast

from wide.options import MethodConfig


@dataclass
class LanguageOnly:
    """Objective of a method that asks for no budget (dense and static ones): the next token's cross-entropy.

    The config of every other method has these fields too.
    """

    sparsity: float = 0.0
    ramp_ratio: float = 0.0
    tau_start: float = 1.0
    tau_end: float = 1.0
    budget_weight: float = 0.0
    budget_price: str = "mean"
    budget_scope: str = "micro"
    distill_weight: float = 0.0
    separation_weight: float = 0.0

    def targets(self) -> dict[str, float]:
        return {"total": self.sparsity}


def objective_of(method: MethodConfig | LanguageOnly) -> LanguageOnly:
    """The method's own config where it asks for a budget, else the language loss alone."""
    return cast(LanguageOnly, method) if hasattr(method, "targets") else LanguageOnly()
