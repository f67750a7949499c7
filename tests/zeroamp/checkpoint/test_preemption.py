"""`Preemption`: a signal that one rank gets is known to all ranks at the same call."""

import os
import signal

import torch.distributed as dist

import zeroamp
from tests.processes.training import config, wrapped


def _one_rank_is_told():
    model = wrapped("llama_tied", config(3))
    before = signal.getsignal(signal.SIGTERM)
    with zeroamp.Preemption(model) as preemption:
        answers = [preemption.is_requested()]
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        answers += [preemption.is_requested(), preemption.is_requested()]
    return answers, signal.getsignal(signal.SIGTERM) == before


def test_all_ranks_learn_of_a_signal_of_one(ranks2):
    assert ranks2.run(_one_rank_is_told) == [([False, True, True], True)] * 2


def _another_signal():
    model = wrapped("llama_tied", config(3))
    with zeroamp.Preemption(model, [signal.SIGUSR1]) as preemption:
        os.kill(os.getpid(), signal.SIGUSR1)
        return preemption.is_requested()


def test_the_signal_can_be_chosen(ranks2):
    assert ranks2.run(_another_signal) == [True] * 2
