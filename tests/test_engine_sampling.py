"""Sampling of the engine: the distribution by hand, seeds, and the two ends that must be greedy."""

import pytest
import torch
from tiny import routed, tokens

from wide.engine import from_routed
from wide.engine.sampling import Sampling

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 2}, [0.625, 0.375, 0.0, 0.0]),
        ({"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_p": 0.5}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_p": 0.6}, [0.625, 0.375, 0.0, 0.0]),
        ({"top_p": 1.0}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 3, "top_p": 0.9}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]),
        ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ],
)
def test_probabilities_by_hand(options, expected):
    sampling = Sampling(**{"temperature": 1.0} | options)
    torch.testing.assert_close(sampling.probabilities(LOGITS), torch.tensor([expected]))


def test_samples_follow_the_probabilities():
    generator = torch.Generator().manual_seed(0)
    drawn = Sampling(1.0, top_k=3).pick(LOGITS.expand(20_000, -1), generator)
    shares = torch.bincount(drawn, minlength=4) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95, atol=0.02, rtol=0)


def test_seeds_decide_and_a_single_candidate_is_greedy():
    engine = from_routed(routed("llama"))
    ids = tokens(2, 9)
    settings = {"max_new_tokens": 16, "stop_tokens": (), "temperature": 1.5}
    one, again, other = (engine.generate(ids, seed=seed, **settings) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    greedy = engine.generate(ids, max_new_tokens=16, stop_tokens=())
    assert torch.equal(engine.generate(ids, top_k=1, seed=3, **settings), greedy)
    assert not torch.equal(one, greedy)
