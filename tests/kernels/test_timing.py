"""The two ways of timing, on a pretended device whose clock falls after a while of work and recovers at rest."""

import os
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

from wide_kernels import timing

BOOST_MS, REST_MS = 150.0, 1.0
"""The pretended card halves its speed once it has worked this long, and is fresh again after this long a rest."""


class Device:
    """A queue of work with a time line of its own: `replay` runs for `ms` at full speed, twice that when tired."""

    def __init__(self):
        self.now, self.busy, self.ran, self.waits = 0.0, 0.0, [], 0

    def capture(self, calls):
        return SimpleNamespace(replay=lambda: self.run(calls[0], len(calls)))

    def run(self, work, count):
        name, ms = work
        for _ in range(count):
            taken = ms if self.busy < BOOST_MS else 2 * ms
            self.now, self.busy = self.now + taken, self.busy + taken
        self.ran.append((name, self.now))

    def event(self, enable_timing):
        return Event(self)

    def wait(self):
        self.now, self.busy, self.waits = self.now + REST_MS, 0.0, self.waits + 1


class Event:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self):
        self.at = self.device.now

    def query(self):
        return True

    def synchronize(self):
        self.device.wait()

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(timing, "_capture", made.capture)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(timing, "sm_clock", lambda: 1980 if made.busy < BOOST_MS else 990)
    return made


VARIANTS = {"dense": [("dense", 2.0)] * 2, "ours": [("ours", 1.25)] * 3}


def test_short_clocks_are_those_of_a_card_at_rest(device):
    assert timing.measure_at("short", VARIANTS) == ({"dense": 2.0, "ours": 1.25}, 1980)


def test_sustained_clocks_are_those_of_a_tired_card_for_every_variant(device):
    times, clock = timing.measure_at("sustained", VARIANTS)
    assert times == {"dense": 4.0, "ours": 2.5} and clock == 990
    assert device.waits == 2  # one replay of each to size the blocks; none after that


def test_sustained_work_alternates_in_blocks_of_equal_length_after_a_warm_up(device):
    timing.measure_sustained(VARIANTS)
    runs = [(name, len(list(replays))) for name, replays in groupby(name for name, _ in device.ran[2:])]
    assert [name for name, _ in runs] == ["dense", "ours"] * (len(runs) // 2) + ["dense"] * (len(runs) % 2)
    # about 10 ms each: two replays of 2 x 2 ms, three of 3 x 1.25 ms; turned about, so that two blocks meet
    assert runs[0] == ("dense", 2) and set(runs[1:-1]) == {("ours", 6), ("dense", 4)}
    assert device.now - device.ran[1][1] > timing.WARM_MS + timing.BLOCK_MS * timing.NUM_BLOCKS * len(VARIANTS)


def test_the_clock_is_null_where_nothing_tells_it(monkeypatch):
    def no_bindings():
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "clock_rate", no_bindings)
    monkeypatch.setattr(timing.shutil, "which", lambda name: None)
    assert timing.sm_clock() is None
    monkeypatch.setattr(timing.shutil, "which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="1-2"))
    seen = []

    def answer(command, **_):
        seen.append(command[-1])
        return SimpleNamespace(stdout=replies.pop(0))

    replies = ["1755\n", "[N/A]\n"]
    monkeypatch.setattr(timing.subprocess, "run", answer)
    assert [timing.sm_clock(), timing.sm_clock()] == [1755, None] and seen == ["GPU-1-2"] * 2
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda: 1980)
    assert timing.sm_clock() == 1980
