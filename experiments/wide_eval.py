"""Console script `wide-eval`: lm-evaluation-harness's command line with our models and packaged tasks known to it.

`wide-eval run --model_args wide=CHECKPOINT,sparsity=0.5 --tasks sotu_cloze,arc_easy`; `--model wide-engine` answers
by the engine, which really skips, instead of the reference path.
"""

import sys

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor

from wide.engine import from_routed
from wide.evaluation.accuracy import TASKS
from wide.evaluation.lm_eval import WideLM


@register_model("wide-engine")
class EngineLM(WideLM):
    """`wide` with every forward and generation by the engine; the sparsity still comes from the reference path."""

    def __init__(self, *args, **arguments):
        super().__init__(*args, **arguments)
        self.engine = from_routed(self.routed, routing=not self.bypass, stop_tokens=(self.eot_token_id,))

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        return self.engine(inps)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings) -> Tensor:
        if settings.get("do_sample") or settings.get("temperature"):
            raise ValueError(f"wide-engine generates greedily, the task asks for {settings}; use --model wide")
        stopped = stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0])
        mask, new_tokens = settings["attention_mask"], max_length - context.shape[1]
        for token in self.engine.stream(context, mask, max_new_tokens=new_tokens):
            context = torch.cat([context, token[:, None]], dim=1)
            if bool(torch.as_tensor(stopped(context, None)).all()):
                break
        return context


def main() -> None:
    """The harness's command line; `--model wide` and the packaged tasks unless others are named."""
    sys.argv[1:] = with_defaults(sys.argv[1:])
    cli_evaluate()


def with_defaults(arguments: list[str]) -> list[str]:
    """The arguments with what a command of the harness needs to know of us, where the user did not say it."""
    if arguments and arguments[0].startswith("--") and arguments[0] != "--help":
        arguments = ["run", *arguments]
    ours = {"run": {"--model": "wide", "--include_path": str(TASKS)}, "ls": {"--include_path": str(TASKS)}}
    for option, value in ours.get(arguments[0] if arguments else "", {}).items():
        if not any(argument.split("=")[0] == option for argument in arguments):
            arguments = [*arguments, option, value]
    return arguments


if __name__ == "__main__":
    main()
