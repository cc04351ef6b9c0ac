"""The dispatch table: which rule decides, and how measurements become rules."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"

from wide_kernels._tune_attention import largest_keep, rules_of
from wide_kernels.dispatch import DENSE, Plan, pick
from wide_kernels.tune import rules_of as linear_rules


def rule(operator="gemm_mn", route="skip", first=1, last=100, group=1, weight=0, keep=0.9, config=(1, 2)):
    return {"operator": operator, "route": route, "min_tokens": first, "max_tokens": last, "min_group_size": group,
            "min_weight_size": weight, "max_keep": keep, "config": list(config)}  # fmt: skip


RULES = (rule(group=512, weight=1000, keep=0.6, config=(5,)), rule(group=32, weight=10, keep=0.9, config=(7,)))


@pytest.mark.parametrize(
    ("tokens", "weight", "group", "keep", "expected"),
    [
        (50, 1000, 512, 0.5, Plan("skip", (5,))),
        (50, 1000, 512, 0.7, DENSE),  # more groups than its own rule allows: never a rule for smaller weights
        (50, 1000, 511, 0.7, Plan("skip", (7,))),
        (50, 999, 512, 0.7, Plan("skip", (7,))),
        (101, 1000, 512, 0.5, DENSE),
        (50, 9, 512, 0.5, DENSE),
    ],
)
def test_first_rule_whose_sizes_fit_decides(tokens, weight, group, keep, expected):
    assert pick(RULES, "gemm_mn", tokens, weight, group, keep) == expected
    assert pick(RULES, "gemm_k", tokens, weight, group, keep) == DENSE


def attention(count, half, whole, dense):
    return {"operator": "attention_prefill", "model": "m", "count": count, "width": 64, "head_size": 16,
            "skip_0.5": half, "skip_1.0": whole, "dense_0.5": dense, "dense_1.0": dense}  # fmt: skip


def test_attention_skips_up_to_the_share_where_the_dense_time_is_reached():
    assert largest_keep(attention(1, 1.0, 2.0, 1.53)) == 0.75  # 1 + 2 (keep - 0.5) = 1.53 / 1.02
    assert largest_keep(attention(1, 1.0, 2.0, 3.0)) == 1.0
    assert largest_keep(attention(1, 3.0, 5.0, 1.02)) == 0.0
    small, large = rules_of([attention(64, 3.0, 5.0, 1.02), attention(256, 1.0, 2.0, 1.53)])
    assert (small["route"], small["min_tokens"], small["max_tokens"], small["max_keep"]) == ("dense", 64, 255, 1.0)
    assert (large["route"], large["max_keep"], large["speedup"]) == ("skip", 0.75, 1.53)
    assert large["max_tokens"] > 10**8
    both = rules_of([attention(256, 1.0, 2.0, 3.0), attention(256, 1.0, 2.0, 1.53)])
    assert [rule["max_keep"] for rule in both] == [0.75]


def test_linear_rules_skip_where_the_margin_is_won_and_say_how_far():
    shape = {"operator": "gemm_mn", "N": 8, "K": 4, "G": 2}
    records = [shape | {"tokens": 256, "route": "skip", "config": [1], "speedup": 1.03},
               shape | {"tokens": 1024, "route": "skip", "config": [2], "speedup": 1.53}]  # fmt: skip
    slow, fast = linear_rules(records)
    assert (slow["route"], slow["max_tokens"]) == ("dense", 1023)
    assert (fast["route"], fast["config"], fast["max_keep"]) == ("skip", [2], 0.75)
